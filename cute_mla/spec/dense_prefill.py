"""Dense prefill: attention of packed sequences over their own keys and values, decompressed per head, forward only.

out = softmax(softmax_scale * q k^T) v for each sequence and query head; query heads share the keys of a KV head in groups.

A work item is TILE_ROWS query rows of one head of one sequence. Runs of consecutive items are sorted, the most keys first, and dealt to
the CTAs in alternating direction, so that a CTA with a long item gets a short one next. A run is RANKED_ROUNDS items a CTA, of few
enough heads that L2 holds their keys.

On sm90 and sm120 a run has the items of some heads of neighbouring sequences: as many sequences as a warp has lanes, or fewer if these
alone have more items, and as many heads as then fit. Each run begins TURNED_EIGHTHS / 8 of the CTAs further than the one before, so
that no CTA gets the odd item of every run.

On sm100 items are numbered by sequence, then head, then block of rows, the last block in front (under a causal mask it has the most keys);
every sequence has as many as the longest may have, and kernels skip those that it does not have. A run is sorted by block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from .abi import Float32, Int32, Int64, Pointer, TensorMap, params_of
from .arch import SM90, SM100, SM120, Arch
from .dense_decode import SOFTMAX_TERMS
from .mla import DTYPES, ceil_div

HEAD_DIMS = {192: 128, 128: 128, 256: 256}  # columns of q and k, and those of v and out that go with them
TILE_ROWS = {SM90.name: 128, SM100.name: 256, SM120.name: 128}  # query rows of one work item
BOX_COLUMNS = 64  # of all boxes: 128 swizzled bytes
BOX_ROWS = 64  # of boxes of k and v, where they divide a tile; of q at most
# Keys of a tile by columns of v. With 256 columns, on sm90 and sm120 O takes half of the registers: what they hold beside it.
TILE_KEYS = {SM90.name: {128: 128, 256: 80}, SM100.name: {128: 128, 256: 128}, SM120.name: {128: 64, 256: 32}}
ROW_BYTES = 16  # every row of q, k, v and out begins at a multiple of so many bytes
MAX_ITEMS = (1 << 31) - 1
MAX_TOKENS = (1 << 31) - max(TILE_ROWS.values())  # of q, and of k and v: the end of the last tile can be counted in 32 bits
RANKED_ROUNDS = 4  # 132 CTAs: keys of 67,584 rows, 43 MB with 192 columns; with 2, causal calls take up to 8 % longer in a model
LANE_BITS = 5  # of a warp, which sorts that many sequences together
TURNED_EIGHTHS = 5  # of the CTAs: by how many the first of a run is further than that of the run before


class DensePrefillArguments(NamedTuple):
    """Launch arguments of dense_prefill, in ABI order: the one list that host, launch and kernel share."""

    q_map: TensorMap  # dims (d_qk, h_q, total_q), box (64, 1, query_box_rows), 128-byte swizzle
    k_map: TensorMap  # dims (d_qk, h_kv, total_k), box (64, 1, key_box_rows), likewise
    v_map: TensorMap  # dims (d_v, h_kv, total_k), likewise
    q: Pointer  # dtype [total_q, h_q, d_qk]
    cu_seqlens_q: Pointer  # int32 [batch + 1]: a sequence's query rows are cu[r] .. cu[r + 1] - 1, clipped to 0 .. total_q
    cu_seqlens_k: Pointer  # int32 [batch + 1]: its keys, clipped to 0 .. total_k
    out: Pointer  # dtype [total_q, h_q, d_v]
    lse: Pointer  # fp32 [total_q, h_q], natural log
    # in elements
    q_stride_token: Int64
    q_stride_head: Int64
    out_stride_token: Int64
    out_stride_head: Int64
    lse_stride_token: Int64
    lse_stride_head: Int64
    scale_log2: Float32  # softmax_scale * log2(e)
    empty_lse: Float32  # lse of a row that attends to nothing
    batch: Int32
    h_q: Int32
    heads_per_kv: Int32  # h_q / h_kv
    total_q: Int32
    total_k: Int32
    row_blocks: Int32  # blocks of TILE_ROWS query rows that the longest sequence may have
    causal: Int32  # 1: query i of s_q sees key j of s_k iff j <= i + s_k - s_q


PARAMS = params_of(DensePrefillArguments)


@dataclass(frozen=True)
class DensePrefillConfig:
    """One compiled variant.

    dtype: element type of q, k, v and out. d_qk: columns of q and k.
    cluster: CTAs that take a work item together.
    """

    dtype: str
    d_qk: int
    cluster: int = 1

    @property
    def d_v(self) -> int:
        """Columns of v and out."""
        return HEAD_DIMS[self.d_qk]

    def tile_keys(self, arch: Arch) -> int:
        """Keys of one tile."""
        return TILE_KEYS[arch.name][self.d_v]

    def query_box_rows(self, arch: Arch) -> int:
        """Rows of the boxes of q."""
        return min(BOX_ROWS, self.tile_keys(arch))

    def key_box_rows(self, arch: Arch) -> int:
        """Rows of the boxes of k and v."""
        keys = self.tile_keys(arch)
        return keys if keys % BOX_ROWS else BOX_ROWS

    @property
    def name(self) -> str:
        """The kernel's name in the manifest, without op and arch."""
        return f"{self.dtype}_d{self.d_qk}"


def order_terms(config: DensePrefillConfig, arch: Arch) -> dict[str, Any]:
    """Return the terms of a variant's order."""
    on_fma = {"exp": "exp2 of an fp32 fma; 2 of 8 pairs a polynomial of degree 5"} if arch is SM100 and config.cluster == 1 else {}
    return {
        "op": "dense_prefill",
        "revision": 1,
        "arch": arch.name,
        "dtype": config.dtype,
        "d_qk": config.d_qk,
        "keys": f"tiles of {config.tile_keys(arch)} of a sequence, the last of {TILE_ROWS[arch.name]} query rows first",
        "split": "none",
        **SOFTMAX_TERMS,
        **on_fma,
        "p": f"{config.dtype}, unnormalised",
    }


@dataclass(frozen=True)
class DensePrefillProblem:
    """The shapes of one call. They decide, with the architecture, on variant and grid.

    max_seqlen_q: query rows of the longest sequence.
    """

    arch: Arch
    dtype: str
    d_qk: int
    batch: int
    h_q: int
    h_kv: int
    max_seqlen_q: int

    @property
    def config(self) -> DensePrefillConfig:
        """The variant that serves this problem."""
        return variant(self.arch, self.dtype, self.d_qk)

    @property
    def row_blocks(self) -> int:
        """Blocks of query rows that a sequence may have."""
        return ceil_div(self.max_seqlen_q, TILE_ROWS[self.arch.name])

    @property
    def items(self) -> int:
        """Work items, including those of blocks that a sequence may not have."""
        return self.row_blocks * self.batch * self.h_q

    @property
    def sorts_sequences(self) -> bool:
        """Return whether items of several sequences are sorted together."""
        return self.arch.name != SM100.name

    def grid(self, sm_count: int) -> tuple[int, int, int]:
        """Return one CTA per SM, or as many as an item takes per item if there are fewer items."""
        cluster = self.config.cluster
        return min(self.items, max(sm_count // cluster, 1)) * cluster, 1, 1


def head_dtypes(d_qk: int) -> tuple[str, ...]:
    """Return the element types of heads with this many columns of q and k: models whose values have 256 columns have bf16."""
    return DTYPES if HEAD_DIMS[d_qk] == HEAD_DIMS[128] else DTYPES[:1]


def variant(arch: Arch, dtype: str, d_qk: int) -> DensePrefillConfig:
    """Return the variant of an architecture. On sm100 pairs of CTAs take items of heads of 256 columns."""
    paired = arch.name == SM100.name and HEAD_DIMS[d_qk] > HEAD_DIMS[128]
    return DensePrefillConfig(dtype, d_qk, 2 if paired else 1)


def closed_variants(arch: Arch) -> tuple[DensePrefillConfig, ...]:
    """Return every variant that ships for an architecture."""
    return tuple(variant(arch, dtype, d_qk) for dtype in DTYPES for d_qk in HEAD_DIMS if dtype in head_dtypes(d_qk))
