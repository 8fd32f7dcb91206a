"""The arguments of the sparse decode kernels: element types, operands."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Uint8
from cutlass.experimental import cuda as tensor_maps

from ...spec.sparse_decode import SparseDecodeArguments, SparseDecodeConfig
from ..attention.lengths import Lengths
from ..attention.scheduler import SplitKvSchedule
from .operands import SlotCache, SparseDecodeOperands, SpreadOperands


@dataclass(frozen=True)
class SparseDecodeAbi:
    """The arguments of one variant."""

    config: SparseDecodeConfig
    min_blocks_per_sm: int = 0

    op = "sparse_decode"
    arguments = SparseDecodeArguments

    def elements(self) -> dict[str, type[cutlass.Numeric]]:
        """Return the types of the caches: bytes."""
        return {"cache": Uint8, "extra_cache": Uint8}

    def typed_maps(self, args: SparseDecodeArguments) -> tuple[tensor_maps.TensorMap, ...]:
        """Return no maps: rows are gathered by threads."""
        return ()

    def operands(self, args: SparseDecodeArguments) -> SparseDecodeOperands:
        """Return the arguments by meaning."""
        lengths = Lengths(args.topk_length, args.extra_topk_length, args.topk, args.extra_topk)
        operands = SpreadOperands if self.config.rows64 else SparseDecodeOperands
        return operands(
            args,
            cache=SlotCache.create(args, ""),
            extra=SlotCache.create(args, "extra_"),
            schedule=SplitKvSchedule(args.plan, args.num_splits, lengths, args.batch, args.max_splits, args.accum_rows),
        )
