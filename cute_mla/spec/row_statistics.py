"""row_statistics: what the backward of sparse prefill needs of each query row: its lse with the sink, and delta.

    lse' = ln(e^lse + e^sink)     delta = <out, dout>     delta' = delta - dlse e^(lse' - lse)     d_sink term = -e^(sink - lse') delta

P is exp(score - lse') and dS is P (dP - delta'). A row whose lse is infinite, or whose sink is +inf, gets lse' +inf: its P is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .abi import Int32, Int64, Pointer, params_of
from .mla import BF16, ceil_div

ROWS_PER_BLOCK = 8  # one warp has one row (token, head)
STATISTICS = 2  # of a row: lse' * log2(e), delta'


class RowStatisticsArguments(NamedTuple):
    """Launch arguments of row_statistics, in ABI order: the one list that host, launch and kernel share."""

    out: Pointer  # bf16 [batch, s_q, h_q, 512]
    dout: Pointer  # bf16, likewise
    lse: Pointer  # fp32 [batch, s_q, h_q], natural log, without the sink
    dlse: Pointer  # fp32 [batch, s_q, h_q] contiguous: gradient of lse; null: 0
    attn_sink: Pointer  # fp32 [h_q], natural log, or null
    statistics: Pointer  # fp32 [2, batch * s_q, h_q], out
    sink_terms: Pointer  # fp32 [batch * s_q, h_q], out: what each row adds to d_sink; null without attn_sink
    # in elements; those of out and dout are multiples of 8
    out_stride_batch: Int64
    out_stride_token: Int64
    out_stride_head: Int64
    dout_stride_batch: Int64
    dout_stride_token: Int64
    dout_stride_head: Int64
    lse_stride_batch: Int64
    lse_stride_token: Int64
    lse_stride_head: Int64
    rows: Int32  # batch * s_q * h_q
    s_q: Int32
    h_q: Int32


PARAMS = params_of(RowStatisticsArguments)
MAX_ROWS = (1 << 31) - ROWS_PER_BLOCK


@dataclass(frozen=True)
class RowStatisticsConfig:
    """The only variant: the element type of out and dout."""

    dtype: str

    @property
    def name(self) -> str:
        """The kernel's name in the manifest, without op and arch."""
        return self.dtype


def grid(rows: int) -> tuple[int, int, int]:
    """Return the CTAs along x, y and z."""
    return ceil_div(rows, ROWS_PER_BLOCK), 1, 1


def closed_variants() -> tuple[RowStatisticsConfig, ...]:
    """Return every variant that ships, on each architecture."""
    return (RowStatisticsConfig(BF16),)
