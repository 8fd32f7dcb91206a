"""Every name of a format: made, quantised, written, gathered and dequantised, each agreeing with the others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cute_mla.cache import dequantise_cache, empty_cache, gather_kv_cache, quantise_cache, write_kv_cache
from cute_mla.spec.cache_rows import CACHED, FP8_576, KNOWN, latent_columns
from tests.ops.kv_cache.paged_keys import bytes_of

PAGES, PAGE_SIZE = 3, 4
ERRORS = {"e4m3": 1 / 16, "e2m1": 1 / 4}  # of a value, half a step of its code; 16-bit columns are exact here


def scale_of(name: str) -> Tensor | None:
    """Return descale_k, where the format has one."""
    return torch.tensor(0.37) if KNOWN[name] is FP8_576 else None


def keys_of(name: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(PAGES, PAGE_SIZE, 1, KNOWN[name].d_qk, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("name", KNOWN)
def test_keys_come_back(name: str) -> None:
    keys, scale, layout = keys_of(name), scale_of(name), KNOWN[name]
    cache = quantise_cache(keys, name, descale_k=scale)
    values = dequantise_cache(cache, name, descale_k=scale)
    assert values.shape == keys.shape
    assert values.dtype == torch.float32
    assert torch.equal(values[..., layout.quantised :], keys[..., layout.quantised :].float())
    error = (values - keys.float())[..., : layout.quantised].abs()
    # below the least normal code the step is that of the group's scale
    assert bool((error <= (keys[..., : layout.quantised].float().abs() * ERRORS[layout.code]).clamp_min(0.2)).all())
    assert (error.mean() if layout.quantised else 0.0) < 0.1


@pytest.mark.parametrize("name", KNOWN)
def test_an_empty_cache_takes_keys(name: str) -> None:
    layout, keys, scale = KNOWN[name], keys_of(name), scale_of(name)
    padded = empty_cache(name, PAGES, PAGE_SIZE, page_stride=layout.page_bytes(PAGE_SIZE) + 64, fill=0xFF)
    assert quantise_cache(keys, name, descale_k=scale, out=padded) is padded
    expected = quantise_cache(keys, name, descale_k=scale)
    assert (padded.shape, padded.dtype) == (expected.shape, expected.dtype)
    assert torch.equal(dequantise_cache(padded, name, descale_k=scale), dequantise_cache(expected, name, descale_k=scale))
    assert bytes_of(padded).unflatten(0, (PAGES, -1))[:, -64:].eq(0xFF).all()
    for pages, page_size in ((0, PAGE_SIZE), (PAGES, 0)):
        assert empty_cache(name, pages, page_size).shape == (pages, page_size, 1, expected.shape[3])


@pytest.mark.parametrize("name", CACHED)
def test_what_is_written_and_gathered_is_what_is_quantised_and_dequantised(name: str) -> None:
    keys, scale, latent = keys_of(name), scale_of(name), latent_columns(CACHED[name])
    rows = keys.flatten(0, 2)
    cache, expected = empty_cache(name, PAGES, PAGE_SIZE), quantise_cache(keys, name, descale_k=scale)
    k_pe = rows[:, latent:] if latent < rows.shape[1] else None
    write_kv_cache(rows[:, :latent], k_pe, cache, torch.arange(len(rows)), descale_k=scale, kv_format=name)
    assert torch.equal(bytes_of(cache), bytes_of(expected))
    table, ends = torch.arange(PAGES, dtype=torch.int32)[None], torch.tensor([0, len(rows)], dtype=torch.int32)
    gathered = gather_kv_cache(cache, table, ends, len(rows), descale_k=scale, kv_format=name)
    assert torch.equal(gathered, dequantise_cache(cache, name, descale_k=scale).flatten(0, 2).bfloat16())


@pytest.mark.parametrize("name", [name for name, layout in KNOWN.items() if not layout.quantised])
def test_fp16_keys_stay_fp16(name: str) -> None:
    keys = keys_of(name, torch.float16)
    cache = quantise_cache(keys, name)
    assert torch.equal(cache, keys)
    assert empty_cache(name, 1, 2, dtype=torch.float16).dtype == cache.dtype == torch.float16
    assert quantise_cache(keys.float(), name).dtype == torch.bfloat16


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype is torch\.float32 with latent; supported: torch\.bfloat16, torch\.float16"):
        empty_cache("latent", 1, 2, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"page_stride is 2305; .* a multiple of 2"):
        empty_cache("latent", 1, 2, page_stride=2305)
    with pytest.raises(ValueError, match="power_of_two is True with fp8_576; supported: False"):
        quantise_cache(keys_of("fp8_576"), "fp8_576", power_of_two=True)
    with pytest.raises(ValueError, match="descale_k is given with a fp8_656 cache"):
        quantise_cache(keys_of("fp8_656"), "fp8_656", descale_k=torch.ones(1))
    with pytest.raises(ValueError, match="descale_k has shape"):
        dequantise_cache(empty_cache("fp8_576", 1, 2), "fp8_576", descale_k=torch.ones(2))
    with pytest.raises(ValueError, match=r"out has shape \[3, 4, 1, 512\]"):
        quantise_cache(keys_of("latent"), "latent", out=empty_cache("latent_512", PAGES, PAGE_SIZE))
