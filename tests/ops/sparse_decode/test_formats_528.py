"""Sparse decode over the formats of 528 and 288 bytes a token: every code, every scale, and tiles of two formats.

A token that attends to one key has that key's values as its out, exactly.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_mla.cache import dequantise_cache
from cute_mla.ops.cache_codec import parts_of
from cute_mla.testing.operations.sparse_decode.case import Pool, SparseDecodeCase, make_sparse_decode_tensors
from tests.support.bench import Bench, expect

KEYS = 16
E4M3_NANS = (0x7F, 0xFF)


def single_keys(
    bench: Bench, keys: Tensor, scales: Tensor, cache: str, extra_cache: str = "", few_heads: bool = True
) -> tuple[Tensor, Tensor]:
    """Return (out, the values of the keys): bf16 [keys, 512] of as many tokens, each over one key with these codes and scales.

    The key lies in the second cache if extra_cache is given, and every q is 0.
    """
    count = len(keys)
    main, extra = Pool(count, 1, 4), Pool(count, 1, 4, (1,))
    second: dict[str, Any] = {"extra_cache": extra_cache, "extra": extra, "main": main._replace(lengths=(0,))} if extra_cache else {}
    case = replace(SparseDecodeCase(cache=cache, s_q=count, h_q=3, main=main, few_heads=few_heads, sm_count=4 * count), **second)
    tensors = make_sparse_decode_tensors(case)
    tensors.q.zero_()
    used, indices = (tensors.extra_k_cache, tensors.extra_indices) if extra_cache else (tensors.k_cache, tensors.indices)
    assert used is not None
    assert indices is not None
    layout = case.extra_format if extra_cache else case.format
    parts = parts_of("cache", used, layout)
    slots = torch.arange(count)
    indices[0, :, 0] = slots.int()
    parts.codes[slots // 4, slots % 4] = keys
    parts.scales[slots // 4, slots % 4] = scales
    out, _ = bench.run(case, tensors)
    values = dequantise_cache(used, layout.name).bfloat16().flatten(0, 2)[:count]
    assert (out[0] == out[0, :, :1]).all()
    return out[0, :, 0], values


def finite_codes(count: int) -> Tensor:
    """Return every finite e4m3 code, again and again: uint8 [count]."""
    codes = torch.arange(256, dtype=torch.uint8)
    return codes[[code not in E4M3_NANS for code in range(256)]].repeat(-(-count // 254))[:count]


@pytest.mark.parametrize("cache", ["v41", "v41_paged"])
def test_every_e4m3_value_times_every_power_of_two(bench: Bench, cache: str) -> None:
    """Scales 2^-127 to 2^118, at which all products are finite; each is met by other codes, and in all 16 groups."""
    scales = torch.arange(KEYS * 16, dtype=torch.int64).view(KEYS, 16) * 37 % 246
    assert len(scales.unique()) == 246
    out, values = single_keys(bench, finite_codes(KEYS * 512).view(KEYS, 512), scales.to(torch.uint8), cache)
    assert torch.equal(out, values)


def test_every_e4m3_value_times_fp32_scales(bench: Bench) -> None:
    scales = torch.tensor([2.0**-126, 1.37e-20, 3.1, 1.7e9, 0.0, -2.5, 1e-3, 448.0]).repeat(KEYS // 2).view(KEYS, 4)
    keys = finite_codes(KEYS * 512).view(KEYS, 512), scales.view(torch.uint8), "nope_528"
    out, values = single_keys(bench, *keys, few_heads=False)
    assert torch.equal(out, values)
    # the kernels for few heads round P times scale
    out, values = single_keys(bench, *keys)
    torch.testing.assert_close(out, values, rtol=2**-7, atol=1e-37)


@pytest.mark.parametrize("cache", ["v41", "v41_paged"])
def test_every_pair_of_e2m1_values_times_every_e4m3_scale(bench: Bench, cache: str) -> None:
    codes = torch.arange(KEYS * 256).view(KEYS, 256) * 5 + torch.arange(KEYS)[:, None]
    scales = finite_codes(KEYS * 32).view(KEYS, 32)
    out, values = single_keys(bench, (codes % 256).to(torch.uint8), scales, cache, "v41_fp4")
    assert torch.equal(out, values)


@pytest.mark.parametrize(("cache", "extra_cache"), [("v41", ""), ("v41_paged", ""), ("nope_528", ""), ("v41", "v41_fp4")])
@pytest.mark.parametrize("group", [0, 1, -1])
def test_a_scale_that_is_nan_reaches_the_output(bench: Bench, cache: str, extra_cache: str, group: int) -> None:
    case = SparseDecodeCase(cache=cache, extra_cache=extra_cache, s_q=2, h_q=3, main=Pool(60, 40), extra=Pool(40, 30), sm_count=2)
    tensors = make_sparse_decode_tensors(case)
    used, indices = (tensors.extra_k_cache, tensors.extra_indices) if extra_cache else (tensors.k_cache, tensors.indices)
    assert used is not None
    assert indices is not None
    indices[0, 1] = indices[0, 1, 0]
    indices[0, 0] = indices[0, 0, 1:2]
    layout = case.extra_format if extra_cache else case.format
    slot = int(indices[0, 0, 0])
    assert slot != int(indices[0, 1, 0])
    scales = parts_of("cache", used, layout).scales[slot // 64, slot % 64]
    each = scales.unflatten(0, (layout.groups, -1))
    each[group] = 0xFF
    out, lse = bench.run(case, tensors)
    assert out[0, 0].isnan().all()
    assert out[0, 1].isfinite().all()
    assert lse[0, :, 1].isfinite().all()


def test_a_code_that_is_nan_reaches_the_output(bench: Bench) -> None:
    for cache in ("v41", "v41_paged", "nope_528"):
        case = SparseDecodeCase(cache=cache, s_q=1, h_q=2, main=Pool(60, 40), sm_count=1)
        tensors = make_sparse_decode_tensors(case)
        slot = int(tensors.indices[0, 0, 7])
        parts_of("cache", tensors.k_cache, case.format).codes[slot // 64, slot % 64, 300] = 0x7F
        out, _ = bench.run(case, tensors)
        assert out.isnan().all()


# Keys of the first and of the second cache
LENGTHS = ((0, 1), (0, 65), (1, 63), (1, 64), (63, 1), (63, 66), (64, 64), (65, 0), (127, 66), (130, 130))


@pytest.mark.parametrize("cache", ["v41", "v41_paged"])
def test_tiles_of_two_formats(bench: Bench, cache: str) -> None:
    """Every split of tiles between the caches: none, one, all but one of a tile's keys, and invalid indices in both."""
    lengths, extra_lengths = zip(*LENGTHS, strict=True)
    case = SparseDecodeCase(
        cache=cache, extra_cache="v41_fp4", batch=len(lengths), h_q=5, main=Pool(140, 130, 62, lengths),
        extra=Pool(150, 130, 16, extra_lengths), indices="mixed", sinks="drawn", sm_count=4,
    )  # fmt: skip
    bench.judge(case)


def test_pages_of_both_orders_with_one_token(bench: Bench) -> None:
    """A page of one token has the same bytes in both orders."""
    for cache, extra_cache in (("v41", "v41_paged"), ("v41_paged", "v41"), ("v41_paged", "v41_fp4")):
        case = SparseDecodeCase(cache=cache, extra_cache=extra_cache, h_q=2, main=Pool(70, 66, 1), extra=Pool(20, 9, 1), sm_count=1)
        bench.judge(case)


def test_rows_of_a_second_cache_that_lie_512_bytes_apart_keep_their_scales_behind_them(bench: Bench) -> None:
    """The distance that tells v41_paged from v41 says nothing of v41_fp4."""
    case = SparseDecodeCase(cache="v41_paged", extra_cache="v41_fp4", h_q=2, main=Pool(70, 66, 7), extra=Pool(90, 80, 5), sm_count=1)
    tensors = make_sparse_decode_tensors(case)
    assert tensors.extra_k_cache is not None
    apart = torch.full((len(tensors.extra_k_cache), 5, 1, 512), 0xFF, dtype=torch.uint8)[..., :288]
    given = replace(tensors, extra_k_cache=apart.copy_(tensors.extra_k_cache))
    assert given.extra_k_cache is not None
    assert given.extra_k_cache.stride(1) == 512
    expect(case, given, bench.run(case, given), bench.arch)
