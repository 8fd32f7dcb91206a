"""The layer: hidden states in, its share of the attention's output out.

Tokens of decode requests are absorbed: kv_b's half for keys goes into the queries, which then attend to the cache as it is, and its half
for values to what comes out. Tokens of prefill requests are decompressed: kv_b makes keys and values of each head, of their own tokens
and, a chunk at a time, of what their requests have in the cache; the states of all chunks are merged.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import linear, rms_norm

from ..api.tracing import is_dynamo_compiling
from ..cache import gather_kv_cache, write_kv_cache
from ..ops.limits import page_size_error
from ..ops.tensor_spec import check_dtype, check_shape, spec_of
from ..spec.mla import D_QK, MAX_HEADS
from .batch import DecodeRequests, MlaBatch, PrefillRequests
from .config import MlaConfig
from .path import MOST_STATES, AttentionPath, Cache, Packed, path_on, say_reference
from .rope import Rotation, frequencies, rotation
from .weights import MlaWeights


class _Keys(NamedTuple):
    """Of some tokens: latent columns [tokens, 512] and rotary ones [tokens, 64]."""

    latent: torch.Tensor
    rotary: torch.Tensor


class MlaAttention:
    """One layer's attention, of all heads or of one rank's."""

    def __init__(self, config: MlaConfig, weights: MlaWeights) -> None:
        """weights: of bf16 or fp16; of fp32 on the reference path alone. ValueError if they hold more than 128 heads."""
        self.config = config
        self.weights = weights
        self.heads = weights.heads(config)
        if self.heads > MAX_HEADS:
            raise ValueError(f"the weights hold {self.heads} heads; supported: up to {MAX_HEADS}, shard them over ranks")
        self._radians = frequencies(config).to(weights.kv_a.device)
        keys, values = config.qk_nope_head_dim, config.v_head_dim
        by_head = weights.kv_b.view(self.heads, keys + values, config.kv_lora_rank)
        self._into_query = by_head[:, :keys]  # [heads, 128, 512]
        self._out_of_latent = by_head[:, keys:].transpose(1, 2)  # [heads, 512, 128]

    @property
    def path(self) -> str:
        """What computes attention on the weights' device, here and now: "kernels", or "reference" where there are none."""
        return path_on(self.weights.kv_a.device).name

    @torch.no_grad()
    def __call__(
        self, hidden: torch.Tensor, k_cache: torch.Tensor, batch: MlaBatch, *, descale_k: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Attention of new tokens over their sequences; writes their keys to the cache.

        hidden: [tokens, hidden_size], in the batch's order, of the weights' dtype and device
        k_cache: [pages, page size, 1, 576] of the same dtype or float8_e4m3fn, with what the batch's requests have in it already; page
        size and strides as flash_mla_with_kvcache takes them. Rotary columns 2i and 2i + 1 of a key are a pair.
        descale_k: of an e4m3 cache, fp32, one element on the device: keys are descale_k * k_cache; default 1. A prefilled request's own
        new keys take part unrounded, whoever decodes it later finds them rounded to e4m3.

        Returns [tokens, hidden_size]. Of a shard, that is a partial sum: add the ranks' up (all-reduce). There are no gradients.
        By the kernels nothing waits for the device, so that a step can be captured in a CUDA graph.

        Where there are no kernels (CPU tensors outside cute_mla.simulate(), GPUs of other architectures), the torch reference computes
        attention; a warning says so, once a device, and `path` always.

        Raises ValueError on bad arguments, and what flash_mla_with_kvcache and flash_attn_varlen_func do.
        """
        self._check(hidden, k_cache, batch)
        path = path_on(hidden.device)
        if path.name == "reference":
            say_reference(hidden.device)
        turned = rotation(batch.positions, self._radians, self.config)
        q = self._queries(hidden, turned)
        keys = self._new_keys(hidden, turned)
        write_kv_cache(*keys, k_cache, batch.slot_mapping, descale_k=descale_k)
        cache = Cache(k_cache, descale_k)
        parts = [q.new_empty(0, self.heads, self.config.v_head_dim)]
        decoded = 0
        if batch.decode is not None:
            decoded = batch.decode.tokens
            parts.append(self._decode(path, q[:decoded], cache, batch.decode))
        if batch.prefill is not None:
            own = _Keys(*(columns[decoded:] for columns in keys))
            parts.append(self._prefill(path, q[decoded:], own, cache, batch.prefill))
        return linear(torch.cat(parts).flatten(1), self.weights.o)

    def _queries(self, hidden: torch.Tensor, turned: Rotation) -> torch.Tensor:
        """[tokens, heads, 192], rotary columns turned."""
        weights, nope = self.weights, self.config.qk_nope_head_dim
        if weights.q_a is not None and weights.q_a_norm is not None:
            hidden = self._normed(linear(hidden, weights.q_a), weights.q_a_norm)
        q = linear(hidden, weights.q_b).unflatten(1, (self.heads, -1))
        q[..., nope:] = turned.apply(q[..., nope:])
        return q

    def _new_keys(self, hidden: torch.Tensor, turned: Rotation) -> _Keys:
        latent, rotary = linear(hidden, self.weights.kv_a).split((self.config.kv_lora_rank, self.config.qk_rope_head_dim), dim=1)
        return _Keys(self._normed(latent, self.weights.kv_a_norm), turned.apply(rotary))

    def _normed(self, columns: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm in fp32, rounded once."""
        return rms_norm(columns.float(), weight.shape, weight.float(), self.config.rms_norm_eps).to(columns.dtype)

    def _decode(self, path: AttentionPath, q: torch.Tensor, cache: Cache, requests: DecodeRequests) -> torch.Tensor:
        """Absorbed: [tokens, heads, 128]."""
        nope, latent = self.config.qk_nope_head_dim, self.config.kv_lora_rank
        absorbed = q.new_empty(*q.shape[:2], D_QK)
        queries, place = q[..., :nope].transpose(0, 1), absorbed[..., :latent].transpose(0, 1)
        if is_dynamo_compiling():  # which takes no part of a tensor for out
            place.copy_(torch.bmm(queries, self._into_query))
        else:
            torch.bmm(queries, self._into_query, out=place)
        absorbed[..., latent:] = q[..., nope:]
        by_request = absorbed.unflatten(0, (requests.cache_seqlens.shape[0], requests.s_q))
        out = path.decode(by_request, cache, requests, self.config.softmax_scale)
        return torch.bmm(out.flatten(0, 1).transpose(0, 1), self._out_of_latent).transpose(0, 1)

    def _prefill(self, path: AttentionPath, q: torch.Tensor, own: _Keys, cache: Cache, requests: PrefillRequests) -> torch.Tensor:
        """Decompressed: [tokens, heads, 128]."""
        scale, ends = self.config.softmax_scale, Packed(requests.cu_seqlens, requests.max_seqlen)
        states = [path.varlen(q, self._decompressed(own), (ends, ends), scale, causal=True)]
        for chunk in requests.chunks:
            packed = (chunk.block_table, chunk.cu_seqlens, chunk.keys)
            cached = gather_kv_cache(cache.keys, *packed, starts=chunk.starts, descale_k=cache.descale, dtype=q.dtype)
            kv = self._decompressed(_Keys(*cached.split((self.config.kv_lora_rank, self.config.qk_rope_head_dim), dim=1)))
            if len(states) == MOST_STATES:
                states = [path.merge(*zip(*states, strict=True))]
            states.append(path.varlen(q, kv, (ends, Packed(chunk.cu_seqlens, chunk.max_seqlen)), scale, causal=False))
        out, _ = states[0] if len(states) == 1 else path.merge(*zip(*states, strict=True))
        return out

    def _decompressed(self, keys: _Keys) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [tokens, heads, 192] and values [tokens, heads, 128] of each head."""
        nope = self.config.qk_nope_head_dim
        both = linear(keys.latent, self.weights.kv_b).unflatten(1, (self.heads, -1))
        k = both.new_empty(*both.shape[:2], self.config.query_columns)
        k[..., :nope] = both[..., :nope]
        k[..., nope:] = keys.rotary.unsqueeze(1)
        return k, both[..., nope:]

    def _check(self, hidden: torch.Tensor, k_cache: torch.Tensor, batch: MlaBatch) -> None:
        weights = spec_of("weights", self.weights.kv_a)
        states, cache = spec_of("hidden", hidden), spec_of("k_cache", k_cache)
        check_shape("hidden", states, (batch.tokens, self.config.hidden_size), " with this batch")
        check_shape("k_cache", cache, ("pages", "page size", 1, D_QK))
        problem = page_size_error(cache.shape[1])
        if problem is not None:
            raise ValueError(f"k_cache has shape {list(cache.shape)}: {problem}")
        for name, spec, dtypes in (("hidden", states, ()), ("k_cache", cache, (torch.float8_e4m3fn,))):
            check_dtype(name, spec, weights.dtype, *dtypes)
            if spec.device != weights.device:
                raise ValueError(f"{name} is on {spec.device}; supported: the device of the weights, {weights.device}")
        if batch.positions.device != weights.device or batch.slot_mapping.device != weights.device:
            raise ValueError(f"the batch is on {batch.positions.device}; supported: the device of the weights, {weights.device}")
