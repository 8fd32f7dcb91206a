"""Online softmax in base 2, with conditional rescale: over score fragments of two rows per thread.

Scores are exponentiated against a reference that follows the row maximum only when that has moved up by more than
RESCALE_LOG2: until then probabilities may reach 2^8, which bf16, fp16 and the fp32 sums hold as precisely as 1, and the
accumulators need no rescale. The reference starts at -inf and stays there while a row has seen no valid key.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self

import cutlass
from cutlass import Float32, Int32, cute

from ...spec.mla import LOG2E
from ..primitives.wgmma import ROWS_PER_THREAD, flat, fragment_column, half, quad_max, quad_sum
from .scheduler import LatentOperands, WorkTile

RESCALE_LOG2 = 8.0
LARGEST_LOG2 = 8.0  # of e4m3 probabilities: the greatest power of two below 448
SLACK_LOG2 = 4.0  # by which the greatest of a tile may be less, so that O is not rescaled for every tile
DEPTH_LOG2 = 32.0
# Factors of e4m3 probabilities of neighbouring keys before they are rounded: up to half the distance of two numbers below
# 2^LARGEST_LOG2, which that number itself outlives. Where scores are nearly alike, rounding would else make all probabilities
# equal, or tell apart those on both sides of a midpoint far too much, and the error would grow with the keys.
DITHER = tuple(1 + (2 * i - 7) / 256 for i in (0, 4, 2, 6, 1, 5, 3, 7))
LN2 = 0.6931471805599453  # natural logarithm of one log2 unit


def follow_maximum(old: Float32, candidate: Float32) -> tuple[Float32, Float32]:
    """Return (reference, factor for what was accumulated under the old one) from the old reference and the scaled maximum of a tile.

    The factor is 1 where the reference stays.
    """
    moved = candidate > old + RESCALE_LOG2
    new = cutlass.select_(moved, candidate, old)
    return new, cutlass.select_(moved, cute.math.exp2(old - new, fastmath=True), Float32(1))


@dataclass(frozen=True)
class Window:
    """The binary logarithms between which the greatest e4m3 probability of a tile may lie.

    placed: where a reference that moves puts it, an integer, so that e4m3 holds it exactly. above: by how much it may then exceed
    that before the reference moves again. It falls short of it by SLACK_LOG2 at most.
    """

    placed: float = LARGEST_LOG2
    above: float = 0.0


AT_THE_TOP = Window()


def follow_tile(old: Float32, candidate: Float32, greatest: Float32, window: Window = AT_THE_TOP) -> tuple[Float32, Float32]:
    """Return (reference, factor) as follow_maximum does, for probabilities that are rounded to e4m3.

    The reference follows the maximum of every tile, up and down, where the tile's greatest probability would leave the window.

    greatest: of all tiles, this one included. The reference stays where a tile has no key that the row sees. It lies at most DEPTH_LOG2
    below where `greatest` would have it: so the factor is at most 2^DEPTH_LOG2, and keys this far below are fewer than would count.
    """
    target = cute.arch.fmax(candidate, greatest - DEPTH_LOG2) - window.placed
    ceiling = old + window.above if window.above > 0 else old
    moved = (candidate > -Float32.inf) & ((target > ceiling) | (target < old - SLACK_LOG2))
    new = cutlass.select_(moved, target, old)
    return new, cutlass.select_(moved, cute.math.exp2(old - new, fastmath=True), Float32(1))


def shift_of(reference: Float32) -> Float32:
    """Return what to subtract from scaled scores: the reference, but not -inf, since -inf - -inf is NaN."""
    return cutlass.select_(reference == -Float32.inf, Float32(0), reference)


FindWorkTile = Callable[[], WorkTile]  # worked out only where it is needed


class RowScale(Protocol):
    """The factors of scores and of output rows."""

    def score_scale(self, operands: Any) -> Float32:
        """Return the factor of the scores, log2 units."""

    def weight(self, operands: Any, work_tile: FindWorkTile, row: Int32, total: Float32, reference: Float32) -> Float32:
        """Return the factor of a row of O. total: the row sum, not 0. reference: log2 units, what the sum is relative to."""


class SinkScale:
    """Row scale of ops with attention sinks: out is divided by row sum + weight of the row's sink."""

    def score_scale(self, operands: LatentOperands) -> Float32:
        """Return the factor of the scores."""
        return operands.scale_log2

    def weight(self, operands: LatentOperands, work_tile: FindWorkTile, row: Int32, total: Float32, reference: Float32) -> Float32:
        """Return the factor of a row of O."""
        return 1.0 / with_sink(operands, work_tile(), row, total, reference)


def sink_weight(sink: Float32, reference: Float32) -> Float32:
    """Return 2^(sink log2 e - reference). sink: natural logarithm.

    The product and the difference are one fma: ptxas may round them apart or once, and what is verified must be what it emits.
    """
    return cute.math.exp2(cute.math.fma(sink, Float32(LOG2E), -reference), fastmath=True)


@cute.jit
def with_sink(operands: LatentOperands, work_tile: WorkTile, row: Int32, total: Float32, reference: Float32) -> Float32:
    """Return the divisor of a row: its sum, and the weight of the row's sink where this work tile writes the output.

    A split does without the sink, since combine adds it.
    """
    divisor = total
    if work_tile.direct and operands.attn_sink.toint() != 0 and row < operands.rows():
        sink = (operands.attn_sink + row).load()
        divisor = total + sink_weight(sink, reference)
    return divisor


@dataclass(frozen=True)
class OnlineSoftmax:
    """Running state of the thread's two rows.

    row_ref: the reference, log2 units. rSum: this thread's share of the row sum. row_max: the maximum itself, log2 units, where it
    is asked for. rows: 1 if another CTA has the second one.
    """

    scale_log2: Float32
    row_ref: cute.Tensor
    rSum: cute.Tensor
    row_max: cute.Tensor | None = None
    rows: int = ROWS_PER_THREAD

    @classmethod
    def create(cls, scale_log2: Float32, keeps_maximum: bool = False, rows: int = ROWS_PER_THREAD) -> Self:
        """Return the state of rows that have seen nothing."""
        state = [cute.make_rmem_tensor(cute.make_layout(rows), Float32) for _ in range(3 if keeps_maximum else 2)]
        softmax = cls(scale_log2, state[0], state[1], state[2] if keeps_maximum else None, rows)
        softmax.reset()
        return softmax

    def reset(self) -> None:
        """Forget all keys."""
        for row in range(self.rows):
            self.row_ref[row] = -Float32.inf
            self.rSum[row] = Float32(0)
            if self.row_max is not None:
                self.row_max[row] = -Float32.inf

    def add_tile(self, scores: cute.Tensor) -> list[Float32]:
        """Replace a 64x64 score fragment by unnormalised probabilities and bring the state up to date.

        Return, per row, the factor by which everything accumulated before must be scaled.
        """
        rS = flat(scores)
        factors = []
        for row in range(self.rows):
            registers = [i for i in range(cute.size(rS)) if half(i) == row]
            alpha, shift = self.follow_row(rS, registers, row)
            self.add_scores(rS, registers, row, shift)
            factors.append(alpha)
        return factors

    def follow_row(self, rS: cute.Tensor, registers: list[int], row: int) -> tuple[Float32, Float32]:
        """Bring a row's state to the reference that a tile asks for. registers: of the row.

        Return (the factor for everything accumulated before, what to add to scaled scores).
        """
        tile_max = rS[registers[0]]
        for i in registers[1:]:
            tile_max = cute.arch.fmax(tile_max, rS[i])
        top = quad_max(tile_max) * self.scale_log2
        if self.row_max is not None:
            self.row_max[row] = cute.arch.fmax(self.row_max[row], top)
        new, alpha = self.follow(row, top)
        self.row_ref[row] = new
        self.rSum[row] = self.rSum[row] * alpha
        return alpha, -shift_of(new)

    def add_scores(self, rS: cute.Tensor, registers: list[int], row: int, shift: Float32) -> None:
        """Replace some of a row's scores by unnormalised probabilities and add them up."""
        total = self.rSum[row]
        for i in registers:
            rS[i] = cute.math.exp2(rS[i] * self.scale_log2 + shift, fastmath=True)
            total = total + rS[i]
        self.rSum[row] = total

    def follow(self, row: int, top: Float32) -> tuple[Float32, Float32]:
        """Return (a row's new reference, the factor for what was accumulated) from the scaled maximum of a tile."""
        return follow_maximum(self.row_ref[row], top)

    def maximum(self, row: int) -> Float32:
        """Return the greatest score seen, log2 units."""
        assert self.row_max is not None, "only where it is asked for"
        return self.row_max[row]

    def row_sum(self, row: int) -> Float32:
        """Return the sum over all keys seen: 0 iff the row attends to nothing."""
        return quad_sum(self.rSum[row])


class TileSoftmax(OnlineSoftmax):
    """Softmax for probabilities that go into the product as e4m3. Keeps the maximum."""

    def follow(self, row: int, top: Float32) -> tuple[Float32, Float32]:
        """Return (reference, factor) by follow_tile."""
        return follow_tile(self.row_ref[row], top, self.maximum(row))


def mask_keys(scores: cute.Tensor, thread: Int32, limits: list[Int32]) -> None:
    """Set the scores of a tile's keys at or past each row's limit to -inf. Selects, so that NaN behind the end vanishes."""
    rS = flat(scores)
    for i in range(cute.size(rS)):
        beyond = fragment_column(thread, i) >= limits[half(i)]
        rS[i] = cutlass.select_(beyond, -Float32.inf, rS[i])
