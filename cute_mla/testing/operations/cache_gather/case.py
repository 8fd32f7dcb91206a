"""Cases of cache_gather."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar

import torch
from torch import Tensor

from ....cache import quantise_cache
from ....ops.cache_codec import to_e4m3
from ....spec.cache_rows import FP8_576
from ....spec.mla import ceil_div
from ...cases.base import DTYPES, Tags
from ...cases.far import far_tensor
from ...cases.paged_cache import PagedCacheCase, allocate_cache, scale_tensor
from ...cases.tensors import OUTSIDE, OutputBuffer, generator_for, nan_tensor, outside_pages

UNUSED_PAGE = 2_147_480_000  # in block tables, behind the pages of a request


@dataclass(frozen=True)
class CacheGatherCase(PagedCacheCase):
    """One gather.

    lengths: keys to gather per request. starts: position of each request's first key, None: omitted. rest: rows of out behind the last key;
        negative: so many keys at the end have none.
    far_table: the last row of the block table lies FAR_ELEMENTS or more from the first. outputs: of the far ones, "far_tokens" only.
    broken: every seventh column of the block table names no page, and the longest request needs one entry more than the table has.
    """

    op: ClassVar[str] = "cache_gather"
    tags: ClassVar[Tags] = {
        "starts": lambda starts: "from" + "_".join(map(str, starts)),
        "rest": lambda rest: f"rest{rest}",
        "broken": lambda _: "broken_table",
        "far_table": lambda _: "table_far",
        **PagedCacheCase.tags,
    }

    lengths: tuple[int, ...] = (65,)
    starts: tuple[int, ...] | None = None
    rest: int = 0
    broken: bool = False
    far_table: bool = False

    @property
    def shape_id(self) -> str:
        """Return the first part of the id."""
        lengths = "_".join(map(str, self.lengths)) if len(self.lengths) <= 6 else f"{self.keys}_of_{len(self.lengths)}"
        return f"{self.cache}-{self.dtype}-k{lengths}-x{self.page_size}"

    @property
    def keys(self) -> int:
        """Return the number of keys that the call moves."""
        return sum(self.lengths)

    @property
    def firsts(self) -> tuple[int, ...]:
        """Return the position of each request's first key."""
        return self.starts or (0,) * len(self.lengths)

    @property
    def finding_kinds(self) -> frozenset[str]:
        """Return the kinds of findings that the simulated device must report."""
        spans = zip(self.firsts, self.pages_of_each, strict=True)
        used = {entry for first, end in spans for entry in range(first // self.page_size, end)}
        return frozenset({OUTSIDE} if used & set(self.broken_entries) else ())

    @property
    def columns(self) -> int:
        """Return the columns of the block table."""
        return max(self.pages_of_each, default=0) - (1 if self.broken else 0)

    @property
    def broken_entries(self) -> range:
        """Return the columns of the block table that name no page."""
        return range(1, self.columns if self.broken else 1, 7)

    @property
    def pages_of_each(self) -> tuple[int, ...]:
        """Return the entries of the block table up to each request's last key."""
        return tuple(
            ceil_div(first + length, self.page_size) if length else 0 for first, length in zip(self.firsts, self.lengths, strict=True)
        )


@dataclass(frozen=True)
class CacheGatherTensors:
    """The operands of a case, as gather_kv_cache takes them."""

    k_cache: Tensor
    block_table: Tensor
    cu_seqlens: Tensor
    starts: Tensor | None
    descale_k: Tensor | None
    output_buffers: Mapping[str, OutputBuffer] = field(default_factory=dict)


def make_cache_gather_tensors(case: CacheGatherCase, device: str | torch.device = "cpu") -> CacheGatherTensors:
    """Make the operands of a case: equal for equal cases."""
    device = torch.device(device)
    table, used = _block_table(case)
    ends = [0, *accumulate(case.lengths)]
    return CacheGatherTensors(
        k_cache=_filled(case, used, device),
        block_table=_far_rows(table, device) if case.far_table else table.to(device),
        cu_seqlens=torch.tensor(ends, dtype=torch.int32, device=device),
        starts=None if case.starts is None else torch.tensor(case.starts, dtype=torch.int32, device=device),
        descale_k=scale_tensor(case, device),
        output_buffers=_output_buffers(case, device),
    )


def _block_table(case: CacheGatherCase) -> tuple[Tensor, Tensor]:
    """Draw the block table, int32 [batch, pages per request], a slice of a wider one. Mark the slots that the call reads, bool [slots]."""
    draw = torch.Generator().manual_seed(case.seed + 1)
    counts = case.pages_of_each
    most = case.columns
    table = torch.full((len(counts), most + 2), UNUSED_PAGE, dtype=torch.int32)
    used = torch.zeros(case.pages * case.page_size, dtype=torch.bool)
    pages = torch.randperm(case.pages, generator=draw)[torch.arange(sum(counts)) % case.pages]
    for request, own in enumerate(pages.split(counts)):
        table[request, : min(len(own), most)] = own[:most]
        positions = case.firsts[request] + torch.arange(case.lengths[request])
        positions = positions[positions // case.page_size < most]
        used[own[positions // case.page_size] * case.page_size + positions % case.page_size] = True
    if case.broken:
        shape = (len(counts), len(case.broken_entries))
        table[:, case.broken_entries] = outside_pages(case.pages, math.prod(shape)).view(shape)
    return table[:, :most], used


def _far_rows(table: Tensor, device: torch.device) -> Tensor:
    """Copy a block table to rows of which the last lies far from the first."""
    return far_tensor(table.shape, 0, torch.int32, device).copy_(table)


def _filled(case: CacheGatherCase, used: Tensor, device: torch.device) -> Tensor:
    """Make a cache whose used slots hold keys."""
    cache = allocate_cache(case, device)
    slots, layout = case.pages * case.page_size, case.format
    draw = generator_for(case, slots * layout.d_qk, torch.device("cpu"), 2)
    keys = torch.randn(case.pages, case.page_size, 1, layout.d_qk, generator=draw) * 10.0 ** torch.empty(
        case.pages, case.page_size, 1, 1
    ).uniform_(-3, 2, generator=draw)
    keys = torch.where(used.view(case.pages, case.page_size, 1, 1), keys, math.nan).to(device)
    if not layout.quantised:
        cache.copy_(keys)
    elif layout is FP8_576:
        cache.view(torch.uint8).copy_(to_e4m3(keys))
    else:
        quantise_cache(keys, case.cache, out=cache)
    return cache


def _output_buffers(case: CacheGatherCase, device: torch.device) -> dict[str, OutputBuffer]:
    """Allocate out, dtype [rows, d_qk], if the caller passes it."""
    rows, columns, dtype = case.keys + case.rest, case.format.d_qk, DTYPES[case.dtype]
    if case.outputs == "allocated":
        return {}
    if case.outputs == "given":
        out = nan_tensor((rows, columns), dtype, device)
        return {"out": OutputBuffer(out, out)}
    if case.outputs == "far_tokens":
        out = far_tensor((rows, columns), 0, dtype, device)
        return {"out": OutputBuffer(out, out)}
    out = nan_tensor((rows + 1, columns + (3 if case.outputs == "odd" else 64)), dtype, device)
    return {"out": OutputBuffer(out[1:, 1:-2] if case.outputs == "odd" else out[1:, 32:-32], out)}
