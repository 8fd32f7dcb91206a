"""Dense MLA decode on Hopper over an e4m3 cache, multiplied as 16-bit elements.

The kernel of sm90.py with another role in front: four warps load the rows of a tile, page by page, and write them as 16-bit
columns to the slots of the rings. Every e4m3 number is one of either 16-bit type, so nothing is rounded; the scales of the cache
go into those of the scores and of the output. Score and output are the 16-bit kernel's, and so are tiles, barriers and the trick.

Roles (512 threads):
  convert  warpgroup 0: pages, addresses, loads, conversion
  score    warpgroup 1
  output   warpgroups 2, 3

Pipelines: as in sm90.py, with 4 arrivals on kv_ready and rope_ready, one a warp, instead of bytes. Of a key behind the end of the
request, or in a page that the cache does not have, nothing is read, and its row is zeros: nothing is left to clear.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from ...spec.mla import D_QK
from ...spec.split_plan import TILE_KEYS
from ..attention.lengths import smaller
from ..attention.tiles import BOX_COLUMNS
from ..primitives.e4m3 import widen
from ..primitives.pipeline import arrive
from ..sm90.config import (
    ALL_REGISTERS,
    BOX_BYTES,
    OUTPUT_GROUPS,
    SLOT_BYTES,
    SLOT_COLUMNS,
    SLOTS_PER_TILE,
    WARPS_PER_GROUP,
    Geometry,
    Pipes,
    Tiles,
)
from ..sm90.gather_split import HALF_BYTES, HALF_KEYS, HALVES
from ..sm90.gathered import GatheredRolesSm90
from ..sm90.row_conversion import LANES_PER_KEY, ROPE_SLOT, Lane, Run, Step, load_runs, steps_ahead, store_runs
from .operands import NO_PAGE, Operands
from .sm90_rows import DenseRowsSm90

CONVERT_REGISTERS = 80
GEOMETRY = Geometry(
    d_qk=D_QK,
    q_tiles_in_registers=2,
    kv_slots=9,
    rope_slots=3,
    first_registers=CONVERT_REGISTERS,
    score_registers=ALL_REGISTERS - OUTPUT_GROUPS * Geometry.output_registers - CONVERT_REGISTERS,
    ready_arrivals=WARPS_PER_GROUP,
    valid_slots=0,
)


def tile_steps() -> tuple[Step, ...]:
    """All steps of a tile, in order: slot by slot."""
    steps = []
    for first in range(0, D_QK, SLOT_COLUMNS):
        columns = range(first, min(first + SLOT_COLUMNS, D_QK), BOX_COLUMNS)
        runs = [Run((column - first) // BOX_COLUMNS, column, quantised=True) for column in columns]
        steps += [Step(first // SLOT_COLUMNS, key, (run,)) for run in runs for key in range(HALVES)]
    assert steps[-1].slot == ROPE_SLOT
    return tuple(steps)


STEPS = tile_steps()
AHEAD = steps_ahead(STEPS)


@dataclass(frozen=True)
class Place:
    """Where this thread's two keys of a tile lie. entry, row: of the first one, in the block table and in its page. left: keys
    of the piece from the first one on."""

    entry: Int32
    row: Int32
    left: Int32

    def following(self, operands: Operands) -> Place:
        """The same of the next tile."""
        return Place(*operands.next_place(self.entry, self.row), self.left - TILE_KEYS)


@cute.jit
def look_up(operands: Operands, req: Int32, place: Place) -> tuple[Int32, Int32]:
    """The pages of the thread's two keys; NO_PAGE for a key that the piece does not have, whose entry is never read."""
    first, second = Int32(NO_PAGE), Int32(NO_PAGE)
    table = operands.block_table + (Int64(Uint32(req)) * operands.table_stride + Int64(Uint32(place.entry)))
    if place.left > 0:
        first = table.load()
    if place.left > HALF_KEYS:
        entries, _ = place_of_second(operands, place.row)
        second = (table + entries).load()
    return first, second


def place_of_second(operands: Operands, row: Int32) -> tuple[Int32, Int32]:
    """From a thread's first key, in some row of its page, to its second: entries of the block table further, the row there.

    A page has a tile or more, or is a SMALL_PAGES-th of it. Compared with the row, which changes, so that no register holds
    what only the size of a page decides."""
    beyond = row + HALF_KEYS - operands.page_size
    entries = cutlass.select_(beyond >= 0, Int32(1), Int32(0)) + cutlass.select_(beyond >= operands.page_size, Int32(1), Int32(0))
    return entries, row + HALF_KEYS - entries * operands.page_size


class ConvertingSm90(DenseRowsSm90, GatheredRolesSm90):
    """One variant of the kernel."""

    geometry = GEOMETRY
    first_role = "convert"

    @cute.jit
    def gather(self, operands: Operands, tiles: Tiles, pipes: Pipes, thread: Int32):
        """Waits kv_free, rope_free. Signals kv_ready, rope_ready."""
        schedule = operands.schedule
        req, begin_tile = schedule.first_piece()
        last = schedule.last_request()
        tile = Int32(0)
        while req <= last:
            extent = schedule.extent(req, begin_tile)
            # asked here, so that nothing but the answer is kept through the tiles
            piece = schedule.piece_of(extent, req, begin_tile)
            end = tile + extent.tiles
            if extent.tiles > 0:
                first = thread // LANES_PER_KEY
                entry, row = operands.place_of(begin_tile * TILE_KEYS + first)
                place = Place(entry, row, smaller(extent.keys, extent.tiles * TILE_KEYS) - first)
                self.gather_tiles(operands, tiles, pipes, req, place, tile, end, thread)
            tile = end
            req, begin_tile = piece.next_req, piece.next_tile
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def gather_tiles(
        self, operands: Operands, tiles: Tiles, pipes: Pipes, req: Int32, place: Place, tile: Int32, end: Int32, thread: Int32
    ):
        """The tiles of one piece, in this CTA those from `tile` to `end`. Pages are asked for a tile ahead of the addresses,
        bytes a few steps ahead of their use."""
        lane = Lane.of(thread)
        source, lane = lane.source, replace(lane, source=Int32(0))
        buffers = [cute.make_rmem_tensor(cute.make_layout(max(step.words for step in STEPS[i::AHEAD])), Int32) for i in range(AHEAD)]
        pages = look_up(operands, req, place)
        rows = self.addresses(operands, place, pages, source)
        place = place.following(operands)
        pages = look_up(operands, req, place)
        for s in cutlass.range_constexpr(AHEAD):
            load_step(STEPS[s], buffers[s], rows[STEPS[s].key], lane)
        for use in cutlass.range(tile, end, unroll=1):
            for s in cutlass.range_constexpr(len(STEPS)):
                cute.arch.sync_warp()  # keeps ptxas from converting more steps at a time than there are registers for
                self.finish_step(tiles, pipes, s, buffers[s % AHEAD], use, lane)
                if cutlass.const_expr(s + AHEAD == len(STEPS)):
                    # whatever is loaded from here on belongs to the next tile
                    rows = self.addresses(operands, place, pages, source)
                    place = place.following(operands)
                    pages = look_up(operands, req, place)
                step = STEPS[(s + AHEAD) % len(STEPS)]
                load_step(step, buffers[s % AHEAD], rows[step.key], lane)

    def addresses(self, operands: Operands, place: Place, pages: tuple[Int32, Int32], source: Int32) -> tuple[Int64, Int64]:
        """Of byte `source` of the thread's two keys; 0 for a key that is not there."""
        _, second = place_of_second(operands, place.row)
        cache = operands.fp8_cache
        return cache.address(pages[0], place.row, source), cache.address(pages[1], second, source)

    @cute.jit
    def finish_step(self, tiles: Tiles, pipes: Pipes, s: cutlass.Constexpr[int], words: cute.Tensor, tile: Int32, lane: Lane):
        """Stores the bytes of a step that have come. The first step of a slot waits for it, the last one hands it over."""
        step = STEPS[s]
        if cutlass.const_expr(step.slot == ROPE_SLOT):
            ready, free, use, slot = pipes.rope_ready, pipes.rope_free, tile, tiles.sRope.iterator.toint()
            slot_bytes = BOX_BYTES
        else:
            ready, free, use, slot = pipes.kv_ready, pipes.kv_free, tile * SLOTS_PER_TILE + step.slot, tiles.sKv.iterator.toint()
            slot_bytes = SLOT_BYTES
        if cutlass.const_expr(s == 0 or STEPS[s - 1].slot != step.slot):
            free.wait_free(use)
        target = slot + ready.slot(use) * slot_bytes + step.key * HALF_BYTES
        store_runs(step, words, lambda chunk, run: widen(chunk, self.dtype), target, lane)
        if cutlass.const_expr(s + 1 == len(STEPS) or STEPS[s + 1].slot != step.slot):
            cute.arch.fence_proxy("async.shared", space="cta")
            arrive(ready.barrier(use))


@cute.jit
def load_step(step: cutlass.Constexpr[Step], words: cute.Tensor, row: Int64, lane: Lane):
    """Asks for the bytes of a step; zeros, and no access, for a key that is not there."""
    words.fill(0)
    if row != 0:
        load_runs(step, words, row, lane)
