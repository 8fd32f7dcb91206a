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

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from ...spec.arch import Arch
from ...spec.topk_indices import BLOCKS_PER_SM, RESIDENT, RESIDENT_ROWS, THREADS, WARPS, TopkIndicesArguments, TopkIndicesConfig
from ..definition import KernelDefinition
from ..primitives.arithmetic import clip, inclusive_sum, larger, smaller
from ..primitives.smem import Array, SmemLayout, fields_of
from ..warp_kernel import WarpKernel, WarpLaunch

LANES = 32
EACH = 8  # numbers of a lane in flight
BLOCK = LANES * EACH
assert RESIDENT_ROWS % BLOCK == 0, "a block is kept whole or not at all"

DIGIT_BITS = 11
DIGITS = 1 << DIGIT_BITS
FIRST_SHIFT = 32 - DIGIT_BITS
SECOND_SHIFT = FIRST_SHIFT - DIGIT_BITS
LISTED = 256  # candidates of a warp that its list holds
ROWS = 4  # candidates of a lane in flight
CROWDED = 2  # times topk: more than so many of the greatest keys of 8 in one digit ask for a narrower bound
GROUP = 64  # digits of a group: two a lane
GROUPS = DIGITS // GROUP
assert GROUPS == LANES, "a lane adds up one group"
HELD = DIGITS // THREADS  # digits of a thread, neighbours
LANES_PER_GROUP = GROUP // HELD

SIGN = 0x80000000
NAN = 1  # its key

SMEM = SmemLayout(
    (
        Array("keys", Uint32, RESIDENT, 16),
        Array("histograms", Int32, 2 * DIGITS, 16),
        Array("groups", Int32, 2 * GROUPS, 16),
        Array("lists", Int32, WARPS * LISTED, 16),
        Array("counts", Int32, 2 * WARPS, 16),
        Array("choice", Int32, 4, 16),  # three, which are loaded at once
    )
)


@dataclass(frozen=True)
class Memory:
    """Shared memory.

    keys: the first of each warp, in its order. histograms: two, used in turn. groups: sums over them. lists: places of each warp's
    candidates. counts: (above, at) the pivot, of each warp. choice: a digit, the rank in it, and the keys that have it.
    """

    keys: cute.Pointer
    histograms: cute.Pointer
    groups: cute.Pointer
    lists: cute.Pointer
    counts: cute.Pointer
    choice: cute.Pointer


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


@dataclass(frozen=True)
class Output:
    """Place of the keys of a row, written by position, or with `slots` by slot. table: the request's row."""

    first: cute.Pointer
    table: cute.Pointer
    page_size: Int32
    pages: Int32
    slots: bool

    @cute.jit
    def write(self, place: Int32, position: Int32, is_key: Boolean | bool = True):
        """Write the key at a position to a place of the row, or -1 if it is no key, or on no page."""
        value = cutlass.select_(Boolean(is_key), position, Int32(-1))
        if cutlass.const_expr(self.slots):
            value = self.slot_of(value)
        self.first[place] = value

    @cute.jit
    def slot_of(self, position: Int32):
        """Return the slot of the key at a position, -1 if that is -1 or on no page."""
        slot = Int32(-1)
        if position >= 0:
            page = (self.table + (position >> log2_of(self.page_size))).load()
            if (page >= 0) & (page < self.pages):
                slot = page * self.page_size + (position & (self.page_size - 1))
        return slot


def log2_of(power: Int32) -> Int32:
    """Return the exponent of a power of two."""
    return Int32(31) - Int32(cute.arch.clz(power))


@cute.jit
def row_keys(args: TopkIndicesArguments, row: Int32):
    """Return the request of a row, and how many of its columns count."""
    request, behind, at = Int32(0), Int32(0), row
    if args.tokens_per_request > 1:
        request = Int32(Uint32(row) // Uint32(args.tokens_per_request))
    else:
        request = row
    if args.length_per_token == 0:
        behind = (request + 1) * args.tokens_per_request - 1 - row
        at = request
    end = clip((args.end_keys + at).load(), args.keys) - behind
    if args.first_keys.toint() != 0:
        end -= clip((args.first_keys + row).load(), args.keys)
    return request, clip(end, args.columns)


def key_of(number: Float32) -> Uint32:
    """Return the key of a number."""
    bits = (number + Float32(0)).bitcast(Int32)  # -0 + 0 is +0
    key = (bits ^ ((bits >> 31) | Int32(-SIGN))).bitcast(Uint32)
    return Uint32(cutlass.select_(number == number, key, Uint32(NAN)))  # a selection is signed


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


@cute.jit
def count_digit(histogram: cute.Pointer, digit: Int32, counts: Boolean):
    """Count the digits of the lanes that count. Equal digits are one sum if the last such lane has them. A warp, whole."""
    ballot = Uint32(cute.arch.vote_ballot_sync(counts))
    if ballot != 0:
        leader = Int32(31) - Int32(cute.arch.clz(ballot))
        of_leader = cute.arch.shuffle_sync(digit, leader)
        amount = Int32(cute.arch.popc(cute.arch.vote_ballot_sync(counts & (digit == of_leader))))
        leads = cute.arch.lane_idx() == leader
        if counts & (leads | (digit != of_leader)):
            amount = cutlass.select_(leads, amount, Int32(1))
            cute.arch.red(histogram + digit, amount, op="add", dtype="u32", sem="relaxed", scope="cta")


def warp_sum(value: Int32) -> Int32:
    """Return the sum over the lanes, in each of them."""
    for level in range(LANES.bit_length() - 1):
        value = value + cute.arch.shuffle_sync_bfly(value, 1 << level)
    return value


class TopkIndices(WarpKernel):
    """One variant of the kernel."""

    launch = WarpLaunch("topk_indices", "select", TopkIndicesArguments, THREADS, min_blocks_per_sm=BLOCKS_PER_SM)

    def __init__(self, config: TopkIndicesConfig, arch: Arch) -> None:
        super().__init__(config, arch)
        self.cluster = config.cluster
        self.launch = replace(self.launch, cluster=self.cluster)

    @cute.kernel
    def kernel(self, args: TopkIndicesArguments):
        """Select the positions of one row, with the other CTAs of the cluster."""
        memory = Memory(**fields_of(Memory, SMEM.allocate()))
        block, _, _ = cute.arch.block_idx()
        row = block // self.cluster

        # The next kernel may be launched now: one that reads the positions waits for this grid to end.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

        request, length = row_keys(args, row)
        out = Output(
            args.indices + Int64(row) * args.indices_stride_row,
            args.block_table + Int64(request) * args.table_stride,
            args.page_size,
            args.pages,
            self.config.slots,
        )
        if length <= args.topk:
            self.write_all(out, length, args.topk)
        else:
            self.select(memory, args.logits + Int64(row) * args.logits_stride_row, out, length, args.topk)

    def rank(self) -> Int32:
        """Return the number of this CTA in its cluster."""
        return cute.arch.block_idx()[0] % self.cluster

    def meet(self) -> None:
        """Wait for all threads of the cluster, whose stores are there then."""
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    def peer(self, pointer: cute.Pointer, rank: Any) -> cute.Pointer:
        """Return the address in another CTA's shared memory."""
        return cute.arch.map_dsmem_ptr(pointer, Int32(rank)) if self.cluster > 1 else pointer

    @cute.jit
    def write_all(self, out: Output, length: Int32, topk: Int32):
        """Write the positions of a row that has no more than topk numbers."""
        thread, _, _ = cute.arch.thread_idx()
        for place in cutlass.range(self.rank() * THREADS + thread, topk, self.cluster * THREADS, unroll=1):
            out.write(place, place, place < length)

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
        clear_histogram(memory.histograms, Int32(0))  # the first choice clears the other
        cute.arch.sync_threads()

        buffer, min_key, shift = self.bound(memory, run, topk)
        candidates = self.gather(memory.lists + thread // LANES * LISTED, run, min_key)
        span, rank, count = Uint32(0xFFFFFFFF) - min_key, topk, Int32(0)
        while span != 0 and rank != count:
            self.count_candidates(memory.histograms + buffer * DIGITS, candidates, (min_key, span), shift)
            digit, rank, count = self.choose(memory, buffer, rank)
            buffer = 1 - buffer
            below = Uint32(digit) << Uint32(shift)
            min_key += below
            span = Uint32(cutlass.select_(digit == DIGITS - 1, span - below, (Uint32(1) << Uint32(shift)) - 1))
            shift = larger(32 - DIGIT_BITS - Int32(cute.arch.clz(span)), Int32(0))
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
    def choose(self, memory: Memory, buffer: Int32, rank: Int32):
        """Return the digit of the key with a rank (1: the greatest) in the cluster's histograms, its rank there, and how many keys have it.

        The digit is 0 if there are fewer keys. All threads. Clears the other histogram.
        """
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % LANES
        cute.arch.sync_threads()
        held = cute.make_rmem_tensor(HELD, Int32)
        cute.autovec_copy(cute.make_tensor(memory.histograms + (buffer * DIGITS + thread * HELD), cute.make_layout(HELD)), held)
        total = held[0]
        for i in cutlass.range_constexpr(1, HELD):
            total += held[i]
        for level in cutlass.range_constexpr(LANES_PER_GROUP.bit_length() - 1):
            total += cute.arch.shuffle_sync_bfly(total, 1 << level)
        if lane % LANES_PER_GROUP == 0:
            memory.groups[buffer * GROUPS + thread // LANES_PER_GROUP] = total
        self.meet()
        clear_histogram(memory.histograms, 1 - buffer)
        if thread < LANES:
            digit, rank_there, count = self.find(memory, buffer, rank)
            if lane == 0:
                memory.choice[0] = digit
                memory.choice[1] = rank_there
                memory.choice[2] = count
        cute.arch.sync_threads()
        return memory.choice[0], memory.choice[1], memory.choice[2]

    @cute.jit
    def find(self, memory: Memory, buffer: Int32, rank: Int32):
        """Choose as `choose` does, in one warp."""
        lane = cute.arch.lane_idx()
        count = Int32(0)
        groups = memory.groups + (buffer * GROUPS + (GROUPS - 1) - lane)  # lane 0 has the greatest digits
        for cta in cutlass.range_constexpr(self.cluster):
            count += self.peer(groups, cta).load()
        until = inclusive_sum(count, lane, Int32)
        chosen = Int32(cute.arch.popc(cute.arch.vote_ballot_sync(until < rank)))
        exists = chosen < LANES
        chosen = smaller(chosen, Int32(LANES - 1))
        above = cute.arch.shuffle_sync(until - count, chosen)

        lower = ((GROUPS - 1) - chosen) * GROUP + (GROUP - 2) - 2 * lane  # this lane's digits, and the one above it
        low, high = Int32(0), Int32(0)
        pairs = cute.recast_ptr(memory.histograms, dtype=Int64) + (buffer * DIGITS + lower) // 2
        for cta in cutlass.range_constexpr(self.cluster):
            pair = self.peer(pairs, cta).load()
            low += Int32(pair)
            high += Int32(pair >> 32)
        until = above + inclusive_sum(low + high, lane, Int32)
        chosen = smaller(Int32(cute.arch.popc(cute.arch.vote_ballot_sync(until < rank))), Int32(LANES - 1))
        before = until - low - high
        is_high = before + high >= rank
        digit = cute.arch.shuffle_sync(cutlass.select_(is_high, lower + 1, lower), chosen)
        before = cute.arch.shuffle_sync(cutlass.select_(is_high, before, before + high), chosen)
        found = cute.arch.shuffle_sync(cutlass.select_(is_high, high, low), chosen)
        return cutlass.select_(exists, digit, Int32(0)), rank - before, cutlass.select_(exists, found, Int32(0))

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
def clear_histogram(histograms: cute.Pointer, buffer: Int32):
    """Clear one of the histograms. All threads."""
    thread, _, _ = cute.arch.thread_idx()
    zeros = cute.make_rmem_tensor(HELD, Int32)
    zeros.fill(0)
    cute.autovec_copy(zeros, cute.make_tensor(histograms + (buffer * DIGITS + thread * HELD), cute.make_layout(HELD)))


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
    kernel = TopkIndices(config, arch)
    return kernel.definition({"logits": Float32}, {"ATOMS": 2 + ROWS}, SMEM.nbytes)
