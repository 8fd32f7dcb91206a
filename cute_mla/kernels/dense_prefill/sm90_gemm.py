"""The matrix products of a warpgroup: scores of 64 rows, O of the forward pass, and gradients that add up in registers."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ..primitives.arithmetic import pack_pair
from ..primitives.rows import store_pair, store_vector
from ..primitives.wgmma import (
    A_STRIDES,
    A_VALUES,
    K_STEP,
    REGISTERS_PER_STEP,
    TILE_ROWS,
    flat,
    fragment_row,
    gather_eights,
    half,
    packed,
    tiled_mma,
)
from .sm90_config import GROUP_ROWS, WARPGROUP, DensePrefillSm90Smem

PAIRS = {cutlass.BFloat16: "bf16x2", cutlass.Float16: "f16x2"}


@dataclass(frozen=True)
class ScoreProduct:
    """S = A B^T: 64 rows of A, and all rows of a stage of B, both in shared memory."""

    overwrite: cute.TiledMma
    add: cute.TiledMma
    tA: cute.Tensor
    tB: cute.Tensor
    sum: cute.Tensor

    @staticmethod
    def create(dtype: type[cutlass.Numeric], rows: cute.Tensor, streamed: cute.Tensor, thread: Int32) -> ScoreProduct:
        """Return the product of one thread. rows: (64 rows, columns, warpgroups). streamed: (rows of B, columns, stages)."""
        count = cute.size(streamed, mode=[0])
        overwrite, add = (tiled_mma(dtype, count, warpgroup.OperandSource.SMEM, OperandMajorMode.K) for _ in range(2))
        overwrite.set(warpgroup.Field.ACCUMULATE, False)
        add.set(warpgroup.Field.ACCUMULATE, True)
        of_thread = add.get_slice(thread)
        return ScoreProduct(
            overwrite=overwrite,
            add=add,
            tA=of_thread.make_fragment_A(of_thread.partition_A(rows)),
            tB=of_thread.make_fragment_B(of_thread.partition_B(streamed)),
            sum=cute.make_rmem_tensor(of_thread.partition_shape_C((TILE_ROWS, count)), Float32),
        )

    def start(self, group: Int32, stage: Int32) -> None:
        """Issue the product of a warpgroup's rows and a stage, as a group of WGMMAs."""
        for step in range(cute.size(self.tA, mode=[2])):
            mma = self.add if step else self.overwrite
            cute.gemm(mma, self.sum, self.tA[None, None, step, group], self.tB[None, None, step, stage], self.sum)
        warpgroup.commit_group()

    def clear(self) -> None:
        """Set S to 0."""
        self.sum.fill(0.0)


@dataclass(frozen=True)
class SumProduct:
    """G += X B: X from registers, one column for each row of a stage of B, which is read transposed."""

    dtype: type[cutlass.Numeric]
    mma: cute.TiledMma
    factor: cute.Tensor  # X as it comes out of a score product
    tX: cute.Tensor  # the same registers as an A operand
    tB: cute.Tensor
    sum: cute.Tensor

    @staticmethod
    def create(dtype: type[cutlass.Numeric], streamed: cute.Tensor, thread: Int32) -> SumProduct:
        """Return the product of one thread. streamed: (rows of B, columns, stages)."""
        rows, columns, stages = (cute.size(streamed, mode=[mode]) for mode in range(3))
        mma = tiled_mma(dtype, columns, warpgroup.OperandSource.RMEM, OperandMajorMode.MN)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        of_thread = mma.get_slice(thread)
        transposed = cute.make_layout((columns, rows, stages), stride=(rows, 1, rows * columns))
        factor = cute.make_rmem_tensor(cute.make_layout(TILE_ROWS * rows // 128), dtype)
        steps = cute.make_layout((A_VALUES, 1, rows // K_STEP), stride=(A_STRIDES, 0, REGISTERS_PER_STEP))
        return SumProduct(
            dtype=dtype,
            mma=mma,
            factor=factor,
            tX=cute.make_tensor(factor.iterator, steps),
            tB=of_thread.make_fragment_B(of_thread.partition_B(cute.composition(streamed, transposed))),
            sum=cute.make_rmem_tensor(of_thread.partition_shape_C((TILE_ROWS, columns)), Float32),
        )

    def round(self, values: cute.Tensor) -> None:
        """Round the registers of a score product to X.

        The conversion is PTX, because LLVM would move one of its own to the use, past the WGMMAs of the next scores: 64 registers
        more than there are.
        """
        rX, exact = packed(self.factor), flat(values)
        for i in range(cute.size(rX)):
            rX[i] = cute.arch.inline_ptx(
                f"cvt.rn.{PAIRS[self.dtype]}.f32 {{$w0}}, {{$r0}}, {{$r1}};",
                write_only_types=[Int32],
                read_only_args=[exact[2 * i + 1], exact[2 * i]],
            )

    def start(self, stage: Int32, overwrite: Boolean | None = None) -> None:
        """Issue the product with a stage, as a group of WGMMAs. overwrite: whether it is G = X B; None: never."""
        first = self.mma
        if overwrite is not None:
            first = tiled_mma(self.dtype, cute.size(self.sum) * WARPGROUP // TILE_ROWS, warpgroup.OperandSource.RMEM, OperandMajorMode.MN)
            first.set(warpgroup.Field.ACCUMULATE, cutlass.select_(overwrite, Boolean(False), Boolean(True)))
        for step in range(cute.size(self.tX, mode=[2])):
            cute.gemm(self.mma if step else first, self.sum, self.tX[None, None, step], self.tB[None, None, step, stage], self.sum)
        warpgroup.commit_group()

    def clear(self) -> None:
        """Set G to 0."""
        self.sum.fill(0.0)

    def scale(self, factors: list[Float32]) -> None:
        """Multiply the thread's two rows of G."""
        rG = flat(self.sum)
        for i in range(cute.size(rG)):
            rG[i] = rG[i] * factors[half(i)]

    def row_words(self, row_half: int, factor: Float32, first: int = 0, columns: int | None = None) -> list[Int32]:
        """Return columns of one of the thread's rows of G times a factor, rounded: as the function of this name."""
        return row_words(self.sum, self.dtype, row_half, factor, first, columns)


@dataclass(frozen=True)
class DensePrefillProducts:
    """The two products of one thread of the forward pass."""

    thread: Int32
    group: Int32
    scores: ScoreProduct  # S = Q K^T
    output: SumProduct  # O += P V

    @staticmethod
    def create(dtype: type[cutlass.Numeric], smem: DensePrefillSm90Smem, thread: Int32, group: Int32) -> DensePrefillProducts:
        """Return the products of one thread of a warpgroup that computes."""
        scores = ScoreProduct.create(dtype, smem.sQ, smem.sK, thread)
        return DensePrefillProducts(thread, group, scores, SumProduct.create(dtype, smem.sV, thread))

    @property
    def first_row(self) -> Int32:
        """Return the first row of the item's block that the warpgroup has."""
        return self.group * GROUP_ROWS

    def row(self, row_half: int) -> Int32:
        """Return the row of the item's block that one of the thread's fragment rows is."""
        return self.group * GROUP_ROWS + fragment_row(self.thread, row_half)


def row_words(
    total: cute.Tensor, dtype: type[cutlass.Numeric], row_half: int, factor: Float32, first: int = 0, columns: int | None = None
) -> list[Int32]:
    """Return columns of one of the thread's rows of a sum times a factor, rounded: `columns` from `first` on, or all.

    Word e has columns first + 8 e + 2 (t % 4) and the next.
    """
    rG = flat(total)
    end = cute.size(rG) if columns is None else (first + columns) // 2
    return [pack_pair(rG[i] * factor, rG[i + 1] * factor, dtype) for i in range(first // 2 + 2 * row_half, end, 4)]


def gather_runs(words: list[Int32], thread: Int32) -> list[Int32]:
    """Transpose a row's words in a quad: four from 4 n on are then columns 32 n + 8 (t % 4) .. + 7."""
    return [word for i in range(0, len(words), 4) for word in gather_eights(words[i : i + 4], thread)]


def store_row_words(target: cute.Pointer, words: list[Int32], thread: Int32, runs: bool) -> None:
    """Store a quad's row, in runs of 16 bytes a lane, as gather_runs leaves them, or in pairs of elements that may begin anywhere."""
    if runs:
        for i in range(0, len(words), 4):
            store_vector(target + (8 * i + 8 * (thread % 4)), words[i : i + 4])
    else:
        for eight, word in enumerate(words):
            store_pair(target + (8 * eight + 2 * (thread % 4)), word)
