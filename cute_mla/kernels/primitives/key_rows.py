"""One key, moved by one warp.

lane     latent columns 256 i + 8 lane + {0..7}, i = 0, 1, which the last lanes of fp8_584 have only for i = 0; and rotary columns
         2 lane + {0, 1}, which v41, nope_528 and latent_512 do not have apart: loads and stores that a warp makes contiguous
words    pairs of 16-bit elements, or four e4m3 values
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint16, cute
from cutlass.cute.typing import AddressSpace

from ...spec.cache_format import CacheFormat, paged_twin
from ...spec.cache_rows import VECTOR, latent_columns
from ...spec.mla import ELEMENT_BYTES, ceil_div
from .elements import load_pair

WORDS = VECTOR * ELEMENT_BYTES // 4  # of a vector of 16-bit elements
SPAN = 32 * VECTOR  # columns that a warp takes at a time
PAIR = 2  # rotary columns of a lane

INFINITE = 0x7F800000  # fp32 bits; magnitudes from here on are not finite
NAN = 0x7FC00000
MANTISSA_BITS = 23
E8M0_NAN = 255


@dataclass(frozen=True)
class Key:
    """A key in a cache. data, scales: addresses of its row and of its scales, if it has any."""

    data: Int64
    scales: Int64

    @staticmethod
    def of(cache: CacheFormat, page: Int64, row: Int32, row_stride: Int64, page_size: Int32) -> Key:
        """Return the key in a row of the page at an address. row_stride in bytes: where one kernel serves both orders, the stride tells."""
        data = page + row * row_stride
        twin = paged_twin(cache)
        if cache.scales_inside and twin is None:
            return Key(data, data + cache.code_bytes)
        behind = page + Int64(page_size) * (twin or cache).row_bytes + row * cache.scale_bytes
        if twin is None:
            return Key(data, behind)
        return Key(data, cutlass.select_(row_stride == twin.row_bytes, behind, data + cache.code_bytes))


def vectors_of(cache: CacheFormat) -> int:
    """Return the vectors of latent columns that a lane has."""
    return ceil_div(latent_columns(cache), SPAN)


def registers(words: int) -> cute.Tensor:
    """Return the registers for a lane's words."""
    return cute.make_rmem_tensor(cute.make_layout(words), Int32)


def exact(words: cute.Tensor, dtype: type[cutlass.Numeric]) -> list[Float32]:
    """Convert narrow floats to fp32."""
    count, per_word = cute.size(words), 32 // dtype.width
    held = registers(max(count, 2))  # of a tensor of one word, recast_tensor gives the first element again and again
    held.fill(0)
    for i in range(count):
        held[i] = words[i]
    values = cute.make_rmem_tensor(cute.make_layout(per_word * cute.size(held)), Float32)
    values.store(cute.recast_tensor(held, dtype).load().to(Float32))
    return [values[i] for i in range(per_word * count)]


def is_whole(row: Int64, elements: int) -> Boolean:
    """Return whether so many 16-bit elements from a row's first on can be moved at once."""
    return (row & (elements * ELEMENT_BYTES - 1)) == 0


def words_at(address: Int64, words: int) -> cute.Tensor:
    """Return the words of gmem, at a multiple of their size together."""
    pointer = cute.make_ptr(Int32, address, AddressSpace.gmem, assumed_align=4 * words)
    return cute.make_tensor(pointer, cute.make_layout(words))


def element_at(element: type[cutlass.Numeric], address: Int64) -> cute.Pointer:
    """Return one element of gmem."""
    return cute.make_ptr(element, address, AddressSpace.gmem, assumed_align=element.width // 8)


@cute.jit
def load_words(target: cute.Tensor, address: Int64, wanted: Boolean, otherwise: cutlass.Constexpr = 0):
    """Load all words of target; each is `otherwise`, and there is no access, unless wanted."""
    target.fill(otherwise)
    if wanted:
        cute.autovec_copy(words_at(address, cute.size(target)), target)


@cute.jit
def load_elements(target: cute.Tensor, address: Int64, whole: Boolean | bool, wanted: Boolean, otherwise: cutlass.Constexpr = 0):
    """Load as load_words does, from 16-bit elements that may begin at any of them. otherwise None: words mean nothing unless wanted."""
    if cutlass.const_expr(otherwise is not None):
        target.fill(otherwise)
    if wanted:
        if whole:
            cute.autovec_copy(words_at(address, cute.size(target)), target)
        else:
            for i in cutlass.range_constexpr(cute.size(target)):
                target[i] = load_pair(element_at(Uint16, address + 4 * i))


@cute.jit
def load_together(targets: cutlass.Constexpr, addresses: cutlass.Constexpr, whole: Boolean):
    """Load all words of several tensors.

    whole: all lie at multiples of their size; else 16-bit elements are loaded, which may begin at any of them. One branch for all: where
    each tensor has its own, the loads of single elements are predicated, and the next tensor waits for them.
    """
    if whole:
        for target, address in zip(targets, addresses, strict=True):
            cute.autovec_copy(words_at(address, cute.size(target)), target)
    else:
        for target, address in zip(targets, addresses, strict=True):
            load_elements(target, address, False, Boolean(True), None)


@cute.jit
def store_words(words: cute.Tensor, address: Int64, wanted: Boolean):
    """Store all words, if wanted."""
    if wanted:
        cute.autovec_copy(words, words_at(address, cute.size(words)))


@cute.jit
def store_elements(words: cute.Tensor, address: Int64, whole: Boolean | bool, wanted: Boolean):
    """Store as store_words does, to 16-bit elements that may begin at any of them."""
    if wanted:
        if whole:
            cute.autovec_copy(words, words_at(address, cute.size(words)))
        else:
            for i in cutlass.range_constexpr(cute.size(words)):
                element_at(Uint16, address + 4 * i).store(Uint16(words[i] & 0xFFFF))
                element_at(Uint16, address + 4 * i + 2).store(Uint16((words[i] >> 16) & 0xFFFF))
