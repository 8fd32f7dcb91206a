"""The arguments of the dK and dV kernels: tensor maps, element types, operands."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, cute
from cutlass.experimental import cuda as tensor_maps

from ...spec.arch import Arch
from ...spec.dense_prefill import BOX_ROWS
from ...spec.dense_prefill_dkdv import ITEM_SUMS, TILE_KEYS, TILE_QUERIES, DensePrefillDkdvArguments, DensePrefillDkdvConfig
from ...spec.dense_prefill_dq import STATISTIC_BYTES, STATISTICS
from ..attention.kernel import ELEMENT_TYPES
from ..dense_prefill.abi import box_map
from .operands import DkdvItems, DkdvOperands


@dataclass(frozen=True)
class DensePrefillDkdvAbi:
    """The arguments of one variant."""

    config: DensePrefillDkdvConfig
    arch: Arch

    op = "dense_prefill_dkdv"
    arguments = DensePrefillDkdvArguments
    min_blocks_per_sm = 1

    def elements(self) -> dict[str, type[cutlass.Numeric]]:
        """Return the types of the tensors that other ops do not have."""
        return dict.fromkeys(("dk", "dv"), ELEMENT_TYPES[self.config.dtype])

    def typed_maps(self, args: DensePrefillDkdvArguments) -> tuple[tensor_maps.TensorMap, ...]:
        """Return the maps of q, dout, k, v and the statistics."""
        d_qk, d_v, rows = self.config.d_qk, self.config.d_v, TILE_QUERIES[self.arch.name][self.config.d_qk]
        boxes = ((d_qk, rows), (d_v, rows), (d_qk, BOX_ROWS), (d_v, BOX_ROWS))
        maps = tuple(box_map(pointer, self.config.dtype, *box) for pointer, box in zip(args[: len(boxes)], boxes, strict=True))
        return (*maps, _statistics_map(args.statistics_map, rows))

    def operands(self, args: DensePrefillDkdvArguments) -> DkdvOperands:
        """Return the arguments by meaning."""
        arch, d_qk = self.arch.name, self.config.d_qk
        return DkdvOperands(args, DkdvItems(args, args.causal != 0, TILE_KEYS[arch][d_qk], sums=ITEM_SUMS[arch][d_qk]))


def _statistics_map(pointer: cute.Pointer, rows: int) -> tensor_maps.TensorMap:
    """Return a map of (row, head, statistic) whose box is both statistics of `rows` rows of one head."""
    return tensor_maps.create_tensor_map_tiled(
        global_address=pointer.toint(),
        dtype=Float32,
        global_dims=[rows, 1, STATISTICS],
        global_strides=[rows * STATISTIC_BYTES // 16, rows * STATISTIC_BYTES // 16],
        box_dims=[rows, 1, STATISTICS],
        swizzle=tensor_maps.TensorMapSwizzle.none,
    )
