"""Keys written to caches and gathered from them: a case is one call in all its particulars; and the tensors made for it.

Tensors come from the case's seed, with nasty values on purpose. What no call writes or wants is NaN: unused pages and rows, and what lies
around them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..cache import quantise_cache
from ..ops.cache_torch import to_e4m3
from ..ops.paged_cache import columns_of, dtypes_of
from ..spec.arch import Arch
from ..spec.cache_format import LATENT, CacheFormat
from ..spec.cache_rows import CACHED, FP8_576, CacheRowsConfig, config_of, latent_columns
from ..spec.mla import D_ROPE, ceil_div
from .case import DTYPES, TAGS, BaseCase, Given, Tags, generator_for, nan_tensor
from .indexed import FAR_BYTES

KeyValues = Literal["normal", "nasty"]
KeyLayout = Literal["packed", "projection", "odd"]
SlotType = Literal["int64", "int32", "strided"]
PagedLayout = Literal["packed", "layers", "far"]

UNUSED = 0xFF  # bytes of NaN in every format, of codes, scales and 16-bit columns alike
ALIGNMENT = 16  # bytes, of pages
JUNK_PAGE = 2_147_480_000  # in block tables, past what lengths use


class CacheProblem(NamedTuple):
    """The shapes of a call, as far as they decide the kernel."""

    config: CacheRowsConfig


@dataclass(frozen=True)
class PagedCase(BaseCase):
    """One call over a paged cache.

    cache: its format; dtype: of the keys outside it. scale: of fp8_576; None: not given.
    cache_layout: "layers": one layer of three, whose pages lie side by side; "far": the last page lies beyond 2^32 bytes.
    """

    cut_by: ClassVar[str] = "pages"
    tags: ClassVar[Tags] = {"scale_of_cache": lambda scale: f"descale{scale:g}", "cache_layout": lambda layout: f"kv_{layout}", **TAGS}

    cache: str = LATENT.name
    page_size: int = 64
    pages: int = 4
    scale_of_cache: float | None = None
    cache_layout: PagedLayout = "packed"

    @property
    def format(self) -> CacheFormat:
        """The cache's."""
        return CACHED[self.cache]

    @property
    def keys(self) -> int:
        """That the call moves."""
        raise NotImplementedError

    @property
    def tiles(self) -> int:
        """64 keys cost about as much as a tile."""
        return max(ceil_div(self.keys, 64), 1)

    def problem(self, arch: Arch) -> CacheProblem:
        """The shapes of the call."""
        return CacheProblem(config_of(self.format, self.dtype))


@dataclass(frozen=True)
class CacheWriteCase(PagedCase):
    """One write.

    tokens: of them every fifth has a slot outside the cache, the others distinct ones in it. values: "nasty": rows of NaN, infinities, both
    zeros, subnormal and the largest values, and groups of zeros. key_layout: "projection": latent and rotary columns are parts of wider
    rows; "odd": so, beginning at odd elements. slot_type: "strided": int64, every other one counts. power_of_two: of fp8_656.
    """

    op: ClassVar[str] = "cache_write"
    tags: ClassVar[Tags] = {
        "values": str,
        "key_layout": lambda layout: f"keys_{layout}",
        "slot_type": lambda name: f"slots_{name}",
        "power_of_two": lambda _: "pow2",
        **PagedCase.tags,
    }

    tokens: int = 65
    values: KeyValues = "normal"
    key_layout: KeyLayout = "packed"
    slot_type: SlotType = "int64"
    power_of_two: bool = False

    @property
    def shape_id(self) -> str:
        """The first part of the id."""
        return f"{self.cache}-{self.dtype}-t{self.tokens}-p{self.pages}x{self.page_size}"

    @property
    def keys(self) -> int:
        """That the call moves."""
        return self.tokens


@dataclass(frozen=True)
class CacheGatherCase(PagedCase):
    """One gather.

    lengths: keys wanted of each request. starts: position of the first of them, None: not given. rest: rows of out behind the last key.
    broken: every seventh entry of the block table that a length uses names no page, and the last request goes beyond its row.
    """

    op: ClassVar[str] = "cache_gather"
    tags: ClassVar[Tags] = {
        "starts": lambda starts: "from" + "_".join(map(str, starts)),
        "rest": lambda rest: f"rest{rest}",
        "broken": lambda _: "broken_table",
        **PagedCase.tags,
    }

    lengths: tuple[int, ...] = (65,)
    starts: tuple[int, ...] | None = None
    rest: int = 0
    broken: bool = False

    @property
    def shape_id(self) -> str:
        """The first part of the id."""
        lengths = "_".join(map(str, self.lengths)) if len(self.lengths) <= 6 else f"{self.keys}_of_{len(self.lengths)}"
        return f"{self.cache}-{self.dtype}-k{lengths}-x{self.page_size}"

    @property
    def keys(self) -> int:
        """That the call moves."""
        return sum(self.lengths)

    @property
    def firsts(self) -> tuple[int, ...]:
        """The position of each request's first key."""
        return self.starts or (0,) * len(self.lengths)

    @property
    def pages_of_each(self) -> tuple[int, ...]:
        """Entries of the block table up to each request's last key."""
        return tuple(
            ceil_div(first + length, self.page_size) if length else 0 for first, length in zip(self.firsts, self.lengths, strict=True)
        )


@dataclass(frozen=True)
class CacheWriteTensors:
    """The operands of a write: as write_kv_cache takes them."""

    kv_c: Tensor
    k_pe: Tensor
    k_cache: Tensor
    slot_mapping: Tensor
    descale_k: Tensor | None
    given: Mapping[str, Given] = field(default_factory=dict)


@dataclass(frozen=True)
class CacheGatherTensors:
    """The operands of a gather: as gather_kv_cache takes them."""

    k_cache: Tensor
    block_table: Tensor
    cu_seqlens: Tensor
    starts: Tensor | None
    descale_k: Tensor | None
    given: Mapping[str, Given] = field(default_factory=dict)


def empty_pages(case: PagedCase, device: torch.device) -> Tensor:
    """A cache [pages, page size, 1, columns] in its layout, every byte UNUSED; "far": uninitialised but for its pages."""
    layout, dtype = case.format, DTYPES[case.dtype] if case.format is LATENT else dtypes_of(case.format)[0]
    token = columns_of(layout)
    own = ceil_div(case.page_size * token * dtype.itemsize, ALIGNMENT) * ALIGNMENT
    stride = 3 * own if case.cache_layout == "layers" else own
    if case.cache_layout == "far":
        stride = ceil_div(FAR_BYTES, (case.pages - 1) * ALIGNMENT) * ALIGNMENT
    nbytes = (case.pages - 1) * stride + (3 * own if case.cache_layout == "layers" else own)
    storage = torch.empty(nbytes, dtype=torch.uint8, device=device)
    first = own if case.cache_layout == "layers" else 0
    whole = storage.as_strided((case.pages, own), (stride, 1), first) if case.cache_layout == "far" else storage
    whole.fill_(UNUSED)
    elements = (case.pages, case.page_size, 1, token)
    strides = (stride // dtype.itemsize, token, token, 1)
    return storage.view(dtype).as_strided(elements, strides, first // dtype.itemsize)


def page_bytes(case: PagedCase, k_cache: Tensor) -> Tensor:
    """A copy of a cache's bytes, with all around them unless pages lie far apart, as int16: a result to compare."""
    if case.cache_layout != "far":
        return torch.empty(0, dtype=torch.uint8, device=k_cache.device).set_(k_cache.untyped_storage()).clone().view(torch.int16)
    return k_cache.view(torch.uint8).flatten(1).contiguous().view(torch.int16)


def copied_cache(case: PagedCase, k_cache: Tensor) -> Tensor:
    """A cache like another, with the same bytes."""
    copy = empty_pages(case, k_cache.device)
    copy.view(torch.uint8).copy_(k_cache.view(torch.uint8))
    return copy


def make_write_tensors(case: CacheWriteCase, device: str | torch.device = "cpu") -> CacheWriteTensors:
    """The operands of a case, the same for the same case."""
    device, latent = torch.device(device), latent_columns(case.format)
    columns = latent + D_ROPE
    values = _key_values(case, columns).to(DTYPES[case.dtype])
    before, around = {"packed": (0, 0), "projection": (64, 128), "odd": (3, 7)}[case.key_layout]
    wide = nan_tensor((case.tokens, columns + around), values.dtype, device)
    rows = wide[:, before : before + columns]
    rows.copy_(values)
    kv_c, k_pe = rows[:, :latent], rows[:, latent:]
    if case.key_layout == "packed":
        kv_c, k_pe = kv_c.contiguous(), k_pe.contiguous()
    return CacheWriteTensors(kv_c, k_pe, empty_pages(case, device), _slots(case).to(device), _scale(case, device))


def _scale(case: PagedCase, device: torch.device) -> Tensor | None:
    return None if case.scale_of_cache is None else torch.tensor(case.scale_of_cache, dtype=torch.float32, device=device)


def _key_values(case: CacheWriteCase, columns: int) -> Tensor:
    """fp32 [tokens, columns]."""
    draw = generator_for(case, case.tokens * columns, torch.device("cpu"))
    values = torch.randn(case.tokens, columns, generator=draw)
    if case.values == "normal":
        return values
    most = torch.finfo(DTYPES[case.dtype]).max
    widely = 10.0 ** torch.empty(case.tokens, 1).uniform_(-8, 4, generator=draw)
    values *= widely.clamp(max=most / 16)
    kinds = torch.arange(case.tokens) % 8
    values[kinds == 1, 3] = math.nan
    values[kinds == 1, 200] = -math.inf
    values[kinds == 2] = torch.copysign(torch.zeros(()), values[kinds == 2])
    values[kinds == 3, :130] = -0.0
    values[kinds == 4] = values[kinds == 4].sign() * torch.finfo(DTYPES[case.dtype]).tiny * 2.0**-5  # subnormal
    values[kinds == 5, ::7] = most
    values[kinds == 6] = values[kinds == 6].round(decimals=1) * 0 + torch.arange(columns).sub(300) / 64  # ties
    return values


def _slots(case: CacheWriteCase) -> Tensor:
    """[tokens]"""
    slots = case.pages * case.page_size
    draw = torch.Generator().manual_seed(case.seed + 1)
    chosen = torch.randperm(slots, generator=draw)[: case.tokens]
    outside = torch.tensor([-1, slots, -(1 << 31), (1 << 31) - 1, slots + 5])
    chosen = torch.where(torch.arange(case.tokens) % 5 == 2, outside[torch.arange(case.tokens) // 5 % 5], chosen)
    if case.slot_type == "int32":
        return chosen.int()
    if case.slot_type == "strided":
        chosen = torch.where(chosen == (1 << 31) - 1, 1 << 40, chosen)
        return torch.stack((chosen, torch.zeros_like(chosen)), dim=1)[:, 0]
    return chosen


def make_gather_tensors(case: CacheGatherCase, device: str | torch.device = "cpu") -> CacheGatherTensors:
    """The operands of a case, the same for the same case."""
    device = torch.device(device)
    table, used = _block_table(case)
    ends = [0, *accumulate(case.lengths)]
    return CacheGatherTensors(
        k_cache=_filled(case, used, device),
        block_table=table.to(device),
        cu_seqlens=torch.tensor(ends, dtype=torch.int32, device=device),
        starts=None if case.starts is None else torch.tensor(case.starts, dtype=torch.int32, device=device),
        descale_k=_scale(case, device),
        given=_given(case, device),
    )


def _block_table(case: CacheGatherCase) -> tuple[Tensor, Tensor]:
    """int32 [batch, pages per request], a slice of a wider table, and bool [slots]: those that the call wants."""
    draw = torch.Generator().manual_seed(case.seed + 1)
    counts = case.pages_of_each
    most = max(counts, default=0) - (1 if case.broken else 0)
    table = torch.full((len(counts), most + 2), JUNK_PAGE, dtype=torch.int32)
    used = torch.zeros(case.pages * case.page_size, dtype=torch.bool)
    pages = torch.randperm(case.pages, generator=draw)[torch.arange(sum(counts)) % case.pages]
    for request, own in enumerate(pages.split(counts)):
        table[request, : min(len(own), most)] = own[:most]
        positions = case.firsts[request] + torch.arange(case.lengths[request])
        positions = positions[positions // case.page_size < most]
        used[own[positions // case.page_size] * case.page_size + positions % case.page_size] = True
    if case.broken:
        table[:, 1:most:7] = torch.tensor([-1, case.pages])[torch.arange(len(range(1, most, 7))) % 2].int()
    return table[:, :most], used


def _filled(case: CacheGatherCase, used: Tensor, device: torch.device) -> Tensor:
    """A cache whose used slots hold keys."""
    cache = empty_pages(case, device)
    slots, layout = case.pages * case.page_size, case.format
    draw = generator_for(case, slots * layout.d_qk, torch.device("cpu"), 2)
    keys = torch.randn(case.pages, case.page_size, 1, layout.d_qk, generator=draw) * 10.0 ** torch.empty(
        case.pages, case.page_size, 1, 1
    ).uniform_(-3, 2, generator=draw)
    keys = torch.where(used.view(case.pages, case.page_size, 1, 1), keys, math.nan).to(device)
    if layout is LATENT:
        cache.copy_(keys)
    elif layout is FP8_576:
        cache.view(torch.uint8).copy_(to_e4m3(keys))
    else:
        quantise_cache(keys, case.cache, out=cache)
    return cache


def _given(case: CacheGatherCase, device: torch.device) -> dict[str, Given]:
    """dtype [rows, d_qk]."""
    rows, columns, dtype = case.keys + case.rest, case.format.d_qk, DTYPES[case.dtype]
    if case.outputs == "allocated":
        return {}
    if case.outputs == "given":
        out = nan_tensor((rows, columns), dtype, device)
        return {"out": Given(out, out)}
    out = nan_tensor((rows + 1, columns + (3 if case.outputs == "odd" else 64)), dtype, device)
    return {"out": Given(out[1:, 1:-2] if case.outputs == "odd" else out[1:, 32:-32], out)}
