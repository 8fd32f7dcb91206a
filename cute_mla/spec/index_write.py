"""index_write: the indexer's keys into an index cache, and its queries likewise rotated and quantised.

A row has 128 columns. Its first 64 are rotated, all may be transformed by Hadamard's matrix, and all share one scale, a power of two.
Keys are normalised first: LayerNorm with a weight and a bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from .abi import Float32, Int32, Int64, Pointer, params_of
from .mla import ceil_div
from .mqa_logits import COLUMNS, MAX_KEYS

Rows = Literal["keys", "queries"]
Rope = Literal["half_split", "interleaved"]
ScaleFormat = Literal["fp32", "ue8m0"]

DTYPE = "bf16"  # of rows
ROTARY = 64  # first columns of a row, which are rotated
LANES = 16  # threads of a row
THREADS = 128
ROWS_PER_BLOCK = THREADS // LANES
MAX_ROWS = MAX_KEYS

LEAST_AMAX = 1e-4  # a row's largest magnitude is taken to be at least this, as in DeepSeek's and DeepGEMM's quantisers
HADAMARD_SCALE = COLUMNS**-0.5


class IndexWriteArguments(NamedTuple):
    """Launch arguments of index_write, in ABI order: the one list that host, launch and kernel share."""

    rows: Pointer  # bf16 [tokens, heads, 128]; keys have one head
    slot_mapping: Pointer  # keys: int64 or int32 [tokens], a slot outside [0, slots) is skipped; queries: null
    positions: Pointer  # int64 or int32 [tokens], or null: token t is at position t
    cos_sin: Pointer  # fp32 [positions, 64]: the cosines of 32 pairs of columns, then their sines
    norm_weight: Pointer  # keys: fp32 [128]; queries: null, as the next
    norm_bias: Pointer
    weights: Pointer  # queries: fp32 or bf16 [tokens, heads]; keys: null
    # out, keys: uint8 [pages, page size * 132], in each page the values of its keys, then 4 bytes a key; queries: e4m3 [tokens, heads, 128]
    codes: Pointer
    scaled_weights: Pointer  # queries: fp32 [tokens, heads], out; keys: null
    epsilon: Float32  # keys: added to the variance
    factor: Float32  # queries: of all weights
    rows_stride_token: Int64  # elements, as all strides but those of codes
    rows_stride_head: Int64
    slot_stride_token: Int64
    position_stride_token: Int64
    cos_sin_stride_position: Int64
    weights_stride_token: Int64
    codes_stride_first: Int64  # bytes: from page to page, from token to token
    codes_stride_head: Int64  # bytes
    scaled_weights_stride_token: Int64
    row_count: Int32  # tokens * heads
    heads: Int32
    table_rows: Int32  # positions of cos_sin; a row at any other is NaN
    slots: Int32  # pages * page size
    page_size: Int32
    wide_slots: Int32  # 1: slot_mapping is int64
    wide_positions: Int32  # 1: positions is int64
    wide_weights: Int32  # 1: weights are fp32
    half_split: Int32  # 1: columns i and i + 32 are a pair; 0: columns 2i and 2i + 1
    hadamard: Int32  # 1: columns are transformed behind the rotation
    exponents: Int32  # keys, 1: a scale is four equal e8m0 bytes; 0: fp32


PARAMS = params_of(IndexWriteArguments)


@dataclass(frozen=True)
class IndexWriteConfig:
    """One compiled variant: what rows are, and their element type."""

    rows: Rows
    dtype: str = DTYPE

    @property
    def name(self) -> str:
        """The kernel's name in the manifest, without op and arch."""
        return f"{self.dtype}_{self.rows}"


def grid(rows: int) -> tuple[int, int, int]:
    """Return the CTAs along x, y and z."""
    return ceil_div(rows, ROWS_PER_BLOCK), 1, 1


def closed_variants() -> tuple[IndexWriteConfig, ...]:
    """Return every variant that ships, on each architecture."""
    return (IndexWriteConfig("keys"), IndexWriteConfig("queries"))
