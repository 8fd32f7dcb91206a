"""PTX arithmetic against exact rational arithmetic, all codes of the narrow formats, and torch's own types."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from cute_mla.simulator.numerics import elementwise
from tests.simulator.exact import exact_round

ALL16 = np.arange(65536, dtype=np.uint32).astype(np.uint16)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


def awkward_f32(seed: int, count: int) -> np.ndarray:
    """Return finite f32 values: random patterns, few-bit mantissas (ties), subnormals and neighbours of powers of two."""
    rng = np.random.default_rng(seed)
    patterns = rng.integers(0, 2**32, count, dtype=np.uint64).astype(np.uint32).view(np.float32)
    short = (rng.integers(-16, 17, count) * 2.0 ** rng.integers(-30, 30, count)).astype(np.float32)
    tiny = rng.integers(-5, 6, count).astype(np.float32) * np.float32(2.0**-149)
    near = np.nextafter(np.float32(1) * (2.0 ** rng.integers(-20, 20, count)).astype(np.float32), np.float32(np.inf))
    values = np.choose(rng.integers(0, 4, count), [patterns, short, tiny, near]).astype(np.float32)
    return np.where(np.isfinite(values), values, np.float32(1.5))


def same(actual: np.ndarray, expected: list[float]) -> None:
    np.testing.assert_array_equal(actual.astype(np.float64), np.array(expected))


@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
def test_f32_arithmetic_rounds_once(rounding: str) -> None:
    a, b, c = (awkward_f32(seed, 1500) for seed in (1, 2, 3))
    exact = [tuple(Fraction(float(v)) for v in row) for row in zip(a, b, c, strict=True)]
    same(elementwise.add_f32(a, c, rounding), [exact_round(x + z, "f32", rounding) for x, _, z in exact])
    same(elementwise.mul_f32(a, b, rounding), [exact_round(x * y, "f32", rounding) for x, y, _ in exact])
    expected = [exact_round(x * y + z, "f32", rounding) for x, y, z in exact]
    same(elementwise.fma_f32(a, b, c, rounding), expected)
    # By threes: a tie anywhere in an array sends all of it the exact way, so that only short arrays exercise the fast one.
    threes = [elementwise.fma_f32(a[i : i + 3], b[i : i + 3], c[i : i + 3], rounding) for i in range(0, 1500, 3)]
    same(np.concatenate(threes), expected)


def test_fma_special_values() -> None:
    inf, nan = math.inf, math.nan
    a, b, c = (
        np.array(v, np.float32)
        for v in ([inf, 1.0, inf, nan, 0.0, -0.0, 3e38], [2.0, inf, 1.0, 1.0, 1.0, 1.0, 10.0], [1.0, 0, -inf, 0, 0, -0.0, 0])
    )
    result = elementwise.fma_f32(a, b, c)
    assert np.isnan(result).tolist() == [False, False, True, True, False, False, False]
    assert result[[0, 1, 4, 5, 6]].tolist() == [inf, inf, 0.0, 0.0, inf]
    assert np.signbit(result[4:6]).tolist() == [False, True]


def test_fma_is_not_rounded_twice() -> None:
    # The float64 sum drops the 2**-60 and so becomes a tie of f32: its second rounding would go to even, down.
    a = np.array([1 + 2.0**-12], np.float32)
    b = np.array([1 + 2.0**-12], np.float32)  # a * b = 1 + 2**-11 + 2**-24: a tie of f32
    for sign in (1.0, -1.0):
        c = np.array([sign * 2.0**-60], np.float32)
        expected = 1 + 2.0**-11 + (2.0**-23 if sign > 0 else 0.0)
        assert float(elementwise.fma_f32(a, b, c)[0]) == expected
    assert float((a.astype(np.float64) * b + np.float64(2.0**-60)).astype(np.float32)[0]) == 1 + 2.0**-11  # the bug this guards against


def test_fma_in_the_subnormal_range() -> None:
    a = np.array([2.0**-75 * (1 + 2.0**-23)], np.float32)  # a * b = (1 + 2**-22 + 2**-46) / 2 units of the smallest subnormal
    b = np.array([2.0**-75 * (1 + 2.0**-23)], np.float32)
    c = np.array([2.0**-149], np.float32)
    exact = Fraction(float(a[0])) * Fraction(float(b[0])) + Fraction(float(c[0]))
    assert float(elementwise.fma_f32(a, b, c)[0]) == exact_round(exact, "f32") == 2.0**-148


def test_directed_exact_zero_sum() -> None:
    a, b = np.array([5.0, 0.0, 0.0], np.float32), np.array([-5.0, 0.0, -0.0], np.float32)
    assert np.signbit(elementwise.add_f32(a, b, "rm")).tolist() == [True, False, True]
    assert np.signbit(elementwise.add_f32(a, b, "rp")).tolist() == [False, False, False]
    with pytest.raises(ValueError, match="rna"):
        elementwise.add_f32(a, b, "rna")


def test_min_max_zeros_and_nan() -> None:
    nan = np.float32(np.nan)
    a = np.array([0.0, -0.0, -0.0, 0.0, nan, 1.0, nan, 2.0], np.float32)
    b = np.array([-0.0, 0.0, -0.0, 0.0, 1.0, nan, nan, 3.0], np.float32)
    low, high = elementwise.min_f32(a, b), elementwise.max_f32(a, b)
    assert np.signbit(low[:4]).tolist() == [True, True, True, False]
    assert np.signbit(high[:4]).tolist() == [False, False, True, False]
    assert low[4:6].tolist() == high[4:6].tolist() == [1.0, 1.0]
    assert np.isnan(low[6])
    assert np.isnan(high[6])
    assert (low[7], high[7]) == (2.0, 3.0)
    strict = elementwise.max_f32(a, b, nan=True)
    assert strict[4:7].view(np.uint32).tolist() == [0x7FFFFFFF] * 3
    assert np.signbit(strict[:4]).tolist() == [False, False, True, False]
    assert elementwise.min_f32(a, b, nan=True)[4:7].view(np.uint32).tolist() == [0x7FFFFFFF] * 3


def test_flush_and_canonical_nan() -> None:
    x = np.array([2.0**-127, -(2.0**-149), 2.0**-126, -0.0, np.inf, np.nan, 0.5, 7.0, -3.0], np.float32)
    flushed = elementwise.flush_f32(x)
    assert flushed[:4].tolist() == [0.0, 0.0, 2.0**-126, 0.0]
    assert np.signbit(flushed[:4]).tolist() == [False, True, False, True]
    assert np.isinf(flushed[4])
    assert np.isnan(flushed[5])
    payload = np.array([0x7F800001, 0xFFC12345, 0x7F800000, 0x3F800000], np.uint32).view(np.float32)
    assert elementwise.canonical_nan(payload).view(np.uint32).tolist() == [0x7FFFFFFF, 0x7FFFFFFF, 0x7F800000, 0x3F800000]


def test_approximations_are_rounded_once() -> None:
    x = np.array([0.5, 3.7, -20.25, 127.5], np.float32)
    assert elementwise.ex2_f32(x).tolist() == [np.float32(2.0 ** float(v)) for v in x]
    assert elementwise.lg2_f32(np.array([8.0, 3.0, 0.0], np.float32), False).tolist() == [3.0, np.float32(math.log2(3.0)), -math.inf]
    assert elementwise.rsqrt_f32(np.array([4.0, 3.0], np.float32), False).tolist() == [0.5, np.float32(1 / math.sqrt(3))]
    assert elementwise.rcp_f32(np.array([3.0, -0.0], np.float32), False).tolist() == [np.float32(1 / 3), -math.inf]
    ends = np.array([-np.inf, np.inf, -130.0], np.float32)
    assert elementwise.ex2_f32(ends).tolist() == [0.0, math.inf, 2.0**-130]
    assert elementwise.ex2_f32(ends, True).tolist() == [0.0, math.inf, 0.0]
    tiny = np.array([2.0**-127], np.float32)
    assert elementwise.rcp_f32(tiny, False)[0] == 2.0**127
    assert np.isinf(elementwise.rcp_f32(tiny, True)[0])
    assert elementwise.div_f32(tiny, np.ones(1, np.float32)).tolist() == [2.0**-127]
    assert elementwise.div_f32(tiny, np.ones(1, np.float32), True).tolist() == [0.0]
    assert elementwise.div_f32(tiny, np.array([2.0**-20], np.float32)).tolist() == [2.0**-107]
    assert elementwise.div_f32(tiny, np.array([2.0**-20], np.float32), True).tolist() == [0.0]  # the input is flushed too


def test_all_16_bit_codes_widen_and_return() -> None:
    signed = torch.from_numpy(ALL16.view(np.int16).copy())
    for kind, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        expected = signed.view(dtype).float().numpy()
        wide = elementwise.half_to_f32(ALL16, kind)
        np.testing.assert_array_equal(wide, expected)
        assert np.array_equal(np.signbit(wide), ALL16 >= 0x8000)
        back = elementwise.f32_to_half(wide, kind)
        nan = np.isnan(expected)
        assert np.array_equal(back[~nan], ALL16[~nan])
        assert nan.sum() == (254 if kind == "bf16" else 2046)
        assert set(back[nan].tolist()) == {0x7FFF}


@pytest.mark.parametrize("kind", ["bf16", "f16"])
@pytest.mark.parametrize("rounding", ["rn", "rz"])
def test_narrowing_ties_and_neighbours(kind: str, rounding: str) -> None:
    """Every midpoint of neighbouring codes and its two f32 neighbours, both signs, and what overflows."""
    top = 0x7F80 if kind == "bf16" else 0x7C00
    codes = np.arange(0, top, dtype=np.uint16)[:: 7 if kind == "bf16" else 5]
    low = elementwise.half_to_f32(codes, kind).astype(np.float64)
    high = low + [math.ldexp(1, max(math.frexp(v)[1] - (8 if kind == "bf16" else 11), -133 if kind == "bf16" else -24)) for v in low]
    middle = ((low + high) / 2).astype(np.float32)
    x = np.concatenate([middle, np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(0))])
    x = np.concatenate([x, -x])
    actual = elementwise.half_to_f32(elementwise.f32_to_half(x, kind, rounding), kind)
    same(actual, [exact_round(Fraction(float(v)), kind, rounding) for v in x])


def test_packed_conversions_put_the_first_operand_above() -> None:
    upper, lower = np.array([1.0, np.nan, 3.0e38], np.float32), np.array([-2.0, 0.5, np.inf], np.float32)
    assert [hex(v) for v in elementwise.f32_to_bf16x2(upper, lower)] == ["0x3f80c000", "0x7fff3f00", "0x7f627f80"]
    assert [hex(v) for v in elementwise.f32_to_f16x2(upper, lower)] == ["0x3c00c000", "0x7fff3800", "0x7c007c00"]
    assert hex(elementwise.f32_to_f16x2(upper, lower, "rz")[2]) == "0x7bff7c00"
    number: Any = np.float32(1.0)
    uniform = np.array([1.0], np.float32)  # one operand may be the same for all lanes
    assert [hex(v) for v in elementwise.f32_to_bf16x2(uniform, lower)] == ["0x3f80c000", "0x3f803f00", "0x3f807f80"]
    assert [hex(v) for v in elementwise.f32_to_bf16x2(lower, number)] == ["0xc0003f80", "0x3f003f80", "0x7f803f80"]


@pytest.mark.parametrize(("kind", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_all_fp8_codes(kind: str, dtype: torch.dtype) -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(codes.copy()).view(dtype).float().numpy()
    values = elementwise.fp8_to_f32(codes, kind)
    np.testing.assert_array_equal(values, expected)
    back = elementwise.f32_to_fp8(values, kind)
    finite = np.isfinite(expected)
    assert np.array_equal(back[finite], codes[finite])
    assert set(back[np.isnan(expected)].tolist()) == {0x7F}
    pairs = (codes.astype(np.uint16) << 8) | codes[::-1]
    halves = elementwise.fp8x2_to_f16x2(pairs, kind)
    np.testing.assert_array_equal(elementwise.f16_to_f32((halves >> 16).astype(np.uint16)), expected)
    np.testing.assert_array_equal(elementwise.f16_to_f32(halves.astype(np.uint16)), expected[::-1])
    assert {int(h) for h in halves.view(np.uint16) if h & 0x7FFF > 0x7C00} == {0x7FFF}


@pytest.mark.parametrize(("kind", "dtype", "largest"), [("e4m3", torch.float8_e4m3fn, 448.0), ("e5m2", torch.float8_e5m2, 57344.0)])
def test_fp8_rounding_and_saturation(kind: str, dtype: torch.dtype, largest: float) -> None:
    values = np.sort(elementwise.fp8_to_f32(np.arange(128, dtype=np.uint8), kind))
    values = values[np.isfinite(values)]
    middle = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    x = np.concatenate([middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf)), awkward_f32(5, 4000)])
    x = np.concatenate([x, -x])
    x = x[np.abs(x) <= largest]
    expected = torch.from_numpy(x).to(dtype).view(torch.uint8).numpy()
    assert np.array_equal(elementwise.f32_to_fp8(x, kind), expected)
    beyond = np.array([largest * 1.01, -1e30, np.inf, -np.inf, np.nan, -np.nan], np.float32)
    top = elementwise.FP8_FORMATS[kind].largest
    assert elementwise.f32_to_fp8(beyond, kind).tolist() == [top, top | 0x80, top, top | 0x80, 0x7F, 0x7F]
    packed = elementwise.f32_to_fp8x2(beyond[:1], np.ones(1, np.float32), kind)
    assert packed.tolist() == [top << 8 | int(elementwise.f32_to_fp8(np.ones(1, np.float32), kind)[0])]
    halves = np.array([0xFC003C00], np.uint32)
    assert elementwise.f16x2_to_fp8x2(halves, kind).tolist() == [(top | 0x80) << 8 | packed[0] & 0xFF]


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_half_arithmetic_rounds_once(kind: str) -> None:
    rng = np.random.default_rng(11)
    a, b, c = (rng.integers(0, 65536, 3000).astype(np.uint16) for _ in range(3))
    a[:1500] = elementwise.f32_to_half(awkward_f32(12, 1500), kind)
    c[:1500] = elementwise.f32_to_half(awkward_f32(13, 1500), kind)
    wide = [elementwise.half_to_f32(v, kind) for v in (a, b, c)]
    keep = np.isfinite(wide[0]) & np.isfinite(wide[1]) & np.isfinite(wide[2])
    a, b, c = a[keep], b[keep], c[keep]
    exact = [tuple(Fraction(float(v[i])) for v in wide) for i in np.flatnonzero(keep)]

    def value(operation: str, *operands: np.ndarray) -> np.ndarray:
        """By fours, so that arrays with and without a tie occur."""
        function = elementwise.half_arithmetic(operation, kind)
        parts = [function(*(v[i : i + 4] for v in operands)) for i in range(0, operands[0].size, 4)]
        return elementwise.half_to_f32(np.concatenate(parts), kind)

    same(value("add", a, c), [exact_round(x + z, kind) for x, _, z in exact])
    same(value("sub", a, c), [exact_round(x - z, kind) for x, _, z in exact])
    same(value("mul", a, b), [exact_round(x * y, kind) for x, y, _ in exact])
    same(value("fma", a, b, c), [exact_round(x * y + z, kind) for x, y, z in exact])
    same(value("max", a, c), [float(max(x, z)) for x, _, z in exact])


def test_half_nan() -> None:
    one, nan, minus = (np.array([v], np.uint16) for v in (0x3F80, 0xFFC0, 0xC000))
    assert elementwise.half_arithmetic("max", "bf16")(one, nan).tolist() == [0x3F80]
    assert elementwise.half_arithmetic("max", "bf16", nan=True)(one, nan).tolist() == [0x7FFF]
    assert elementwise.half_arithmetic("add", "bf16")(one, minus).tolist() == [0xBF80]
    for operation, form, with_nan in (("add", "bf16", True), ("add", "f32", False), ("div", "f16", False)):
        with pytest.raises(ValueError, match="not supported"):
            elementwise.half_arithmetic(operation, form, with_nan)


def test_float_to_integer() -> None:
    x = np.array([2.5, 3.5, -2.5, -0.5, 1e20, -1e20, np.nan, 2147483520.0, np.inf], np.float32)
    assert elementwise.float_to_integer(x, np.int32, "rni").tolist() == [2, 4, -2, 0, 2**31 - 1, -(2**31), 0, 2147483520, 2**31 - 1]
    assert elementwise.float_to_integer(x, np.int32, "rzi")[:4].tolist() == [2, 3, -2, 0]
    assert elementwise.float_to_integer(x, np.int32, "rmi")[:4].tolist() == [2, 3, -3, -1]
    assert elementwise.float_to_integer(x, np.int32, "rpi")[:4].tolist() == [3, 4, -2, 0]
    assert elementwise.float_to_integer(x, np.uint32, "rzi").tolist() == [2, 3, 0, 0, 2**32 - 1, 0, 0, 2147483520, 2**32 - 1]
    assert elementwise.float_to_integer(x, np.int64, "rzi")[4:7].tolist() == [2**63 - 1, -(2**63), -(2**63)]
    assert elementwise.float_to_integer(x, np.uint64, "rzi")[4:7].tolist() == [2**64 - 1, 0, 2**63]
    assert elementwise.float_to_integer(x, np.uint8, "rzi")[[0, 4, 5]].tolist() == [2, 255, 0]
    assert elementwise.round_to_integral(x, "rni")[:4].tolist() == [2.0, 4.0, -2.0, -0.0]
    with pytest.raises(ValueError, match="'rn'"):
        elementwise.float_to_integer(x, np.int32, "rn")


def test_integer_to_float() -> None:
    x = np.array([2**24 + 1, 2**24 + 3, -(2**24) - 1, 2**31 - 1], np.int32)
    assert elementwise.integer_to_f32(x).tolist() == [2.0**24, 2.0**24 + 4, -(2.0**24), 2.0**31]
    large = [2**62 + 1, -(2**62) - 1, 2**62 + 2**38 + 1, -(2**62) - 2**38 - 1, 2**63 - 1, 5, -(2**63)]
    same(elementwise.integer_to_f32(np.array(large, np.int64)), [exact_round(Fraction(v), "f32") for v in large])


def test_narrow_f64() -> None:
    x = np.array([1 + 2.0**-24 + 2.0**-40, -1 - 2.0**-24 - 2.0**-40])
    assert elementwise.round_to_f32(x).tolist() == [1 + 2.0**-23, -1 - 2.0**-23]
    assert elementwise.round_to_f32(x, "rz").tolist() == [1.0, -1.0]
    assert elementwise.round_to_f32(x, "rm").tolist() == [1.0, -1 - 2.0**-23]
    for bad in (lambda: elementwise.round_to_f32(x, "rna"), lambda: elementwise.f32_to_bf16(x, "rm")):
        with pytest.raises(ValueError, match="is not supported"):
            bad()


def test_unknown_formats_are_refused() -> None:
    x, codes = np.ones(1, np.float32), np.zeros(1, np.uint8)
    for bad in (
        lambda: elementwise.f32_to_half(x, "f32"),
        lambda: elementwise.half_to_f32(np.zeros(1, np.uint16), "e4m3"),
        lambda: elementwise.f32_to_fp8(x, "e3m4"),
        lambda: elementwise.fp8_to_f32(codes, "bf16"),
    ):
        with pytest.raises(ValueError, match="is not supported"):
            bad()
