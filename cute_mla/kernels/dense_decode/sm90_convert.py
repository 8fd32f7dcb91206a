"""Dense MLA decode on Hopper over an e4m3 cache, multiplied as 16-bit elements.

The kernel of sm90.py with another role in front: four warps copy the rows of a tile, page by page, to the stages of the pipelines by
cp.async, and convert them there to 16-bit columns. Every e4m3 number is one of either 16-bit type, so nothing is rounded; the scales of
the cache go into those of the scores and of the output. Score and output are the 16-bit kernel's, and so are tiles, barriers and the
trick.

Shared memory: a thread copies 16 bytes to where the first of the two chunks belongs that they become. The same thread reads them back and
writes both chunks. No other thread touches that place, so a wait for the thread's own copies is all the order that it takes.

Roles (512 threads):
  convert  warpgroup 0: pages, addresses, copies, conversion
  score    warpgroup 1
  output   warpgroups 2, 3

Pipelines: as in sm90.py, with 4 arrivals on kv_ready and rope_ready, one a warp, instead of bytes. Of a key behind the end of the
request, or in a page that the cache does not have, nothing is read, and its row is zeros: nothing is left to clear.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint32, cute

from ...spec.dense_decode import FP8_CACHE, DenseDecodeConfig
from ...spec.mla import D_LATENT, D_QK, ELEMENT_BYTES
from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import KeyTile
from ..attention.softmax import mask_keys
from ..primitives.arithmetic import smaller, widen
from ..primitives.copies import LINE_BYTES, prefetch_line
from ..primitives.wgmma import ROWS_PER_THREAD
from ..sm90.cta import (
    BOX_BYTES,
    ROPE,
    SHARED_REGISTERS,
    STAGE_BOXES,
    WARPS_PER_GROUP,
    LatentSm90Parts,
    LatentSm90Queries,
    LatentSm90Smem,
    LatentSm90Stages,
    LatentSm90TileState,
    warpgroup_roles,
)
from ..sm90.output import LatentSm90Output, LatentSm90OutputRole
from ..sm90.rows import (
    CHUNK,
    CHUNK_WORDS,
    HALF_BYTES,
    HALF_KEYS,
    HALVES,
    LANES_PER_KEY,
    LatentSm90Lane,
    copy_chunk,
    load_chunk,
    part_of,
    store_chunk,
)
from ..sm90.score import LatentSm90ScoreRole, LatentSm90Scores, query_row
from .operands import NO_PAGE, DenseDecodeOperands, DenseDecodeRowScale

CONVERT_REGISTERS = 56
STAGES = LatentSm90Stages(before_rope=2)
QUERIES = LatentSm90Queries(D_QK, in_registers=4)
RINGS = 10, 3
PARTS = STAGES.parts
COPIED_AHEAD = 1  # parts of a tile that are copied while another one is converted. More wait for stages that are not free yet


class DenseDecodeSm90Fp8Cache(LatentSm90Parts):
    """One variant of the kernel of an e4m3 cache and 16-bit queries."""

    registers = (CONVERT_REGISTERS, SHARED_REGISTERS - CONVERT_REGISTERS)
    roles = warpgroup_roles("convert")
    expected = ("HGMMA", STAGES.wgmma_per_tile)
    stages = STAGES

    def __init__(self, config: DenseDecodeConfig) -> None:
        super().__init__(config)
        self.layout = LatentSm90Smem.layout(STAGES, QUERIES, self.dtype, RINGS, {"sTarget", "rope_ready", "right_turn"})

    def initialise(self, operands: DenseDecodeOperands, smem: LatentSm90Smem) -> None:
        """Initialise the barriers."""
        smem.initialise(self.cluster, producers=WARPS_PER_GROUP)

    def produce(self, operands: DenseDecodeOperands, smem: LatentSm90Smem, warp: Int32, thread: Int32) -> None:
        """Run the convert role."""
        DenseDecodeSm90ConvertRole(self.dtype).run(operands, smem, thread)

    def score(self, operands: DenseDecodeOperands, smem: LatentSm90Smem, thread: Int32) -> None:
        """Run the score role."""
        scores = partial(LatentSm90Scores.create, QUERIES)
        LatentSm90ScoreRole(scores, DenseDecodeSm90EndMask(), DenseDecodeRowScale(FP8_CACHE)).run(operands, smem, thread)

    def output(self, operands: DenseDecodeOperands, smem: LatentSm90Smem, thread: Int32, side: Int32) -> None:
        """Run the output role."""
        output = partial(LatentSm90Output.create, self.cluster, None)
        LatentSm90OutputRole(output, self.dtype).run(operands, smem, thread, side)


class DenseDecodeSm90EndMask:
    """Mask of keys past the end, and of causally hidden ones."""

    @cute.jit
    def apply(self, operands: DenseDecodeOperands, smem: Any, scores: Any, state: LatentSm90TileState, keys: KeyTile):
        """Set the scores of keys that a row does not see to -inf."""
        if keys.remaining - operands.args.hidden_keys < TILE_KEYS:
            rows = [query_row(scores.thread, row_half) for row_half in range(ROWS_PER_THREAD)]
            limits = [operands.key_limit(keys, operands.token_and_head(row)[0]) for row in rows]
            mask_keys(scores.scores, scores.thread, limits)


class DenseDecodeSm90ConvertRole:
    """One warpgroup: pages, addresses, copies, conversion. dtype: what e4m3 becomes."""

    def __init__(self, dtype: type[cutlass.Numeric]) -> None:
        self.dtype = dtype

    @cute.jit
    def run(self, operands: DenseDecodeOperands, smem: LatentSm90Smem, thread: Int32):
        """Wait kv_free. Signal kv_ready, rope_ready."""
        schedule = operands.schedule
        req, begin_tile = schedule.first_work_tile()
        last = schedule.last_request()
        tile = Int32(0)
        while req <= last:
            tile_range = schedule.tile_range(req, begin_tile)
            # asked here, so that nothing but the answer is kept through the tiles
            work_tile = schedule.work_tile_of(tile_range, req, begin_tile)
            end = tile + tile_range.tiles
            if tile_range.tiles > 0:
                first = thread // LANES_PER_KEY
                entry, row = operands.page_entry(begin_tile * TILE_KEYS + first)
                keys = DenseDecodeKeyPositions(entry, row, smaller(tile_range.keys, tile_range.tiles * TILE_KEYS) - first)
                self.convert_tiles(operands, smem, operands.units.request(req), keys, tile, end, thread)
            tile = end
            req, begin_tile = work_tile.next_req, work_tile.next_tile
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def convert_tiles(
        self,
        operands: DenseDecodeOperands,
        smem: LatentSm90Smem,
        req: Int32,
        keys: DenseDecodeKeyPositions,
        tile: Int32,
        end: Int32,
        thread: Int32,
    ):
        """Convert the tiles of one work tile, in this CTA from `tile` to `end`.

        Pages are looked up a tile ahead, and L2 is asked for rows as early. Bytes are copied COPIED_AHEAD parts of a tile ahead of their
        conversion.
        """
        lane = LatentSm90Lane.pinned(thread)
        rows = self.addresses(operands, keys, look_up(operands, req, keys), lane.source)
        keys = keys.following(operands)
        pages = look_up(operands, req, keys)
        for part in PARTS[:COPIED_AHEAD]:
            self.copy_part(smem, part, tile, rows, lane)
        for use in cutlass.range(tile, end, unroll=1):
            for row in self.addresses(operands, keys, pages, lane.source):  # computed again below: no registers are left to keep them
                prefetch_row(row, lane)
            for p in cutlass.range_constexpr(len(PARTS)):
                copied = p + COPIED_AHEAD
                if cutlass.const_expr(copied == len(PARTS)):
                    # whatever is copied from here on belongs to the next tile
                    rows = self.addresses(operands, keys, pages, lane.source)
                    keys = keys.following(operands)
                    pages = look_up(operands, req, keys)
                if cutlass.const_expr(copied < len(PARTS)):
                    self.copy_part(smem, PARTS[copied], use, rows, lane)
                elif use + 1 < end:
                    self.copy_part(smem, PARTS[copied - len(PARTS)], use + 1, rows, lane)
                else:
                    cute.arch.cp_async_commit_group()
                cute.arch.cp_async_wait_group(COPIED_AHEAD)
                self.convert_part(smem, PARTS[p], use, lane)

    def addresses(
        self, operands: DenseDecodeOperands, keys: DenseDecodeKeyPositions, pages: tuple[Int32, Int32], source: Int32
    ) -> tuple[Int64, Int64]:
        """Return the addresses of byte `source` of the thread's two keys; 0 for an absent key."""
        _, second = second_key_entry(operands, keys.row)
        return operands.cache_address(pages[0], keys.row, source), operands.cache_address(pages[1], second, source)

    def copy_part(self, smem: LatentSm90Smem, part: int, tile: Int32, rows: tuple[Int64, Int64], lane: LatentSm90Lane) -> None:
        """Start the copies of a part of a tile, a group of cp.async, when its stage is free; zeros for absent keys."""
        if part != ROPE:  # a RoPE stage is free when the stages before it are
            smem.kv_free.producer_acquire(tile * STAGES.count + part)
        for target, key, box in self.chunks(smem, part, tile, lane):
            copy_chunk(target, rows[key] + STAGES.column(part, box), rows[key] != 0)
        cute.arch.cp_async_commit_group()

    def convert_part(self, smem: LatentSm90Smem, part: int, tile: Int32, lane: LatentSm90Lane) -> None:
        """Convert, where they lie, the bytes of a part that this thread has copied, and commit its stage."""
        targets = [target for target, _, _ in self.chunks(smem, part, tile, lane)]
        raw = [load_chunk(target) for target in targets]  # all ahead of the first store: ptxas moves none
        for target, words in zip(targets, raw, strict=True):
            columns = widen(words, self.dtype)
            for half in range(ELEMENT_BYTES):
                store_chunk(part_of(columns, half * CHUNK_WORDS, CHUNK_WORDS), target ^ (half * CHUNK))
        cute.arch.fence_proxy("async.shared", space="cta")
        if part == ROPE:
            smem.rope_ready.producer_commit(tile)
        else:
            smem.kv_ready.producer_commit(tile * STAGES.count + part)

    def chunks(self, smem: LatentSm90Smem, part: int, tile: Int32, lane: LatentSm90Lane) -> list[tuple[Int32, int, int]]:
        """Return the shared memory address, the key and the box of each 16 bytes that this thread moves of a part of a tile."""
        if part == ROPE:
            stage, boxes = smem.rope_stage(tile), 1
        else:
            stage, boxes = smem.kv_stage(tile * STAGES.count + part), STAGE_BOXES
        first = stage + lane.narrow
        return [(first + (key * HALF_BYTES + box * BOX_BYTES), key, box) for key in range(HALVES) for box in range(boxes)]


@cute.jit
def prefetch_row(row: Int64, lane: LatentSm90Lane):
    """Bring a row to L2: each of a key's lanes asks for a line, all of them for the last one."""
    if row != 0:
        first = row + lane.source * (LINE_BYTES // CHUNK - 1)
        for address in (first, row + D_LATENT):
            prefetch_line(cute.make_ptr(Int32, address, cute.AddressSpace.gmem))


@dataclass(frozen=True)
class DenseDecodeKeyPositions:
    """The positions of this thread's two keys of a tile.

    entry, row: of the first one, in the block table and in its page. remaining: keys of the work tile from the first one on.
    """

    entry: Int32
    row: Int32
    remaining: Int32

    def following(self, operands: DenseDecodeOperands) -> DenseDecodeKeyPositions:
        """Return the positions in the next tile."""
        return DenseDecodeKeyPositions(*operands.next_tile_entry(self.entry, self.row), self.remaining - TILE_KEYS)


@cute.jit
def look_up(operands: DenseDecodeOperands, req: Int32, keys: DenseDecodeKeyPositions) -> tuple[Int32, Int32]:
    """Return the pages of the thread's two keys; NO_PAGE for a key that the work tile does not have, whose entry is never read."""
    first, second = Int32(NO_PAGE), Int32(NO_PAGE)
    table = operands.args.block_table + (Int64(Uint32(req)) * operands.args.table_stride + Int64(Uint32(keys.entry)))
    if keys.remaining > 0:
        first = table.load()
    if keys.remaining > HALF_KEYS:
        entries, _ = second_key_entry(operands, keys.row)
        second = (table + entries).load()
    return first, second


def second_key_entry(operands: DenseDecodeOperands, row: Int32) -> tuple[Int32, Int32]:
    """Return the distance from a thread's first key, in some row of its page, to its second: (entries of the block table, row there).

    A page has a tile or more, or is a SMALL_PAGES-th of it. The code compares with the row, which changes, so that no register holds
    what only the size of a page decides.
    """
    beyond = row + HALF_KEYS - operands.args.page_size
    entries = cutlass.select_(beyond >= 0, Int32(1), Int32(0)) + cutlass.select_(beyond >= operands.args.page_size, Int32(1), Int32(0))
    return entries, row + HALF_KEYS - entries * operands.args.page_size
