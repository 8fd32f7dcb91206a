"""Dense MLA decode on Blackwell over an e4m3 cache, multiplied as 16-bit elements.

The kernel of sm100.py with another role in front: four warps of each CTA load its half of the columns of every key, page by page,
and write them as 16-bit columns where the TMA would. Every e4m3 number is one of either 16-bit type, so nothing is rounded; the
scale of the cache goes into those of the scores and of the output. Roles and pipelines: sm100/row_producer.py, whose gather role
is called convert here; the other roles are the 16-bit kernel's.

Of a key behind the end of the request, or in a page that the cache does not have, nothing is read, and its row is zeros: nothing is
left to clear.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from ...spec.mla import D_LATENT
from ..attention.tiles import ELEMENT_BYTES
from ..definition import KernelDefinition
from ..primitives.e4m3 import widen_in_pairs
from ..sm100.config import CTA_ROPE, SIXTEEN_BIT, VECTOR, Tiles
from ..sm100.row_conversion import ConvertedTile, E4m3Columns, latent_e4m3_columns
from ..sm100.row_copy import PIECE, LaneKeys, make_pieces
from ..sm100.row_producer import FilledPair, filled_source
from .operands import NO_PAGE, Operands
from .sm100_rows import DenseRowsSm100

ROPE_LANES = CTA_ROPE // PIECE  # that fetch the RoPE columns of one key: all keys of a warp at once


@dataclass(frozen=True)
class WidenedColumns:
    """e4m3 columns, which become the same numbers in 16 bits."""

    columns: E4m3Columns
    dtype: type[cutlass.Numeric]

    @property
    def passes(self) -> int:
        """Loads of a lane and tile."""
        return self.columns.passes

    def fetch(self, step: int, keys: LaneKeys) -> None:
        """Starts the load of one pass; zeros for keys that are not there."""
        self.columns.fetch(step, keys)

    def store(self, step: int, rows: cute.Pointer) -> None:
        """Converts one pass and writes it to the warp's rows of a slot."""
        words = widen_in_pairs(self.columns.rPieces[step], self.dtype)
        for half in range(ELEMENT_BYTES):
            part = cute.make_tensor(words.iterator + half * VECTOR, cute.make_layout(VECTOR))
            self.columns.store_half(step, half, rows, part)


def rope_e4m3_columns(rank: Int32) -> E4m3Columns:
    """A CTA's half of the RoPE columns, in the box behind the values. A key's columns fill half of its row there, so the eight
    lanes that store together have keys that differ in the bits 0 and 2 of their numbers."""
    lane = cute.arch.lane_idx()
    key, piece = lane // ROPE_LANES, lane % ROPE_LANES
    shuffled = key % 2 | key // 2 % 2 << 2 | key // 4 % 2 << 1 | key // 8 << 3
    source = D_LATENT + rank * CTA_ROPE + piece * PIECE
    return E4m3Columns(source, None, make_pieces(1), shuffled, 0, Int32(SIXTEEN_BIT.latent_boxes), piece)


@dataclass(frozen=True)
class RequestKeys:
    """The keys of one request. table: its row of the block table. count: how many there are."""

    table: cute.Pointer
    page_size: Int32
    count: Int32


@cute.jit
def page_and_row(keys: RequestKeys, position: Int32) -> tuple[Int32, Int32]:
    """The page of a key, and its row there; NO_PAGE for a key behind the last one, whose entry is never read."""
    page, row = Int32(NO_PAGE), Int32(0)
    if position < keys.count:
        entry = Int32(Uint32(position) // Uint32(keys.page_size))
        page, row = (keys.table + entry).load(), position - entry * keys.page_size
    return page, row


class ConvertingSm100(DenseRowsSm100, FilledPair):
    """One variant of the kernel."""

    has_rope = True
    filling_role = "convert"

    def score(self, operands: Operands, tiles: Tiles, pipes: Any, tmem: Int32) -> None:
        """Of products with their scales."""
        super().score(operands.with_descales(self.config.operands), tiles, pipes, tmem)

    def columns_of(self, rank: Int32) -> ConvertedTile:
        """The latent and the RoPE columns of a CTA."""
        return ConvertedTile(tuple(WidenedColumns(run(rank), self.dtype) for run in (latent_e4m3_columns, rope_e4m3_columns)))

    def index_list(self, operands: Operands, req: Int32) -> RequestKeys:
        """The keys of a request."""
        table = operands.block_table + Int64(req) * operands.table_stride
        return RequestKeys(table, operands.page_size, operands.schedule.lengths.keys(req))

    def look_up(self, indices: RequestKeys, position: Int32) -> tuple[Int32, Int32]:
        """Page and row of a key."""
        return page_and_row(indices, position)

    def locate(self, operands: Operands, indices: RequestKeys, found: tuple[Int32, Int32], position: Int32) -> LaneKeys:
        """Where a key's row lies."""
        return LaneKeys(operands.fp8_cache.address(*found, Int32(0)))

    def variant(self) -> KernelDefinition:
        """Ready to compile."""
        return filled_source(self)
