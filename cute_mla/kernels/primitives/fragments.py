"""The register fragments of a 64-row WGMMA, and how they move to and from memory.

Accumulator register i of thread t (0..127) holds row 16 (t / 32) + (t % 32) / 4 + 8 half(i) and column
8 (i / 4) + 2 (t % 4) + i % 2: a thread owns two rows, and a row lies in the four lanes of a quad. The same registers,
packed to 16 bits, are an A operand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Float32, Int32, Uint8, Uint16, Uint32, cute
from cutlass.cute.nvgpu import warp

from ...spec.dense_decode import TILE_ROWS
from .registers import kept

ROWS_PER_THREAD = 2
ROWS_APART = 8  # a thread's two rows
FP32_BYTES = 4


def half(register: int) -> int:
    """Which of the thread's two rows an accumulator register belongs to."""
    return (register >> 1) & 1


def fragment_row(thread: Int32, row_half: int) -> Int32:
    """Row of the tile that the thread's row `row_half` is."""
    return (thread // 32) * 16 + (thread % 32) // 4 + ROWS_APART * row_half


def fragment_column(thread: Int32, register: int) -> Int32:
    """Column of an accumulator register."""
    return 8 * (register >> 2) + (register & 1) + 2 * (thread % 4)


@dataclass(frozen=True)
class RowPair:
    """A thread's two rows in a table of fp32 numbers in shared memory, 64 rows a slot. first: the address of its first row's in
    slot 0."""

    first: Int32

    @staticmethod
    def of(table: cute.Tensor, thread: Int32) -> RowPair:
        """Of a thread of the warpgroup."""
        return RowPair(kept(table.iterator.toint() + FP32_BYTES * fragment_row(thread, 0)))

    def _at(self, slot: Int32) -> cute.Pointer:
        return cute.make_ptr(Float32, self.first + slot * (TILE_ROWS * FP32_BYTES), cute.AddressSpace.smem, assumed_align=FP32_BYTES)

    def load(self, slot: Int32) -> list[Float32]:
        """Of both rows."""
        return [(self._at(slot) + ROWS_APART * row_half).load() for row_half in range(ROWS_PER_THREAD)]

    def store(self, slot: Int32, values: list[Float32]) -> None:
        """Of both rows. One lane of a quad."""
        for row_half, value in enumerate(values):
            (self._at(slot) + ROWS_APART * row_half).store(value)


def flat(fragment: cute.Tensor) -> cute.Tensor:
    """A fragment as a vector of its registers."""
    return cute.make_tensor(fragment.iterator, cute.make_layout(cute.size(fragment)))


def packed(fragment: cute.Tensor) -> cute.Tensor:
    """A 16-bit fragment as a vector of 32-bit registers, two neighbouring columns each."""
    return cute.recast_tensor(flat(fragment), Int32)


def aligned(pointer: cute.Pointer, nbytes: int) -> cute.Pointer:
    """The same address as a pointer known to be a multiple of nbytes, for vector accesses."""
    return cute.make_ptr(pointer.dtype, pointer.toint(), pointer.memspace, assumed_align=nbytes)


def pack_pair(low: Float32, high: Float32, dtype: type[cutlass.Numeric]) -> Int32:
    """Two fp32 values rounded to a pair of 16-bit elements."""
    return pack_word([low, high], dtype)


def pack_word(values: list[Float32], dtype: type[cutlass.Numeric]) -> Int32:
    """As many fp32 values as make a word, rounded to nearest even; e4m3 saturates."""
    exact = cute.make_rmem_tensor(cute.make_layout(len(values)), Float32)
    for i, value in enumerate(values):
        exact[i] = value
    rounded = cute.make_rmem_tensor(cute.make_layout(len(values)), dtype)
    rounded.store(exact.load().to(dtype))
    return cute.recast_tensor(rounded, Int32)[0]


def load_pair(source: cute.Pointer, whole: bool) -> Int32:
    """Two neighbouring 16-bit elements of gmem, at a multiple of 4 bytes if `whole`."""
    if whole:
        return cute.recast_ptr(source, dtype=Int32).load()
    halves = cute.recast_ptr(source, dtype=Uint16)
    return Int32(Uint32(halves.load()) | (Uint32((halves + 1).load()) << 16))


def load_word(source: cute.Pointer, element_bytes: int) -> Int32:
    """4 bytes of gmem, element by element, at a multiple of an element."""
    if element_bytes == 2:
        return load_pair(source, False)
    parts = cute.recast_ptr(source, dtype=Uint8)
    word = Uint32(parts.load())
    for i in range(1, 4):
        word = word | (Uint32((parts + i).load()) << (8 * i))
    return Int32(word)


def store_pair(target: cute.Pointer, word: Int32, whole: bool) -> None:
    """Writes two neighbouring 16-bit elements to gmem, at a multiple of 4 bytes if `whole`."""
    if whole:
        cute.recast_ptr(target, dtype=Int32).store(word)
        return
    halves = cute.recast_ptr(target, dtype=Uint16)
    halves.store(Uint16(word & 0xFFFF))
    (halves + 1).store(Uint16((word >> 16) & 0xFFFF))


def gather_eights(words: list[Int32], thread: Int32) -> list[Int32]:
    """Transposes 4 x 4 words in a quad. words[j]: columns 8 j + 2 (t % 4) and the next of a row, packed. Returns columns
    8 (t % 4) .. 8 (t % 4) + 7: 16 contiguous bytes."""
    words = list(words)
    for step in (1, 2):
        upper = (thread & step) != 0
        for low in (j for j in range(4) if not j & step):
            high = low + step
            received = cute.arch.shuffle_sync_bfly(cutlass.select_(upper, words[low], words[high]), step)
            words[low] = cutlass.select_(upper, received, words[low])
            words[high] = cutlass.select_(upper, words[high], received)
    return words


def store_words(target: cute.Pointer, words: list[Int32]) -> None:
    """Writes 16 bytes to a multiple of 16 bytes."""
    registers = cute.make_rmem_tensor(cute.make_layout(len(words)), Int32)
    for i, word in enumerate(words):
        registers[i] = word
    cute.autovec_copy(registers, cute.make_tensor(aligned(cute.recast_ptr(target, dtype=Int32), 16), cute.make_layout(len(words))))


def store_row(target: cute.Pointer, values: list[Float32], dtype: type[cutlass.Numeric], vectors: bool) -> None:
    """Writes contiguous 16-bit elements to gmem, a multiple of 8, at a multiple of 16 bytes if `vectors`."""
    words = [pack_pair(values[i], values[i + 1], dtype) for i in range(0, len(values), 2)]
    for first in range(0, len(words), 4):
        if vectors:
            store_words(target + 2 * first, words[first : first + 4])
        else:
            for i in range(first, first + 4):
                store_pair(target + 2 * i, words[i], False)


def tile_writer(tiled_mma: cute.TiledMma, dtype: type[cutlass.Numeric], thread: Int32) -> Any:
    """Copies a packed 64x64 fragment to a K-major smem tile by stmatrix, four 8x8 matrices an instruction."""
    atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=False, num_matrices=4), dtype)
    return cute.make_tiled_copy_C(atom, tiled_mma).get_slice(thread)


def quad_max(value: Float32) -> Float32:
    """Maximum over the four lanes that share a row."""
    value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, 1))
    return cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, 2))


def quad_sum(value: Float32) -> Float32:
    """Sum over the four lanes that share a row."""
    value = value + cute.arch.shuffle_sync_bfly(value, 1)
    return value + cute.arch.shuffle_sync_bfly(value, 2)
