"""Sparse decode: a SparseCase is one call in all its particulars; and the tensors made for it.

Tensors come from the case's seed, with nasty values on purpose: pages are shuffled; every byte that no index which counts
refers to is 0xFF, a NaN in every type: unreferenced tokens with their scales, the padding byte behind the scales of fp8_584,
what lies between pages or rows. Indices beyond a length name slots like any other, but nobody fills them.
"""

from __future__ import annotations

import random
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

INT_MIN, INT_MAX = -(1 << 31), (1 << 31) - 1
SPARE_PAGES = 3  # pages of a cache that no request uses
FAR_BYTES = 1 << 32  # an offset that needs 64 bits, in bytes and in 16-bit elements
V4_PAGE_MULTIPLE = 576  # FlashMLA pads pages of fp8_584 to a multiple of this

_NAN_BYTE = 0xFF
_EDGES = (1, 64, 65, 63, 0, 1 << 20, -7)  # lengths, the last two to be clipped

SparseValues = Literal["normal", "rising", "falling", "peaks", "spread", "coherent"]
SparseCacheLayout = Literal["packed", "tight", "layers", "padded_rows", "far"]
Indices = Literal["valid", "mixed", "none"]
IndexLayout = Literal["packed", "odd"]
Sinks = Literal["none", "drawn", "infinite"]
Lengths = Literal["drawn", "zeros", "edges"] | tuple[int, ...]


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
        lengths = "_".join(map(str, self.lengths)) if isinstance(self.lengths, tuple) else self.lengths
        return f"k{self.s_k}t{self.topk}p{self.page_size}" + (f"_{lengths}" if lengths else "")


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
    indices: "valid": without repetition; "mixed": a fifth of them invalid, of every kind, a tenth of them repeated, and some
        tokens with a tile of invalid ones, in front or at the end, or with nothing else; "none": all -1.
    index_layout: "odd": rows that are aligned to nothing but the element.
    sinks: "none": no attn_sink; "drawn": N(0, 3); "infinite": so, but of every three heads one has +inf and one -inf.
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
        return tuple(_lengths(self, number, pool) for number, pool in enumerate(self.pools))

    @cached_property
    def counts(self) -> tuple[tuple[int, ...], ...]:
        """Of each pool, how many indices of each request count."""
        told = zip(self.pools, self.topk_lengths, strict=True)
        return tuple(
            tuple(min(max(length, 0), pool.topk) for length in ((pool.topk,) * self.batch if lengths is None else lengths))
            for pool, lengths in told
        )

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


def _lengths(case: SparseCase, number: int, pool: Pool) -> tuple[int, ...] | None:
    draw = random.Random(f"{case.seed} {case.batch} {number} {pool}")
    match pool.lengths:
        case None:
            return None
        case "drawn":
            return tuple(draw.randint(0, pool.topk) for _ in range(case.batch))
        case "zeros":
            return tuple(0 if index == 0 or draw.random() < 0.5 else draw.randint(1, pool.topk) for index in range(case.batch))
        case "edges":
            return tuple(_EDGES[(index + 3 * number) % len(_EDGES)] for index in range(case.batch))
        case given:
            return given


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
    given = given_results(case, device)
    tensors = SparseTensors(_q(case, device), k_cache, indices, topk_length, attn_sink=_sinks(case, device), given=given)
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


def _sinks(case: SparseCase, device: torch.device) -> Tensor | None:
    if case.sinks == "none":
        return None
    sinks = 3 * torch.randn(case.h_q, generator=torch.Generator().manual_seed(case.seed + 3))
    if case.sinks == "infinite":
        sinks[0::3], sinks[1::3] = float("inf"), float("-inf")
    return sinks.to(device)


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
        indices[request] = _slots(positions, pages_of[request], pool, pages)
        counted = positions[:, :count]
        keys = _request_keys(case, pool, pages_each, generator)
        unreferenced = torch.ones(len(keys), dtype=torch.bool, device=keys.device)
        unreferenced[counted[counted >= 0].to(keys.device)] = False
        keys[unreferenced] = float("nan")
        storage[pages_of[request].to(device)] = _encoded(case, keys.view(pages_each, pool.page_size, 1, case.d_qk)).to(device)
    cache = storage if case.format.quantised else storage.view(DTYPES[case.dtype])
    lengths = case.topk_lengths[number]
    topk_length = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device=device)
    return cache, _laid_out(case, indices).to(device), topk_length


def _positions(case: SparseCase, row: int, pool: Pool, draw: torch.Generator) -> Tensor:
    """int64 [topk]: which of its request's keys a token names, or -1 minus the number of an invalid value."""
    positions = torch.full((pool.topk,), -1)
    if case.indices == "none":
        return positions
    chosen = torch.randperm(pool.s_k, generator=draw)[: pool.topk]
    if case.values in ("rising", "falling"):
        chosen = chosen.sort().values
    at = torch.randperm(pool.topk, generator=draw)[: len(chosen)].sort().values
    positions[at] = chosen
    if case.indices == "valid":
        return positions
    again = torch.rand(pool.topk, generator=draw) < 0.1
    positions[again] = positions[torch.randint(pool.topk, (int(again.sum()),), generator=draw)]
    kinds = -1 - torch.randint(len(_invalid(1)), (pool.topk,), generator=draw)
    invalid = torch.rand(pool.topk, generator=draw) < 0.2
    match row % 5:
        case 1:
            invalid[: TILE_KEYS + 6] = True
        case 3:
            invalid[:] = True
        case 4:
            invalid[pool.topk // 2 :] = True
        case _:
            pass
    return torch.where(invalid, kinds, positions)


def _invalid(slots: int) -> tuple[int, ...]:
    """FlashMLA's invalid indices."""
    return -1, INT_MIN, -123456, slots, slots + 1, 2_147_480_000, INT_MAX


def _slots(positions: Tensor, pages: Tensor, pool: Pool, all_pages: int) -> Tensor:
    """The indices for positions among the keys of a request."""
    valid = positions >= 0
    key = torch.where(valid, positions, 0)
    slots = pages[key // pool.page_size] * pool.page_size + key % pool.page_size
    invalid = torch.tensor(_invalid(all_pages * pool.page_size))
    return torch.where(valid, slots, invalid[torch.where(valid, 0, -1 - positions)]).int()


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


def _laid_out(case: SparseCase, indices: Tensor) -> Tensor:
    """The indices in their layout; beside them lie indices of slots."""
    if case.index_layout == "packed":
        return indices
    storage = torch.zeros(*indices.shape[:2], indices.shape[2] + 3, dtype=torch.int32)
    storage[..., 1:-2] = indices
    return storage[..., 1:-2]
