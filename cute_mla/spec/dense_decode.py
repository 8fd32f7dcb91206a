"""Dense decode: MQA over the paged latent cache. out = softmax(scale * q k^T) v with k = cache rows, v = their latent columns.

The cache holds 16-bit elements, or e4m3 with one scale for all of it, k = descale_k * cache; then q may be e4m3, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .abi import Float32, Int32, Int64, Pointer, TensorMap, params_of
from .arch import SM90, SM100, SM120, Arch
from .mla import BF16, D_QK, D_V, D_WIDE, DENSE_DIMS, WIDE_DIMS, LatentDims, ceil_div, key_dtypes
from .split_plan import ALONE_WHOLE_EIGHTHS, INVARIANT_SPLIT, MAX_PARTS, TILE_KEYS, invariant_splits

TILE_ROWS = 64  # query rows (query token x head) of one CTA
UNIT_ROWS = 2 * TILE_ROWS  # of a work unit where requests have different numbers of query tokens
MAX_ROW_ALIGNMENT = 16  # bytes, the most that one instruction of a thread accesses
MAX_KEYS = (1 << 31) - TILE_KEYS  # of a request, so that its tiles can be counted in 32 bits
SMALL_PAGES = (16, 32)  # pages smaller than a key tile; beside them any multiple of TILE_KEYS


# Masks. The keys that query token i sees of a request of `length` keys, of which the last s_q are the new tokens:
ALL_KEYS = 0
CAUSAL = 1  # j < length - (s_q - 1 - i)
TREE = 2  # all before the new tokens, and new token j if bit j % 32 of word j / 32 of the token's tree mask is set
MAX_WINDOW = 1 << 30  # keys
TREE_WORD_TOKENS = 32  # new tokens of a word of the tree mask


class DenseDecodeArguments(NamedTuple):
    """Launch arguments of dense_decode, in ABI order: the one list that host, launch and kernel share."""

    kv_map: TensorMap  # dims (d_qk, h_kv, page, pages), box (128 bytes, 1, box_keys of the problem, 1), 128-byte swizzle
    rope_map: TensorMap  # the same with boxes and a swizzle of 64 bytes; read by the kernels of SM100 that load keys by TMA
    q: Pointer  # dtype, or e4m3 [batch, s_q, h_q, d_qk]
    cache: Pointer  # [pages, page, 1, 576], multiples of 16 bytes apart; see reads_by_address, else null
    descale_q: Pointer  # fp32 [1], or null for 1: what e4m3 queries are multiplied with
    descale_k: Pointer  # fp32 [1], or null for 1: what an e4m3 cache is multiplied with
    block_table: Pointer  # int32 [batch, max_pages]
    cache_seqlens: Pointer  # int32 [batch]
    plan: Pointer  # int32 [num_parts, 8]
    num_splits: Pointer  # int32 [batch + 1]
    out: Pointer  # dtype [batch, s_q, h_q, d_v]
    lse: Pointer  # fp32 [batch, h_q, s_q], natural log
    out_accum: Pointer  # fp32 [accumulator rows, s_q, h_q, d_v], contiguous, normalised within the split
    lse_accum: Pointer  # fp32 [accumulator rows, s_q, h_q], contiguous, base 2; -inf for an empty split
    units: Pointer  # int32 [batch, 8], the table of units of split_plan; or null: unit r is request r with s_q tokens
    attn_sink: Pointer  # fp32 [h_q], natural log, or null: out is scaled by exp(lse) / (exp(lse) + exp(sink)), in combine if cut
    tree_mask: Pointer  # int32 [batch, s_q, ceil(s_q / 32)], or null: read if mask is TREE
    # strides in elements
    q_stride_batch: Int64
    q_stride_token: Int64
    q_stride_head: Int64
    out_stride_batch: Int64
    out_stride_token: Int64
    out_stride_head: Int64
    lse_stride_batch: Int64
    lse_stride_head: Int64
    lse_stride_token: Int64
    table_stride: Int64
    tree_stride_batch: Int64
    tree_stride_token: Int64
    # in bytes, of `cache`
    page_stride: Int64
    row_stride: Int64
    scale_log2: Float32  # softmax_scale * log2(e); the kernel multiplies it by descale_q and descale_k
    empty_lse: Float32  # lse of a row that attends to nothing
    s_q: Int32
    h_q: Int32
    heads_per_kv: Int32  # h_q / h_kv
    page_size: Int32
    pages: Int32  # of `cache`: a page beyond them counts as zeros
    mask: Int32  # ALL_KEYS, CAUSAL or TREE
    batch: Int32
    max_keys: Int32  # keys that a row of block_table has room for; longer lengths are clipped to it
    max_splits: Int32  # 0: requests are cut where the plan cuts them. Else batch invariant, with so many rows per request
    accum_rows: Int32  # rows of out_accum and lse_accum: nothing beyond them is written, whatever the plan says; 0 if nothing is cut
    # requests with different numbers of query tokens: batch counts units, s_q is unit_tokens, batch strides are 0
    requests: Int32
    total_q: Int32  # rows of q and out; s_q where all requests have that many
    hidden_keys: Int32  # last keys of a request that the mask may hide from a query token: s_q - 1 if CAUSAL; if TREE, most new tokens
    reach: Int32  # window + s_q - 1: keys before the end that some query token's window reaches; NO_LIMIT without a window
    sink_keys: Int32  # keys at the beginning that every query token sees in spite of its window
    steady_keys: Int32  # of tiles that need no mask: that many numbers, from hidden_keys + TILE_KEYS on, of keys from the tile on
    steady_values: Int32  # of tiles whose values need no zeros, likewise, from TILE_KEYS on


PARAMS = params_of(DenseDecodeArguments)


@dataclass(frozen=True)
class Tiling:
    """Tiling of query rows by an architecture's kernel.

    rows: of a CTA. row_bytes: every row of q and out begins at a multiple of so many bytes; kernels load and store as many at a time.
    clusters: numbers of CTAs that may share every key tile, ascending. With (1, 2), two share if the rows give an even number of CTAs.
    """

    row_bytes: int
    clusters: tuple[int, ...]
    rows: int = TILE_ROWS

    def takes_rows64(self, rows: int) -> bool:
        """Return whether so many rows take a kernel with TILE_ROWS rows in a CTA, where an op has one beside a kernel with fewer."""
        return self.rows < TILE_ROWS and rows > self.rows

    @property
    def paired(self) -> bool:
        """True if CTAs come in pairs for any number of rows."""
        return self.clusters == (2,)

    def cluster(self, row_ctas: int) -> int:
        """Return the CTAs that share key tiles where there are this many along the rows."""
        return self.clusters[-1] if row_ctas % self.clusters[-1] == 0 else self.clusters[0]


TILINGS = {
    SM90.name: Tiling(row_bytes=4, clusters=(1, 2)),
    SM100.name: Tiling(row_bytes=16, clusters=(2,)),
    SM120.name: Tiling(row_bytes=16, clusters=(1,), rows=16),
}


COLUMN_CTAS = 2  # that divide 1,024 latent columns of the same 64 rows

LATENT = "latent"  # q and cache of out's type
FP8_CACHE = "fp8_cache"  # e4m3 cache, converted to q's type; products as with LATENT
FP8 = "fp8"  # q and cache e4m3, and so are the products' operands, the probabilities too; on SM120 all of them become out's type
OPERANDS = (LATENT, FP8_CACHE, FP8)


def tiling(arch: Arch, operands: str, d_qk: int = D_QK) -> Tiling:
    """Return the tiling of an architecture's kernel for these operands and columns of a key."""
    tiling = TILINGS[arch.name]
    if d_qk == WIDE_DIMS.d_qk:
        return replace(tiling, clusters=(COLUMN_CTAS,))
    # Two CTAs that share a tile would save conversions, but copying the tile to the peer costs more: kernels/dense_decode/README.md
    return replace(tiling, clusters=(1,)) if operands == FP8_CACHE and not tiling.paired else tiling


def takes_key_masks(operands: str) -> bool:
    """Return whether calls with these operands take tree masks and windows.

    On SM90, where a cache is converted no registers are left for trees, and by the clock the code of both, even if no call uses it, makes
    the kernels of e4m3 caches 7 % slower.
    """
    return operands == LATENT


# Query rows of a KV head (in sparse decode of a token: heads) up to which a call takes the kernel with keys on M, on SM90; 0: never. The
# rate of m64n16k16 on hardware decides whether that pays.
FEW_HEADS = 16
FEW_HEADS_OPERANDS = (FP8_CACHE,)
FEW_ROWS = (16, 32, 64)  # rows on N of the kernels with keys on M on SM100: a call of e4m3 operands takes the least that holds its rows
FEW_LATENT_ROWS = (16,)  # the same with a 16-bit cache


def reads_by_address(arch: Arch, operands: str) -> bool:
    """Return whether threads of a kernel read the cache at its address, for one KV head alone, and not by TMA."""
    return operands == FP8_CACHE or arch == SM120


def few_heads_rows(arch: Arch, operands: str) -> tuple[int, ...]:
    """Return the rows on N of the kernels for few heads that an architecture has for these operands, ascending.

    They are for bf16 out and keys of 576 columns, without tree masks and windows.
    """
    if arch is SM90:
        return (FEW_HEADS,) if operands in FEW_HEADS_OPERANDS and FEW_HEADS else ()
    return {FP8: FEW_ROWS, LATENT: FEW_LATENT_ROWS}.get(operands, ()) if arch == SM100 else ()


@dataclass(frozen=True)
class DenseDecodeConfig:
    """One compiled variant.

    dtype: element type of out, and of q and cache where operands do not say otherwise ("bf16" or "fp16").
    cluster: CTAs along the rows that share each key tile (1 or 2); where columns are divided, those that divide them (2).
    operands: LATENT, FP8_CACHE or FP8.
    d_qk: columns of a key, one of DENSE_DIMS; other numbers than D_QK with LATENT and bf16 only.
    few_heads: S^T = K Q^T and O^T = V^T P^T, for up to few_rows query rows of a KV head.
    rows64: on sm120: the same products and TILE_ROWS query rows a CTA, for more rows than the 16 of the other kernel.
    """

    dtype: str
    cluster: int
    operands: str = LATENT
    d_qk: int = D_QK
    few_heads: bool = False
    few_rows: int = FEW_HEADS
    rows64: bool = False

    @property
    def dims(self) -> LatentDims:
        """The columns of a key by their use."""
        return DENSE_DIMS[self.d_qk]

    @property
    def column_ctas(self) -> int:
        """The CTAs that divide the columns of the same rows."""
        return column_ctas(self.dims.latent)

    @property
    def key_masks(self) -> bool:
        """True if calls of the variant may have tree masks and windows."""
        return takes_key_masks(self.operands) and not self.few_heads

    @property
    def name(self) -> str:
        """The kernel's name in the manifest, without op and arch."""
        types = self.dtype if self.operands == LATENT else f"{self.dtype}_{self.operands}"
        types += "" if self.d_qk == D_QK else f"_d{self.d_qk}"
        if not self.few_heads:
            return f"{types}_rows64" if self.rows64 else f"{types}_cluster{self.cluster}"
        return f"{types}_few_heads" + ("" if self.few_rows == FEW_HEADS else str(self.few_rows))


# How softmax follows the maximum of a row, and what P is rounded to, as terms of an order (spec/orders.py).
SOFTMAX_TERMS = {"reference": "follows the row maximum where it moves up by more than 8, log2 units", "exp": "exp2 of an fp32 fma"}
_E4M3_TERMS = {
    "reference": "follows the maximum of every tile, so that its greatest P lies in a window",
    "p": "e4m3, times one of 8 factors by key; O is divided by the sum of rounded P",
}


def order_terms(config: DenseDecodeConfig, arch: Arch) -> dict[str, Any] | None:
    """Return the terms of a variant's order, or None for few heads, which batch-invariant calls do not take.

    CTAs that share key tiles change no bit, and so `cluster` is no term.
    """
    if config.few_heads:
        return None
    exact = f"e4m3, exact in {config.dtype}; its scale on scores and outputs"
    kept = config.operands == FP8 and arch != SM120
    return {
        "op": "dense_decode",
        "revision": 2 if arch is SM100 and config.column_ctas > 1 else 1,
        "arch": arch.name,
        "dtype": config.dtype,
        "cache": {LATENT: config.dtype, FP8_CACHE: exact, FP8: "e4m3; its scale on scores and outputs" if kept else exact}[config.operands],
        "d_qk": config.d_qk,
        "keys": f"tiles of {TILE_KEYS if TILINGS[arch.name].rows == TILE_ROWS else TILE_KEYS // 2}, ascending",
        "split": INVARIANT_SPLIT,
        **SOFTMAX_TERMS,
        "p": f"{config.dtype}, unnormalised",
        **({"rows": "keys on M"} if config.rows64 else {}),
        **(_E4M3_TERMS if kept else {"q": "e4m3"} if config.operands == FP8 else {}),
    }


@dataclass(frozen=True)
class DenseDecodeProblem:
    """The shapes of one call. They decide, with the architecture, on variant, grid and workspace.

    dtype, operands, d_qk: as in DenseDecodeConfig. pages_per_request: columns of the block table, the bound on a request's length.
    few_heads: whether the call takes the kernel for few heads, where there is one. A batch-invariant call does not: among requests with
    different numbers of query tokens, those of the others would decide.
    """

    arch: Arch
    dtype: str
    batch: int
    s_q: int
    h_q: int
    h_kv: int
    page_size: int
    pages_per_request: int
    batch_invariant: bool = False
    operands: str = LATENT
    d_qk: int = D_QK
    few_heads: bool = True

    @property
    def d_v(self) -> int:
        """Columns of a value."""
        return DENSE_DIMS[self.d_qk].latent

    @property
    def rows(self) -> int:
        """Query rows that share one KV head."""
        return self.s_q * (self.h_q // self.h_kv)

    @property
    def few_rows(self) -> int:
        """Rows on N of the kernel for few heads that serves this problem; 0 where another kernel does."""
        fits = self.few_heads and not self.batch_invariant and (self.dtype, self.d_qk) == (BF16, D_QK)
        return few_rows(self.arch, self.operands, self.rows) if fits else 0

    @property
    def rows64(self) -> bool:
        """True if the kernel with TILE_ROWS rows serves this problem. In a batch-invariant call heads alone decide."""
        return TILINGS[self.arch.name].takes_rows64(self.h_q // self.h_kv if self.batch_invariant else self.rows)

    @property
    def row_ctas(self) -> int:
        """CTAs along the query rows of one KV head, and those that divide columns."""
        return 1 if self.few_rows else _row_ctas(self.arch, self.rows, self.d_v, self.rows64)

    @property
    def config(self) -> DenseDecodeConfig:
        """The variant that serves this problem."""
        if self.few_rows:
            return DenseDecodeConfig(self.dtype, 1, self.operands, self.d_qk, few_heads=True, few_rows=self.few_rows)
        cluster = tiling(self.arch, self.operands, self.d_qk).cluster(self.row_ctas)
        return DenseDecodeConfig(self.dtype, cluster, self.operands, self.d_qk, rows64=self.rows64)

    @property
    def box_keys(self) -> int:
        """Keys that one TMA box covers."""
        # of a pair, each CTA loads its half of the keys whole; where columns are divided, half a tile outside windows is left out
        paired = self.operands == FP8 and TILINGS[self.arch.name].paired and not self.few_rows
        halves = paired or self.config.column_ctas > 1
        return min(self.page_size, TILE_KEYS // 2 if halves else TILE_KEYS)

    @property
    def max_keys(self) -> int:
        """Keys that a row of the block table has room for."""
        return min(self.pages_per_request * self.page_size, MAX_KEYS)

    @property
    def max_splits(self) -> int:
        """The most splits of a request in a batch-invariant call; 0 in other calls, where the plan cuts."""
        return invariant_splits(self.max_keys) if self.batch_invariant else 0

    def num_parts(self, sm_count: int) -> int:
        """Return the number of parts of the plan: as many as keep every SM busy with one CTA."""
        return parts_of(self.row_ctas * self.h_kv, sm_count)

    def grid(self, sm_count: int) -> tuple[int, int, int]:
        """Return the CTAs along (query rows, KV heads, parts)."""
        return self.row_ctas, self.h_kv, self.num_parts(sm_count)


def unit_tokens(max_seqlen_q: int, heads_per_kv: int) -> int:
    """Return the most query tokens of a work unit where requests have different numbers of them: as many as two CTAs hold, whole.

    More CTAs would be idle for short requests. With half the rows, a request of several units would be read twice as often.
    """
    return max(min(max_seqlen_q, UNIT_ROWS // heads_per_kv), 1)


def column_ctas(d_v: int) -> int:
    """Return the CTAs that divide the latent columns of the same query rows."""
    return COLUMN_CTAS if d_v == D_WIDE else 1


def row_ctas(arch: Arch, rows: int, d_v: int = D_V) -> int:
    """Return the CTAs along the query rows of one KV head, times those that divide columns."""
    return _row_ctas(arch, rows, d_v, TILINGS[arch.name].takes_rows64(rows))


def _row_ctas(arch: Arch, rows: int, d_v: int, rows64: bool) -> int:
    tiles = ceil_div(rows, TILE_ROWS if rows64 else TILINGS[arch.name].rows)
    divided = column_ctas(d_v)
    return 2 * ceil_div(tiles, 2) if TILINGS[arch.name].paired and divided == 1 else divided * tiles


def few_rows(arch: Arch, operands: str, rows: int) -> int:
    """Return the rows on N of the kernel for few heads that an architecture has for so many query rows of a KV head; 0: there is none."""
    return next((most for most in few_heads_rows(arch, operands) if rows <= most), 0)


def rows_ahead(arch: Arch, operands: str, rows: int) -> int:
    """Return few_rows as a plan that is made ahead of its calls has it.

    0 with 16-bit queries, of which nobody has said dtype, columns and masks.
    """
    return few_rows(arch, operands, rows) if operands == FP8 else 0


def num_parts(arch: Arch, rows: int, h_kv: int, sm_count: int, operands: str = LATENT, d_v: int = D_V) -> int:
    """Return the parts of a plan made ahead for this many query rows per KV head: as many as keep every SM busy with one CTA.

    operands: FP8 for calls that take the kernels for few heads, where there are any.
    """
    return parts_of(h_kv * (1 if rows_ahead(arch, operands, rows) else row_ctas(arch, rows, d_v)), sm_count)


def whole_eighths(arch: Arch, few_rows: int) -> int:
    """Return the split_plan argument for a kernel with few_rows rows on N; 0: another one. With 64, shared memory binds and not HBM."""
    return ALONE_WHOLE_EIGHTHS if arch is SM100 and 0 < few_rows < TILE_ROWS else 0


def parts_of(ctas: int, sm_count: int) -> int:
    """Return the number of parts of a plan, each of which so many CTAs have."""
    return min(max(sm_count // max(ctas, 1), 1), MAX_PARTS)


def out_dtypes(operands: str, d_qk: int = D_QK) -> tuple[str, ...]:
    """Return the element types of out: FlashMLA's tests have fp16 with caches of 16 bits alone."""
    return key_dtypes(d_qk) if operands == LATENT else (BF16,)


def key_columns(arch: Arch) -> tuple[int, ...]:
    """Return the columns of 16-bit keys for which an architecture has kernels."""
    return tuple(d_qk for d_qk in DENSE_DIMS if arch != SM120 or d_qk != WIDE_DIMS.d_qk)


def closed_variants(arch: Arch) -> tuple[DenseDecodeConfig, ...]:
    """Return every variant that ships for an architecture."""
    wide = tuple(
        DenseDecodeConfig(dtype, cluster, operands, d_qk, rows64=rows64)
        for operands in OPERANDS
        for d_qk in (key_columns(arch) if operands == LATENT else (D_QK,))
        for dtype in out_dtypes(operands, d_qk)
        for cluster in tiling(arch, operands, d_qk).clusters
        for rows64 in ((False, True) if TILINGS[arch.name].takes_rows64(TILE_ROWS) else (False,))
    )
    few = ((operands, rows) for operands in OPERANDS for rows in few_heads_rows(arch, operands))
    return *wide, *(DenseDecodeConfig(BF16, 1, operands, few_heads=True, few_rows=rows) for operands, rows in few)
