"""Paged caches that keys are written to or gathered from: what the cases of cache_write and cache_gather share.

A case's seed determines its tensors. Every byte that a call must neither write nor read holds NaN: unused pages and rows, and the memory
around them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ...ops.paged_cache import columns_of, dtypes_of
from ...spec.arch import Arch
from ...spec.cache_format import LATENT, CacheFormat
from ...spec.cache_rows import CACHED, KNOWN, CacheRowsConfig, config_of
from ...spec.mla import ceil_div
from .base import DTYPES, TAGS, BaseCase, Tags
from .far import FAR_ELEMENTS, far_tensor, reserve

PagedLayout = Literal["packed", "layers", "far", "far_rows"]

_UNUSED = 0xFF  # in codes, scales and 16-bit columns of every format: part of a NaN
_ALIGNMENT = 16  # bytes, of pages


class CacheProblem(NamedTuple):
    """The properties of a call that select the kernel."""

    config: CacheRowsConfig


@dataclass(frozen=True)
class PagedCacheCase(BaseCase):
    """One call over a paged cache.

    cache: the name of the cache's format; dtype: of the keys outside the cache. scale_of_cache: descale_k of fp8_576, None: omitted.
    cache_layout: "layers": one layer of three, whose pages lie side by side; "far": the last page lies beyond 2^32 elements; "far_rows":
        the last row of every page does, not where scales lie behind all rows of a page.
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
        """Return the format of the cache."""
        return CACHED[self.cache]

    @property
    def kv_format(self) -> str | None:
        """Return the argument that names the format, None where dtype and bytes of a token decide."""
        return named_format(self.format)

    @property
    def keys(self) -> int:
        """Return the number of keys that the call moves."""
        raise NotImplementedError

    @property
    def tiles(self) -> int:
        """Return the cost on the simulated device; 64 keys cost about as much as a tile of attention."""
        return max(ceil_div(self.keys, 64), 1)

    def problem(self, arch: Arch) -> CacheProblem:
        """Return the properties of the call that select the kernel."""
        return CacheProblem(config_of(self.format, self.dtype))


def named_format(layout: CacheFormat) -> str | None:
    """Return the argument that names a format, None where dtype and bytes of a token decide."""
    return layout.name if [columns_of(known) for known in KNOWN.values()].count(columns_of(layout)) > 1 else None


def allocate_cache(case: PagedCacheCase, device: torch.device) -> Tensor:
    """Allocate a cache [pages, page size, 1, columns] in its layout, full of NaN; "far", "far_rows": only its elements."""
    layout, dtype = case.format, dtypes_of(case.format)[0] if case.format.quantised else DTYPES[case.dtype]
    token = columns_of(layout)
    shape = (case.pages, case.page_size, 1, token)
    if case.cache_layout == "far_rows":
        return far_tensor(shape, 1, dtype, device)
    own = ceil_div(case.page_size * token * dtype.itemsize, _ALIGNMENT) * _ALIGNMENT
    stride = 3 * own if case.cache_layout == "layers" else own
    if case.cache_layout == "far":
        stride = ceil_div(FAR_ELEMENTS * dtype.itemsize, (case.pages - 1) * _ALIGNMENT) * _ALIGNMENT
    nbytes = (case.pages - 1) * stride + (3 * own if case.cache_layout == "layers" else own)
    storage = reserve(nbytes, device) if case.cache_layout == "far" else torch.empty(nbytes, dtype=torch.uint8, device=device)
    first = own if case.cache_layout == "layers" else 0
    whole = storage.as_strided((case.pages, own), (stride, 1), first) if case.cache_layout == "far" else storage
    whole.fill_(_UNUSED)
    strides = (stride // dtype.itemsize, token, token, 1)
    return storage.view(dtype).as_strided(shape, strides, first // dtype.itemsize)


def cache_bytes(case: PagedCacheCase, k_cache: Tensor) -> Tensor:
    """Copy the bytes of a cache to int16, a result to compare; the memory around pages is included unless the layout is a far one."""
    if case.cache_layout not in ("far", "far_rows"):
        return torch.empty(0, dtype=torch.uint8, device=k_cache.device).set_(k_cache.untyped_storage()).clone().view(torch.int16)
    return k_cache.view(torch.uint8).contiguous().flatten(1).view(torch.int16)


def key_bytes(case: PagedCacheCase, content: Tensor, slot: int) -> Tensor:
    """Return uint8 [bytes of a key] out of the bytes of a packed cache, int16, as cache_bytes returns them."""
    layout, (page, row) = case.format, divmod(slot, case.page_size)
    own = content.view(torch.uint8).view(case.pages, -1)[page]
    if layout.scales_inside:
        return own.view(case.page_size, -1)[row]
    first = case.page_size * layout.row_bytes + row * layout.scale_bytes  # nothing is said of the bytes behind the scales
    return torch.cat([own[row * layout.row_bytes : (row + 1) * layout.row_bytes], own[first : first + layout.groups]])


def copy_cache(case: PagedCacheCase, k_cache: Tensor) -> Tensor:
    """Return a copy of a cache in the same layout."""
    copy = allocate_cache(case, k_cache.device)
    copy.view(torch.uint8).copy_(k_cache.view(torch.uint8))
    return copy


def scale_tensor(case: PagedCacheCase, device: torch.device) -> Tensor | None:
    """Return the descale_k argument, fp32 [], or None."""
    return None if case.scale_of_cache is None else torch.tensor(case.scale_of_cache, dtype=torch.float32, device=device)
