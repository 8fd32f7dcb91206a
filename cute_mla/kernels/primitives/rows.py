"""Rows of global memory, read and written by lanes: elements, keys of a cache, arrays that may be null or of two widths.

A warp moves one key:
lane     latent columns 256 i + 8 lane + {0..7}, i = 0, 1, which the last lanes of fp8_584 have only for i = 0, and latent_1088 for
         i = 0 .. 3; and rotary columns 2 lane + {0, 1}, which v41, nope_528 and latent_512 do not have apart: loads and stores that a
         warp makes contiguous
words    pairs of 16-bit elements, or four e4m3 values
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
from cutlass import Boolean, Float8E4M3FN, Float32, Int32, Int64, Uint8, Uint16, Uint32, cute
from cutlass.cute.typing import AddressSpace

from ...spec.cache_format import CacheFormat, paged_twin
from ...spec.cache_rows import E4M3_MAX, LEAST_POWER_OF_TWO_AMAX, VECTOR, latent_columns, rotary_columns
from ...spec.mla import ELEMENT_BYTES, ceil_div
from .arithmetic import (
    E8M0_NAN,
    EXPONENT_OF_ONE_TWICE,
    INFINITE,
    MANTISSA_BITS,
    NAN,
    as_bits,
    as_float,
    codes,
    exponent_above,
    largest,
    pack_pair,
    pack_word,
    quotients,
    registers,
)

WORDS = VECTOR * ELEMENT_BYTES // 4  # of a vector of 16-bit elements
SPAN = 32 * VECTOR  # columns that a warp takes at a time
PAIR = 2  # rotary columns of a lane
FLOAT_BYTES = 4
SECTOR_BYTES = 32  # of L2: an access of a row in halves of a sector brings each of them twice
SECTOR_WORDS = SECTOR_BYTES // 4


def aligned(pointer: cute.Pointer, nbytes: int) -> cute.Pointer:
    """Return the address as a pointer known to be a multiple of nbytes, for vector accesses."""
    return cute.make_ptr(pointer.dtype, pointer.toint(), pointer.memspace, assumed_align=nbytes)


def load_word(source: cute.Pointer) -> Int32:
    """Load the elements of 4 bytes of gmem, at a multiple of 4 bytes."""
    return cute.recast_ptr(source, dtype=Int32).load()


def load_pair(source: cute.Pointer) -> Int32:
    """Load two neighbouring 16-bit elements of gmem, which may begin at any of them."""
    halves = cute.recast_ptr(source, dtype=Uint16)
    return Int32(Uint32(halves.load()) | (Uint32((halves + 1).load()) << 16))


def store_word(target: cute.Pointer, word: Int32) -> None:
    """Write the elements of 4 bytes to gmem, at a multiple of 4 bytes."""
    cute.recast_ptr(target, dtype=Int32).store(word)


def store_pair(target: cute.Pointer, word: Int32) -> None:
    """Write two neighbouring 16-bit elements to gmem, which may begin at any of them."""
    halves = cute.recast_ptr(target, dtype=Uint16)
    halves.store(Uint16(word & 0xFFFF))
    (halves + 1).store(Uint16((word >> 16) & 0xFFFF))


def store_vector(target: cute.Pointer, words: list[Any], dtype: type[cutlass.Numeric] = Int32) -> None:
    """Write as many 32-bit words as there are, 16 or 32 bytes, to a multiple of these bytes. dtype: of the words."""
    registers = cute.make_rmem_tensor(cute.make_layout(len(words)), dtype)
    for i, word in enumerate(words):
        registers[i] = word
    place = aligned(cute.recast_ptr(target, dtype=dtype), 4 * len(words))
    cute.autovec_copy(registers, cute.make_tensor(place, cute.make_layout(len(words))))


def store_vectors(target: cute.Pointer, words: list[Any], nbytes: int, dtype: type[cutlass.Numeric]) -> None:
    """Write contiguous words, so many bytes at a time, of which the target is a multiple. dtype: of the words."""
    at_once = nbytes // 4
    for first in range(0, len(words), at_once):
        store_vector(target + first, words[first : first + at_once], dtype)


def store_row(target: cute.Pointer, values: list[Float32], dtype: type[cutlass.Numeric], vectors: bool = True) -> None:
    """Write contiguous 16-bit elements to gmem, a multiple of 8, at a multiple of 16 bytes if `vectors`."""
    store_packed_row(target, [pack_pair(values[i], values[i + 1], dtype) for i in range(0, len(values), 2)], vectors)


def store_packed_row(target: cute.Pointer, words: list[Int32], vectors: bool = True, at_once: int = 4) -> None:
    """Write contiguous pairs of 16-bit elements to gmem, `at_once` of them, at a multiple of their size together if `vectors`."""
    for first in range(0, len(words), at_once):
        if vectors:
            store_vector(target + 2 * first, words[first : first + at_once])
        else:
            for i in range(first, first + at_once):
                store_pair(target + 2 * i, words[i])


@cute.jit
def load_or(table: cute.Pointer, index: Int32, default: Int32) -> Int32:
    """Return an int32 entry of a table; `default`, and no access, for a null table."""
    value = default
    if table.toint() != 0:
        value = (table + index).load()
    return value


@cute.jit
def load_or_one(pointer: cute.Pointer) -> Float32:
    """Return the fp32 number at an address; 1, and no access, for a null pointer."""
    value = Float32(1)
    if pointer.toint() != 0:
        value = pointer.load()
    return value


class Loaded(NamedTuple):
    """An integer on its way: its words, of which the high one means nothing unless `wide`. value() waits for both."""

    low: Int32
    high: Int32
    wide: Int32

    def value(self) -> Int64:
        """Return the integer."""
        high = cutlass.select_(self.wide != 0, self.high, self.low >> 31)
        return (Int64(high) << 32) | Int64(Uint32(self.low))


@cute.jit
def _load_word(address: Int64, wanted: Boolean, otherwise: Int32) -> Int32:
    """Load a word, if wanted."""
    word = otherwise
    if wanted:
        word = cute.make_ptr(Int32, address, AddressSpace.gmem, assumed_align=4).load()
    return word


def start_load(array: cute.Pointer, place: Int64, wide: Int32, otherwise: Int32 | None = None) -> Loaded:
    """Load an element of an array of int64, if wide, or int32. otherwise: the value where the array is null, which then is not wide.

    No branch has more than a load in it, so that what lies between this and value() does not wait.
    """
    address = array.toint() + (place << (2 + wide))
    low = _load_word(address, array.toint() != 0, Int32(0) if otherwise is None else otherwise)
    return Loaded(low, _load_word(address + 4, wide != 0, Int32(0)), wide)


def load_integer(array: cute.Pointer, place: Int64, wide: Int32) -> Int64:
    """Load an element of an array of int64, if wide, or int32."""
    return start_load(array, place, wide).value()


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


def load_if(wanted: Boolean | Int32, words: cute.Tensor, address: Int64) -> None:
    """Start the load of some neighbouring words at a multiple of their size; no access, and registers as they were, unless wanted.

    One predicated instruction. Zeros for what is not there would be moves to the same registers, which wait for the load.
    """
    count = cute.size(words)
    before = " ".join(f"mov.b32 {{$w{i}}}, {{$r{i + 2}}};" for i in range(count))
    targets = ", ".join(f"{{$w{i}}}" for i in range(count))
    load = f"ld.global.b32 {targets}" if count == 1 else f"ld.global.v{count}.b32 {{{targets}}}"
    loaded = cute.arch.inline_ptx(
        f"{{ .reg .pred wanted; setp.ne.b32 wanted, {{$r1}}, 0; {before} @wanted {load}, [{{$r0}}]; }}",
        write_only_types=[Int32] * count,
        read_only_args=[address, Int32(wanted), *(words[i] for i in range(count))],
    )
    for i, word in enumerate(loaded if count > 1 else (loaded,)):
        words[i] = word


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


@cute.jit
def load_floats(target: cute.Tensor, address: Int64, wanted: Boolean):
    """Load fp32 numbers, four at a time, from a multiple of 16 bytes, or a single one; NaN, and no access, unless wanted."""
    each = min(cute.size(target), 4)
    for first in cutlass.range_constexpr(0, cute.size(target), each):
        words = registers(each)
        load_words(words, address + first * FLOAT_BYTES, wanted, NAN)
        for i in cutlass.range_constexpr(each):
            target[first + i] = as_float(words[i])


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
