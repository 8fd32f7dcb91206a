"""Bits that tell which keys of a gathered tile are present, on SM90."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import KeyTile
from ..primitives.wgmma import flat, fragment_column, half
from .config import VALID_BYTES, Tiles, TileState
from .score import TileScores

ALL_VALID = -1


def valid_words(tiles: Tiles, stage: Int32) -> tuple[Int32, Int32]:
    """Return the bits of the keys 0..31 and 32..63 of a tile."""
    words = cute.recast_ptr(tiles.sValid, dtype=Int32) + stage * (VALID_BYTES // 4)
    return words.load(), (words + 1).load()


def has_keys(tiles: Tiles, stage: Int32) -> Boolean:
    """Return whether a tile has any key. The same for all lanes."""
    low, high = valid_words(tiles, stage)
    return cute.arch.make_warp_uniform(low | high) != 0


class AbsentKeyMask:
    """Mask of keys that are not present, the same for all rows of a CTA."""

    @cute.jit
    def apply(self, operands: Any, tiles: Tiles, scores: TileScores, state: TileState, keys: KeyTile):
        """Set the scores of absent keys to -inf."""
        low, high = valid_words(tiles, state.rope.stage)
        if (low & high) != ALL_VALID:
            mask_absent(scores.scores, scores.thread, {0: low, 1: high})


def mask_absent(scores: cute.Tensor, thread: Int32, words: dict[int, Int32], row_half: int | None = None) -> None:
    """Set the scores of keys whose bit is 0 to -inf. Selects, so that NaN vanishes.

    words: bits of the keys 0..31, word 0, or 32..63, word 1, or of both. row_half: one of the thread's rows; None: both.
    """
    rS = flat(scores)
    shifted = {number: word >> fragment_column(thread, 0) for number, word in words.items()}
    for i in range(cute.size(rS)):
        number, bit = divmod(fragment_column(0, i), TILE_KEYS // 2)
        if number in shifted and row_half in (None, half(i)):
            absent = (shifted[number] & Int32(1 << bit)) == 0
            rS[i] = cutlass.select_(absent, -Float32.inf, rS[i])
