"""The attend roles of the SM90 dK and dV kernel: S^T = K Q^T, dP^T = V dO^T, P^T, dS^T, dV += P^T dO, dK += dS^T Q.

Two warpgroups. Each has 64 keys of an item, and they issue their products in turn. With heads of 256 columns a warpgroup has registers
for one of the two sums: both have the 64 keys of an item, one computes S^T, P^T and dV, the other dP^T, dS^T and dK, and P^T, rounded,
goes from one to the other through shared memory. sm90.py describes pipelines and the trick.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from ...spec.dense_prefill_dq import STATISTICS
from ..dense_prefill.sm90_attend import give_turn, take_turn
from ..dense_prefill.sm90_config import WARPGROUP
from ..dense_prefill.sm90_gemm import ScoreProduct, SumProduct, gather_runs, store_row_words
from ..primitives.rows import aligned, store_vector
from ..primitives.wgmma import ROWS_PER_THREAD, flat, fragment_column, fragment_row, half, packed
from .load import DkdvPostedItem
from .operands import DkdvOperands
from .sm90_config import GROUP_KEYS, DkdvSm90Geometry, DkdvSm90Smem

PAIR = 2  # neighbouring columns of a fragment
CHUNK = 8  # elements of 16 bytes
CHUNK_WORDS = CHUNK // 2

# a gradient of the item's keys: its name, the product whose sum it is, and its factor
DkdvSum = tuple[str, SumProduct, Float32]


@dataclass(frozen=True)
class DkdvSm90Products:
    """The four products of one thread."""

    geometry: DkdvSm90Geometry
    smem: DkdvSm90Smem
    thread: Int32
    group: Int32
    scores: ScoreProduct  # S^T = K Q^T
    dprobs: ScoreProduct  # dP^T = V dO^T
    values: SumProduct  # dV += P^T dO
    keys: SumProduct  # dK += dS^T Q

    @staticmethod
    def create(
        dtype: type[cutlass.Numeric], geometry: DkdvSm90Geometry, smem: DkdvSm90Smem, thread: Int32, group: Int32
    ) -> DkdvSm90Products:
        """Return the products of one thread of a warpgroup that computes."""
        return DkdvSm90Products(
            geometry=geometry,
            smem=smem,
            thread=thread,
            group=group,
            scores=ScoreProduct.create(dtype, smem.sK, smem.sQ, thread),
            dprobs=ScoreProduct.create(dtype, smem.sV, smem.sD, thread),
            values=SumProduct.create(dtype, smem.sD, thread),
            keys=SumProduct.create(dtype, smem.sQ, thread),
        )

    def key(self, row_half: int) -> Int32:
        """Return the key of the item that one of the thread's fragment rows is."""
        return self.group * GROUP_KEYS + fragment_row(self.thread, row_half)

    def key_sum(self, operands: DkdvOperands) -> DkdvSum:
        """Return dK."""
        return "dk", self.keys, operands.args.softmax_scale

    def value_sum(self) -> DkdvSum:
        """Return dV."""
        return "dv", self.values, Float32(1)

    @cute.jit
    def mask(self, hidden: Int32):
        """Set the scores of rows that do not see a key to -inf. Selects, so that NaN vanishes.

        hidden: rows of the tile, from its first on, that key 0 of the item is hidden from.
        """
        if hidden + (self.group + 1) * GROUP_KEYS > 1:
            rS = flat(self.scores.sum)
            limits = [hidden + self.key(row_half) for row_half in range(ROWS_PER_THREAD)]
            for i in cutlass.range_constexpr(cute.size(rS)):
                rS[i] = cutlass.select_(fragment_column(self.thread, i) < limits[half(i)], -Float32.inf, rS[i])

    def statistic(self, stage: Int32, which: int, eight: int) -> cute.Tensor:
        """Load a statistic of the two rows that are columns 8 e + 2 (t % 4) and the next of the fragments."""
        size = self.geometry.tile_queries
        source = self.smem.statistics + (stage * (STATISTICS * size) + which * size + 8 * eight + PAIR * (self.thread % 4))
        pair = cute.make_rmem_tensor(cute.make_layout(PAIR), Float32)
        cute.autovec_copy(cute.make_tensor(aligned(source, 8), cute.make_layout(PAIR)), pair)
        return pair

    def make_probs(self, operands: DkdvOperands, stage: Int32) -> None:
        """Replace S^T by P^T, and round it."""
        rS = flat(self.scores.sum)
        for eight in range(self.geometry.tile_queries // 8):
            lse_log2 = self.statistic(stage, 0, eight)
            for i in range(4 * eight, 4 * eight + 4):
                shifted = cute.math.fma(rS[i], operands.args.scale_log2, -lse_log2[i % PAIR])
                rS[i] = cute.math.exp2(shifted, fastmath=True)
        self.values.round(self.scores.sum)

    def make_dscores(self, stage: Int32) -> None:
        """Replace dP^T by dS^T = P^T (dP^T - delta), and round it. P^T as it is rounded: there are no registers to keep it in fp32."""
        rP, rD = flat(self.values.factor), flat(self.dprobs.sum)
        for eight in range(self.geometry.tile_queries // 8):
            delta = self.statistic(stage, 1, eight)
            for i in range(4 * eight, 4 * eight + 4):
                rD[i] = rP[i].to(Float32) * (rD[i] - delta[i % PAIR])
        self.keys.round(self.dprobs.sum)

    @cute.jit
    def write_rows(self, operands: DkdvOperands, item: DkdvPostedItem, sums: tuple[DkdvSum, ...]):
        """Write the rows of some of dK and dV that the sequence has."""
        for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
            key = self.key(row_half)
            words = [product.row_words(row_half, factor) for _, product, factor in sums]
            if operands.args.aligned != 0:
                runs = [gather_runs(of_row, self.thread) for of_row in words]
                if key < item.keys:
                    for number, (name, _, _) in enumerate(sums):
                        store_row_words(operands.row(name, item, key), runs[number], self.thread, True)
            else:
                if key < item.keys:
                    for number, (name, _, _) in enumerate(sums):
                        store_row_words(operands.row(name, item, key), words[number], self.thread, False)


@dataclass(frozen=True)
class DkdvSm90AttendRole:
    """One of two warpgroups, each with keys of its own."""

    dtype: type[cutlass.Numeric]
    geometry: DkdvSm90Geometry

    @cute.jit
    def run(self, operands: DkdvOperands, smem: DkdvSm90Smem, thread: Int32, group: Int32):
        """Wait key_ready, query_ready, dout_ready. Signal key_free, query_free, dout_free. Write dk and dv."""
        products = DkdvSm90Products.create(self.dtype, self.geometry, smem, thread, group)
        if group != 0:
            give_turn(group)
            take_turn(group)  # half a tile later than the other warpgroup
            give_turn(group)
        use, turn = Int32(0), Int32(0)
        smem.key_ready.consumer_wait(turn)
        item = DkdvPostedItem.of_turn(smem.items, turn)
        while item.sums != 0:
            products.values.clear()
            products.keys.clear()
            if item.tiles > 0:
                until = use + item.tiles * operands.args.heads_per_kv
                hidden = item.hidden
                last = item.hidden - (item.tiles - 1) * self.geometry.tile_queries
                while use < until:
                    warpgroup.wait_group(0)
                    if use > 0:
                        self.release(smem, use - 1)
                    self.attend_scores(operands, smem, products, hidden, use)
                    if use + 1 == until:
                        smem.key_free.consumer_release(turn)
                    self.attend_gradients(smem, products, use)
                    hidden = cutlass.select_(hidden > last, hidden - self.geometry.tile_queries, item.hidden)
                    use = use + 1
                warpgroup.wait_group(0)
            else:
                smem.key_free.consumer_release(turn)
                take_turn(group)  # without products: the other warpgroup waits for it with its last half tile
                give_turn(group)
            # read again, so that fewer registers are held during the loop
            sums = (products.key_sum(operands), products.value_sum())
            products.write_rows(operands, DkdvPostedItem.of_turn(smem.items, turn), sums)
            turn = turn + 1
            smem.key_ready.consumer_wait(turn)
            item = DkdvPostedItem.of_turn(smem.items, turn)
        if group == 0:
            take_turn(group)
            give_turn(group)  # for the half tile that the other warpgroup is late
            take_turn(group)  # the one that it has given last

    @cute.jit
    def attend_scores(self, operands: DkdvOperands, smem: DkdvSm90Smem, products: DkdvSm90Products, hidden: Int32, use: Int32):
        """Compute P^T, rounded, and dP^T of a tile, in two turns.

        hidden: rows of the tile, from its first on, that key 0 of the item is hidden from.
        """
        stage, group = smem.query_ready.stage(use), products.group
        smem.query_ready.consumer_wait(use)
        take_turn(group)
        warpgroup.fence()
        products.scores.start(group, stage)
        give_turn(group)
        warpgroup.wait_group(0)
        products.mask(hidden)
        products.make_probs(operands, stage)
        smem.dout_ready.consumer_wait(use)
        take_turn(group)
        warpgroup.fence()
        products.dprobs.start(group, stage)
        give_turn(group)
        warpgroup.wait_group(0)

    @cute.jit
    def attend_gradients(self, smem: DkdvSm90Smem, products: DkdvSm90Products, use: Int32):
        """Issue dV and dK of a tile, in the third turn. They are not complete on return."""
        stage, group = smem.query_ready.stage(use), products.group
        products.make_dscores(stage)
        take_turn(group)
        warpgroup.fence()
        products.values.start(stage)
        products.keys.start(stage)
        give_turn(group)

    @cute.jit
    def release(self, smem: DkdvSm90Smem, use: Int32):
        """Release a tile of Q and of dO: all products with it are complete."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(smem.query_free.barrier(use))
            cute.arch.mbarrier_arrive(smem.dout_free.barrier(use))


@dataclass(frozen=True)
class DkdvSharedKeyRole:
    """One of two warpgroups that go through the same tiles. half: what it computes."""

    dtype: type[cutlass.Numeric]
    geometry: DkdvSm90Geometry
    half: DkdvValueSum | DkdvKeySum

    @cute.jit
    def run(self, operands: DkdvOperands, smem: DkdvSm90Smem, thread: Int32):
        """Go through the work items, and write the rows of the sum. Wait key_ready; signal key_free."""
        products = DkdvSm90Products.create(self.dtype, self.geometry, smem, thread, Int32(0))
        own = self.half.sum_of(operands, products)
        use, turn = Int32(0), Int32(0)
        smem.key_ready.consumer_wait(turn)
        item = DkdvPostedItem.of_turn(smem.items, turn)
        while item.sums != 0:
            own[1].clear()
            if item.tiles > 0:
                first, until = use, use + item.tiles * operands.args.heads_per_kv
                hidden, last = item.hidden, item.hidden - (item.tiles - 1) * self.geometry.tile_queries
                while use < until:
                    self.half.start_scores(smem, products, use)
                    warpgroup.wait_group(1)
                    if use > first:
                        self.half.release_sum(smem, use - 1)
                    warpgroup.wait_group(0)
                    if use + 1 == until:
                        smem.key_free.consumer_release(turn)
                    self.half.finish_scores(operands, smem, products, use, hidden)
                    warpgroup.fence()
                    own[1].start(smem.query_ready.stage(use))
                    hidden = cutlass.select_(hidden > last, hidden - self.geometry.tile_queries, item.hidden)
                    use = use + 1
                warpgroup.wait_group(0)
                self.half.release_sum(smem, use - 1)
            else:
                smem.key_free.consumer_release(turn)
            products.write_rows(operands, item, (own,))
            turn = turn + 1
            smem.key_ready.consumer_wait(turn)
            item = DkdvPostedItem.of_turn(smem.items, turn)


class DkdvValueSum:
    """S^T = K Q^T, P^T and dV += P^T dO."""

    def sum_of(self, operands: DkdvOperands, products: DkdvSm90Products) -> DkdvSum:
        """Return dV."""
        return products.value_sum()

    def start_scores(self, smem: DkdvSm90Smem, products: DkdvSm90Products, use: Int32) -> None:
        """Wait query_ready. Issue S^T."""
        smem.query_ready.consumer_wait(use)
        warpgroup.fence()
        products.scores.start(products.group, smem.query_ready.stage(use))

    def finish_scores(self, operands: DkdvOperands, smem: DkdvSm90Smem, products: DkdvSm90Products, use: Int32, hidden: Int32) -> None:
        """Compute P^T, rounded. Wait dout_ready. Signal probs_ready, query_free. hidden: as for DkdvSm90Products.mask.

        P^T of a tile lies in the tile's stage: it is free when Q is.
        """
        stage = smem.query_ready.stage(use)
        products.mask(hidden)
        products.make_probs(operands, stage)
        words = packed(products.values.factor)
        for i, chunk in enumerate(shared_chunks(smem, products, stage)):
            store_vector(chunk, [words[CHUNK_WORDS * i + j] for j in range(CHUNK_WORDS)])
        smem.probs_ready.producer_commit(use)
        smem.query_free.consumer_release(use)
        smem.dout_ready.consumer_wait(use)

    def release_sum(self, smem: DkdvSm90Smem, use: Int32) -> None:
        """Release dO."""
        smem.dout_free.consumer_release(use)


class DkdvKeySum:
    """dP^T = V dO^T, dS^T and dK += dS^T Q."""

    def sum_of(self, operands: DkdvOperands, products: DkdvSm90Products) -> DkdvSum:
        """Return dK."""
        return products.key_sum(operands)

    def start_scores(self, smem: DkdvSm90Smem, products: DkdvSm90Products, use: Int32) -> None:
        """Wait dout_ready. Issue dP^T."""
        smem.dout_ready.consumer_wait(use)
        warpgroup.fence()
        products.dprobs.start(products.group, smem.dout_ready.stage(use))

    def finish_scores(self, operands: DkdvOperands, smem: DkdvSm90Smem, products: DkdvSm90Products, use: Int32, hidden: Int32) -> None:
        """Compute dS^T, rounded. Wait probs_ready: the other warpgroup has seen that Q and its statistics are there. Signal dout_free."""
        stage = smem.query_ready.stage(use)
        smem.dout_free.consumer_release(use)
        smem.probs_ready.consumer_wait(use)
        factor = products.values.factor
        for i, chunk in enumerate(shared_chunks(smem, products, stage)):
            eight = cute.make_layout(CHUNK)
            cute.autovec_copy(cute.make_tensor(chunk, eight), cute.make_tensor(factor.iterator + CHUNK * i, eight))
        products.make_dscores(stage)

    def release_sum(self, smem: DkdvSm90Smem, use: Int32) -> None:
        """Release Q and its statistics, and P^T."""
        smem.query_free.consumer_release(use)


def shared_chunks(smem: DkdvSm90Smem, products: DkdvSm90Products, stage: Int32) -> list[cute.Pointer]:
    """Return where the thread's elements of P^T of a stage lie, 16 bytes each. Threads are neighbours, so that no banks conflict."""
    size = GROUP_KEYS * products.geometry.tile_queries
    base = smem.probs + stage * size
    return [aligned(base + (CHUNK * WARPGROUP * i + CHUNK * products.thread), 16) for i in range(size // (CHUNK * WARPGROUP))]
