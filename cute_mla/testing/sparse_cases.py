"""Sparse decode: a SparseCase is one call in all its particulars; and the tensors made for it.

Tensors come from the case's seed, with nasty values on purpose: pages are shuffled; every byte that no index which counts
refers to is 0xFF, a NaN in every type: unreferenced tokens with their scales, the padding byte behind the scales of fp8_584,
what lies between pages or rows. Indices beyond a length name slots like any other, but nobody fills them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..cache import empty_cache, quantise_cache
from ..spec.arch import Arch
from ..spec.cache_format import FORMATS, CacheFormat
from ..spec.dense_decode import TILE_ROWS
from ..spec.mla import D_ROPE, ceil_div
from ..spec.sparse_decode import QUERY_AND_CACHE, SparseDecodeProblem
from ..spec.split_plan import TILE_KEYS
from .case import DTYPES, STEEP, TAGS, Given, Tags, generator_for, levels, normal, q_storage, signs
from .decode_case import DecodeCase, given_results
from .indexed import (
    FAR_BYTES,
    INT_MAX,
    INT_MIN,
    IndexLayout,
    Indices,
    Lengths,
    Sinks,
    counted,
    drawn_sinks,
    index_values,
    laid_out,
    lengths_tag,
    named_keys,
    told_lengths,
)

SPARE_PAGES = 3  # pages of a cache that no request uses
V4_PAGE_MULTIPLE = 576  # FlashMLA pads pages of fp8_584 to a multiple of this

_NAN_BYTE = 0xFF

SparseValues = Literal["normal", "rising", "falling", "peaks", "spread", "coherent"]
SparseCacheLayout = Literal["packed", "tight", "layers", "padded_rows", "far"]


class Pool(NamedTuple):
    """A cache, and how it is used.

    s_k: keys of each request, from which its tokens choose. topk: indices of each token; beyond s_k they are invalid.
    lengths: None: all indices count; "drawn": 0 to topk of them; "zeros": none of about half of the requests; "edges":
        lengths around a tile, too large and negative ones; or all of them.
    """

    s_k: int
    topk: int
    page_size: int = 64
    lengths: Lengths | None = None

    @property
    def id(self) -> str:
        """Like "k512t64p69-drawn"."""
        lengths = "" if self.lengths is None else f"_{lengths_tag(self.lengths)}"
        return f"k{self.s_k}t{self.topk}p{self.page_size}{lengths}"


SMALL_POOL = Pool(512, 64)


@dataclass(frozen=True)
class SparseCase(DecodeCase):
    """One call of sparse decode.

    cache: the name of a CacheFormat. main, extra: its first and its second cache.
    values: "normal" to "peaks" as in Case, along the keys of a request, which indices then name in order; "spread": groups of
        columns of very different sizes; "coherent": all terms of a score have one sign and all scales of fp8_656 are such that
        a narrower type rounds them the same way, so that lse tells whether it did.
    power_of_two: scales of fp8_656 are powers of two. Those of fp8_584 always are.
    cache_layout: "packed": pages of fp8_584 end at multiples of 576 bytes, others have no padding; "tight": pages of fp8_584
        without padding; "layers": one layer of a cache that packs three in a block; "padded_rows": rows further apart than
        they are long, not for fp8_584; "far": the last page begins beyond 2^32 bytes.
    indices, index_layout: as named_keys and laid_out have them; invalid ones are of every kind.
    sinks: as drawn_sinks has them.
    """

    op: ClassVar[str] = "sparse_decode"
    tags: ClassVar[Tags] = {
        "indices": lambda indices: f"idx_{indices}",
        "sinks": lambda sinks: f"sinks_{sinks}",
        "power_of_two": lambda _: "powers",
        "index_layout": lambda layout: f"idx_{layout}",
        **TAGS,
    }

    cache: str = "fp8_656"
    main: Pool = SMALL_POOL
    extra: Pool | None = None
    values: SparseValues = "normal"
    power_of_two: bool = False
    cache_layout: SparseCacheLayout = "packed"
    indices: Indices = "valid"
    index_layout: IndexLayout = "packed"
    sinks: Sinks = "none"

    def __post_init__(self) -> None:
        if (self.dtype, self.cache) not in QUERY_AND_CACHE:
            raise ValueError(f"dtype is {self.dtype} with a {self.cache} cache; supported: {QUERY_AND_CACHE}")
        for pool in self.pools:
            if isinstance(pool.lengths, tuple) and len(pool.lengths) != self.batch:
                raise ValueError(f"lengths: got {len(pool.lengths)} for a batch of {self.batch}")
        pages = self.cache == "fp8_584"
        if (self.cache_layout == "tight" and not pages) or (self.cache_layout == "padded_rows" and pages):
            raise ValueError(f"cache_layout {self.cache_layout!r} is not one of {self.cache}")

    @property
    def format(self) -> CacheFormat:
        """The layout of both caches."""
        return FORMATS[self.cache]

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The caches that there are."""
        return (self.main,) if self.extra is None else (self.main, self.extra)

    @property
    def shape_id(self) -> str:
        """The first part of the id."""
        pools = "x".join(pool.id for pool in self.pools)
        return f"{self.dtype}-{self.cache}-b{self.batch}-q{self.s_q}-{pools}-h{self.h_q}"

    @property
    def d_qk(self) -> int:
        """Columns of q."""
        return self.format.d_qk

    @cached_property
    def topk_lengths(self) -> tuple[tuple[int, ...] | None, ...]:
        """Of each pool, what the call is told of how many indices of each request count."""
        return tuple(
            told_lengths(pool.lengths, self.batch, pool.topk, f"{self.seed} {self.batch} {number} {pool}", 3 * number)
            for number, pool in enumerate(self.pools)
        )

    @cached_property
    def counts(self) -> tuple[tuple[int, ...], ...]:
        """Of each pool, how many indices of each request count."""
        told = zip(self.pools, self.topk_lengths, strict=True)
        return tuple(counted(lengths, self.batch, pool.topk) for pool, lengths in told)

    @property
    def key_counts(self) -> tuple[int, ...]:
        """Indices of each request that count, of all pools."""
        return tuple(map(sum, zip(*self.counts, strict=True)))

    def problem(self, arch: Arch) -> SparseDecodeProblem:
        """The shapes of the call."""
        return SparseDecodeProblem(
            arch=arch,
            dtype=self.dtype,
            cache=self.cache,
            batch=self.batch,
            s_q=self.s_q,
            h_q=self.h_q,
            topk=self.main.topk,
            extra_topk=0 if self.extra is None else self.extra.topk,
            batch_invariant=self.batch_invariant,
            row_alignment=self.row_alignment,
        )

    @property
    def tiles(self) -> int:
        """Tiles of 64 query rows x 64 keys, the measure of a simulated case's cost; an empty request counts as one key tile."""
        key_tiles = sum(max(ceil_div(count, TILE_KEYS), 1) for count in self.key_counts)
        return key_tiles * self.s_q * ceil_div(self.h_q, TILE_ROWS)


@dataclass(frozen=True)
class SparseTensors:
    """The operands of a case.

    q dtype [b, s_q, h_q, d_qk]; k_cache, extra_k_cache as cache.codec describes them; indices int32 [b, s_q, topk], likewise
    extra_indices; topk_length, extra_topk_length int32 [b]; attn_sink fp32 [h_q]; what is None is absent from the call.
    given: as in Tensors.
    """

    q: Tensor
    k_cache: Tensor
    indices: Tensor
    topk_length: Tensor | None = None
    extra_k_cache: Tensor | None = None
    extra_indices: Tensor | None = None
    extra_topk_length: Tensor | None = None
    attn_sink: Tensor | None = None
    given: Mapping[str, Given] = field(default_factory=dict)


def make_sparse_tensors(case: SparseCase, device: str | torch.device = "cpu") -> SparseTensors:
    """The operands of a case, the same for the same case (and on every device, unless they exceed 2^25 elements)."""
    device = torch.device(device)
    k_cache, indices, topk_length = _pool(case, 0, case.main, device)
    sinks = drawn_sinks(case.sinks, case.h_q, case.seed, device)
    tensors = SparseTensors(_q(case, device), k_cache, indices, topk_length, attn_sink=sinks, given=given_results(case, device))
    if case.extra is not None:
        k_cache, indices, topk_length = _pool(case, 1, case.extra, device)
        tensors = replace(tensors, extra_k_cache=k_cache, extra_indices=indices, extra_topk_length=topk_length)
    return tensors


def _q(case: SparseCase, device: torch.device) -> Tensor:
    q = q_storage(case, device)
    generator = generator_for(case, q.numel(), device)
    values = normal((case.batch, case.s_q, case.h_q, case.d_qk), generator)
    if case.values == "coherent":
        values[..., : case.d_qk - D_ROPE] += 1
    elif case.values in ("rising", "falling", "peaks"):
        values[..., case.d_qk - D_ROPE :] = STEEP * signs(values.device)
    return q.copy_(values)


def _pool(case: SparseCase, number: int, pool: Pool, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """A cache with the keys that indices refer to, the indices, and their numbers."""
    pages_each = ceil_div(pool.s_k, pool.page_size)
    pages = case.batch * pages_each + SPARE_PAGES
    draw = torch.Generator().manual_seed(case.seed + 10 * (number + 1))
    own = torch.randperm(pages, generator=draw).tolist()
    own.insert(0, own.pop(own.index(pages - 1)))  # the last page, which may lie far away, is used first
    pages_of = torch.tensor(own[: case.batch * pages_each]).view(case.batch, pages_each)
    indices = torch.empty(case.batch, case.s_q, pool.topk, dtype=torch.int32)
    storage = _cache_storage(case, pool, pages, device)
    generator = generator_for(case, case.batch * pool.s_k * case.d_qk, device, 10 * (number + 1) + 1)
    for request, count in enumerate(case.counts[number]):
        positions = torch.stack([_positions(case, request * case.s_q + token, pool, draw) for token in range(case.s_q)])
        indices[request] = index_values(positions, _slots(pages_of[request], pool), _invalid(pages * pool.page_size))
        named = positions[:, :count]
        keys = _request_keys(case, pool, pages_each, generator)
        unreferenced = torch.ones(len(keys), dtype=torch.bool, device=keys.device)
        unreferenced[named[named >= 0].to(keys.device)] = False
        keys[unreferenced] = float("nan")
        storage[pages_of[request].to(device)] = _encoded(case, keys.view(pages_each, pool.page_size, 1, case.d_qk)).to(device)
    cache = storage if case.format.quantised else storage.view(DTYPES[case.dtype])
    lengths = case.topk_lengths[number]
    topk_length = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device=device)
    return cache, laid_out(indices, case.index_layout).to(device), topk_length


def _positions(case: SparseCase, row: int, pool: Pool, draw: torch.Generator) -> Tensor:
    """int64 [topk]: the keys of its request that a token names, as named_keys has them."""
    ordered = case.values in ("rising", "falling")
    return named_keys(case.indices, row, pool.s_k, pool.topk, ordered=ordered, kinds=len(_invalid(1)), draw=draw)


def _invalid(slots: int) -> tuple[int, ...]:
    """FlashMLA's invalid indices."""
    return -1, INT_MIN, -123456, slots, slots + 1, 2_147_480_000, INT_MAX


def _slots(pages: Tensor, pool: Pool) -> Tensor:
    """int64: the slot of each key of a request with these pages."""
    return (pages[:, None] * pool.page_size + torch.arange(pool.page_size)).flatten()


def _request_keys(case: SparseCase, pool: Pool, pages: int, generator: torch.Generator) -> Tensor:
    """fp32 [keys of so many pages, d_qk]: the keys of a request; those past its end will be NaN, as no index names them."""
    keys = normal((pages * pool.page_size, case.d_qk), generator)
    narrow = case.d_qk - D_ROPE
    if case.values == "spread":
        exponents = torch.randn(len(keys), narrow // 64, generator=generator, device=keys.device).mul_(1.5).clamp_(-6, 4)
        keys[:, :narrow] *= exponents.exp2().repeat_interleave(64, dim=1)
    elif case.values == "coherent":
        keys[:, :narrow] = _coherent_columns(len(keys), case.format, generator)
    elif case.values != "normal":
        position = torch.arange(len(keys), device=keys.device)
        level = levels(case.values, position / max(pool.s_k - 1, 1), generator)
        keys[:, narrow:] = level[:, None] * signs(keys.device)
    return keys


def _coherent_columns(keys: int, layout: CacheFormat, generator: torch.Generator) -> Tensor:
    """fp32 [keys, quantised columns] of one sign, whose scales are (1 + (n + 0.45) / 128) / 512, n below 32: bf16 rounds each
    down, while products with e4m3 values, of many different fractions, it rounds up as often as down."""
    group, groups = layout.group or D_ROPE, layout.groups or layout.d_qk // D_ROPE - 1
    columns = torch.rand(keys, groups, group, generator=generator, device=generator.device) / 2 + 0.5
    columns[..., 0] = 1
    fraction = torch.randint(32, (keys, groups, 1), generator=generator, device=generator.device)
    return (columns * (448 / 512 * (1 + (fraction + 0.45) / 128))).flatten(1)


def _encoded(case: SparseCase, keys: Tensor) -> Tensor:
    """uint8 [pages, page, 1, bytes of a token] for fp32 [pages, page, 1, d_qk]; NaN stays NaN."""
    if not case.format.quantised:
        return keys.to(DTYPES[case.dtype]).view(torch.uint8)
    out = empty_cache(case.cache, *keys.shape[:2], fill=_NAN_BYTE).to(keys.device)
    return quantise_cache(keys, case.cache, power_of_two=case.power_of_two, out=out)


def _cache_storage(case: SparseCase, pool: Pool, pages: int, device: torch.device) -> Tensor:
    """uint8 [pages, page, 1, bytes of a token] in its layout, 0xFF in and around it ("far": uninitialised, most never touched)."""
    token, page = case.format.page_bytes(1), case.format.page_bytes(pool.page_size)
    padded = case.cache == "fp8_584" and case.cache_layout != "tight"
    row, offset = token, 0
    stride = ceil_div(page, V4_PAGE_MULTIPLE) * V4_PAGE_MULTIPLE if padded else page
    match case.cache_layout:
        case "layers":
            offset, stride = stride, 3 * stride
        case "padded_rows":
            row = token + 112
            stride = pool.page_size * row
        case "far":
            stride = ceil_div(FAR_BYTES, (pages - 1) * V4_PAGE_MULTIPLE) * V4_PAGE_MULTIPLE
        case _:
            pass
    storage = torch.empty(pages * stride, dtype=torch.uint8, device=device)
    if case.cache_layout != "far":
        storage.fill_(_NAN_BYTE)
    return storage.as_strided((pages, pool.page_size, 1, token), (stride, row, row, 1), offset)
