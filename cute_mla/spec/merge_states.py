"""merge_states: merges attention over disjoint sets of keys: chunks of a long context, or shares of it on several ranks.

out = sum_s w_s out_s / sum_s w_s,  lse = ln sum_s exp(lse_s),  with w_s = exp(lse_s - max lse). A state whose lse is infinite, of either
sign, attended to nothing and has weight 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .abi import Float32, Int32, Int64, Pointer, params_of
from .mla import DTYPES, VALUE_COLUMNS, ceil_div

ROWS_PER_BLOCK = 8  # one warp merges one row (token, head)
LISTED_STATES = 8  # states with a pointer each; more states have one stride between them
MAX_TOKENS = (1 << 31) - 1  # over the batch: the grid's first dimension
MAX_HEADS = 65_535 * ROWS_PER_BLOCK  # its second
HEAD_DIMS = (*VALUE_COLUMNS, 128)  # columns of a row: of decode and sparse prefill, and of dense prefill


class MergeStatesArguments(NamedTuple):
    """Launch arguments of merge_states, in ABI order: the one list that host, launch and kernel share."""

    # dtype [batch, tokens, heads, head_dim]: one pointer per state; with a stride between states, a pointer to the first. The other
    # pointers are null
    state_out_0: Pointer
    state_out_1: Pointer
    state_out_2: Pointer
    state_out_3: Pointer
    state_out_4: Pointer
    state_out_5: Pointer
    state_out_6: Pointer
    state_out_7: Pointer
    # fp32 [batch, tokens, heads], natural log, likewise
    state_lse_0: Pointer
    state_lse_1: Pointer
    state_lse_2: Pointer
    state_lse_3: Pointer
    state_lse_4: Pointer
    state_lse_5: Pointer
    state_lse_6: Pointer
    state_lse_7: Pointer
    out: Pointer  # dtype [batch, tokens, heads, head_dim]; may be one of the states
    lse: Pointer  # fp32 [batch, tokens, heads]; may be one of the states'
    # in elements
    state_out_stride_state: Int64  # 0: every state has a pointer
    state_lse_stride_state: Int64
    state_out_stride_batch: Int64
    state_out_stride_token: Int64
    state_out_stride_head: Int64
    state_lse_stride_batch: Int64
    state_lse_stride_token: Int64
    state_lse_stride_head: Int64
    out_stride_batch: Int64
    out_stride_token: Int64
    out_stride_head: Int64
    lse_stride_batch: Int64
    lse_stride_token: Int64
    lse_stride_head: Int64
    empty_lse: Float32  # lse of a row of which every state is empty
    tokens: Int32
    heads: Int32
    states: Int32


PARAMS = params_of(MergeStatesArguments)


@dataclass(frozen=True)
class MergeStatesConfig:
    """One compiled variant: element type of the outs, and their columns."""

    dtype: str
    head_dim: int

    @property
    def name(self) -> str:
        """The kernel's name in the manifest, without op and arch."""
        return f"{self.dtype}_d{self.head_dim}"


def grid(batch: int, tokens: int, heads: int) -> tuple[int, int, int]:
    """Return the CTAs along (batch * tokens, blocks of heads, 1)."""
    return batch * tokens, ceil_div(heads, ROWS_PER_BLOCK), 1


def row_dtypes(head_dim: int) -> tuple[str, ...]:
    """Return the element types of rows of this many columns: those of 256 are results of decode and prefill that have bf16 alone."""
    return DTYPES[:1] if head_dim == HEAD_DIMS[1] else DTYPES


def closed_variants() -> tuple[MergeStatesConfig, ...]:
    """Return every variant that ships, on each architecture."""
    return tuple(MergeStatesConfig(dtype, head_dim) for dtype in DTYPES for head_dim in HEAD_DIMS if dtype in row_dtypes(head_dim))
