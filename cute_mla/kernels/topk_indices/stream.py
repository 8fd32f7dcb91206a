"""topk_indices, many long rows: a CTA has a row, which it reads once. Every architecture.

    list     keys and positions of the numbers that may be chosen, by position; at most 8,192
    least    no number below this key is chosen, nor an equal one behind those that are listed: the key that `topk` listed ones reach
    out      the positions of the topk that are listed in the end

    grid     (rows, 1, 1), 256 threads, two CTAs an SM
    memory   the list; two tiles; two histograms of 2,048 digits; counts of the warps, in turns

    tile     4,096 numbers, of which each warp has 512 that follow one another; two further tiles are under way
    mark     a bit for each number greater than `least`, as floats
    place    sums over lanes; warps post how many they found; a barrier; each adds up those of the warps before it
    append   numbers and positions, behind what is listed, while the next tile is marked
    compact  if the list has no room: count its keys by 11 bits of their distance from `least` until the digit of the topk-th leaves few
             besides topk, and move these to the front. `least` rises to that digit
    end      the same until topk are left

The trick is the order: warps append in the order of positions, so that of equal numbers the first ones are listed first. A number equal to
`least` can be refused, which keeps plateaus out, and the result leaves the list as it is. So the list is a function of the row alone.

Each compaction makes room for a tile at least, whatever the numbers are. Of 131,072 random ones 15 % are listed, with three compactions
before the end; of rising ones all, with one for each tile or two.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from ...spec.topk_indices import LISTED, MAX_STREAMED_TOPK, STREAM_THREADS, STREAM_TILE
from ..primitives.arithmetic import inclusive_sum, larger, pin_register, smaller
from ..primitives.copies import start_copy
from ..primitives.rows import aligned
from ..primitives.smem import Array, SmemLayout
from .selection import (
    CHOICE,
    DIGITS,
    GROUP_SUMS,
    HISTOGRAMS,
    LANES,
    NAN,
    SIGN,
    Digits,
    Output,
    RowSelection,
    first_shift,
    key_of,
)

WARPS = STREAM_THREADS // LANES
EACH = STREAM_TILE // STREAM_THREADS  # numbers of a lane in a tile
BLOCK = LANES * EACH  # of a warp
VECTOR = 4  # numbers of a lane that follow one another
VECTORS = EACH // VECTOR
STEP = LANES * VECTOR  # from one of a lane's vectors to the next
STAGES = 2  # tiles under way
ROWS = 8  # listed numbers of a lane that are counted together

BYTE = 8  # bits: counts of a warp's vectors are the bytes of a word
assert VECTORS * BYTE == 32, "a word has a byte for each"
assert STEP < 1 << BYTE, "a byte holds a count"
MINUS_INFINITY, INFINITY = 0x007FFFFF, 0xFF800000  # keys; the only ones below are NAN, and 0 for no number
FINE = 15  # bits: 256 digits for numbers from a power of two to the next
SPARE = 8  # a compaction may leave topk / 8 numbers besides topk
assert MAX_STREAMED_TOPK + MAX_STREAMED_TOPK // SPARE + STREAM_TILE <= LISTED, "a tile has room behind what is left"
EARLY = 3  # a first list of more than 3 topk numbers is compacted before it is full

SMEM = SmemLayout(
    (
        Array("numbers", Float32, LISTED, 16),
        Array("places", Int32, LISTED, 16),
        Array("staged", Float32, STAGES * STREAM_TILE, 16),
        HISTOGRAMS,
        GROUP_SUMS,
        Array("counts", Int32, 2 * WARPS, 16),
        Array("elsewhere", Int32, LANES, 16),
        CHOICE,
    )
)


@dataclass(frozen=True)
class Memory(Digits):
    """Shared memory.

    numbers, places: the list. staged: tiles of the row. counts: what each warp found in a tile, in turns.
    elsewhere: a count of each lane that stands for none.
    """

    numbers: cute.Pointer
    places: cute.Pointer
    staged: cute.Pointer
    counts: cute.Pointer
    elsewhere: cute.Pointer


@dataclass(frozen=True)
class Threshold:
    """Threshold of the numbers that are listed: those greater than `bound`, or all."""

    bound: Float32
    everything: Boolean

    @staticmethod
    def above(least: Uint32) -> "Threshold":
        """Return the threshold that keys above `least` pass; below that of -inf, NaN do as well."""
        bits = cutlass.select_(least >= SIGN, least ^ Uint32(SIGN), ~least)
        return Threshold(Uint32(bits).bitcast(Float32), least <= NAN)


class TopkIndicesStream(RowSelection):
    """One variant of the kernel."""

    threads = STREAM_THREADS
    smem, memory, counts = SMEM, Memory, 2 * (ROWS + 1)

    @cute.jit
    def select(self, memory: Memory, first: cute.Pointer, out: Output, length: Int32, topk: Int32):
        """Write the positions of the topk greatest of length > topk numbers."""
        thread, _, _ = cute.arch.thread_idx()
        self.clear(memory, Int32(0))  # each choice clears the other
        if thread < LANES:
            memory.elsewhere[thread] = Int32(0)
        numbers, ahead = cute.make_rmem_tensor(EACH, Float32), cute.make_rmem_tensor(EACH, Float32)
        places = cute.make_rmem_tensor(EACH, Int32)
        held, least, buffer, turn, stage = Int32(0), Uint32(0), Int32(0), Int32(0), Int32(0)
        most = topk + topk // SPARE
        for start in cutlass.range_constexpr(STAGES):
            start_tile(memory, first, length, Int32(start * STREAM_TILE), Int32(start))
        clear_list(memory)
        take_tile(numbers, memory, first, length, Int32(0), stage)
        there = those_of(length)
        found = there
        before, of_warp, amount = count_before(found)
        post(memory, turn, amount)
        for tile in cutlass.range(0, length, STREAM_TILE, unroll=1):
            stage = 1 - stage
            take_tile(ahead, memory, first, length, tile + STREAM_TILE, stage)
            ahead_there = those_of(length - tile - STREAM_TILE)
            cute.arch.sync_threads()
            start, total = sums(memory, turn)
            if (held + total > LISTED) | ((least == 0) & (held > EARLY * topk)):
                held, least, buffer, turn = self.compact(memory, held, (least, topk, most), buffer, 1 - turn)
                found = mark(numbers, Threshold.above(least), there)
                before, of_warp, start, total = place(memory, turn, found)
            for i in cutlass.range_constexpr(EACH):
                places[i] = tile + place_of(i)
            append(memory, numbers, places, found, slots_of(before, of_warp, held + start))
            held += total
            for i in cutlass.range_constexpr(EACH):
                numbers[i] = ahead[i]
            there = ahead_there
            found = mark(numbers, Threshold.above(least), there)
            before, of_warp, amount = count_before(found)
            turn = 1 - turn
            post(memory, turn, amount)
        cute.arch.cp_async_wait_group(0)  # of tiles behind the last
        cute.arch.sync_threads()
        held, least, buffer, turn = self.compact(memory, held, (least, topk, topk), buffer, turn)
        cute.arch.sync_threads()
        for at in cutlass.range(thread, topk, STREAM_THREADS, unroll=1):
            out.write(at, memory.places[at])

    @cute.jit
    def compact(self, memory: Memory, held: Int32, wanted: tuple, buffer: Int32, turn: Int32):
        """Keep the greatest numbers of the list, in their order: topk at least, `most` at most.

        wanted: least, topk, most. Returns how many are left, the new `least`, and the next turns of histograms and counts.
        """
        min_key, topk, most = wanted
        span, rank, count, kept = Uint32(INFINITY) - min_key, topk, held, held
        shift = cutlass.select_(min_key > NAN, Int32(FINE), first_shift(span))
        while kept > most and span != 0:
            count_list(memory, buffer, held, (min_key, span), shift)
            min_key, span, rank, count, shift = self.narrow(memory, buffer, rank, (min_key, span), shift)
            buffer = 1 - buffer
            kept = topk - rank + count
        need = cutlass.select_(span == 0, rank, count)
        left, turn = keep(memory, held, min_key, count - need, need, turn)
        below = (min_key > NAN) & (min_key < MINUS_INFINITY)
        return left, Uint32(cutlass.select_(below, Uint32(MINUS_INFINITY), min_key)), buffer, turn


def place_of(i: int) -> Int32:
    """Return the place in a tile of this lane's element i."""
    thread, _, _ = cute.arch.thread_idx()
    return thread // LANES * BLOCK + VECTOR * (thread % LANES) + (i // VECTOR * STEP + i % VECTOR)


@cute.jit
def start_tile(memory: Memory, first: cute.Pointer, length: Int32, tile: Int32, stage: Int32):
    """Start the copies of the warp's part of a tile, as far as there is one. A turn of 32 fills two lanes' numbers."""
    thread, _, _ = cute.arch.thread_idx()
    lane, block = thread % LANES, thread // LANES * BLOCK
    source, left = (first + (tile + block + lane)).toint(), length - (tile + block + lane)
    target = memory.staged + (stage * STREAM_TILE + block + lane)
    if tile + STREAM_TILE <= length:
        for i in cutlass.range_constexpr(EACH):
            start_copy(target + LANES * i, source + 4 * LANES * i, Boolean(True), 4)
    else:
        for i in cutlass.range_constexpr(EACH):
            start_copy(target + LANES * i, source + 4 * LANES * i, LANES * i < left, 4)
    cute.arch.cp_async_commit_group()


@cute.jit
def take_tile(numbers: cute.Tensor, memory: Memory, first: cute.Pointer, length: Int32, tile: Int32, stage: Int32):
    """Load this lane's numbers of a tile, and start the copies of the one that takes its place."""
    cute.arch.cp_async_wait_group(STAGES - 1)
    cute.arch.sync_warp()
    for v in cutlass.range_constexpr(VECTORS):
        load_vector(numbers, v, memory.staged + (stage * STREAM_TILE + place_of(v * VECTOR)))
    cute.arch.sync_warp()
    start_tile(memory, first, length, tile + STAGES * STREAM_TILE, stage)


def clear_list(memory: Memory) -> None:
    """Write zeros to the list, whose tiles are loaded whole. This takes no time while the first tiles are under way."""
    thread, _, _ = cute.arch.thread_idx()
    zeros = cute.make_rmem_tensor(VECTOR, Float32)
    zeros.fill(0.0)
    for i in range(0, LISTED, STREAM_THREADS * VECTOR):
        at = i + thread * VECTOR
        cute.autovec_copy(zeros, cute.make_tensor(aligned(memory.numbers + at, 16), cute.make_layout(VECTOR)))
        places = cute.recast_ptr(memory.places, dtype=Float32) + at
        cute.autovec_copy(zeros, cute.make_tensor(aligned(places, 16), cute.make_layout(VECTOR)))


def load_vector(values: cute.Tensor, v: int, source: cute.Pointer) -> None:
    """Load one of a lane's vectors."""
    vector = cute.make_tensor(aligned(source, 16), cute.make_layout(VECTOR))
    cute.autovec_copy(vector, cute.make_tensor(values.iterator + v * VECTOR, cute.make_layout(VECTOR)))


def mark(numbers: cute.Tensor, threshold: Threshold, there: Int32) -> Int32:
    """Return a bit for each of this lane's numbers that passes, of those that are there.

    A number is greater than the bound if their difference is negative; that of NaN, and of equal infinities, is the NaN without a sign.
    """
    bits = Int32(0)
    for i in reversed(range(EACH)):
        bits = append_sign(bits, threshold.bound - numbers[i])
    return cutlass.select_(threshold.everything, Int32((1 << EACH) - 1), bits) & there


def append_sign(bits: Int32, number: Float32) -> Int32:
    """Return bits, shifted to the left, with the sign of a number behind them."""
    shift = "shf.l.wrap.b32 {$w0}, {$r0}, {$r1}, 1;"
    return cute.arch.inline_ptx(shift, write_only_types=[Int32], read_only_args=[number.bitcast(Int32), bits])


@cute.jit
def those_of(count: Int32):
    """Return a bit for each of this lane's elements of a tile of which the first `count` exist."""
    bits = Int32((1 << EACH) - 1)
    if count < STREAM_TILE:
        bits = Int32(0)
        for i in cutlass.range_constexpr(0, EACH, VECTOR):
            bits |= ((Int32(1) << smaller(larger(count - place_of(i), Int32(0)), Int32(VECTOR))) - 1) << i
    return bits


def count_before(bits: Int32) -> tuple[Int32, Int32, Int32]:
    """Return how many elements of each vector have a bit, as bytes: in the lanes before this one, and in all; and their sum in all."""
    own = Int32(0)
    for v in range(VECTORS):
        own = own | (Int32(cute.arch.popc(bits & (((1 << VECTOR) - 1) << (v * VECTOR)))) << (v * BYTE))
    until = inclusive_sum(own, cute.arch.lane_idx(), Int32)
    of_warp, amount = cute.arch.shuffle_sync(until, LANES - 1), Int32(0)
    for v in range(VECTORS):
        amount = amount + byte_of(of_warp, v)
    return until - own, of_warp, amount


def byte_of(word: Int32, i: int) -> Int32:
    """Return a byte of a word."""
    return (word >> (i * BYTE)) & ((1 << BYTE) - 1)


def slots_of(before: Int32, of_warp: Int32, first: Int32) -> list[Int32]:
    """Return the slot of the first element of each of this lane's vectors. before, of_warp: see count_before. first: the warp's slot."""
    slots = []
    for v in range(VECTORS):
        slots.append(first + byte_of(before, v))
        first = first + byte_of(of_warp, v)
    return slots


@cute.jit
def post(memory: Memory, turn: Int32, amount: Int32):
    """Store the warp's amount for `sums`, behind a barrier of all threads. Turns alternate."""
    thread, _, _ = cute.arch.thread_idx()
    if thread % LANES == 0:
        memory.counts[turn * WARPS + thread // LANES] = amount


def sums(memory: Memory, turn: Int32) -> tuple[Int32, Int32]:
    """Return the sum of the amounts of the warps before this one, and of all."""
    thread, _, _ = cute.arch.thread_idx()
    amounts = cute.make_rmem_tensor(WARPS, Int32)
    for v in range(WARPS // VECTOR):
        load_vector(amounts, v, memory.counts + (turn * WARPS + v * VECTOR))
    start, total = Int32(0), Int32(0)
    for warp in range(WARPS):
        start = start + cutlass.select_(warp < thread // LANES, amounts[warp], Int32(0))
        total = total + amounts[warp]
    return start, total


def place(memory: Memory, turn: Int32, bits: Int32) -> tuple[Int32, Int32, Int32, Int32]:
    """Return what count_before says of elements with a bit, and how many are in the warps before this one, and in all."""
    before, of_warp, amount = count_before(bits)
    post(memory, turn, amount)
    cute.arch.sync_threads()
    return before, of_warp, *sums(memory, turn)


@cute.jit
def append(memory: Memory, numbers: cute.Tensor, places: cute.Tensor, bits: Int32, slots: list):
    """List the elements that have a bit. slots: of the first one of each of this lane's vectors."""
    for v in cutlass.range_constexpr(VECTORS):
        slot, of_vector = slots[v], pin_register(bits >> (v * VECTOR))  # few predicates at a time
        for i in cutlass.range_constexpr(VECTOR):
            if of_vector & (1 << i) != 0:
                memory.numbers[slot] = numbers[v * VECTOR + i]
                memory.places[slot] = places[v * VECTOR + i]
                slot += 1


@cute.jit
def count_list(memory: Memory, buffer: Int32, held: Int32, span: tuple, shift: Int32):
    """Count the listed keys from span[0] to span[0] + span[1] by their distance from span[0], in steps of 2^shift; the last is open.

    Equal digits of a whole block are one sum, so that a plateau does not take turns at one word.
    """
    thread, _, _ = cute.arch.thread_idx()
    lane = thread % LANES
    histogram, elsewhere = (memory.histograms + buffer * DIGITS).toint(), (memory.elsewhere + lane).toint()
    counts = cute.make_rmem_tensor(ROWS, Int32)
    for first in cutlass.range(thread // LANES * (LANES * ROWS), held, STREAM_THREADS * ROWS, unroll=1):
        for i in cutlass.range_constexpr(ROWS):
            at = first + LANES * i + lane
            distance = key_of(memory.numbers[smaller(at, held - 1)]) - span[0]
            digit = Int32(smaller(distance >> Uint32(shift), Uint32(DIGITS - 1)))
            counts[i] = cutlass.select_((distance <= span[1]) & (at < held), histogram + 4 * digit, elsewhere)
        least, greatest = counts[0], counts[0]
        for i in cutlass.range_constexpr(1, ROWS):
            least, greatest = smaller(least, counts[i]), larger(greatest, counts[i])
        common = cute.arch.shuffle_sync(least, 0)
        if cute.arch.vote_all_sync((least == common) & (greatest == common)):
            if lane == 0:
                add(common, LANES * ROWS)
        else:
            for i in cutlass.range_constexpr(ROWS):
                add(counts[i], 1)


def add(address: Int32, amount: int) -> None:
    """Add to a count of the CTA."""
    count = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=4)
    cute.arch.red(count, Int32(amount), op="add", dtype="u32", sem="relaxed", scope="cta")


@cute.jit
def keep(memory: Memory, held: Int32, min_key: Uint32, beyond: Int32, need: Int32, turn: Int32):
    """Move the keys from `min_key` on to the front, but for the last `beyond` that equal it: if there are any, `need` stay.

    Returns how many are left, and the next turn. Each tile of the list is in registers when the barrier comes, and goes to slots that are
    not behind it.
    """
    numbers, places = cute.make_rmem_tensor(EACH, Float32), cute.make_rmem_tensor(EACH, Int32)
    left, equal = Int32(0), Int32(0)
    for tile in cutlass.range(0, held, STREAM_TILE, unroll=1):
        for v in cutlass.range_constexpr(VECTORS):
            load_vector(numbers, v, memory.numbers + (tile + place_of(v * VECTOR)))
            load_vector(places, v, memory.places + (tile + place_of(v * VECTOR)))
        kept, same = Int32(0), Int32(0)
        for i in cutlass.range_constexpr(EACH):
            key = key_of(numbers[i])
            kept += cutlass.select_(key >= min_key, Int32(1 << i), Int32(0))
            same += cutlass.select_(key == min_key, Int32(1 << i), Int32(0))
        kept &= those_of(held - tile)
        if beyond > 0:
            same &= kept
            before, of_warp, start, total = place(memory, turn, same)
            turn = 1 - turn
            kept -= same
            slots = slots_of(before, of_warp, equal + start)
            for v in cutlass.range_constexpr(VECTORS):
                slot = slots[v]
                for i in cutlass.range_constexpr(v * VECTOR, (v + 1) * VECTOR):
                    if same & (1 << i) != 0:
                        kept += cutlass.select_(slot < need, Int32(1 << i), Int32(0))
                        slot += 1
            equal += total
        before, of_warp, start, total = place(memory, turn, kept)
        turn = 1 - turn
        append(memory, numbers, places, kept, slots_of(before, of_warp, left + start))
        left += total
    return left, turn
