"""PTX arithmetic on NumPy arrays: roundings, conversions and special values that NumPy does not have by itself.

Every function is pure and works on arrays of any shape. The forms of values are

    f32            float32 arrays
    f16, bf16      uint16 arrays of bit patterns; packed pairs are uint32 whose `.view(uint16)` holds the lower half first
    e4m3, e5m2     uint8 arrays of bit patterns; packed pairs are uint16, lower byte first (and ue8m0)
    integers       arrays of the matching NumPy integer type

Overflow and invalid operations are normal here: call under `numpy.errstate(all="ignore")`. Where PTX documents an approximation (ex2.approx
and its like) the exact result, rounded once, is returned. Plain f32 add, sub, mul, div and sqrt with .rn are NumPy's own operators, which
round once. The NaN that an f32 operation produces keeps NumPy's payload unless `canonical_nan` is applied; narrower results are canonical.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Conversion = Callable[..., Array]

F32_MIN_NORMAL = np.float32(2.0**-126)
BF16_MAX_BITS = 0x7F7F
HALF_NAN = np.uint16(0x7FFF)  # canonical NaN of f16 and of bf16
F32_NAN_BITS = np.uint32(0x7FFFFFFF)
FP8_NAN = np.uint8(0x7F)

_U16 = np.uint32(16)
_HIGH_HALF = np.uint32(0xFFFF0000)
_ROUND_BF16 = np.uint32(0x7FFF)
_TIE_BF16 = np.uint16(0x8000)
_ONE32 = np.uint32(1)
_BEYOND = np.float64(1 + 2.0**-52)  # factors that move a float64 value by one or two units
_SHORT = np.float64(1 - 2.0**-52)


# ---- rounding -----------------------------------------------------------------------------------------------------------------------


def flush_f32(x: Array) -> Array:
    """Flush subnormal f32 values to zeros of their sign (.ftz). Return x itself if there is nothing to do."""
    normal = np.abs(x) >= F32_MIN_NORMAL
    if np.count_nonzero(normal) == normal.size:
        return x
    flushed: Array = x * normal
    return flushed


def canonical_nan(x: Array) -> Array:
    """Replace every f32 NaN by 0x7FFFFFFF, as PTX arithmetic returns it."""
    nan = x != x
    if nan.any():
        return np.where(nan, F32_NAN_BITS, x.view(np.uint32)).view(np.float32)
    return x


def round_to_f32(x: Array, rounding: str = "rn") -> Array:
    """Round float64 values to float32 with rounding rn, rz, rm or rp."""
    nearest: Array = x.astype(np.float32)
    if rounding == "rn":
        return nearest
    back = nearest.astype(np.float64)
    if rounding == "rz":
        return np.where(np.abs(back) > np.abs(x), np.nextafter(nearest, np.float32(0)), nearest)
    if rounding == "rm":
        return np.where(back > x, np.nextafter(nearest, np.float32(-np.inf)), nearest)
    if rounding == "rp":
        return np.where(back < x, np.nextafter(nearest, np.float32(np.inf)), nearest)
    raise ValueError(f"rounding {rounding!r} is not supported, only rn, rz, rm, rp")


def _make_odd(value: Array, error: Array) -> Array:
    """Turn value = nearest(value + error), float64, into the rounding to odd, from which any narrower rounding is exact."""
    bits = value.view(np.int64)
    adjust = (np.abs(error) > 0) & ((bits & 1) == 0)  # an error of NaN (infinite or NaN value) adjusts nothing
    step = np.where((error < 0) == (value < 0), 1, -1)
    return (bits + step * adjust).view(np.float64)


def sum_to_odd(a: Array, b: Array) -> Array:
    """Return a + b of float64 arrays, rounded to odd."""
    total = a + b
    part = total - a
    return _make_odd(total, (a - (total - part)) + (b - part))


def _signed_zero_down(total: Array, a: Array, b: Array) -> Array:
    """Return the sums with .rm's sign of exact zeros: -0 unless both terms are +0."""
    return np.where((total == 0) & (np.signbit(a) | np.signbit(b)), -0.0, total)


def _add_directed(a: Array, b: Array, rounding: str) -> Array:
    total = sum_to_odd(a, b)
    if rounding == "rm":
        total = _signed_zero_down(total, a, b)
    return round_to_f32(total, rounding)


def add_f32(a: Array, b: Array, rounding: str = "rn") -> Array:
    """Return a + b in f32, rounded once."""
    if rounding == "rn":
        return a + b
    return _add_directed(a.astype(np.float64), b.astype(np.float64), rounding)


def mul_f32(a: Array, b: Array, rounding: str = "rn") -> Array:
    """Return a * b in f32, rounded once."""
    if rounding == "rn":
        return a * b
    return round_to_f32(a.astype(np.float64) * b.astype(np.float64), rounding)  # the float64 product is exact


def fma_f32(a: Array, b: Array, c: Array, rounding: str = "rn") -> Array:
    """Return a * b + c in f32, rounded once.

    The float64 sum of the exact product and c is off by at most half a unit. Where moving it further than that, either way, leaves the f32
    result alone, that is the result; otherwise (the sum is at a tie of f32) the sum is rounded to odd before it is narrowed.
    """
    product = np.multiply(a, b, dtype=np.float64)
    if rounding != "rn":
        return _add_directed(product, c.astype(np.float64), rounding)
    total = product + c
    beyond: Array = (total * _BEYOND).astype(np.float32)
    if beyond.tobytes() == (total * _SHORT).astype(np.float32).tobytes():
        return beyond
    return sum_to_odd(product, c.astype(np.float64)).astype(np.float32)


# ---- minimum and maximum ------------------------------------------------------------------------------------------------------------


def max_f32(a: Array, b: Array, nan: bool = False) -> Array:
    """Return the maximum by PTX rules: the operand that is not NaN, +0 above -0. nan (.NaN): a NaN operand gives the canonical NaN."""
    if nan:
        return canonical_nan(_order_zeros(np.maximum(a, b), a, b, np.bitwise_and))
    return _order_zeros(np.fmax(a, b), a, b, np.bitwise_and)


def min_f32(a: Array, b: Array, nan: bool = False) -> Array:
    """Return the minimum by PTX rules: the operand that is not NaN, -0 below +0. nan (.NaN): a NaN operand gives the canonical NaN."""
    if nan:
        return canonical_nan(_order_zeros(np.minimum(a, b), a, b, np.bitwise_or))
    return _order_zeros(np.fmin(a, b), a, b, np.bitwise_or)


def _order_zeros(result: Array, a: Array, b: Array, combine: Callable[[Array, Array], Array]) -> Array:
    """Combine the bits of both operands where both are zeros (and: -0 only if both; or: -0 if either)."""
    if np.count_nonzero(result) == result.size:
        return result
    zeros = (a == 0) & (b == 0)
    bits = combine(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32))
    return np.where(zeros, bits, result.view(np.uint32)).view(np.float32)


# ---- functions that PTX approximates ------------------------------------------------------------------------------------------------


def _approximation(function: Callable[[Array], Array]) -> Callable[[Array, bool], Array]:
    def evaluate(x: Array, ftz: bool = False) -> Array:
        """Return the function in float64, rounded once to f32; ftz flushes subnormal inputs and results."""
        if not ftz:
            return function(x.astype(np.float64)).astype(np.float32)
        return flush_f32(function(flush_f32(x).astype(np.float64)).astype(np.float32))

    return evaluate


def ex2_f32(x: Array, ftz: bool = False) -> Array:
    """Return 2**x, rounded once to f32; ftz flushes subnormal results (a subnormal input gives 1 either way)."""
    result: Array = np.exp2(x.astype(np.float64)).astype(np.float32)
    return flush_f32(result) if ftz else result


lg2_f32 = _approximation(np.log2)
rcp_f32 = _approximation(np.reciprocal)
sqrt_f32 = _approximation(np.sqrt)
rsqrt_f32 = _approximation(lambda x: 1.0 / np.sqrt(x))
tanh_f32 = _approximation(np.tanh)


def div_f32(a: Array, b: Array, ftz: bool = False) -> Array:
    """Return a / b in f32, correctly rounded (.approx and .full too); ftz flushes subnormal inputs and results."""
    return flush_f32(flush_f32(a) / flush_f32(b)) if ftz else a / b


# ---- 16-bit formats -----------------------------------------------------------------------------------------------------------------


def bf16_to_f32(bits: Array) -> Array:
    """Widen bf16 patterns; exact."""
    return (bits.astype(np.uint32) << _U16).view(np.float32)


def f16_to_f32(bits: Array) -> Array:
    """Widen f16 patterns; exact."""
    return bits.view(np.float16).astype(np.float32)


def half_to_f32(bits: Array, kind: str) -> Array:
    """Widen patterns of kind "f16" or "bf16"."""
    if kind == "bf16":
        return bf16_to_f32(bits)
    if kind == "f16":
        return f16_to_f32(bits)
    raise ValueError(f"16-bit format {kind!r} is not supported, only f16 and bf16")


def _bf16_high(x: Array, rounding: str) -> Array:
    """Return f32 rounded to bf16, in the upper half of uint32 words whose lower halves are undefined; a NaN becomes 0x7FFF."""
    bits = x.view(np.uint32)
    if rounding == "rn":
        bits = ((bits >> _U16) & _ONE32) + bits
        bits += _ROUND_BF16
    elif rounding != "rz":
        raise ValueError(f"rounding {rounding!r} to bf16 is not supported, only rn and rz")
    nan = x != x
    return np.where(nan, F32_NAN_BITS, bits) if np.count_nonzero(nan) else bits


def f32_to_bf16(x: Array, rounding: str = "rn") -> Array:
    """Round f32 to bf16 patterns with rn or rz; NaN becomes 0x7FFF."""
    return (_bf16_high(x, rounding) >> _U16).astype(np.uint16)


def f32_to_bf16x2(upper: Array, lower: Array, rounding: str = "rn") -> Array:
    """Return the result of cvt.{rn,rz}.bf16x2.f32 d, upper, lower as uint32."""
    shape = upper.shape if upper.shape == lower.shape else np.broadcast_shapes(upper.shape, lower.shape)
    both = np.empty((2, *shape), dtype=np.float32)
    both[0], both[1] = upper, lower
    rounded = _bf16_high(both, rounding)
    return (rounded[0] & _HIGH_HALF) | (rounded[1] >> _U16)


def f32_to_f16(x: Array, rounding: str = "rn") -> Array:
    """Round f32 (or float64) to f16 patterns with rn, rz, rm or rp; NaN becomes 0x7FFF."""
    nearest = x.astype(np.float16)
    if rounding != "rn":
        back = nearest.astype(x.dtype)
        if rounding == "rz":
            wrong, toward = np.abs(back) > np.abs(x), np.float16(0)
        elif rounding == "rm":
            wrong, toward = back > x, np.float16(-np.inf)
        elif rounding == "rp":
            wrong, toward = back < x, np.float16(np.inf)
        else:
            raise ValueError(f"rounding {rounding!r} to f16 is not supported, only rn, rz, rm, rp")
        nearest = np.where(wrong, np.nextafter(nearest, toward), nearest)
    nan = x != x
    bits: Array = nearest.view(np.uint16)
    return np.where(nan, HALF_NAN, bits) if np.count_nonzero(nan) else bits


def finite_halves(pairs: Array, kind: str) -> Array:
    """Return uint32 pairs of f16 or bf16 with the largest finite value in place of infinities, as .satfinite has it."""
    halves = np.ascontiguousarray(pairs, dtype=np.uint32).view(np.uint16)
    infinity = {"f16": 0x7C00, "bf16": 0x7F80}[kind]
    return np.where(halves & 0x7FFF == infinity, halves - 1, halves).astype(np.uint16).view(np.uint32)


def pack_halves(upper: Array, lower: Array) -> Array:
    """Pack two uint16 arrays into one uint32 array."""
    return (upper.astype(np.uint32) << _U16) | lower


def f32_to_f16x2(upper: Array, lower: Array, rounding: str = "rn") -> Array:
    """Return the result of cvt.{rn,rz}.f16x2.f32 d, upper, lower as uint32."""
    return pack_halves(f32_to_f16(upper, rounding), f32_to_f16(lower, rounding))


def _narrow_odd(x: Array, kind: str) -> Array:
    """Round float64 values, exact or rounded to odd, to f16 or bf16 patterns (nearest even)."""
    if kind == "f16":
        return f32_to_f16(x)  # NumPy rounds float64 to float16 in one step
    nearest = x.astype(np.float32)
    if not np.count_nonzero(nearest.view(np.uint16)[..., ::2] == _TIE_BF16):  # rounding to f32 has then crossed no tie
        return f32_to_bf16(nearest)
    bits = nearest.view(np.int32)
    error = x - nearest
    adjust = (np.abs(error) > 0) & ((bits & 1) == 0) & np.isfinite(nearest)
    step = np.where((error < 0) == np.signbit(nearest), 1, -1).astype(np.int32)
    return f32_to_bf16((bits + step * adjust).astype(np.int32).view(np.float32))


def half_arithmetic(operation: str, kind: str, nan: bool = False) -> Conversion:
    """Return the function of uint16 pattern arrays for add, sub, mul, fma, min or max in f16 or bf16, rounded once (rn).

    Packed operands are passed as `.view(uint16)`. nan: min and max give NaN when an operand is NaN.
    Raises ValueError for an operation or format that is not known.
    """
    if operation not in _HALF_OPERATIONS or kind not in ("f16", "bf16") or (nan and operation not in ("min", "max")):
        raise ValueError(f"{operation} in {kind!r}, nan={nan} is not supported, only {sorted(_HALF_OPERATIONS)} in f16 and bf16")
    function = _HALF_OPERATIONS[operation]

    def evaluate(*operands: Array) -> Array:
        wide = [half_to_f32(bits, kind) for bits in operands]
        if operation in ("min", "max"):
            return f32_to_half(function(*wide, nan=nan), kind)
        if operation in ("add", "sub"):  # f32 has more than twice the digits of both formats: rounding twice is exact
            return f32_to_half(function(*wide), kind)
        return _narrow_odd(function(*(value.astype(np.float64) for value in wide)), kind)

    return evaluate


def f32_to_half(x: Array, kind: str, rounding: str = "rn") -> Array:
    """Round f32 to patterns of kind "f16" or "bf16"."""
    if kind == "bf16":
        return f32_to_bf16(x, rounding)
    if kind == "f16":
        return f32_to_f16(x, rounding)
    raise ValueError(f"16-bit format {kind!r} is not supported, only f16 and bf16")


# e2m1, by the four bits of a code: sign, two bits of exponent, one of mantissa
_E2M1_TO_F32 = np.array([sign * size for sign in (1, -1) for size in (0, 0.5, 1, 1.5, 2, 3, 4, 6)], np.float32)


def e2m1x2_to_halves(codes: Array, kind: str) -> Array:
    """Return uint32 pairs of f16 or bf16 of two e2m1 in each low byte, the lower one first; exact."""
    table = f32_to_half(_E2M1_TO_F32, kind)
    return pack_halves(table[codes >> 4 & 15], table[codes & 15])


_HALF_OPERATIONS: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": lambda a, b: a * b,  # exact in float64
    "fma": lambda a, b, c: sum_to_odd(a * b, c),
    "min": min_f32,
    "max": max_f32,
}


# ---- 8-bit formats ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fp8Format:
    """An 8-bit float: mantissa bits, exponent bias, code of the largest finite value."""

    mantissa: int
    bias: int
    largest: int


FP8_FORMATS = {"e4m3": Fp8Format(3, 7, 0x7E), "e5m2": Fp8Format(2, 15, 0x7B)}


def _fp8_values(name: str) -> Array:
    """Return the float32 value of each of the 256 codes."""
    form = FP8_FORMATS[name]
    codes = np.arange(256)
    exponent = (codes & 0x7F) >> form.mantissa
    fraction = (codes & ((1 << form.mantissa) - 1)) / (1 << form.mantissa)
    value = np.where(exponent == 0, np.ldexp(fraction, 1 - form.bias), np.ldexp(1 + fraction, exponent - form.bias))
    value = np.where((codes & 0x7F) > form.largest, np.nan, value)
    if name == "e5m2":
        value = np.where((codes & 0x7F) == 0x7C, np.inf, value)
    signed: Array = np.where(codes > 0x7F, -value, value).astype(np.float32)
    return np.where(np.isnan(signed), F32_NAN_BITS, signed.view(np.uint32)).view(np.float32)


FP8_TO_F32 = {name: _fp8_values(name) for name in FP8_FORMATS}
with np.errstate(all="ignore"):
    FP8_TO_F16 = {name: f32_to_f16(values) for name, values in FP8_TO_F32.items()}
    FP8_TO_BF16 = {name: f32_to_bf16(values) for name, values in FP8_TO_F32.items()}


def fp8_to_f32(codes: Array, kind: str) -> Array:
    """Widen uint8 codes of kind "e4m3" or "e5m2"; exact."""
    return _fp8_table(FP8_TO_F32, kind).take(codes)


def fp8x2_to_f16x2(pairs: Array, kind: str) -> Array:
    """Execute cvt.rn.f16x2.{e4m3x2,e5m2x2}: uint16 pairs of codes to uint32 pairs of f16; exact, NaN becomes 0x7FFF."""
    return _widen_pairs(pairs, _fp8_table(FP8_TO_F16, kind))


def fp8x2_to_bf16x2(pairs: Array, kind: str) -> Array:
    """Execute cvt.rn.bf16x2.{e4m3x2,e5m2x2}: uint16 pairs of codes to uint32 pairs of bf16; exact, NaN becomes 0x7FFF."""
    return _widen_pairs(pairs, _fp8_table(FP8_TO_BF16, kind))


def _widen_pairs(pairs: Array, table: Array) -> Array:
    codes = np.ascontiguousarray(pairs, dtype=np.uint16).view(np.uint8)
    halves: Array = table.take(codes)
    return halves.view(np.uint32)


def _fp8_table(tables: dict[str, Array], kind: str) -> Array:
    if kind not in tables:
        raise ValueError(f"8-bit format {kind!r} is not supported, only {sorted(tables)}")
    return tables[kind]


def f32_to_fp8(x: Array, kind: str) -> Array:
    """Execute cvt.rn.satfinite: round to nearest even; beyond the range give the largest finite value of that sign; NaN gives 0x7F."""
    if kind not in FP8_FORMATS:
        raise ValueError(f"8-bit format {kind!r} is not supported, only {sorted(FP8_FORMATS)}")
    form = FP8_FORMATS[kind]
    drop = 23 - form.mantissa
    magnitude = np.abs(x)
    bits = magnitude.view(np.uint32)
    rounded = (bits + ((bits >> np.uint32(drop)) & _ONE32) + np.uint32((1 << (drop - 1)) - 1)) >> np.uint32(drop)
    normal = rounded.astype(np.int64) - ((127 - form.bias) << form.mantissa)
    small = magnitude < np.float32(2.0 ** (1 - form.bias))
    subnormal = np.rint(np.where(small, magnitude, 0) * np.float32(2.0 ** (form.bias - 1 + form.mantissa))).astype(np.int64)
    code = np.minimum(np.where(small, subnormal, normal), form.largest) | np.where(np.signbit(x), 0x80, 0)
    return np.where(x != x, FP8_NAN, code.astype(np.uint8))


def f32_to_fp8x2(upper: Array, lower: Array, kind: str) -> Array:
    """Return the result of cvt.rn.satfinite.{e4m3x2,e5m2x2}.f32 d, upper, lower as uint16."""
    return (f32_to_fp8(upper, kind).astype(np.uint16) << np.uint16(8)) | f32_to_fp8(lower, kind)


def f16x2_to_fp8x2(pairs: Array, kind: str) -> Array:
    """Execute cvt.rn.satfinite.{e4m3x2,e5m2x2}.f16x2: uint32 pairs of f16 to uint16 pairs of codes."""
    halves = np.ascontiguousarray(pairs, dtype=np.uint32).view(np.uint16)
    return f32_to_fp8(f16_to_f32(halves), kind).view(np.uint16)


def bf16x2_to_fp8x2(pairs: Array, kind: str) -> Array:
    """Execute cvt.rn.satfinite.{e4m3x2,e5m2x2}.bf16x2: uint32 pairs of bf16 to uint16 pairs of codes."""
    halves = np.ascontiguousarray(pairs, dtype=np.uint32).view(np.uint16)
    return f32_to_fp8(bf16_to_f32(halves), kind).view(np.uint16)


# ---- scales: ue8m0, powers of two from 2**-127 (code 0) to 2**127, NaN 0xFF ----------------------------------------------------------

_UE8M0_NAN = 0xFF
_UE8M0_TO_BF16 = np.array([0x0040, *(code << 7 for code in range(1, _UE8M0_NAN)), HALF_NAN], np.uint16)


def ue8m0x2_to_bf16x2(pairs: Array) -> Array:
    """Execute cvt.rn.bf16x2.ue8m0x2: uint16 pairs of codes to uint32 pairs of bf16; exact."""
    return _widen_pairs(pairs, _UE8M0_TO_BF16)


def scaled_s2f6x2_to_bf16x2(pairs: Array, scales: Array) -> Array:
    """Execute cvt.rn.satfinite.scaled::n2::ue8m0.bf16x2.s2f6x2 d, pairs, scales: each int8 / 64 times its scale, rounded once.

    Beyond the range the largest finite value of that sign; a NaN scale gives 0x7FFF.
    """
    shape = np.broadcast_shapes((1,), pairs.shape, scales.shape)
    codes, exponents = (np.ascontiguousarray(np.broadcast_to(words, shape)).view(np.uint8) for words in (pairs, scales))
    values = np.ldexp(codes.view(np.int8) / 64.0, exponents.astype(np.int64) - 127)
    bits = _narrow_odd(values, "bf16")
    bits = np.where(bits & 0x7FFF > BF16_MAX_BITS, bits & 0x8000 | BF16_MAX_BITS, bits)
    return np.where(exponents == _UE8M0_NAN, HALF_NAN, bits).astype(np.uint16).view(np.uint32)


def integer_to_f16(x: Array) -> Array:
    """Round 16-bit integers to f16 patterns, to nearest."""
    return f32_to_f16(x.astype(np.float32))


def f32_to_ue8m0(x: Array, rounding: str, satfinite: bool) -> Array:
    """Execute cvt.{rz,rp}{.satfinite}: the power of two below or above |x|; the sign is dropped.

    Infinity, and with rp what lies above 2**127, becomes NaN, or with satfinite 2**127.
    """
    if rounding not in ("rz", "rp"):
        raise ValueError(f"rounding {rounding!r} to ue8m0 is not supported, only rz and rp")
    bits = np.abs(x).view(np.uint32)
    code = bits >> np.uint32(23)
    if rounding == "rp":
        code = code + ((bits & 0x7FFFFF != 0) & (bits > 0x400000) & (bits < 0x7F800000))
    if satfinite:
        code = np.where((code == _UE8M0_NAN) & (x == x), _UE8M0_NAN - 1, code)
    return code.astype(np.uint8)


def f32_to_ue8m0x2(upper: Array, lower: Array, rounding: str, satfinite: bool) -> Array:
    """Return the result of cvt.{rz,rp}{.satfinite}.ue8m0x2.f32 d, upper, lower as uint16."""
    return (f32_to_ue8m0(upper, rounding, satfinite).astype(np.uint16) << np.uint16(8)) | f32_to_ue8m0(lower, rounding, satfinite)


# ---- integers -----------------------------------------------------------------------------------------------------------------------

_ROUND_INTEGER: dict[str, Callable[[Array], Array]] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def round_to_integral(x: Array, rounding: str) -> Array:
    """Round floats to integral floats: rni (ties to even), rzi, rmi or rpi."""
    if rounding not in _ROUND_INTEGER:
        raise ValueError(f"integer rounding {rounding!r} is not supported, only {sorted(_ROUND_INTEGER)}")
    return _ROUND_INTEGER[rounding](x)


def float_to_integer(x: Array, dtype: npt.DTypeLike, rounding: str) -> Array:
    """Round f32 values to an integer type, clamped to its range.

    NaN becomes 0 in up to 32 bits, and the pattern with only the top bit set in 64.
    """
    target = np.dtype(dtype)
    limits = np.iinfo(target)
    exact = round_to_integral(x, rounding).astype(np.float64)
    top = 2.0 ** (limits.bits - (1 if target.kind == "i" else 0))
    over, under, nan = exact >= top, exact < limits.min, exact != exact
    result = np.where(over | under | nan, 0.0, exact).astype(target)
    result = np.where(over, target.type(limits.max), np.where(under, target.type(limits.min), result))
    if limits.bits == 64:
        top_bit = target.type(limits.min if target.kind == "i" else 1 << (limits.bits - 1))
        result = np.where(nan, top_bit, result)
    return result


def integer_to_f32(x: Array) -> Array:
    """Round integers of any type to f32 once, to nearest."""
    return x.astype(np.float32)
