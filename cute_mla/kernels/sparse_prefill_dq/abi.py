"""The arguments of sparse_prefill_dq: tensor maps, element types, operands."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, cute
from cutlass.experimental import cuda as tensor_maps

from ...spec.mla import D_LATENT
from ...spec.sparse_prefill import SparsePrefillConfig
from ...spec.sparse_prefill_dq import SparsePrefillDqArguments
from ...spec.split_plan import TILE_KEYS
from ..attention.kernel import ELEMENT_TYPES
from ..attention.scheduler import TokenSchedule
from ..sparse_prefill.operands import Latent, SparsePrefillOperands
from ..sparse_prefill_dkv.abi import head_map

STATISTIC_LSE, STATISTIC_DELTA = 0, 1


@dataclass(frozen=True)
class DqOperands(SparsePrefillOperands):
    """The arguments by meaning. args: SparsePrefillDqArguments."""

    def statistic_of(self, which: int, token: Int32, row: Int32) -> cute.Pointer:
        """Return lse' in log2 units, or delta', of a query row."""
        tokens = Int64(token) + which * Int64(self.args.all_tokens)
        return self.args.statistics + (tokens * self.args.h_q + row)

    def dq_row(self, token: Int32, row: Int32) -> cute.Pointer:
        """Return element 0 of a row of dq."""
        return self.element("dq", token, row)

    def score_row(self, token: Int32, position: Int32, row: Int32) -> Int64:
        """Return the place in P and dS of a query row's first slot of a tile. position: of the tile's first slot in the list."""
        tile = Int64(token - self.args.first_token) * self.args.tiles + position // TILE_KEYS
        return (tile * self.args.h_q + row) * TILE_KEYS


@dataclass(frozen=True)
class SparsePrefillDqAbi:
    """The arguments of one variant."""

    config: SparsePrefillConfig
    min_blocks_per_sm: int = 0

    op = "sparse_prefill_dq"
    arguments = SparsePrefillDqArguments

    def elements(self) -> dict[str, type[cutlass.Numeric]]:
        """Return the types of tensors that other ops do not have, and of the latent: bytes."""
        dtype = ELEMENT_TYPES[self.config.dtype]
        return {"kv": Uint8, "statistics": Float32, **dict.fromkeys(("dq", "probs", "dscores"), dtype)}

    def typed_maps(self, args: SparsePrefillDqArguments) -> tuple[tensor_maps.TensorMap, ...]:
        """Return the maps of q and dout."""
        columns = (self.config.d_qk, D_LATENT)
        return tuple(head_map(pointer, self.config.dtype, width, 2) for pointer, width in zip(args[:2], columns, strict=True))

    def operands(self, args: SparsePrefillDqArguments) -> DqOperands:
        """Return the arguments by meaning."""
        latent = Latent(args.kv, args.kv_offsets, args.kv_stride_batch, args.kv_stride_row, args.s_kv)
        return DqOperands(args, latent, TokenSchedule(args.topk_length, args.topk, args.first_token + args.tokens, args.first_token))
