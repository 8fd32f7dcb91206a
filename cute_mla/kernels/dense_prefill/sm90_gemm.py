"""The two matrix products of one warpgroup: S = Q K^T for 64 rows and a tile of keys, and O += P V with P from registers."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ..primitives.elements import pack_pair
from ..primitives.wgmma import A_STRIDES, A_VALUES, REGISTERS_PER_STEP, flat, half, packed, tiled_mma
from .sm90_config import GROUP_ROWS, K_STEP, WARPGROUP, Tiles

PAIRS = {cutlass.BFloat16: "bf16x2", cutlass.Float16: "f16x2"}


@dataclass(frozen=True)
class Products:
    """The two products of one thread: operands, partitioned, and accumulators."""

    dtype: type[cutlass.Numeric]
    thread: Int32
    group: Int32
    overwrite_scores: cute.TiledMma
    add_scores: cute.TiledMma
    output_mma: cute.TiledMma
    tQ: cute.Tensor
    tK: cute.Tensor
    tV: cute.Tensor
    scores: cute.Tensor
    probs: cute.Tensor  # P as it comes out of the scores
    tP: cute.Tensor  # the same registers as an A operand
    output: cute.Tensor

    @staticmethod
    def create(dtype: type[cutlass.Numeric], tiles: Tiles, thread: Int32, group: Int32) -> Products:
        """Return the for one thread of a warpgroup that computes."""
        keys, d_v, stages = (cute.size(tiles.sV, mode=[mode]) for mode in range(3))
        # an MMA whose accumulation were switched in a loop would be a value that leaves the loop
        overwrite_scores, add_scores = (tiled_mma(dtype, keys, warpgroup.OperandSource.SMEM, OperandMajorMode.K) for _ in range(2))
        output_mma = tiled_mma(dtype, d_v, warpgroup.OperandSource.RMEM, OperandMajorMode.MN)
        overwrite_scores.set(warpgroup.Field.ACCUMULATE, False)
        add_scores.set(warpgroup.Field.ACCUMULATE, True)
        output_mma.set(warpgroup.Field.ACCUMULATE, True)
        of_scores, of_output = add_scores.get_slice(thread), output_mma.get_slice(thread)
        transposed = cute.make_layout((d_v, keys, stages), stride=(keys, 1, keys * d_v))
        scores = cute.make_rmem_tensor(of_scores.partition_shape_C((GROUP_ROWS, keys)), Float32)
        probs = cute.make_rmem_tensor_like(scores, dtype)
        steps = cute.make_layout((A_VALUES, 1, keys // K_STEP), stride=(A_STRIDES, 0, REGISTERS_PER_STEP))
        return Products(
            dtype=dtype,
            thread=thread,
            group=group,
            overwrite_scores=overwrite_scores,
            add_scores=add_scores,
            output_mma=output_mma,
            tQ=of_scores.make_fragment_A(of_scores.partition_A(tiles.sQ)),
            tK=of_scores.make_fragment_B(of_scores.partition_B(tiles.sK)),
            tV=of_output.make_fragment_B(of_output.partition_B(cute.composition(tiles.sV, transposed))),
            scores=scores,
            probs=probs,
            tP=cute.make_tensor(probs.iterator, steps),
            output=cute.make_rmem_tensor(of_output.partition_shape_C((GROUP_ROWS, d_v)), Float32),
        )

    def start_scores(self, stage: Int32) -> None:
        """Issue S = Q K^T as a group of WGMMAs."""
        for step in range(cute.size(self.tQ, mode=[2])):
            mma = self.add_scores if step else self.overwrite_scores
            cute.gemm(mma, self.scores, self.tQ[None, None, step, self.group], self.tK[None, None, step, stage], self.scores)
        warpgroup.commit_group()

    def start_output(self, stage: Int32, overwrite: Boolean) -> None:
        """Issue O += P V, or O = P V, as a group of WGMMAs."""
        d_v = cute.size(self.output) * WARPGROUP // GROUP_ROWS
        first = tiled_mma(self.dtype, d_v, warpgroup.OperandSource.RMEM, OperandMajorMode.MN)
        first.set(warpgroup.Field.ACCUMULATE, cutlass.select_(overwrite, Boolean(False), Boolean(True)))
        for step in range(cute.size(self.tP, mode=[2])):
            cute.gemm(
                self.output_mma if step else first, self.output, self.tP[None, None, step], self.tV[None, None, step, stage], self.output
            )
        warpgroup.commit_group()

    def round_probs(self) -> None:
        """Round the scores, by now probabilities, to the A operand of P V.

        The conversion is PTX, because LLVM would move one of its own to the use, past the WGMMAs of the next scores: 64 registers
        more than there are.
        """
        rP, rS = packed(self.probs), flat(self.scores)
        for i in range(cute.size(rP)):
            rP[i] = cute.arch.inline_ptx(
                f"cvt.rn.{PAIRS[self.dtype]}.f32 {{$w0}}, {{$r0}}, {{$r1}};",
                write_only_types=[Int32],
                read_only_args=[rS[2 * i + 1], rS[2 * i]],
            )

    def clear(self) -> None:
        """Set S and O to 0."""
        self.scores.fill(0.0)
        self.output.fill(0.0)

    def scale_output(self, factors: list[Float32]) -> None:
        """Multiply the thread's two rows of O."""
        rO = flat(self.output)
        for i in range(cute.size(rO)):
            rO[i] = rO[i] * factors[half(i)]

    def row_words(self, row_half: int, inverse: Float32, first: int, columns: int) -> list[Int32]:
        """Return columns of one of the thread's rows of O, from `first` on, normalised and rounded.

        Word e has columns first + 8 e + 2 (t % 4) and the next.
        """
        rO = flat(self.output)
        registers = range(first // 2 + 2 * row_half, (first + columns) // 2, 4)
        return [pack_pair(rO[i] * inverse, rO[i + 1] * inverse, self.dtype) for i in registers]
