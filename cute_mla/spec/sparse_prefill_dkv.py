"""sparse_prefill_dkv: what each query token adds to the gradient of each row that it has chosen.

rows[t, j] = sum_h dS[t, h, j] q[t, h, :] + P[t, h, j] dout[t, h, :] in the first 512 columns, as bf16, with dS and P as sparse_prefill_dq
leaves them. Row t * topk + j is that of entry t * topk + j in key_lists, whose row_sums add up to dkv. dS is without the scale of the
scores, and P divided by it, so that one factor at the end of the sum serves both.

A launch takes a chunk of tokens. Rows of indices that name no row of kv are not written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .abi import Int32, Int64, Pointer, TensorMap, params_of
from .arch import Arch
from .dense_decode import TILE_ROWS
from .mla import BF16, MAX_HEADS, ceil_div
from .sparse_prefill import HEAD_DIMS
from .split_plan import TILE_KEYS

HEAD_TILES = tuple(range(1, MAX_HEADS // TILE_ROWS + 1))  # of 64 heads each


class SparsePrefillDkvArguments(NamedTuple):
    """Launch arguments of sparse_prefill_dkv, in ABI order: the one list that host, launch and kernel share."""

    q_map: TensorMap  # dims (d_qk, h_q, s_q, batch), box (64, 64, 1, 1), 128-byte swizzle
    dout_map: TensorMap  # dims (512, h_q, s_q, batch), likewise
    probs_map: TensorMap  # P: dims (64, h_q, tokens * tiles), box (64, 64, 1), likewise; of the chunk
    dscores_map: TensorMap  # dS, likewise
    indices: Pointer  # int32 [batch, s_q, topk], as in SparsePrefillArguments
    topk_length: Pointer  # int32 [batch * s_q], or null
    kv_offsets: Pointer  # int32 [batch + 1], or null
    rows: Pointer  # bf16 [tokens * topk, d_qk], out
    # in elements
    indices_stride_batch: Int64
    indices_stride_token: Int64
    first_token: Int32  # of the chunk, counted over the batch
    tokens: Int32  # of the chunk
    s_q: Int32
    s_kv: Int32
    topk: Int32
    tiles: Int32  # of 64 slots, that P and dS have room for: ceil(topk / 64)


PARAMS = params_of(SparsePrefillDkvArguments)


@dataclass(frozen=True)
class SparsePrefillDkvConfig:
    """One compiled variant.

    dtype: of all operands and results. d_qk: columns of a row, 576 or 512. head_tiles: of 64 heads. With two, two CTAs share a token: each
    has all heads, and half of the latent columns.
    """

    dtype: str
    d_qk: int
    head_tiles: int

    cluster = 1

    @property
    def name(self) -> str:
        """The kernel's name in the manifest, without op and arch."""
        return f"{self.dtype}_d{self.d_qk}_heads{self.head_tiles * TILE_ROWS}"

    @property
    def column_groups(self) -> int:
        """Return the CTAs that share a token, by columns."""
        return self.head_tiles

    def grid(self, tokens: int, sm_count: int) -> tuple[int, int, int]:
        """Return the CTAs along (groups of columns, 1, tokens that run at the same time)."""
        return self.column_groups, 1, min(max(sm_count // self.column_groups, 1), tokens)


def config_for(d_qk: int, h_q: int) -> SparsePrefillDkvConfig:
    """Return the variant for rows of d_qk columns and h_q heads."""
    return SparsePrefillDkvConfig(BF16, d_qk, ceil_div(h_q, TILE_ROWS))


def tiles(topk: int) -> int:
    """Return the tiles of a token."""
    return ceil_div(topk, TILE_KEYS)


def closed_variants(arch: Arch) -> tuple[SparsePrefillDkvConfig, ...]:
    """Return every variant that ships for an architecture."""
    return tuple(SparsePrefillDkvConfig(BF16, d_qk, head_tiles) for d_qk in HEAD_DIMS for head_tiles in HEAD_TILES)
