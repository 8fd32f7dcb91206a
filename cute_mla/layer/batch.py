"""What is computed in one step: decode requests first, then prefill requests, planned once for all layers.

The dataclasses hold what the kernels read. plan_batch makes them from lengths that the host knows; an engine whose lengths are on the
device alone, or that replays a CUDA graph, makes DecodeRequests itself.
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
from ..ops.tensor_spec import check_device, check_dtype, check_shape, spec_of

CHUNK_TOKENS = 8_192  # 128 heads decompressed to 192 and 128 columns of 2 bytes: 671 MB


@dataclass(frozen=True)
class DecodeRequests:
    """Requests of s_q new tokens each, packed one after the other.

    block_table: int32 [requests, pages per request]. cache_seqlens: int32 [requests], keys of each, the new ones included; 0: padding,
    whose output is that of no attention. schedule: for all layers of this step, and no longer.
    """

    block_table: torch.Tensor
    cache_seqlens: torch.Tensor
    s_q: int = 1
    schedule: MlaSchedule = field(default_factory=MlaSchedule)

    @property
    def tokens(self) -> int:
        """New tokens of all requests."""
        return self.cache_seqlens.shape[0] * self.s_q


@dataclass(frozen=True)
class ContextChunk:
    """Some cached keys of each prefill request, packed; of some none.

    block_table: int32 [requests, pages per request]. starts: int32 [requests], position of each one's first key in the chunk.
    cu_seqlens: int32 [requests + 1]. keys: of all. max_seqlen: of the longest.
    """

    block_table: torch.Tensor
    starts: torch.Tensor
    cu_seqlens: torch.Tensor
    keys: int
    max_seqlen: int


@dataclass(frozen=True)
class PrefillRequests:
    """Requests with any number of new tokens each, packed. chunks: what they have in the cache already, which all of them see.

    cu_seqlens: int32 [requests + 1]. max_seqlen: of the longest.
    """

    cu_seqlens: torch.Tensor
    max_seqlen: int
    tokens: int
    chunks: tuple[ContextChunk, ...] = ()


@dataclass(frozen=True)
class MlaBatch:
    """The new tokens of a step, those of decode requests first.

    positions: int64 or int32 [tokens], of each in its sequence. slot_mapping: int64 or int32 [tokens], where its key goes in the cache,
    page * page size + row; -1: nowhere.
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    decode: DecodeRequests | None = None
    prefill: PrefillRequests | None = None

    def __post_init__(self) -> None:
        planned = sum(part.tokens for part in (self.decode, self.prefill) if part is not None)
        for name in ("positions", "slot_mapping"):
            spec = spec_of(name, getattr(self, name))
            check_shape(name, spec, (planned,), " with these requests")
            check_dtype(name, spec, torch.int64, torch.int32)

    @property
    def tokens(self) -> int:
        """New tokens of all requests."""
        return self.positions.shape[0]


def plan_batch(
    query_lengths: Sequence[int],
    context_lengths: Sequence[int],
    block_table: torch.Tensor,
    page_size: int,
    *,
    decodes: int = 0,
    slot_mapping: torch.Tensor | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> MlaBatch:
    """A step over requests with so many new tokens and so many in the cache already; waits for no device.

    query_lengths, context_lengths: of each request, the first `decodes` of which are decoded (absorbed) and have equally many new tokens,
    at least one; the others are prefilled (decompressed) and may have none.
    block_table: int32 [requests, pages per request], on the device of the layer.
    slot_mapping: where the new keys go; default where the block table has them.
    chunk_tokens: cached keys that are decompressed at a time, of all prefilled requests together.
    Raises ValueError on bad arguments.
    """
    query_lengths, context_lengths = _integers("query_lengths", query_lengths), _integers("context_lengths", context_lengths)
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
    room = table.shape[1] * page_size
    for request, (new, context) in enumerate(lengths):
        if new + context > room:
            raise ValueError(f"request {request} has {context} + {new} keys; supported with this block table: up to {room}")
    pages = _Pages(block_table, page_size)
    requests, positions = _tokens([context for _, context in lengths], [new for new, _ in lengths])
    return MlaBatch(
        positions=_sent(positions, table.device),
        slot_mapping=pages.slots(requests, positions) if slot_mapping is None else slot_mapping,
        decode=_decode(lengths[:decodes], block_table) if decodes else None,
        prefill=_prefill(lengths[decodes:], block_table[decodes:], chunk_tokens) if lengths[decodes:] else None,
    )


@dataclass(frozen=True)
class _Pages:
    """Where requests have their keys."""

    block_table: torch.Tensor
    page_size: int

    def slots(self, requests: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """int64 [keys]: of the keys of some requests at some positions, both int64 [keys] on the CPU."""
        device = self.block_table.device
        columns, rows = _sent(positions // self.page_size, device), _sent(positions % self.page_size, device)
        return self.block_table[_sent(requests, device), columns].long() * self.page_size + rows


def _sent(counts: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Numbers of the host on a device, without waiting for what it is doing: CUDA copies pageable memory aside before it returns."""
    return counts.to(device, non_blocking=True)


def _integers(name: str, lengths: Any) -> list[int]:
    """Lengths as a list. ValueError unless each is an integer, 0 or more."""
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


def _tokens(firsts: Sequence[int], counts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [sum of counts] twice: the request of each token, and its position, which counts from its request's first."""
    count, first = torch.tensor(counts, dtype=torch.int64), torch.tensor(firsts, dtype=torch.int64)
    requests = torch.repeat_interleave(torch.arange(len(counts)), count)
    begins = count.cumsum(0) - count
    return requests, torch.arange(len(requests)) - begins[requests] + first[requests]


def _ends(counts: Sequence[int], device: torch.device) -> torch.Tensor:
    """int32 [requests + 1]: the ends of packed sequences."""
    return _sent(torch.tensor([0, *accumulate(counts)], dtype=torch.int32), device)


def _decode(lengths: list[tuple[int, int]], block_table: torch.Tensor) -> DecodeRequests:
    keys = torch.tensor([new + context for new, context in lengths], dtype=torch.int32)
    return DecodeRequests(block_table[: len(lengths)], _sent(keys, block_table.device), lengths[0][0])


def _prefill(lengths: list[tuple[int, int]], block_table: torch.Tensor, chunk_tokens: int) -> PrefillRequests:
    counts, contexts = [new for new, _ in lengths], [context for _, context in lengths]
    device = block_table.device
    chunks = []
    share = max(chunk_tokens // max(sum(context > 0 for context in contexts), 1), 1)
    for start in range(0, max(contexts), share):
        taken = [min(max(context - start, 0), share) for context in contexts]
        starts = _sent(torch.full((len(taken),), start, dtype=torch.int32), device)
        chunks.append(ContextChunk(block_table, starts, _ends(taken, device), sum(taken), max(taken)))
    return PrefillRequests(_ends(counts, device), max(counts), sum(counts), tuple(chunks))
