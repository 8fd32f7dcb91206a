"""Caches of every format and keys for them, for tests of what writes and gathers."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_mla.cache import empty_cache
from cute_mla.spec.cache_rows import CACHED, latent_columns, rotary_columns

FORMATS = tuple(CACHED)


def named(cache: str) -> str | None:
    """Return the kv_format argument: None where dtype and bytes of a token decide."""
    return cache if CACHED[cache].quantised and not rotary_columns(CACHED[cache]) else None


def cache_of(cache: str, pages: int = 3, page_size: int = 16, dtype: torch.dtype = torch.bfloat16, fill: int = 0xAA) -> Tensor:
    """Return a cache, every byte `fill`; pages begin at multiples of 16 bytes."""
    if not CACHED[cache].quantised or cache == "fp8_576":
        dtype = torch.float8_e4m3fn if cache == "fp8_576" else dtype
        return torch.full((pages, page_size, 1, CACHED[cache].d_qk * dtype.itemsize), fill, dtype=torch.uint8).view(dtype)
    own = CACHED[cache].page_bytes(page_size)
    return empty_cache(cache, pages, page_size, page_stride=own + -own % 16, fill=fill)


def keys(tokens: int, cache: str = "latent", dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Return latent and rotary columns that tell tokens and columns apart; no rotary columns where a format has none apart."""
    latent, rotary = latent_columns(CACHED[cache]), rotary_columns(CACHED[cache])
    rows = torch.randn(tokens, latent + rotary, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    return rows[:, :latent], rows[:, latent:]


def key_arguments(tokens: int, cache: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor | None]:
    """Return kv_c and k_pe of a write: the columns of `keys`, and None for no rotary columns."""
    kv_c, k_pe = keys(tokens, cache, dtype)
    return kv_c, k_pe if k_pe.shape[1] else None


def bytes_of(cache: Tensor) -> Tensor:
    """Return a copy of all bytes of its storage."""
    return torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage()).clone()
