"""Copies by TMA, by cp.async and by matrix instructions, and lines asked of L2."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, Uint8, cute
from cutlass.cute.typing import AddressSpace
from cutlass.experimental import primitives

LINE_BYTES = 128
BOTH_CTAS = 0b11
ROW_BYTES = 64
BOX_ROW_BYTES = 128  # of a key in a box that TMA has written, 128-byte swizzle
CHUNK = 16  # bytes of a row of one 8 x 8 matrix
MATRIX_ROWS = 8


def prefetch_line(pointer: cute.Pointer) -> None:
    """Ask L2 for the line of an address in gmem."""
    primitives.prefetch_l2(pointer.raw_ptr())


def prefetch_row(address: Int64, nbytes: int) -> None:
    """Ask L2 for the lines of a row in gmem."""
    for byte in range(0, nbytes - 1 + LINE_BYTES, LINE_BYTES):
        prefetch_line(cute.make_ptr(Uint8, address + min(byte, nbytes - 1), cute.AddressSpace.gmem))


def prefetch_map(tensor_map: Any) -> None:
    """Bring the map to where the first copy looks for it. One thread; the map is a kernel parameter."""
    primitives.prefetch_tensormap(tensor_map.get_ptr())


def prefetch_box(tensor_map: Any, coordinates: tuple[Any, ...]) -> None:
    """Ask L2 for the box at `coordinates` (innermost first)."""
    primitives.cp_async_bulk_tensor_prefetch(tensor_map.get_ptr(), list(coordinates), [])


def load_box(target: cute.Pointer, tensor_map: Any, coordinates: tuple[Any, ...], barrier: cute.Pointer) -> None:
    """Start the copy of the box at `coordinates` (innermost first) to `target`; its bytes count on `barrier`."""
    primitives.cp_async_bulk_tensor_shared_cta_global(target.raw_ptr(), tensor_map.get_ptr(), coordinates, barrier.raw_ptr())


def multicast_box(target: cute.Pointer, tensor_map: Any, coordinates: tuple[Any, ...], barrier: cute.Pointer) -> None:
    """Start a copy like load_box; the box lands at the same address in both CTAs and counts on the barrier of each."""
    primitives.cp_async_bulk_tensor_shared_cluster_global(
        target.raw_ptr(),
        tensor_map.get_ptr(),
        coordinates,
        barrier.raw_ptr(),
        [],
        multicast_mask=cutlass.Int16(BOTH_CTAS),
    )


class _BarrierAddress:
    """Barrier operand of the two-CTA copy, which clears the rank bit of the address itself."""

    def __init__(self, barrier: cute.Pointer) -> None:
        self.pointer = barrier.raw_ptr()
        self.space = cutlass.AddressSpace.smem

    def data_ptr(self) -> Any:
        return self.pointer


def pair_box(target: cute.Pointer, tensor_map: Any, coordinates: tuple[Any, ...], barrier: cute.Pointer) -> None:
    """Start a copy like load_box; the bytes count on the barrier of the pair's even CTA. Blackwell."""
    primitives.cp_async_bulk_tensor_shared_cluster_global(
        target.raw_ptr(),
        tensor_map.get_ptr(),
        coordinates,
        _BarrierAddress(barrier),
        [],
        group=primitives.CTAGroup.CTA_2,
    )


def smem_pointer(address: Int32) -> cute.Pointer:
    """Return a shared memory address, a multiple of 16 bytes, as a pointer."""
    return cute.make_ptr(Uint8, address, cute.AddressSpace.smem, assumed_align=CHUNK)


def writer_address(tile: Int32, lane: Int32, row_bytes: int = ROW_BYTES) -> Int32:
    """Return the address of a lane's row of a store of four matrices: rows 0..7 and 8..15 of the first 16 bytes, then of the next.

    Bytes further on are flipped bits away. tile: the address of row 0, a multiple of 8 rows. row_bytes: 64 or 128, the width
    of the swizzle.
    """
    row = lane % (2 * MATRIX_ROWS)
    group = lane // (2 * MATRIX_ROWS)
    return tile + row * row_bytes + (group ^ (row // (BOX_ROW_BYTES // row_bytes) % (row_bytes // CHUNK))) * CHUNK


def store_groups(place: Int32, first_row: int, pair: int, words: list[Int32]) -> None:
    """Store four words of every lane as 16 rows of two times 16 bytes: rows 0..7, rows 8..15 of number 2 pair, then of the next.

    place: writer_address. first_row: a multiple of 16, where rows have 64 bytes.
    """
    target = (place ^ (2 * CHUNK * pair)) + first_row * ROW_BYTES
    primitives.stmatrix(smem_pointer(target).raw_ptr(), words, primitives.MMALayout.ROW)


def load_groups(source: Int32, transposed: bool = True) -> list[Int32]:
    """Load four 8 x 8 matrices of pairs of bytes. source: the lane's row."""
    layout = primitives.MMALayout.COL if transposed else primitives.MMALayout.ROW
    words = primitives.ldmatrix(smem_pointer(source).raw_ptr(), 4, layout)
    return [words[i] for i in range(4)]


def start_copy(target: cute.Pointer, address: Int64, present: Boolean, nbytes: int) -> None:
    """Start a copy of 4 or 16 bytes of gmem to shared memory, or of zeros."""
    primitives.cp_async_shared_global(
        target.raw_ptr(),
        cute.make_ptr(Int32, address, AddressSpace.gmem, assumed_align=nbytes).raw_ptr(),
        nbytes,
        primitives.LoadCacheModifier.CG if nbytes == CHUNK else primitives.LoadCacheModifier.CA,
        cp_size=cutlass.select_(present, Int32(nbytes), Int32(0)),
    )


def arrive_landed(barrier: cute.Pointer) -> None:
    """Arrive for this thread as soon as all its copies up to here have landed."""
    primitives.cp_async_mbarrier_arrive(barrier.raw_ptr(), noinc=True)
