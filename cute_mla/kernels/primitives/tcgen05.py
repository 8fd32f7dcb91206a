"""Matrix products of Blackwell SMs, alone or of a pair together, and tensor memory.

A kernel's tcgen05 instructions are all of one group: a pair's unless said otherwise. An address of tensor memory is lane << 16 | column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int8, Int16, Int32, cute
from cutlass.experimental import primitives

PAIR_GROUP = primitives.CTAGroup.CTA_2
OWN_GROUP = primitives.CTAGroup.CTA_1
Keep = primitives.Tcgen05MMACollectorOp  # whether the tensor core keeps A for the product that follows
BOTH_CTAS = 0b11
SWIZZLES = {128: 2, 64: 4, 32: 6, 16: 0}  # of a descriptor, by the bytes of a row

F32_ACCUMULATOR = 1 << 4
A_FORMAT, B_FORMAT, A_MN_MAJOR, B_MN_MAJOR, N_FIELD, M_FIELD = 7, 10, 15, 16, 17, 24  # bit positions in an instruction descriptor
FORMATS = {cutlass.Float16: 0, cutlass.BFloat16: 1, cutlass.Float8E4M3FN: 0}  # within its kind


@dataclass(frozen=True)
class Product:
    """Kind and shape of a matrix product. descriptor: the instruction's."""

    kind: primitives.Tcgen05MMAKind
    descriptor: int


def allocate(cell: cute.Pointer, columns: int, group: primitives.CTAGroup = PAIR_GROUP) -> None:
    """Allocate columns of tensor memory in every CTA of the group and write their address to `cell`. One whole warp of each."""
    primitives.tcgen05_alloc(cell.raw_ptr(), columns, group=group)
    primitives.tcgen05_relinquish_alloc_permit(group=group)


def free(address: Int32, columns: int, group: primitives.CTAGroup = PAIR_GROUP) -> None:
    """Free columns of tensor memory. The warps that allocated them, when nobody uses them any more."""
    primitives.tcgen05_dealloc(primitives.make_tmem_ptr(address, Int8), columns, group=group)


def instruction(
    dtype: type[cutlass.Numeric], rows: int, columns: int, transpose_b: bool = False, transpose_a: bool = False
) -> Product:  # fmt: skip
    """Return the product of rows x columns x 32 bytes with fp32 accumulators; rows and columns of all CTAs of the group together."""
    kind = primitives.Tcgen05MMAKind.F8F6F4 if dtype.width == 8 else primitives.Tcgen05MMAKind.F16
    a_and_b = FORMATS[dtype] << A_FORMAT | FORMATS[dtype] << B_FORMAT | int(transpose_a) << A_MN_MAJOR | int(transpose_b) << B_MN_MAJOR
    return Product(kind, F32_ACCUMULATOR | a_and_b | (columns >> 3) << N_FIELD | (rows >> 4) << M_FIELD)


def k_major(tile: cute.Pointer, row_bytes: int = 128) -> Any:
    """Return an operand of rows of 128 or 64 swizzled bytes along the contraction. A step is 32 bytes further."""
    return _operand(tile, leading=16, row_bytes=row_bytes)


def mn_major(tile: cute.Pointer, box_bytes: int, row_bytes: int = 128) -> Any:
    """Return the rows of 128, 64 or 32 swizzled bytes as operand with the contraction across the rows.

    `box_bytes` further lie the next bytes of the columns; where rows have 16 bytes, which are not swizzled, the next 8 rows. A step of 16
    rows of 128 bytes is 2,048 bytes further.
    """
    return _operand(tile, leading=box_bytes, row_bytes=row_bytes)


def _operand(tile: cute.Pointer, leading: int, row_bytes: int = 128) -> Any:
    return primitives.Tcgen05SmemDesc.build(
        start_address=tile.toint(), leading_byte_offset=leading, stride_byte_offset=8 * row_bytes, layout=SWIZZLES[row_bytes]
    )


def multiply(
    accumulator: Int32,
    a: Any,
    b: Any,
    product: Product,
    accumulate: bool | Boolean,
    keep_a: primitives.Tcgen05MMACollectorOp = Keep.DISCARD,
    group: primitives.CTAGroup = PAIR_GROUP,
) -> None:
    """Issue D (tensor memory) = A B, or += A B.

    A is a descriptor, or an address of tensor memory made by `a_in_tmem`. One thread, of a pair's even CTA.
    """
    target = primitives.make_tmem_ptr(accumulator, Int8)
    primitives.tcgen05_mma(product.kind, group, target, a, b, product.descriptor, accumulate, collector_op=keep_a)


def multiply_stationary(accumulator: Int32, a: Any, b: Any, product: Product, accumulate: bool | Boolean) -> None:
    """Issue D = A B, or += A B, as multiply does, of one CTA, with D of 64 rows in all lanes, at the rate of 128.

    The lanes 64..127 have the same rows as 0..63, and the second half of the columns. columns: 64, 128 or 256.
    """
    target = primitives.make_tmem_ptr(accumulator, Int8)
    primitives.tcgen05_mma_ws(product.kind, target, a, b, product.descriptor, accumulate)


def a_in_tmem(address: Int32) -> Any:
    """Return an A operand in tensor memory: a row is a lane, 4 bytes a column, so a step of 32 bytes is 8 columns further."""
    return primitives.make_tmem_ptr(address, Int8)


def commit(barrier: cute.Pointer, group: primitives.CTAGroup = PAIR_GROUP) -> None:
    """Arrive once on the barrier of both CTAs of a cluster of two when everything this thread has issued is done."""
    primitives.tcgen05_commit(barrier.raw_ptr(), multicast_mask=Int16(BOTH_CTAS), group=group)


def commit_alone(barrier: cute.Pointer) -> None:
    """Arrive once on this CTA's barrier when everything this thread has issued is done. An SM that works alone."""
    primitives.tcgen05_commit(barrier.raw_ptr(), group=OWN_GROUP)


def load_columns(address: Int32, count: int, dtype: type[cutlass.Numeric] = Float32) -> Any:
    """Load `count` columns of this thread's lane, to be used after await_loads. A whole warp, `address` at its first lane."""
    return primitives.tcgen05_ld("32x32b", primitives.make_tmem_ptr(address, dtype), num=count)


def store_columns(address: Int32, words: list[Any], dtype: type[cutlass.Numeric] = Int32) -> None:
    """Store columns of this thread's lane, visible to others after await_stores. A whole warp, `address` at its first lane."""
    vector = cutlass.Vector.from_elements(words, dtype=dtype)
    primitives.tcgen05_st("32x32b", primitives.make_tmem_ptr(address, dtype), vector)


def load_fragment(address: Int32, columns: int) -> Any:
    """Load columns of 16 lanes, to be used after await_loads. A whole warp, `address` at the first of the lanes.

    Register 4 e + 2 r + c of thread t is lane t / 4 + 8 r, column 8 e + 2 (t % 4) + c. columns: 8 times a power of two.
    """
    return primitives.tcgen05_ld("16x256b", primitives.make_tmem_ptr(address, Float32), num=columns // 8)


def store_fragment(address: Int32, words: list[Int32]) -> None:
    """Store columns of 16 lanes, visible to others after await_stores. A whole warp, `address` at the first of the lanes.

    Word 2 e + r of thread t is lane t / 4 + 8 r, column 4 e + t % 4: pairs of a load_fragment. Their number: a power of two.
    """
    vector = cutlass.Vector.from_elements(words, dtype=Int32)
    primitives.tcgen05_st("16x128b", primitives.make_tmem_ptr(address, Int32), vector)


def await_loads() -> None:
    """Wait until the registers of this warp's loads are filled."""
    primitives.tcgen05_wait(primitives.Tcgen05Wait.LOAD)


def await_stores() -> None:
    """Wait until this warp's stores are done."""
    primitives.tcgen05_wait(primitives.Tcgen05Wait.STORE)


def fence_before_signal() -> None:
    """Order this thread's tensor memory accesses before the signal that follows."""
    primitives.tcgen05_fence(primitives.Tcgen05Fence.BEFORE_THREAD_SYNC)


def fence_after_wait() -> None:
    """Order this thread's tensor memory accesses after the signal it has just received."""
    primitives.tcgen05_fence(primitives.Tcgen05Fence.AFTER_THREAD_SYNC)
