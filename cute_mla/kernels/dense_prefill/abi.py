"""The arguments of the dense prefill kernels: tensor maps, element types, operands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import cutlass
from cutlass import cute
from cutlass.experimental import cuda as tensor_maps

from ...spec.arch import Arch
from ...spec.dense_prefill import BOX_COLUMNS, BOX_ROWS, TILE_ROWS, DensePrefillArguments, DensePrefillConfig
from ...spec.mla import ELEMENT_BYTES
from ..attention.kernel import ELEMENT_TYPES
from .operands import ITEM_WORDS, DensePrefillItems, DensePrefillOperands, EveryKey, ItemQueue, ItemQueuePipes


@dataclass(frozen=True)
class DensePrefillAbi:
    """The arguments of one variant."""

    config: DensePrefillConfig
    arch: Arch

    op = "dense_prefill"
    arguments: ClassVar[type] = DensePrefillArguments
    min_blocks_per_sm = 1  # unless told that there is a CTA a multiprocessor, ptxas ignores setmaxnreg on Blackwell (C7508)

    def elements(self) -> dict[str, type[cutlass.Numeric]]:
        """Return no types of its own."""
        return {}

    def typed_maps(self, args: DensePrefillArguments) -> tuple[tensor_maps.TensorMap, ...]:
        """Return the maps of q, k and v."""
        keys = self.config.key_box_rows(self.arch)
        boxes = ((self.config.d_qk, self.config.query_box_rows(self.arch)), (self.config.d_qk, keys), (self.config.d_v, keys))
        return tuple(box_map(pointer, self.config.dtype, *box) for pointer, box in zip(args[: len(boxes)], boxes, strict=True))

    @property
    def in_parts(self) -> bool:
        """Return whether items come in parts, which a warp of its own finds."""
        return False

    @property
    def item_words(self) -> int:
        """Return the words of an item on the queue."""
        return ITEM_WORDS

    def queue(self, operands: DensePrefillOperands, sItems: cute.Pointer, pipes: ItemQueuePipes) -> ItemQueue:
        """Return the queue of a CTA."""
        return ItemQueue(sItems, pipes)

    def key_mask(self, operands: DensePrefillOperands) -> EveryKey:
        """Return the caller's mask over the keys."""
        return EveryKey()

    def operands(self, args: DensePrefillArguments) -> DensePrefillOperands:
        """Return the arguments by meaning."""
        return DensePrefillOperands(args, DensePrefillItems(args, args.causal != 0, TILE_ROWS[self.arch.name], self.config.cluster))


def box_map(pointer: cute.Pointer, dtype: str, columns: int, rows: int = BOX_ROWS) -> tensor_maps.TensorMap:
    """Return a map of (columns, head, row) whose box is `rows` rows of 64 columns of one head."""
    return tensor_maps.create_tensor_map_tiled(
        global_address=pointer.toint(),
        dtype=ELEMENT_TYPES[dtype],
        global_dims=[columns, 1, rows],
        global_strides=[columns * ELEMENT_BYTES // 16, columns * ELEMENT_BYTES // 16],
        box_dims=[BOX_COLUMNS, 1, rows],
        swizzle=tensor_maps.TensorMapSwizzle.s128b,
    )
