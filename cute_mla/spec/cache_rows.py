"""Rows of paged caches, as cache_write and cache_gather move them: the formats, and how a warp takes a key.

A key is a latent part and 64 rotary columns: 512 + 64, in fp8_584 448 + 64, in latent_320 256 + 64, in latent_1088 1,024 + 64. Where one
kind of group holds all columns (v41, nope_528), and in latent_512, the latent part is the whole key. A lane takes 8 latent columns at a
time, and two rotary ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from .cache_format import FORMATS, FP8_584, FP8_656, LATENT, NOPE_528, V41, V41_PAGED, CacheFormat
from .mla import BF16, D_QK, D_ROPE, DENSE_DIMS, DTYPES, ELEMENT_BYTES

# All columns e4m3, times one fp32 scale for the whole cache: 576 bytes a token
FP8_576 = CacheFormat("fp8_576", D_QK, D_QK, 0, D_QK, 0, scales_inside=True)

# 16-bit columns of the other dimensions, latent ones before rotary ones
LATENTS = {
    d_qk: LATENT if d_qk == D_QK else CacheFormat(f"latent_{d_qk}", d_qk, 0, 0, d_qk * ELEMENT_BYTES, 0, scales_inside=True)
    for d_qk in DENSE_DIMS
}

CACHED: dict[str, CacheFormat] = {
    cache.name: cache for cache in (LATENT, FP8_656, FP8_584, FP8_576, V41, V41_PAGED, NOPE_528, *LATENTS.values())
}
KNOWN: dict[str, CacheFormat] = {**FORMATS, **CACHED}  # every name of a format, with or without kernels

ANY_16_BITS = "b16"  # element type of keys that are only copied
VECTOR = 8  # 16-bit elements that a lane moves at a time
KEYS_PER_BLOCK = 4  # one warp takes one key

E4M3_MAX = 448.0
LEAST_POWER_OF_TWO_AMAX = 1e-4  # FlashMLA's quantiser clamps amax / 448 to it before it takes a power of two


@dataclass(frozen=True)
class CacheRowsConfig:
    """One compiled variant: the cache's format, and the element type of keys outside it."""

    cache: str
    dtype: str

    @property
    def name(self) -> str:
        """The kernel's name in the manifest, without op and arch."""
        return f"{self.dtype}_{self.cache}"

    @property
    def format(self) -> CacheFormat:
        """The format of the cache."""
        return CACHED[self.cache]


def config_of(cache: CacheFormat, dtype: str) -> CacheRowsConfig:
    """Return the variant for a cache of this format and keys of this element type, "bf16" or "fp16"."""
    return CacheRowsConfig(cache.kernels, dtype if cache.quantised else ANY_16_BITS)


def rotary_columns(cache: CacheFormat) -> int:
    """Return the number of columns of a key that lie apart from the latent columns: 64 or 0."""
    if not cache.quantised:
        return DENSE_DIMS[cache.d_qk].rotary
    return 0 if cache.groups and cache.quantised == cache.d_qk else D_ROPE


def latent_columns(cache: CacheFormat) -> int:
    """Return the number of columns of a key before the rotary columns."""
    return cache.d_qk - rotary_columns(cache)


def key_types(cache: CacheFormat) -> tuple[str, ...]:
    """Return the element types that keys outside a cache of this format can have: those that are only copied, either."""
    return (BF16,) if cache.quantised else DTYPES


def closed_variants() -> tuple[CacheRowsConfig, ...]:
    """Return every variant that ships, of either op and on each architecture."""
    return tuple(dict.fromkeys(config_of(cache, dtype) for cache in CACHED.values() for dtype in key_types(cache)))
