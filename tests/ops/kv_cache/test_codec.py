"""The reference quantiser and dequantiser, bit by bit, against formulas written out byte by byte without torch."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from cute_mla.cache import dequantise_cache, empty_cache, quantise_cache
from tests.ops.kv_cache.codes import NAN, drawn_keys, e4m3, e8m0_groups, fp32, fp32_groups, nearest_e4m3, page_bytes

COLUMNS = {"fp8_656": 576, "fp8_584": 512}
GROUPS = {"fp8_656": (4, 128), "fp8_584": (7, 64)}


def bf16_bytes(value: float) -> bytes:
    """Return a value rounded to bf16, ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return struct.pack("<H", bits + 0x7FFF + (bits >> 16 & 1) >> 16)


def token_656(row: list[float], power_of_two: bool) -> bytes:
    """Return one token of 576 columns, as DeepSeek-V3.2 stores it."""
    return fp32_groups(row, power_of_two) + b"".join(map(bf16_bytes, row[512:]))


def page_584(rows: list[list[float]]) -> bytes:
    """Return one page of tokens of 512 columns, as DeepSeek-V4 stores it: all data, then all scales, whose padding byte is 0."""
    data, scales = b"", b""
    for row in rows:
        codes, token_scales = e8m0_groups(row, groups=7, group=64)
        data += codes + b"".join(map(bf16_bytes, row[448:]))
        scales += token_scales + b"\0"
    return data + scales


def keys(pages: int, page_size: int, cache_format: str, seed: int = 0) -> torch.Tensor:
    """fp32 [pages, page_size, 1, d_qk]: columns of all sizes, so that every group's scale is another one."""
    return drawn_keys(pages, page_size, COLUMNS[cache_format], 32, seed)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_fp8_656_byte_by_byte(power_of_two: bool) -> None:
    kv = keys(2, 3, "fp8_656")
    cache = quantise_cache(kv, "fp8_656", power_of_two=power_of_two)
    assert cache.shape == (2, 3, 1, 656)
    assert cache.dtype == torch.uint8
    for page in range(2):
        expected = b"".join(token_656(kv[page, token, 0].tolist(), power_of_two) for token in range(3))
        assert page_bytes(cache, page) == expected


@pytest.mark.parametrize("page_stride", [None, 3 * 576])
def test_fp8_584_byte_by_byte(page_stride: int | None) -> None:
    kv = keys(3, 2, "fp8_584")
    out = empty_cache("fp8_584", 3, 2, page_stride=page_stride)
    assert quantise_cache(kv, "fp8_584", out=out) is out
    assert out.shape == (3, 2, 1, 584)
    for page in range(3):
        assert page_bytes(out, page) == page_584(kv[page, :, 0].tolist())


def test_scales_are_what_amax_makes_them() -> None:
    kv = keys(1, 4, "fp8_656")
    scales = quantise_cache(kv, "fp8_656")[..., 512:528].clone().view(torch.float32)
    assert torch.equal(scales, kv[..., :512].unflatten(-1, (4, 128)).abs().amax(-1) / 448)
    assert (torch.frexp(scales).mantissa != 0.5).all(), "not one is a power of two"


@pytest.mark.parametrize("cache_format", COLUMNS)
def test_every_code_is_dequantised_exactly(cache_format: str) -> None:
    groups, columns = GROUPS[cache_format]
    fp32_scales = [fp32(0.0123), 1.0, fp32(3.3e-39), fp32(7e35)]
    scales = fp32_scales if cache_format == "fp8_656" else [2.0**exponent for exponent in (-127, -126, -9, 0, 3, 60, 118)]
    tokens = 256 // columns
    cache = empty_cache(cache_format, 1, tokens)
    flat = cache.view(-1)
    for token in range(tokens):
        codes = bytes(range(token * columns, (token + 1) * columns))
        if cache_format == "fp8_656":
            row = codes * groups + struct.pack("<4f", *scales) + bytes(128)
            flat[656 * token : 656 * token + 656] = torch.tensor(list(row), dtype=torch.uint8)
        else:
            flat[576 * token : 576 * token + 576] = torch.tensor(list(codes * groups + bytes(128)), dtype=torch.uint8)
            exponents = [int(math.log2(scale)) + 127 for scale in scales]
            flat[576 * tokens + 8 * token : 576 * tokens + 8 * token + 8] = torch.tensor([*exponents, 0xFF], dtype=torch.uint8)
    values = dequantise_cache(cache, cache_format)
    assert values.shape == (1, tokens, 1, COLUMNS[cache_format])
    assert values.dtype == torch.float32
    for token in range(tokens):
        for group, scale in enumerate(scales):
            got = values[0, token, 0, group * columns : (group + 1) * columns]
            expected = torch.tensor([fp32(e4m3(token * columns + column) * scale) for column in range(columns)])
            assert torch.equal(got.nan_to_num(nan=1234.5), expected.nan_to_num(nan=1234.5))
            assert torch.equal(got.signbit() & ~got.isnan(), expected.signbit() & ~expected.isnan())


def test_every_e8m0_code_is_dequantised_exactly() -> None:
    cache = empty_cache("fp8_584", 1, 256)
    flat = cache.view(-1)
    flat[: 576 * 256].view(256, 576)[:, :448] = 0x38  # 1.0
    flat[576 * 256 :].view(256, 8)[:, :7] = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    values = dequantise_cache(cache, "fp8_584")[0, :, 0]
    assert values[:255, :448].unique(dim=1).shape == (255, 1)
    assert values[:255, 0].tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert values[255, :448].isnan().all()
    assert (values[:, 448:] == 0).all()


def test_values_beyond_the_range_saturate() -> None:
    kv = torch.zeros(1, 1, 1, 576)
    kv[..., 0], kv[..., 1] = 1e-43, -1e-43  # the scale, a few units of the least subnormal, is so coarse that they exceed 448 of it
    kv[..., 128] = 1e-45  # and here it is 0
    cache = quantise_cache(kv, "fp8_656")
    codes = cache.flatten()[:512]
    assert codes[:2].tolist() in ([0x7E, 0xFE], [0, 0x80])
    assert codes[128] == 0
    assert dequantise_cache(cache, "fp8_656").isfinite().all()
    assert nearest_e4m3(1e9) == 0x7E


@pytest.mark.parametrize("cache_format", COLUMNS)
@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_what_is_not_finite_makes_its_group_nan_and_no_other(cache_format: str, bad: float) -> None:
    kv = keys(1, 3, cache_format)
    columns = GROUPS[cache_format][1]
    kv[0, 1, 0, columns + 3] = bad
    values = dequantise_cache(quantise_cache(kv, cache_format), cache_format)
    isnan = torch.zeros(values.shape, dtype=torch.bool)
    isnan[0, 1, 0, columns : 2 * columns] = True
    assert torch.equal(values.isnan(), isnan)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("cache_format", COLUMNS)
def test_padded_pages_and_other_byte_types_hold_the_same(cache_format: str, dtype: torch.dtype) -> None:
    kv = keys(4, 3, cache_format)
    out = empty_cache(cache_format, 4, 3, page_stride=4 * 656, fill=0xFF)
    quantise_cache(kv, cache_format, out=out)
    expected = dequantise_cache(quantise_cache(kv, cache_format), cache_format)
    assert torch.equal(dequantise_cache(out.view(dtype), cache_format), expected)
    used = 3 * out.shape[3]
    between = out.as_strided((3, 4 * 656 - used), (4 * 656, 1), used)
    assert (between == 0xFF).all(), "nothing is written between pages"
    if cache_format == "fp8_584":
        padding = out.as_strided((4, 3), (4 * 656, 8), 3 * 576 + 7)
        assert (padding == 0xFF).all(), "nor to the byte behind a token's scales"


def test_rows_of_fp8_656_may_lie_apart() -> None:
    kv = keys(2, 3, "fp8_656")
    out = torch.zeros(2, 3, 1, 1024, dtype=torch.uint8)[..., 16 : 16 + 656]
    quantise_cache(kv, "fp8_656", out=out)
    assert torch.equal(out, quantise_cache(kv, "fp8_656"))
    assert torch.equal(dequantise_cache(out, "fp8_656"), dequantise_cache(quantise_cache(kv, "fp8_656"), "fp8_656"))


def test_what_is_refused() -> None:
    kv = torch.zeros(1, 2, 1, 576)
    with pytest.raises(ValueError, match="cache_format is 'fp4'; supported: latent, fp8_656, fp8_584"):
        quantise_cache(kv, "fp4")
    with pytest.raises(ValueError, match="cache_format is 'fp4'; supported: latent, fp8_656, fp8_584"):
        dequantise_cache(kv, "fp4")
    with pytest.raises(ValueError, match=r"kv has shape \[1, 2, 1, 576\]; supported: \[pages, page size, 1, 512\]"):
        quantise_cache(kv, "fp8_584")
    with pytest.raises(ValueError, match=r"kv has dtype torch\.int32"):
        quantise_cache(kv.int(), "fp8_656")
    with pytest.raises(ValueError, match="out has shape"):
        quantise_cache(kv, "fp8_656", out=empty_cache("fp8_656", 1, 3))
    with pytest.raises(ValueError, match=r"cache has shape \[1, 2, 1, 656\]; supported: \[pages, page size, 1, 584\]"):
        dequantise_cache(empty_cache("fp8_656", 1, 2), "fp8_584")
    with pytest.raises(ValueError, match=r"cache has dtype torch\.int32"):
        dequantise_cache(torch.zeros(1, 2, 1, 584, dtype=torch.int32), "fp8_584")
    with pytest.raises(ValueError, match="pages without gaps"):
        dequantise_cache(torch.zeros(1, 2, 1, 600, dtype=torch.uint8)[..., :584], "fp8_584")
    with pytest.raises(ValueError, match="page_stride is 1167; supported: at least the 1168 bytes"):
        empty_cache("fp8_584", 1, 2, page_stride=1167)
    for pages, page_size, stride in ((1 << 63, 0, None), (0, 1 << 63, None), (0, 0, 1 << 63)):  # of no byte in all
        with pytest.raises(ValueError, match=r"pages is .*; supported: less than"):
            empty_cache("fp8_584", pages, page_size, page_stride=stride)


def test_no_keys_of_any_strides() -> None:
    kv = torch.zeros(0, 2, 1, 1152)[..., ::2]
    assert quantise_cache(kv, "fp8_656").shape == (0, 2, 1, 656)
