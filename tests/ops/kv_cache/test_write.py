"""write_kv_cache: what it puts where in plain torch, what it launches, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_mla.cache import dequantise_cache, quantise_cache, write_kv_cache
from cute_mla.spec.arch import Arch
from cute_mla.spec.cache_rows import CACHED
from cute_mla.testing.cases.base import DTYPES
from cute_mla.testing.suites.paged_cache import TYPES_AND_CACHES
from tests.ops.kv_cache.paged_keys import FORMATS, bytes_of, cache_of, key_arguments, keys, named
from tests.support.recording_device import RecordingDevice

SLOTS = [-1, 47, 0, 48, 17, -(2**31)]


def token_bytes(key: Tensor, cache: str, scale: float, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Return one token's bytes: its row, and its scales after the rows."""
    nowhere = torch.empty(0, dtype=torch.uint8)
    if not CACHED[cache].quantised:
        return key.view(torch.uint8), nowhere
    if cache == "fp8_576":
        return (key.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8), nowhere
    row, layout = quantise_cache(key[None, None, None], cache, power_of_two=power_of_two).flatten(), CACHED[cache]
    return (row, nowhere) if layout.scales_inside else (row[: layout.row_bytes], row[layout.row_bytes :][: layout.groups])


@pytest.mark.parametrize("slot_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("dtype", "cache"), TYPES_AND_CACHES)
def test_keys_go_to_their_slots_and_nowhere_else(cache: str, dtype: str, slot_dtype: torch.dtype) -> None:
    paged, (kv_c, k_pe) = cache_of(cache, dtype=DTYPES[dtype]), key_arguments(6, cache, DTYPES[dtype])
    rows, power_of_two = kv_c if k_pe is None else torch.cat((kv_c, k_pe), dim=1), cache in ("fp8_656", "nope_528")
    scale = torch.tensor(0.37) if cache == "fp8_576" else None
    expected, stride = bytes_of(paged), paged.stride(0) * paged.element_size()
    row_bytes, scale_bytes, page_size = CACHED[cache].row_bytes, CACHED[cache].scale_bytes, paged.shape[1]
    for token in (1, 2, 4):
        page, row = divmod(SLOTS[token], page_size)
        data, scales = token_bytes(rows[token], cache, 0.37, power_of_two)
        begin = page * stride + row * row_bytes
        expected[begin : begin + row_bytes] = data
        begin = page * stride + page_size * row_bytes + scale_bytes * row
        expected[begin : begin + len(scales)] = scales
    slots = torch.tensor(SLOTS, dtype=slot_dtype)
    write_kv_cache(kv_c, k_pe, paged, slots, descale_k=scale, power_of_two=power_of_two, kv_format=named(cache))
    assert torch.equal(bytes_of(paged), expected)


@pytest.mark.parametrize("cache", FORMATS)
@pytest.mark.parametrize("slots", [[], [-1], [-1, 48, -2]])
def test_nothing_is_written(slots: list[int], cache: str) -> None:
    paged = cache_of(cache)
    before = bytes_of(paged)
    write_kv_cache(*key_arguments(len(slots), cache), paged, torch.tensor(slots, dtype=torch.int64), kv_format=named(cache))
    assert torch.equal(bytes_of(paged), before)


def test_keys_that_are_not_finite() -> None:
    """A skipped token's stay out; a written one's are what was given."""
    cache, (kv_c, k_pe) = cache_of("latent", 1, fill=0xFF), keys(2)
    kv_c[0], k_pe[1, 3] = math.nan, math.inf
    write_kv_cache(kv_c, k_pe, cache, torch.tensor([-1, 4]))
    assert torch.equal(cache[0, 4, 0], torch.cat((kv_c[1], k_pe[1])))
    assert cache[0].isnan().all(dim=-1).sum() == 15


def test_the_scale_of_a_cache_is_1_unless_given() -> None:
    cache, (kv_c, k_pe) = cache_of("fp8_576", fill=0), keys(1)
    kv_c[0, :4] = torch.tensor([1e9, -1e9, -math.nan, math.nan])
    write_kv_cache(kv_c, k_pe, cache, torch.tensor([3]))
    assert cache.view(torch.uint8)[0, 3, 0, :4].tolist() == [0x7E, 0xFE, 0x7F, 0x7F]
    assert torch.equal(cache[0, 3, 0, 4:].float(), torch.cat((kv_c, k_pe), dim=1)[0, 4:].to(torch.float8_e4m3fn).float())


def test_a_cache_of_padded_pages() -> None:
    wide = cache_of("latent", 6, fill=0xFF)
    write_kv_cache(*keys(1), wide[1::2], torch.tensor([40]))
    assert not wide[5, 8].isnan().any()
    assert wide.isnan().all(dim=-1).sum() == 6 * 16 - 1


def test_fp32_without_kernels() -> None:
    cache, (kv_c, k_pe) = cache_of("latent", dtype=torch.float32), keys(1, dtype=torch.float32)
    write_kv_cache(kv_c, k_pe, cache, torch.tensor([5]))
    assert torch.equal(cache[0, 5], torch.cat((kv_c, k_pe), dim=1))


@pytest.mark.parametrize("cache", FORMATS)
def test_nothing_is_read_on_the_host(cache: str) -> None:
    """Tensors without contents are enough: a shape or a branch that depended on slots would raise."""
    slots = torch.zeros(3, dtype=torch.int64, device="meta")
    with pytest.raises(NotImplementedError):
        slots[slots >= 0]  # as a skip by a mask would do
    kv_c, k_pe = key_arguments(3, cache)
    write_kv_cache(kv_c.to("meta"), None if k_pe is None else k_pe.to("meta"), cache_of(cache).to("meta"), slots, kv_format=named(cache))


def test_what_was_written_comes_back() -> None:
    cache, (kv_c, k_pe) = cache_of("fp8_656"), keys(1, "fp8_656")
    write_kv_cache(kv_c, k_pe, cache, torch.tensor([9]))
    back = dequantise_cache(cache, "fp8_656")[0, 9, 0]
    assert torch.equal(back[512:], k_pe[0].float())
    assert (back[:512] - kv_c[0]).abs().max() <= kv_c.abs().max() / 28  # half a step of e4m3


def test_what_is_launched(arch: Arch) -> None:
    (kv_c, k_pe), cache = keys(9, "fp8_656"), cache_of("fp8_656", 5, 7)
    slots = torch.arange(18, dtype=torch.int32)[::2]
    with RecordingDevice(arch).active() as device:
        write_kv_cache(kv_c, k_pe, cache, slots, power_of_two=True)
        write_kv_cache(*keys(0), cache_of("latent"), slots[:0])
        write_kv_cache(*keys(9, dtype=torch.float16), cache_of("latent", dtype=torch.float16), slots.long())
    first, second = device.launches
    assert (first.kernel, first.grid, first.pdl) == (f"cache_write_{arch.name}_bf16_fp8_656", (3, 1, 1), True)
    for name, tensor in {"kv_c": kv_c, "k_pe": k_pe, "slot_mapping": slots, "k_cache": cache}.items():
        assert first.args[name].data_ptr() == tensor.data_ptr()
    assert first.args["descale_k"] is None
    scalars = {
        "kv_c_stride_token": 576, "k_pe_stride_token": 576, "slot_stride_token": 2, "cache_stride_page": 7 * 656, "cache_stride_row": 656,
        "tokens": 9, "slots": 35, "page_size": 7, "wide_slots": 0, "power_of_two": 1,
    }  # fmt: skip
    assert {name: first.args[name] for name in scalars} == scalars
    assert (second.kernel, second.args["wide_slots"]) == (f"cache_write_{arch.name}_b16_latent", 1)
    assert device.poisoned == []


def given(cache: str = "latent", **change: Any) -> dict[str, Any]:
    """Return arguments of a call of two tokens, some of them changed."""
    kv_c, k_pe = key_arguments(2, cache)
    return {"kv_c": kv_c, "k_pe": k_pe, "k_cache": cache_of(cache), "slot_mapping": torch.tensor([0, 1]), **change}


HUGE = torch.empty(1 << 26, 64, 1, 656, dtype=torch.uint8, device="meta")
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "KV heads": (given(k_cache=torch.zeros(3, 16, 2, 576).bfloat16()), r"k_cache has shape \[3, 16, 2, 576\] .* supported: \[pages, "),
    "type of the cache": (given(k_cache=torch.zeros(3, 16, 1, 576).double()), "k_cache has .* dtype torch.float64; supported: "),
    "a scale a head": (given("fp8_576", descale_k=torch.ones(16)), r"descale_k has shape \[16\]; supported: one element, for all heads"),
    "528 bytes": (given("v41"), "528 bytes a token, as 3 formats have, and kv_format is None; supported: 'v41', 'v41_paged', 'nope_528'"),
    "288 bytes": (given(k_cache=torch.zeros(2, 16, 1, 288).byte()), "the format v41_fp4, which has no kernels here; supported: "),
    "another format": (given(kv_format="fp8_656"), "dtype torch.bfloat16 with kv_format 'fp8_656'; supported: .* 656"),
    "no format": (given(kv_format="fp4"), "kv_format is 'fp4'; supported: None, latent, fp8_656"),
    "rotary columns apart": (given("v41", k_pe=torch.zeros(2, 64).bfloat16(), kv_format="v41"), "k_pe is given with a v41 cache"),
    "no rotary columns": (given("fp8_656", k_pe=None), "k_pe is None with a fp8_656 cache; supported: a torch tensor"),
    "fp16 keys": (given("v41", kv_c=torch.zeros(2, 512).half(), kv_format="v41"), "dtype torch.float16; supported: torch.bfloat16"),
    "no pages": (given(k_cache=cache_of("latent")[:0]), "supported: at least one page of at least one token"),
    "tokens": (given(kv_c=torch.zeros(1, 512).bfloat16()), r"kv_c has shape \[1, 512\]; supported with .*: \[2, 512\]"),
    "columns": (given("fp8_584", kv_c=keys(2)[0]), r"kv_c has shape \[2, 512\]; supported with a fp8_584 cache and .*: \[2, 448\]"),
    "slots": (given(slot_mapping=torch.zeros(2, 1, dtype=torch.int64)), r"slot_mapping has shape \[2, 1\]; supported: \[tokens\]"),
    "scale without e4m3": (given(descale_k=torch.ones(1)), "descale_k is given with a latent cache; supported: with fp8_576"),
    "powers of two": (given("fp8_576", power_of_two=True), "power_of_two is True with a fp8_576 cache; supported: with fp8_656"),
    "page stride": (given(k_cache=torch.zeros(3, 16 * 576 + 4).bfloat16().as_strided((3, 16, 1, 576), (9220, 576, 576, 1))), "16 bytes"),
    "odd pages": (given("fp8_584", k_cache=torch.zeros(2, 5, 1, 584).byte()), "2920 bytes along dimension 0; supported: positive"),
    "gaps": (given("fp8_584", k_cache=torch.zeros(2, 16, 1, 600).byte()[..., :584]), "supported: tokens that follow one another"),
    "slots beyond 32 bits": (given("fp8_656", k_cache=HUGE), f"{1 << 32} slots; supported: to {(1 << 31) - 1}"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(name: str) -> None:
    arguments, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        write_kv_cache(**arguments)


def test_what_only_kernels_refuse() -> None:
    wide = torch.zeros(2 * 16 * 576 + 8, dtype=torch.bfloat16)[1:-7].view(2, 16, 1, 576)
    kv_c, k_pe = (columns.float() for columns in keys(2))
    with RecordingDevice().active():
        with pytest.raises(ValueError, match=r"k_cache starts at address .*; supported: multiples of 16 bytes"):
            write_kv_cache(**given(k_cache=wide))
        with pytest.raises(ValueError, match=r"k_cache has .* dtype torch\.float32"):
            write_kv_cache(kv_c, k_pe, cache_of("latent", dtype=torch.float32), torch.tensor([0, 1]))
