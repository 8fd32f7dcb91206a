"""A kernel that only finds work items: every CTA writes down those that dense prefill on sm90 would do in it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Int32, cute

from cute_mla.kernels.definition import KernelDefinition
from cute_mla.kernels.dense_prefill.operands import DensePrefillItem, DensePrefillItems
from cute_mla.kernels.dense_prefill.sm90_items import DensePrefillSm90ItemRole
from cute_mla.spec import abi
from cute_mla.spec.arch import SM90
from cute_mla.spec.dense_prefill import TILE_ROWS
from tests.kernels.plain_kernel import plain_kernel

RECORD = 6  # head, first row, rows, first key, keys, diagonal


class ItemsArguments(NamedTuple):
    """Arguments of the kernel. records: int32 [ctas, capacity, RECORD]. The others: as in DensePrefillArguments."""

    cu_seqlens_q: abi.Pointer
    cu_seqlens_k: abi.Pointer
    records: abi.Pointer
    counts: abi.Pointer
    batch: abi.Int32
    h_q: abi.Int32
    total_q: abi.Int32
    total_k: abi.Int32
    row_blocks: abi.Int32
    causal: abi.Int32
    capacity: abi.Int32


@dataclass(frozen=True)
class Records:
    """Takes items as a queue does, and keeps them."""

    records: cute.Pointer
    counts: cute.Pointer
    capacity: Int32

    def post_item(self, turn: Int32, item: DensePrefillItem) -> Int32:
        """Write an item down. Return the next turn."""
        self.post(turn, Boolean(True), item)
        return turn + 1

    def post_end(self, turn: Int32) -> None:
        """Write the number of items down."""
        self.post(turn, Boolean(False), DensePrefillItem(*[Int32(0)] * len(fields(DensePrefillItem))))

    @cute.jit
    def post(self, turn: Int32, there: Boolean, item: DensePrefillItem) -> None:
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
def find(arguments: ItemsArguments) -> None:
    args: Any = SimpleNamespace(**arguments._asdict(), heads_per_kv=Int32(1))
    items = DensePrefillItems(args, arguments.causal != 0, TILE_ROWS[SM90.name])
    queue: Any = Records(arguments.records, arguments.counts, arguments.capacity)
    DensePrefillSm90ItemRole().run(items, queue)


@cute.jit
def host(arguments: ItemsArguments) -> None:
    find(arguments).launch(grid=(1, 1, 1), block=(32, 1, 1))


def source() -> KernelDefinition:
    """Return the kernel, ready to compile."""
    return plain_kernel("items", host, ItemsArguments)
