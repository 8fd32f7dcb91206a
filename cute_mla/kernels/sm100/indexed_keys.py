"""Keys that indices name, on SM100: bits that tell which of them count, from the warps that gather to the roles that mask.

Keys that do not count (an index that names no row, or behind the last one) get scores of -inf, in tiles that have any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, Uint16, cute

from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import KeyTile
from ..primitives.pipeline import StageBarriers
from ..primitives.smem import Array, Barriers, Field
from .config import GROUP_WARPS, HALF_KEYS, Pipes
from .row_copy import LaneKeys
from .row_producer import KV_STAGES
from .score import ScoreRows

SEEN_WORDS = TILE_KEYS // HALF_KEYS  # of 32 bits, per stage
ALL_SEEN = -1


@dataclass(frozen=True)
class IndexedPipes(Pipes):
    """The shared roles' barriers, and what says which keys of a stage count."""

    seen_ready: StageBarriers
    sSeen: cute.Pointer  # int32 (stages, 2): a bit per key

    @staticmethod
    def fields() -> tuple[Field, ...]:
        """Return the fields of shared memory behind those of the shared roles."""
        return Barriers("seen_ready", KV_STAGES), Array("sSeen", Int32, SEEN_WORDS * KV_STAGES)

    def initialise_bits(self) -> None:
        """Set the arrivals of the added barriers."""
        self.seen_ready.initialise(GROUP_WARPS)


@dataclass(frozen=True)
class SeenBits:
    """Bits of the producer's warps: 16 keys each. score_parts: of the geometry; a score thread has keys of every part."""

    score_parts: int = 1

    @cute.jit
    def store(self, pipes: IndexedPipes, stage: Int32, warp: Int32, keys: LaneKeys):
        """Write the warp's half of a word of bits."""
        seen = keys.seen()
        if cute.arch.lane_idx() == 0:
            words = cute.recast_ptr(pipes.sSeen + stage * SEEN_WORDS, dtype=Uint16)
            # in the word of the score threads that have these keys: two warps in a row, or, of two parts, every other one
            place = warp if self.score_parts == 1 else warp % 2 * 2 + warp // 2
            (words + place).store(Uint16(seen & 0xFFFF))

    def commit(self, pipes: IndexedPipes, tile: Int32) -> None:
        """Signal seen_ready of a tile."""
        pipes.seen_ready.producer_commit(tile)


class SeenTiles:
    """Tiles of which the bits tell whether they have keys."""

    def wait(self, pipes: IndexedPipes, tile: Int32) -> None:
        """Block until a tile's bits are there."""
        pipes.seen_ready.consumer_wait(tile)

    def has_keys(self, pipes: IndexedPipes, tile: Int32) -> Boolean:
        """Return whether a key of a tile counts. Until the tile's kv_free is signalled."""
        words = pipes.sSeen + pipes.seen_ready.stage(tile) * SEEN_WORDS
        return cute.arch.make_warp_uniform(words.load() | (words + 1).load()) != 0


@dataclass(frozen=True)
class SeenMask:
    """Mask of keys that do not count. waits: whether nobody has waited for the bits before."""

    waits: bool = True

    @cute.jit
    def apply(self, operands: Any, pipes: IndexedPipes, rows: ScoreRows, keys: KeyTile, tile: Int32):
        """Set scores of keys that do not count to -inf."""
        if cutlass.const_expr(self.waits):
            pipes.seen_ready.consumer_wait(tile)
        seen = (pipes.sSeen + (pipes.seen_ready.stage(tile) * SEEN_WORDS + rows.half)).load()
        if seen != ALL_SEEN:
            rows.mask_unseen(seen)

    def clear_values(self, operands: Any, rows: ScoreRows, stage: Int32, keys: KeyTile) -> None:
        """Do nothing: keys that do not count are zeros."""
