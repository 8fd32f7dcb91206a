"""gather_kv_cache: what it takes from where in plain torch, what it launches, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_mla.cache import dequantise_cache, gather_kv_cache, write_kv_cache
from cute_mla.spec.arch import Arch
from cute_mla.spec.cache_rows import CACHED
from cute_mla.testing.cases.base import DTYPES
from cute_mla.testing.suites.paged_cache import TYPES_AND_CACHES
from tests.ops.kv_cache.paged_keys import FORMATS, cache_of, key_arguments, named
from tests.support.recording_device import RecordingDevice

TABLE = torch.tensor([[4, 2, -7], [1, 2_000_000_000, 3], [0, 0, 0]], dtype=torch.int32)
CU_SEQLENS = torch.tensor([0, 9, 9, 16], dtype=torch.int32)


def filled(cache: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """5 pages of 8, every slot with a key of its own."""
    paged = cache_of(cache, 5, 8, dtype)
    write_kv_cache(*key_arguments(40, cache, dtype), paged, torch.arange(40), kv_format=named(cache))
    return paged


def test_requests_without_pages_are_rows_of_zeros() -> None:
    out = torch.full((15, 576), float("nan"), dtype=torch.bfloat16)
    assert not gather_kv_cache(filled("latent", torch.bfloat16), TABLE[:, :0], CU_SEQLENS, 15, out=out).any()


@pytest.mark.parametrize(("type_name", "cache"), TYPES_AND_CACHES)
def test_keys_in_the_order_of_the_requests(cache: str, type_name: str) -> None:
    dtype = DTYPES[type_name]
    paged = filled(cache, dtype)
    scale = torch.tensor([0.37]) if cache == "fp8_576" else None
    every = paged.float() * 0.37 if cache == "fp8_576" else dequantise_cache(paged, cache)
    starts = torch.tensor([3, 2, 18], dtype=torch.int32)
    out = gather_kv_cache(paged, TABLE, CU_SEQLENS, 16, starts=starts, descale_k=scale, dtype=dtype, kv_format=named(cache))
    wanted = [4 * 8 + row for row in range(3, 8)] + [2 * 8 + row for row in range(4)] + list(range(2, 8))
    assert (out.dtype, out.shape) == (dtype, (16, CACHED[cache].d_qk))
    assert torch.equal(out[:15], every.flatten(0, 2)[wanted].to(dtype))
    assert not out[15].any(), "position 24 of three pages of 8"


@pytest.mark.parametrize("page", [-1, 5, 2**31 - 1])
def test_a_page_outside_the_cache_is_of_zeros(page: int) -> None:
    table = torch.tensor([[page, 3]], dtype=torch.int32)
    out = gather_kv_cache(filled("fp8_656"), table, torch.tensor([0, 10], dtype=torch.int32), 10)
    assert not out[:8].any()
    assert out[8:].any(dim=1).all()


def test_rows_behind_the_last_are_left_alone() -> None:
    out = torch.full((20, 640), 7.0, dtype=torch.bfloat16)
    paged = filled("latent")
    assert gather_kv_cache(paged, TABLE, CU_SEQLENS, 20, out=out[:, 3:579]).data_ptr() == out[:, 3:].data_ptr()
    assert (out[16:] == 7).all()
    assert (out[:, :3] == 7).all()
    assert (out[:, 579:] == 7).all()
    assert torch.equal(out[9:16, 3:579], paged[0, :7, 0])


@pytest.mark.parametrize(("batch", "rows"), [(0, 3), (3, 0), (0, 0)])
def test_nothing_to_gather(batch: int, rows: int) -> None:
    ends = torch.zeros(batch + 1, dtype=torch.int32)
    out = torch.full((rows, 576), math.nan, dtype=torch.bfloat16)
    with RecordingDevice().active() as device:
        assert gather_kv_cache(filled_outside, TABLE[:batch], ends, rows, out=out) is out
    assert gather_kv_cache(filled_outside, TABLE[:batch], ends, rows, out=out) is out
    assert out.isnan().all()
    assert device.launches == []


filled_outside = filled("latent")


@pytest.mark.parametrize("cache", FORMATS)
def test_nothing_is_read_on_the_host(cache: str) -> None:
    table, cu_seqlens = TABLE.to("meta"), CU_SEQLENS.to("meta")
    rows = gather_kv_cache(filled(cache).to("meta"), table, cu_seqlens, 16, starts=CU_SEQLENS[:3].to("meta"), kv_format=named(cache))
    assert rows.shape == (
        16,
        CACHED[cache].d_qk,
    )


def test_what_is_launched(arch: Arch) -> None:
    paged, table, starts = filled("fp8_584"), torch.zeros(3, 9, dtype=torch.int32)[:, 2:6], torch.tensor([1, 2, 3], dtype=torch.int32)
    with RecordingDevice(arch).active() as device:
        out = gather_kv_cache(paged, table, CU_SEQLENS, 21, starts=starts, dtype=torch.bfloat16)
        gather_kv_cache(filled_outside, TABLE, CU_SEQLENS, 16)
    first, second = device.launches
    assert (first.kernel, first.grid, first.pdl) == (f"cache_gather_{arch.name}_bf16_fp8_584", (6, 1, 1), True)
    for name, tensor in {"k_cache": paged, "block_table": table, "cu_seqlens": CU_SEQLENS, "starts": starts, "out": out}.items():
        assert first.args[name].data_ptr() == tensor.data_ptr()
    scalars = {
        "cache_stride_page": 8 * 584, "cache_stride_row": 576, "table_stride_batch": 9, "out_stride_row": 512,
        "rows": 21, "batch": 3, "pages": 5, "page_size": 8, "table_pages": 4,
    }  # fmt: skip
    assert {name: first.args[name] for name in scalars} == scalars
    assert (second.kernel, second.args["starts"], second.args["descale_k"]) == (f"cache_gather_{arch.name}_b16_latent", None, None)
    assert device.poisoned[0] == out.data_ptr()


def given(cache: str = "latent", **change: Any) -> dict[str, Any]:
    """Return arguments of a call, some of them changed."""
    return {"k_cache": cache_of(cache), "block_table": TABLE, "cu_seqlens": CU_SEQLENS, "rows": 16, **change}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "cache": (given(k_cache=torch.zeros(3, 16, 1, 448).bfloat16()), r"k_cache has shape \[3, 16, 1, 448\]"),
    "table": (given(block_table=TABLE[0]), r"block_table has shape \[3\]; supported: \[batch, pages per request\]"),
    "ends": (given(cu_seqlens=CU_SEQLENS[:3]), r"cu_seqlens has shape \[3\]; supported: \[4\]"),
    "rows": (given(rows=-1), "rows is -1; supported: an integer, 0 to"),
    "no number of rows": (given(rows=CU_SEQLENS[-1]), r"rows is a tensor of shape \[\]; supported"),
    "type of a latent cache": (given(dtype=torch.float16), "dtype is torch.float16 with a latent cache of torch.bfloat16; supported: "),
    "type": (given("fp8_656", dtype=torch.int8), "dtype is torch.int8 with a fp8_656 cache .* supported: torch.bfloat16"),
    "type of out": (given("fp8_656", dtype=torch.bfloat16, out=torch.zeros(16, 576).half()), "out has dtype torch.float16"),
    "shape of out": (given(out=torch.zeros(16, 512).bfloat16()), r"out has shape \[16, 512\]; supported: \[16, 576\]"),
    "rows of out": (given(out=torch.zeros(1, 576).bfloat16().expand(16, -1)), "supported: an output of distinct elements"),
    "528 bytes": (given("v41_paged"), "as 3 formats have, and kv_format is None; supported: 'v41', 'v41_paged', 'nope_528'"),
    "NVFP4": (given(k_cache=torch.zeros(3, 16, 1, 352).byte()), "k_cache has 352 bytes a token: no kernel reads NVFP4 .*fp8_656, vLLM's"),
    "NVFP4 by name": (given(kv_format="nvfp4_ds_mla"), "kv_format is 'nvfp4_ds_mla': no kernel reads NVFP4 records .*fp8_ds_mla"),
    "rows that overlap": (
        given("v41", k_cache=torch.zeros(1 << 14).byte().as_strided((3, 8, 1, 528), (4096, 512, 528, 1)), kv_format="v41"),
        "512 bytes along dimension 1; supported for v41: at least 528 .* are v41_paged",
    ),
    "fp16 of 528 bytes": (given("v41", kv_format="v41", dtype=torch.float16), "dtype is torch.float16 with a v41 cache .* torch.bfloat16"),
    "scale": (given("fp8_656", descale_k=torch.ones(1)), "descale_k is given with a fp8_656 cache; supported: with fp8_576"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(name: str) -> None:
    arguments, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        gather_kv_cache(**arguments)
