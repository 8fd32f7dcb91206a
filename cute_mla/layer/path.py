"""Attention of a layer by the kernels or, on devices without kernels, in plain torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, Protocol

import torch

from .. import reference
from ..api import flash_attn_varlen_func, flash_mla_sparse_fwd, flash_mla_with_kvcache, is_supported, merge_states
from ..cache import dequantise_cache, gather_kv_cache
from ..indexer import indexer_topk, indexer_topk_prefill
from ..ops.limits import value_columns
from ..ops.split_plan import MlaSchedule
from ..runtime.current import kernel_arch
from ..spec.arch import ARCHS, Arch
from ..spec.cache_format import FP8_656, NOPE_528
from ..spec.mla import D_LATENT, D_V
from ..tracing.detection import constant_when_traced
from .batch import ContextChunk, DecodeRequests
from .index_keys import IndexRows, gather_index_rows
from .indexer import IndexQueries
from .pages import Pages
from .selection import ChosenKeys, KeyRows, every_slot

PACKED = (FP8_656, NOPE_528)  # formats of caches whose tokens hold their scales, with rotary columns and without

MAX_STATES = 8  # states that merge_states reads without a copy

logger = logging.getLogger(__name__)


class Packed(NamedTuple):
    """Lengths of packed sequences: cu_seqlens int32 [requests + 1], and the length of the longest sequence."""

    cu_seqlens: torch.Tensor
    max_seqlen: int


class Op(NamedTuple):
    """An op that a call needs, as is_supported names it. columns: of its queries; None where they do not decide."""

    name: str
    columns: int | None = None


class Cache(NamedTuple):
    """A cache: keys [pages, page size, 1, latent + rotary columns, or bytes of a token], and the fp32 scale of e4m3 keys, or None."""

    keys: torch.Tensor
    descale: torch.Tensor | None

    @property
    def packed(self) -> str | None:
        """Return the format of a cache of uint8, whose tokens hold their scales: 656 bytes, or 528 without rotary columns; else None."""
        bytes_of_token = self.keys.shape[3] if self.keys.dtype == torch.uint8 else 0
        return next((each.name for each in PACKED if bytes_of_token == each.page_bytes(1)), None)


def rows_of_pages(keys: torch.Tensor) -> torch.Tensor:
    """Return the keys of a cache in rows [slots, 1, columns], without a copy. Raise ValueError if there is something between its pages."""
    pages, page_size, _, columns = keys.shape
    if pages > 1 and keys.stride(0) != page_size * keys.stride(1):
        raise ValueError(
            f"k_cache has strides {list(keys.stride())}; supported with {columns} columns of 16 bits where tokens choose their keys: pages "
            "one behind the other"
        )
    return keys.flatten(0, 1)


class DecodeOptions(NamedTuple):
    """Options of decode.

    scale: of the softmax. dtype: of the result. descale_q: fp32, the scale of e4m3 queries, whose result is bf16. sinks: fp32 [heads], or
    None. window: as in flash_mla_with_kvcache.
    """

    scale: float
    dtype: torch.dtype
    descale_q: torch.Tensor | None = None
    batch_invariant: bool = False
    sinks: torch.Tensor | None = None
    window: int | None = None


class PrefillOptions(NamedTuple):
    """Options of dense prefill, as flash_attn_varlen_func's softmax_scale, causal and key_mask."""

    scale: float
    causal: bool
    key_mask: torch.Tensor | None = None


class AttentionPath(Protocol):
    """Implementation of attention, of the choice of keys, and of reading caches. Results have the dtype of q, unless options name one."""

    @property
    def name(self) -> str:
        """Return "kernels" or "reference"."""
        ...

    @property
    def world(self) -> int:
        """Return the number of ranks over which keys are distributed."""
        ...

    def decode(self, q: torch.Tensor, cache: Cache, requests: DecodeRequests, options: DecodeOptions) -> torch.Tensor:
        """Compute causal attention of q [requests, s_q, heads, columns of a key] over the cache: [requests, s_q, heads, latent columns]."""
        ...

    def window_prefill(self, q: torch.Tensor, pages: Pages, ends: Packed, options: DecodeOptions) -> torch.Tensor:
        """Compute causal attention of packed q [tokens, heads, columns of a key] within a window: [tokens, heads, latent columns]."""
        ...

    def sparse_decode(
        self, q: torch.Tensor, cache: Cache, chosen: ChosenKeys, schedule: MlaSchedule, options: DecodeOptions
    ) -> torch.Tensor:
        """Compute attention of q [requests, s_q, heads, 576] over the slots chosen: [requests, s_q, heads, 512]."""
        ...

    def sparse_prefill(
        self, q: torch.Tensor, kv: torch.Tensor, chosen: ChosenKeys, scale: float, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute attention of q [tokens, heads, 576] over the rows chosen of kv [rows, 1, 576]: [tokens, heads, 512]."""
        ...

    def choose_slots(self, queries: IndexQueries, index_cache: torch.Tensor, requests: DecodeRequests, topk: int) -> ChosenKeys:
        """Return the slots that an indexer chooses for the tokens of decode requests."""
        ...

    def choose_pools(
        self, q: torch.Tensor, weights: torch.Tensor, index_cache: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, topk: int
    ) -> torch.Tensor:
        """Return the pools that an indexer chooses, int32 [tokens, topk]. lengths: int32 [requests, tokens], pools that a token sees."""
        ...

    def every_slot(self, requests: DecodeRequests, page_size: int, topk: int) -> ChosenKeys:
        """Return the slots of all keys of decode requests, which have at most topk."""
        ...

    def choose_rows(self, queries: IndexQueries, keys: IndexRows, rows: KeyRows, most_keys: int, topk: int) -> torch.Tensor:
        """Return the positions that an indexer chooses for the tokens of prefill requests, int32 [tokens, topk]."""
        ...

    def gather(self, cache: Cache, chunk: ContextChunk, dtype: torch.dtype) -> torch.Tensor:
        """Return cached keys [keys, latent + rotary columns], dequantised."""
        ...

    def gather_index(self, index_cache: torch.Tensor, chunk: ContextChunk) -> IndexRows:
        """Return cached keys of an indexer."""
        ...

    def varlen(
        self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], ends: tuple[Packed, Packed], options: PrefillOptions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute out and lse of packed queries over packed keys and values, as flash_attn_varlen_func. ends: of queries and of keys."""
        ...

    def merge(self, outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge up to MAX_STATES states into attention over the union of their keys, as merge_states."""
        ...


class _CachedKeys:
    """Reading of caches that lie on one device."""

    @property
    def world(self) -> int:
        """Return 1."""
        return 1

    def every_slot(self, requests: DecodeRequests, page_size: int, topk: int) -> ChosenKeys:
        """Choose as AttentionPath.every_slot."""
        return every_slot(requests.block_table, requests.cache_seqlens, requests.s_q, page_size, topk)

    def gather(self, cache: Cache, chunk: ContextChunk, dtype: torch.dtype) -> torch.Tensor:
        """Gather as AttentionPath.gather."""
        packed = (chunk.block_table, chunk.cu_seqlens, chunk.keys)
        return gather_kv_cache(cache.keys, *packed, starts=chunk.starts, descale_k=cache.descale, dtype=dtype, kv_format=cache.packed)

    def gather_index(self, index_cache: torch.Tensor, chunk: ContextChunk) -> IndexRows:
        """Gather as AttentionPath.gather_index."""
        return gather_index_rows(index_cache, chunk.slots(index_cache.shape[1]))


class KernelPath(_CachedKeys):
    """Attention by the kernels, on a GPU or on the simulated device."""

    name = "kernels"

    def decode(self, q: torch.Tensor, cache: Cache, requests: DecodeRequests, options: DecodeOptions) -> torch.Tensor:
        """Decode as AttentionPath.decode."""
        d_v = value_columns(q.shape[-1])
        out, _ = flash_mla_with_kvcache(
            q,
            cache.keys,
            requests.block_table,
            requests.cache_seqlens,
            d_v,
            requests.schedule if options.window is None else requests.window_schedule,
            softmax_scale=options.scale,
            causal=True,
            attn_sink=options.sinks,
            descale_q=options.descale_q,
            descale_k=cache.descale,
            batch_invariant=options.batch_invariant,
            window=options.window,
        )
        return out

    def window_prefill(self, q: torch.Tensor, pages: Pages, ends: Packed, options: DecodeOptions) -> torch.Tensor:
        """Attend as AttentionPath.window_prefill."""
        out, _ = flash_mla_with_kvcache(
            q,
            pages.keys,
            pages.table,
            pages.lengths,
            value_columns(q.shape[-1]),
            MlaSchedule(),
            softmax_scale=options.scale,
            causal=True,
            cu_seqlens_q=ends.cu_seqlens,
            max_seqlen_q=max(ends.max_seqlen, 1),
            batch_invariant=options.batch_invariant,
            window=options.window,
        )
        return out

    def sparse_decode(
        self, q: torch.Tensor, cache: Cache, chosen: ChosenKeys, schedule: MlaSchedule, options: DecodeOptions
    ) -> torch.Tensor:
        """Decode as AttentionPath.sparse_decode. Keys of 512 columns of 16 bits are read by sparse prefill, which has kernels for them."""
        if q.shape[3] == D_LATENT and cache.packed is None:
            counts = chosen.counts.repeat_interleave(q.shape[1], output_size=q.shape[0] * q.shape[1])
            rows = ChosenKeys(chosen.indices.flatten(0, 1).unsqueeze(1), counts)
            out = self.sparse_prefill(q.flatten(0, 1), rows_of_pages(cache.keys), rows, options.scale, options.sinks)
            return out.unflatten(0, q.shape[:2])
        out, _ = flash_mla_with_kvcache(
            q,
            cache.keys,
            None,
            None,
            D_V,
            schedule,
            softmax_scale=options.scale,
            is_fp8_kvcache=cache.packed is not None,
            kv_format=cache.packed,
            attn_sink=options.sinks,
            indices=chosen.indices,
            topk_length=chosen.counts,
            batch_invariant=options.batch_invariant,
        )
        return out

    def sparse_prefill(
        self, q: torch.Tensor, kv: torch.Tensor, chosen: ChosenKeys, scale: float, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend as AttentionPath.sparse_prefill."""
        out, *_ = flash_mla_sparse_fwd(q, kv, chosen.indices, scale, attn_sink=sinks, topk_length=chosen.counts)
        return out

    def choose_slots(self, queries: IndexQueries, index_cache: torch.Tensor, requests: DecodeRequests, topk: int) -> ChosenKeys:
        """Choose as AttentionPath.choose_slots."""
        by_request = queries.q.unflatten(0, (-1, requests.s_q))
        lengths, table = requests.cache_seqlens, requests.block_table
        slots = indexer_topk(by_request, queries.weights, index_cache, lengths, table, topk, slots=True)
        return ChosenKeys(slots.unflatten(0, (-1, requests.s_q)), lengths.clamp(0, topk))

    def choose_pools(
        self, q: torch.Tensor, weights: torch.Tensor, index_cache: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, topk: int
    ) -> torch.Tensor:
        """Choose as AttentionPath.choose_pools."""
        return indexer_topk(q, weights, index_cache, lengths, table, topk)

    def choose_rows(self, queries: IndexQueries, keys: IndexRows, rows: KeyRows, most_keys: int, topk: int) -> torch.Tensor:
        """Choose as AttentionPath.choose_rows."""
        return indexer_topk_prefill(queries.q, keys, queries.weights, rows.first, rows.end, topk, max_seqlen_k=most_keys)

    def varlen(
        self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], ends: tuple[Packed, Packed], options: PrefillOptions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend as AttentionPath.varlen."""
        (cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k) = ends
        k, v = kv
        lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        return flash_attn_varlen_func(q, k, v, *lengths, softmax_scale=options.scale, causal=options.causal, key_mask=options.key_mask)

    def merge(self, outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge as AttentionPath.merge."""
        return merge_states(outs, lses)


class ReferencePath(_CachedKeys):
    """Attention in plain torch on any device, in fp64, rounded once: slow. Reads lengths on the host."""

    name = "reference"

    def decode(self, q: torch.Tensor, cache: Cache, requests: DecodeRequests, options: DecodeOptions) -> torch.Tensor:
        """Decode as AttentionPath.decode."""
        table, lengths, descales = requests.block_table, requests.cache_seqlens, (options.descale_q, cache.descale)
        seen = reference.SeenKeys(True, window=(options.window, 0))
        out, lse = reference.dense_decode(q, cache.keys, table, lengths, options.scale, seen, descales=descales)
        return (out if options.sinks is None else reference.scale_by_sink(out, lse, options.sinks)).to(options.dtype)

    def window_prefill(self, q: torch.Tensor, pages: Pages, ends: Packed, options: DecodeOptions) -> torch.Tensor:
        """Attend as AttentionPath.window_prefill."""
        seen, parts = reference.SeenKeys(True, window=(options.window, 0)), []
        for request, tokens in enumerate(q.split(ends.cu_seqlens.diff().tolist())):
            own = slice(request, request + 1)
            out, _ = reference.dense_decode(tokens.unsqueeze(0), pages.keys, pages.table[own], pages.lengths[own], options.scale, seen)
            parts.append(out.squeeze(0))
        return torch.cat(parts).to(options.dtype)

    def sparse_decode(
        self, q: torch.Tensor, cache: Cache, chosen: ChosenKeys, schedule: MlaSchedule, options: DecodeOptions
    ) -> torch.Tensor:
        """Decode as AttentionPath.sparse_decode."""
        keys = cache.keys if cache.packed is None else dequantise_cache(cache.keys, cache.packed)
        read = reference.IndexedCache(keys.flatten(0, 2), chosen.indices, chosen.counts)
        out, _ = reference.sparse_decode(q, [read], options.scale, options.sinks)
        return out.to(options.dtype)

    def sparse_prefill(
        self, q: torch.Tensor, kv: torch.Tensor, chosen: ChosenKeys, scale: float, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend as AttentionPath.sparse_prefill."""
        out, *_ = reference.sparse_prefill(q, kv, chosen.indices, scale, attn_sink=sinks, topk_length=chosen.counts)
        return out.to(q.dtype)

    def choose_slots(self, queries: IndexQueries, index_cache: torch.Tensor, requests: DecodeRequests, topk: int) -> ChosenKeys:
        """Choose as AttentionPath.choose_slots."""
        by_request = queries.q.unflatten(0, (-1, requests.s_q))
        lengths, table = requests.cache_seqlens, requests.block_table
        slots = reference.indexer_topk(by_request, queries.weights, index_cache, lengths, table, topk, slots=True)
        return ChosenKeys(slots.unflatten(0, (-1, requests.s_q)), lengths.clamp(0, topk))

    def choose_pools(
        self, q: torch.Tensor, weights: torch.Tensor, index_cache: torch.Tensor, lengths: torch.Tensor, table: torch.Tensor, topk: int
    ) -> torch.Tensor:
        """Choose as AttentionPath.choose_pools."""
        return reference.indexer_topk(q, weights, index_cache, lengths, table, topk)

    def choose_rows(self, queries: IndexQueries, keys: IndexRows, rows: KeyRows, most_keys: int, topk: int) -> torch.Tensor:
        """Choose as AttentionPath.choose_rows."""
        return reference.indexer_topk_prefill(queries.q, keys, queries.weights, rows.first, rows.end, topk, most_keys)

    def varlen(
        self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], ends: tuple[Packed, Packed], options: PrefillOptions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend as AttentionPath.varlen."""
        queries, keys = ends
        k, v = kv
        lengths = (queries.cu_seqlens, keys.cu_seqlens)
        out, lse = reference.masked_prefill(q, k, v, lengths, options.key_mask, options.scale, options.causal)
        return out.to(q.dtype), lse

    def merge(self, outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Merge as AttentionPath.merge."""
        out, lse = reference.merge_states(torch.stack(list(outs)), torch.stack(list(lses)))
        return out.to(outs[0].dtype), lse


def attention_path(device: torch.device, ops: tuple[Op, ...] = ()) -> AttentionPath:
    """Return the implementation for tensors of this device: the kernels if it has those of all these ops, else the reference."""
    return ReferencePath() if _lacking(device, ops) else KernelPath()


@constant_when_traced
def _lacking(device: torch.device, ops: tuple[Op, ...]) -> str:
    """Return which op has no kernels here and why, "" if all have.

    A constant when traced: a layer compiled inside simulate() only works inside, and vice versa.
    """
    arch = kernel_arch(device)
    if arch is not None:
        return _refusal(arch, ops)
    kinds = ", ".join(f"{known.capabilities_text} ({known.name})" for known in ARCHS.values())
    return f"the kernels are for GPUs of compute capability {kinds}, and run on CPU tensors inside cute_mla.simulate()"


@cache
def _refusal(arch: Arch, ops: tuple[Op, ...]) -> str:
    """Return which op an architecture does not support and why, "" if it supports all."""
    for name, columns in ops:
        served, reason = is_supported(name, arch.name, **({} if columns is None else {"head_dim": columns}))
        if not served:
            return f"{name}: {reason}"
    return ""


def warn_reference(device: torch.device, ops: tuple[Op, ...]) -> None:
    """Log a warning, once per device and op without kernels: the reference computes attention."""
    warn_once(device, _lacking(device, ops))


@cache
def warn_once(device: torch.device, reason: str) -> None:
    """Log it."""
    logger.warning("attention on %s is computed by the torch reference, which is slow: %s", device, reason)
