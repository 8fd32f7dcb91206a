"""The operands of the dQ kernels."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32, Int64, cute

from ..dense_prefill.operands import DensePrefillItem, DensePrefillOperands


@dataclass(frozen=True)
class DqOperands(DensePrefillOperands):
    """The arguments by meaning. args: DensePrefillDqArguments."""

    def statistic_of(self, item: DensePrefillItem, row: Int32, which: int) -> cute.Pointer:
        """Return a statistic of a query row. which: 0, lse in log2 units; 1, delta."""
        of_head = Int64(which * self.args.h_q + item.head) * self.args.statistics_stride
        return self.args.statistics + (of_head + Int64(item.first_row + row))
