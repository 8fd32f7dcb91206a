"""PTX arithmetic once more, on single values, in Python integers and fractions: what the simulator is held against."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

FORMATS = {"f32": (24, -149, 2**128), "bf16": (8, -133, 2**128), "f16": (11, -24, 2**16)}  # precision, exponent of the least bit, overflow
M16, M32, M64 = (1 << 16) - 1, (1 << 32) - 1, (1 << 64) - 1


def signed(value: int, bits: int = 32) -> int:
    """Two's complement."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def truncated(a: int, b: int) -> int:
    """Quotient towards zero; all ones for a division by zero."""
    if b == 0:
        return -1
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def prmt(a: int, b: int, selector: int) -> int:
    """Byte permutation with sign replication."""
    source = (b << 32 | a).to_bytes(8, "little")
    result = 0
    for place in range(4):
        nibble = selector >> 4 * place & 15
        byte = source[nibble & 7]
        result |= ((255 if byte & 128 else 0) if nibble & 8 else byte) << 8 * place
    return result


def exact_round(value: Fraction, form: str, rounding: str = "rn") -> float:
    """Round a rational to a format, spelled out with integers."""
    precision, least, overflow = FORMATS[form]
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length() - 1
    while Fraction(2) ** (exponent + 1) <= magnitude:
        exponent += 1
    unit = Fraction(2) ** max(exponent - precision + 1, least)
    scaled = magnitude / unit
    down = scaled.numerator // scaled.denominator
    rest = scaled - down
    away = {
        "rn": rest > Fraction(1, 2) or (rest == Fraction(1, 2) and down % 2 == 1),
        "rz": False,
        "rm": rest > 0 and value < 0,
        "rp": rest > 0 and value > 0,
    }[rounding]
    result: float | Fraction = (down + away) * unit
    if result >= overflow:
        outward = rounding == "rn" or (rounding == "rp" and value > 0) or (rounding == "rm" and value < 0)
        result = math.inf if outward else overflow * (1 - Fraction(1, 2**precision))
    return math.copysign(float(result), value)


# ---------------------------------------------------------------- patterns


def decode(bits: int, form: str) -> float:
    """Return the value of a pattern."""
    if form == "f16":
        return float(struct.unpack("<e", struct.pack("<H", bits & M16))[0])
    return float(struct.unpack("<f", struct.pack("<I", bits << 16 & M32 if form == "bf16" else bits & M32))[0])


def encode(value: float, form: str) -> int:
    """Return the pattern of a value that the format holds; the canonical NaN."""
    if math.isnan(value):
        return 0x7FFFFFFF if form == "f32" else 0x7FFF
    if form == "f16":
        return int(struct.unpack("<H", struct.pack("<e", value))[0])
    bits = int(struct.unpack("<I", struct.pack("<f", value))[0])
    return bits >> 16 if form == "bf16" else bits


def flush(value: float) -> float:
    """Subnormal f32 values as zeros of their sign."""
    return math.copysign(0.0, value) if abs(value) < 2.0**-126 else value


FP8 = {"e4m3": (3, 7), "e5m2": (2, 15)}  # mantissa bits, bias


def decode_fp8(code: int, kind: str) -> float:
    """Return the value of an 8-bit float."""
    mantissa, bias = FP8[kind]
    exponent, fraction = (code & 127) >> mantissa, code & ((1 << mantissa) - 1)
    sign = -1.0 if code & 128 else 1.0
    if kind == "e4m3" and code & 127 == 127:
        return math.nan
    if kind == "e5m2" and exponent == 31:
        return math.nan if fraction else sign * math.inf
    if exponent == 0:
        return sign * math.ldexp(fraction, 1 - bias - mantissa)
    return sign * math.ldexp((1 << mantissa) + fraction, exponent - bias - mantissa)


def encode_fp8(value: float, kind: str) -> int:
    """Return the code nearest to a value, of two the even one; the largest finite one beyond the range; 0x7F for NaN."""
    if math.isnan(value):
        return 0x7F
    largest = 0x7E if kind == "e4m3" else 0x7B
    sign = 0x80 if math.copysign(1.0, value) < 0 else 0
    if math.isinf(value):
        return sign | largest
    exact = Fraction(abs(value))
    return sign | min(range(largest + 1), key=lambda code: (abs(Fraction(decode_fp8(code, kind)) - exact), code & 1))


# ---------------------------------------------------------------- arithmetic


def total(a: float, b: float, form: str, rounding: str = "rn", product: tuple[float, float] | None = None) -> float:
    """Return a + b, or x * y + b for a product (x, y), rounded once."""
    terms = (a if product is None else product[0] * product[1] if 0.0 in product or not finite(*product) else sign_of(*product), b)
    if not finite(*terms) or (product is not None and not finite(*product)):
        return terms[0] + terms[1]
    exact = (Fraction(a) if product is None else Fraction(product[0]) * Fraction(product[1])) + Fraction(b)
    if exact:
        return exact_round(exact, form, rounding)
    negative = [math.copysign(1.0, term) < 0 for term in terms]
    return -0.0 if all(negative) or (rounding == "rm" and any(negative)) else 0.0


def sign_of(x: float, y: float) -> float:
    """Return some finite value with the sign of x * y."""
    return math.copysign(1.0, x) * math.copysign(1.0, y)


def finite(*values: float) -> bool:
    """Return whether every value is finite."""
    return all(math.isfinite(value) for value in values)


def product(a: float, b: float, form: str, rounding: str = "rn") -> float:
    """Return a * b, rounded once."""
    if not finite(a, b) or a == 0 or b == 0:
        return a * b
    return exact_round(Fraction(a) * Fraction(b), form, rounding)


def quotient(a: float, b: float) -> float:
    """Return a / b in f32."""
    if math.isnan(a) or math.isnan(b) or (math.isinf(a) and math.isinf(b)) or (a == 0 and b == 0):
        return math.nan
    sign = math.copysign(1.0, a) * math.copysign(1.0, b)
    if math.isinf(a) or b == 0:
        return sign * math.inf
    if math.isinf(b) or a == 0:
        return sign * 0.0
    return exact_round(Fraction(a) / Fraction(b), "f32")


def extreme(a: float, b: float, largest: bool, nan: bool) -> float:
    """Return the smaller or larger of two; a NaN loses, or with nan wins; -0 is below +0."""
    if math.isnan(a) or math.isnan(b):
        return math.nan if nan or (math.isnan(a) and math.isnan(b)) else b if math.isnan(a) else a
    low, high = sorted((a, b), key=lambda value: (value, math.copysign(1.0, value)))
    return high if largest else low


def whole(value: float, rounding: str) -> int:
    """Return a finite float rounded to an integer."""
    exact = Fraction(value)
    return {"rni": round(exact), "rzi": math.trunc(exact), "rmi": math.floor(exact), "rpi": math.ceil(exact)}[rounding]


def to_integer(value: float, rounding: str, bits: int, with_sign: bool) -> int:
    """Return a float as a clamped integer; NaN is 0, or the top bit of 64."""
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if with_sign else (0, (1 << bits) - 1)
    if math.isnan(value):
        return 0 if bits < 64 else 1 << 63
    if math.isinf(value):
        return high if value > 0 else low
    return min(max(whole(value, rounding), low), high)


def to_integral(value: float, rounding: str) -> float:
    """Return a float rounded to an integral one, with its sign."""
    if not finite(value):
        return value
    return math.copysign(float(whole(value, rounding)), value)
