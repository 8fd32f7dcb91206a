"""Shapes of benchmark rows, one class an op, with the least work of each.

Every input byte counts as read once and every output byte as written once. In sparse decode a key counts once for each query token
that selects it, because tokens choose from far more keys than they take. In sparse prefill all tokens choose from the same rows, and
each row counts once.

Each shape has three properties. work: useful arithmetic and compulsory bytes. text: the shape in one short line. tile_padding:
executed over useful arithmetic, because tiles of query rows are whole; None for kernels without such tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cute_mla.spec.arch import Arch
from cute_mla.spec.cache_format import FORMATS, FP8_656, CacheFormat
from cute_mla.spec.cache_insert import normalised_columns, rotates
from cute_mla.spec.cache_rows import CACHED
from cute_mla.spec.dense_decode import FP8, LATENT, TILE_ROWS, row_ctas
from cute_mla.spec.dense_prefill import HEAD_DIMS as PREFILL_HEAD_DIMS
from cute_mla.spec.masked_prefill import MASK_WORD_KEYS
from cute_mla.spec.mla import D_QK, D_ROPE, D_V, DENSE_DIMS, ELEMENT_BYTES, ceil_div
from cute_mla.spec.mqa_logits import COLUMNS, ROW_BYTES
from cute_mla.spec.sparse_decode import head_ctas

from .roofline import Work

E4M3_BYTES = 1
FP8_RATE = 2.0  # matrix rate of e4m3 over that of bf16
FLOAT_BYTES = 4  # an element of lse, max_logits and accumulators
INDEX_BYTES = 4  # an entry of page tables and of selected indices
WORD_BYTES = 4  # a word of a mask of keys
SLOT_BYTES = 8  # an entry of slot mappings
POSITION_BYTES = 8  # an entry of positions
ANGLE_BYTES = FLOAT_BYTES * D_ROPE  # cosines and sines of a position


def pair_flops(d_qk: int, d_v: int) -> int:
    """Return the FLOP of one query row and one key: multiply-adds of q k^T and of p v."""
    return 2 * (d_qk + d_v)


def _row_padding(arch: Arch, rows: int) -> float:
    """Return executed over useful rows: a CTA of the latent ops computes 64 query rows, and on Blackwell CTAs come in pairs."""
    return row_ctas(arch, rows) * TILE_ROWS / rows


def lengths_text(lengths: tuple[int, ...]) -> str:
    """Format lengths: "L4096" if all are equal, else least, greatest and mean."""
    if len(set(lengths)) == 1:
        return f"L{lengths[0]}"
    return f"L{min(lengths)}-{max(lengths)} (mean {sum(lengths) // len(lengths)})"


def tokens_text(s_q: int, tokens: tuple[int, ...]) -> str:
    """Format query tokens: "s2" if all requests have as many, else least, greatest and their sum."""
    return f"s{min(tokens)}-{max(tokens)} (sum {sum(tokens)})" if tokens else f"s{s_q}"


class UntiledShape:
    """Base of shapes whose tiles of query rows add no arithmetic."""

    def tile_padding(self, arch: Arch) -> float | None:
        """Return None: a warp takes one row or key, or long sequences fill the tiles."""
        return None


@dataclass(frozen=True)
class DecodeShape:
    """A dense decode.

    lengths: keys of each request. s_q, h_q: query tokens and heads of a request. page_size: keys of a page.
    operands, d_qk: as in DenseDecodeConfig. tokens: query tokens of each request, packed, of which s_q is the most; empty: s_q each.
    window: keys that a query token sees; 0: all.
    """

    lengths: tuple[int, ...]
    s_q: int
    h_q: int
    h_kv: int = 1
    page_size: int = 64
    operands: str = LATENT
    d_qk: int = D_QK
    tokens: tuple[int, ...] = ()
    window: int = 0

    @property
    def reached(self) -> tuple[int, ...]:
        """Keys of each request that some query token sees."""
        return tuple(min(length, self.window + self.s_q - 1) if self.window else length for length in self.lengths)

    @property
    def query_tokens(self) -> tuple[int, ...]:
        """Query tokens of each request."""
        return self.tokens or (self.s_q,) * self.batch

    @property
    def d_v(self) -> int:
        """Columns of a value."""
        return DENSE_DIMS[self.d_qk].latent

    @property
    def batch(self) -> int:
        """Number of requests."""
        return len(self.lengths)

    @property
    def keys(self) -> int:
        """Number of keys of all requests."""
        return sum(self.lengths)

    @property
    def cache_row_bytes(self) -> int:
        """Bytes of a key of one KV head."""
        return self.d_qk * (ELEMENT_BYTES if self.operands == LATENT else E4M3_BYTES)

    @property
    def work(self) -> Work:
        """Products over all keys; bytes of cache rows, q, out, lse and the page table."""
        rows = sum(self.query_tokens) * self.h_q
        seen = [min(length, self.window or length) for length in self.lengths]
        pairs = sum(tokens * length for tokens, length in zip(self.query_tokens, seen, strict=True))
        pages = sum(ceil_div(length, self.page_size) for length in self.reached)
        q_bytes = self.d_qk * (E4M3_BYTES if self.operands == FP8 else ELEMENT_BYTES)
        row_bytes = q_bytes + ELEMENT_BYTES * self.d_v + FLOAT_BYTES
        return Work(
            flops=float(pair_flops(self.d_qk, self.d_v) * self.h_q * pairs),
            bytes=float(self.cache_row_bytes * self.h_kv * sum(self.reached) + row_bytes * rows + INDEX_BYTES * pages),
            rate=FP8_RATE if self.operands == FP8 else 1.0,
        )

    @property
    def text(self) -> str:
        """Short form such as "b128 L4096 h128 s1"."""
        operands = "" if self.operands == LATENT else f" {self.operands}"
        operands += "" if self.d_qk == D_QK else f" d{self.d_qk}"
        operands += f" window {self.window}" if self.window else ""
        return f"b{self.batch} {lengths_text(self.lengths)} h{self.h_q} {tokens_text(self.s_q, self.tokens)}{operands}"

    def tile_padding(self, arch: Arch) -> float | None:
        """Return the padding of the query rows of one KV head."""
        return _row_padding(arch, self.s_q * (self.h_q // self.h_kv))


@dataclass(frozen=True)
class SparseDecodeShape:
    """A sparse decode.

    topk: indices of a query token, all valid. context: keys of each request, from which the indices select.
    cache: name of a CacheFormat. extra: that of a second cache of the same context, of which a token selects extra_topk keys; None: none.
    tokens: query tokens of each request, packed, of which s_q is the most; empty: s_q each.
    """

    batch: int
    s_q: int
    h_q: int
    topk: int
    context: int
    cache: str = FP8_656.name
    page_size: int = 64
    extra: str | None = None
    extra_topk: int = 0
    tokens: tuple[int, ...] = ()

    @property
    def query_tokens(self) -> tuple[int, ...]:
        """Query tokens of each request."""
        return self.tokens or (self.s_q,) * self.batch

    @property
    def format(self) -> CacheFormat:
        """The cache's layout."""
        return FORMATS[self.cache]

    @property
    def work(self) -> Work:
        """Products over the selected keys; bytes of the selected rows, indices, q, out and lse of each query token."""
        tokens, layout = sum(self.query_tokens), self.format
        row_bytes = ELEMENT_BYTES * (layout.d_qk + D_V) + FLOAT_BYTES
        extra_bytes = 0 if self.extra is None else (FORMATS[self.extra].page_bytes(1) + INDEX_BYTES) * self.extra_topk
        return Work(
            flops=float(pair_flops(layout.d_qk, D_V) * tokens * self.h_q * (self.topk + self.extra_topk)),
            bytes=float(tokens * ((layout.page_bytes(1) + INDEX_BYTES) * self.topk + extra_bytes + row_bytes * self.h_q)),
        )

    @property
    def text(self) -> str:
        """Short form such as "b128 topk2048 of 32768 h128 s2 fp8_656" or "b128 topk128+512 of 4096 h64 s1 v41+v41_fp4"."""
        more, beside = ("", "") if self.extra is None else (f"+{self.extra_topk}", f"+{self.extra}")
        return (
            f"b{self.batch} topk{self.topk}{more} of {self.context} h{self.h_q} {tokens_text(self.s_q, self.tokens)} {self.cache}{beside}"
        )

    def tile_padding(self, arch: Arch) -> float | None:
        """Return the padding of the heads of one query token."""
        return head_ctas(arch, self.h_q) * TILE_ROWS / self.h_q


@dataclass(frozen=True)
class SparsePrefillShape:
    """A sparse prefill of one request. s_kv: rows of the latent, of which each token selects topk; all indices are valid."""

    s_q: int
    h_q: int
    s_kv: int
    topk: int
    d_qk: int = D_QK

    @property
    def work(self) -> Work:
        """Products over the selected rows; bytes of the latent once, and indices, q, out, lse and max_logits of each query token."""
        row_bytes = ELEMENT_BYTES * (self.d_qk + D_V) + 2 * FLOAT_BYTES
        return Work(
            flops=float(pair_flops(self.d_qk, D_V) * self.s_q * self.h_q * self.topk),
            bytes=float(ELEMENT_BYTES * self.d_qk * self.s_kv + self.s_q * (row_bytes * self.h_q + INDEX_BYTES * self.topk)),
        )

    @property
    def text(self) -> str:
        """Short form such as "s4096 topk2048 of 131072 h128"."""
        columns = "" if self.d_qk == D_QK else f" d{self.d_qk}"
        return f"s{self.s_q} topk{self.topk} of {self.s_kv} h{self.h_q}{columns}"

    def tile_padding(self, arch: Arch) -> float | None:
        """Return the padding of the heads of one query token."""
        return head_ctas(arch, self.h_q) * TILE_ROWS / self.h_q


@dataclass(frozen=True)
class SparsePrefillBackwardShape(SparsePrefillShape):
    """The backward pass of a sparse prefill."""

    @property
    def work(self) -> Work:
        """Five products over the selected rows; bytes of the latent and of its gradient once, and those of each query token.

        A token has indices, q, out, dout, lse and dq. What lies between the kernels does not count, nor do zeros of few heads.
        """
        row_bytes = ELEMENT_BYTES * 2 * (self.d_qk + D_V) + FLOAT_BYTES
        return Work(
            flops=float(2 * (3 * self.d_qk + 2 * D_V) * self.s_q * self.h_q * self.topk),
            bytes=float(2 * ELEMENT_BYTES * self.d_qk * self.s_kv + self.s_q * (row_bytes * self.h_q + INDEX_BYTES * self.topk)),
        )


@dataclass(frozen=True)
class DensePrefillShape(UntiledShape):
    """A forward dense prefill of sequences that attend to themselves.

    lengths: tokens of each sequence. cached: earlier keys of each sequence, in front of those of its tokens.
    shown: keys that a mask shows each token, all that it sees if they are fewer; 0: there is no mask.
    """

    lengths: tuple[int, ...]
    h_q: int
    h_kv: int
    causal: bool
    d_qk: int = 192
    cached: int = 0
    shown: int = 0

    @property
    def d_v(self) -> int:
        """Columns of v and out."""
        return PREFILL_HEAD_DIMS[self.d_qk]

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Number of tokens of all sequences."""
        return sum(self.lengths)

    @property
    def keys(self) -> int:
        """Number of keys of all sequences."""
        return self.tokens + self.batch * self.cached

    @property
    def work(self) -> Work:
        """Products over the visible pairs of tokens, the diagonal included; bytes of q, k, v, out, lse and mask."""
        q_row_bytes = ELEMENT_BYTES * (self.d_qk + self.d_v) + FLOAT_BYTES
        kv_row_bytes = ELEMENT_BYTES * (self.d_qk + self.d_v)
        return Work(
            flops=float(pair_flops(self.d_qk, self.d_v) * self.h_q * self.pairs),
            bytes=float(self.tokens * (q_row_bytes * self.h_q + self.mask_words * WORD_BYTES) + self.keys * kv_row_bytes * self.h_kv),
        )

    @property
    def mask_words(self) -> int:
        """Words of a token's mask, 0 without one."""
        return ceil_div(max(self.lengths, default=0) + self.cached, MASK_WORD_KEYS) if self.shown else 0

    @property
    def pairs(self) -> int:
        """Number of visible pairs of a token and a key of a head."""
        if self.shown:
            return sum(min(self.shown, keys) for length in self.lengths for keys in self.seen(length))
        own = sum(length * (length + 1) // 2 if self.causal else length * length for length in self.lengths)
        return own + self.tokens * self.cached

    def seen(self, length: int) -> Sequence[int]:
        """Return the keys that each token of a sequence sees without a mask."""
        return range(self.cached + 1, self.cached + length + 1) if self.causal else (self.cached + length,) * length

    @property
    def text(self) -> str:
        """Short form such as "b1 L8192 h128 causal", "b1 L2048 after 32768 h128 causal" or "b1 L8192 h16 causal shown2048"."""
        heads = f"h{self.h_q}" if self.h_q == self.h_kv else f"h{self.h_q}/{self.h_kv}"
        after = f" after {self.cached}" if self.cached else ""
        columns = "" if self.d_qk == 192 else f" d{self.d_qk}"
        shown = f" shown{self.shown}" if self.shown else ""
        return f"b{self.batch} {lengths_text(self.lengths)}{after} {heads}{columns} {'causal' if self.causal else 'full'}{shown}"


@dataclass(frozen=True)
class DensePrefillBackwardShape(DensePrefillShape):
    """The backward pass of a dense prefill."""

    @property
    def work(self) -> Work:
        """Five products over the visible pairs; bytes of q, k, v, out, dout and lse, and of dq, dk and dv.

        The products are q k^T, dout v^T, dv, dk and dq. Two kernels make the first two of them twice, which does not count.
        """
        columns = self.d_qk + self.d_v
        q_row_bytes = ELEMENT_BYTES * 2 * columns + FLOAT_BYTES
        kv_row_bytes = ELEMENT_BYTES * 2 * columns
        return Work(
            flops=float(2 * (3 * self.d_qk + 2 * self.d_v) * self.h_q * self.pairs),
            bytes=float(self.tokens * (q_row_bytes * self.h_q + kv_row_bytes * self.h_kv)),
        )


@dataclass(frozen=True)
class CombineShape(UntiledShape):
    """A combine of `splits` partial results for each of batch * s_q * h_q rows."""

    batch: int
    s_q: int
    h_q: int
    splits: int

    @property
    def work(self) -> Work:
        """One multiply-add for each element read, far below any limit; bytes of fp32 partial outputs and lse in, and of out."""
        rows = self.batch * self.s_q * self.h_q
        partial = FLOAT_BYTES * (D_V + 1)
        return Work(
            flops=float(2 * rows * self.splits * D_V),
            bytes=float(rows * (partial * self.splits + ELEMENT_BYTES * D_V)),
        )

    @property
    def text(self) -> str:
        """Short form such as "b128 splits2 h128 s1"."""
        return f"b{self.batch} splits{self.splits} h{self.h_q} s{self.s_q}"


@dataclass(frozen=True)
class MergeShape(UntiledShape):
    """A merge_states of `states` results for each of tokens * h_q rows of head_dim columns."""

    tokens: int
    h_q: int
    states: int
    head_dim: int = D_V

    @property
    def work(self) -> Work:
        """One multiply-add for each element read; bytes of 16-bit outs and fp32 lse, of each state and of the result."""
        rows, state = self.tokens * self.h_q, ELEMENT_BYTES * self.head_dim + FLOAT_BYTES
        return Work(flops=float(2 * rows * self.states * self.head_dim), bytes=float(rows * state * (self.states + 1)))

    @property
    def text(self) -> str:
        """Short form such as "tokens4096 states2 h128 d512"."""
        return f"tokens{self.tokens} states{self.states} h{self.h_q} d{self.head_dim}"


class CachedShape(UntiledShape):
    """Base of shapes of keys that go to a cache. cache: name of a CacheFormat."""

    cache: str

    @property
    def format(self) -> CacheFormat:
        """The cache's layout."""
        return CACHED[self.cache]


@dataclass(frozen=True)
class CacheWriteShape(CachedShape):
    """A write_kv_cache of one key for each token, to slots in random order. cache: name of a CacheFormat."""

    tokens: int
    cache: str
    page_size: int = 64

    @property
    def work(self) -> Work:
        """Zero flops, as quantisation is not counted as useful arithmetic; bytes of 16-bit keys and slots in, and of cache rows out."""
        layout = self.format
        return Work(flops=0.0, bytes=float(self.tokens * (ELEMENT_BYTES * layout.d_qk + SLOT_BYTES + layout.page_bytes(1))))

    @property
    def text(self) -> str:
        """Short form such as "tokens4096 fp8_656"."""
        return f"tokens{self.tokens} {self.cache}"


@dataclass(frozen=True)
class CacheInsertShape(CachedShape):
    """An insert_kv_cache of one key for each token, to slots in random order, with the queries of `h_q` heads; 0: without queries.

    cache: name of a CacheFormat. Positions are all different, so that each token has angles of its own.
    """

    tokens: int
    h_q: int
    cache: str
    page_size: int = 64

    @property
    def work(self) -> Work:
        """Zero flops, as norm, rotation and quantisation are not counted as useful arithmetic.

        Bytes of 16-bit keys, slots, positions, angles and the norm's weights in, of rotary columns of queries in and out, and of cache rows
        out.
        """
        layout = self.format
        token = ELEMENT_BYTES * (layout.d_qk + 2 * D_ROPE * self.h_q) + SLOT_BYTES + layout.page_bytes(1)
        if rotates(layout):
            token += POSITION_BYTES + ANGLE_BYTES
        return Work(flops=0.0, bytes=float(self.tokens * token + ELEMENT_BYTES * normalised_columns(layout)))

    @property
    def text(self) -> str:
        """Short form such as "tokens4096 h16 fp8_656"."""
        return f"tokens{self.tokens} h{self.h_q} {self.cache}"


@dataclass(frozen=True)
class IndexWriteShape(UntiledShape):
    """A write_index_cache of one key for each token, to slots in random order, or with heads a prepare_index_queries.

    h_q: heads of the queries; 0: keys. Positions are all different, so that each token has angles of its own.
    """

    tokens: int
    h_q: int
    page_size: int = 64

    @property
    def work(self) -> Work:
        """Zero flops, as norm, rotation and quantisation are not counted as useful arithmetic.

        Bytes of bf16 rows, positions and angles in. Keys: those of slots and of LayerNorm in, of keys with their scales out. Queries: fp32
        weights in and out, and codes out.
        """
        row = ELEMENT_BYTES * COLUMNS + ROW_BYTES
        token = POSITION_BYTES + ANGLE_BYTES + (self.h_q * (row + FLOAT_BYTES) if self.h_q else row + SLOT_BYTES)
        return Work(flops=0.0, bytes=float(self.tokens * token + (0 if self.h_q else 2 * FLOAT_BYTES * COLUMNS)))

    @property
    def text(self) -> str:
        """Short form such as "tokens4096 h64", or "tokens4096 keys"."""
        return f"tokens{self.tokens} {f'h{self.h_q}' if self.h_q else 'keys'}"


@dataclass(frozen=True)
class TopkShape(UntiledShape):
    """A topk_indices of `topk` out of `columns` fp32 numbers in each of so many rows."""

    rows: int
    columns: int
    topk: int

    @property
    def work(self) -> Work:
        """Zero flops, as comparisons are not counted as useful arithmetic; bytes of numbers and lengths in, and of positions out."""
        return Work(flops=0.0, bytes=float(self.rows * (FLOAT_BYTES * self.columns + INDEX_BYTES * (self.topk + 1))))

    @property
    def text(self) -> str:
        """Short form such as "rows64 n65536 topk2048"."""
        return f"rows{self.rows} n{self.columns} topk{self.topk}"


@dataclass(frozen=True)
class IndexerShape(UntiledShape):
    """Logits of an indexer and a selection of `topk` of the `context` keys that each of so many query tokens sees.

    paged: each token is a request's, whose keys have pages of their own; else all tokens see the same keys, in a row.
    """

    tokens: int
    h_q: int
    context: int
    topk: int
    paged: bool
    page_size: int = 64

    @property
    def work(self) -> Work:
        """Products over all keys; bytes of keys with their scales, pages, q and weights in, and of positions out. Logits do not count."""
        pages, owners = (ceil_div(self.context, self.page_size), self.tokens) if self.paged else (0, 1)
        token_bytes = (COLUMNS * E4M3_BYTES + FLOAT_BYTES) * self.h_q + INDEX_BYTES * self.topk
        return Work(
            flops=float(2 * COLUMNS * self.h_q * self.tokens * self.context),
            bytes=float(owners * (ROW_BYTES * self.context + INDEX_BYTES * pages) + token_bytes * self.tokens),
            rate=FP8_RATE,
        )

    def selection(self, rows: int) -> TopkShape:
        """Return the selection for so many of the query tokens."""
        return TopkShape(rows, self.context, self.topk)

    @property
    def text(self) -> str:
        """Short form such as "tokens4096 topk2048 of 131072 h64" or "b64 topk2048 of 65536 h64"."""
        return f"{'b' if self.paged else 'tokens'}{self.tokens} topk{self.topk} of {self.context} h{self.h_q}"


Shape: TypeAlias = (
    DecodeShape
    | SparseDecodeShape
    | SparsePrefillShape
    | DensePrefillShape
    | CombineShape
    | MergeShape
    | CacheWriteShape
    | CacheInsertShape
    | IndexWriteShape
    | TopkShape
    | IndexerShape
)
