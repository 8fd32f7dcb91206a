"""Parts that the kernels of topk_indices share: keys of numbers, rows that a call means, digits counted by many threads, the result."""

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from ...spec.arch import Arch
from ...spec.topk_indices import BLOCKS_PER_SM, THREADS, TopkIndicesArguments, TopkIndicesConfig
from ..primitives.arithmetic import clip, inclusive_sum, larger, smaller
from ..primitives.smem import Array, SmemLayout, fields_of
from ..warp_kernel import WarpKernel, WarpLaunch

LANES = 32
EACH = 8  # numbers of a lane in flight
BLOCK = LANES * EACH
ROWS = 4  # candidates of a lane in flight

DIGIT_BITS = 11
DIGITS = 1 << DIGIT_BITS
GROUP = 64  # digits of a group: two a lane
GROUPS = DIGITS // GROUP
assert GROUPS == LANES, "a lane adds up one group"

SIGN = 0x80000000
NAN = 1  # its key

HISTOGRAMS = Array("histograms", Int32, 2 * DIGITS, 16)
GROUP_SUMS = Array("groups", Int32, 2 * GROUPS, 16)
CHOICE = Array("choice", Int32, 4, 16)  # three, which are loaded at once


@dataclass(frozen=True)
class Digits:
    """Shared memory of a choice of a digit.

    histograms: two, used in turn. groups: sums over them. choice: a digit, the rank in it, and the keys that have it.
    """

    histograms: cute.Pointer
    groups: cute.Pointer
    choice: cute.Pointer


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


def first_shift(span: Uint32) -> Int32:
    """Return the shift with which the distances up to `span` have DIGITS steps."""
    return larger(32 - DIGIT_BITS - Int32(cute.arch.clz(span)), Int32(0))


class RowSelection(WarpKernel):
    """A kernel each of whose CTAs or clusters takes a row. A subclass has `select`, and the arrays and the class of its shared memory."""

    launch = WarpLaunch("topk_indices", "select", TopkIndicesArguments, THREADS, min_blocks_per_sm=BLOCKS_PER_SM)
    threads = THREADS
    smem: SmemLayout
    memory: type
    select: Any

    def __init__(self, config: TopkIndicesConfig, arch: Arch) -> None:
        super().__init__(config, arch)
        self.cluster = config.cluster
        self.launch = replace(self.launch, threads=self.threads, cluster=self.cluster)
        self.held = DIGITS // self.threads  # digits of a thread, neighbours

    @cute.kernel
    def kernel(self, args: TopkIndicesArguments):
        """Select the positions of one row, with the other CTAs of the cluster."""
        memory = self.memory(**fields_of(self.memory, self.smem.allocate()))
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
        for place in cutlass.range(self.rank() * self.threads + thread, topk, self.cluster * self.threads, unroll=1):
            out.write(place, place, place < length)

    def own_digits(self, memory: Digits, buffer: Int32) -> cute.Tensor:
        """Return this thread's digits of a histogram."""
        thread, _, _ = cute.arch.thread_idx()
        return cute.make_tensor(memory.histograms + (buffer * DIGITS + thread * self.held), cute.make_layout(self.held))

    def clear(self, memory: Digits, buffer: Int32) -> None:
        """Clear one of the histograms. All threads."""
        zeros = cute.make_rmem_tensor(self.held, Int32)
        zeros.fill(0)
        cute.autovec_copy(zeros, self.own_digits(memory, buffer))

    @cute.jit
    def choose(self, memory: Digits, buffer: Int32, rank: Int32):
        """Return the digit of the key with a rank (1: the greatest) in the cluster's histograms, its rank there, and how many keys have it.

        The digit is 0 if there are fewer keys. All threads. Clears the other histogram.
        """
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % LANES
        cute.arch.sync_threads()
        held, lanes_per_group = cute.make_rmem_tensor(self.held, Int32), GROUP // self.held
        cute.autovec_copy(self.own_digits(memory, buffer), held)
        total = held[0]
        for i in cutlass.range_constexpr(1, self.held):
            total += held[i]
        for level in cutlass.range_constexpr(lanes_per_group.bit_length() - 1):
            total += cute.arch.shuffle_sync_bfly(total, 1 << level)
        if lane % lanes_per_group == 0:
            memory.groups[buffer * GROUPS + thread // lanes_per_group] = total
        self.meet()
        self.clear(memory, 1 - buffer)
        if thread < LANES:
            digit, rank_there, count = self.find(memory, buffer, rank)
            if lane == 0:
                memory.choice[0] = digit
                memory.choice[1] = rank_there
                memory.choice[2] = count
        cute.arch.sync_threads()
        return memory.choice[0], memory.choice[1], memory.choice[2]

    @cute.jit
    def find(self, memory: Digits, buffer: Int32, rank: Int32):
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
    def narrow(self, memory: Digits, buffer: Int32, rank: Int32, span: tuple, shift: Int32):
        """Choose the digit of the key with a rank among those from span[0] to span[0] + span[1], of which each digit is 2^shift keys.

        Returns the span of that digit, the rank in it, how many have it, and the shift of the next one.
        """
        digit, rank, count = self.choose(memory, buffer, rank)
        below = Uint32(digit) << Uint32(shift)
        rest = Uint32(cutlass.select_(digit == DIGITS - 1, span[1] - below, (Uint32(1) << Uint32(shift)) - 1))
        return span[0] + below, rest, rank, count, first_shift(rest)
