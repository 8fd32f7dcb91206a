"""The attention layer, from hidden states to the output or, for a shard of the heads, to a partial sum of the output.

Decode uses the absorbed form: the queries are multiplied by the key half of kv_b and attend to the latent cache, and the result is
multiplied by the value half. Prefill uses the decompressed form: kv_b expands latent keys to keys and values of each head. It expands the
new tokens at once and the cached tokens of the requests in chunks; the states of all chunks are merged. Gradients pass through prefill of
new tokens only. Where they do, rotary columns are joined by operations that autograd follows; elsewhere they are written in place.

Layers with a window use the absorbed form for prefill, too: no kernel of the decompressed form has windows.

Where tokens choose their keys, decode uses the absorbed form over the keys that an indexer chose. Prefill does so, too, or uses the
decompressed form with a mask of these keys, by what is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple, Self

import torch
from torch.nn.functional import linear, rms_norm

from ..cache import insert_kv_cache, write_kv_cache
from ..ops import norm_rope
from ..ops.arguments import check_flag, needs_grad
from ..ops.cache_codec import to_e4m3
from ..parallel import ContextParallel
from ..spec.masked_prefill import HEAD_DIMS as MASKED_HEAD_DIMS
from ..spec.mla import D_QK, D_ROPE, MAX_HEADS
from ..tracing.detection import is_dynamo_compiling
from .batch import DecodeRequests, MlaBatch, PrefillRequests
from .checks import Given, check_differentiable, check_forms, check_given
from .choosing import Indexed, Step, choose_rows, choose_slots, mask_keys, rows_of
from .config import MlaConfig
from .context_path import ContextPath
from .forms import Forms, Sparsity, forms_of
from .index_keys import PooledIndexCache, scratch_of
from .indexer import Indexer
from .pages import Pages, own_pages
from .path import MAX_STATES, AttentionPath, Cache, DecodeOptions, Op, Packed, PrefillOptions, attention_path, warn_reference
from .pools import Pools, spans
from .rope import Rotation, frequencies, rotation
from .sink_gradients import SinkAttention
from .weights import MlaWeights


class _Keys(NamedTuple):
    """Keys of some tokens: latent columns [tokens, 512 or 256] and rotary columns [tokens, 64 or 0]."""

    latent: torch.Tensor
    rotary: torch.Tensor


class _Inputs(NamedTuple):
    """Inputs of queries and of an indexer: hidden states [tokens, hidden_size], their latent [tokens, q_lora_rank], and the rotation."""

    hidden: torch.Tensor
    latent: torch.Tensor
    rope: Rotation


class MlaAttention(torch.nn.Module):
    """Attention of one layer, of all heads or of the heads of one rank.

    weights: bf16 or fp16; fp32 only on the reference path. Parameters hold them, under the names of MlaWeights; they have no gradients
    until requires_grad_() asks for them. state_dict, load_state_dict, to and parameters are those of torch.nn.Module.
    indexer: of a layer that has one of its own. A layer without one, of a config with an indexer, attends to the keys that the last layer
    before it chose.
    batch_invariant: True if the bits of a request shall not depend on the other requests of a batch, as far as the layer decides: decode
    calls are batch invariant, and a config with an indexer uses sparse attention for sequences of every length. Products with the weights
    are torch's.
    context: of a layer whose cached keys are distributed over the ranks of a group, as the batch's plan says (plan_batch, context=). All
    ranks call the layer with the same hidden states; each has the weights of its own heads, and its own keys in its caches.

    Raises ValueError if the weights hold more than 128 heads, or if the columns of the config do not go with the other arguments.
    """

    q_a: torch.Tensor | None
    q_a_norm: torch.Tensor | None
    q_b: torch.Tensor
    kv_a: torch.Tensor | None
    kv_a_norm: torch.Tensor | None
    kv_b: torch.Tensor
    o: torch.Tensor
    q_a_bias: torch.Tensor | None
    kv_a_bias: torch.Tensor | None
    o_bias: torch.Tensor | None
    gate: torch.Tensor | None
    sinks: torch.Tensor | None
    q_scale: torch.Tensor | None
    q_scale_bias: torch.Tensor | None
    alpha: torch.Tensor | None
    rotary_norm: torch.Tensor | None

    def __init__(
        self,
        config: MlaConfig,
        weights: MlaWeights,
        indexer: Indexer | None = None,
        *,
        batch_invariant: bool = False,
        context: ContextParallel | None = None,
    ) -> None:
        super().__init__()
        check_flag("batch_invariant", batch_invariant)
        config.check_one_layer()
        if indexer is not None and config.indexer is None:
            raise ValueError("an indexer is given, and the config has none; supported: configs with index_topk")
        if context is not None and config.key_columns != D_QK:
            raise ValueError(f"a context is given, and keys have {config.key_columns} columns; supported: {D_QK}")
        for name in ("attention_sinks", "sliding_window"):
            if context is not None and getattr(config, name):
                raise ValueError(f"a context is given, and the config has {name}; supported: one of them")
        self.config = config
        self.batch_invariant = batch_invariant
        self.context = context
        self.heads = weights.heads(config)
        if self.heads > MAX_HEADS:
            raise ValueError(f"the weights hold {self.heads} heads; supported: up to {MAX_HEADS}, shard them over ranks")
        for field in fields(weights):
            weight = getattr(weights, field.name)
            self.register_parameter(field.name, None if weight is None else torch.nn.Parameter(weight, requires_grad=False))
        self.indexer = indexer
        self._place_frequencies()

    @property
    def path(self) -> str:
        """Return "kernels", or "reference" if dense decode has none for the device of the weights at the moment."""
        return attention_path(self.kv_b.device, self._ops(Forms("dense", None), trained=False)).name

    @property
    def weights(self) -> MlaWeights:
        """Return the parameters."""
        return MlaWeights(**{field.name: getattr(self, field.name) for field in fields(MlaWeights)})

    def extra_repr(self) -> str:
        """Return the sizes of the layer, for repr()."""
        sizes = f"hidden_size={self.config.hidden_size}, heads={self.heads} of {self.config.num_attention_heads}"
        return f"{sizes}, q_lora_rank={self.config.q_lora_rank}, dtype={self.kv_b.dtype}, device={str(self.kv_b.device)!r}"

    def forward(
        self,
        hidden: torch.Tensor,
        k_cache: torch.Tensor | None,
        batch: MlaBatch,
        *,
        index_cache: torch.Tensor | PooledIndexCache | None = None,
        descale_q: torch.Tensor | None = None,
        descale_k: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute attention of new tokens over their sequences, and write the keys of these tokens to the cache.

        hidden: [tokens, hidden_size], in the order of the batch, with dtype and device of the weights
        k_cache: [pages, page size, 1, latent + rotary columns] of the same dtype, with the cached keys of the requests, or with 576 columns
        of float8_e4m3fn, or, with an indexer in the config and weights of bf16, uint8 [pages, page size, 1, 656], without rotary columns
        528; page size and strides as in flash_mla_with_kvcache. Rotary columns 2i and 2i + 1 of a key are a pair. None if the batch reads
        no cached keys: new keys are not written. With borrowed latents, the cache of the layer that lends them, which that layer wrote
        index_cache: of a layer with an indexer: uint8 [pages, page size, 1, 132], the indexer's keys in the same slots as those of k_cache,
        in pages of 16, 32, 64 or 128 that are contiguous inside (cute_mla.indexer has the layout). The keys of the new tokens are written
        to it. None if no request has more keys than index_topk, nor ever will. With index_kpool, a PooledIndexCache
        descale_k: scale of an e4m3 cache, fp32, one element on the device; keys are descale_k * k_cache; default 1. A prefill request
        attends to its own new keys before they are rounded to e4m3; later steps read the rounded keys. The same holds of caches of uint8
        descale_q: with an e4m3 cache, decode rounds its queries divided by this scale to e4m3, fp32, one element on the device; None: it
        does not

        Returns [tokens, hidden_size]. The result of a shard is a partial sum: add up the results of all ranks (all-reduce). The kernel
        path never synchronises with the device, so that a step can be captured in a CUDA graph.

        With an indexer in the config, tokens with more than index_topk keys attend to those that the layer's indexer chooses, or to those
        that batch.selection holds. Other tokens attend to all of their keys.

        Gradients reach hidden and the weights, through flash_attn_varlen_backward, if the batch has neither decode requests nor cached
        keys, and no tokens that choose their keys. Other batches raise ValueError if hidden or a weight requires grad, unless gradients are
        off (torch.no_grad). Keys that are written to the cache are detached.

        Where the device has no kernels of an op that the call needs, the torch reference computes attention, and a warning names the op
        once per device. So it is for CPU tensors outside cute_mla.simulate() and on GPUs of other architectures, of which `path` says so,
        and on GPUs of compute capability 12.0 and 12.1 for gradients and for decode of dense attention over other keys than 576 columns.

        Raises ValueError on bad arguments, and the errors of flash_mla_with_kvcache and flash_attn_varlen_func.
        """
        given = Given(k_cache, index_cache, descale_q, descale_k)
        check_given(self.config, self.kv_b, hidden, batch, given)
        cache = Cache(hidden.new_empty(0, 1, 1, self.config.key_columns) if k_cache is None else k_cache, descale_k)
        sparsity = Sparsity(self._topk, cache.packed is None, self.batch_invariant, self._masked_heads)
        world = 1 if self.context is None else self.context.shard.world
        forms = forms_of(batch, cache.keys.shape[1] * world, sparsity)
        check_forms(forms, given, self.indexer is not None)
        trained = needs_grad(hidden, *self._parameters.values())
        if trained:
            check_differentiable(self.config, batch, forms)
        path = self._path(hidden.device, self._ops(forms, trained))
        radians = self._radians if self.alpha is None else self._radians * self.alpha.exp()
        inputs = _Inputs(hidden, self._query_latent(hidden), rotation(batch.positions, radians, self.config))
        fused = k_cache is not None and path.name == "kernels" and not trained
        q, keys = self._states(inputs, cache, batch, fused)
        indexed = None if self.indexer is None else self._index(self.indexer, inputs, batch, forms, index_cache)
        step = Step(path, cache, batch, forms, self._topk, indexed)
        parts = []
        decoded = 0
        if batch.decode is not None:
            decoded = batch.decode.tokens
            parts.append(self._decode(step, q[:decoded], batch.decode, descale_q))
        if batch.prefill is not None:
            own = _Keys(*(columns[decoded:] for columns in keys))
            attend = self._prefill if forms.prefill in ("dense", "masked") else self._sparse_prefill
            if self.config.sliding_window is not None:
                attend = self._window_prefill
            parts.append(attend(step, q[decoded:], own, batch.prefill))
        out = parts[0] if len(parts) == 1 else torch.cat([q.new_empty(0, self.heads, self.config.v_head_dim), *parts])
        if self.gate is not None:
            out = out * linear(hidden, self.gate).float().sigmoid().to(out.dtype).unflatten(1, (self.heads, -1))
        return linear(out.flatten(1), self.o, self.o_bias)

    def _states(self, inputs: _Inputs, cache: Cache, batch: MlaBatch, fused: bool) -> tuple[torch.Tensor, _Keys]:
        """Return queries, and the keys of the new tokens, which are written to the cache, or are those of the layer that lends them.

        fused: whether one launch writes the keys and rotates the queries.
        """
        latents, columns = batch.selection.latents, self.config.qk_rope_head_dim
        if self.config.latents == "borrowed":
            if columns not in latents:
                raise ValueError(f"no layer lends latents with {columns} rotary columns; supported: behind a layer that does, in one step")
            q, (lent, has_graph) = self._queries(inputs), latents[columns]
            if needs_grad(q) and not has_graph:
                raise ValueError(
                    "hidden or a weight requires grad, and the layer that lends latents ran under no_grad; supported: both in one mode, as "
                    "with use_reentrant=False where activations are checkpointed"
                )
            return q, _Keys(*lent)
        if fused:
            q, keys = self._insert(inputs, cache, batch)
        else:
            q, keys = self._queries(inputs), self._new_keys(inputs.hidden, inputs.rope)
            if cache.keys.shape[0]:
                rotary = keys.rotary.detach() if columns else None
                write_kv_cache(
                    *(keys.latent.detach(), rotary, cache.keys, batch.slot_mapping), descale_k=cache.descale, kv_format=cache.packed
                )
        if self.config.latents == "lent":
            latents[columns] = keys, torch.is_grad_enabled()
        return q, keys

    def _ops(self, forms: Forms, trained: bool) -> tuple[Op, ...]:
        """Return the ops of a call that not all architectures have. trained: whether gradients pass through it."""
        windowed = self.config.sliding_window is not None and forms.prefill is not None
        decodes = (Op("dense_decode", self.config.key_columns),) if windowed or forms.decode == "dense" else ()
        return (*decodes, Op("dense_prefill_backward")) if trained else decodes

    def _path(self, device: torch.device, ops: tuple[Op, ...]) -> AttentionPath:
        """Return the implementation of attention by these ops. Raise ValueError for context parallelism without kernels."""
        path = attention_path(device, ops)
        if self.context is None:
            if path.name == "reference":
                warn_reference(device, ops)
            return path
        if path.name == "reference":
            raise ValueError(f"the layer has a context, and there are no kernels on {device}; supported: devices with kernels")
        return ContextPath(self.context)

    @property
    def _topk(self) -> int | None:
        """Return how many keys a token attends to at most, None for all."""
        return None if self.config.indexer is None else self.config.indexer.topk

    @property
    def _masked_heads(self) -> int | None:
        """Return the heads if dense prefill of them takes a mask of keys, else None."""
        is_masked = self.config.query_columns in MASKED_HEAD_DIMS and self.kv_b.dtype != torch.float16
        return self.heads if is_masked else None

    def _index(
        self, indexer: Indexer, inputs: _Inputs, batch: MlaBatch, forms: Forms, index_cache: torch.Tensor | PooledIndexCache | None
    ) -> Indexed:
        """Make the indexer's keys of the new tokens, write them to its cache, and make queries where tokens choose by them."""
        keys, inputs = indexer.keys(inputs.hidden), inputs._replace(rope=inputs.rope.unless_empty(D_ROPE // 2))
        queries = indexer.queries(*inputs) if forms.is_chosen else None
        if index_cache is None and indexer.key_pool > 1 and forms.is_chosen and batch.prefill is not None:
            index_cache = scratch_of(batch.prefill, inputs.hidden.device, indexer.key_pool)
        if isinstance(index_cache, PooledIndexCache):
            indexer.write_pools(keys, inputs.hidden, index_cache, spans(batch))
            return Indexed(indexer, inputs.rope, keys, queries, None, self._pools(index_cache))
        if index_cache is not None:
            indexer.write(keys, inputs.rope, index_cache, batch.slot_mapping)
        return Indexed(indexer, inputs.rope, keys, queries, index_cache)

    def _pools(self, cache: PooledIndexCache) -> Pools | None:
        """Return the pools of an indexer's cache, and how many a token chooses."""
        own = self.config.indexer
        return None if own is None else Pools(cache, own.topk // own.key_pool, own.key_pool)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Apply a function of to(), half() and so on to the parameters. Frequencies and alpha follow to their device, and stay in fp32."""
        alpha = None if self.alpha is None else self.alpha.detach()
        super()._apply(fn, recurse)
        if alpha is not None and self.alpha is not None and self.alpha.dtype != torch.float32:
            self.alpha.data = alpha.to(self.kv_b.device)
        self._place_frequencies()
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        """Load the parameters. load_state_dict(assign=True) may put them on another device, where the frequencies follow."""
        super()._load_from_state_dict(*args)
        self._place_frequencies()

    def _place_frequencies(self) -> None:
        self._radians = frequencies(self.config).to(self.kv_b.device)

    def _query_latent(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what queries are projected from: [tokens, q_lora_rank], normalised, or the hidden states without q_lora_rank."""
        if self.q_a is None or self.q_a_norm is None:
            return hidden
        columns, scale = linear(hidden, self.q_a, self.q_a_bias), self.config.q_lora_scale
        normalised = rms_norm(columns.float(), self.q_a_norm.shape, self.q_a_norm.float() * scale, self.config.rms_norm_eps)
        return normalised.to(columns.dtype)

    def _insert(self, inputs: _Inputs, cache: Cache, batch: MlaBatch) -> tuple[torch.Tensor, _Keys]:
        """Project queries and keys; normalise, rotate and write them in one launch. Keys are uninitialised in a batch without prefill."""
        q, projected = self._projected(inputs), self._project_keys(inputs.hidden)
        columns = (self.config.kv_lora_rank, self.config.qk_rope_head_dim)
        latent, rotary = projected.split(columns, dim=1)
        keys = torch.empty_like(projected)
        operands: tuple[torch.Tensor | None, ...] = (None, None, None)
        if self.config.qk_rope_head_dim:
            operands = (rotary, q[..., self.config.qk_nope_head_dim :], torch.cat((inputs.rope.cos, inputs.rope.sin), dim=1))
        insert_kv_cache(
            *(latent, *operands[:2], cache.keys, batch.slot_mapping, self._latent_norm(), operands[2]),
            keys=None if batch.prefill is None else keys,
            descale_k=cache.descale,
            kv_format=cache.packed,
            eps=self.config.rms_norm_eps,
        )
        return q, _Keys(*keys.split(columns, dim=1))

    def _queries(self, inputs: _Inputs) -> torch.Tensor:
        """Project queries [tokens, heads, columns], rotary embedding applied."""
        q = self._projected(inputs)
        if not self.config.qk_rope_head_dim:
            return q
        plain, rotary = q.split((self.config.qk_nope_head_dim, self.config.qk_rope_head_dim), dim=-1)
        turned = inputs.rope.apply(rotary)
        if needs_grad(turned):
            return torch.cat((plain, turned), dim=-1)
        rotary.copy_(turned)
        return q

    def _projected(self, inputs: _Inputs) -> torch.Tensor:
        """Project queries [tokens, heads, columns], without rotary embedding."""
        q = linear(inputs.latent, self.q_b).unflatten(1, (self.heads, -1))
        if inputs.rope.query_scale is not None:
            q = (q * inputs.rope.query_scale.view(-1, 1, 1)).to(q.dtype)
        if self.q_scale is not None and self.q_scale_bias is not None:
            q = inputs.rope.scale_heads(q, self.q_scale, self.q_scale_bias)
        return q

    def _project_keys(self, hidden: torch.Tensor) -> torch.Tensor:
        """Project latent and rotary columns of keys [tokens, columns of a key], before norm and rotation."""
        if self.kv_a is None:
            raise ValueError("the layer has no kv_a; supported: a layer with latents of its own")
        keys = linear(hidden, self.kv_a, self.kv_a_bias)
        if self.rotary_norm is None:
            return keys
        latent, rotary = keys.split((self.config.kv_lora_rank, self.config.qk_rope_head_dim), dim=1)
        return torch.cat((latent, norm_rope.rms_norm(rotary, self.rotary_norm, self.config.rms_norm_eps)), dim=1)

    def _new_keys(self, hidden: torch.Tensor, rope: Rotation) -> _Keys:
        latent, rotary = self._project_keys(hidden).split((self.config.kv_lora_rank, self.config.qk_rope_head_dim), dim=1)
        return _Keys(norm_rope.rms_norm(latent, self._latent_norm(), self.config.rms_norm_eps), rope.apply(rotary))  # the bits of _insert

    def _latent_norm(self) -> torch.Tensor:
        """Return the weight of the norm of latent keys, with their scale."""
        if self.kv_a_norm is None:
            raise ValueError("the layer has no kv_a_norm; supported: a layer with latents of its own")
        return self.kv_a_norm if self.config.kv_lora_scale == 1 else self.kv_a_norm * self.config.kv_lora_scale

    def _sinks(self) -> torch.Tensor | None:
        """Return the sinks in fp32, also of a layer that was cast to another dtype."""
        return None if self.sinks is None else self.sinks.float()

    def _decode(self, step: Step, q: torch.Tensor, requests: DecodeRequests, descale_q: torch.Tensor | None) -> torch.Tensor:
        """Attend in the absorbed form: [tokens, heads, v_head_dim]."""
        by_request = self._absorb(q).unflatten(0, (requests.cache_seqlens.shape[0], requests.s_q))
        options = self._options(q.dtype, descale_q)
        if step.forms.decode == "dense":
            if descale_q is not None:
                by_request = to_e4m3(by_request.float() / descale_q).view(torch.float8_e4m3fn)
            out = step.path.decode(by_request, step.cache, requests, options)
        else:
            chosen, schedule = choose_slots(step, requests), step.batch.selection.schedule
            out = step.path.sparse_decode(by_request, step.cache, chosen, schedule, options)
        return self._expand(out.flatten(0, 1))

    def _options(self, dtype: torch.dtype, descale_q: torch.Tensor | None = None) -> DecodeOptions:
        """Return the options of attention in the absorbed form."""
        return DecodeOptions(self.config.softmax_scale, dtype, descale_q, self.batch_invariant, self._sinks(), self.config.sliding_window)

    def _window_prefill(self, step: Step, q: torch.Tensor, own: _Keys, requests: PrefillRequests) -> torch.Tensor:
        """Attend in the absorbed form to the keys of each token's window: [tokens, heads, v_head_dim].

        Cached keys and new ones are read from the cache; new ones alone, which may be in none, from pages of their own.
        """
        if requests.chunks:
            pages = Pages(step.cache.keys, requests.chunks[0].block_table, requests.lengths)
        else:
            pages = own_pages(torch.cat(own, dim=1), requests)
        ends = Packed(requests.cu_seqlens, requests.max_seqlen)
        return self._expand(step.path.window_prefill(self._absorb(q), pages, ends, self._options(q.dtype)))

    def _sparse_prefill(self, step: Step, q: torch.Tensor, own: _Keys, requests: PrefillRequests) -> torch.Tensor:
        """Attend in the absorbed form, over the rows that tokens choose: [tokens, heads, v_head_dim]."""
        rows = rows_of(step, requests)
        kv = torch.cat(own, dim=1)
        if requests.chunks:
            kv = kv.new_empty(rows.total, kv.shape[1]).index_copy_(0, rows.own, kv)
            for chunk, places in zip(requests.chunks, rows.chunks, strict=True):
                kv.index_copy_(0, places, step.path.gather(step.cache, chunk, q.dtype))
        chosen = choose_rows(step, requests)
        return self._expand(step.path.sparse_prefill(self._absorb(q), kv.unsqueeze(1), chosen, self.config.softmax_scale, self._sinks()))

    def _halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the halves of kv_b by head: from queries to the latent space [heads, nope, latent], and back [heads, latent, v]."""
        by_head = self.kv_b.view(self.heads, -1, self.config.kv_lora_rank)
        return by_head[:, : self.config.qk_nope_head_dim], by_head[:, self.config.qk_nope_head_dim :].transpose(1, 2)

    def _absorb(self, q: torch.Tensor) -> torch.Tensor:
        """Return queries of the latent space, [tokens, heads, columns of a key]."""
        nope, latent = self.config.qk_nope_head_dim, self.config.kv_lora_rank
        query_to_latent, _ = self._halves()
        absorbed = q.new_empty(*q.shape[:2], self.config.key_columns)
        queries, latent_part = q[..., :nope].transpose(0, 1), absorbed[..., :latent].transpose(0, 1)
        if is_dynamo_compiling():  # Dynamo accepts no view as out=
            latent_part.copy_(torch.bmm(queries, query_to_latent))
        else:
            torch.bmm(queries, query_to_latent, out=latent_part)
        absorbed[..., latent:] = q[..., nope:]
        return absorbed

    def _expand(self, out: torch.Tensor) -> torch.Tensor:
        """Return values [tokens, heads, v_head_dim] from those of the latent space [tokens, heads, latent columns]."""
        _, latent_to_value = self._halves()
        return torch.bmm(out.transpose(0, 1), latent_to_value).transpose(0, 1)

    def _prefill(self, step: Step, q: torch.Tensor, own: _Keys, requests: PrefillRequests) -> torch.Tensor:
        """Attend in the decompressed form, where tokens choose their keys with masks of these: [tokens, heads, v_head_dim]."""
        path, scale, ends = step.path, self.config.softmax_scale, Packed(requests.cu_seqlens, requests.max_seqlen)
        sinks = self._sinks()
        if sinks is not None and path.name == "kernels" and needs_grad(q, *own, self.kv_b, sinks):
            return SinkAttention.apply(q, *self._decompress(own), sinks, ends, scale)  # there are no cached keys then, nor masks
        masks = mask_keys(step, requests) if step.forms.prefill == "masked" else (None,) * (1 + len(requests.chunks))
        states = [path.varlen(q, self._decompress(own), (ends, ends), PrefillOptions(scale, True, masks[0]))]
        for chunk, mask in zip(requests.chunks, masks[1:], strict=True):
            cached = path.gather(step.cache, chunk, q.dtype)
            kv = self._decompress(_Keys(*cached.split((self.config.kv_lora_rank, self.config.qk_rope_head_dim), dim=1)))
            if len(states) == MAX_STATES:
                states = [path.merge(*zip(*states, strict=True))]
            states.append(path.varlen(q, kv, (ends, Packed(chunk.cu_seqlens, chunk.max_seqlen)), PrefillOptions(scale, False, mask)))
        out, lse = states[0] if len(states) == 1 else path.merge(*zip(*states, strict=True))
        return out if sinks is None else (out * torch.sigmoid(lse - sinks).unsqueeze(-1)).to(out.dtype)

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
