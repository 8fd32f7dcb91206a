"""Protocols of the operands that the roles over a latent take, whatever addresses an op's rows."""

from __future__ import annotations

from typing import Protocol

from cutlass import Float32, Int32, Int64, cute

from .split_kv_scheduler import SplitKvSchedule, WorkTile
from .token_scheduler import TokenSchedule
from .units import RowRange


class QueryOperands(Protocol):
    """Rows of q, out and lse of a request (in sparse prefill of a query token, in dense decode of a unit), and the work of this CTA."""

    @property
    def schedule(self) -> SplitKvSchedule | TokenSchedule:
        """Return the work tiles of this CTA."""

    @property
    def scale_log2(self) -> Float32:
        """Return the factor of the scores, log2 units."""

    @property
    def empty_lse(self) -> Float32:
        """Return the lse of a row that attends to nothing."""

    def rows(self) -> Int32:
        """Return the number of query rows that attend to this CTA's keys, those of a request that lacks some of them included."""

    def row_range(self, req: Int32) -> RowRange:
        """Return the query rows of a request that exist."""

    def q_row(self, req: Int32, row: Int32) -> cute.Pointer:
        """Return element 0 of a query row."""

    def out_row(self, req: Int32, row: Int32) -> cute.Pointer:
        """Return element 0 of an output row."""

    def lse_of(self, req: Int32, row: Int32) -> cute.Pointer:
        """Return the lse of a query row."""


class LatentOperands(QueryOperands, Protocol):
    """Members that only some ops have: a role asks for them where its op has them.

    Accumulators exist where a request may be split, sinks and greatest logits in the sparse ops.
    """

    @property
    def out_accum(self) -> cute.Pointer:
        """Return the fp32 rows of the split accumulators, contiguous."""

    @property
    def lse_accum(self) -> cute.Pointer:
        """Return the lse of every row of the split accumulators."""

    def accum_row(self, work_tile: WorkTile, row: Int32) -> Int64:
        """Return the number of a query row in the split accumulators."""

    @property
    def attn_sink(self) -> cute.Pointer:
        """Return fp32 [rows], natural log; a null pointer without sinks."""

    def max_logit_of(self, req: Int32, row: Int32) -> cute.Pointer:
        """Return the greatest logit of a query row."""
