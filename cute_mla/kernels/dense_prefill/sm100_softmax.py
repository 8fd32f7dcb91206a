"""The softmax of a Q tile on SM100: a thread has a row.

Scores are exponentiated against a reference that follows the row maximum only when it has moved far (parts/softmax.py). Of
every eight pairs of exponentials, POLYNOMIAL_PAIRS are computed on the FMA pipe, since the special function unit, at 16 a
clock, would take as long as the matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from ..parts import tcgen05
from ..parts.fragments import pack_pair
from ..parts.softmax import LN2, follow_maximum, shift_of
from .sm100_geometry import GROUP, TILE_KEYS, TILE_ROWS, Tiles

LOADED_AT_ONCE = 32  # columns of tensor memory
KEYS_STORED_AT_ONCE = 64
MAX_CHAINS = 4  # independent maxima, so that none waits for the one before
PAIRS_PER_GROUP = 8
POLYNOMIAL_PAIRS = 3  # of a group

# 2^r = sum_k c_k r^k for -1/2 <= r <= 1/2, relative error 2.6e-6: 2^-11 of half a unit in the last place of bf16, 2^-7 of fp16's,
# and so little that lse may be the logarithm of a sum of a few of them
EXP2_COEFFICIENTS = (0.9999992847442627, 0.6931217908859253, 0.240247443318367, 0.05591785907745361, 0.009570102207362652)
LEAST_EXPONENT = -127.0
# adding it leaves the nearest integer, plus the exponent bias, in the low bits of the sum
ROUNDING = 12_582_912.0 + 127.0
EXPONENT_SHIFT = 23

Pair = tuple[Float32, Float32]


def exp2_on_fma(exponents: Pair) -> Pair:
    """2^x of two numbers up to 127, on the FMA pipe. 0 below 2^-126.5, NaN for NaN."""
    x = tuple(cute.arch.fmax(exponent, LEAST_EXPONENT, nan=True) for exponent in exponents)
    rounded = cute.arch.add_packed_f32x2(x, _both(ROUNDING))
    whole = cute.arch.add_packed_f32x2(rounded, _both(-ROUNDING))
    rest = cute.arch.fma_packed_f32x2(whole, _both(-1.0), x)
    power = _both(EXP2_COEFFICIENTS[-1])
    for coefficient in EXP2_COEFFICIENTS[-2::-1]:
        power = cute.arch.fma_packed_f32x2(power, rest, _both(coefficient))
    scale = tuple((value.bitcast(Int32) << EXPONENT_SHIFT).bitcast(Float32) for value in rounded)
    product: Pair = cute.arch.mul_packed_f32x2(power, scale)
    return product


def _both(value: float) -> Pair:
    return Float32(value), Float32(value)


@dataclass(frozen=True)
class RowSoftmax:
    """A thread's scores of one key tile and the running state of its row.

    tile, row: the Q tile, and the row of it. scores: address of S in tensor memory, at the first lane of the warp. rS: fp32 (128
    keys): scores, then probabilities. rMax: the reference, log2 units. rSums: two shares of the row sum.
    """

    dtype: type[cutlass.Numeric]
    tiles: Tiles
    tile: Int32
    row: Int32
    scores: Int32
    scale_log2: Float32
    rS: cute.Tensor
    rMax: cute.Tensor
    rSums: cute.Tensor

    @staticmethod
    def create(dtype: type[cutlass.Numeric], tiles: Tiles, lanes: Int32, tile: Int32, scale_log2: Float32) -> RowSoftmax:
        """State of a row that has seen nothing. lanes: tensor memory at the first lane of the warp."""
        row = cute.arch.thread_idx()[0] % GROUP
        rS, rMax, rSums = (cute.make_rmem_tensor(cute.make_layout(size), Float32) for size in (TILE_KEYS, 1, 2))
        return RowSoftmax(dtype, tiles, tile, row, lanes + tile * TILE_KEYS, scale_log2, rS, rMax, rSums)

    def reset(self) -> None:
        """Forgets all keys."""
        self.rMax[0] = -Float32.inf
        self.rSums[0], self.rSums[1] = Float32(0), Float32(0)

    def start_load(self, first: int) -> list[Any]:
        """Starts to load the row's scores from key `first` on, for finish_load."""
        return [tcgen05.load_columns(self.scores + column, LOADED_AT_ONCE) for column in range(first, TILE_KEYS, LOADED_AT_ONCE)]

    def finish_load(self, loads: list[Any]) -> None:
        """Waits for loads of the last scores of the row. P may overwrite their columns when this returns."""
        tcgen05.await_loads()
        first = TILE_KEYS - len(loads) * LOADED_AT_ONCE
        for i in range(first, TILE_KEYS):
            self.rS[i] = loads[(i - first) // LOADED_AT_ONCE][i % LOADED_AT_ONCE]

    def mask(self, limit: Int32, first: int) -> None:
        """Of the scores from key `first` on, sets those from `limit` on, counted within the tile, to -inf. Selects, so that NaN
        vanishes."""
        for i in range(first, TILE_KEYS):
            self.rS[i] = cutlass.select_(limit <= i, -Float32.inf, self.rS[i])

    def advance(self) -> Float32:
        """Moves the reference to this tile if need be. Returns the factor for everything accumulated before: 1 if the reference
        stays."""
        chains = [self.rS[i] for i in range(MAX_CHAINS)]
        for i in range(MAX_CHAINS, TILE_KEYS):
            chains[i % MAX_CHAINS] = cute.arch.fmax(chains[i % MAX_CHAINS], self.rS[i])
        self.rMax[0], alpha = follow_maximum(self.rMax[0], reduce(cute.arch.fmax, chains) * self.scale_log2)
        self.rSums[0], self.rSums[1] = cute.arch.mul_packed_f32x2((self.rSums[0], self.rSums[1]), (alpha, alpha))
        return alpha

    def exponentiate(self, first: int, end: int) -> None:
        """Replaces the scores of keys first .. end - 1 by unnormalised probabilities and adds them to the row sum."""
        scale, shift = (self.scale_log2,) * 2, (-shift_of(self.rMax[0]),) * 2
        chains = [(self.rSums[0], self.rSums[1]), _both(0.0)]
        for i in range(first, end, 2):
            exponents = cute.arch.fma_packed_f32x2((self.rS[i], self.rS[i + 1]), scale, shift)
            if on_fma(i // 2):
                probs = exp2_on_fma(exponents)
            else:
                probs = tuple(cute.math.exp2(exponent, fastmath=True) for exponent in exponents)
            self.rS[i], self.rS[i + 1] = probs
            chains.append(cute.arch.add_packed_f32x2(chains.pop(0), probs))
        self.rSums[0], self.rSums[1] = cute.arch.add_packed_f32x2(*chains)

    def store(self, first: int, end: int) -> None:
        """The probabilities of keys first .. end - 1 as 16-bit A operand, over the scores; done when this returns."""
        for key in range(first, end, KEYS_STORED_AT_ONCE):
            pairs = range(key, min(key + KEYS_STORED_AT_ONCE, end), 2)
            words = [pack_pair(self.rS[i], self.rS[i + 1], self.dtype) for i in pairs]
            tcgen05.store_columns(self.scores + key // 2, words)
        tcgen05.await_stores()

    def publish_factor(self, alpha: Float32) -> None:
        """Hands the rescale factor of the row to the output role."""
        (self.tiles.sAlpha + (self.tile * TILE_ROWS + self.row)).store(alpha)

    def publish_sum(self) -> Float32:
        """Hands 1 / row sum, or 0, to the output role. Returns the sum over all keys seen, 0 iff the row attends to nothing."""
        total = self.rSums[0] + self.rSums[1]
        inverse = cutlass.select_(total == 0.0, Float32(0), 1.0 / total)
        (self.tiles.sInverse + (self.tile * TILE_ROWS + self.row)).store(inverse)
        return total

    def lse(self, total: Float32) -> Float32:
        """The natural logarithm of the sum of all exponentials."""
        return (self.rMax[0] + cute.math.log2(total, fastmath=True)) * LN2


def on_fma(pair: int) -> bool:
    """Whether a pair of exponentials is computed on the FMA pipe: evenly spread, so that both pipes always have work."""
    return (pair * POLYNOMIAL_PAIRS) % PAIRS_PER_GROUP < POLYNOMIAL_PAIRS
