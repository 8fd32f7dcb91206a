"""The operands of the dQ kernels: where the rows of a work item lie."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float32, Int32, Int64, cute

from ...spec.dense_prefill_dq import DensePrefillDqArguments
from ..dense_prefill.operands import WorkItem, WorkItems, row_offset


@dataclass(frozen=True)
class Operands:
    """The arguments by meaning. Strides in elements, of (token, head); rows are counted from the item's first."""

    args: DensePrefillDqArguments
    items: WorkItems

    @property
    def softmax_scale(self) -> Float32:
        """Return the factor of dQ."""
        return self.args.softmax_scale

    @property
    def scale_log2(self) -> Float32:
        """Return the factor of the scores, log2 units."""
        return self.args.scale_log2

    def dout_row(self, item: WorkItem, row: Int32) -> cute.Pointer:
        """Return element 0 of a row of dout."""
        return self.args.dout + row_offset(self.args.dout_stride_token, self.args.dout_stride_head, item.first_row + row, item.head)

    def out_row(self, item: WorkItem, row: Int32) -> cute.Pointer:
        """Return element 0 of a row of out."""
        return self.args.out + row_offset(self.args.out_stride_token, self.args.out_stride_head, item.first_row + row, item.head)

    def dq_row(self, item: WorkItem, row: Int32) -> cute.Pointer:
        """Return element 0 of a row of dq."""
        return self.args.dq + row_offset(self.args.dq_stride_token, self.args.dq_stride_head, item.first_row + row, item.head)

    def lse_of(self, item: WorkItem, row: Int32) -> cute.Pointer:
        """Return the lse of a query row."""
        return self.args.lse + row_offset(self.args.lse_stride_token, self.args.lse_stride_head, item.first_row + row, item.head)

    def statistic_of(self, item: WorkItem, row: Int32, which: int) -> cute.Pointer:
        """Return a statistic of a query row. which: 0, lse in log2 units; 1, delta."""
        of_head = Int64(which * self.args.h_q + item.head) * self.args.statistics_stride
        return self.args.statistics + (of_head + Int64(item.first_row + row))
