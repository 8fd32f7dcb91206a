"""cache_insert: normalises and rotates the keys of new tokens, writes them to a paged cache as cache_write does, and rotates queries.

A key is normalised over the columns that are values: in fp8_584, v41 and v41_paged, whose values include the rotary columns, over all 512;
elsewhere over those before the rotary columns. Rotary columns are 64, of which 2i and 2i + 1 are a pair. latent_512 and nope_528 have none.
"""

from __future__ import annotations

from typing import NamedTuple

from .abi import Float32, Int32, Int64, Pointer, params_of
from .cache_format import FP8_584, LATENT, V41, CacheFormat
from .cache_rows import CACHED, KEYS_PER_BLOCK, CacheRowsConfig, latent_columns, rotary_columns
from .mla import BF16, D_ROPE, DTYPES, ceil_div

WARPS = KEYS_PER_BLOCK
THREADS = 32 * WARPS
LANES = 8  # threads that take the rotary columns of a query, 16 bytes each
HEADS_AT_ONCE = 32 // LANES  # of a warp, all of one token
PASSES = 4
HEADS = HEADS_AT_ONCE * PASSES  # of a warp
MAX_QUERIES = 1 << 30  # tokens times heads


class CacheInsertArguments(NamedTuple):
    """Launch arguments of cache_insert, in ABI order: the one list that host, launch and kernel share."""

    kv_c: Pointer  # dtype [tokens, latent columns]
    k_pe: Pointer  # dtype [tokens, 64]; null for formats without rotary columns apart
    q_pe: Pointer  # dtype [tokens, heads, 64], in and out; null without heads
    norm_weight: Pointer  # dtype [normalised columns]
    positions: Pointer  # int64 or int32 [tokens], or null: token t is at position t
    cos_sin: Pointer  # fp32 [positions, 64]: the cosines of 32 pairs, then their sines; null for formats without rotary columns
    slot_mapping: Pointer  # int64 or int32 [tokens]; a slot outside [0, slots) is skipped
    descale_k: Pointer  # fp32 scalar of fp8_576, or null for 1
    k_cache: Pointer  # [pages, page size, row bytes]
    keys: Pointer  # dtype [tokens, columns of a key], out: normalised and rotated; or null
    epsilon: Float32  # added to the mean of squares
    kv_c_stride_token: Int64  # elements
    k_pe_stride_token: Int64
    q_pe_stride_token: Int64
    q_pe_stride_head: Int64
    position_stride_token: Int64
    cos_sin_stride_position: Int64
    slot_stride_token: Int64
    cache_stride_page: Int64  # bytes
    cache_stride_row: Int64
    keys_stride_token: Int64  # elements
    tokens: Int32
    heads: Int32
    groups: Int32  # warps that take a token's queries, 1 without heads
    key_blocks: Int32  # CTAs in front, which take keys; the others take queries
    table_rows: Int32  # positions of cos_sin; rotary columns at any other are NaN
    slots: Int32  # pages * page_size
    page_size: Int32
    wide_slots: Int32  # 1: slot_mapping is int64
    wide_positions: Int32  # 1: positions is int64
    power_of_two: Int32  # 1: fp32 scales are powers of two, as e8m0 scales always are


PARAMS = params_of(CacheInsertArguments)


def config_of(cache: CacheFormat, dtype: str) -> CacheRowsConfig:
    """Return the variant for a cache of this format and keys of this element type, "bf16" or "fp16"."""
    return CacheRowsConfig(cache.kernels, dtype)


def key_types(cache: CacheFormat) -> tuple[str, ...]:
    """Return the element types of keys and queries: fp16 where dense decode has it."""
    return DTYPES if cache is LATENT else (BF16,)


def rotates_values(cache: CacheFormat) -> bool:
    """Return whether the last 64 of a key's values are rotary columns."""
    return cache.kernels in (FP8_584.name, V41.name)


def normalised_columns(cache: CacheFormat) -> int:
    """Return the columns that a key is normalised over, which are its first."""
    return cache.d_qk if rotates_values(cache) else latent_columns(cache)


def rotates(cache: CacheFormat) -> bool:
    """Return whether keys have rotary columns."""
    return rotates_values(cache) or rotary_columns(cache) == D_ROPE


def groups(heads: int) -> int:
    """Return the warps that take a token's queries."""
    return ceil_div(heads, HEADS)


def key_blocks(tokens: int) -> int:
    """Return the CTAs that take keys."""
    return ceil_div(tokens, KEYS_PER_BLOCK)


def grid(tokens: int, heads: int) -> tuple[int, int, int]:
    """Return the CTAs along x, y and z: those of keys, then those of queries."""
    return key_blocks(tokens) + ceil_div(tokens * groups(heads), WARPS), 1, 1


def closed_variants() -> tuple[CacheRowsConfig, ...]:
    """Return every variant that ships, on each architecture."""
    return tuple(dict.fromkeys(config_of(cache, dtype) for cache in CACHED.values() for dtype in key_types(cache)))
