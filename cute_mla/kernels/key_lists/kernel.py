"""key_lists: lists, for each key, the (token, slot) pairs that name it, in ascending order. Every architecture, three steps.

    count_bs = #{pairs of the tokens of block b that name key s}     total_s = sum_b count_bs
    start_s = sum_{r < s} total_r                                    place_bs = start_s + sum_{c < b} count_cs
    entries[place_bs ..] = the pairs of block b that name key s, each as (token - first_token) * topk + slot

    count    grid (tokens), 256 threads: red to counters[block][key] and to the totals behind the blocks' rows
    place    grid (keys / 1024), a thread a key: adds up the totals of all keys before its CTA's, scans those of the CTA, writes row_starts;
             walks down the column of its key and replaces each count by a place
    fill     grid (blocks of 16 tokens), 512 threads: walks the block's tokens in rounds of 2,048 slots. The place of a pair is the
             counter's value before it adds 1. The rounds are in order, so are the tokens

The trick is that a round needs no sort: indices of a token mostly differ, so each counter moves by one and any order of the atomics gives
the same place. Whoever finds that its counter has moved by more raises a flag. Then every pair counts the equal keys of the round in shared
memory, those before it and all of them, and takes the place that follows from the counter behind the round. So nothing depends on the order
of the atomics. Operands and their meaning: cute_mla/spec/key_lists.py.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from ...spec.arch import Arch
from ...spec.key_lists import BLOCK_TOKENS, PLACE_KEYS, KeyListsArguments, KeyListsConfig
from ..definition import KernelDefinition
from ..primitives.arithmetic import smaller
from ..primitives.smem import Array, SmemLayout
from ..sparse_prefill.operands import NO_ROW, SparsePrefillIndices, chunk_operands
from ..split_plan.kernel import block_exclusive_scan
from ..warp_kernel import WarpKernel, WarpLaunch

COUNT_THREADS = 256
FILL_THREADS = 512
SLOTS = 4  # of a thread in a round
ROUND = FILL_THREADS * SLOTS
COLUMN = 8  # counters of a key in flight
WARPS = PLACE_KEYS // 32
assert WARPS == 32, "block_exclusive_scan has a total a lane"

PLACE_SMEM = SmemLayout((Array("before", Int32, WARPS, 16), Array("own", Int32, WARPS, 16)))
FILL_SMEM = SmemLayout((Array("keys", Int32, ROUND, 16), Array("repeated", Int32, 2, 16)))


@dataclass(frozen=True)
class ListedIndices:
    """The indices of one token of those that are listed. place: the token's among them."""

    indices: SparsePrefillIndices
    place: Int32

    @staticmethod
    def create(args: KeyListsArguments, place: Int32) -> "ListedIndices":
        """Return the indices of a token."""
        operands = chunk_operands(args, args.request_keys)
        return ListedIndices(operands.index_list(args.first_token + place), place)

    @property
    def count(self) -> Int32:
        """Return how many indices count."""
        return self.indices.count

    def key(self, slot: Int32) -> Int32:
        """Return the number of the key that a slot names, NO_ROW if there is none."""
        row = self.indices.look_up(slot)
        return cutlass.select_(row >= 0, Int32(self.indices.base) + row, Int32(NO_ROW))


def add_one(counter: cute.Pointer) -> Int32:
    """Add 1 to a counter in global memory; return what it was."""
    return cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")


class CountKeys(WarpKernel):
    """The first step."""

    launch = WarpLaunch("key_lists", "count", KeyListsArguments, COUNT_THREADS)

    @cute.kernel
    def kernel(self, args: KeyListsArguments):
        """Count the keys of one token."""
        place, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        listed = ListedIndices.create(args, place)
        own = args.counters + Int64(Uint32(place) // BLOCK_TOKENS) * args.keys
        total = args.counters + Int64((args.tokens + (BLOCK_TOKENS - 1)) // BLOCK_TOKENS) * args.keys
        for slot in cutlass.range(thread, listed.count, COUNT_THREADS, unroll=SLOTS):
            key = listed.key(slot)
            if key >= 0:
                for row in (own, total):
                    cute.arch.red(row + key, Int32(1), op="add", dtype="u32", sem="relaxed", scope="gpu")


class PlaceKeys(WarpKernel):
    """The second step."""

    launch = WarpLaunch("key_lists", "place", KeyListsArguments, PLACE_KEYS)

    @cute.kernel
    def kernel(self, args: KeyListsArguments):
        """Turn the counts of 1,024 keys into places."""
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        memory = PLACE_SMEM.allocate()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        blocks = (args.tokens + (BLOCK_TOKENS - 1)) // BLOCK_TOKENS
        totals = args.counters + Int64(blocks) * args.keys
        key = block * PLACE_KEYS + thread
        before = Int32(0)
        for earlier in cutlass.range(thread, block * PLACE_KEYS, PLACE_KEYS, unroll=COLUMN):
            before += totals[earlier]
        own = Int32(0)
        if key < args.keys:
            own = totals[key]
        _, earlier_keys = block_exclusive_scan(before, memory["before"], Int32)
        in_block, _ = block_exclusive_scan(own, memory["own"], Int32)
        start = earlier_keys + in_block
        if key < args.keys:
            args.row_starts[key] = start
            if key == args.keys - 1:
                args.row_starts[args.keys] = start + own
            self.walk(args.counters + key, args.keys, blocks, start)

    @cute.jit
    def walk(self, column: cute.Pointer, keys: Int32, blocks: Int32, start: Int32):
        """Replace the counts of a key, `keys` apart, by places from `start` on."""
        counts = cute.make_rmem_tensor(cute.make_layout(COLUMN), Int32)
        for first in cutlass.range(0, blocks, COLUMN, unroll=1):
            for i in cutlass.range_constexpr(COLUMN):
                counts[i] = (column + Int64(smaller(first + i, blocks - 1)) * keys).load()
            for i in cutlass.range_constexpr(COLUMN):
                if first + i < blocks:
                    (column + Int64(first + i) * keys).store(start)
                start += counts[i]


class FillLists(WarpKernel):
    """The third step."""

    launch = WarpLaunch("key_lists", "fill", KeyListsArguments, FILL_THREADS)

    @cute.kernel
    def kernel(self, args: KeyListsArguments):
        """List the pairs of one block of tokens."""
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        memory = FILL_SMEM.allocate()
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        counters = args.counters + Int64(block) * args.keys
        if thread < 2:
            memory["repeated"][thread] = Int32(0)
        cute.arch.sync_threads()
        first, turn = block * BLOCK_TOKENS, Int32(0)
        for place in cutlass.range(first, smaller(first + BLOCK_TOKENS, args.tokens), unroll=1):
            listed = ListedIndices.create(args, place)
            for slot in cutlass.range(0, listed.count, ROUND, unroll=1):
                self.list_round(args, counters, memory, listed, slot, turn)
                turn = turn ^ 1

    @cute.jit
    def list_round(self, args: KeyListsArguments, counters: cute.Pointer, memory: dict, listed: ListedIndices, slot: Int32, turn: Int32):
        """List the pairs of a token's slots from `slot` on. turn: parity of the rounds."""
        thread, _, _ = cute.arch.thread_idx()
        keys, repeated = memory["keys"], memory["repeated"]
        own, places = (cute.make_rmem_tensor(cute.make_layout(SLOTS), Int32) for _ in range(2))
        for i in cutlass.range_constexpr(SLOTS):
            own[i] = listed.key(slot + i * FILL_THREADS + thread)
            keys[i * FILL_THREADS + thread] = own[i]
        for i in cutlass.range_constexpr(SLOTS):
            if own[i] >= 0:
                places[i] = add_one(counters + own[i])
        cute.arch.sync_threads()  # the counters stand
        for i in cutlass.range_constexpr(SLOTS):
            if own[i] >= 0:
                end = cute.arch.load(counters + own[i], Int32, cop="cg")
                if end != places[i] + 1:
                    repeated[turn] = Int32(1)
                places[i] = end - 1
        cute.arch.sync_threads()
        if repeated[turn] != 0:
            for i in cutlass.range_constexpr(SLOTS):
                if own[i] >= 0:
                    places[i] += 1 + self.behind(keys, i * FILL_THREADS + thread, own[i])
        for i in cutlass.range_constexpr(SLOTS):
            if own[i] >= 0:
                args.entries[places[i]] = listed.place * args.topk + (slot + i * FILL_THREADS + thread)
        if thread == 0:
            repeated[turn ^ 1] = Int32(0)
        cute.arch.sync_threads()  # the keys have been read, and the flag of the next round is down

    @cute.jit
    def behind(self, keys: cute.Pointer, place: Int32, key: Int32) -> Int32:
        """Return minus the number of places of the round, from `place` on, that have a key."""
        found = Int32(0)
        for other in cutlass.range(place, ROUND, unroll=SLOTS):
            found -= cutlass.select_(keys[other] == key, Int32(1), Int32(0))
        return found


STEPS = {"count": (CountKeys, 0), "place": (PlaceKeys, PLACE_SMEM.nbytes), "fill": (FillLists, FILL_SMEM.nbytes)}


def build(config: KeyListsConfig, arch: Arch) -> KernelDefinition:
    """Return the step, ready to compile."""
    kernel, nbytes = STEPS[config.step]
    return kernel(config, arch).definition({}, {}, nbytes)
