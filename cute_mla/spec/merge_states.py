"""merge_states: merges attention over disjoint sets of keys: chunks of a long context, or shares of it on several ranks.

out = sum_s w_s out_s / sum_s w_s,  lse = ln sum_s exp(lse_s),  with w_s = exp(lse_s - max lse). A state whose lse is infinite, of either
sign, attended to nothing and has weight 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from .abi import Param, float32s, int32s, int64s, pointers
from .mla import DTYPES, ceil_div

ROWS_PER_BLOCK = 8  # one warp merges one row (token, head)
LISTED_STATES = 8  # states with a pointer each; more states have one stride between them
MAX_TOKENS = (1 << 31) - 1  # over the batch: the grid's first dimension
MAX_HEADS = 65_535 * ROWS_PER_BLOCK  # its second
HEAD_DIMS = (512, 128)  # columns of a row: of decode and sparse prefill, and of dense prefill

PARAMS: tuple[Param, ...] = (
    # dtype [batch, tokens, heads, head_dim]: one pointer per state; with a stride between states, a pointer to the first. The other
    # pointers are null
    *pointers(*(f"state_out_{state}" for state in range(LISTED_STATES))),
    *pointers(*(f"state_lse_{state}" for state in range(LISTED_STATES))),  # fp32 [batch, tokens, heads], natural log, likewise
    *pointers(
        "out",  # dtype [batch, tokens, heads, head_dim]; may be one of the states
        "lse",  # fp32 [batch, tokens, heads]; may be one of the states'
    ),
    # in elements
    *int64s(
        "state_out_stride_state",  # 0: every state has a pointer
        "state_lse_stride_state",
    ),
    *int64s(
        "state_out_stride_batch",
        "state_out_stride_token",
        "state_out_stride_head",
        "state_lse_stride_batch",
        "state_lse_stride_token",
        "state_lse_stride_head",
        "out_stride_batch",
        "out_stride_token",
        "out_stride_head",
        "lse_stride_batch",
        "lse_stride_token",
        "lse_stride_head",
    ),
    *float32s("empty_lse"),  # lse of a row of which every state is empty
    *int32s("tokens", "heads", "states"),
)


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


def closed_variants() -> tuple[MergeStatesConfig, ...]:
    """Return every variant that ships, on each architecture."""
    return tuple(MergeStatesConfig(dtype, head_dim) for dtype in DTYPES for head_dim in HEAD_DIMS)
