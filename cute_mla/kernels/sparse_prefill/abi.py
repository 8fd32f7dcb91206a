"""The arguments of the sparse prefill kernels: element types, operands."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Uint8
from cutlass.experimental import cuda as tensor_maps

from ...spec.sparse_prefill import SparsePrefillArguments, SparsePrefillConfig
from ..attention.scheduler import TokenSchedule
from .operands import Latent, SparsePrefillOperands


@dataclass(frozen=True)
class SparsePrefillAbi:
    """The arguments of one variant."""

    config: SparsePrefillConfig
    min_blocks_per_sm: int = 0

    op = "sparse_prefill"
    arguments = SparsePrefillArguments

    def elements(self) -> dict[str, type[cutlass.Numeric]]:
        """Return the type of the latent: bytes."""
        return {"kv": Uint8}

    def typed_maps(self, args: SparsePrefillArguments) -> tuple[tensor_maps.TensorMap, ...]:
        """Return no maps: rows are gathered by threads."""
        return ()

    def operands(self, args: SparsePrefillArguments) -> SparsePrefillOperands:
        """Return the arguments by meaning."""
        latent = Latent(args.kv, args.kv_offsets, args.kv_stride_batch, args.kv_stride_row, args.s_kv)
        return SparsePrefillOperands(args, latent, TokenSchedule(args.topk_length, args.topk, args.tokens))
