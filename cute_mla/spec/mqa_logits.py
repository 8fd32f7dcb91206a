"""mqa_logits: the indexer's scores of keys for query tokens, over e4m3 keys in a row or in the pages of an index cache.

    logit[t, s] = scale[s] * sum_h weight[t, h] * relu(<q[t, h], k[s]>)        128 columns, sums in fp32

A row block is BLOCK_COLUMNS columns of a product: BLOCK_COLUMNS / head_tile query tokens, each with head_tile heads, those behind the last
head zeros. With pages, all tokens of a block belong to one request. A work item is ITEM_BLOCKS row blocks, the last of a request maybe
fewer, against `chunk` consecutive tiles of keys; items are numbered by chunk, then row block, and CTA c takes the items c, c + CTAs, ...
Bits of a logit depend on its token, its key and the number of heads alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from .abi import Int32, Int64, Pointer, TensorMap, params_of
from .arch import SM90, SM120, Arch
from .mla import ceil_div

DTYPE = "e4m3"
COLUMNS = 128  # of q and of keys
SCALE_BYTES = 4  # of a key, fp32
ROW_BYTES = COLUMNS + SCALE_BYTES  # of a key in an index cache: the values of a page's keys, then their scales
BLOCK_COLUMNS = 128  # query tokens times heads of a row block
ITEM_BLOCKS = 2  # row blocks of a work item
HEAD_TILES = (32, 64)  # heads of a token within a row block
TILE_KEYS = 128
MAX_HEADS = max(HEAD_TILES)
PAGE_SIZES = (16, 32, 64, 128)  # of an index cache: a tile is whole pages
MAX_KEYS = 1 << 30  # so that every position is an int32
MIN_CHUNK_TILES, MAX_CHUNK_TILES = 4, 64  # of a work item
# In tiles, for the choice of a chunk: what an item costs besides its tiles, and, as a share of a chunk, what unequal lengths add to the
# CTA that ends last.
ITEM_COST, UNEVEN_SHARE = 1.0, 0.125


class MqaLogitsArguments(NamedTuple):
    """Launch arguments of mqa_logits, in ABI order: the one list that host, launch and kernel share."""

    q_map: TensorMap  # e4m3, dims (128, heads, tokens), box (128, head_tile, BLOCK_COLUMNS / head_tile), 128-byte swizzle
    # e4m3, 128-byte swizzle. Rows: dims (128, keys), box (128, TILE_KEYS). Pages: dims (128, page_size, pages), box (128, page_size, 1)
    k_map: TensorMap
    weights: Pointer  # fp32 [tokens, heads]
    scales: Pointer  # fp32 [keys]; of pages: uint8, the first byte behind the values of page 0
    first_keys: Pointer  # rows: int32 [tokens], clipped to 0 .. keys; pages: null
    end_keys: Pointer  # rows: int32 [tokens], clipped to 0 .. keys; pages: int32 [requests] or [requests, tokens_per_request]
    block_table: Pointer  # pages: int32 [requests, table_columns]; rows: null
    logits: Pointer  # fp32 [tokens, columns], out
    weights_stride_token: Int64  # elements
    scales_stride_page: Int64  # bytes
    table_stride: Int64  # elements
    logits_stride_token: Int64  # elements
    tokens: Int32  # of all requests
    heads: Int32
    tokens_per_request: Int32  # rows: 1
    keys: Int32  # rows: of all tokens; pages: the most of a request, which is what its row of the table holds, or less
    columns: Int32  # of logits
    page_size: Int32
    pages: Int32  # an entry of the table outside [0, pages) is a page of zeros with scales of 0
    chunk: Int32  # tiles of keys of a work item
    length_per_token: Int32  # 1: end_keys has an element a token; 0: token j of n sees end_keys[request] - n + 1 + j keys
    relative: Int32  # rows, 1: column j of a token is key first_keys[token] + j; 0: key j
    clean: Int32  # 1: columns of keys that a token does not see are -inf; 0: they are not written


PARAMS = params_of(MqaLogitsArguments)


@dataclass(frozen=True)
class MqaLogitsConfig:
    """One compiled variant. paged: where the keys lie. head_tile: heads of a token within a row block."""

    paged: bool
    head_tile: int
    dtype: str = DTYPE

    cluster = 1

    @property
    def block_tokens(self) -> int:
        """Query tokens of a row block."""
        return BLOCK_COLUMNS // self.head_tile

    @property
    def name(self) -> str:
        """The kernel's name in the manifest, without op and arch."""
        return f"{self.dtype}_{'pages' if self.paged else 'rows'}_h{self.head_tile}"


def order_terms(config: MqaLogitsConfig, arch: Arch) -> dict[str, Any]:
    """Return the terms of a variant's order, the same for keys in a row and in pages."""
    return {
        "op": "mqa_logits",
        "revision": 1,
        "arch": arch.name,
        "dtype": config.dtype,
        "columns": COLUMNS,
        "head_tile": config.head_tile,
        "heads": "in fp32, ascending in a thread, then a tree over a quad"
        if arch in (SM90, SM120)
        else "in fp32, neighbouring pairs apart, each ascending",
        "scale": "of the key, on the sum",
    }


@dataclass(frozen=True)
class MqaLogitsProblem:
    """The shapes of a call. They decide on variant and grid.

    requests: 1 without pages. tokens: query tokens of a request. keys: the most that a token sees.
    """

    paged: bool
    heads: int
    requests: int
    tokens: int
    keys: int

    @property
    def config(self) -> MqaLogitsConfig:
        """The variant that serves this problem."""
        return MqaLogitsConfig(self.paged, next(tile for tile in HEAD_TILES if self.heads <= tile))

    @property
    def row_blocks(self) -> int:
        """Row blocks of all requests."""
        return self.requests * ceil_div(self.tokens, self.config.block_tokens)

    @property
    def tiles(self) -> int:
        """Tiles of keys of a row block, at most."""
        return ceil_div(self.keys, TILE_KEYS)

    @property
    def item_rows(self) -> int:
        """Groups of ITEM_BLOCKS row blocks of all requests, each with items of its own."""
        return self.requests * ceil_div(self.tokens, ITEM_BLOCKS * self.config.block_tokens)

    def chunk(self, sm_count: int) -> int:
        """Return the tiles of a work item with which the CTA that has most to do ends first, if all tokens see all keys."""
        return _best_chunk(self.item_rows, self.tiles, sm_count)

    def items(self, sm_count: int) -> int:
        """Return the work items."""
        return self.item_rows * ceil_div(self.tiles, self.chunk(sm_count))

    def grid(self, sm_count: int) -> tuple[int, int, int]:
        """Return the CTAs along x, y and z: one an SM, or fewer."""
        return max(min(self.items(sm_count), sm_count), 1), 1, 1


@lru_cache(maxsize=4096)
def _best_chunk(item_rows: int, tiles: int, sm_count: int) -> int:
    return min(range(MIN_CHUNK_TILES, MAX_CHUNK_TILES + 1), key=lambda chunk: chunk_cost(item_rows, tiles, chunk, sm_count))


def chunk_cost(item_rows: int, tiles: int, chunk: int, sm_count: int) -> float:
    """Return the time, in tiles, that a chunk leads to: that of the CTA with most to do, and what unequal lengths add to it.

    CTA 0 has as many whole items as any, and the first CTA behind the last whole item is the first to have a shorter one.
    """
    whole = max(tiles - 1, 0) // chunk  # chunks before the last one
    each, more = divmod(item_rows * whole, sm_count)
    most = each * (chunk + ITEM_COST) + ceil_div(item_rows, sm_count) * (tiles - whole * chunk + ITEM_COST)
    if more:
        shorter = max(ceil_div(item_rows - sm_count + more, sm_count), 0)
        most = max(most, (each + 1) * (chunk + ITEM_COST) + shorter * (tiles - whole * chunk + ITEM_COST))
    return most + UNEVEN_SHARE * chunk


def closed_variants() -> tuple[MqaLogitsConfig, ...]:
    """Return every variant that ships, on each architecture."""
    return tuple(MqaLogitsConfig(paged, head_tile) for paged in (False, True) for head_tile in HEAD_TILES)
