"""head_sums: a function of every head's score, summed over the heads, at the keys that each query token has chosen.

    probs    sum_h exp(sm_scale <q_h, k_j> - lse'_h), with lse' = ln(e^lse + e^sink)     what an indexer is trained to predict
    scores   sum_h weight_h relu(<q_h, k_j>)                                             what an indexer predicts

Keys are named by the indices of sparse prefill. A slot that names no key gets 0 as a probability and -inf as a score.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from .abi import Float32, Int32, Int64, Pointer, params_of
from .mla import BF16, MAX_HEADS
from .sparse_prefill import HEAD_DIMS

Kind = Literal["probs", "scores"]

INDEX_COLUMNS = 128  # of an indexer's queries and keys
INDEX_HEADS = 64  # at most
MAX_TOKENS = (1 << 31) - 1  # the grid's first dimension


class HeadSumsArguments(NamedTuple):
    """Launch arguments of head_sums, in ABI order: the one list that host, launch and kernel share."""

    q: Pointer  # bf16 [batch, s_q, h_q, columns]
    kv: Pointer  # bf16: keys, as in SparsePrefillArguments, as the next three
    kv_offsets: Pointer
    indices: Pointer
    topk_length: Pointer
    terms: Pointer  # fp32 [batch, s_q, h_q]: lse of the heads, natural log, without the sink; or their weights
    attn_sink: Pointer  # fp32 [h_q], natural log, or null: of probs
    sums: Pointer  # fp32 [batch * s_q, topk], out
    # in elements; those of q are multiples of 8
    q_stride_batch: Int64
    q_stride_token: Int64
    q_stride_head: Int64
    terms_stride_batch: Int64
    terms_stride_token: Int64
    terms_stride_head: Int64
    indices_stride_batch: Int64
    indices_stride_token: Int64
    # in bytes, multiples of 16
    kv_stride_batch: Int64
    kv_stride_row: Int64
    scale_log2: Float32  # sm_scale * log2(e): of probs
    tokens: Int32  # batch * s_q
    s_q: Int32
    h_q: Int32
    s_kv: Int32
    topk: Int32


PARAMS = params_of(HeadSumsArguments)


@dataclass(frozen=True)
class HeadSumsConfig:
    """One compiled variant: the element type of queries and keys, what is summed, and columns of a key."""

    dtype: str
    kind: Kind
    columns: int

    @property
    def name(self) -> str:
        """The kernel's name in the manifest, without op and arch."""
        return f"{self.dtype}_{self.kind}_d{self.columns}"

    @property
    def heads(self) -> int:
        """Return the most heads."""
        return MAX_HEADS if self.kind == "probs" else INDEX_HEADS


def closed_variants() -> tuple[HeadSumsConfig, ...]:
    """Return every variant that ships, on each architecture."""
    return (*(HeadSumsConfig(BF16, "probs", columns) for columns in HEAD_DIMS), HeadSumsConfig(BF16, "scores", INDEX_COLUMNS))
