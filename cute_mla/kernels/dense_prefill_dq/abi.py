"""The arguments of the dQ kernels: tensor maps, element types, operands."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32
from cutlass.experimental import cuda as tensor_maps

from ...spec.dense_prefill import BOX_ROWS, DensePrefillConfig
from ...spec.dense_prefill_dq import TILE_ROWS, DensePrefillDqArguments
from ..attention.kernel import ELEMENT_TYPES
from ..dense_prefill.abi import box_map
from ..dense_prefill.operands import DensePrefillItems
from .operands import DqOperands


@dataclass(frozen=True)
class DensePrefillDqAbi:
    """The arguments of one variant. tile_keys: rows of the boxes of k and v."""

    config: DensePrefillConfig
    tile_keys: int

    op = "dense_prefill_dq"
    arguments = DensePrefillDqArguments
    min_blocks_per_sm = 1

    def elements(self) -> dict[str, type[cutlass.Numeric]]:
        """Return the types of the tensors that other ops do not have."""
        return {**dict.fromkeys(("dout", "dq", "q_copy", "dout_copy"), ELEMENT_TYPES[self.config.dtype]), "statistics": Float32}

    def typed_maps(self, args: DensePrefillDqArguments) -> tuple[tensor_maps.TensorMap, ...]:
        """Return the maps of q, dout, k and v."""
        d_qk, d_v = self.config.d_qk, self.config.d_v
        boxes = ((d_qk, BOX_ROWS), (d_v, BOX_ROWS), (d_qk, self.tile_keys), (d_v, self.tile_keys))
        return tuple(box_map(pointer, self.config.dtype, *box) for pointer, box in zip(args[: len(boxes)], boxes, strict=True))

    def operands(self, args: DensePrefillDqArguments) -> DqOperands:
        """Return the arguments by meaning."""
        return DqOperands(args, DensePrefillItems(args, args.causal != 0, TILE_ROWS))
