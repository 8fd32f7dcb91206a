"""An item's rows in fragments of registers, as WGMMA and mma.sync leave them: the mask over their scores, and their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import cutlass
from cutlass import Float32, Int32, cute

from ..attention.softmax import LN2, OnlineSoftmax, mask_keys
from ..primitives.arithmetic import smaller
from ..primitives.wgmma import ROWS_PER_THREAD
from .operands import DensePrefillItem, DensePrefillOperands, DensePrefillRows
from .sm90_gemm import gather_runs, store_row_words


class FragmentSum(Protocol):
    """O of one thread."""

    def row_words(self, row_half: int, factor: Float32, first: int, columns: int) -> list[Int32]:
        """Return columns of one of the thread's rows times a factor, rounded: words as SumProduct.row_words has them."""


class Fragments(Protocol):
    """The products of one thread. thread: of the warps that share a block of rows, or of a warpgroup's part of it."""

    @property
    def thread(self) -> Int32:
        """Return the number of the thread."""

    @property
    def first_row(self) -> Int32:
        """Return the first row of the block that a warp or warpgroup has."""

    @property
    def output(self) -> FragmentSum:
        """Return O."""

    def row(self, row_half: int) -> Int32:
        """Return the row of the item's block that one of the thread's fragment rows is."""


@dataclass(frozen=True)
class FragmentRows:
    """The rows of a thread. tile_keys: of a tile. d_v: columns of out. written_columns: of a row of out, rounded at once."""

    tile_keys: int
    d_v: int
    written_columns: int

    @cute.jit
    def mask(self, item: DensePrefillItem, products: Fragments, scores: cute.Tensor, tile: Int32):
        """Mask keys past the end, and causally hidden ones."""
        remaining = item.keys - tile * self.tile_keys
        seen = item.diagonal + 1 - tile * self.tile_keys  # by row 0 of the block
        if smaller(remaining, seen + products.first_row) < self.tile_keys:
            limits = [smaller(remaining, seen + products.row(row_half)) for row_half in range(ROWS_PER_THREAD)]
            mask_keys(scores, products.thread, limits)

    @cute.jit
    def finish(self, operands: DensePrefillOperands, rows: DensePrefillRows, products: Fragments, softmax: OnlineSoftmax):
        """Normalise and write the rows that the sequence has."""
        for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
            total = softmax.row_sum(row_half)
            empty = total == 0.0
            inverse = cutlass.select_(empty, Float32(0), 1.0 / total)
            lse = (softmax.row_ref[row_half] + cute.math.log2(total, fastmath=True)) * LN2
            for first in cutlass.range_constexpr(0, self.d_v, self.written_columns):
                words = products.output.row_words(row_half, inverse, first, self.written_columns)
                words = [cutlass.select_(empty, Int32(0), word) for word in words]
                self.write(
                    operands,
                    rows,
                    products,
                    row_half,
                    first,
                    gather_runs(words, products.thread),
                    cutlass.select_(empty, operands.args.empty_lse, lse),
                )

    @cute.jit
    def write_empty(self, operands: DensePrefillOperands, item: DensePrefillItem, products: Fragments):
        """Write the rows of a block that sees no key."""
        for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
            words = [Int32(0)] * (self.d_v // 8)
            self.write(operands, DensePrefillRows.of(item), products, row_half, 0, words, operands.args.empty_lse)

    @cute.jit
    def write(
        self,
        operands: DensePrefillOperands,
        rows: DensePrefillRows,
        products: Fragments,
        row_half: int,
        first: int,
        words: list[Int32],
        lse: Float32,
    ):
        """Write columns of one of the thread's rows from `first` on, and with the first ones lse, if the sequence has the row."""
        row, thread = products.row(row_half), products.thread
        if row < rows.rows:
            if cutlass.const_expr(first == 0) and thread % 4 == 0:
                operands.row("lse", rows, row).store(lse)
            store_row_words(operands.row("out", rows, row) + first, words, thread, True)
