"""The attention layer, from hidden states to the output or, for a shard of the heads, to a partial sum of the output.

Decode uses the absorbed form: the queries are multiplied by the key half of kv_b and attend to the latent cache, and the result is
multiplied by the value half. Prefill uses the decompressed form: kv_b expands latent keys to keys and values of each head. It expands the
new tokens at once and the cached tokens of the requests in chunks; the states of all chunks are merged. Gradients pass through prefill of
new tokens only. Where they do, rotary columns are joined by operations that autograd follows; elsewhere they are written in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple, Self

import torch
from torch.nn.functional import linear, rms_norm

from ..api.tracing import is_dynamo_compiling
from ..cache import gather_kv_cache, insert_kv_cache, write_kv_cache
from ..ops import norm_rope
from ..ops.arguments import needs_grad
from ..ops.limits import page_size_error
from ..ops.tensor_spec import TensorSpec, check_dtype, check_shape, spec_of
from ..spec.dense_prefill_dq import HEAD_DIMS as GRADIENT_HEAD_DIMS
from ..spec.mla import D_QK, MAX_HEADS
from .batch import DecodeRequests, MlaBatch, PrefillRequests
from .config import MlaConfig
from .path import MAX_STATES, AttentionPath, Cache, Packed, attention_path, warn_reference
from .rope import Rotation, frequencies, rotation
from .weights import MlaWeights

_WITHOUT_CACHE = "prefill requests without cached keys, as plan_sequences makes them"


class _Keys(NamedTuple):
    """Keys of some tokens: latent columns [tokens, 512 or 256] and rotary columns [tokens, 64 or 0]."""

    latent: torch.Tensor
    rotary: torch.Tensor


class MlaAttention(torch.nn.Module):
    """Attention of one layer, of all heads or of the heads of one rank.

    weights: bf16 or fp16; fp32 only on the reference path. Parameters hold them, under the names of MlaWeights; they have no gradients
    until requires_grad_() asks for them. state_dict, load_state_dict, to and parameters are those of torch.nn.Module. Raises ValueError if
    the weights hold more than 128 heads.
    """

    q_a: torch.Tensor | None
    q_a_norm: torch.Tensor | None
    q_b: torch.Tensor
    kv_a: torch.Tensor
    kv_a_norm: torch.Tensor
    kv_b: torch.Tensor
    o: torch.Tensor
    q_a_bias: torch.Tensor | None
    kv_a_bias: torch.Tensor | None
    o_bias: torch.Tensor | None

    def __init__(self, config: MlaConfig, weights: MlaWeights) -> None:
        super().__init__()
        self.config = config
        self.heads = weights.heads(config)
        if self.heads > MAX_HEADS:
            raise ValueError(f"the weights hold {self.heads} heads; supported: up to {MAX_HEADS}, shard them over ranks")
        for field in fields(weights):
            weight = getattr(weights, field.name)
            self.register_parameter(field.name, None if weight is None else torch.nn.Parameter(weight, requires_grad=False))
        self._place_frequencies()

    @property
    def path(self) -> str:
        """Return "kernels", or "reference" if there are no kernels for the device of the weights at the moment."""
        return attention_path(self.kv_a.device).name

    @property
    def weights(self) -> MlaWeights:
        """Return the parameters."""
        return MlaWeights(**{field.name: getattr(self, field.name) for field in fields(MlaWeights)})

    def extra_repr(self) -> str:
        """Return the sizes of the layer, for repr()."""
        sizes = f"hidden_size={self.config.hidden_size}, heads={self.heads} of {self.config.num_attention_heads}"
        return f"{sizes}, q_lora_rank={self.config.q_lora_rank}, dtype={self.kv_a.dtype}, device={str(self.kv_a.device)!r}"

    def forward(
        self, hidden: torch.Tensor, k_cache: torch.Tensor | None, batch: MlaBatch, *, descale_k: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute attention of new tokens over their sequences, and write the keys of these tokens to the cache.

        hidden: [tokens, hidden_size], in the order of the batch, with dtype and device of the weights
        k_cache: [pages, page size, 1, latent + rotary columns] of the same dtype, with the cached keys of the requests, or with 576 columns
        of float8_e4m3fn; page size and strides as in flash_mla_with_kvcache. Rotary columns 2i and 2i + 1 of a key are a pair. None if the
        batch reads no cached keys: new keys are not written
        descale_k: scale of an e4m3 cache, fp32, one element on the device; keys are descale_k * k_cache; default 1. A prefill request
        attends to its own new keys before they are rounded to e4m3; later steps read the rounded keys.

        Returns [tokens, hidden_size]. The result of a shard is a partial sum: add up the results of all ranks (all-reduce). The kernel
        path never synchronises with the device, so that a step can be captured in a CUDA graph.

        Gradients reach hidden and the weights, through flash_attn_varlen_backward, if the batch has neither decode requests nor cached
        keys. Other batches raise ValueError if hidden or a weight requires grad, unless gradients are off (torch.no_grad); so do heads with
        queries of 256 columns where kernels compute them. Keys that are written to the cache are detached.

        On devices without kernels (CPU tensors outside cute_mla.simulate(), GPUs of other architectures) the torch reference computes
        attention. `path` says so, and a warning does once per device.

        Raises ValueError on bad arguments, and the errors of flash_mla_with_kvcache and flash_attn_varlen_func.
        """
        self._check(hidden, k_cache, batch, descale_k)
        path = attention_path(hidden.device)
        if needs_grad(hidden, *self._parameters.values()):
            _check_differentiable(batch)
            if path.name == "kernels":
                _check_gradients_of_kernels(self.config)
        if path.name == "reference":
            warn_reference(hidden.device)
        rope = rotation(batch.positions, self._radians, self.config)
        cache = Cache(hidden.new_empty(0, 1, 1, self.config.key_columns) if k_cache is None else k_cache, descale_k)
        if k_cache is not None and path.name == "kernels" and not needs_grad(hidden, *self._parameters.values()):
            q, keys = self._insert(hidden, rope, cache, batch)
        else:
            q, keys = self._queries(hidden, rope), self._new_keys(hidden, rope)
            if k_cache is not None:
                rotary = keys.rotary.detach() if self.config.qk_rope_head_dim else None
                write_kv_cache(keys.latent.detach(), rotary, cache.keys, batch.slot_mapping, descale_k=descale_k)
        parts = []
        decoded = 0
        if batch.decode is not None:
            decoded = batch.decode.tokens
            parts.append(self._decode(path, q[:decoded], cache, batch.decode))
        if batch.prefill is not None:
            own = _Keys(*(columns[decoded:] for columns in keys))
            parts.append(self._prefill(path, q[decoded:], own, cache, batch.prefill))
        out = parts[0] if len(parts) == 1 else torch.cat([q.new_empty(0, self.heads, self.config.v_head_dim), *parts])
        return linear(out.flatten(1), self.o, self.o_bias)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Apply a function of to(), half() and so on to the parameters. The frequencies follow to their device, and stay in fp32."""
        super()._apply(fn, recurse)
        self._place_frequencies()
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        """Load the parameters. load_state_dict(assign=True) may put them on another device, where the frequencies follow."""
        super()._load_from_state_dict(*args)
        self._place_frequencies()

    def _place_frequencies(self) -> None:
        self._radians = frequencies(self.config).to(self.kv_a.device)

    def _insert(self, hidden: torch.Tensor, rope: Rotation, cache: Cache, batch: MlaBatch) -> tuple[torch.Tensor, _Keys]:
        """Project queries and keys; normalise, rotate and write them in one launch. Keys are uninitialised in a batch without prefill."""
        q, projected = self._projected(hidden, rope), linear(hidden, self.kv_a, self.kv_a_bias)
        columns = (self.config.kv_lora_rank, self.config.qk_rope_head_dim)
        latent, rotary = projected.split(columns, dim=1)
        keys = torch.empty_like(projected)
        operands: tuple[torch.Tensor | None, ...] = (None, None, None)
        if self.config.qk_rope_head_dim:
            operands = (rotary, q[..., self.config.qk_nope_head_dim :], torch.cat((rope.cos, rope.sin), dim=1))
        insert_kv_cache(
            *(latent, *operands[:2], cache.keys, batch.slot_mapping, self.kv_a_norm, operands[2]),
            keys=None if batch.prefill is None else keys,
            descale_k=cache.descale,
            eps=self.config.rms_norm_eps,
        )
        return q, _Keys(*keys.split(columns, dim=1))

    def _queries(self, hidden: torch.Tensor, rope: Rotation) -> torch.Tensor:
        """Project queries [tokens, heads, columns], rotary embedding applied."""
        q = self._projected(hidden, rope)
        if not self.config.qk_rope_head_dim:
            return q
        plain, rotary = q.split((self.config.qk_nope_head_dim, self.config.qk_rope_head_dim), dim=-1)
        turned = rope.apply(rotary)
        if needs_grad(turned):
            return torch.cat((plain, turned), dim=-1)
        rotary.copy_(turned)
        return q

    def _projected(self, hidden: torch.Tensor, rope: Rotation) -> torch.Tensor:
        """Project queries [tokens, heads, columns], without rotary embedding."""
        if self.q_a is not None and self.q_a_norm is not None:
            hidden = self._normalise(linear(hidden, self.q_a, self.q_a_bias), self.q_a_norm)
        q = linear(hidden, self.q_b).unflatten(1, (self.heads, -1))
        if rope.query_scale is not None:
            q = (q * rope.query_scale.view(-1, 1, 1)).to(q.dtype)
        return q

    def _new_keys(self, hidden: torch.Tensor, rope: Rotation) -> _Keys:
        latent, rotary = linear(hidden, self.kv_a, self.kv_a_bias).split((self.config.kv_lora_rank, self.config.qk_rope_head_dim), dim=1)
        if needs_grad(latent, self.kv_a_norm):
            return _Keys(self._normalise(latent, self.kv_a_norm), rope.apply(rotary))
        return _Keys(norm_rope.rms_norm(latent, self.kv_a_norm, self.config.rms_norm_eps), rope.apply(rotary))  # the bits of _insert

    def _normalise(self, columns: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Apply RMSNorm in fp32, rounded once."""
        return rms_norm(columns.float(), weight.shape, weight.float(), self.config.rms_norm_eps).to(columns.dtype)

    def _decode(self, path: AttentionPath, q: torch.Tensor, cache: Cache, requests: DecodeRequests) -> torch.Tensor:
        """Attend in the absorbed form: [tokens, heads, v_head_dim]."""
        nope, latent = self.config.qk_nope_head_dim, self.config.kv_lora_rank
        by_head = self.kv_b.view(self.heads, -1, latent)
        query_to_latent, latent_to_value = by_head[:, :nope], by_head[:, nope:].transpose(1, 2)  # [heads, nope, latent], [heads, latent, v]
        absorbed = q.new_empty(*q.shape[:2], self.config.key_columns)
        queries, latent_part = q[..., :nope].transpose(0, 1), absorbed[..., :latent].transpose(0, 1)
        if is_dynamo_compiling():  # Dynamo accepts no view as out=
            latent_part.copy_(torch.bmm(queries, query_to_latent))
        else:
            torch.bmm(queries, query_to_latent, out=latent_part)
        absorbed[..., latent:] = q[..., nope:]
        by_request = absorbed.unflatten(0, (requests.cache_seqlens.shape[0], requests.s_q))
        out = path.decode(by_request, cache, requests, self.config.softmax_scale)
        return torch.bmm(out.flatten(0, 1).transpose(0, 1), latent_to_value).transpose(0, 1)

    def _prefill(self, path: AttentionPath, q: torch.Tensor, own: _Keys, cache: Cache, requests: PrefillRequests) -> torch.Tensor:
        """Attend in the decompressed form: [tokens, heads, v_head_dim]."""
        scale, ends = self.config.softmax_scale, Packed(requests.cu_seqlens, requests.max_seqlen)
        states = [path.varlen(q, self._decompress(own), (ends, ends), scale, causal=True)]
        for chunk in requests.chunks:
            packed = (chunk.block_table, chunk.cu_seqlens, chunk.keys)
            cached = gather_kv_cache(cache.keys, *packed, starts=chunk.starts, descale_k=cache.descale, dtype=q.dtype)
            kv = self._decompress(_Keys(*cached.split((self.config.kv_lora_rank, self.config.qk_rope_head_dim), dim=1)))
            if len(states) == MAX_STATES:
                states = [path.merge(*zip(*states, strict=True))]
            states.append(path.varlen(q, kv, (ends, Packed(chunk.cu_seqlens, chunk.max_seqlen)), scale, causal=False))
        out, _ = states[0] if len(states) == 1 else path.merge(*zip(*states, strict=True))
        return out

    def _decompress(self, keys: _Keys) -> tuple[torch.Tensor, torch.Tensor]:
        """Expand latent keys to keys [tokens, heads, columns of a query] and values [tokens, heads, v_head_dim] of each head."""
        nope = self.config.qk_nope_head_dim
        both = linear(keys.latent, self.kv_b).unflatten(1, (self.heads, -1))
        plain, v = both.split((nope, self.config.v_head_dim), dim=-1)
        if not self.config.qk_rope_head_dim:
            return plain, v
        shared = keys.rotary.unsqueeze(1)
        if needs_grad(plain, shared):
            return torch.cat((plain, shared.expand(-1, self.heads, -1)), dim=-1), v
        k = both.new_empty(*both.shape[:2], self.config.query_columns)
        k[..., :nope] = plain
        k[..., nope:] = shared
        return k, v

    def _check(self, hidden: torch.Tensor, k_cache: torch.Tensor | None, batch: MlaBatch, descale_k: torch.Tensor | None) -> None:
        weights, states = spec_of("weights", self.kv_a), spec_of("hidden", hidden)
        check_shape("hidden", states, (batch.tokens, self.config.hidden_size), " with this batch")
        given: list[tuple[str, TensorSpec, tuple[torch.dtype, ...]]] = [("hidden", states, ())]
        if k_cache is None:
            _check_without_cache(batch, descale_k)
        else:
            cache = spec_of("k_cache", k_cache)
            columns = self.config.key_columns
            check_shape("k_cache", cache, ("pages", "page size", 1, columns))
            problem = page_size_error(cache.shape[1])
            if problem is not None:
                raise ValueError(f"k_cache has shape {list(cache.shape)}: {problem}")
            given.append(("k_cache", cache, (torch.float8_e4m3fn,) if columns == D_QK else ()))
        for name, spec, dtypes in given:
            check_dtype(name, spec, weights.dtype, *dtypes)
            if spec.device != weights.device:
                raise ValueError(f"{name} is on {spec.device}; supported: the device of the weights, {weights.device}")
        if batch.positions.device != weights.device or batch.slot_mapping.device != weights.device:
            raise ValueError(f"the batch is on {batch.positions.device}; supported: the device of the weights, {weights.device}")


def _check_without_cache(batch: MlaBatch, descale_k: torch.Tensor | None) -> None:
    """Raise ValueError if a call without a cache would read it."""
    uses = _cached_requests(batch)
    if uses:
        raise ValueError(f"k_cache is None, and the batch has {uses}; supported: {_WITHOUT_CACHE}")
    if descale_k is not None:
        raise ValueError("descale_k is given, and k_cache is None; supported: descale_k of a cache")


def _check_differentiable(batch: MlaBatch) -> None:
    """Raise ValueError if a gradient would have to pass through the cache."""
    uses = _cached_requests(batch)
    if uses:
        raise ValueError(
            f"hidden or a weight requires grad, and the batch has {uses}; supported: {_WITHOUT_CACHE}, or any batch inside "
            "`with torch.no_grad():`"
        )


def _check_gradients_of_kernels(config: MlaConfig) -> None:
    """Raise ValueError if the kernels of prefill have no backward pass for the columns of the heads."""
    if config.query_columns not in GRADIENT_HEAD_DIMS:
        dims = " or ".join(map(str, GRADIENT_HEAD_DIMS))
        raise ValueError(
            f"hidden or a weight requires grad, and qk_nope_head_dim + qk_rope_head_dim is {config.query_columns}; supported by the "
            f"kernels: {dims}, or any inside `with torch.no_grad():`"
        )


def _cached_requests(batch: MlaBatch) -> str:
    """Describe the requests of a batch that read the cache, "" if there are none."""
    uses = [] if batch.decode is None else [f"{batch.decode.cache_seqlens.shape[0]} decode requests"]
    if batch.prefill is not None and batch.prefill.chunks:
        uses.append(f"{sum(chunk.keys for chunk in batch.prefill.chunks)} cached keys of prefill requests")
    return " and ".join(uses)
