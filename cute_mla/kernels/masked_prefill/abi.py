"""The arguments of the masked prefill kernels: those of dense prefill, and the mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from cutlass import cute

from ...spec.dense_prefill import TILE_ROWS
from ...spec.masked_prefill import MaskedPrefillArguments
from ..dense_prefill.abi import DensePrefillAbi
from ..dense_prefill.operands import DensePrefillItems, DensePrefillOperands, EveryKey, ItemQueue, ItemQueuePipes
from .operands import MaskedItem, MaskedItemQueue, MaskRows, keys_with_bits


@dataclass(frozen=True)
class MaskedPrefillAbi(DensePrefillAbi):
    """The arguments of one variant. mask_kind: how its roles apply the mask."""

    mask_kind: Callable[[MaskRows], EveryKey]

    op = "masked_prefill"
    arguments: ClassVar[type] = MaskedPrefillArguments

    @property
    def in_parts(self) -> bool:
        """Return whether items come in parts, which a warp of its own finds."""
        return True

    @property
    def item_words(self) -> int:
        """Return the words of a part of an item on the queue."""
        return 1 + len(fields(MaskedItem))

    def queue(self, operands: DensePrefillOperands, sItems: cute.Pointer, pipes: ItemQueuePipes) -> ItemQueue:
        """Return the queue of a CTA."""
        return MaskedItemQueue(
            sItems, pipes, mask=MaskRows.of(operands.args), tile_keys=self.config.tile_keys(self.arch), item_rows=TILE_ROWS[self.arch.name]
        )

    def key_mask(self, operands: DensePrefillOperands) -> EveryKey:
        """Return the caller's mask over the keys."""
        return self.mask_kind(MaskRows.of(operands.args))

    def operands(self, args: Any) -> DensePrefillOperands:
        """Return the arguments by meaning."""
        return DensePrefillOperands(
            args, DensePrefillItems(args, args.causal != 0, TILE_ROWS[self.arch.name], self.config.cluster, keys_with_bits)
        )
