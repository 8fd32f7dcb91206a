"""The batch of one step: decode requests first, then prefill requests, planned once for all layers.

The dataclasses hold the tensors that the kernels read. plan_batch makes them from lengths on the host, and plan_sequences for whole
sequences without a cache, such as those of training. An engine that has lengths only on
the device, or that replays a CUDA graph, constructs DecodeRequests itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from ..ops.arguments import check_integer, is_integer, short_repr
from ..ops.limits import page_size_error
from ..ops.split_plan import MlaSchedule
from ..ops.tensor_spec import check_device, check_dtype, check_shape, record_repr, spec_of
from ..parallel import ContextParallel, ContextShard
from ..parallel.decode import ShardedRequests
from .selection import KeyRows, Selection

CHUNK_TOKENS = 8_192  # 128 heads decompressed to 192 and 128 columns of 2 bytes: 671 MB


@dataclass(frozen=True)
class DecodeRequests:
    """Requests of s_q new tokens each, packed one after the other.

    block_table: int32 [requests, pages per request]. cache_seqlens: int32 [requests], keys per request, the new keys included; 0: a padding
    request, whose attention is 0. schedule: valid for all layers of this step only; window_schedule: of those with a window.
    max_keys: no request has more keys; None: as many as the block table holds. Up to index_topk of a model with an indexer, its layers
    attend to all keys and do without it. share: with context parallelism, the rank's share; block_table then holds the rank's pages.
    """

    block_table: torch.Tensor
    cache_seqlens: torch.Tensor
    s_q: int = 1
    schedule: MlaSchedule = field(default_factory=MlaSchedule)
    window_schedule: MlaSchedule = field(default_factory=MlaSchedule)
    max_keys: int | None = None
    share: ShardedRequests | None = None

    @property
    def tokens(self) -> int:
        """Return the new tokens of all requests."""
        return self.cache_seqlens.shape[0] * self.s_q

    def most_keys(self, keys_per_column: int) -> int:
        """Return a number of keys that no request exceeds. keys_per_column: of a column of the block table, on all ranks."""
        return self.block_table.shape[1] * keys_per_column if self.max_keys is None else self.max_keys

    __repr__ = record_repr


@dataclass(frozen=True)
class ContextChunk:
    """Cached keys of the prefill requests that are decompressed together, packed; a request may have none.

    block_table: int32 [requests, pages per request]. starts: int32 [requests], position of each request's first key in the chunk.
    cu_seqlens: int32 [requests + 1]. keys: keys of all requests. max_seqlen: most keys of a request.
    """

    block_table: torch.Tensor
    starts: torch.Tensor
    cu_seqlens: torch.Tensor
    keys: int
    max_seqlen: int

    def places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the request of each key and its position there, int64 [keys]."""
        numbers = torch.arange(self.cu_seqlens.shape[0] - 1, device=self.cu_seqlens.device)
        request = numbers.repeat_interleave(self.cu_seqlens.diff(), output_size=self.keys)
        return request, torch.arange(self.keys, device=request.device) + (self.starts - self.cu_seqlens[:-1])[request]

    def slots(self, page_size: int) -> torch.Tensor:
        """Return the slots of the keys, int64 [keys]."""
        request, position = self.places()
        return self.block_table[request, position // page_size].long() * page_size + position % page_size

    __repr__ = record_repr


@dataclass(frozen=True)
class PrefillRequests:
    """Requests with any number of new tokens each, packed.

    cu_seqlens: int32 [requests + 1]. max_seqlen: most new tokens of a request. tokens: new tokens of all requests. chunks: cached keys
    of the requests; every new token attends to all cached keys of its request.
    """

    cu_seqlens: torch.Tensor
    max_seqlen: int
    tokens: int
    chunks: tuple[ContextChunk, ...] = ()

    @property
    def lengths(self) -> torch.Tensor:
        """Return the keys of each request, cached and new, int32 [requests]."""
        return sum((chunk.cu_seqlens.diff() for chunk in self.chunks), self.cu_seqlens.diff())

    @property
    def most_keys(self) -> int:
        """Return a number of keys, cached and new, that no request exceeds."""
        return self.max_seqlen + sum(chunk.max_seqlen for chunk in self.chunks)

    def rows(self) -> KeyRows:
        """Lay out all keys of the requests in rows."""
        begins, device = self.cu_seqlens[:-1], self.cu_seqlens.device
        lengths = self.cu_seqlens.diff()
        contexts = sum((chunk.cu_seqlens.diff() for chunk in self.chunks), torch.zeros_like(lengths))
        firsts = sum((chunk.cu_seqlens[:-1] for chunk in self.chunks), begins)
        number = torch.arange(self.tokens, dtype=torch.int32, device=device)
        first, begin, *parts = (
            of_request.repeat_interleave(lengths, output_size=self.tokens)
            for of_request in (firsts, begins, firsts + contexts, *(firsts + chunk.starts for chunk in self.chunks))
        )
        own = parts[0] + number - begin
        chunks = tuple(
            (firsts + chunk.starts - chunk.cu_seqlens[:-1]).repeat_interleave(chunk.cu_seqlens.diff(), output_size=chunk.keys).long()
            + torch.arange(chunk.keys, device=device)
            for chunk in self.chunks
        )
        return KeyRows(self.tokens + sum(chunk.keys for chunk in self.chunks), first, own + 1, own.long(), chunks, tuple(parts))

    __repr__ = record_repr


@dataclass(frozen=True)
class MlaBatch:
    """The new tokens of a step, those of decode requests first.

    positions: int64 or int32 [tokens], position of each token in its sequence. slot_mapping: int64 or int32 [tokens], slot of each token's
    key in the cache, page * page size + row; -1: the key is not written. selection: of a model with an indexer, the keys that the last
    layer chose.
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    decode: DecodeRequests | None = None
    prefill: PrefillRequests | None = None
    selection: Selection = field(default_factory=Selection)

    def __post_init__(self) -> None:
        planned = sum(part.tokens for part in (self.decode, self.prefill) if part is not None)
        for name in ("positions", "slot_mapping"):
            spec = spec_of(name, getattr(self, name))
            check_shape(name, spec, (planned,), " with these requests")
            check_dtype(name, spec, torch.int64, torch.int32)

    @property
    def tokens(self) -> int:
        """Return the new tokens of all requests."""
        return self.positions.shape[0]

    __repr__ = record_repr


def plan_batch(
    query_lengths: Sequence[int],
    context_lengths: Sequence[int],
    block_table: torch.Tensor,
    page_size: int,
    *,
    decodes: int = 0,
    slot_mapping: torch.Tensor | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    context: ContextParallel | None = None,
) -> MlaBatch:
    """Plan a step from the new and the cached tokens of each request; does not synchronise with the device.

    query_lengths, context_lengths: new and cached tokens per request. The first `decodes` requests are decoded (absorbed form) and have
    equally many new tokens, at least one; the others are prefilled (decompressed form) and may have none.
    block_table: int32 [requests, pages per request], on the device of the layer.
    slot_mapping: slots of the new keys; default: the slots that the block table assigns.
    chunk_tokens: cached keys, over all prefill requests, that are decompressed at a time.
    context: of a layer whose keys are distributed over ranks. block_table then holds the rank's own pages.
    Raises ValueError on bad arguments.
    """
    query_lengths, context_lengths = _check_integers("query_lengths", query_lengths), _check_integers("context_lengths", context_lengths)
    _check_lengths(query_lengths, context_lengths, decodes)
    lengths = list(zip(query_lengths, context_lengths, strict=True))
    table = spec_of("block_table", block_table)
    check_shape("block_table", table, (len(lengths), "pages per request"))
    check_dtype("block_table", table, torch.int32)
    if table.device.type == "meta":
        raise ValueError("block_table is on meta; supported: the device of the layer")
    if slot_mapping is not None:
        check_device("slot_mapping", spec_of("slot_mapping", slot_mapping), table.device, "block_table")
    problem = page_size_error(page_size)
    if problem is not None:
        raise ValueError(problem)
    check_integer("chunk_tokens", chunk_tokens, 1)
    pages = _Pages(block_table, page_size, ContextShard(0, 1) if context is None else context.shard)
    pages.check_room(lengths)
    requests, positions = _locate_tokens([cached for _, cached in lengths], [new for new, _ in lengths])
    return MlaBatch(
        positions=_to_device(positions, table.device),
        slot_mapping=pages.slots(requests, positions) if slot_mapping is None else slot_mapping,
        decode=_decode(lengths[:decodes], block_table, context) if decodes else None,
        prefill=_prefill(lengths[decodes:], block_table[decodes:], chunk_tokens) if lengths[decodes:] else None,
    )


def plan_sequences(lengths: Sequence[int], device: torch.device | str) -> MlaBatch:
    """Plan whole sequences of these lengths, packed, which leave the cache alone; does not synchronise with the device.

    A layer computes their attention with gradients. Raises ValueError on bad arguments.
    """
    lengths = _check_integers("lengths", lengths)
    device = torch.device(device)
    _, positions = _locate_tokens([0] * len(lengths), lengths)
    return MlaBatch(
        positions=_to_device(positions, device),
        slot_mapping=torch.full((len(positions),), -1, device=device),
        prefill=PrefillRequests(_cu_seqlens(lengths, device), max(lengths), sum(lengths)) if lengths else None,
    )


@dataclass(frozen=True)
class _Pages:
    """The pages of the requests, on one rank."""

    block_table: torch.Tensor
    page_size: int
    shard: ContextShard

    def check_room(self, lengths: Sequence[tuple[int, int]]) -> None:
        """Raise ValueError if the block table has too few pages. lengths: new and cached keys of each request."""
        room = self.block_table.shape[1] * self.page_size
        own = self.shard.local_lengths(torch.tensor([new + cached for new, cached in lengths], dtype=torch.int64)).tolist()
        for request, ((new, cached), count) in enumerate(zip(lengths, own, strict=True)):
            if count > room:
                share = "" if self.shard.world == 1 else f", {count} of them on this rank"
                raise ValueError(f"request {request} has {cached} + {new} keys{share}; supported with this block table: up to {room}")

    def slots(self, requests: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the slots of keys, int64 [keys], -1 for other ranks' keys. requests, positions: of each key, int64 [keys] on the CPU."""
        device = self.block_table.device
        own, local = self.shard.locate(positions)
        requests, columns, rows, own = (
            _to_device(numbers, device) for numbers in (requests, torch.where(own, local // self.page_size, 0), local % self.page_size, own)
        )
        slots = self.block_table[requests, columns].long() * self.page_size + rows
        return slots if self.shard.world == 1 else torch.where(own, slots, -1)


def _to_device(counts: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy host numbers to a device without synchronising: CUDA stages pageable memory before the call returns."""
    return counts.to(device, non_blocking=True)


def _check_integers(name: str, lengths: Any) -> list[int]:
    """Return lengths as a list. Raise ValueError unless each is an integer, 0 or more."""
    if not isinstance(lengths, Sequence):
        raise ValueError(f"{name} is {short_repr(lengths)}; supported: a sequence of integers")
    return [check_integer(f"{name}[{i}]", length, 0) for i, length in enumerate(lengths)]


def _check_lengths(query_lengths: Sequence[int], context_lengths: Sequence[int], decodes: int) -> None:
    if len(query_lengths) != len(context_lengths):
        raise ValueError(f"there are {len(query_lengths)} query_lengths and {len(context_lengths)} context_lengths; supported: as many")
    if not is_integer(decodes) or not 0 <= decodes <= len(query_lengths):
        raise ValueError(f"decodes is {short_repr(decodes)} with {len(query_lengths)} requests; supported: 0 to all of them")
    if len(set(query_lengths[:decodes])) > 1 or 0 in query_lengths[:decodes]:
        raise ValueError(f"decode requests have {list(query_lengths[:decodes])} new tokens; supported: equally many, 1 or more")


def _locate_tokens(firsts: Sequence[int], counts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the request and the position of each token, both int64 [sum of counts]; positions of a request begin at its `firsts`."""
    count, first = torch.tensor(counts, dtype=torch.int64), torch.tensor(firsts, dtype=torch.int64)
    requests = torch.repeat_interleave(torch.arange(len(counts)), count)
    begins = count.cumsum(0) - count
    return requests, torch.arange(len(requests)) - begins[requests] + first[requests]


def _cu_seqlens(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return cu_seqlens of packed sequences, int32 [requests + 1]."""
    return _to_device(torch.tensor([0, *accumulate(counts)], dtype=torch.int32), device)


def _decode(lengths: list[tuple[int, int]], block_table: torch.Tensor, context: ContextParallel | None) -> DecodeRequests:
    keys = torch.tensor([new + cached for new, cached in lengths], dtype=torch.int32)
    most, s_q = max(new + cached for new, cached in lengths), lengths[0][0]
    table, seqlens = block_table[: len(lengths)], _to_device(keys, block_table.device)
    share = None if context is None else context.plan(seqlens, table, s_q, causal=True)
    return DecodeRequests(table, seqlens, s_q, max_keys=most, share=share)


def _prefill(lengths: list[tuple[int, int]], block_table: torch.Tensor, chunk_tokens: int) -> PrefillRequests:
    counts, contexts = [new for new, _ in lengths], [context for _, context in lengths]
    device = block_table.device
    chunks = []
    share = max(chunk_tokens // max(sum(context > 0 for context in contexts), 1), 1)
    for start in range(0, max(contexts), share):
        taken = [min(max(context - start, 0), share) for context in contexts]
        starts = _to_device(torch.full((len(taken),), start, dtype=torch.int32), device)
        chunks.append(ContextChunk(block_table, starts, _cu_seqlens(taken, device), sum(taken), max(taken)))
    return PrefillRequests(_cu_seqlens(counts, device), max(counts), sum(counts), tuple(chunks))
