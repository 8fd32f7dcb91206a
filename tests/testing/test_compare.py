"""The comparison accepts rounding and nothing else: each planted error must fail it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cute_mla.testing.compare import DENSE_DECODE_OUT, LSE, NO_BOUND, ErrorLimit, compare, cosine_difference, same_bits, with_error_limit


@pytest.fixture
def expected() -> Tensor:
    """fp32 [4, 2, 8, 512], of the size that attention outputs have."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(4, 2, 8, 512, generator=generator) / 10


def test_rounding_to_the_output_type_passes(expected: Tensor) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        result = compare("out", expected.to(dtype), expected, DENSE_DECODE_OUT)
        assert result.passed, result.reason
        assert 0 < result.max_abs < 4e-3
        assert 0 < result.cos_diff < 2e-6


def test_equal_infinities_and_nans_pass() -> None:
    values = torch.tensor([1.0, float("inf"), float("-inf"), float("nan")])
    result = compare("lse", values, values.clone(), LSE)
    assert result.passed
    assert result.max_abs == 0
    assert result.cos_diff == 0


def test_empty_tensors_pass() -> None:
    assert compare("out", torch.empty(0, 1, 4, 512), torch.empty(0, 1, 4, 512), DENSE_DECODE_OUT).passed


@pytest.mark.parametrize("factor", [0.0, -1.0, 1.05])
def test_one_wrong_element_fails(expected: Tensor, factor: float) -> None:
    actual = expected.clone()
    index = (2, 1, 5, 300)
    actual[index] = factor * 0.3
    expected[index] = 0.3
    result = compare("out", actual, expected, DENSE_DECODE_OUT)
    assert not result.passed
    assert "out: 1 of 32768 elements out of bounds, worst at [2, 1, 5, 300]" in result.reason


def test_an_element_may_pass_by_either_bound() -> None:
    expected = torch.tensor([1.0, 1e-5])
    assert compare("out", torch.tensor([1.003, 1.1e-5]), expected, DENSE_DECODE_OUT).passed
    assert not compare("out", torch.tensor([1.02, 1e-5]), expected, DENSE_DECODE_OUT).passed


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_a_stray_special_value_fails(expected: Tensor, wrong: float) -> None:
    actual = expected.clone()
    actual[0, 0, 0, 0] = wrong
    result = compare("out", actual, expected, DENSE_DECODE_OUT)
    assert not result.passed
    assert "1 misplaced NaN or infinity, first at [0, 0, 0, 0]" in result.reason


def test_a_moved_nan_fails() -> None:
    nan = float("nan")
    result = compare("lse", torch.tensor([nan, 1.0, 2.0]), torch.tensor([1.0, nan, 2.0]), LSE)
    assert not result.passed
    assert "2 misplaced" in result.reason


def test_a_missing_infinity_fails() -> None:
    assert not compare("lse", torch.tensor([1e30, 1.0]), torch.tensor([float("inf"), 1.0]), LSE).passed


def test_the_sign_of_an_infinity_matters() -> None:
    result = compare("lse", torch.tensor([float("-inf")]), torch.tensor([float("inf")]), LSE)
    assert not result.passed
    assert "at [0]: -inf, expected inf" in result.reason


def test_nan_where_an_infinity_belongs_fails() -> None:
    assert not compare("lse", torch.tensor([float("nan")]), torch.tensor([float("inf")]), LSE).passed


def test_a_small_systematic_error_fails_by_the_cosine_difference(expected: Tensor) -> None:
    actual = expected * 1.005  # within each element's relative bound of 1.6 %
    result = compare("out", actual, expected, DENSE_DECODE_OUT)
    assert not result.passed
    assert result.reason.startswith("out: cosine difference 1.24e-05 exceeds 5e-06")


def test_lse_in_the_wrong_base_fails() -> None:
    lse = torch.linspace(1, 8, 100)
    assert not compare("lse", lse * 1.4427, lse, LSE).passed
    assert not compare("lse", lse + 1e-2, lse, LSE).passed
    assert compare("lse", lse + 1e-5, lse, LSE).passed


def test_another_shape_fails(expected: Tensor) -> None:
    assert "shape (2, 8, 512), expected (4, 2, 8, 512)" in compare("out", expected[0], expected, DENSE_DECODE_OUT).reason


def test_cosine_difference_sees_length_and_direction() -> None:
    x, y = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    assert cosine_difference(x, x) == 0
    assert cosine_difference(x, y) == 1
    assert cosine_difference(x, 2 * x) == pytest.approx(0.2)


def test_same_bits_tells_what_equality_does_not() -> None:
    nan = torch.tensor([float("nan"), 0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.bfloat16))
    assert not same_bits(torch.ones(2, 1), torch.ones(1, 2))


def test_limits_of_errors(expected: Tensor) -> None:
    """An error in every element has a great norm, one in a single element is large."""
    single = expected.clone()
    single[2, 1, 5, 300] += 0.1
    for actual, limit, fault in (
        (expected + 0.01, ErrorLimit(0.02, 1.0), "out: norm of errors 1.81 exceeds 1"),
        (single, ErrorLimit(0.02, 1.0), "out: largest error 0.1 exceeds 0.02"),
        (single + 0.01, ErrorLimit(0.02, 1.0), "out: largest error 0.11 exceeds 0.02; out: norm of errors 1.81 exceeds 1"),
        (single, ErrorLimit(0.2, 1.0), ""),
        (expected + 0.01, ErrorLimit(0.02), ""),
        (expected + 0.01, None, ""),
    ):
        result = with_error_limit("out", compare("out", actual, expected, NO_BOUND), limit)
        assert (result.passed, result.reason) == (not fault, fault)
