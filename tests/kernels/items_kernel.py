"""A kernel that only finds work items: every CTA writes down those that dense prefill on sm90 would do in it."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.cute.runtime import make_ptr

from cute_mla.kernels.definition import KernelDefinition
from cute_mla.kernels.dense_prefill.operands import WorkItem, WorkItems
from cute_mla.kernels.dense_prefill.sm90_items import ItemRole
from cute_mla.spec.arch import SM90
from cute_mla.spec.dense_prefill import TILE_ROWS
from tests.support.params import int32s, pointers

RECORD = 6  # head, first row, rows, first key, keys, diagonal
PARAMS = (
    *pointers("cu_seqlens_q", "cu_seqlens_k", "records", "counts"),  # records: int32 [ctas, capacity, RECORD]
    *int32s("batch", "h_q", "total_q", "total_k", "row_blocks", "causal", "capacity"),
)


@dataclass(frozen=True)
class ItemsConfig:
    """The kernel has no variants."""

    name: str = "items"


@dataclass(frozen=True)
class Records:
    """Takes items as a board does, and keeps them."""

    records: cute.Pointer
    counts: cute.Pointer
    capacity: Int32

    @cute.jit
    def post(self, turn: Int32, there: Boolean, item: WorkItem) -> None:
        """Write an item down, or their number behind the last."""
        cta = cute.arch.block_idx()[0]
        if cute.arch.lane_idx() == 0:
            if there:
                record = self.records + (cta * self.capacity + turn) * RECORD
                numbers = (item.head, item.first_row, item.rows, item.first_key, item.keys, item.diagonal)
                for i in cutlass.range_constexpr(RECORD):
                    record[i] = numbers[i]
            else:
                self.counts[cta] = turn


@cute.kernel
def find(
    cu_seqlens_q: cute.Pointer,
    cu_seqlens_k: cute.Pointer,
    records: cute.Pointer,
    counts: cute.Pointer,
    batch: Int32,
    h_q: Int32,
    total_q: Int32,
    total_k: Int32,
    row_blocks: Int32,
    causal: Int32,
    capacity: Int32,
) -> None:
    args: Any = SimpleNamespace(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        batch=batch,
        h_q=h_q,
        heads_per_kv=Int32(1),
        total_q=total_q,
        total_k=total_k,
        row_blocks=row_blocks,
    )
    operands: Any = SimpleNamespace(items=WorkItems(args, causal != 0, TILE_ROWS[SM90.name]))
    board: Any = Records(records, counts, capacity)
    ItemRole().run(operands, board)


@cute.jit
def host(
    cu_seqlens_q: cute.Pointer,
    cu_seqlens_k: cute.Pointer,
    records: cute.Pointer,
    counts: cute.Pointer,
    batch: Int32,
    h_q: Int32,
    total_q: Int32,
    total_k: Int32,
    row_blocks: Int32,
    causal: Int32,
    capacity: Int32,
) -> None:
    find(cu_seqlens_q, cu_seqlens_k, records, counts, batch, h_q, total_q, total_k, row_blocks, causal, capacity).launch(
        grid=(1, 1, 1), block=(32, 1, 1)
    )


def source() -> KernelDefinition:
    """Return the kernel, ready to compile."""
    int32s_in_memory = make_ptr(Int32, 0, cute.AddressSpace.gmem, assumed_align=4)
    return KernelDefinition(
        op="items",
        config=ItemsConfig(),
        host=host,
        args=(*(int32s_in_memory for _ in range(4)), *(Int32(1) for _ in range(7))),
        params=PARAMS,
        block=(32, 1, 1),
        cluster=(1, 1, 1),
        smem_bytes=0,
    )
