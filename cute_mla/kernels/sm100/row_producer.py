"""What the kernels on Blackwell share whose keys are brought row by row, by four warps of each CTA.

Each CTA of a pair brings its half of the columns of every key, and puts it where the TMA of the dense kernel would: the other
roles are those of sm100_roles, which see no difference.

Roles of a CTA (512 threads):
  score   warps 0..3: Q to tensor memory, softmax, P to shared memory, lse
  output  warps 4..7: rescale of O, epilogue
  gather  warps 8..11: where the keys lie, this CTA's columns of them, 16 keys a warp
  mma     warp 12, of the even CTA: S = Q K^T and O += P V for both

Pipelines beside those of the shared roles (producer -> consumer; arrivals per phase):
  kv_ready[5]      gather -> mma           8: the columns of both CTAs are in the slot
  kv_free[5]       mma -> gather, output   1

Of keys that do not count nothing is read: they are zeros in shared memory.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32, cute

from ...manifest import Barrier, Role
from ...spec.split_plan import TILE_KEYS
from ..attention.lengths import smaller
from ..attention.split_kv_scheduler import Extent
from ..definition import KernelDefinition
from ..primitives.pipeline import arrive_at, barrier_table
from .config import GROUP_WARPS, PAIR, SCORE_WARP, SIXTEEN_BIT, TMEM_COLUMNS, Pipes, Tiles
from .gemm import PairGemm
from .roles import EVEN_CTA, PairDecode
from .row_copy import ROW_BYTES, WARP_KEYS
from .score_rows import ScoreRows

OUTPUT_WARP, FILL_WARP = SIXTEEN_BIT.output_warp, SIXTEEN_BIT.load_warp
MMA_WARP = FILL_WARP + GROUP_WARPS
THREADS = 32 * (MMA_WARP + GROUP_WARPS)  # the last three warps idle: registers are dealt out to four at a time
SCORE_REGISTERS, OUTPUT_REGISTERS, FILL_REGISTERS, MMA_REGISTERS = 152, 160, 136, 64
assert SCORE_REGISTERS + OUTPUT_REGISTERS + FILL_REGISTERS + MMA_REGISTERS <= 512, "of a lane in four warps"

KV_SLOTS = SIXTEEN_BIT.kv_slots
NO_POSITION = (1 << 31) - 1  # behind every list of keys


class FilledPair(PairDecode):
    """All roles. A kernel is a subclass that says where the keys lie, how their columns are moved, and which of them count.

    filling_role: what the warps that bring the keys are called.
    """

    threads = THREADS
    mma_warp = MMA_WARP
    kv_arrivals = PAIR * GROUP_WARPS
    filling_role = "gather"

    def columns_of(self, rank: Int32) -> Any:
        """The columns that the CTA of this rank holds: what moves a warp's share of a tile, a CopiedTile or its like."""
        raise NotImplementedError

    def index_list(self, operands: Any, req: Int32) -> Any:
        """The list of one request's keys."""
        raise NotImplementedError

    def first_key(self, begin_tile: Int32, warp: Int32) -> Int32:
        """The place of the lane's key in that list, of a piece's first tile."""
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
        tiles, pipes = self.carve_smem(cutlass.memory.SmemAllocator())
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == FILL_WARP:
            with cute.arch.elect_one():
                self.initialise(pipes)
        tmem = self.begin(tiles, warp)
        if warp < OUTPUT_WARP:
            cute.arch.setmaxregister_increase(SCORE_REGISTERS)
            self.score(operands, tiles, pipes, tmem)
        elif warp < FILL_WARP:
            cute.arch.setmaxregister_increase(OUTPUT_REGISTERS)
            self.output(operands, tiles, pipes, tmem)
        elif warp < MMA_WARP:
            cute.arch.setmaxregister_increase(FILL_REGISTERS)
            self.gather(operands, tiles, pipes, warp - FILL_WARP)
        else:
            cute.arch.setmaxregister_decrease(MMA_REGISTERS)
            if warp == MMA_WARP and cute.arch.block_idx_in_cluster() == EVEN_CTA:
                self.multiply(operands.schedule, pipes, PairGemm(self.dtype, self.has_rope, tiles, tmem))
        self.end(warp, tmem)

    # ---- gather -----------------------------------------------------------------------------------------------------

    @cute.jit
    def gather(self, operands: Any, tiles: Tiles, pipes: Pipes, warp: Int32):
        """Waits kv_free. Signals kv_ready."""
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
        self, operands: Any, tiles: Tiles, pipes: Pipes, columns: Any, extent: Extent, req: Int32, first_key: Int32,
        first_tile: Int32, warp: Int32,
    ):  # fmt: skip
        """The tiles of one piece. Of this lane's key, the list is asked two tiles ahead and the row one tile ahead.
        first_key: the place of the lane's key in the list."""
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
            self.tell(pipes, slot, warp, keys)
            if use >= columns.lag:
                self.publish(pipes, use - columns.lag)
            keys = following

    def publish(self, pipes: Any, tile: Int32) -> None:
        """Says that the warp's share of a tile is in its slot."""
        cute.arch.fence_proxy("async.shared", space="cta")
        arrive_at(pipes.kv_ready.barrier(tile), EVEN_CTA)

    def tell(self, pipes: Any, slot: Int32, warp: Int32, keys: Any) -> None:
        """Tells the score role which of the warp's keys in a slot count, where nothing else does."""

    def clear_values(self, rows: ScoreRows, slot: Int32, left: Int32) -> None:
        """Nothing: keys that do not count are zeros."""

    # ---- for the build --------------------------------------------------------------------------------------------------

    smem_used = SIXTEEN_BIT.smem_used

    def barrier_table(self) -> tuple[Barrier, ...]:
        """Where the mbarriers are."""
        return barrier_table(SIXTEEN_BIT.barrier_offset, SIXTEEN_BIT.barriers)


def filled_source(kernel: Any) -> KernelDefinition:
    """A variant of a kernel whose roles are these, ready to compile."""
    source: KernelDefinition = kernel.source(
        smem_bytes=kernel.smem_used,
        barriers=kernel.barrier_table(),
        named_barriers=kernel.named_barriers,
        roles=(
            Role("score", SCORE_WARP, GROUP_WARPS),
            Role("output", OUTPUT_WARP, GROUP_WARPS),
            Role(kernel.filling_role, FILL_WARP, GROUP_WARPS),
            Role("mma", MMA_WARP, 1),
        ),
        expected={"UTCHMMA": SIXTEEN_BIT.products_per_tile(kernel.has_rope)},
        tmem_columns=TMEM_COLUMNS,
    )
    return source
