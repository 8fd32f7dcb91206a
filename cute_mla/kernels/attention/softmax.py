"""Online softmax in base 2, with conditional rescale: over score fragments of two rows per thread.

Scores are exponentiated against a reference that follows the row maximum only when that has moved up by more than
RESCALE_LOG2: until then probabilities may reach 2^8, which bf16, fp16 and the fp32 sums hold as precisely as 1, and the
accumulators need no rescale. The reference starts at -inf and stays there while a row has seen no valid key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import cutlass
from cutlass import Float32, Int32, cute

from ...spec.mla import LOG2E
from ..primitives.fragments import ROWS_PER_THREAD, flat, fragment_column, half, quad_max, quad_sum
from .split_kv_scheduler import Piece

RESCALE_LOG2 = 8.0
LARGEST_LOG2 = 8.0  # of e4m3 probabilities: the greatest power of two below 448
SLACK_LOG2 = 4.0  # by which the greatest of a tile may be less, so that O is not rescaled for every tile
DEPTH_LOG2 = 32.0
# What e4m3 probabilities of neighbouring keys are multiplied with before they are rounded: by up to half the distance of two
# numbers below 2^LARGEST_LOG2, which that number itself outlives. Where scores are nearly alike, rounding would else make all
# probabilities equal, or tell apart those to both sides of a midpoint far too much, and the error would grow with the keys.
DITHER = tuple(1 + (2 * i - 7) / 256 for i in (0, 4, 2, 6, 1, 5, 3, 7))
LN2 = 0.6931471805599453  # natural logarithm of one log2 unit


def follow_maximum(old: Float32, candidate: Float32) -> tuple[Float32, Float32]:
    """(the reference, the factor for what was accumulated under the old one), from the old reference and the scaled maximum
    of a tile. The factor is 1 where the reference stays."""
    moved = candidate > old + RESCALE_LOG2
    new = cutlass.select_(moved, candidate, old)
    return new, cutlass.select_(moved, cute.math.exp2(old - new, fastmath=True), Float32(1))


def follow_tile(old: Float32, candidate: Float32, greatest: Float32) -> tuple[Float32, Float32]:
    """As follow_maximum, for probabilities that are rounded to e4m3: follows the maximum of every tile, up and down, so that the
    tile's greatest probability lies in 2^(LARGEST_LOG2 - SLACK_LOG2) .. 2^LARGEST_LOG2.

    greatest: of all tiles, this one included. It is 2^LARGEST_LOG2 itself, which e4m3 holds exactly, of the tile in which it
    appears. The reference stays where a tile has no key that the row sees, and at most DEPTH_LOG2 below where `greatest` would
    have it: so the factor is at most 2^DEPTH_LOG2, and keys this far below are fewer than would count.
    """
    wanted = cute.arch.fmax(candidate, greatest - DEPTH_LOG2) - LARGEST_LOG2
    moved = (candidate > -Float32.inf) & ((wanted > old) | (wanted < old - SLACK_LOG2))
    new = cutlass.select_(moved, wanted, old)
    return new, cutlass.select_(moved, cute.math.exp2(old - new, fastmath=True), Float32(1))


def shift_of(reference: Float32) -> Float32:
    """What to subtract from scaled scores: the reference, but not -inf, since -inf - -inf is NaN."""
    return cutlass.select_(reference == -Float32.inf, Float32(0), reference)


@cute.jit
def with_sink(operands: Any, piece: Piece, row: Int32, total: Float32, reference: Float32) -> Float32:
    """What a row is divided by: its sum, and the weight of the row's sink where this piece writes the output. A split does
    without, since combine adds it.

    operands: attn_sink, fp32 [rows] or null, and rows(). reference: log2 units, what the sum is relative to.
    """
    divisor = total
    if piece.direct and operands.attn_sink.toint() != 0 and row < operands.rows():
        sink = (operands.attn_sink + row).load()
        divisor = total + cute.math.exp2(sink * LOG2E - reference, fastmath=True)
    return divisor


@dataclass(frozen=True)
class OnlineSoftmax:
    """Running state of the thread's two rows.

    rMax: the reference, log2 units. rSum: this thread's share of the row sum. rTop: the maximum itself, log2 units, where it
    is asked for.
    """

    scale_log2: Float32
    rMax: cute.Tensor
    rSum: cute.Tensor
    rTop: cute.Tensor | None = None

    @classmethod
    def create(cls, scale_log2: Float32, keeps_maximum: bool = False) -> Self:
        """State of a row that has seen nothing."""
        state = [cute.make_rmem_tensor(cute.make_layout(ROWS_PER_THREAD), Float32) for _ in range(3 if keeps_maximum else 2)]
        softmax = cls(scale_log2, *state)
        softmax.reset()
        return softmax

    def reset(self) -> None:
        """Forgets all keys."""
        for row in range(ROWS_PER_THREAD):
            self.rMax[row] = -Float32.inf
            self.rSum[row] = Float32(0)
            if self.rTop is not None:
                self.rTop[row] = -Float32.inf

    def add_tile(self, scores: cute.Tensor) -> list[Float32]:
        """Replaces a 64x64 score fragment by unnormalised probabilities and brings the state up to date.

        Returns, per row, the factor by which everything accumulated before must be scaled."""
        rS = flat(scores)
        factors = []
        for row in range(ROWS_PER_THREAD):
            registers = [i for i in range(cute.size(rS)) if half(i) == row]
            row_max = rS[registers[0]]
            for i in registers[1:]:
                row_max = cute.arch.fmax(row_max, rS[i])
            top = quad_max(row_max) * self.scale_log2
            if self.rTop is not None:
                self.rTop[row] = cute.arch.fmax(self.rTop[row], top)
            new, alpha = self.follow(row, top)
            shift = -shift_of(new)
            total = self.rSum[row] * alpha
            for i in registers:
                rS[i] = cute.math.exp2(rS[i] * self.scale_log2 + shift, fastmath=True)
                total = total + rS[i]
            self.rMax[row] = new
            self.rSum[row] = total
            factors.append(alpha)
        return factors

    def follow(self, row: int, top: Float32) -> tuple[Float32, Float32]:
        """(a row's new reference, the factor for what was accumulated), from the scaled maximum of a tile."""
        return follow_maximum(self.rMax[row], top)

    def maximum(self, row: int) -> Float32:
        """The greatest score seen, log2 units."""
        assert self.rTop is not None, "only where it is asked for"
        return self.rTop[row]

    def row_sum(self, row: int) -> Float32:
        """Sum over all keys seen: 0 iff the row attends to nothing."""
        return quad_sum(self.rSum[row])


class TileSoftmax(OnlineSoftmax):
    """For probabilities that go into the product as e4m3. Keeps the maximum."""

    def follow(self, row: int, top: Float32) -> tuple[Float32, Float32]:
        """As follow_tile."""
        return follow_tile(self.rMax[row], top, self.maximum(row))


def mask_keys(scores: cute.Tensor, thread: Int32, limits: list[Int32]) -> None:
    """Sets the scores of a tile's keys at or past each row's limit to -inf. Selects, so that NaN behind the end vanishes."""
    rS = flat(scores)
    for i in range(cute.size(rS)):
        beyond = fragment_column(thread, i) >= limits[half(i)]
        rS[i] = cutlass.select_(beyond, -Float32.inf, rS[i])
