"""Cases of sparse decode.

A case's seed determines its tensors, which probe what a kernel must not read: pages are shuffled, and every byte that no used index
names is 0xFF, a NaN in every dtype. These bytes are unreferenced tokens with their scales, the padding byte behind the scales of
fp8_584, and the memory between pages or rows. Indices beyond topk_length name slots like any other, but these slots hold no keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ....cache import empty_cache, quantise_cache
from ....spec.arch import Arch
from ....spec.cache_format import FORMATS, FP8_584, CacheFormat
from ....spec.dense_decode import TILE_ROWS
from ....spec.mla import D_ROPE, ceil_div
from ....spec.sparse_decode import QUERY_AND_CACHE, SparseDecodeProblem, serving_kernels
from ....spec.split_plan import TILE_KEYS
from ...cases import sparse_indices
from ...cases.base import DECODE_TAGS, DTYPES, DecodeCase, Tags, Values
from ...cases.far import reserve
from ...cases.sparse_indices import FAR_BYTES, INT_MAX, INT_MIN, IndexLayout, Indices, Lengths, Sinks
from ...cases.tensors import (
    ORDERED,
    RAMPED,
    OutputBuffer,
    allocate_q,
    decode_outputs,
    draw_queries,
    generator_for,
    normal_values,
    packed_queries,
    ramp_keys,
    token_offsets,
)

SPARE_PAGES = 3  # pages of a cache that no request uses
V4_PAGE_MULTIPLE = 576  # FlashMLA pads pages of fp8_584 to a multiple of this

OUTLIER_STEP = 32  # columns from outlier to outlier of a key: the smallest group of a scale of e8m0
OUTLIERS = tuple(400 * 2.0**power for power in range(-3, 3))  # of e4m3 values whose scales are 1/8 to 4, if these are powers of two

_NAN_BYTE = 0xFF

SparseValues = Literal[Values, "spread", "outliers", "coherent"]
SparseCacheLayout = Literal["packed", "tight", "layers", "padded_rows", "far", "far_rows"]
ROWS_APART = ("padded_rows", "far_rows")  # layouts of formats whose scales lie beside the row


class Pool(NamedTuple):
    """A paged cache and the indices into it.

    s_k: keys per request, from which its tokens choose. topk: indices per token; indices beyond the s_k-th are invalid.
    lengths: None: no topk_length, all indices count; else as in draw_topk_lengths, one length per request.
    """

    s_k: int
    topk: int
    page_size: int = 64
    lengths: Lengths | None = None

    @property
    def id(self) -> str:
        """Return the tag in a case's id, such as "k512t64p69_drawn"."""
        lengths = "" if self.lengths is None else f"_{sparse_indices.lengths_tag(self.lengths)}"
        return f"k{self.s_k}t{self.topk}p{self.page_size}{lengths}"


SMALL_POOL = Pool(512, 64)


@dataclass(frozen=True)
class SparseDecodeCase(DecodeCase):
    """One call of sparse decode.

    cache: the name of the first cache's CacheFormat; extra_cache: of the second one's, "": the same. main, extra: the first and the second
        cache.
    values: as in DenseDecodeCase, along the keys of a request; indices of ORDERED values ascend; "spread": groups of columns of very
        different magnitudes; "outliers": the first of OUTLIER_STEP columns is one of OUTLIERS in every key, and 0 in queries, so that
        scores do not cancel; "coherent": all terms of a score have one sign, and bf16 would round every scale of fp8_656 down, so that
        lse shows whether a kernel keeps scales in fp32.
    power_of_two: scales of fp8_656 and nope_528 are powers of two. Those of fp8_584, v41 and v41_paged always are.
    cache_layout: "packed": pages of fp8_584 end at multiples of 576 bytes, other pages have no padding; "tight": pages of fp8_584
        without padding; "layers": one layer of a cache that packs three layers in a block; "padded_rows": rows further apart than
        their length; "far": the last page begins beyond 2^32 bytes; "far_rows": the last row of every page does. The last two and
        "padded_rows" are not for formats whose scales lie behind all rows of a page: such a cache is "packed" instead if it is one of two.
    indices: as in draw_key_positions, with invalid values of every kind. index_layout: as in lay_out_indices.
    sinks: as in draw_sinks.
    few_heads: as in the call.
    tokens: as in DecodeCase, but batch is then the number of all query tokens: each has keys of its own, as a request has without.
    """

    op: ClassVar[str] = "sparse_decode"
    tags: ClassVar[Tags] = {
        "indices": lambda indices: f"idx_{indices}",
        "sinks": lambda sinks: f"sinks_{sinks}",
        "power_of_two": lambda _: "powers",
        "index_layout": lambda layout: f"idx_{layout}",
        "few_heads": lambda _: "many_heads",
        **DECODE_TAGS,
    }

    cache: str = "fp8_656"
    extra_cache: str = ""
    main: Pool = SMALL_POOL
    extra: Pool | None = None
    values: SparseValues = "normal"
    power_of_two: bool = False
    cache_layout: SparseCacheLayout = "packed"
    indices: Indices = "valid"
    index_layout: IndexLayout = "packed"
    sinks: Sinks = "none"
    few_heads: bool = True

    def __post_init__(self) -> None:
        if (self.dtype, self.cache) not in QUERY_AND_CACHE:
            raise ValueError(f"dtype is {self.dtype} with a {self.cache} cache; supported: {QUERY_AND_CACHE}")
        if self.tokens is not None and (sum(self.tokens) != self.batch or self.s_q != 1):
            raise ValueError(f"tokens: got {self.tokens} for a batch of {self.batch} and s_q {self.s_q}")
        for pool in self.pools:
            if isinstance(pool.lengths, tuple) and len(pool.lengths) != self.batch:
                raise ValueError(f"lengths: got {len(pool.lengths)} for a batch of {self.batch}")
        if serving_kernels(self.format, self.extra_format) is None or (self.extra_cache and self.extra is None):
            raise ValueError(f"extra_cache is {self.extra_cache!r} with {self.cache} and extra {self.extra}; supported: formats that fit")
        rows_apart = [cache for cache in (self.format, self.extra_format) if cache.scales_inside]
        if (self.cache_layout == "tight" and self.cache != "fp8_584") or (self.cache_layout in ROWS_APART and not rows_apart):
            raise ValueError(f"cache_layout {self.cache_layout!r} is not one of {self.cache}")

    @property
    def format(self) -> CacheFormat:
        """Return the format of the first cache."""
        return FORMATS[self.cache]

    @property
    def extra_format(self) -> CacheFormat:
        """Return the format of the second cache, if there is one."""
        return FORMATS[self.extra_cache or self.cache]

    @property
    def kernels(self) -> str:
        """Return the name of the kernels that serve both formats."""
        return serving_kernels(self.format, self.extra_format) or ""

    @property
    def pools(self) -> tuple[Pool, ...]:
        """Return the caches that the call has."""
        return (self.main,) if self.extra is None else (self.main, self.extra)

    @property
    def shape_id(self) -> str:
        """Return the first part of the id."""
        pools = "x".join(pool.id for pool in self.pools)
        caches = "x".join(filter(None, (self.cache, self.extra_cache)))
        return f"{self.dtype}-{caches}-b{self.batch}-q{self.s_q}-{pools}-h{self.h_q}"

    @property
    def d_qk(self) -> int:
        """Return the columns of q."""
        return self.format.d_qk

    @property
    def all_count(self) -> bool:
        """Return whether every request has all its indices, as the host knows."""
        return self.tokens is None and all(pool.lengths is None for pool in self.pools)

    @cached_property
    def topk_lengths(self) -> tuple[tuple[int, ...] | None, ...]:
        """Return the topk_length argument of each pool: a length per request, or None."""
        return tuple(
            sparse_indices.draw_topk_lengths(pool.lengths, self.batch, pool.topk, f"{self.seed} {self.batch} {number} {pool}", 3 * number)
            for number, pool in enumerate(self.pools)
        )

    @cached_property
    def counts(self) -> tuple[tuple[int, ...], ...]:
        """Return for each pool how many indices the kernel uses per request."""
        pools = zip(self.pools, self.topk_lengths, strict=True)
        return tuple(sparse_indices.clip_topk_lengths(lengths, self.batch, pool.topk) for pool, lengths in pools)

    @property
    def key_counts(self) -> tuple[int, ...]:
        """Return how many indices the kernel uses per request, over all pools."""
        return tuple(map(sum, zip(*self.counts, strict=True)))

    def problem(self, arch: Arch) -> SparseDecodeProblem:
        """Return the shapes of the call."""
        return SparseDecodeProblem(
            arch=arch,
            dtype=self.dtype,
            cache=self.kernels,
            batch=self.batch if self.total_q is None else self.total_q,
            s_q=self.s_q,
            h_q=self.h_q,
            topk=self.main.topk,
            extra_topk=0 if self.extra is None else self.extra.topk,
            batch_invariant=self.batch_invariant,
            few_heads=self.few_heads,
        )

    @property
    def tiles(self) -> int:
        """Return the cost on the simulated device: tiles of 64 query rows x 64 keys; an empty request costs one key tile."""
        key_tiles = sum(max(ceil_div(count, TILE_KEYS), 1) for count in self.key_counts)
        return key_tiles * self.s_q * ceil_div(self.h_q, TILE_ROWS)


@dataclass(frozen=True)
class SparseDecodeTensors:
    """The operands of a case; the call omits operands that are None.

    q dtype [b, s_q, h_q, d_qk]; k_cache, extra_k_cache: paged caches in the case's CacheFormat; indices, extra_indices int32
    [b, s_q, topk]; topk_length, extra_topk_length int32 [b]; attn_sink fp32 [h_q]; output_buffers: as in DenseDecodeTensors. With packed
    query tokens total_q in place of b, s_q, and cu_seqlens_q int32 [requests + 1].
    """

    q: Tensor
    k_cache: Tensor
    indices: Tensor
    topk_length: Tensor | None = None
    extra_k_cache: Tensor | None = None
    extra_indices: Tensor | None = None
    extra_topk_length: Tensor | None = None
    attn_sink: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    output_buffers: Mapping[str, OutputBuffer] = field(default_factory=dict)


def make_sparse_decode_tensors(case: SparseDecodeCase, device: str | torch.device = "cpu") -> SparseDecodeTensors:
    """Make the operands of a case: equal for equal cases, and on every device if none exceeds 2^25 elements."""
    device = torch.device(device)
    k_cache, indices, topk_length = _pool(case, 0, case.main, case.format, device)
    tensors = SparseDecodeTensors(
        q=_q(case, device),
        k_cache=k_cache,
        indices=indices,
        topk_length=topk_length,
        attn_sink=sparse_indices.draw_sinks(case.sinks, case.h_q, case.seed, device),
        cu_seqlens_q=token_offsets(case, device),
        output_buffers=decode_outputs(case, device),
    )
    if case.extra is not None:
        k_cache, indices, topk_length = _pool(case, 1, case.extra, case.extra_format, device)
        tensors = replace(tensors, extra_k_cache=k_cache, extra_indices=indices, extra_topk_length=topk_length)
    return tensors


def _q(case: SparseDecodeCase, device: torch.device) -> Tensor:
    q = allocate_q(case, device)
    shape = (case.batch, case.s_q, *case.q_shape[2:])
    values = draw_queries(case.values, shape, generator_for(case, q.numel(), device))
    if case.values == "coherent":
        values[..., : case.d_qk - D_ROPE] += 1
    if case.values == "outliers":
        values[..., : case.d_qk - D_ROPE : OUTLIER_STEP] = 0
    return packed_queries(case, q, values)


def _pool(
    case: SparseDecodeCase, number: int, pool: Pool, layout: CacheFormat, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Make a cache with the keys that used indices name, the indices, and the topk_length argument."""
    pages_each = ceil_div(pool.s_k, pool.page_size)
    pages = case.batch * pages_each + SPARE_PAGES
    draw = torch.Generator().manual_seed(case.seed + 10 * (number + 1))
    own = torch.randperm(pages, generator=draw).tolist()
    own.insert(0, own.pop(own.index(pages - 1)))  # use the last page, which may lie far away, first
    pages_of = torch.tensor(own[: case.batch * pages_each]).view(case.batch, pages_each)
    spare = 0 if case.total_q is None else case.total_q - case.batch
    indices = torch.zeros(case.batch + spare, case.s_q, pool.topk, dtype=torch.int32)
    storage = _cache_storage(case, pool, layout, pages, device)
    generator = generator_for(case, case.batch * pool.s_k * case.d_qk, device, 10 * (number + 1) + 1)
    for request, count in enumerate(case.counts[number]):
        positions = torch.stack([_positions(case, request * case.s_q + token, pool, draw) for token in range(case.s_q)])
        indices[request] = sparse_indices.encode_indices(positions, _slots(pages_of[request], pool), _invalid(pages * pool.page_size))
        named = positions[:, :count]
        keys = _request_keys(case, pool, layout, pages_each, generator)
        unreferenced = torch.ones(len(keys), dtype=torch.bool, device=keys.device)
        unreferenced[named[named >= 0].to(keys.device)] = False
        keys[unreferenced] = float("nan")
        storage[pages_of[request].to(device)] = _encoded(case, layout, keys.view(pages_each, pool.page_size, 1, case.d_qk)).to(device)
    cache = storage if case.format.quantised else storage.view(DTYPES[case.dtype])
    lengths = case.topk_lengths[number]
    topk_length = None if lengths is None else torch.tensor((*lengths, *(INT_MAX,) * spare), dtype=torch.int32, device=device)
    indices = sparse_indices.lay_out_indices(indices, case.index_layout, device)
    return cache, indices if case.tokens is None else indices[:, 0], topk_length


def _positions(case: SparseDecodeCase, row: int, pool: Pool, draw: torch.Generator) -> Tensor:
    """Draw the positions of the keys that a token attends to, int64 [topk]."""
    ordered = case.values in ORDERED
    return sparse_indices.draw_key_positions(case.indices, row, pool.s_k, pool.topk, ordered=ordered, kinds=len(_invalid(1)), draw=draw)


def _invalid(slots: int) -> tuple[int, ...]:
    """Return the invalid indices of FlashMLA's tests for a cache of this many slots."""
    return -1, INT_MIN, -123456, slots, slots + 1, 2_147_480_000, INT_MAX


def _slots(pages: Tensor, pool: Pool) -> Tensor:
    """Return the slot of each key of a request with these pages, int64."""
    return (pages[:, None] * pool.page_size + torch.arange(pool.page_size)).flatten()


def _request_keys(case: SparseDecodeCase, pool: Pool, layout: CacheFormat, pages: int, generator: torch.Generator) -> Tensor:
    """Draw the keys of a request, fp32 [pages * page size, d_qk]; keys past its end become NaN later, since no index names them."""
    keys = normal_values((pages * pool.page_size, case.d_qk), generator)
    narrow = layout.quantised or case.d_qk - D_ROPE
    if case.values == "spread":
        exponents = torch.randn(len(keys), narrow // 64, generator=generator, device=keys.device).mul_(1.5).clamp_(-6, 4)
        keys[:, :narrow] *= exponents.exp2().repeat_interleave(64, dim=1)
    elif case.values == "outliers":
        turns = torch.arange(len(keys))[:, None] + torch.arange(ceil_div(narrow, OUTLIER_STEP))  # so that every lane meets all of them
        keys[:, :narrow:OUTLIER_STEP] = torch.tensor(OUTLIERS)[turns % len(OUTLIERS)].to(keys.device)
    elif case.values == "coherent":
        keys[:, :narrow] = _coherent_columns(len(keys), layout, generator)
    elif case.values in RAMPED:
        ramp_keys(case.values, keys, pool.s_k, generator)
    return keys


def _coherent_columns(keys: int, layout: CacheFormat, generator: torch.Generator) -> Tensor:
    """Draw fp32 [keys, quantised columns] of one sign, whose scales are (1 + (n + 0.45) / 128) / 512 with n below 32.

    bf16 rounds every such scale down. Products of a scale and an e4m3 value have many fractions; bf16 rounds them up as often as down.
    """
    group, groups = layout.group or D_ROPE, layout.groups or layout.d_qk // D_ROPE - 1
    columns = torch.rand(keys, groups, group, generator=generator, device=generator.device) / 2 + 0.5
    columns[..., 0] = 1
    fraction = torch.randint(32, (keys, groups, 1), generator=generator, device=generator.device)
    return (columns * (448 / 512 * (1 + (fraction + 0.45) / 128))).flatten(1)


def _encoded(case: SparseDecodeCase, layout: CacheFormat, keys: Tensor) -> Tensor:
    """Encode fp32 keys [pages, page, 1, d_qk] as uint8 [pages, page, 1, bytes per token]; NaN stays NaN."""
    if not layout.quantised:
        return keys.to(DTYPES[case.dtype]).view(torch.uint8)
    out = empty_cache(layout.name, *keys.shape[:2], fill=_NAN_BYTE).to(keys.device)
    return quantise_cache(keys, layout.name, power_of_two=case.power_of_two and layout.scale == "fp32", out=out)


def _cache_storage(case: SparseDecodeCase, pool: Pool, layout: CacheFormat, pages: int, device: torch.device) -> Tensor:
    """Allocate uint8 [pages, page, 1, bytes per token] in its layout, with 0xFF in it and, in all layouts but the far ones, around it."""
    token, page = layout.page_bytes(1), layout.page_bytes(pool.page_size)
    padded = layout is FP8_584 and case.cache_layout != "tight"
    cache_layout = case.cache_layout if layout.scales_inside or case.cache_layout not in ROWS_APART else "packed"
    row, offset, span = token, 0, 0
    stride = ceil_div(page, V4_PAGE_MULTIPLE) * V4_PAGE_MULTIPLE if padded else page
    match cache_layout:
        case "layers":
            offset, stride = stride, 3 * stride
        case "padded_rows":
            row = token + 112
            stride = pool.page_size * row
        case "far":
            stride = ceil_div(FAR_BYTES, (pages - 1) * V4_PAGE_MULTIPLE) * V4_PAGE_MULTIPLE
        case "far_rows":
            row = ceil_div(FAR_BYTES, max(pool.page_size - 1, 1) * V4_PAGE_MULTIPLE) * V4_PAGE_MULTIPLE
            stride, span = token, (pool.page_size - 1) * row + pages * token
        case _:
            pass
    if cache_layout in ("far", "far_rows"):
        storage = reserve(span or pages * stride, device)
        return storage.as_strided((pages, pool.page_size, 1, token), (stride, row, row, 1)).fill_(_NAN_BYTE)
    storage = torch.full((pages * stride,), _NAN_BYTE, dtype=torch.uint8, device=device)
    return storage.as_strided((pages, pool.page_size, 1, token), (stride, row, row, 1), offset)
