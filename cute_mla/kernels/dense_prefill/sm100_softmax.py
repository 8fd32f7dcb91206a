"""The softmax role of the SM100 kernel: a thread has a row of a Q tile.

Scores are exponentiated against a reference that follows the row maximum only when it has moved far (attention/softmax.py). Of
every eight pairs of exponentials, POLYNOMIAL_PAIRS are computed on the FMA pipe, since the special function unit, at 16 a
clock, would take as long as the matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from ..attention.softmax import LN2, follow_maximum, shift_of
from ..primitives import tcgen05
from ..primitives.arithmetic import larger, pack_pair
from ..primitives.smem import clear_rows
from .operands import DensePrefillItem, DensePrefillOperands, EveryKey, ItemQueue
from .sm100_config import (
    BOXES_PER_STAGE,
    EVEN_CTA,
    FIRST_KEYS,
    GROUP,
    HALF_KEYS,
    STAGE_BYTES,
    TILE_KEYS,
    TILE_ROWS,
    VALUE_STAGES,
    DensePrefillPairSmem,
    DensePrefillSm100Geometry,
    DensePrefillSm100Smem,
    QueryTileWork,
    RowTables,
    cta_rank,
    first_lane,
    key_tiles,
)

LOADED_AT_ONCE = 32  # columns of tensor memory
KEYS_STORED_AT_ONCE = 64
WORD_BITS = 32
MAX_CHAINS = 4  # independent maxima, so that none waits for the one before
PAIRS_PER_GROUP = 8
POLYNOMIAL_PAIRS = 2  # of a group

# 2^r = sum_k c_k r^k for -1/2 <= r <= 1/2, relative error 2.1e-7 in fp32, as the special function unit's: P would do with much
# less, but lse may be the logarithm of a sum of a few of them, and its error near 0 has to stay below 1e-6
EXP2_COEFFICIENTS = (1.0, 0.6931469440460205, 0.24022120237350464, 0.05550713092088699, 0.009675540961325169, 0.0013276472454890609)
MIN_EXPONENT = -127.0
# adding it leaves the nearest integer, plus the exponent bias, in the low bits of the sum
ROUNDING = 12_582_912.0 + 127.0
EXPONENT_SHIFT = 23

Pair = tuple[Float32, Float32]


def exp2_on_fma(exponents: Pair) -> Pair:
    """Return 2^x of two numbers up to 127, on the FMA pipe. 0 below 2^-126.5, NaN for NaN."""
    x = tuple(cute.arch.fmax(exponent, MIN_EXPONENT, nan=True) for exponent in exponents)
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
    keys): scores, then probabilities. row_ref: the reference, log2 units. rSums: two shares of the row sum.
    """

    dtype: type[cutlass.Numeric]
    smem: RowTables
    tile: Int32
    row: Int32
    scores: Int32
    scale_log2: Float32
    rS: cute.Tensor
    row_ref: cute.Tensor
    rSums: cute.Tensor

    @staticmethod
    def create(dtype: type[cutlass.Numeric], smem: RowTables, lanes: Int32, tile: Int32, scale_log2: Float32) -> RowSoftmax:
        """Return the state of a row that has seen nothing. lanes: tensor memory at the first lane of the warp."""
        row = cute.arch.thread_idx()[0] % GROUP
        rS, row_ref, rSums = (cute.make_rmem_tensor(cute.make_layout(size), Float32) for size in (TILE_KEYS, 1, 2))
        return RowSoftmax(dtype, smem, tile, row, lanes + tile * TILE_KEYS, scale_log2, rS, row_ref, rSums)

    def reset(self) -> None:
        """Forget all keys."""
        self.row_ref[0] = -Float32.inf
        self.rSums[0], self.rSums[1] = Float32(0), Float32(0)

    def start_load(self, first: int) -> list[Any]:
        """Start to load the row's scores from key `first` on, for finish_load."""
        return [tcgen05.load_columns(self.scores + column, LOADED_AT_ONCE) for column in range(first, TILE_KEYS, LOADED_AT_ONCE)]

    def finish_load(self, loads: list[Any]) -> None:
        """Wait for loads of the last scores of the row. P may overwrite their columns when this returns."""
        tcgen05.await_loads()
        first = TILE_KEYS - len(loads) * LOADED_AT_ONCE
        for i in range(first, TILE_KEYS):
            self.rS[i] = loads[(i - first) // LOADED_AT_ONCE][i % LOADED_AT_ONCE]

    def mask(self, limit: Int32, first: int) -> None:
        """Set the scores of keys from `limit` on, counted within the tile, to -inf, among the scores from key `first` on.

        Selects, so that NaN vanishes.
        """
        hide_keys(self.rS, limit, range(first, TILE_KEYS), -Float32.inf)

    def advance(self) -> Float32:
        """Move the reference to this tile if need be.

        Return the factor for everything accumulated before: 1 if the reference stays.
        """
        return self.follow(greatest([self.rS[i] for i in range(TILE_KEYS)]))

    def follow(self, highest: Float32) -> Float32:
        """Move the reference to a score if need be. Return the factor for everything accumulated before."""
        self.row_ref[0], alpha = follow_maximum(self.row_ref[0], highest * self.scale_log2)
        self.rSums[0], self.rSums[1] = cute.arch.mul_packed_f32x2((self.rSums[0], self.rSums[1]), (alpha, alpha))
        return alpha

    def exponentiate(self, first: int, end: int, mask: EveryKey) -> None:
        """Replace the scores of keys first .. end - 1 by unnormalised probabilities, 0 if hidden, and add them to the row sum."""
        scale, shift = (self.scale_log2,) * 2, (-shift_of(self.row_ref[0]),) * 2
        chains = [(self.rSums[0], self.rSums[1]), _both(0.0)]
        for i in range(first, end, 2):
            exponents = cute.arch.fma_packed_f32x2((mask.shown(self.rS[i], i), mask.shown(self.rS[i + 1], i + 1)), scale, shift)
            if on_fma(i // 2):
                probs = exp2_on_fma(exponents)
            else:
                probs = tuple(cute.math.exp2(exponent, fastmath=True) for exponent in exponents)
            self.rS[i], self.rS[i + 1] = probs
            chains.append(cute.arch.add_packed_f32x2(chains.pop(0), probs))
        self.rSums[0], self.rSums[1] = cute.arch.add_packed_f32x2(*chains)

    def store(self, first: int, end: int) -> None:
        """Store the probabilities of keys first .. end - 1 as 16-bit A operand, over the scores; done when this returns."""
        self.start_store(first, end)
        tcgen05.await_stores()

    def start_store(self, first: int, end: int) -> None:
        """Start to store the probabilities of keys first .. end - 1 as 16-bit A operand, over the scores, for the next call of store."""
        for key in range(first, end, KEYS_STORED_AT_ONCE):
            pairs = range(key, min(key + KEYS_STORED_AT_ONCE, end), 2)
            words = [pack_pair(self.rS[i], self.rS[i + 1], self.dtype) for i in pairs]
            tcgen05.store_columns(self.scores + key // 2, words)

    def publish_factor(self, alpha: Float32) -> None:
        """Hand the rescale factor of the row to the output role."""
        (self.smem.sAlpha + (self.tile * TILE_ROWS + self.row)).store(alpha)

    def publish_sum(self) -> Float32:
        """Hand 1 / row sum, or 0, to the output role. Return the sum over all keys seen, 0 iff the row attends to nothing."""
        total = self.rSums[0] + self.rSums[1]
        inverse = cutlass.select_(total == 0.0, Float32(0), 1.0 / total)
        (self.smem.sInverse + (self.tile * TILE_ROWS + self.row)).store(inverse)
        return total

    def lse(self, total: Float32) -> Float32:
        """Return the natural logarithm of the sum of all exponentials."""
        return (self.row_ref[0] + cute.math.log2(total, fastmath=True)) * LN2


def greatest(scores: list[Float32]) -> Float32:
    """Return the greatest of at least MAX_CHAINS scores. NaN is passed over."""
    chains = scores[:MAX_CHAINS]
    for i in range(MAX_CHAINS, len(scores)):
        chains[i % MAX_CHAINS] = cute.arch.fmax(chains[i % MAX_CHAINS], scores[i])
    return reduce(cute.arch.fmax, chains)


def on_fma(pair: int) -> bool:
    """Return whether a pair of exponentials is computed on the FMA pipe: evenly spread, so that both units always have work."""
    return (pair * POLYNOMIAL_PAIRS) % PAIRS_PER_GROUP < POLYNOMIAL_PAIRS


def hide_keys(values: cute.Tensor, limit: Int32, keys: range, hidden: Float32) -> None:
    """Set the values of those keys that are `limit` or greater to `hidden`, by selects. keys: whole words of WORD_BITS."""
    for start in keys[::WORD_BITS]:
        seen = limit - start  # of this word's keys; ptxas makes predicates of seven bits at a time
        some = cutlass.select_(seen > 0, Int32(-1) << (seen & (WORD_BITS - 1)), Int32(-1))
        beyond = cutlass.select_(seen >= WORD_BITS, Int32(0), some)
        for bit in range(WORD_BITS):
            values[start + bit] = cutlass.select_((beyond & (1 << bit)) != 0, hidden, values[start + bit])


class TilePlace(NamedTuple):
    """A key tile of a Q tile: its number, whether another one of the item comes before, and its uses of barriers and of alpha_ready."""

    tile: Int32
    follows: Boolean
    use: Int32
    alpha_use: Int32


@dataclass(frozen=True)
class DensePrefillSm100SoftmaxRole:
    """Four warps, for one Q tile. key_mask: of the call."""

    dtype: type[cutlass.Numeric]
    geometry: DensePrefillSm100Geometry
    key_mask: EveryKey

    @cute.jit
    def run(
        self,
        operands: DensePrefillOperands,
        queue: ItemQueue,
        smem: DensePrefillSm100Smem,
        tmem: Int32,
        tile: Int32,
    ):
        """Wait item_ready, scores_ready, kv_ready, sums_free.

        Signal item_free, alpha_ready, probs_ready, rest_ready, sums_ready. Writes lse.
        """
        own = smem.of_tile(tile)
        rows = RowSoftmax.create(self.dtype, smem, first_lane(tmem), tile, operands.args.scale_log2)
        more, turn, uses, done, alphas, sums = Boolean(True), Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
        while more:
            more, item = queue.take(turn)
            work = QueryTileWork.create(item, tile)
            if work.rows > 0:
                if item.leading:
                    rows.reset()
                walk = item.walk(work.tiles)
                mask = self.key_mask.rows_of(item, tile * TILE_ROWS + rows.row, walk)
                for t in cutlass.range(work.tiles, unroll=1):
                    walk.advance()
                    mask.load()
                    own.scores_ready.consumer_wait(done + t)
                    tcgen05.fence_after_wait()
                    if t == 0 and self.clears_values(item, work, tile):
                        self.clear_values(smem, uses + self.geometry.key_stages, item.keys, rows.row)
                    place = TilePlace(walk.tile(t), item.follows(t), done + t, alphas + t - item.leading)
                    self.softmax_tile(own, rows, work, place, mask)
                done = done + work.tiles
                alphas = alphas + larger(work.tiles - item.leading, Int32(0))
                if item.complete:
                    own.sums_free.producer_acquire(sums)
                    total = rows.publish_sum()
                    own.sums_ready.producer_commit(sums)
                    sums = sums + 1
                    if rows.row < work.rows:
                        lse = cutlass.select_(total == 0.0, operands.args.empty_lse, rows.lse(total))
                        operands.row("lse", item, tile * TILE_ROWS + rows.row).store(lse)
            uses = uses + item.walk(key_tiles(item.keys)).count * self.geometry.tile_stages
            turn = turn + 1

    @cute.jit
    def softmax_tile(self, own: DensePrefillSm100Smem, rows: RowSoftmax, work: QueryTileWork, place: TilePlace, mask: EveryKey):
        """Turn the scores of one of a Q tile's key tiles, which are complete, into probabilities. mask: of the row.

        The last scores are loaded again when the first part of P is handed over: ptxas would otherwise compute all of P before it
        stores any.
        """
        first_key = place.tile * TILE_KEYS
        limit = work.key_limit(rows.row) - first_key
        masked = mask.kept(work.key_limit(Int32(0)) < first_key + TILE_KEYS)
        rows.finish_load(rows.start_load(0))
        if Boolean(masked):
            rows.mask(limit, 0)
        alpha = mask.advance(rows)
        if place.follows:
            rows.publish_factor(alpha)
            own.alpha_ready.producer_commit(place.alpha_use)
        rows.exponentiate(0, FIRST_KEYS, mask)
        rows.start_store(0, mask.stored_early)
        again = rows.start_load(FIRST_KEYS)
        rows.store(mask.stored_early, FIRST_KEYS)
        tcgen05.fence_before_signal()
        own.probs_ready.producer_commit(place.use)
        rows.finish_load(again)
        if Boolean(masked):
            rows.mask(limit, FIRST_KEYS)
        rows.exponentiate(FIRST_KEYS, TILE_KEYS, mask)
        rows.store(FIRST_KEYS, TILE_KEYS)
        tcgen05.fence_before_signal()
        own.rest_ready.producer_commit(place.use)

    def clears_values(self, item: DensePrefillItem, work: QueryTileWork, tile: Int32) -> Boolean:
        """Return whether this Q tile clears values: it is the first to be multiplied with values that belong to no key.

        Only the item's last key tile can have such values.
        """
        first = (tile == 0) | (QueryTileWork.create(item, 0).skipped > 0)
        return (item.keys % TILE_KEYS != 0) & (work.skipped == 0) & first & item.shows(key_tiles(item.keys) - 1)

    @cute.jit
    def clear_values(self, smem: DensePrefillSm100Smem, use: Int32, keys: Int32, thread: Int32):
        """Zero the values past the end: P is 0 there, but 0 times a NaN of an unused row is NaN.

        The arrival with P hands over the zeros.

        S of the key tile is complete, so the stages are at this use or the one before: no other phase can be mistaken for it.
        """
        for half in cutlass.range_constexpr(VALUE_STAGES):
            smem.kv_ready.consumer_wait(use + half)
            stage = smem.sKv + smem.kv_ready.stage(use + half) * STAGE_BYTES
            clear_rows(stage, BOXES_PER_STAGE, keys % TILE_KEYS - half * HALF_KEYS, thread)
        cute.arch.fence_proxy("async.shared", space="cta")


@dataclass(frozen=True)
class DensePrefillPairSoftmaxRole:
    """Four warps of each CTA."""

    dtype: type[cutlass.Numeric]

    @cute.jit
    def run(self, operands: DensePrefillOperands, queue: ItemQueue, smem: DensePrefillPairSmem, tmem: Int32):
        """Wait item_ready, scores_ready, sums_free. Signal item_free, alpha_ready, probs_ready, rest_ready, sums_ready. Writes lse."""
        rows = RowSoftmax.create(self.dtype, smem, first_lane(tmem), Int32(0), operands.args.scale_log2)
        more, turn, done, sums = Boolean(True), Int32(0), Int32(0), Int32(0)
        while more:
            more, item = queue.take(turn)
            if item.rows > 0:
                count, row = key_tiles(item.keys), cta_rank() * TILE_ROWS + rows.row
                rows.reset()
                for t in cutlass.range(count, unroll=1):
                    self.softmax_tile(smem, rows, item, (count - 1 - t) * TILE_KEYS, done + t)
                done = done + count
                smem.sums_free.producer_acquire(sums)
                total = rows.publish_sum()
                smem.sums_ready.producer_commit(sums)
                sums = sums + 1
                if row < item.rows:
                    lse = cutlass.select_(total == 0.0, operands.args.empty_lse, rows.lse(total))
                    operands.row("lse", item, row).store(lse)
            turn = turn + 1

    @cute.jit
    def softmax_tile(self, smem: DensePrefillPairSmem, state: RowSoftmax, item: DensePrefillItem, first_key: Int32, use: Int32):
        """Turn the scores of the use-th key tile, whose first key is given, into probabilities.

        The last scores are loaded again when the first part of P is handed over, as by the kernel of two Q tiles.
        """
        buffer = smem.scores_ready.stage(use)
        rows = replace(state, tile=buffer, scores=state.scores + buffer * TILE_KEYS)
        first_row = cta_rank() * TILE_ROWS
        limit = item.key_limit(first_row + rows.row) - first_key
        masked = item.key_limit(first_row) < first_key + TILE_KEYS
        smem.scores_ready.consumer_wait(use)
        tcgen05.fence_after_wait()
        rows.finish_load(rows.start_load(0))
        if masked:
            rows.mask(limit, 0)
        rows.publish_factor(rows.advance())
        smem.alpha_ready.producer_commit(use)
        rows.exponentiate(0, FIRST_KEYS, EveryKey())
        again = rows.start_load(FIRST_KEYS)
        rows.store(0, FIRST_KEYS)
        tcgen05.fence_before_signal()
        smem.probs_ready.producer_commit(use, EVEN_CTA)
        rows.finish_load(again)
        if masked:
            rows.mask(limit, FIRST_KEYS)
        rows.exponentiate(FIRST_KEYS, TILE_KEYS, EveryKey())
        rows.store(FIRST_KEYS, TILE_KEYS)
        tcgen05.fence_before_signal()
        smem.rest_ready.producer_commit(use, EVEN_CTA)
