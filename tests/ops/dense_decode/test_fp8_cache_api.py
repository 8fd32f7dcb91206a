"""Dense decode over an e4m3 cache: what is launched with which arguments, and the errors that only such calls can raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_mla import get_mla_metadata, is_supported
from cute_mla.spec.arch import SM90, SM100
from cute_mla.spec.dense_decode import FP8, FP8_CACHE, DenseDecodeConfig, tiling
from cute_mla.spec.tensor_map import Swizzle, TensorMap
from tests.support.recording_device import RecordingDevice
from tests.support.right_calls import RightCall, call_of

E4M3 = torch.float8_e4m3fn


def fp8_call(q_fp8: bool = False, **fields: Any) -> RightCall:
    """Return a call over an e4m3 cache without scales, with 16-bit queries or, if q_fp8, e4m3 ones."""
    return call_of("dense", operands=FP8 if q_fp8 else FP8_CACHE, scaled=False, **fields)


def decode_args(device: RecordingDevice) -> dict[str, Any]:
    """Return the arguments of the last launch of dense decode."""
    return next(launch.args for launch in reversed(device.launches) if "dense_decode" in launch.kernel)


@pytest.mark.parametrize(("q_fp8", "operands"), [(False, "fp8_cache"), (True, "fp8")])
def test_kernel_and_arguments(device: RecordingDevice, q_fp8: bool, operands: str) -> None:
    call = fp8_call(h_q=128, page_size=64, q_fp8=q_fp8)
    descale_k = torch.ones(1)
    descale_q = torch.ones(()) if q_fp8 else None
    out, _ = call.run(descale_q=descale_q, descale_k=descale_k, is_fp8_kvcache=True)
    args, cache = decode_args(device), call["k_cache"]
    config = DenseDecodeConfig("bf16", tiling(device.arch, operands).cluster(2), operands)
    assert device.launches[1].kernel == f"dense_decode_{device.arch.name}_{config.name}"
    assert f"bf16_{operands}_cluster" in config.name
    box_keys = 32 if q_fp8 and device.arch is SM100 else 64
    maps = {"kv_map": (128, Swizzle.B128), "rope_map": (64, Swizzle.B64)}
    for name, (columns, swizzle) in maps.items():
        box = columns, 1, box_keys, 1
        assert args[name] == TensorMap("u8", cache.data_ptr(), (576, 1, 64, len(cache)), (576, 576, 36_864), box, swizzle)
    assert args["descale_k"] is descale_k
    assert args["descale_q"] is (descale_q if q_fp8 else None)
    assert args["cache"] is (None if q_fp8 else cache)
    assert (args["page_stride"], args["row_stride"], args["pages"]) == (36_864, 576, len(cache))
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("fields", "few"),
    [
        ({}, True),
        ({"s_q": 2, "h_q": 8}, True),
        ({"s_q": 1, "h_q": 17}, False),
        ({"s_q": 2}, False),
        ({"few_heads": False}, False),
        ({"batch_invariant": True}, False),
    ],
)
def test_kernels_for_few_rows(device: RecordingDevice, fields: dict[str, Any], few: bool) -> None:
    """By query tokens times heads on Hopper; is_supported says the same."""
    few = few and device.arch is SM90
    call = fp8_call(**{"s_q": 1, "h_q": 16, **fields})
    call.run()
    assert any(launch.kernel == f"dense_decode_{device.arch.name}_bf16_fp8_cache_few_heads" for launch in device.launches) == few
    if "few_heads" not in fields:
        s_q, h_q = call["q"].shape[1:3]
        features = {"dtype": "bf16", "fp8_kvcache": True, "s_q": s_q, "h_q": h_q, "batch_invariant": fields.get("batch_invariant", False)}
        supported, said = is_supported("dense_decode", device.arch.name, **features)
        assert supported
        assert ("keys on M" in said) == few


@pytest.mark.parametrize(
    ("fields", "kernel"),
    [
        ({"s_q": 1, "h_q": 16}, "few_heads"),
        ({"s_q": 2, "h_q": 16}, "few_heads32"),
        ({"s_q": 4, "h_q": 9}, "few_heads64"),
        ({"s_q": 5, "h_q": 13}, ""),
        ({"s_q": 1, "h_q": 16, "few_heads": False}, ""),
        ({"s_q": 1, "h_q": 16, "batch_invariant": True}, ""),
    ],
)
def test_kernels_for_few_rows_of_e4m3(device: RecordingDevice, fields: dict[str, Any], kernel: str) -> None:
    """On Blackwell the kernels for few rows have a part for each SM; is_supported says the same."""
    few = bool(kernel) and device.arch is SM100
    call = fp8_call(q_fp8=True, **fields)
    call.run()
    launch = next(launch for launch in device.launches if "dense_decode" in launch.kernel)
    assert launch.kernel.endswith(f"_fp8_{kernel}") if few else "_fp8_cluster" in launch.kernel
    assert launch.grid[2] == device.sm_count // launch.grid[0]
    assert launch.grid[0] == 1 or not few
    assert decode_args(device)["kv_map"].box[2] == (32 if device.arch is SM100 and not few else 64)
    if "few_heads" not in fields:
        s_q, h_q = call["q"].shape[1:3]
        features = {"dtype": "e4m3", "fp8_kvcache": True, "s_q": s_q, "h_q": h_q, "batch_invariant": "batch_invariant" in fields}
        assert ("keys on M" in is_supported("dense_decode", device.arch.name, **features)[1]) == few


@pytest.mark.parametrize("q_fp8", [False, True])
@pytest.mark.parametrize("is_fp8_q", [False, True])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_every_plan_for_few_rows_serves_every_call(device: RecordingDevice, q_fp8: bool, is_fp8_q: bool, batch_invariant: bool) -> None:
    """A plan with the parts of pairs of CTAs takes the kernel for many heads."""
    call = fp8_call(q_fp8=q_fp8, s_q=1, h_q=32, batch_invariant=batch_invariant)
    metadata, num_splits = get_mla_metadata(call["cache_seqlens"], 32, 1, 32, is_fp8_q=is_fp8_q)
    on_blackwell = device.arch is SM100
    assert len(metadata) == device.sm_count // (2 if on_blackwell and not is_fp8_q else 1)
    call.run(tile_scheduler_metadata=metadata, num_splits=num_splits)
    launch = next(launch for launch in device.launches if "dense_decode" in launch.kernel)
    assert ("few_heads" in launch.kernel) == (on_blackwell and q_fp8 and is_fp8_q and not batch_invariant)
    assert launch.grid[2] == len(metadata)


def test_a_schedule_object_of_other_calls_serves_few_rows(device: RecordingDevice) -> None:
    schedule, _ = get_mla_metadata()
    for invariant in (True, False):
        fp8_call(q_fp8=True, s_q=1, h_q=16, batch_invariant=invariant).run(tile_scheduler_metadata=schedule, num_splits=None)
    kernels = [launch.kernel for launch in device.launches if "dense_decode" in launch.kernel]
    assert len(kernels) == 2
    assert all("_fp8_cluster" in kernel for kernel in kernels)


def test_scales_are_optional(device: RecordingDevice) -> None:
    fp8_call(q_fp8=True).run()
    args = decode_args(device)
    assert (args["descale_q"], args["descale_k"]) == (None, None)


def test_a_cache_of_16_bits_needs_neither_scales_nor_its_address(device: RecordingDevice) -> None:
    call_of("dense").run()
    args = decode_args(device)
    assert (args["cache"], args["descale_q"], args["descale_k"]) == (None, None, None)


@pytest.mark.parametrize("q_fp8", [False, True])
def test_out_is_bf16(device: RecordingDevice, q_fp8: bool) -> None:
    out, _ = fp8_call(q_fp8=q_fp8).run()
    assert out.dtype == torch.bfloat16
    assert device.launches[-2].kernel.startswith(f"dense_decode_{device.arch.name}_bf16_fp8_")
    assert device.launches[-1].kernel == f"combine_{device.arch.name}_bf16"


def test_fp16_queries_are_converted_by_the_caller(device: RecordingDevice) -> None:
    with pytest.raises(ValueError, match=r"q with an FP8 cache has dtype torch.float16; supported: .*e4m3fn, as .to\(torch.bfloat16\)"):
        fp8_call(dtype="fp16").run()


def cache(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    """Zeros."""
    return torch.zeros(*shape).to(dtype)


WRONG: list[tuple[str, bool, dict[str, Callable[[], Any]], str]] = [
    ("e5m2", False, {"k_cache": lambda: cache(9, 64, 1, 576, dtype=torch.float8_e5m2)}, "e5m2; supported: .*16, .*e4m3fn"),
    ("two KV heads", False, {"k_cache": lambda: cache(9, 64, 2, 576)}, r"supported of .*e4m3fn: \[pages, page size, 1, 576\]"),
    ("rows of 584", False, {"k_cache": lambda: cache(9, 64, 1, 584)[..., :576]}, "584 bytes along dimension 1"),
    ("e4m3 queries alone", True, {"k_cache": lambda: cache(9, 64, 1, 576, dtype=torch.half)}, "torch.float16; supported: .*e4m3fn"),
    ("descale_q of 16-bit queries", False, {"descale_q": lambda: torch.ones(1)}, "descale_q is given with torch.bfloat16; supported"),
    ("two scales", False, {"descale_k": lambda: torch.ones(2)}, r"descale_k has shape \[2\]; supported: one element"),
    ("a scale a head of q", True, {"descale_q": lambda: torch.ones(2, 64)}, r"descale_q has shape \[2, 64\]; supported: one .*for all"),
    ("out of fp32", True, {"out": lambda: torch.empty(2, 1, 64, 512)}, "out has dtype .*float32; supported: torch.bfloat16$"),
    ("out of fp16", True, {"out": lambda: torch.empty(2, 1, 64, 512).half()}, r"out has dtype .*float16; .* as .to\(torch.bfloat16\)"),
]  # fmt: skip


@pytest.mark.parametrize(("q_fp8", "changes", "said"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_errors(device: RecordingDevice, q_fp8: bool, changes: dict[str, Callable[[], Any]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fp8_call(q_fp8).run(**{name: make() for name, make in changes.items()})
    assert device.launches == []
