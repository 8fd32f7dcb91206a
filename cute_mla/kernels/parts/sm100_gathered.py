"""What the kernels on Blackwell share whose keys are gathered, row by row: the gather role, and which keys count.

Each CTA of a pair gathers its half of the columns of every key, and puts it where the TMA of the dense kernel would: the other
roles are those of sm100_roles, which see no difference.

Roles of a CTA (512 threads):
  score   warps 0..3: Q to tensor memory, softmax, P to shared memory, lse
  output  warps 4..7: rescale of O, epilogue
  gather  warps 8..11: look-up of indices, this CTA's columns of the keys, 16 keys a warp
  mma     warp 12, of the even CTA: S = Q K^T and O += P V for both

Pipelines beside those of the shared roles (producer -> consumer; arrivals per phase):
  kv_ready[5]      gather -> mma           8: the columns of both CTAs are in the slot
  kv_free[5]       mma -> gather, output   1
  seen_ready[5]    gather -> score         4: a bit per key of the slot, whether it counts

Keys that do not count (an index that names no row, or behind the last one) are zeros in shared memory, and nothing of them is
read; their scores become -inf in tiles that have any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint16, cute

from ...manifest import Role
from ...spec.split_plan import TILE_KEYS
from ..source import KernelSource
from .barriers import Ring, arrive, arrive_at, barrier_table
from .lengths import smaller
from .sm100_columns import ROW_BYTES, WARP_KEYS, LaneKeys
from .sm100_geometry import (
    GROUP_WARPS,
    HALF_KEYS,
    PAIR,
    SCORE_WARP,
    SIXTEEN_BIT,
    TMEM_COLUMNS,
    Pipes,
    Tiles,
)
from .sm100_mma import PairGemm
from .sm100_roles import EVEN_CTA, PairDecode
from .sm100_score import ScoreRows
from .softmax import with_sink
from .tiles import first_query_row
from .work import Extent

OUTPUT_WARP, GATHER_WARP = SIXTEEN_BIT.output_warp, SIXTEEN_BIT.load_warp
MMA_WARP = GATHER_WARP + GROUP_WARPS
THREADS = 32 * (MMA_WARP + GROUP_WARPS)  # the last three warps idle: registers are dealt out to four at a time
SCORE_REGISTERS, OUTPUT_REGISTERS, GATHER_REGISTERS, MMA_REGISTERS = 152, 160, 136, 64
assert SCORE_REGISTERS + OUTPUT_REGISTERS + GATHER_REGISTERS + MMA_REGISTERS <= 512, "of a lane in four warps"

KV_SLOTS = SIXTEEN_BIT.kv_slots
SEEN_WORDS = TILE_KEYS // HALF_KEYS  # of 32 bits, per slot
SEEN_BARRIERS = (("seen_ready", KV_SLOTS),)
SEEN_BARRIER_OFFSET = (SIXTEEN_BIT.smem_used + 7) // 8 * 8
GATHERED_SMEM_USED = SEEN_BARRIER_OFFSET + 8 * KV_SLOTS + 4 * SEEN_WORDS * KV_SLOTS
NO_POSITION = (1 << 31) - 1  # behind every list of indices


@dataclass(frozen=True)
class SeenPipes(Pipes):
    """The shared roles' barriers, and what says which keys of a slot count."""

    seen_ready: Ring
    sSeen: cute.Pointer  # int32 (slots, 2): a bit per key


class GatheredPair(PairDecode):
    """All roles. A kernel is a subclass that says where the keys lie and how their columns are moved."""

    threads = THREADS
    mma_warp = MMA_WARP
    kv_arrivals = PAIR * GROUP_WARPS

    def columns_of(self, rank: Int32) -> Any:
        """The columns that the CTA of this rank holds: what moves a warp's share of a tile, a CopiedTile or its like."""
        raise NotImplementedError

    def index_list(self, operands: Any, req: Int32) -> Any:
        """The indices of one request."""
        raise NotImplementedError

    def first_key(self, begin_tile: Int32, warp: Int32) -> Int32:
        """The place of the lane's key in the list of indices, of a piece's first tile."""
        return begin_tile * TILE_KEYS + warp * WARP_KEYS + cute.arch.lane_idx() % WARP_KEYS

    def look_up(self, indices: Any, position: Int32) -> Any:
        """What the list holds for this lane whose key is at a position; nothing is read past its end."""
        raise NotImplementedError

    def locate(self, operands: Any, indices: Any, found: Any, position: Int32) -> Any:
        """Where the rows lie that a look-up has found."""
        raise NotImplementedError

    def put(self, columns: Any, rows: cute.Pointer, keys: Any, following: Any) -> None:
        """Fills the warp's rows of a slot."""
        columns.put(rows, keys, following)

    # ---- beginning ------------------------------------------------------------------------------------------------------

    @cute.jit
    def run(self, operands: Any):
        """The body of the kernel."""
        smem = cutlass.memory.SmemAllocator()
        tiles, shared = self.carve_smem(smem)
        seen_ready = Ring(smem.allocate_array(Int64, KV_SLOTS), KV_SLOTS)
        pipes = SeenPipes(**vars(shared), seen_ready=seen_ready, sSeen=smem.allocate_array(Int32, SEEN_WORDS * KV_SLOTS))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == GATHER_WARP:
            with cute.arch.elect_one():
                pipes.seen_ready.initialise(GROUP_WARPS)
                self.initialise(pipes)
        tmem = self.begin(tiles, warp)
        if warp < OUTPUT_WARP:
            cute.arch.setmaxregister_increase(SCORE_REGISTERS)
            self.score(operands, tiles, pipes, tmem)
        elif warp < GATHER_WARP:
            cute.arch.setmaxregister_increase(OUTPUT_REGISTERS)
            self.output(operands, tiles, pipes, tmem)
        elif warp < MMA_WARP:
            cute.arch.setmaxregister_increase(GATHER_REGISTERS)
            self.gather(operands, tiles, pipes, warp - GATHER_WARP)
        else:
            cute.arch.setmaxregister_decrease(MMA_REGISTERS)
            if warp == MMA_WARP and cute.arch.block_idx_in_cluster() == EVEN_CTA:
                self.multiply(operands.schedule, pipes, PairGemm(self.dtype, self.has_rope, tiles, tmem))
        self.end(warp, tmem)

    # ---- gather -----------------------------------------------------------------------------------------------------

    @cute.jit
    def gather(self, operands: Any, tiles: Tiles, pipes: SeenPipes, warp: Int32):
        """Waits kv_free. Signals kv_ready, seen_ready."""
        schedule = operands.schedule
        columns = self.columns_of(cute.arch.block_idx_in_cluster())
        req, begin_tile = schedule.first_piece()
        tile = Int32(0)
        while req <= schedule.last_request():
            extent = schedule.extent(req, begin_tile)
            first_key = self.first_key(begin_tile, warp)
            self.gather_piece(operands, tiles, pipes, columns, extent, req, first_key, tile, warp)
            tile = tile + extent.tiles
            piece = schedule.piece(req, begin_tile)
            req, begin_tile = piece.next_req, piece.next_tile
        cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(columns.lag > 0):
            cute.arch.cp_async_wait_group(0)
            for late in cutlass.range(smaller(tile, Int32(columns.lag)), unroll=1):
                self.publish(pipes, tile - smaller(tile, Int32(columns.lag)) + late)
        # no signal may reach a CTA that is gone
        for i in cutlass.range(KV_SLOTS, unroll=1):
            pipes.kv_free.wait_free(tile + i)

    @cute.jit
    def gather_piece(
        self, operands: Any, tiles: Tiles, pipes: SeenPipes, columns: Any, extent: Extent, req: Int32, first_key: Int32,
        first_tile: Int32, warp: Int32,
    ):  # fmt: skip
        """The tiles of one piece. Of this lane's key, the index is asked for two tiles ahead and the row one tile ahead.
        first_key: the place of the lane's key in the list of indices."""
        indices = self.index_list(operands, req)
        keys = self.locate(operands, indices, self.look_up(indices, first_key), first_key)
        columns.prepare(keys)
        position = first_key + TILE_KEYS
        found = self.look_up(indices, cutlass.select_(extent.tiles > 1, position, Int32(NO_POSITION)))
        for t in cutlass.range(extent.tiles, unroll=1):
            following = self.locate(operands, indices, found, position)
            position = position + TILE_KEYS
            # nothing is fetched for the piece that follows: its tiles may be another part's
            found = self.look_up(indices, cutlass.select_(t + 2 < extent.tiles, position, Int32(NO_POSITION)))
            use = first_tile + t
            slot = pipes.kv_ready.slot(use)
            pipes.kv_free.wait_free(use)
            self.put(columns, tiles.slot(slot) + warp * (WARP_KEYS * ROW_BYTES), keys, following)
            self.store_seen(pipes, slot, warp, keys)
            if use >= columns.lag:
                self.publish(pipes, use - columns.lag)
            keys = following

    def publish(self, pipes: SeenPipes, tile: Int32) -> None:
        """Says that the warp's share of a tile is in its slot."""
        cute.arch.fence_proxy("async.shared", space="cta")
        arrive_at(pipes.kv_ready.barrier(tile), EVEN_CTA)
        arrive(pipes.seen_ready.barrier(tile))

    @cute.jit
    def store_seen(self, pipes: SeenPipes, slot: Int32, warp: Int32, keys: LaneKeys):
        """The warp's half of a word of bits."""
        seen = keys.seen()
        if cute.arch.lane_idx() == 0:
            words = cute.recast_ptr(pipes.sSeen + slot * SEEN_WORDS, dtype=Uint16)
            (words + warp).store(Uint16(seen & 0xFFFF))

    # ---- which keys count -------------------------------------------------------------------------------------------

    @cute.jit
    def mask(self, operands: Any, pipes: SeenPipes, rows: ScoreRows, left: Int32, tile: Int32):
        """Sets scores of keys that do not count to -inf."""
        pipes.seen_ready.wait_ready(tile)
        self.mask_unseen(pipes, rows, tile)

    @cute.jit
    def mask_unseen(self, pipes: SeenPipes, rows: ScoreRows, tile: Int32):
        """The same, once the bits are there."""
        seen = (pipes.sSeen + (pipes.seen_ready.slot(tile) * SEEN_WORDS + rows.half)).load()
        if seen != -1:
            rows.mask_unseen(seen)

    def clear_values(self, rows: ScoreRows, slot: Int32, left: Int32) -> None:
        """Nothing: keys that do not count were gathered as zeros."""

    def weigh_row(self, operands: Any, rows: ScoreRows, req: Int32, begin_tile: Int32, total: Float32) -> Float32:
        """1 / (row sum + weight of the sink), which is added where the output is written and not in parts of a request."""
        head = first_query_row() + rows.row
        piece = operands.schedule.piece(req, begin_tile)
        return 1.0 / with_sink(operands, piece, head, total, rows.rMax[0])


def gathered_source(kernel: Any) -> KernelSource:
    """A variant of a kernel whose roles are these, ready to compile."""
    source: KernelSource = kernel.source(
        smem_bytes=GATHERED_SMEM_USED,
        barriers=barrier_table(SIXTEEN_BIT.barrier_offset, SIXTEEN_BIT.barriers) + barrier_table(SEEN_BARRIER_OFFSET, SEEN_BARRIERS),
        named_barriers=kernel.named_barriers,
        roles=(
            Role("score", SCORE_WARP, GROUP_WARPS),
            Role("output", OUTPUT_WARP, GROUP_WARPS),
            Role("gather", GATHER_WARP, GROUP_WARPS),
            Role("mma", MMA_WARP, 1),
        ),
        expected={"UTCHMMA": SIXTEEN_BIT.products_per_tile(kernel.has_rope)},
        tmem_columns=TMEM_COLUMNS,
    )
    return source
