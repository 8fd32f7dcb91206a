"""insert_kv_cache: equal to its parts one after the other, what it launches, and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm

import cute_mla
from cute_mla.cache import insert_kv_cache, write_kv_cache
from cute_mla.layer.rope import Rotation
from cute_mla.ops.norm_rope import rms_norm, rotated
from cute_mla.spec.arch import Arch
from cute_mla.spec.cache_insert import key_types, normalised_columns, rotates
from cute_mla.spec.cache_rows import CACHED
from cute_mla.testing.cases.base import DTYPES
from cute_mla.testing.suites.paged_cache import types_and_caches
from tests.ops.kv_cache.paged_keys import bytes_of, cache_of, key_arguments, named
from tests.support.recording_device import RecordingDevice

POSITIONS = [3, 0, 8, 8, 1, 5, 2, 7, 9]  # of 9: the last lies outside
EVERY_KIND = pytest.mark.parametrize(("dtype", "cache"), types_and_caches(key_types))


def arguments(
    cache: str = "latent", dtype: torch.dtype = torch.bfloat16, tokens: int = 9, heads: int = 5, **changes: Any
) -> dict[str, Any]:
    """Return arguments of a call, some of them changed."""
    kv_c, k_pe = key_arguments(tokens, cache, dtype)
    draw = torch.Generator().manual_seed(1)
    rotary: dict[str, Any] = dict.fromkeys(("q_pe", "cos_sin", "positions"))
    if rotates(CACHED[cache]):
        angles = 30 * torch.rand(9, 32, generator=draw)
        rotary = {
            "q_pe": torch.randn(tokens, heads, 64, generator=draw).to(dtype),
            "cos_sin": torch.cat((angles.cos(), angles.sin()), dim=1),
            "positions": torch.tensor(POSITIONS[:tokens], dtype=torch.int64),
        }
    return {
        "kv_c": 3 * kv_c,
        "k_pe": k_pe,
        "k_cache": cache_of(cache, dtype=dtype),
        "slot_mapping": torch.tensor([17, 40, -1, 3, 48, 4, 31, 0, 20][:tokens], dtype=torch.int64),
        "norm_weight": torch.randn(normalised_columns(CACHED[cache]), generator=draw).to(dtype),
        **rotary,
        "kv_format": named(cache),
        **changes,
    }


def with_nan_of_gpus(columns: Tensor) -> Tensor:
    """Return 16-bit columns with the NaN that GPUs round to, 0x7FFF; fp32 as it is."""
    if columns.dtype == torch.float32:
        return columns
    return torch.where(columns.isnan(), 0x7FFF, columns.view(torch.int16).int()).short().view(columns.dtype)


def parts(given: dict[str, Any], cache: str, eps: float = 1e-6) -> dict[str, Tensor | None]:
    """Return what the parts write one after the other: norm, the layer's rotation, write_kv_cache in plain torch."""
    kv_c, k_pe, width = given["kv_c"], given["k_pe"], normalised_columns(CACHED[cache])
    whole = kv_c if k_pe is None else torch.cat((kv_c, k_pe), dim=1)
    whole = torch.cat((rms_norm(whole[:, :width], given["norm_weight"], eps), whole[:, width:]), dim=1)
    q_pe = given["q_pe"]
    if given["cos_sin"] is not None:
        table = torch.cat((given["cos_sin"], torch.full((1, 64), math.nan)))
        cos, sin = table[given["positions"]].chunk(2, dim=1)
        turn = Rotation(cos, sin)
        whole = torch.cat((whole[:, :-64], with_nan_of_gpus(turn.apply(whole[:, -64:]))), dim=1)
        q_pe = turn.apply(q_pe)
    written = torch.empty(0, dtype=given["k_cache"].dtype)
    written.set_(given["k_cache"].untyped_storage().clone(), 0, given["k_cache"].shape, given["k_cache"].stride())
    latent = kv_c.shape[1]
    rotary = None if k_pe is None else whole[:, latent:]
    write_kv_cache(
        whole[:, :latent], rotary, written, given["slot_mapping"], kv_format=given["kv_format"], descale_k=given.get("descale_k")
    )
    return {"k_cache": written, "q_pe": q_pe, "keys": whole}


@EVERY_KIND
def test_the_kernels_give_the_bits_of_the_parts(arch: Arch, cache: str, dtype: str) -> None:
    given = arguments(cache, DTYPES[dtype])
    given["kv_c"][3, 5], given["kv_c"][5] = math.nan, 0.0
    if cache == "fp8_576":
        given["descale_k"] = torch.tensor(0.37)
    expected = parts(given, cache)
    keys = torch.zeros(9, CACHED[cache].d_qk, dtype=DTYPES[dtype])
    with cute_mla.simulate(arch) as device:
        insert_kv_cache(**given, keys=keys)
    assert (device.launches, device.findings) == (1, [])
    for name, tensor in (("k_cache", given["k_cache"]), ("q_pe", given["q_pe"]), ("keys", keys)):
        made = expected[name]
        assert (made is None) == (tensor is None)
        assert made is None or same_bytes(tensor, made), name


def same_bytes(one: Tensor, other: Tensor | None) -> bool:
    """Return whether two tensors have the same bytes, NaN included; NaN of 16-bit columns has any."""
    assert other is not None
    if one.dtype in (torch.bfloat16, torch.float16, torch.float32):
        return torch.equal(one.nan_to_num(7e4), other.nan_to_num(7e4)) and torch.equal(one.isnan(), other.isnan())
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@EVERY_KIND
def test_plain_torch_gives_the_bits_of_the_parts(cache: str, dtype: str) -> None:
    given = arguments(cache, DTYPES[dtype])
    expected = parts(given, cache)
    keys = torch.zeros(9, CACHED[cache].d_qk, dtype=DTYPES[dtype])
    insert_kv_cache(**given, keys=keys)
    assert same_bytes(given["k_cache"], expected["k_cache"])
    assert same_bytes(keys, expected["keys"])
    assert given["q_pe"] is None or same_bytes(given["q_pe"], expected["q_pe"])


@pytest.mark.parametrize("columns", [256, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_norm_is_that_of_torch_but_for_the_order_of_the_sum(columns: int, dtype: torch.dtype) -> None:
    rows, weight = (5 * torch.randn(200, columns)).to(dtype), torch.randn(columns).to(dtype)
    expected = torch_rms_norm(rows.float(), (columns,), weight.float(), 1e-6)
    found = rms_norm(rows, weight, 1e-6)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=1.01 * torch.finfo(dtype).eps / 2 + 1e-6, atol=1e-6)


def test_the_rotation_is_that_of_the_layer() -> None:
    columns, angles = torch.randn(7, 3, 64).bfloat16(), 30 * torch.rand(7, 32)
    turn = Rotation(angles.cos(), angles.sin())
    assert torch.equal(rotated(columns, torch.cat((angles.cos(), angles.sin()), dim=1)), turn.apply(columns))


def test_tokens_without_a_slot_are_rotated_and_kept(arch: Arch) -> None:
    given, keys = arguments(slot_mapping=torch.full((9,), -1)), torch.zeros(9, 576, dtype=torch.bfloat16)
    before, expected = bytes_of(given["k_cache"]), parts(given, "latent")
    with cute_mla.simulate(arch):
        insert_kv_cache(**given, keys=keys)
    assert torch.equal(bytes_of(given["k_cache"]), before)
    assert same_bytes(given["q_pe"], expected["q_pe"])
    assert same_bytes(keys, expected["keys"])


def test_what_is_launched(arch: Arch) -> None:
    with RecordingDevice(arch).active() as device:
        insert_kv_cache(**arguments("fp8_656", heads=16), power_of_two=True, eps=0.25)
        insert_kv_cache(**arguments("latent", torch.float16, q_pe=None))
        insert_kv_cache(**arguments(tokens=0))
    first, second = device.launches
    assert (first.kernel, first.grid, first.pdl) == (f"cache_insert_{arch.name}_bf16_fp8_656", (3 + 3, 1, 1), True)
    scalars = {
        "kv_c_stride_token": 512, "k_pe_stride_token": 576, "q_pe_stride_token": 1024, "q_pe_stride_head": 64, "tokens": 9, "groups": 1,
        "heads": 16, "key_blocks": 3, "table_rows": 9, "slots": 48, "wide_slots": 1, "wide_positions": 1,
        "power_of_two": 1, "epsilon": 0.25,
    }  # fmt: skip
    assert {name: first.args[name] for name in scalars} == scalars
    assert first.args["keys"] is None
    assert (second.kernel, second.grid) == (f"cache_insert_{arch.name}_fp16_latent", (3, 1, 1))


def test_nothing_is_read_on_the_host() -> None:
    """Tensors without contents are enough."""
    for cache in ("latent", "fp8_584"):
        given: dict[str, Any] = arguments(cache, tokens=3)
        for name, value in given.items():
            given[name] = value.to("meta") if isinstance(value, Tensor) else value
        insert_kv_cache(**given)


def test_fp32_without_kernels() -> None:
    given = arguments(dtype=torch.float32)
    expected = parts(given, "latent")
    insert_kv_cache(**given)
    assert same_bytes(given["k_cache"], expected["k_cache"])


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "weight": ("latent", {"norm_weight": torch.zeros(576).bfloat16()}, r"has shape \[576\]; supported with a latent cache: \[512\]"),
    "weight of values": ("fp8_584", {"norm_weight": torch.zeros(448).bfloat16()}, r"supported with a fp8_584 cache: \[512\]"),
    "no table": ("latent", {"cos_sin": None}, "cos_sin is None with a latent cache; supported: a torch tensor"),
    "table": ("latent", {"cos_sin": torch.zeros(9, 32)}, r"cos_sin has shape \[9, 32\]; supported: \[positions, 64\]"),
    "a table for nothing": ("latent_512", {"cos_sin": torch.zeros(9, 64)}, "cos_sin is given with a latent_512 cache; supported: None"),
    "positions for nothing": ("nope_528", {"positions": torch.zeros(9).long()}, "positions is given with a nope_528 cache"),
    "queries for nothing": ("nope_528", {"q_pe": torch.zeros(9, 1, 64).bfloat16()}, "q_pe is given with a nope_528 cache; supported: None"),
    "heads": ("latent", {"q_pe": torch.zeros(9, 129, 64).bfloat16()}, r"q_pe has shape \[9, 129, 64\]; supported: 1 to 128 heads"),
    "expanded queries": ("latent", {"q_pe": torch.zeros(9, 1, 64).bfloat16().expand(9, 4, 64)}, "q_pe has strides .* share memory"),
    "kept keys": ("latent", {"keys": torch.zeros(9, 512).bfloat16()}, r"keys has shape \[9, 512\]; supported with .*: \[9, 576\]"),
    "eps": ("latent", {"eps": -1.0}, "eps is -1.0; supported: 0 or a positive number"),
    "powers of two": ("latent", {"power_of_two": True}, "power_of_two is True with a latent cache"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(name: str) -> None:
    cache, changes, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        insert_kv_cache(**arguments(cache, **changes))


def test_results_have_memory_of_their_own() -> None:
    given, whole = arguments(), torch.zeros(9, 640, dtype=torch.bfloat16)
    with RecordingDevice().active():
        with pytest.raises(ValueError, match="q_pe shares memory with k_pe"):
            insert_kv_cache(**{**given, "k_pe": whole[:, :64], "q_pe": whole.view(9, 10, 64)})
        with pytest.raises(ValueError, match="keys shares memory with kv_c"):
            insert_kv_cache(**{**given, "kv_c": whole[:, :512], "keys": whole[:, 64:]})
        with pytest.raises(ValueError, match=r"cos_sin starts at address .*; supported: multiples of 16 bytes"):
            insert_kv_cache(**{**given, "cos_sin": torch.zeros(65)[1:].view(1, 64)})


def test_a_weight_may_begin_at_any_element(arch: Arch) -> None:
    given, others = arguments(), arguments()
    given["norm_weight"] = torch.cat((torch.zeros(1), given["norm_weight"])).bfloat16()[1:]
    insert_kv_cache(**others)
    with cute_mla.simulate(arch) as device:
        insert_kv_cache(**given)
    assert device.findings == []
    assert torch.equal(bytes_of(given["k_cache"]), bytes_of(others["k_cache"]))
