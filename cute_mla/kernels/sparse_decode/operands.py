"""The arguments of the sparse decode kernels by meaning: where a query row lies, and where the bytes of a cache slot lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, Uint32, cute

from ...spec.cache_format import CacheFormat, paged_twin
from ...spec.dense_decode import TILE_ROWS
from ...spec.sparse_decode import SPREAD_ROWS, SparseDecodeArguments, SparseDecodeConfig
from ..attention.scheduler import LatentOperands, SplitKvSchedule, WorkTile
from ..primitives.arithmetic import smaller

NO_SLOT = -1


@dataclass(frozen=True)
class SlotCache:
    """A paged cache and the indices into it. Strides of the cache in bytes, of the indices in elements."""

    base: cute.Pointer  # bytes; with both strides a multiple of 16
    indices: cute.Pointer  # int32 [batch, s_q, topk]
    index_strides: tuple[Int64, Int64]  # batch, token
    page_stride: Int64
    row_stride: Int64
    page_size: Int32
    slots: Int32

    @staticmethod
    def create(args: SparseDecodeArguments, prefix: str) -> SlotCache:
        """Return the cache whose arguments have a prefix."""

        def argument(name: str) -> Any:
            return getattr(args, prefix + name)

        strides = argument("indices_stride_batch"), argument("indices_stride_token")
        others = (argument(name) for name in ("page_stride", "row_stride", "page_size", "slots"))
        return SlotCache(argument("cache"), argument("indices"), strides, *others)

    def index_pointer(self, req: Int32) -> cute.Pointer:
        """Return the first index of this CTA's query token."""
        return self.indices + (Int64(req) * self.index_strides[0] + Int64(query_token()) * self.index_strides[1])


@dataclass(frozen=True)
class SparseDecodeOperands(LatentOperands):
    """The arguments by meaning."""

    args: SparseDecodeArguments
    cache: SlotCache
    extra: SlotCache
    schedule: SplitKvSchedule

    def _offset(self, strides: tuple[Int64, Int64, Int64], req: Int32, row: Int32, *_: Int32) -> Int64:
        return Int64(req) * strides[0] + Int64(query_token()) * strides[1] + Int64(row) * strides[2]

    def accum_row(self, work_tile: WorkTile, row: Int32) -> Int64:
        """Return the number of a query row in the split accumulators."""
        return (Int64(work_tile.accum_row) * self.args.s_q + query_token()) * self.args.h_q + row


@dataclass(frozen=True)
class SpreadOperands(SparseDecodeOperands):
    """The arguments of rows64, whose CTAs have SPREAD_ROWS heads each where the grid has more of them than TILE_ROWS would take."""

    def _cta_rows(self) -> Int32:
        return cutlass.select_((cute.arch.grid_dim()[0] - 1) * TILE_ROWS >= self.args.h_q, Int32(SPREAD_ROWS), Int32(TILE_ROWS))

    def first_row(self) -> Int32:
        """Return the first head of this CTA."""
        return cute.arch.block_idx()[0] * self._cta_rows()

    def rows(self) -> Int32:
        """Return the end of the heads of this CTA."""
        return smaller(self.first_row() + self._cta_rows(), self.args.h_q)


def query_token() -> Int32:
    """Return the query token of this CTA."""
    return cute.arch.block_idx()[1]


@dataclass(frozen=True)
class SparseDecodeIndices:
    """The indices of this CTA's query token of one request: `main` of the cache, `extra` of the second one after them."""

    main: Int32
    extra: Int32
    main_indices: cute.Pointer
    extra_indices: cute.Pointer

    @staticmethod
    def create(operands: SparseDecodeOperands, req: Int32) -> SparseDecodeIndices:
        """Return the indices that count of a request."""
        main, extra = operands.schedule.lengths.keys_by_cache(req)
        return SparseDecodeIndices(main, extra, operands.cache.index_pointer(req), operands.extra.index_pointer(req))

    def in_extra(self, position: Int32) -> Boolean:
        """Return whether a key lies in the second cache."""
        return position >= self.main


@cute.jit
def look_up(indices: SparseDecodeIndices, position: Int32) -> Int32:
    """Return the index at a position of the list; NO_SLOT past its end, where nothing is read."""
    index = Int32(NO_SLOT)
    if Uint32(position) < Uint32(indices.main + indices.extra):
        if position < indices.main:
            index = (indices.main_indices + position).load()
        else:
            index = (indices.extra_indices + (position - indices.main)).load()
    return index


def slot_address(operands: SparseDecodeOperands, config: SparseDecodeConfig, index: Int32, in_extra: Boolean) -> tuple[Int64, Int64]:
    """Return (address of a slot's row, address of its scales) as numbers; (0, 0) for a slot outside the cache."""

    def pick(name: str) -> Int64 | Int32:
        return cutlass.select_(in_extra, getattr(operands.extra, name), getattr(operands.cache, name))

    page_size, row_stride = pick("page_size"), pick("row_stride")
    valid = Uint32(index) < Uint32(pick("slots"))
    slot = cutlass.select_(valid, index, Int32(0))
    page = Int32(Uint32(slot) // Uint32(page_size))
    base = cutlass.select_(in_extra, operands.extra.base.toint(), operands.cache.base.toint())
    page_base = Int64(base) + Int64(page) * pick("page_stride")
    in_page = slot - page * page_size
    row = page_base + Int64(in_page) * row_stride
    scales = _scales_address(config.format, page_base, row, row_stride, page_size, in_page)
    if config.extra_format is not config.format:
        scales = cutlass.select_(in_extra, _scales_address(config.extra_format, page_base, row, row_stride, page_size, in_page), scales)
    nowhere = Int64(0)
    return cutlass.select_(valid, row, nowhere), cutlass.select_(valid, scales, nowhere)


def _scales_address(cache: CacheFormat, page: Int64, row: Int64, row_stride: Int64, page_size: Int32, in_page: Int32) -> Int64:
    """Return the address of a slot's scales. Where one kernel serves both orders of a format, the row stride tells which it is."""
    inside, twin = row + cache.code_bytes, paged_twin(cache)
    if cache.scales_inside and twin is None:
        return inside
    behind = page + (Int64(page_size) * (twin or cache).row_bytes + in_page * cache.scale_bytes)
    return behind if twin is None else cutlass.select_(row_stride == twin.row_bytes, behind, inside)
