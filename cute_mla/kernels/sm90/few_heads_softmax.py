"""Softmax over M on SM90: a column of S^T is a query row, whose 64 keys lie in eight lanes of four warps.

Two warpgroups have a work tile's tiles in turn. The reference of a row (attention/softmax.py) goes from tile to tile through shared memory,
from one warpgroup to the other. Each keeps sums of its own, relative to the last reference that it has seen: the output role adds them up.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.experimental import primitives

from ..attention.softmax import follow_maximum, shift_of
from ..primitives.arithmetic import pack_pair, product
from ..primitives.copies import smem_pointer
from ..primitives.wgmma import half
from .cta import WARPGROUP, WARPS_PER_GROUP
from .few_heads_cta import (
    CONVERTERS,
    HEADS_PER_THREAD,
    SOFTMAX_BARRIER,
    FewHeadsSmem,
    FewHeadsThread,
    head_of,
    load_heads,
    store_heads,
)

REGISTERS = 8  # of S^T: two keys, four rows
P_ROW_BYTES = 32  # of a key
P_BYTES = 64 * P_ROW_BYTES
KEYS_APART = 8  # a thread's two keys
LANES_APART = (4, 8, 16)  # that have the same rows


@dataclass(frozen=True)
class FewHeadsSoftmax:
    """Running state of the thread's four rows in one of two warpgroups.

    group: of the two. reference: what the sums are relative to, log2 units. rSum: this thread's share of the sums.
    """

    smem: FewHeadsSmem
    thread: FewHeadsThread
    group: Int32
    scale_log2: Float32
    reference: cute.Tensor
    rSum: cute.Tensor

    @staticmethod
    def create(smem: FewHeadsSmem, thread: FewHeadsThread, group: Int32, scale_log2: Float32) -> FewHeadsSoftmax:
        """Return the state of rows that have seen nothing."""
        state = [cute.make_rmem_tensor(cute.make_layout(HEADS_PER_THREAD), Float32) for _ in range(2)]
        return FewHeadsSoftmax(smem, thread, group, scale_log2, *state)

    def reset(self) -> None:
        """Forget all keys."""
        self.reference.fill(-Float32.inf)
        self.rSum.fill(0.0)

    @cute.jit
    def add_tile(self, scores: cute.Tensor, place: Int32, begins: Boolean, turn: Int32):
        """Replace S^T of a tile, absent keys -inf, by unnormalised probabilities. Wait, signal reference_ready. Write rescale factors.

        place: in the order of references, where a work tile of an odd number of tiles has one more. begins: whether the tile is the first
        of its work tile. turn: 0 and 1 by turns.
        """
        smem, thread = self.smem, self.thread
        new, alpha = self.follow(self.maxima(scores, turn), place, begins)
        if (thread.warp == 0) & (thread.lane < 4):
            store_heads(smem.table(smem.sReference, self.group, thread), new)
            store_heads(smem.table(smem.sAlpha, self.group, thread), alpha)
        # all warps arrive: one may still read the references of the tile before, which those of the next tile overwrite
        smem.reference_ready.producer_commit(place)
        shifts = [-shift_of(reference) for reference in new]
        for head in cutlass.range_constexpr(HEADS_PER_THREAD):
            self.rSum[head] = self.rSum[head] * cute.math.exp2(self.reference[head] + shifts[head], fastmath=True)
            self.reference[head] = new[head]
        for i in cutlass.range_constexpr(REGISTERS):
            head = head_of(i)
            scores[i] = cute.math.exp2(scores[i] * self.scale_log2 + shifts[head], fastmath=True)
            self.rSum[head] = self.rSum[head] + scores[i]

    @cute.jit
    def maxima(self, scores: cute.Tensor, turn: Int32) -> list[Float32]:
        """Return the maxima of the thread's rows over all keys of a tile."""
        smem, thread = self.smem, self.thread
        found = []
        for head in cutlass.range_constexpr(HEADS_PER_THREAD):
            first, second = [i for i in range(REGISTERS) if head_of(i) == head]
            largest = cute.arch.fmax(scores[first], scores[second])
            for lanes in LANES_APART:
                largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, lanes))
            found.append(largest)
        first_table = (self.group * 2 + turn) * WARPS_PER_GROUP
        if thread.lane < 4:
            store_heads(smem.table(smem.sMaxima, first_table + thread.warp, thread), found)
        if self.group == 0:
            cute.arch.barrier(barrier_id=SOFTMAX_BARRIER, number_of_threads=WARPGROUP)
        else:
            cute.arch.barrier(barrier_id=SOFTMAX_BARRIER + 1, number_of_threads=WARPGROUP)
        tables = [load_heads(smem.table(smem.sMaxima, first_table + warp, thread)) for warp in range(WARPS_PER_GROUP)]
        return [
            cute.arch.fmax(cute.arch.fmax(tables[0][head], tables[1][head]), cute.arch.fmax(tables[2][head], tables[3][head]))
            for head in range(HEADS_PER_THREAD)
        ]

    @cute.jit
    def follow(self, maxima: list[Float32], place: Int32, begins: Boolean) -> tuple[list[Float32], list[Float32]]:
        """Return the references of the thread's rows, and the factors for what was accumulated under those of the tile before."""
        smem = self.smem
        smem.reference_ready.producer_acquire(place + 1)  # completed by the place before
        old0, old1, old2, old3 = [-Float32.inf] * HEADS_PER_THREAD
        if not begins:
            old0, old1, old2, old3 = load_heads(smem.table(smem.sReference, self.group ^ 1, self.thread))
        olds = old0, old1, old2, old3
        pairs = [follow_maximum(old, product(largest, self.scale_log2)) for old, largest in zip(olds, maxima, strict=True)]
        return [new for new, _ in pairs], [alpha for _, alpha in pairs]

    def skip_place(self, place: Int32) -> None:
        """Pass on the place of a tile that does not exist, so that each warpgroup sees every phase of the other's barriers."""
        for barriers in (self.smem.loads_issued, self.smem.reference_ready):
            barriers.producer_acquire(place + 1)
            barriers.producer_commit(place)

    def publish(self, work_tile: Int32) -> None:
        """Write the sums of a work tile and what they are relative to. Signal sums_ready. work_tile: number in the CTA."""
        sums = []
        for head in range(HEADS_PER_THREAD):
            total = self.rSum[head]
            for lanes in LANES_APART:
                total = total + cute.arch.shuffle_sync_bfly(total, lanes)
            sums.append(total)
        self._store_sums((work_tile & 1) * CONVERTERS + self.group, sums)
        self.smem.sums_ready.producer_commit(work_tile)

    @cute.jit
    def _store_sums(self, number: Int32, sums: list[Float32]):
        smem, thread = self.smem, self.thread
        if thread.lane < 4:
            store_heads(smem.table(smem.sSums, number * WARPS_PER_GROUP + thread.warp, thread), sums)
            if thread.warp == 0:
                store_heads(smem.table(smem.sSeen, number, thread), [self.reference[head] for head in range(HEADS_PER_THREAD)])


def p_writer(smem: FewHeadsSmem, thread: FewHeadsThread) -> Int32:
    """Return the address of the lane's row in the first P: 16 keys of a warp, rows 0..7 and 8..15 of each."""
    key = thread.warp * 16 + thread.lane % 16
    chunk = thread.lane // 16 ^ (key // 4) % 2
    return smem.sP.iterator.toint() + key * P_ROW_BYTES + chunk * (P_ROW_BYTES // 2)


def store_p(writer: Int32, number: Int32, probs: cute.Tensor, factors: list[Float32] | None, dtype: type[cutlass.Numeric]) -> None:
    """Store P of a tile, packed to 16 bits. factors: of the thread's two keys, if any: the products are rounded once. number: of the P."""
    words = []
    for i in range(0, REGISTERS, 2):
        factor = None if factors is None else factors[half(i)]
        low, high = probs[i], probs[i + 1]
        words.append(pack_pair(low, high, dtype) if factor is None else pack_pair(low * factor, high * factor, dtype))
    primitives.stmatrix(smem_pointer(writer + number * P_BYTES).raw_ptr(), words, primitives.MMALayout.ROW)
