"""The formats of 528 and 288 bytes a token, byte by byte against formulas without torch, and the two orders of DeepSeek-V4.1."""

from __future__ import annotations

import math

import pytest
import torch

from cute_mla.cache import dequantise_cache, empty_cache, gather_kv_cache, quantise_cache, reorder_cache, write_kv_cache
from cute_mla.spec.cache_format import FORMATS
from tests.ops.kv_cache.codes import drawn_keys, e4m3, e8m0_groups, fp32, fp32_groups, nearest_e4m3, page_bytes

NAMES = ("v41", "v41_paged", "nope_528", "v41_fp4")
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def keys(pages: int, page_size: int, seed: int = 0) -> torch.Tensor:
    """fp32 [pages, page_size, 1, 512]: columns of all sizes, so that every group's scale is another one."""
    return drawn_keys(pages, page_size, 512, 16, seed)


def nearest_e2m1(value: float) -> int:
    """Return the code nearest to a value, the even one of two that are equally near, 6 beyond the range."""
    code = min(range(8), key=lambda code: (abs(E2M1[code] - abs(value)), code & 1))
    return code | (8 if math.copysign(1.0, value) < 0 else 0)


def token_fp4(row: list[float]) -> bytes:
    """Return one token as the FP4 form of DeepSeek-V4.1 stores it: the even column of a byte in its low half."""
    codes, scales = [], b""
    for group in range(32):
        columns = row[16 * group : 16 * group + 16]
        scale = nearest_e4m3(min(max(fp32(max(map(abs, columns)) / 6), 2.0**-9), 448.0))
        codes += [nearest_e2m1(fp32(value / e4m3(scale))) for value in columns]
        scales += bytes([scale])
    return bytes(low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)) + scales


def test_v41_byte_by_byte() -> None:
    kv = keys(2, 3)
    cache = quantise_cache(kv, "v41")
    assert (cache.shape, cache.dtype) == ((2, 3, 1, 528), torch.uint8)
    for page in range(2):
        assert page_bytes(cache, page) == b"".join(
            b"".join(e8m0_groups(kv[page, token, 0].tolist(), groups=16, group=32)) for token in range(3)
        )


def test_v41_paged_byte_by_byte() -> None:
    kv = keys(2, 3)
    out = empty_cache("v41_paged", 2, 3, page_stride=3 * 528 + 64)
    assert quantise_cache(kv, "v41_paged", out=out) is out
    for page in range(2):
        tokens = [e8m0_groups(kv[page, token, 0].tolist(), groups=16, group=32) for token in range(3)]
        assert page_bytes(out, page) == b"".join(codes for codes, _ in tokens) + b"".join(scales for _, scales in tokens)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_nope_528_byte_by_byte(power_of_two: bool) -> None:
    kv = keys(2, 3)
    cache = quantise_cache(kv, "nope_528", power_of_two=power_of_two)
    for page in range(2):
        assert page_bytes(cache, page) == b"".join(fp32_groups(kv[page, token, 0].tolist(), power_of_two) for token in range(3))


def test_v41_fp4_byte_by_byte() -> None:
    kv = keys(2, 3)
    kv[0, 0, 0, 16:32], kv[0, 1, 0, :16], kv[1, 0, 0, :16] = 0.0, 1e-6, 1e5
    kv[0, 2, 0, :16] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, -0.0])
    cache = quantise_cache(kv, "v41_fp4")
    assert cache.shape == (2, 3, 1, 288)
    for page in range(2):
        assert page_bytes(cache, page) == b"".join(token_fp4(kv[page, token, 0].tolist()) for token in range(3))


def test_every_byte_of_v41_fp4_is_dequantised_exactly() -> None:
    cache = empty_cache("v41_fp4", 1, 256)
    rows = cache[0, :, 0]
    rows[:, :256] = torch.arange(256, dtype=torch.uint8)
    rows[:, 256:] = torch.arange(256, dtype=torch.uint8)[:, None]
    values = dequantise_cache(cache, "v41_fp4")[0, :, 0]
    signed = [*E2M1, *(-value for value in E2M1)]
    each = torch.tensor([signed[code] for byte in range(256) for code in (byte & 15, byte >> 4)])
    for code in range(256):
        expected = each * fp32(e4m3(code))
        assert torch.equal(values[code].nan_to_num(1234.5), expected.nan_to_num(1234.5))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_makes_its_group_nan_and_no_other(name: str, bad: float) -> None:
    kv, columns = keys(1, 3), FORMATS[name].group
    kv[0, 1, 0, columns + 3] = bad
    cache = quantise_cache(kv, name)
    isnan = torch.zeros(1, 3, 1, 512, dtype=torch.bool)
    isnan[0, 1, 0, columns : 2 * columns] = True
    assert torch.equal(dequantise_cache(cache, name).isnan(), isnan)
    if name == "v41_fp4":
        assert cache[0, 1, 0, 257] == 0x7F


@pytest.mark.parametrize("name", NAMES)
def test_quantising_what_was_dequantised_changes_no_value(name: str) -> None:
    powers = name == "nope_528"
    values = dequantise_cache(quantise_cache(keys(2, 5), name, power_of_two=powers), name)
    again = dequantise_cache(quantise_cache(values, name, power_of_two=powers), name)
    if name != "v41_fp4":  # whose scale does not divide its greatest value by a number of e2m1 once it was rounded down
        assert torch.equal(again, values)
    assert (
        (again - values).abs() <= values.abs().unflatten(-1, (-1, 16)).amax(-1, keepdim=True).expand(-1, -1, -1, -1, 16).flatten(-2) / 6
    ).all()


@pytest.mark.parametrize(("source", "target"), [("v41", "v41_paged"), ("v41_paged", "v41"), ("v41", "v41")])
def test_an_order_becomes_the_other(source: str, target: str) -> None:
    kv = keys(3, 5)
    cache, expected = quantise_cache(kv, source), quantise_cache(kv, target)
    assert torch.equal(reorder_cache(cache, source, target), expected)
    out = empty_cache(target, 3, 5, page_stride=5 * 528 + 32, fill=0xAA)
    assert reorder_cache(cache.view(torch.float8_e4m3fn), source, target, out=out) is out
    assert torch.equal(out, expected)
    assert (out.as_strided((2, 32), (5 * 528 + 32, 1), 5 * 528) == 0xAA).all(), "nothing is written between pages"


def test_the_three_formats_of_528_bytes_are_three() -> None:
    kv = keys(1, 4)
    assert len({bytes(quantise_cache(kv, name).flatten().tolist()) for name in NAMES[:3]}) == 3


def test_a_single_token_is_the_same_in_both_orders() -> None:
    kv = keys(3, 1)
    assert torch.equal(quantise_cache(kv, "v41"), quantise_cache(kv, "v41_paged"))


def test_rows_of_v41_that_lie_apart() -> None:
    rows = torch.randn(4, 512).bfloat16()
    apart = torch.full((2, 3, 1, 640), 0xAA, dtype=torch.uint8)[..., 16:544]
    write_kv_cache(rows, None, apart, torch.tensor([5, -1, 0, 2]), kv_format="v41")
    near = empty_cache("v41", 2, 3, fill=0xAA)
    write_kv_cache(rows, None, near, torch.tensor([5, -1, 0, 2]), kv_format="v41")
    assert torch.equal(apart, near)
    table, ends = torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([0, 6], dtype=torch.int32)
    first, second = (gather_kv_cache(cache, table, ends, 6, kv_format="v41") for cache in (apart, near))
    assert torch.equal(first.view(torch.int16), second.view(torch.int16))


def test_what_is_refused() -> None:
    kv = keys(1, 2)
    cache = quantise_cache(kv, "v41")
    with pytest.raises(ValueError, match="power_of_two is True with v41_fp4; supported: False"):
        quantise_cache(kv, "v41_fp4", power_of_two=True)
    with pytest.raises(ValueError, match="to_format is 'nope_528'; supported: v41, v41_paged"):
        reorder_cache(cache, "v41", "nope_528")
    with pytest.raises(ValueError, match="cache_format is None; supported: v41, v41_paged"):
        reorder_cache(cache, None, "v41")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"out has shape .*; supported: as many pages and tokens as cache"):
        reorder_cache(cache, "v41", "v41_paged", out=empty_cache("v41_paged", 2, 1))
    with pytest.raises(ValueError, match="out shares memory with cache"):
        reorder_cache(cache, "v41", "v41_paged", out=cache)
    with pytest.raises(ValueError, match=r"kv has shape \[1, 2, 1, 576\]; supported: \[pages, page size, 1, 512\]"):
        quantise_cache(torch.zeros(1, 2, 1, 576), "v41")
