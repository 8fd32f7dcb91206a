"""WGMMA of 64 rows, the register fragments that it leaves, and how they move to and from shared memory.

Accumulator register i of thread t (0..127) holds row 16 (t / 32) + (t % 32) / 4 + 8 half(i) and column
8 (i / 4) + 2 (t % 4) + i % 2: a thread owns two rows, and a row lies in the four lanes of a quad. The same registers,
packed to 16 bits, are an A operand.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from .arithmetic import pin_register

TILE_ROWS = 64  # of one WGMMA
ROWS_PER_THREAD = 2
ROWS_APART = 8  # a thread's two rows
FP32_BYTES = 4
K_STEP = 16  # contraction depth of one WGMMA of 16-bit elements

# A operand of m64k16 in registers: (row half, column pair) of a thread are neighbouring accumulator registers
A_VALUES = (2, 2, 2)
A_STRIDES = (1, 2, 4)
REGISTERS_PER_STEP = 8


def tiled_mma(
    dtype: type[cutlass.Numeric],
    columns: int,
    source: warpgroup.OperandSource,
    b_major: OperandMajorMode,
    a_major: OperandMajorMode = OperandMajorMode.K,
) -> cute.TiledMma:
    """Return the 64 x columns x 16 WGMMA with fp32 accumulators. source: of A."""
    op = warpgroup.MmaF16BF16Op(dtype, Float32, (TILE_ROWS, columns, K_STEP), source, a_major, b_major)
    return cute.make_tiled_mma(op)


def half(register: int) -> int:
    """Return which of the thread's two rows an accumulator register belongs to."""
    return (register >> 1) & 1


def fragment_row(thread: Int32, row_half: int) -> Int32:
    """Return the row of the tile that the thread's row `row_half` is."""
    return (thread // 32) * 16 + (thread % 32) // 4 + ROWS_APART * row_half


def fragment_column(thread: Int32, register: int) -> Int32:
    """Return column of an accumulator register."""
    return 8 * (register >> 2) + (register & 1) + 2 * (thread % 4)


@dataclass(frozen=True)
class RowPair:
    """A thread's two rows in a table of fp32 numbers in shared memory, 64 rows a stage.

    first: the address of its first row's in stage 0.
    """

    first: Int32

    @staticmethod
    def of(table: cute.Tensor, thread: Int32) -> RowPair:
        """Return the rows of a thread of the warpgroup."""
        return RowPair(pin_register(table.iterator.toint() + FP32_BYTES * fragment_row(thread, 0)))

    def _at(self, stage: Int32) -> cute.Pointer:
        return cute.make_ptr(Float32, self.first + stage * (TILE_ROWS * FP32_BYTES), cute.AddressSpace.smem, assumed_align=FP32_BYTES)

    def load(self, stage: Int32) -> list[Float32]:
        """Load the values of both rows."""
        return [(self._at(stage) + ROWS_APART * row_half).load() for row_half in range(ROWS_PER_THREAD)]

    def store(self, stage: Int32, values: list[Float32]) -> None:
        """Store the values of both rows. One lane of a quad."""
        for row_half, value in enumerate(values):
            (self._at(stage) + ROWS_APART * row_half).store(value)


def flat(fragment: cute.Tensor) -> cute.Tensor:
    """Return a fragment as a vector of its registers."""
    return cute.make_tensor(fragment.iterator, cute.make_layout(cute.size(fragment)))


def packed(fragment: cute.Tensor) -> cute.Tensor:
    """Return a 16-bit fragment as a vector of 32-bit registers, two neighbouring columns each."""
    return cute.recast_tensor(flat(fragment), Int32)


def gather_eights(words: list[Int32], thread: Int32) -> list[Int32]:
    """Transpose 4 x 4 words in a quad. words[j]: columns 8 j + 2 (t % 4) and the next of a row, packed.

    Return columns 8 (t % 4) .. 8 (t % 4) + 7: 16 contiguous bytes.
    """
    words = list(words)
    for step in (1, 2):
        upper = (thread & step) != 0
        for low in (j for j in range(4) if not j & step):
            high = low + step
            received = cute.arch.shuffle_sync_bfly(cutlass.select_(upper, words[low], words[high]), step)
            words[low] = cutlass.select_(upper, received, words[low])
            words[high] = cutlass.select_(upper, words[high], received)
    return words


def quad_max(value: Float32) -> Float32:
    """Return maximum over the four lanes that share a row."""
    value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, 1))
    return cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, 2))


def quad_sum(value: Float32) -> Float32:
    """Sum over the four lanes that share a row."""
    value = value + cute.arch.shuffle_sync_bfly(value, 1)
    return value + cute.arch.shuffle_sync_bfly(value, 2)
