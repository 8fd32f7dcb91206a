"""Protocols of the operands that the roles over a latent take, whatever addresses an op's rows."""

from __future__ import annotations

from typing import Protocol

from cutlass import Float32, Int32, Int64, cute

from .split_kv_scheduler import SplitKvSchedule, WorkTile
from .token_scheduler import TokenSchedule


class QueryOperands(Protocol):
    """Rows of q, out and lse of a request (in sparse prefill of a query token), and the work of this CTA.

    scale_log2: factor of the scores, log2 units. empty_lse: lse of a row that attends to nothing.
    """

    @property
    def schedule(self) -> SplitKvSchedule | TokenSchedule:
        """Return the work tiles of this CTA."""

    @property
    def scale_log2(self) -> Float32:
        """Return the factor of the scores."""

    @property
    def empty_lse(self) -> Float32:
        """Return the lse of a row that attends to nothing."""

    def rows(self) -> Int32:
        """Return the number of query rows that attend to this CTA's keys."""

    def q_row(self, req: Int32, row: Int32) -> cute.Pointer:
        """Return element 0 of a query row."""

    def out_row(self, req: Int32, row: Int32) -> cute.Pointer:
        """Return element 0 of an output row."""

    def lse_of(self, req: Int32, row: Int32) -> cute.Pointer:
        """Return the lse of a query row."""


class SplitOperands(QueryOperands, Protocol):
    """Operands of an op whose requests may be split: rows of the fp32 accumulators."""

    @property
    def out_accum(self) -> cute.Pointer:
        """Return the fp32 rows of the split accumulators, contiguous."""

    @property
    def lse_accum(self) -> cute.Pointer:
        """Return the lse of every row of the split accumulators."""

    def accum_row(self, work_tile: WorkTile, row: Int32) -> Int64:
        """Return the number of a query row in the split accumulators."""


class SinkOperands(QueryOperands, Protocol):
    """Operands of an op with attention sinks."""

    @property
    def attn_sink(self) -> cute.Pointer:
        """Return fp32 [rows], natural log; a null pointer without sinks."""


class MaxLogitOperands(QueryOperands, Protocol):
    """Operands of an op that returns the greatest logit of every row."""

    def max_logit_of(self, req: Int32, row: Int32) -> cute.Pointer:
        """Return the greatest logit of a query row."""
