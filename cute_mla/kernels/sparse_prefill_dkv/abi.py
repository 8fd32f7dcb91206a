"""The arguments of sparse_prefill_dkv: tensor maps, element types, operands."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import cute
from cutlass.experimental import cuda as tensor_maps

from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_LATENT, ELEMENT_BYTES
from ...spec.sparse_prefill_dkv import SparsePrefillDkvArguments, SparsePrefillDkvConfig
from ...spec.split_plan import TILE_KEYS
from ..attention.kernel import ELEMENT_TYPES
from ..attention.scheduler import BOX_COLUMNS
from ..sparse_prefill.operands import SparsePrefillOperands, chunk_operands


@dataclass(frozen=True)
class SparsePrefillDkvAbi:
    """The arguments of one variant."""

    config: SparsePrefillDkvConfig

    op = "sparse_prefill_dkv"
    arguments = SparsePrefillDkvArguments
    min_blocks_per_sm = 1

    def elements(self) -> dict[str, type[cutlass.Numeric]]:
        """Return the type of the rows."""
        return {"rows": ELEMENT_TYPES[self.config.dtype]}

    def typed_maps(self, args: SparsePrefillDkvArguments) -> tuple[tensor_maps.TensorMap, ...]:
        """Return the maps of q, dout, P and dS, whose boxes are 64 columns or keys of 64 heads."""
        ranks = ((self.config.d_qk, 2), (D_LATENT, 2), (TILE_KEYS, 1), (TILE_KEYS, 1))
        return tuple(head_map(pointer, self.config.dtype, *rank) for pointer, rank in zip(args[: len(ranks)], ranks, strict=True))

    def operands(self, args: SparsePrefillDkvArguments) -> SparsePrefillOperands:
        """Return the arguments by meaning."""
        return chunk_operands(args)


def head_map(pointer: cute.Pointer, dtype: str, columns: int, others: int) -> tensor_maps.TensorMap:
    """Return a map of columns, heads, and so many other dimensions, whose boxes are 64 columns of 64 heads."""
    return tensor_maps.create_tensor_map_tiled(
        global_address=pointer.toint(),
        dtype=ELEMENT_TYPES[dtype],
        global_dims=[columns, TILE_ROWS, *[1] * others],
        global_strides=[columns * ELEMENT_BYTES // 16] * (1 + others),
        box_dims=[BOX_COLUMNS, TILE_ROWS, *[1] * others],
        swizzle=tensor_maps.TensorMapSwizzle.s128b,
    )
