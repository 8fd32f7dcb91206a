"""The output role's view of a Q tile on SM100: a thread has a row of O, a lane of tensor memory."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from ...spec.dense_prefill import D_V
from ..parts import tcgen05
from ..parts.fragments import aligned, pack_pair, store_pair
from .sm100_geometry import GROUP, OUTPUT_COLUMN, TILE_ROWS, Tiles

AT_ONCE = 32  # columns of O
VECTOR = 4  # 32-bit words of a 16-byte access
WORD_ELEMENTS = 2


@dataclass(frozen=True)
class OutputRows:
    """O of one Q tile. tile, row: the Q tile, and this thread's row of it. place: address of O at the first lane of the warp."""

    dtype: type[cutlass.Numeric]
    wide: bool
    tiles: Tiles
    tile: int
    row: Int32
    place: Int32

    @staticmethod
    def create(dtype: type[cutlass.Numeric], wide: bool, tiles: Tiles, lanes: Int32, tile: int) -> OutputRows:
        """lanes: tensor memory at the first lane of the warp. wide: whether rows of out are multiples of 16 bytes."""
        row = cute.arch.thread_idx()[0] % GROUP
        return OutputRows(dtype, wide, tiles, tile, row, lanes + (OUTPUT_COLUMN + tile * D_V))

    def factor(self) -> Float32:
        """The row's rescale factor."""
        return (self.tiles.sAlpha + (self.tile * TILE_ROWS + self.row)).load()

    def inverse(self) -> Float32:
        """1 / row sum, 0 for a row that attends to nothing."""
        return (self.tiles.sInverse + (self.tile * TILE_ROWS + self.row)).load()

    def scale(self, alpha: Float32) -> None:
        """O *= alpha; done when this returns."""
        for first in range(0, D_V, AT_ONCE):
            values = tcgen05.load_columns(self.place + first, AT_ONCE)
            tcgen05.await_loads()
            products: list[Float32] = []
            for i in range(0, AT_ONCE, 2):
                products += cute.arch.mul_packed_f32x2((values[i], values[i + 1]), (alpha, alpha))
            tcgen05.store_columns(self.place + first, products, Float32)
        tcgen05.await_stores()

    @cute.jit
    def store(self, target: cute.Pointer, rows: Int32, inverse: Float32, accumulated: Boolean):
        """O / row sum, or zeros if nothing was accumulated, to a row of out, if it is one of the `rows` that there are."""
        for first in cutlass.range_constexpr(0, D_V, AT_ONCE):
            rO = cute.make_rmem_tensor(cute.make_layout(AT_ONCE), Float32)
            rO.fill(0.0)
            if accumulated:
                values = tcgen05.load_columns(self.place + first, AT_ONCE)
                tcgen05.await_loads()
                for i in cutlass.range_constexpr(AT_ONCE):
                    # a row that attends to nothing is 0 whatever tensor memory holds
                    rO[i] = cutlass.select_(inverse == 0.0, Float32(0), values[i] * inverse)
            if self.row < rows:
                self.store_words(target + first, [rO[i] for i in range(AT_ONCE)])

    def store_words(self, target: cute.Pointer, values: list[Float32]) -> None:
        """Contiguous elements of out."""
        words = [pack_pair(values[i], values[i + 1], self.dtype) for i in range(0, len(values), WORD_ELEMENTS)]
        for first in range(0, len(words), VECTOR):
            place = target + first * WORD_ELEMENTS
            if self.wide:
                rWords = cute.make_rmem_tensor(cute.make_layout(VECTOR), Int32)
                for i in range(VECTOR):
                    rWords[i] = words[first + i]
                cute.autovec_copy(rWords, cute.make_tensor(cute.recast_ptr(aligned(place, 16), dtype=Int32), rWords.layout))
            else:
                for i in range(VECTOR):
                    store_pair(place + i * WORD_ELEMENTS, words[first + i], False)
