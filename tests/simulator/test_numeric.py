"""Roundings on many values, and all codes of the narrow formats. Special values and single instructions are in test_vectors.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

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


def test_fma_is_not_rounded_twice() -> None:
    # The float64 sum drops the 2**-60 and so becomes a tie of f32: its second rounding would go to even, down.
    a = np.array([1 + 2.0**-12], np.float32)
    b = np.array([1 + 2.0**-12], np.float32)  # a * b = 1 + 2**-11 + 2**-24: a tie of f32
    for sign in (1.0, -1.0):
        c = np.array([sign * 2.0**-60], np.float32)
        expected = 1 + 2.0**-11 + (2.0**-23 if sign > 0 else 0.0)
        assert float(elementwise.fma_f32(a, b, c)[0]) == expected
    assert float((a.astype(np.float64) * b + np.float64(2.0**-60)).astype(np.float32)[0]) == 1 + 2.0**-11  # the bug this guards against


def test_canonical_nan() -> None:
    patterns = np.array([0x7F800001, 0xFFC12345, 0x7F800000, 0x3F800000], np.uint32).view(np.float32)
    canonical = [0x7FFFFFFF, 0x7FFFFFFF, 0x7F800000, 0x3F800000]
    assert elementwise.canonical_nan(patterns).view(np.uint32).tolist() == canonical
    for extreme in (elementwise.min_f32, elementwise.max_f32):
        assert extreme(patterns, patterns, nan=True).view(np.uint32).tolist() == canonical


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
