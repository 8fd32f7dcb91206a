"""combine: merges the splits of each request, out = sum_s w_s out_s / sum_s w_s with w_s = 2^(lse_s - max lse).

An attention sink is one more key without a value: it enters the sum below, not lse, and only here, where out is final.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .abi import Float32, Int32, Int64, Pointer, params_of
from .mla import D_V, ceil_div

ROWS_PER_BLOCK = 8  # at most; a warp merges one row (query token, head), or a part of its columns
BLOCK_COLUMNS = 128  # of out that a CTA has where one warp per row would leave multiprocessors idle; else all
NARROW_COLUMNS = 64  # where as many CTAs run at once
COLUMN_BLOCKS, NARROW_BLOCKS = D_V // BLOCK_COLUMNS, D_V // NARROW_COLUMNS  # along z, of 512 columns
RESIDENT_BLOCKS = 2  # CTAs that an SM holds at once
BLOCKS_PER_SM = RESIDENT_BLOCKS  # at most: a CTA that comes later costs its start, one without anything to merge too


class CombineArguments(NamedTuple):
    """Launch arguments of combine, in ABI order: the one list that host, launch and kernel share."""

    lengths: Pointer  # as in split_plan
    extra_lengths: Pointer
    num_splits: Pointer  # int32 [batch + 1]
    attn_sink: Pointer  # fp32 [h_q], natural log, or null: out is scaled by exp(lse) / (exp(lse) + exp(sink)); lse is not
    out_accum: Pointer  # fp32 [accumulator rows, s_q, h_q, d_v]
    lse_accum: Pointer  # fp32 [accumulator rows, s_q, h_q], base 2
    out: Pointer  # dtype [batch, s_q, h_q, d_v]
    lse: Pointer  # fp32 [batch, h_q, s_q], natural log
    cu_seqlens_q: Pointer  # int32 [requests + 1], as in split_plan, where every query token is a unit; else null
    units: Pointer  # int32 [batch, 8], the table of units of split_plan, or null
    out_stride_batch: Int64
    out_stride_token: Int64
    out_stride_head: Int64
    lse_stride_batch: Int64
    lse_stride_head: Int64
    lse_stride_token: Int64
    empty_lse: Float32
    batch: Int32
    s_q: Int32
    h_q: Int32
    max_keys: Int32  # as in split_plan
    extra_max_keys: Int32
    max_splits: Int32  # as in dense_decode: if not 0, a request uses ceil(tiles / INVARIANT_SPLIT_TILES) of that many rows
    accum_rows: Int32  # rows of out_accum and lse_accum: nothing beyond them is read, whatever num_splits says
    # requests with different numbers of query tokens: batch counts units, s_q is unit_tokens, batch strides are 0
    requests: Int32
    total_q: Int32
    causal: Int32  # 1: a unit has no keys that only later query tokens of its request see, as in dense_decode
    reach: Int32  # as in split_plan
    sink_tiles: Int32


PARAMS = params_of(CombineArguments)


def grid(batch: int, s_q: int, h_q: int, sm_count: int, d_v: int = D_V) -> tuple[int, int, int]:
    """Return the CTAs along (batch * s_q, heads, blocks of columns).

    The CTAs of the first dimension take the query tokens in turn, those of the second the heads. Where all CTAs run at once they may have
    fewer heads each. The bits of the result do not depend on the grid.
    """
    tokens, head_blocks = batch * s_q, ceil_div(h_q, ROWS_PER_BLOCK)
    column_blocks, narrow_blocks = d_v // BLOCK_COLUMNS, d_v // NARROW_COLUMNS
    resident = RESIDENT_BLOCKS * sm_count
    if tokens * head_blocks * narrow_blocks <= resident:
        return tokens, min(resident // (tokens * narrow_blocks), h_q), narrow_blocks
    columns = column_blocks if tokens * head_blocks <= resident else 1
    return min(tokens, max(BLOCKS_PER_SM * sm_count // (head_blocks * columns), 1)), head_blocks, columns


@dataclass(frozen=True)
class CombineConfig:
    """One compiled variant: the element type of out, and its columns."""

    dtype: str
    d_v: int = D_V

    @property
    def name(self) -> str:
        """The kernel's name in the manifest, without op and arch."""
        return self.dtype if self.d_v == D_V else f"{self.dtype}_d{self.d_v}"
