"""The role `indices` of sparse_prefill_dq on Hopper: sparse prefill's, which here brings all of Q and dO by TMA."""

from __future__ import annotations

from typing import Any

from cutlass import Int32, Uint32, cute

from ..attention.scheduler import BOX_COLUMNS, first_query_row
from ..primitives.copies import load_box
from ..sm90.cta import BOX_ELEMENTS, LatentSm90Queries
from ..sparse_prefill.sm90_indices import SparsePrefillSm90IndexRole
from .sm90_config import DqSm90Geometry, DqSm90Smem


class DqSm90IndexRole(SparsePrefillSm90IndexRole):
    """One warp: indices, checks, which keys are present; Q and dO."""

    def __init__(self, geometry: DqSm90Geometry) -> None:
        super().__init__(LatentSm90Queries(geometry.d_qk, 0))
        self.geometry = geometry

    @cute.jit
    def load_queries(self, operands: Any, smem: DqSm90Smem, token: Int32, number: Int32):
        """Bring Q and dO of a token, the number-th that has keys. Wait queries_free. Signal queries_landed."""
        args = operands.args
        request = Int32(Uint32(token) // Uint32(args.s_q))
        place, landed = token - request * args.s_q, smem.queries_landed.barrier(number)
        smem.queries_free.producer_acquire(number)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(landed, self.geometry.query_bytes)
            for tensor_map, target in ((args.q_map, smem.sQ), (args.dout_map, smem.sD)):
                for box in range(cute.size(target, mode=[2])):
                    where = (box * BOX_COLUMNS, first_query_row(), place, request)
                    load_box(target.iterator + box * BOX_ELEMENTS, tensor_map, where, landed)
