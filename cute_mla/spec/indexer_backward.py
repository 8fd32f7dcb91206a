"""indexer_backward: gradients of an indexer's scores at the keys that each query token has chosen.

    score_tj = sum_h w_th relu(<q_th, k_j>)     g_thj = d_tj w_th where <q_th, k_j> > 0, else 0
    dq_th = sum_j g_thj k_j                     dw_th = sum_j d_tj relu(<q_th, k_j>)         row_tj = sum_h g_thj q_th

d is the gradient of the scores. Row t * topk + j is that of entry t * topk + j in key_lists, whose row_sums add up to the gradient of the
keys. A launch takes a chunk of tokens. Rows of slots that name no key are not written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .abi import Int32, Int64, Pointer, params_of
from .mla import BF16


class IndexerBackwardArguments(NamedTuple):
    """Launch arguments of indexer_backward, in ABI order: the one list that host, launch and kernel share."""

    q: Pointer  # bf16 [batch, s_q, h_q, 128]
    kv: Pointer  # bf16: the indexer's keys, as in HeadSumsArguments, as the next three
    kv_offsets: Pointer
    indices: Pointer
    topk_length: Pointer
    terms: Pointer  # fp32 [batch, s_q, h_q]: weights of the heads
    dscores: Pointer  # fp32 [batch * s_q, topk]
    dq: Pointer  # bf16 [batch * s_q, h_q, 128], out
    dweights: Pointer  # fp32 [batch * s_q, h_q], out
    rows: Pointer  # bf16 [tokens * topk, 128], out: of the chunk
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
    first_token: Int32  # of the chunk, counted over the batch
    tokens: Int32  # of the chunk
    s_q: Int32
    h_q: Int32
    s_kv: Int32
    topk: Int32


PARAMS = params_of(IndexerBackwardArguments)


@dataclass(frozen=True)
class IndexerBackwardConfig:
    """The only variant: the element type of queries and keys."""

    dtype: str

    @property
    def name(self) -> str:
        """The kernel's name in the manifest, without op and arch."""
        return self.dtype


def closed_variants() -> tuple[IndexerBackwardConfig, ...]:
    """Return every variant that ships, on each architecture."""
    return (IndexerBackwardConfig(BF16),)
