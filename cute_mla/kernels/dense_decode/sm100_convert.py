"""Keys and columns of an e4m3 cache that dense decode on Blackwell multiplies as 16-bit elements.

In place of the load role of sm100.py, four warps of each CTA copy its half of the columns of every key, page by page, to where the TMA
would, and convert them there to 16-bit columns two tiles later. Every e4m3 number is one of either 16-bit type, so nothing is rounded;
the scale of the cache goes into those of the scores and of the output. Roles and pipelines: ../sm100/gather.py, whose gather role is
called convert here; the other roles are the 16-bit kernel's.

Of a key past the end of the request, or in a page that the cache does not have, nothing is read, and its row is zeros: nothing need be
cleared.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Uint32, cute

from ...spec.mla import D_LATENT
from ..primitives.arithmetic import widen_in_pairs
from ..sm100.config import CTA_ROPE, SIXTEEN_BIT
from ..sm100.gather import CHUNK, E4m3Columns, LaneKeys, LatentKeySourceSm100, TileColumns, latent_e4m3_columns
from .operands import NO_PAGE, DenseDecodeOperands

ROPE_LANES = CTA_ROPE // CHUNK  # that fetch the RoPE columns of one key: all keys of a warp at once


@dataclass(frozen=True)
class WidenedColumns(E4m3Columns):
    """e4m3 columns, which become the same numbers in 16 bits."""

    dtype: type[cutlass.Numeric]

    def store(self, step: int, rows: cute.Pointer, words: cute.Tensor) -> None:
        """Convert one pass and write it to the warp's rows of a stage."""
        self.write(step, rows, widen_in_pairs(words, self.dtype))


def rope_e4m3_columns(rank: Int32) -> E4m3Columns:
    """Return the mover of a CTA's half of the RoPE columns, in the box after the values.

    A key's columns fill half of its row there, so the eight lanes that store together have keys that differ in the bits 0 and 2 of
    their numbers.
    """
    lane = cute.arch.lane_idx()
    key, chunk = lane // ROPE_LANES, lane % ROPE_LANES
    shuffled = key % 2 | key // 2 % 2 << 2 | key // 4 % 2 << 1 | key // 8 << 3
    source = D_LATENT + rank * CTA_ROPE + chunk * CHUNK
    return E4m3Columns(source, None, 1, shuffled, 0, Int32(SIXTEEN_BIT.latent_boxes), chunk)


@dataclass(frozen=True)
class RequestKeys:
    """The keys of one request. table: its row of the block table. count: how many there are."""

    table: cute.Pointer
    page_size: Int32
    count: Int32


@cute.jit
def page_and_row(keys: RequestKeys, position: Int32) -> tuple[Int32, Int32]:
    """Return the page of a key, and its row there; NO_PAGE for a key past the last one, whose entry is never read."""
    page, row = Int32(NO_PAGE), Int32(0)
    if position < keys.count:
        entry = Int32(Uint32(position) // Uint32(keys.page_size))
        page, row = (keys.table + entry).load(), position - entry * keys.page_size
    return page, row


def converted_columns(dtype: type[cutlass.Numeric], rank: Int32) -> TileColumns:
    """Return the mover of the latent and the RoPE columns of a CTA."""
    return TileColumns((), tuple(WidenedColumns(**vars(run(rank)), dtype=dtype) for run in (latent_e4m3_columns, rope_e4m3_columns)))


class PagedKeys(LatentKeySourceSm100):
    """The keys of a request, page by page."""

    def key_list(self, operands: DenseDecodeOperands, req: Int32) -> RequestKeys:
        """Return the keys of a request."""
        return RequestKeys(operands.table_row(req), operands.args.page_size, operands.schedule.lengths.keys(req))

    def look_up(self, keys: RequestKeys, position: Int32) -> tuple[Int32, Int32]:
        """Return page and row of a key."""
        return page_and_row(keys, position)

    def locate(self, operands: DenseDecodeOperands, keys: RequestKeys, found: tuple[Int32, Int32], position: Int32) -> LaneKeys:
        """Return the address of a key's row."""
        return LaneKeys(operands.cache_address(*found, Int32(0)))
