"""Columns of a key, quantised where its cache is, and written by one warp (primitives/key_rows.py)."""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, Int64, Uint8, Uint16, cute

from ...spec.cache_format import CacheFormat
from ...spec.cache_rows import E4M3_MAX, LEAST_POWER_OF_TWO_AMAX, VECTOR, latent_columns, rotary_columns
from ...spec.mla import ELEMENT_BYTES
from .elements import pack_word
from .key_rows import E8M0_NAN, INFINITE, MANTISSA_BITS, NAN, PAIR, SPAN, Key, element_at, exact, store_words
from .quantise import EXPONENT_OF_ONE_TWICE, codes, exponent_above, largest, quotients
from .registers import as_bits, as_float


@cute.jit
def store_scale(element: cutlass.Constexpr, value: Int32, address: Int64, wanted: Boolean):
    """Store one scale."""
    if wanted:
        element_at(element, address).store(element(value))


@cute.jit
def scale_of_group(amax: Int32, power_of_two: Int32) -> Int32:
    """Return the bits of an fp32 scale."""
    scale = as_bits(as_float(amax) / Float32(E4M3_MAX))
    if power_of_two != 0:
        scale = exponent_above(amax, LEAST_POWER_OF_TWO_AMAX) << MANTISSA_BITS
    return cutlass.select_(amax >= INFINITE, Int32(NAN), scale)


class KeyWriter:
    """Writer of keys of an element type to a cache of a format."""

    def __init__(self, cache: CacheFormat, dtype: type[cutlass.Numeric]) -> None:
        self.cache = cache
        self.dtype = dtype
        self.latent = latent_columns(cache)
        self.rotary = rotary_columns(cache)
        self.is_flat = bool(cache.quantised) and not cache.groups  # one scale for the whole cache

    def write_vector(self, key: Key, words: cute.Tensor, i: int, lane: Int32, scale: Float32, power_of_two: Int32) -> None:
        """Write 8 latent columns of a lane."""
        column = SPAN * i + VECTOR * lane
        wanted = column < self.latent
        if not self.cache.quantised:
            store_words(words, key.data + column * ELEMENT_BYTES, wanted)
            return
        values = exact(words, self.dtype)
        if not self.cache.groups:
            scaled = [value / scale for value in values]
        else:
            lanes = self.cache.group // VECTOR
            amax = largest(values, lanes)
            group, leads = column // self.cache.group, wanted & (lane % lanes == 0)
            if self.cache.scale == "fp32":
                bits = scale_of_group(amax, power_of_two)
                store_scale(Int32, bits, key.scales + group * 4, leads)
                divisor = as_float(cutlass.select_(bits == 0, as_bits(Float32(1.0)), bits))
                scaled = quotients(values, divisor)
            else:
                exponent = exponent_above(amax, LEAST_POWER_OF_TWO_AMAX)
                finite = amax < INFINITE
                store_scale(Uint8, cutlass.select_(finite, exponent, Int32(E8M0_NAN)), key.scales + group, leads)
                reciprocal = as_float(cutlass.select_(finite, (EXPONENT_OF_ONE_TWICE - exponent) << MANTISSA_BITS, Int32(NAN)))
                scaled = [value * reciprocal for value in values]
        store_words(codes(scaled), key.data + column, wanted)

    def write_pair(self, key: Key, words: cute.Tensor, lane: Int32, scale: Float32) -> None:
        """Write 2 rotary columns of a lane."""
        if self.is_flat:
            values = [value / scale for value in exact(words, self.dtype)]
            both = pack_word([*values, Float32(0.0), Float32(0.0)], Float8E4M3FN)
            element_at(Uint16, key.data + self.latent + PAIR * lane).store(Uint16(both & 0xFFFF))
            return
        wide = self.cache.wide_offset + (0 if self.cache.quantised else self.latent * ELEMENT_BYTES)
        if self.cache.quantised and self.dtype is not cutlass.BFloat16:
            words[0] = pack_word(exact(words, self.dtype), cutlass.BFloat16)
        store_words(words, key.data + wide + PAIR * lane * ELEMENT_BYTES, Boolean(True))
