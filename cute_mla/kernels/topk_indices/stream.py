"""topk_indices, many long rows: a CTA has a row, which it reads once. Every architecture.

    list     keys and positions of the numbers that may be chosen, by position; at most 8,192
    least    no number below this key is chosen, nor an equal one behind those that are listed: the key that `topk` listed ones reach
    out      the positions of the topk that are listed in the end

    grid     (rows, 1, 1), 512 threads, two CTAs an SM
    memory   the list; two histograms of 2,048 digits; counts of the warps, in turns

    tile     4,096 numbers, of which each warp has 256 that follow one another; those of the next tile are under way
    mark     compare each number with `least`, as floats
    place    warps post how many they found; a barrier; each adds up those of the warps before it
    append   keys and positions, behind what is listed
    compact  if the list has no room: count its keys by 11 bits of their distance from `least` until the digit of the topk-th leaves few
             besides topk, and move these to the front. `least` rises to that digit
    end      the same until topk are left

The trick is the order: warps append in the order of positions, so that of equal numbers the first ones are listed first. A number equal to
`least` can be refused, which keeps plateaus out, and the result leaves the list as it is. So the list is a function of the row alone.

Each compaction makes room for a tile at least, whatever the numbers are. Random ones are compacted twice in 131,072, and 16 % of them are
listed; rising ones each second tile.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from ...spec.topk_indices import LISTED, MAX_STREAMED_TOPK, STREAM_TILE, THREADS, WARPS
from ..primitives.arithmetic import inclusive_sum, smaller
from ..primitives.smem import Array, SmemLayout
from .selection import (
    BLOCK,
    CHOICE,
    DIGITS,
    EACH,
    GROUP_SUMS,
    HISTOGRAMS,
    LANES,
    NAN,
    ROWS,
    SIGN,
    Digits,
    Output,
    RowSelection,
    clear_histogram,
    count_digit,
    first_shift,
    key_of,
)

assert THREADS * EACH == STREAM_TILE
assert MAX_STREAMED_TOPK + STREAM_TILE <= LISTED, "a tile has room behind the chosen"

MINUS_INFINITY, INFINITY = 0x007FFFFF, 0xFF800000  # keys; the only ones below are NAN, and 0 for no number
SPARE = 8  # a compaction may leave topk / 8 keys besides topk
HIGH = 16  # bits: a pair of counts of a tile is one word

SMEM = SmemLayout(
    (
        Array("keys", Uint32, LISTED, 16),
        Array("places", Int32, LISTED, 16),
        HISTOGRAMS,
        GROUP_SUMS,
        Array("counts", Int32, 2 * WARPS, 16),
        CHOICE,
    )
)


@dataclass(frozen=True)
class Memory(Digits):
    """Shared memory. keys, places: the list. counts: what each warp found in a tile, in turns."""

    keys: cute.Pointer
    places: cute.Pointer
    counts: cute.Pointer


@dataclass(frozen=True)
class Threshold:
    """What is looked for: numbers greater than `bound`, or all."""

    bound: Float32
    everything: Boolean

    @staticmethod
    def above(least: Uint32) -> "Threshold":
        """Return the threshold that keys above `least` pass; below that of -inf, NaN do as well."""
        bits = cutlass.select_(least >= SIGN, least ^ Uint32(SIGN), ~least)
        return Threshold(Uint32(bits).bitcast(Float32), least <= NAN)


class TopkIndicesStream(RowSelection):
    """One variant of the kernel."""

    smem, memory, counts = SMEM, Memory, 2 * ROWS

    @cute.jit
    def select(self, memory: Memory, first: cute.Pointer, out: Output, length: Int32, topk: Int32):
        """Write the positions of the topk greatest of length > topk numbers."""
        thread, _, _ = cute.arch.thread_idx()
        mine = thread // LANES * BLOCK + thread % LANES  # the lane's first place in a tile
        clear_histogram(memory.histograms, Int32(0))  # each choice clears the other
        numbers, ahead = cute.make_rmem_tensor(EACH, Float32), cute.make_rmem_tensor(EACH, Float32)
        ballots = cute.make_rmem_tensor(EACH, Uint32)
        held, least, buffer, turn = Int32(0), Uint32(0), Int32(0), Int32(0)
        most = smaller(topk + topk // SPARE, Int32(MAX_STREAMED_TOPK))
        load_tile(ahead, first, length, mine)
        for tile in cutlass.range(0, length, STREAM_TILE, unroll=1):
            for i in cutlass.range_constexpr(EACH):
                numbers[i] = ahead[i]
            load_tile(ahead, first, length, tile + STREAM_TILE + mine)
            found = mark(ballots, numbers, Threshold.above(least), length - tile - mine)
            before, total = place(memory, turn, found)
            if held + total > LISTED:
                held, least, buffer, turn = self.compact(memory, held, (least, topk, most), buffer, 1 - turn)
                found = mark(ballots, numbers, Threshold.above(least), length - tile - mine)
                before, total = place(memory, turn, found)
            turn = 1 - turn
            if found > 0:
                append(memory, ballots, numbers, held + before, tile + mine)
            held += total
        cute.arch.sync_threads()
        held, least, buffer, turn = self.compact(memory, held, (least, topk, topk), buffer, turn)
        cute.arch.sync_threads()
        for at in cutlass.range(thread, topk, THREADS, unroll=1):
            out.write(at, memory.places[at])

    @cute.jit
    def compact(self, memory: Memory, held: Int32, wanted: tuple, buffer: Int32, turn: Int32):
        """Keep the greatest numbers of the list, in their order: topk at least, `most` at most.

        wanted: least, topk, most. Returns how many are left, the new `least`, and the next turns of histograms and counts.
        """
        min_key, topk, most = wanted
        span, rank, count, kept = Uint32(INFINITY) - min_key, topk, held, held
        shift = first_shift(span)
        while kept > most and span != 0:
            count_list(memory, buffer, held, (min_key, span), shift)
            min_key, span, rank, count, shift = self.narrow(memory, buffer, rank, (min_key, span), shift)
            buffer = 1 - buffer
            kept = topk - rank + count
        need = cutlass.select_(span == 0, rank, count)
        left, turn = keep(memory, held, (min_key, min_key + span), need, turn)
        below = (min_key > NAN) & (min_key < MINUS_INFINITY)
        return left, Uint32(cutlass.select_(below, Uint32(MINUS_INFINITY), min_key)), buffer, turn


@cute.jit
def load_tile(numbers: cute.Tensor, first: cute.Pointer, length: Int32, start: Int32):
    """Load this lane's numbers from `start` on, 32 apart; the last number where there are none."""
    for i in cutlass.range_constexpr(EACH):
        numbers[i] = first[smaller(start + LANES * i, length - 1)]


@cute.jit
def mark(ballots: cute.Tensor, numbers: cute.Tensor, threshold: Threshold, count: Int32):
    """Vote on the lanes' numbers, of which those 32 i < count exist; return how many pass."""
    found = Int32(0)
    for i in cutlass.range_constexpr(EACH):
        passes = ((numbers[i] > threshold.bound) | threshold.everything) & (LANES * i < count)
        ballots[i] = Uint32(cute.arch.vote_ballot_sync(passes))
        found += Int32(cute.arch.popc(ballots[i]))
    return found


@cute.jit
def place(memory: Memory, turn: Int32, amount: Int32):
    """Return the sum of the amounts of the warps before this one, and of all. A barrier of all threads; turns alternate."""
    thread, _, _ = cute.arch.thread_idx()
    lane, warp = thread % LANES, thread // LANES
    counts = memory.counts + turn * WARPS
    if lane == 0:
        counts[warp] = amount
    cute.arch.sync_threads()
    of_warp = cutlass.select_(lane < WARPS, counts[lane % WARPS], Int32(0))
    until = inclusive_sum(of_warp, lane, Int32)
    return cute.arch.shuffle_sync(until, warp) - amount, cute.arch.shuffle_sync(until, WARPS - 1)


@cute.jit
def append(memory: Memory, ballots: cute.Tensor, numbers: cute.Tensor, slot: Int32, start: Int32):
    """List the numbers that passed, from `slot` on. start: place of this lane's first."""
    lane = cute.arch.lane_idx()
    lower_lanes = (Uint32(1) << Uint32(lane)) - 1
    for i in cutlass.range_constexpr(EACH):
        if ballots[i] != 0:
            at = slot + Int32(cute.arch.popc(ballots[i] & lower_lanes))
            if (ballots[i] >> Uint32(lane)) & 1 != 0:
                memory.keys[at] = key_of(numbers[i])
                memory.places[at] = start + LANES * i
            slot += Int32(cute.arch.popc(ballots[i]))


@cute.jit
def count_list(memory: Memory, buffer: Int32, held: Int32, span: tuple, shift: Int32):
    """Count the listed keys from span[0] to span[0] + span[1] by their distance from span[0], in steps of 2^shift; the last is open."""
    thread, _, _ = cute.arch.thread_idx()
    keys = cute.make_rmem_tensor(ROWS, Uint32)
    for first in cutlass.range(thread // LANES * (LANES * ROWS), held, THREADS * ROWS, unroll=1):
        for i in cutlass.range_constexpr(ROWS):
            keys[i] = memory.keys[first + LANES * i + thread % LANES]
        for i in cutlass.range_constexpr(ROWS):
            distance = keys[i] - span[0]
            digit = Int32(smaller(distance >> Uint32(shift), Uint32(DIGITS - 1)))
            counts = (distance <= span[1]) & (first + LANES * i + thread % LANES < held)
            count_digit(memory.histograms + buffer * DIGITS, digit, counts)


@cute.jit
def keep(memory: Memory, held: Int32, pivot: tuple, need: Int32, turn: Int32):
    """Move the keys above the pivot, (min, max), and the first `need` keys at it to the front; return their number and the next turn.

    Each tile of the list is in registers when the barrier in `place` comes, and goes to places that are not behind it.
    """
    thread, _, _ = cute.arch.thread_idx()
    lane, mine = thread % LANES, thread // LANES * BLOCK + thread % LANES
    lower_lanes = (Uint32(1) << Uint32(lane)) - 1
    keys, places = cute.make_rmem_tensor(EACH, Uint32), cute.make_rmem_tensor(EACH, Int32)
    over, same = cute.make_rmem_tensor(EACH, Uint32), cute.make_rmem_tensor(EACH, Uint32)
    above, at = Int32(0), Int32(0)
    for tile in cutlass.range(0, held, STREAM_TILE, unroll=1):
        found = Int32(0)
        for i in cutlass.range_constexpr(EACH):
            listed = tile + mine + LANES * i
            keys[i] = memory.keys[listed]
            places[i] = memory.places[listed]
            is_over = (listed < held) & (keys[i] > pivot[1])
            is_same = (listed < held) & (keys[i] >= pivot[0]) & (keys[i] <= pivot[1])
            over[i] = Uint32(cute.arch.vote_ballot_sync(is_over))
            same[i] = Uint32(cute.arch.vote_ballot_sync(is_same))
            found += Int32(cute.arch.popc(over[i])) + (Int32(cute.arch.popc(same[i])) << HIGH)
        before, total = place(memory, turn, found)
        turn = 1 - turn
        over_at, same_at = above + (before & ((1 << HIGH) - 1)), at + (before >> HIGH)
        for i in cutlass.range_constexpr(EACH):
            over_before = over_at + Int32(cute.arch.popc(over[i] & lower_lanes))
            same_before = same_at + Int32(cute.arch.popc(same[i] & lower_lanes))
            is_over, is_same = (over[i] >> Uint32(lane)) & 1 != 0, (same[i] >> Uint32(lane)) & 1 != 0
            if is_over | (is_same & (same_before < need)):
                slot = over_before + smaller(same_before, need)
                memory.keys[slot] = keys[i]
                memory.places[slot] = places[i]
            over_at += Int32(cute.arch.popc(over[i]))
            same_at += Int32(cute.arch.popc(same[i]))
        above += total & ((1 << HIGH) - 1)
        at += total >> HIGH
    return above + smaller(at, need), turn
