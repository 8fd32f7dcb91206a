"""What the kernels on Blackwell share whose keys are gathered by indices: which of them count.

Roles and pipelines: sm100/row_producer.py, and beside those
  seen_ready[5]    gather -> score         4: a bit per key of the slot, whether it counts

Keys that do not count (an index that names no row, or behind the last one) get scores of -inf, in tiles that have any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint16, cute

from ...manifest import Barrier
from ...spec.split_plan import TILE_KEYS
from ..attention.softmax import with_sink
from ..attention.tiles import first_query_row
from ..primitives.pipeline import Ring, arrive, barrier_table
from .config import GROUP_WARPS, HALF_KEYS, SIXTEEN_BIT, Pipes, Tiles
from .row_copy import LaneKeys
from .row_producer import KV_SLOTS, FilledPair
from .score_rows import ScoreRows

SEEN_WORDS = TILE_KEYS // HALF_KEYS  # of 32 bits, per slot
SEEN_BARRIERS = (("seen_ready", KV_SLOTS),)
SEEN_BARRIER_OFFSET = (SIXTEEN_BIT.smem_used + 7) // 8 * 8


@dataclass(frozen=True)
class SeenPipes(Pipes):
    """The shared roles' barriers, and what says which keys of a slot count."""

    seen_ready: Ring
    sSeen: cute.Pointer  # int32 (slots, 2): a bit per key


class GatheredPair(FilledPair):
    """All roles. A kernel is a subclass that says where the keys lie and how their columns are moved."""

    smem_used = SEEN_BARRIER_OFFSET + 8 * KV_SLOTS + 4 * SEEN_WORDS * KV_SLOTS

    def barrier_table(self) -> tuple[Barrier, ...]:
        """Where the mbarriers are."""
        return super().barrier_table() + barrier_table(SEEN_BARRIER_OFFSET, SEEN_BARRIERS)

    def carve_smem(self, smem: cutlass.memory.SmemAllocator) -> tuple[Tiles, SeenPipes]:
        """Places tiles and barriers."""
        tiles, shared = super().carve_smem(smem)
        seen_ready = Ring(smem.allocate_array(Int64, KV_SLOTS), KV_SLOTS)
        return tiles, SeenPipes(**vars(shared), seen_ready=seen_ready, sSeen=smem.allocate_array(Int32, SEEN_WORDS * KV_SLOTS))

    def initialise(self, pipes: Any) -> None:
        """Sets the arrivals of every barrier."""
        pipes.seen_ready.initialise(GROUP_WARPS)
        super().initialise(pipes)

    def publish(self, pipes: SeenPipes, tile: Int32) -> None:
        """Says that the warp's share of a tile is in its slot."""
        super().publish(pipes, tile)
        arrive(pipes.seen_ready.barrier(tile))

    @cute.jit
    def tell(self, pipes: SeenPipes, slot: Int32, warp: Int32, keys: LaneKeys):
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

    def weigh_row(self, operands: Any, rows: ScoreRows, req: Int32, begin_tile: Int32, total: Float32) -> Float32:
        """1 / (row sum + weight of the sink), which is added where the output is written and not in parts of a request."""
        head = first_query_row() + rows.row
        piece = operands.schedule.piece(req, begin_tile)
        return 1.0 / with_sink(operands, piece, head, total, rows.rMax[0])
