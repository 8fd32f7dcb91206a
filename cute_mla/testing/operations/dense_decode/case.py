"""Cases of dense decode.

A case's seed determines its tensors, which probe what a kernel must not read: pages are shuffled; unused pages, unused rows of the
last page and the memory between the rows of a strided tensor are NaN; unused block-table entries are far out of range.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from ....ops.split_plan import key_window, ragged_queries
from ....reference import window_keys
from ....spec.arch import ARCHS, Arch
from ....spec.dense_decode import (
    FP8,
    LATENT,
    OPERANDS,
    TILE_ROWS,
    TREE_WORD_TOKENS,
    DenseDecodeProblem,
    key_columns,
    num_parts,
    reads_by_address,
)
from ....spec.mla import D_QK, DENSE_DIMS, ceil_div
from ....spec.split_plan import TILE_KEYS, RaggedQueries
from ...cases.base import DECODE_TAGS, DTYPES, CausalValues, DecodeCase, Tags
from ...cases.far import FAR_DIMENSIONS, far_tensor
from ...cases.sparse_indices import Sinks, draw_sinks
from ...cases.tensors import (
    OUTSIDE,
    STEP,
    OutputBuffer,
    allocate_q,
    decode_outputs,
    draw_queries,
    generator_for,
    nan_tensor,
    normal_values,
    outside_pages,
    packed_queries,
    ramp_keys,
    token_offsets,
)

UNUSED_TABLE_ENTRY = 2_147_480_000
TABLE_SLACK = 2  # columns of the block table that no request uses
SPARE_PAGES = 3  # pages of the cache that no request uses
FIRST_BROKEN, BROKEN_STEP = 1, 3  # of the used entries of a broken block table, counted through all requests
STEP_CODE = 16  # in an e4m3 cache, the step of values "steps"; e4m3 holds its multiples up to 8
DESCALE_Q, DESCALE_K = 0.0171, 0.0137  # no powers of two; elements of e4m3 operands then reach from about 2^-9 to 300

# Tags of the fields of a block table, as in TAGS.
TABLE_TAGS: Tags = {
    "table_pages": lambda pages: f"table{pages}",
    "far_table": lambda _: "table_far",
    "broken": lambda _: "broken_table",
}

Tree = Literal["none", "drawn", "strided", "far_requests", "far_tokens"]
CacheLayout = Literal["packed", "layers", "padded_rows", "heads_first", "far", "far_rows"]


@dataclass(frozen=True)
class DenseDecodeCase(DecodeCase):
    """One call of dense decode.

    s_k: keys of every request. varlen: lengths are drawn from N(s_k, s_k/2), at least s_q, as FlashMLA's tests draw them.
    zero_lengths: about half of the requests have length 0. lengths: all lengths; s_k, varlen and zero_lengths then do not count.
    values: "normal": N(0, 1)/10 clamped to +-1; "rising": scores rise along the keys, so that the running maximum moves in every
        tile; "falling": it never moves after the first tile; "peaks": a few keys per request outweigh all others.
        "opposed": scores rise from the first key to the middle one, or from the last to the middle one, in OPPOSED_ROWS neighbouring query
        rows each; no later tile hides a wrong sum. "steps": scores are alike in a tile and rise in such rows or fall from tile to tile.
        "needles": in each tile one key outweighs all others, in each row another. "cliff": each key outweighs all before it.
    cache_layout: "layers": one layer of a cache that packs three layers in a block; "padded_rows": rows of 64 elements more;
        "heads_first": a transposed [pages, h_kv, page, d_qk]; "far": the last page lies FAR_ELEMENTS or more from the first;
        "far_rows": the last row of every page does.
    table_pages: columns of the block table, None: two more than any request needs. Lengths beyond the table are cut to its capacity, and
        negative lengths to 0.
    far_table: the last row of the block table lies FAR_ELEMENTS or more from the first.
    broken: every third used entry of the block table lies outside the cache.
    d_qk: columns of a key, one of DENSE_DIMS.
    operands: which of q and cache are e4m3, as in DenseDecodeConfig; their scales are DESCALE_Q and DESCALE_K.
    scaled: whether the call passes these scales; without them they are 1.
    sinks: as in draw_sinks. tree: "none": no tree mask; else one as in draw_tree_mask, in this layout, "drawn" being packed.
    few_heads: as in the call.
    window, window_sink: as in the call. Keys that no query token sees are NaN, and the table's entries for their pages out of range.
    """

    op: ClassVar[str] = "dense_decode"
    tags: ClassVar[Tags] = {
        "causal": lambda _: "causal",
        "zero_lengths": lambda _: "zeros",
        "operands": str,
        "scaled": lambda _: "unscaled",
        "d_qk": lambda columns: f"d{columns}",
        "sinks": lambda sinks: f"sinks_{sinks}",
        "tree": lambda layout: f"tree_{layout}",
        "window": lambda window: f"window{window}",
        "window_sink": lambda sink: f"first{sink}",
        "few_heads": lambda _: "many_heads",
        **TABLE_TAGS,
        **DECODE_TAGS,
    }

    s_k: int = 128
    h_kv: int = 1
    page_size: int = 64
    varlen: bool = False
    causal: bool = False
    zero_lengths: bool = False
    lengths: tuple[int, ...] | None = None
    values: CausalValues = "normal"
    cache_layout: CacheLayout = "packed"
    d_qk: int = D_QK
    operands: str = LATENT
    scaled: bool = True
    table_pages: int | None = None
    far_table: bool = False
    broken: bool = False
    sinks: Sinks = "none"
    tree: Tree = "none"
    window: int | None = None
    window_sink: int = 0
    few_heads: bool = True

    def __post_init__(self) -> None:
        if self.operands not in OPERANDS or (self.operands != LATENT and (self.h_kv != 1 or self.d_qk != D_QK)):
            raise ValueError(f"operands: got {self.operands!r} with h_kv {self.h_kv} and d_qk {self.d_qk}")
        if self.operands == FP8 and self.dtype != "bf16" and self.outputs == "allocated":
            raise ValueError(f"out is bf16 for e4m3 queries unless it is given, got {self.dtype}")
        if self.lengths is not None and len(self.lengths) != self.batch:
            raise ValueError(f"lengths: got {len(self.lengths)} for a batch of {self.batch}")
        if self.tokens is not None and len(self.tokens) != self.batch:
            raise ValueError(f"tokens: got {len(self.tokens)} for a batch of {self.batch}")
        if self.window is not None and (self.broken or self.tree != "none"):
            raise ValueError("a window hides broken pages, and is not for trees")
        if self.window is not None and self.tokens is not None and not self.causal:
            raise ValueError("a window over packed query tokens is for causal calls")
        if self.h_q % self.h_kv:
            raise ValueError(f"h_q must be a multiple of h_kv, got {self.h_q} and {self.h_kv}")

    @property
    def shape_id(self) -> str:
        """Return the first part of the id."""
        lengths = "k" + "_".join(map(str, self.lengths)) if self.lengths is not None else f"k{self.s_k}{'v' * self.varlen}"
        return f"{self.dtype}-b{self.batch}-q{self.s_q}-{lengths}-h{self.h_q}x{self.h_kv}-p{self.page_size}"

    @property
    def d_v(self) -> int:  # type: ignore[override]  # of other cases a constant
        """Return the columns of out."""
        return DENSE_DIMS[self.d_qk].latent

    @property
    def q_dtype(self) -> torch.dtype:
        """Return the dtype of q."""
        return torch.float8_e4m3fn if self.operands == FP8 else DTYPES[self.dtype]

    @property
    def cache_dtype(self) -> torch.dtype:
        """Return the dtype of the cache."""
        return DTYPES[self.dtype] if self.operands == LATENT else torch.float8_e4m3fn

    @property
    def descales(self) -> tuple[float | None, float | None]:
        """Return the scales of q and of the cache, None for an operand that is not e4m3 or has none."""
        if not self.scaled:
            return None, None
        return DESCALE_Q if self.operands == FP8 else None, None if self.operands == LATENT else DESCALE_K

    @property
    def step(self) -> float:
        """Return the step of values "steps": one whose small multiples the type of the cache holds exactly."""
        return STEP if self.operands == LATENT else STEP_CODE * DESCALE_K

    @cached_property
    def key_lengths(self) -> tuple[int, ...]:
        """Return the keys that each request attends to."""
        most = min((1 << 31) - 1 if self.table_pages is None else self.table_pages * self.page_size, (1 << 31) - 1)
        return tuple(min(max(length, 0), most) for length in self.given_lengths)

    @cached_property
    def given_lengths(self) -> tuple[int, ...]:
        """Return the length of each request as the call gets it."""
        if self.lengths is not None:
            return self.lengths
        draw = random.Random(f"{self.seed} {self.batch} {self.s_q} {self.s_k}")
        lengths = [self.s_k] * self.batch
        if self.varlen:
            lengths = [max(int(draw.normalvariate(self.s_k, self.s_k / 2)), self.s_q) for _ in lengths]
        if self.zero_lengths:
            lengths = [0 if index == 0 or draw.random() < 0.5 else length for index, length in enumerate(lengths)]
        return tuple(lengths)

    @property
    def pages(self) -> tuple[int, ...]:
        """Return the number of pages that each request uses."""
        return tuple(ceil_div(length, self.page_size) for length in self.key_lengths)

    @property
    def finding_kinds(self) -> frozenset[str]:
        """Return the kinds of findings that the simulated device must report."""
        return frozenset({OUTSIDE} if self.broken and sum(self.pages) > FIRST_BROKEN else ())

    @property
    def pages_per_request(self) -> int:
        """Return the columns of the block table."""
        return max(self.pages, default=0) + TABLE_SLACK if self.table_pages is None else self.table_pages

    @property
    def ragged(self) -> RaggedQueries | None:
        """Return the packed query tokens, None without `tokens`."""
        if self.total_q is None:
            return None
        return ragged_queries(self.batch, self.total_q, self.max_seqlen_q or 1, self.h_q // self.h_kv)

    @property
    def table_rows(self) -> int:
        """Return the rows of the plan's table of units."""
        return 0 if self.ragged is None else self.ragged.table_rows

    def problem(self, arch: Arch) -> DenseDecodeProblem:
        """Return the shapes of the call, with the kernel that its plan is for."""
        problem = self._shapes(arch)
        sm_count = self.sm_count or arch.sm_count
        ahead = num_parts(arch, problem.rows, self.h_kv, sm_count, FP8 if self.plans_few_heads else LATENT, self.d_v)
        fits = self.metadata == "object" or problem.num_parts(sm_count) == ahead
        return problem if fits else replace(problem, few_heads=False)

    @property
    def plans_few_heads(self) -> bool:
        """Return whether a plan that is made ahead is one for few heads, where an architecture has a kernel for them."""
        few = self.operands == LATENT and any(self._shapes(arch).few_rows for arch in ARCHS.values())
        return self.few_heads and (self.operands == FP8 or few)

    def _shapes(self, arch: Arch) -> DenseDecodeProblem:
        return DenseDecodeProblem(
            arch=arch,
            dtype=self.dtype,
            batch=self.batch if self.ragged is None else self.ragged.units,
            s_q=self.s_q if self.ragged is None else self.ragged.unit_tokens,
            h_q=self.h_q,
            h_kv=self.h_kv,
            page_size=self.page_size,
            pages_per_request=self.pages_per_request,
            batch_invariant=self.batch_invariant,
            operands=self.operands,
            d_qk=self.d_qk,
            few_heads=self.few_heads and self.tree == "none" and self.window is None,
        )

    def runs_on(self, arch: Arch) -> bool:
        """Return whether an architecture has a kernel for the case."""
        served = self.d_qk in key_columns(arch)
        return super().runs_on(arch) and served and (self.h_kv == 1 or not reads_by_address(arch, self.operands))

    @property
    def tiles(self) -> int:
        """Return the cost on the simulated device: tiles of 64 query rows x 64 keys; an empty request costs one key tile."""
        most = self.s_q if self.ragged is None else self.ragged.unit_tokens
        window = key_window(self.window, self.window_sink, self.s_q)
        key_tiles = [max(ceil_div(window.visible_keys(length), TILE_KEYS), 1) for length in self.key_lengths]
        if self.tokens is not None:
            key_tiles = [tiles * ceil_div(tokens, most) for tiles, tokens in zip(key_tiles, self.tokens, strict=True)]
        return sum(key_tiles) * ceil_div(most * self.h_q // self.h_kv, TILE_ROWS) * self.h_kv


@dataclass(frozen=True)
class DenseDecodeTensors:
    """The operands of a case.

    q dtype or e4m3 [b, s_q, h_q, d_qk], or packed [total_q, h_q, d_qk] with cu_seqlens_q int32 [b + 1]; k_cache dtype or e4m3 [pages,
    page, h_kv, d_qk]; block_table int32 [b, columns]; cache_seqlens int32 [b]; descale_q, descale_k: fp32 [1] of e4m3 operands, else None;
    attn_sink: fp32 [h_q] or None; tree_mask: int32 [b, s_q, words], or packed, or None; output_buffers: out dtype [b, s_q, h_q, d_v] and
    lse fp32 [b, h_q, s_q], or packed, unless the call allocates them.
    """

    q: Tensor
    k_cache: Tensor
    block_table: Tensor
    cache_seqlens: Tensor
    descale_q: Tensor | None = None
    descale_k: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    attn_sink: Tensor | None = None
    tree_mask: Tensor | None = None
    output_buffers: Mapping[str, OutputBuffer] = field(default_factory=dict)


def make_dense_decode_tensors(case: DenseDecodeCase, device: str | torch.device = "cpu") -> DenseDecodeTensors:
    """Make the operands of a case: equal for equal cases, and on every device if none exceeds 2^25 elements."""
    q = allocate_q(case, torch.device(device))
    shape = case.q_shape if case.tokens is None else (case.used_tokens, *case.q_shape[2:])
    values = draw_queries(case.values, shape, generator_for(case, q.numel(), q.device))
    descale_q, descale_k = case.descales
    q = packed_queries(case, q, values if descale_q is None else values / descale_q)
    k_cache, block_table = _paged_cache(case, q.device)
    cache_seqlens = torch.tensor(case.given_lengths, dtype=torch.int32, device=device)
    return DenseDecodeTensors(
        q=q,
        k_cache=k_cache,
        block_table=block_table,
        cache_seqlens=cache_seqlens,
        descale_q=descale_tensor(descale_q, q.device),
        descale_k=descale_tensor(descale_k, q.device),
        cu_seqlens_q=token_offsets(case, q.device),
        attn_sink=draw_sinks(case.sinks, case.h_q, case.seed, q.device),
        tree_mask=draw_tree_mask(case, q.device),
        output_buffers=decode_outputs(case, q.device),
    )


def descale_tensor(value: float | None, device: torch.device) -> Tensor | None:
    """Return a scale as calls take it, fp32 [1], or None for None."""
    return None if value is None else torch.full((1,), value, device=device)


def draw_tree_mask(case: DenseDecodeCase, device: torch.device) -> Tensor | None:
    """Draw the tree mask of a case, int32 [batch, s_q, words] or packed [total_q, words]: about half of its bits are 1.

    Bits behind the new tokens are drawn too. One of five tokens sees itself alone of the new ones, and one of them none, so that it sees
    nothing in a request that has no other keys.
    """
    if case.tree == "none":
        return None
    counts, most = (case.tokens or (case.s_q,) * case.batch), case.max_seqlen_q or case.s_q
    shape = (*case.q_shape[:2], ceil_div(most, TREE_WORD_TOKENS))
    match case.tree:
        case "drawn":
            mask = torch.empty(shape, dtype=torch.int32, device=device)
        case "strided":
            mask = torch.full((shape[0], shape[1] + 1, shape[2] + 2), -1, dtype=torch.int32, device=device)[:, 1:, 1:-1]
        case far:
            mask = far_tensor(shape, FAR_DIMENSIONS.index(far), torch.int32, device)
    draw = torch.Generator().manual_seed(case.seed + 4)
    bits = torch.randint(2, (*shape, TREE_WORD_TOKENS), generator=draw).bool()
    rows = bits.flatten(0, 1).flatten(1)
    for first, tokens in zip(accumulate(counts, initial=0), counts, strict=False):
        new = rows[first : first + tokens, :tokens]  # the others are no tokens
        token = torch.arange(tokens)
        blind, alone = (token % 5 == rest for rest in (2, 4))
        new[blind | alone] = False
        new[alone] |= torch.eye(tokens, dtype=torch.bool)[alone]
    mask.copy_((bits.long() << torch.arange(TREE_WORD_TOKENS)).sum(-1).int())
    return mask if case.tokens is None else mask[0]


def _cache_storage(case: DenseDecodeCase, pages: int, device: torch.device) -> Tensor:
    """Allocate k_cache [pages, page, h_kv, d_qk] in its layout, with NaN in it and, in all layouts but the far ones, around it."""
    page, h_kv, dtype, d_qk = case.page_size, case.h_kv, case.cache_dtype, case.d_qk
    match case.cache_layout:
        case "packed":
            return nan_tensor((pages, page, h_kv, d_qk), dtype, device)
        case "layers":
            return nan_tensor((pages, 3, page, h_kv, d_qk), dtype, device)[:, 1]
        case "padded_rows":
            return nan_tensor((pages, page, h_kv, d_qk + 64), dtype, device)[..., :d_qk]
        case "heads_first":
            return nan_tensor((pages, h_kv, page, d_qk), dtype, device).transpose(1, 2)
        case "far":
            return far_tensor((pages, page, h_kv, d_qk), 0, dtype, device)
        case "far_rows":
            return far_tensor((pages, page, h_kv, d_qk), 1, dtype, device)


def _paged_cache(case: DenseDecodeCase, device: torch.device) -> tuple[Tensor, Tensor]:
    """Make the cache, with the keys of the requests on shuffled pages, and the block table."""
    used = sum(case.pages)
    pages = used + SPARE_PAGES
    cache = _cache_storage(case, pages, device)
    generator = generator_for(case, used * case.page_size * case.h_kv * case.d_qk, device)
    generator.manual_seed(case.seed + 1)
    shuffled = torch.randperm(pages, generator=torch.Generator().manual_seed(case.seed + 2)).tolist()
    shuffled.insert(0, shuffled.pop(shuffled.index(pages - 1)))  # use the last page, which may lie far away, first
    table = _block_table_storage(case, device)
    entries = torch.tensor(shuffled[:used], dtype=torch.int32)
    inside = torch.ones(used, dtype=torch.bool)
    if case.broken:
        inside[FIRST_BROKEN::BROKEN_STEP] = False
        entries[~inside] = outside_pages(pages, used)[~inside]
    parts = zip(entries.split(case.pages), inside.split(case.pages), strict=True)
    for request, (own, there) in enumerate(parts):
        table[request, : len(own)] = own.to(device)
        keys = _request_pages(case, case.key_lengths[request], len(own), generator)
        unseen = _unseen_pages(case, case.key_lengths[request], len(own), keys)
        table[request, : len(own)][unseen] = UNUSED_TABLE_ENTRY
        cache[own[there].long().to(device)] = keys[there.to(device)].to(cache)
    return cache, table


def _unseen_pages(case: DenseDecodeCase, length: int, count: int, keys: Tensor) -> Tensor:
    """Return bool [count]: the pages of a request of which no query token sees a key. Write NaN to such keys, [count, page, h_kv, d_qk].

    Of packed query tokens, as many keys more count as a work unit may lack tokens.
    """
    tokens = case.s_q if case.ragged is None else (case.max_seqlen_q or 1) + case.ragged.unit_tokens
    seen = window_keys(tokens, length, case.window, case.window_sink, keys.device).any(dim=0)
    seen = functional.pad(seen, (0, count * case.page_size - length)).view(count, case.page_size)
    keys[~seen] = float("nan")
    return ~seen.any(dim=1)


def _block_table_storage(case: DenseDecodeCase, device: torch.device) -> Tensor:
    """Allocate the block table, int32 [b, columns], full of entries out of range; there are more of these behind each row."""
    shape = (case.batch, case.pages_per_request + TABLE_SLACK)
    wide = far_tensor(shape, 0, torch.int32, device) if case.far_table else torch.empty(shape, dtype=torch.int32, device=device)
    return wide.fill_(UNUSED_TABLE_ENTRY)[:, : case.pages_per_request]


def _request_pages(case: DenseDecodeCase, length: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw the keys of one request, fp32 [count, page, h_kv, d_qk], as the cache holds them; NaN past its end."""
    keys = normal_values((count * case.page_size, case.h_kv, case.d_qk), generator)
    if case.values != "normal":
        ramp_keys(case.values, keys, length, generator, case.step)
    keys[length:] = float("nan")
    _, descale_k = case.descales
    if descale_k is not None:
        keys /= descale_k
    return keys.view(count, case.page_size, case.h_kv, case.d_qk)
