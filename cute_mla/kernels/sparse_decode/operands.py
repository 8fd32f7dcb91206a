"""The operands of the sparse decode kernels: where a query row lies in each of them, and where the bytes of a slot lie."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute

from ...spec.cache_format import CacheFormat
from ..attention.split_kv_scheduler import Piece, Schedule

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

    def index_pointer(self, req: Int32) -> cute.Pointer:
        """The first index of this CTA's query token."""
        return self.indices + (Int64(req) * self.index_strides[0] + Int64(query_token()) * self.index_strides[1])


@dataclass(frozen=True)
class Operands:
    """The kernel's parameters, by meaning. Strides in elements."""

    q: cute.Pointer
    out: cute.Pointer
    lse: cute.Pointer
    out_accum: cute.Pointer
    lse_accum: cute.Pointer
    attn_sink: cute.Pointer  # fp32 [h_q], or null
    cache: SlotCache
    extra: SlotCache
    q_strides: tuple[Int64, Int64, Int64]  # batch, token, head
    out_strides: tuple[Int64, Int64, Int64]  # batch, token, head
    lse_strides: tuple[Int64, Int64, Int64]  # batch, token, head
    scale_log2: Float32
    empty_lse: Float32
    s_q: Int32
    h_q: Int32
    schedule: Schedule

    def rows(self) -> Int32:
        """Query rows that share this CTA's keys: the heads of one query token."""
        return self.h_q

    def q_row(self, req: Int32, row: Int32) -> cute.Pointer:
        """Element 0 of a query row."""
        return self.q + self._offset(self.q_strides, req, row)

    def out_row(self, req: Int32, row: Int32) -> cute.Pointer:
        """Element 0 of an output row."""
        return self.out + self._offset(self.out_strides, req, row)

    def lse_of(self, req: Int32, row: Int32) -> cute.Pointer:
        """The lse of a query row."""
        return self.lse + self._offset(self.lse_strides, req, row)

    def _offset(self, strides: tuple[Int64, Int64, Int64], req: Int32, row: Int32) -> Int64:
        return Int64(req) * strides[0] + Int64(query_token()) * strides[1] + Int64(row) * strides[2]

    def accum_row(self, piece: Piece, row: Int32) -> Int64:
        """Row number of a query row in the contiguous split accumulators."""
        return (Int64(piece.accum_row) * self.s_q + query_token()) * self.h_q + row


def query_token() -> Int32:
    """The query token of this CTA."""
    return cute.arch.block_idx()[1]


@dataclass(frozen=True)
class IndexList:
    """The indices of this CTA's query token of one request: `main` of the cache, `extra` of the second one behind them."""

    main: Int32
    extra: Int32
    main_indices: cute.Pointer
    extra_indices: cute.Pointer

    @staticmethod
    def of(operands: Operands, req: Int32) -> IndexList:
        """Those that count of a request."""
        main, extra = operands.schedule.lengths.parts(req)
        return IndexList(main, extra, operands.cache.index_pointer(req), operands.extra.index_pointer(req))

    def in_extra(self, position: Int32) -> Boolean:
        """Whether a key lies in the second cache."""
        return position >= self.main


@cute.jit
def look_up(indices: IndexList, position: Int32) -> Int32:
    """The index at a position of the list; NO_SLOT past its end, where nothing is read."""
    index = Int32(NO_SLOT)
    if Uint32(position) < Uint32(indices.main + indices.extra):
        if position < indices.main:
            index = (indices.main_indices + position).load()
        else:
            index = (indices.extra_indices + (position - indices.main)).load()
    return index


def slot_address(operands: Operands, cache_format: CacheFormat, index: Int32, in_extra: Boolean) -> tuple[Int64, Int64]:
    """(address of a slot's row, address of its scales) as numbers; (0, 0) for a slot that is not there."""

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
    scales = row + cache_format.quantised
    if not cache_format.scales_inside:
        scales = page_base + (Int64(page_size) * cache_format.row_bytes + in_page * cache_format.scale_bytes)
    nowhere = Int64(0)
    return cutlass.select_(valid, row, nowhere), cutlass.select_(valid, scales, nowhere)
