"""The operands of the dense decode kernels, and where a query row lies in each of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute

from ...spec.dense_decode import FP8, LATENT, SMALL_PAGES
from ...spec.split_plan import TILE_KEYS
from ..attention.lengths import larger, smaller
from ..attention.split_kv_scheduler import Piece, Schedule
from ..attention.tiles import BOX_COLUMNS, ELEMENT_BYTES

BOX_BYTES_PER_KEY = BOX_COLUMNS * ELEMENT_BYTES
NO_PAGE = -(1 << 31)  # no table holds it: TMA takes any other page out of range for zeros


@dataclass(frozen=True)
class Fp8Cache:
    """An e4m3 cache as threads read it. Strides in bytes; pages: how many there are, whatever the table says."""

    first: cute.Pointer
    page_stride: Int64
    row_stride: Int64
    pages: Int32

    def address(self, page: Int32, row: Int32, source: Int32) -> Int64:
        """The address of byte `source` of a row, 0 for one in a page that is not there."""
        address = self.first.toint() + (Int64(Uint32(page)) * self.page_stride + Int64(Uint32(row)) * self.row_stride + source)
        return cutlass.select_(Uint32(page) < Uint32(self.pages), address, Int64(0))


@dataclass(frozen=True)
class Operands:
    """The kernel's parameters, by meaning. Strides in elements."""

    kv_map: Any
    q: cute.Pointer
    fp8_cache: Fp8Cache
    descales: tuple[cute.Pointer, cute.Pointer]  # of q and of the cache
    block_table: cute.Pointer
    out: cute.Pointer
    lse: cute.Pointer
    out_accum: cute.Pointer
    lse_accum: cute.Pointer
    q_strides: tuple[Int64, Int64, Int64]  # batch, token, head
    out_strides: tuple[Int64, Int64, Int64]  # batch, token, head
    lse_strides: tuple[Int64, Int64, Int64]  # batch, token, head
    table_stride: Int64
    scale_log2: Float32
    empty_lse: Float32
    s_q: Int32
    h_q: Int32
    heads_per_kv: Int32
    page_size: Int32
    causal: Int32
    schedule: Schedule

    def with_descales(self, kind: str) -> Operands:
        """The same, with what scales the kernel's own products in scale_log2. kind: the config's operands. Reads the scales,
        which may come from the kernel before."""
        if kind == LATENT:
            return self
        scale_log2 = self.scale_log2 * scalar_or_one(self.descales[1])
        if kind == FP8:
            scale_log2 = scale_log2 * scalar_or_one(self.descales[0])
        return replace(self, scale_log2=scale_log2)

    def row_weight(self, kind: str, total: Float32) -> Float32:
        """What makes the output of a row, from the sum of its probabilities: values have the cache's scale. Reads it again,
        once a piece, so that no register holds it meanwhile."""
        weight = 1.0 / total
        return weight if kind == LATENT else weight * scalar_or_one(self.descales[1])

    def rows(self) -> Int32:
        """Query rows of one KV head."""
        return self.s_q * self.heads_per_kv

    def box_keys(self) -> Int32:
        """Keys of one TMA box: a page, or a tile if that is less."""
        return smaller(self.page_size, Int32(TILE_KEYS))

    def place_in_table(self, first_key: Int32) -> tuple[Int32, Int32]:
        """Of this lane's box in the tile from first_key on: its entry in the block table, its first row in that page."""
        return self.place_of(first_key + cute.arch.lane_idx() * self.box_keys())

    def place_of(self, key: Int32) -> tuple[Int32, Int32]:
        """Of a key of a request: its entry in the block table, its row in that page."""
        entry = key // self.page_size
        return entry, key - entry * self.page_size

    def next_place(self, entry: Int32, row: Int32) -> tuple[Int32, Int32]:
        """The same of the tile after it, without a division: a page is a tile or more, or one of two parts of it."""
        first, second = SMALL_PAGES
        small = cutlass.select_(self.page_size == first, Int32(TILE_KEYS // first), Int32(TILE_KEYS // second))
        following = row + TILE_KEYS
        wrapped = cutlass.select_(following < self.page_size, Int32(0), Int32(1))
        is_small = self.page_size < TILE_KEYS
        return (
            entry + cutlass.select_(is_small, small, wrapped),
            cutlass.select_(is_small, row, following - wrapped * self.page_size),
        )

    def kv_head(self) -> Int32:
        """The KV head of this CTA."""
        return cute.arch.block_idx()[1]

    def token_and_head(self, row: Int32) -> tuple[Int32, Int32]:
        """Query token and query head of a row of this CTA's KV head."""
        token = Int32(Uint32(row) // Uint32(self.heads_per_kv))
        return token, self.kv_head() * self.heads_per_kv + (row - token * self.heads_per_kv)

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
        token, head = self.token_and_head(row)
        return Int64(req) * strides[0] + Int64(token) * strides[1] + Int64(head) * strides[2]

    def accum_row(self, piece: Piece, row: Int32) -> Int64:
        """Row number of a query row in the contiguous split accumulators."""
        token, head = self.token_and_head(row)
        return (Int64(piece.accum_row) * self.s_q + token) * self.h_q + head

    def least_limit(self, left: Int32) -> Int32:
        """The least key_limit of all rows."""
        return left - cutlass.select_(self.causal != 0, self.s_q - 1, Int32(0))

    def key_limit(self, left: Int32, row: Int32) -> Int32:
        """First key that a query row does not see, counted from a tile with `left` keys from it to the end of the cache:
        the end, or bottom-right causal. Rows past the last one see no key behind the end either."""
        token, _ = self.token_and_head(row)
        return left - cutlass.select_(self.causal != 0, larger(self.s_q - 1 - token, Int32(0)), Int32(0))


@cute.jit
def scalar_or_one(pointer: cute.Pointer) -> Float32:
    """The fp32 number there, or 1 for a null pointer."""
    value = Float32(1)
    if pointer.toint() != 0:
        value = pointer.load()
    return value


@dataclass(frozen=True)
class LaneBox:
    """The box of keys that a lane of the load warp fetches of one tile: lane l has the keys from l boxes on.

    active: the box holds a key in use. offset: its first key within the tile. row: its first key within the page.
    tile_bytes: of one 64-column box of all active lanes together.
    """

    active: Boolean
    offset: Int32
    page: Int32
    row: Int32
    tile_bytes: Int32

    @staticmethod
    def of(operands: Operands, page: Int32, row: Int32, boxes: Int32) -> LaneBox:
        """This lane's box, from `row` of a page on, in a tile of which `boxes` lanes have one."""
        box_keys = operands.box_keys()
        offset = cute.arch.lane_idx() * box_keys
        return LaneBox(
            active=page != NO_PAGE,
            offset=offset,
            page=page,
            row=row,
            tile_bytes=boxes * box_keys * BOX_BYTES_PER_KEY,
        )


def count_boxes(page: Int32) -> Int32:
    """Lanes of the load warp that have a page."""
    return cute.arch.popc(cute.arch.vote_ballot_sync(page != NO_PAGE))
