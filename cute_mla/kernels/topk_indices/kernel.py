"""topk_indices: positions of the greatest numbers of each row, ascending. Every architecture.

    key(x)   32 bits, ordered as the numbers are: -0 as +0, NaN 1, -inf above it; 0 stands for no number
    pivot    keys from min to max, equal or all chosen, with the topk-th greatest among them.     need = topk - #{key > max}
    out      the positions with key > max, and the first `need` of those at the pivot, in ascending order; -1 after them
    slot     a variant writes the place in the cache of the key at a position in its stead, by a block table

    grid     (rows * cluster, 1, 1), 512 threads: a cluster of 1, 2, 4 or 8 CTAs shares a row, and each of its warps takes one run of it
    memory   keys of each warp's first 1,024 numbers, which never leave the SM; two histograms of 2,048 digits; the warps' candidates

    bound    load the row; count the greatest key of every 8 numbers of a lane by its upper 11 bits. topk such keys reach the digit of the
             topk-th of them, so that no number below this digit is chosen. If many share it, the next 11 bits make the bound narrow
    gather   each warp lists its candidates, the numbers not below the bound; it goes on with all its numbers if there are more than 256
    narrow   count the candidates by 11 bits of their distance from the bound, and those that share the chosen digit again, until all of
             them are chosen or equal: once or twice for numbers that differ
    place    each warp counts its keys above and at the pivot, and adds up the counts of the warps before it
    write    each warp writes its positions after theirs

The trick is the bound: one count for 8 numbers leaves about 2 % of them (131,072, topk 2,048) to be looked at again. It is no estimate, and
the list is no limit: a row of equal numbers takes longer, and is as exact.

After each histogram the CTAs of a cluster read one another's, each for itself: sums of 64 digits, then the 64 digits in which the rank
lies. A histogram is cleared after the next barrier of the cluster, when no CTA reads it any more.

Nothing depends on the order of the atomic sums, so that the bits repeat. Operands and their meaning: cute_mla/spec/topk_indices.py.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from ...spec.arch import Arch
from ...spec.topk_indices import RESIDENT, RESIDENT_ROWS, THREADS, WARPS, TopkIndicesConfig
from ..definition import KernelDefinition
from ..primitives.arithmetic import larger, smaller
from ..primitives.smem import Array, SmemLayout
from .selection import (
    BLOCK,
    CHOICE,
    DIGIT_BITS,
    DIGITS,
    EACH,
    GROUP_SUMS,
    HISTOGRAMS,
    LANES,
    NAN,
    ROWS,
    Digits,
    Output,
    RowSelection,
    count_digit,
    key_of,
)
from .stream import TopkIndicesStream

assert RESIDENT_ROWS % BLOCK == 0, "a block is kept whole or not at all"

FIRST_SHIFT = 32 - DIGIT_BITS
SECOND_SHIFT = FIRST_SHIFT - DIGIT_BITS
LISTED = 256  # candidates of a warp that its list holds
CROWDED = 2  # times topk: more than so many of the greatest keys of 8 in one digit ask for a narrower bound

SMEM = SmemLayout(
    (
        Array("keys", Uint32, RESIDENT, 16),
        HISTOGRAMS,
        GROUP_SUMS,
        Array("lists", Int32, WARPS * LISTED, 16),
        Array("counts", Int32, 2 * WARPS, 16),
        CHOICE,
    )
)


@dataclass(frozen=True)
class Memory(Digits):
    """Shared memory.

    keys: the first of each warp, in its order. lists: places of each warp's candidates. counts: (above, at) the pivot, of each warp.
    """

    keys: cute.Pointer
    lists: cute.Pointer
    counts: cute.Pointer


@dataclass(frozen=True)
class LaneRun:
    """The numbers of a row that a warp takes.

    first: address of the first. position: its position. count: numbers. kept: where the first keys stay. rest: the first number again, or
    None where all keys stay, whatever the row.
    """

    first: cute.Pointer
    position: Int32
    count: Int32
    kept: cute.Pointer
    rest: cute.Pointer | None


@dataclass(frozen=True)
class Candidates:
    """The numbers of a run that may be chosen: those in a list of places in the run, ascending, or the whole run."""

    run: LaneRun
    places: cute.Pointer
    count: Int32
    listed: Boolean


@cute.jit
def load_numbers(numbers: cute.Tensor, first: cute.Pointer, count: Int32, place: Int32):
    """Load a block from global memory, of a run with count > 0 numbers: lane l has numbers l, l + 32, .. from `place` on."""
    for i in cutlass.range_constexpr(EACH):
        number = smaller(place + LANES * i + cute.arch.lane_idx(), count - 1)  # always loaded, so that there is no branch
        numbers[i] = first[number]


@cute.jit
def keys_of(keys: cute.Tensor, numbers: cute.Tensor, count: Int32):
    """Compute the keys of a block of which `count` numbers exist, 0 for the others."""
    for i in cutlass.range_constexpr(EACH):
        keys[i] = cutlass.select_(LANES * i + cute.arch.lane_idx() < count, key_of(numbers[i]), Uint32(0))


@cute.jit
def recall_keys(keys: cute.Tensor, run: LaneRun, place: Int32):
    """Load a block's keys again, from where they are."""
    if cutlass.const_expr(run.rest is None):
        kept_keys(keys, run, place)
    else:
        if place < RESIDENT_ROWS:
            kept_keys(keys, run, place)
        else:
            numbers = cute.make_rmem_tensor(EACH, Float32)
            load_numbers(numbers, run.rest, run.count, place)
            keys_of(keys, numbers, run.count - place)


def kept_keys(keys: cute.Tensor, run: LaneRun, place: Int32) -> None:
    """Load a block's keys from shared memory."""
    for i in range(EACH):
        keys[i] = run.kept[place + LANES * i + cute.arch.lane_idx()]


def greatest_of(keys: cute.Tensor) -> Uint32:
    """Return the greatest key of a lane's in a block."""
    greatest = keys[0]
    for i in range(1, EACH):
        greatest = Uint32(larger(greatest, keys[i]))
    return greatest


@cute.jit
def load_candidates(keys: cute.Tensor, places: cute.Tensor, candidates: Candidates, first: Int32):
    """Load keys and places of 32 candidates a row, from `first` < count on; the key is 0 after the last."""
    run = candidates.run
    for i in cutlass.range_constexpr(ROWS):
        places[i] = smaller(first + LANES * i + cute.arch.lane_idx(), candidates.count - 1)
    if candidates.listed:
        for i in cutlass.range_constexpr(ROWS):
            places[i] = candidates.places[places[i]]
    for i in cutlass.range_constexpr(ROWS):
        if cutlass.const_expr(run.rest is None):
            keys[i] = run.kept[places[i]]
        else:
            keys[i] = run.kept[smaller(places[i], Int32(RESIDENT_ROWS - 1))]
            if places[i] >= RESIDENT_ROWS:
                keys[i] = key_of((run.rest + places[i]).load())
    for i in cutlass.range_constexpr(ROWS):
        keys[i] = cutlass.select_(first + LANES * i + cute.arch.lane_idx() < candidates.count, keys[i], Uint32(0))


def warp_sum(value: Int32) -> Int32:
    """Return the sum over the lanes, in each of them."""
    for level in range(LANES.bit_length() - 1):
        value = value + cute.arch.shuffle_sync_bfly(value, 1 << level)
    return value


class TopkIndices(RowSelection):
    """One variant of the kernel."""

    smem, memory, counts = SMEM, Memory, 2 + ROWS

    @cute.jit
    def select(self, memory: Memory, first: cute.Pointer, out: Output, length: Int32, topk: Int32):
        """Write the positions of the topk greatest of length > topk numbers."""
        thread, _, _ = cute.arch.thread_idx()
        warp = self.rank() * WARPS + thread // LANES
        share = (length + (self.cluster * THREADS - 1)) // (self.cluster * THREADS) * LANES
        begin = smaller(warp * share, length)
        kept = memory.keys + thread // LANES * RESIDENT_ROWS
        rest = None if self.cluster == 1 else first + begin  # the choice of the variant sees to it
        run = LaneRun(first + begin, begin, smaller(share, length - begin), kept, rest)
        self.clear(memory, Int32(0))  # the first choice clears the other
        cute.arch.sync_threads()

        buffer, min_key, shift = self.bound(memory, run, topk)
        candidates = self.gather(memory.lists + thread // LANES * LISTED, run, min_key)
        span, rank, count = Uint32(0xFFFFFFFF) - min_key, topk, Int32(0)
        while span != 0 and rank != count:
            self.count_candidates(memory.histograms + buffer * DIGITS, candidates, (min_key, span), shift)
            min_key, span, rank, count, shift = self.narrow(memory, buffer, rank, (min_key, span), shift)
            buffer = 1 - buffer
        self.write_selected(memory, candidates, out, (min_key, min_key + span), rank)

    @cute.jit
    def bound(self, memory: Memory, run: LaneRun, topk: Int32):
        """Keep the first keys; return the next histogram, clear, a key that no chosen key is below, and the shift of the next digit."""
        keys, ahead = cute.make_rmem_tensor(EACH, Uint32), cute.make_rmem_tensor(EACH, Float32)
        if run.count > 0:
            load_numbers(ahead, run.first, run.count, Int32(0))
        for place in cutlass.range(0, run.count, BLOCK, unroll=1):
            keys_of(keys, ahead, run.count - place)
            load_numbers(ahead, run.first, run.count, place + BLOCK)
            if place < RESIDENT_ROWS:
                for i in cutlass.range_constexpr(EACH):
                    run.kept[place + LANES * i + cute.arch.lane_idx()] = keys[i]
            greatest = greatest_of(keys)
            count_digit(memory.histograms, Int32(greatest >> FIRST_SHIFT), greatest != 0)
        digit, rank, count = self.choose(memory, Int32(0), topk)
        min_key, buffer = Uint32(digit) << FIRST_SHIFT, Int32(1)
        shift = cutlass.select_(digit == 0, Int32(FIRST_SHIFT), Int32(SECOND_SHIFT))  # the pivot is seldom far above the bound
        if count > CROWDED * topk:
            for place in cutlass.range(0, run.count, BLOCK, unroll=1):
                recall_keys(keys, run, place)
                greatest = greatest_of(keys)
                second = Int32((greatest >> SECOND_SHIFT) & (DIGITS - 1))
                count_digit(memory.histograms + DIGITS, second, (greatest >> FIRST_SHIFT) == min_key >> FIRST_SHIFT)
            digit, rank, count = self.choose(memory, Int32(1), rank)
            min_key, buffer, shift = min_key | (Uint32(digit) << SECOND_SHIFT), Int32(0), Int32(0)
        return buffer, Uint32(larger(min_key, Uint32(NAN))), shift

    @cute.jit
    def gather(self, places: cute.Pointer, run: LaneRun, min_key: Uint32):
        """List the numbers with keys of at least `min_key`; return the candidates."""
        keys, total = cute.make_rmem_tensor(EACH, Uint32), Int32(0)
        for place in cutlass.range(0, smaller(run.count, Int32(RESIDENT_ROWS)), BLOCK, unroll=1):
            kept_keys(keys, run, place)
            total = self.list_block(places, keys, place, min_key, total)
        if cutlass.const_expr(run.rest is not None):
            ahead = cute.make_rmem_tensor(EACH, Float32)
            if run.count > RESIDENT_ROWS:
                load_numbers(ahead, run.rest, run.count, Int32(RESIDENT_ROWS))
            for place in cutlass.range(RESIDENT_ROWS, run.count, BLOCK, unroll=1):
                keys_of(keys, ahead, run.count - place)
                load_numbers(ahead, run.rest, run.count, place + BLOCK)
                total = self.list_block(places, keys, place, min_key, total)
        cute.arch.sync_warp()
        listed = total <= LISTED
        return Candidates(run, places, cutlass.select_(listed, total, run.count), listed)

    @cute.jit
    def list_block(self, places: cute.Pointer, keys: cute.Tensor, place: Int32, min_key: Uint32, total: Int32):
        """List the numbers of a block with keys of at least `min_key`, after `total` others; return how many there are then."""
        lane = cute.arch.lane_idx()
        lower_lanes = (Uint32(1) << Uint32(lane)) - 1
        for i in cutlass.range_constexpr(EACH):
            found = keys[i] >= min_key
            ballot = Uint32(cute.arch.vote_ballot_sync(found))
            slot = total + Int32(cute.arch.popc(ballot & lower_lanes))
            if found & (slot < LISTED):
                places[slot] = place + LANES * i + lane
            total += Int32(cute.arch.popc(ballot))
        return total

    @cute.jit
    def count_candidates(self, histogram: cute.Pointer, candidates: Candidates, span: tuple, shift: Int32):
        """Count the candidates from span[0] to span[0] + span[1] by their distance from span[0], in steps of 2^shift; the last is open."""
        keys, places = cute.make_rmem_tensor(ROWS, Uint32), cute.make_rmem_tensor(ROWS, Int32)
        for first in cutlass.range(0, candidates.count, LANES * ROWS, unroll=1):
            load_candidates(keys, places, candidates, first)
            for i in cutlass.range_constexpr(ROWS):
                distance = keys[i] - span[0]
                digit = Int32(smaller(distance >> Uint32(shift), Uint32(DIGITS - 1)))
                count_digit(histogram, digit, distance <= span[1])

    @cute.jit
    def write_selected(self, memory: Memory, candidates: Candidates, out: Output, pivot: tuple, need: Int32):
        """Write the positions of keys above the pivot, (min, max), and of the first `need` keys at the pivot."""
        thread, _, _ = cute.arch.thread_idx()
        lane, warp = thread % LANES, thread // LANES
        above, at = count_beside(candidates, pivot)
        if lane == 0:
            memory.counts[2 * warp] = above
            memory.counts[2 * warp + 1] = at
        self.meet()
        above, at = self.counts_before(memory)
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_arrive()
        keys, places = cute.make_rmem_tensor(ROWS, Uint32), cute.make_rmem_tensor(ROWS, Int32)
        lower_lanes = (Uint32(1) << Uint32(lane)) - 1
        for first in cutlass.range(0, candidates.count, LANES * ROWS, unroll=1):
            load_candidates(keys, places, candidates, first)
            for i in cutlass.range_constexpr(ROWS):
                is_over = keys[i] > pivot[1]
                is_same = (keys[i] >= pivot[0]) & (keys[i] <= pivot[1])
                over = Uint32(cute.arch.vote_ballot_sync(is_over))
                same = Uint32(cute.arch.vote_ballot_sync(is_same))
                over_before = above + Int32(cute.arch.popc(over & lower_lanes))
                same_before = at + Int32(cute.arch.popc(same & lower_lanes))
                if is_over | (is_same & (same_before < need)):
                    out.write(over_before + smaller(same_before, need), candidates.run.position + places[i])
                above += Int32(cute.arch.popc(over))
                at += Int32(cute.arch.popc(same))
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_wait()  # no CTA ends while another reads its counts

    @cute.jit
    def counts_before(self, memory: Memory):
        """Return the keys above and at the pivot of all warps of the cluster before this one."""
        thread, _, _ = cute.arch.thread_idx()
        lane, mine = thread % LANES, self.rank() * WARPS + thread // LANES
        above, at = Int32(0), Int32(0)
        for first in cutlass.range_constexpr(0, self.cluster * WARPS, LANES):
            warp = first + lane
            counts = self.peer(memory.counts + warp % WARPS * 2, smaller(warp // WARPS, Int32(self.cluster - 1)))
            before = warp < mine
            above += cutlass.select_(before, counts[0], Int32(0))
            at += cutlass.select_(before, counts[1], Int32(0))
        return warp_sum(above), warp_sum(at)


@cute.jit
def count_beside(candidates: Candidates, pivot: tuple):
    """Return the numbers of candidates above and at the pivot, (min, max), in each lane."""
    keys, places = cute.make_rmem_tensor(ROWS, Uint32), cute.make_rmem_tensor(ROWS, Int32)
    above, at = Int32(0), Int32(0)
    for first in cutlass.range(0, candidates.count, LANES * ROWS, unroll=1):
        load_candidates(keys, places, candidates, first)
        for i in cutlass.range_constexpr(ROWS):
            above += cutlass.select_(keys[i] > pivot[1], Int32(1), Int32(0))
            at += cutlass.select_((keys[i] >= pivot[0]) & (keys[i] <= pivot[1]), Int32(1), Int32(0))
    return warp_sum(above), warp_sum(at)


def build(config: TopkIndicesConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    kernel = TopkIndicesStream(config, arch) if config.stream else TopkIndices(config, arch)
    return kernel.definition({"logits": Float32}, {"ATOMS": kernel.counts}, kernel.smem.nbytes)
