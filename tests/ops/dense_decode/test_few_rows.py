"""Dense decode of few query rows over a 16-bit cache: which calls take the kernel with keys on M on Blackwell."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_mla import get_mla_metadata, is_supported, workspace_size
from cute_mla.spec.arch import SM100
from cute_mla.spec.tensor_map import Swizzle, TensorMap
from tests.support.recording_device import Launch, RecordingDevice
from tests.support.right_calls import call_of

FEW = "dense_decode_sm100_bf16_few_heads"


def decode_launch(device: RecordingDevice) -> Launch:
    """Return the last launch of dense decode."""
    return next(launch for launch in reversed(device.launches) if "dense_decode" in launch.kernel)


@pytest.mark.parametrize(
    ("fields", "few"),
    [
        ({"h_q": 16}, True),
        ({"h_q": 5, "s_q": 3, "causal": True}, True),
        ({"h_q": 32, "h_kv": 2}, True),
        ({"h_q": 16, "tokens": (1, 0), "s_q": 1}, True),
        ({"h_q": 17}, False),
        ({"h_q": 9, "s_q": 2}, False),
        ({"h_q": 16, "tokens": (2, 1), "s_q": 1}, False),
        ({"h_q": 16, "dtype": "fp16"}, False),
        ({"h_q": 16, "d_qk": 512}, False),
        ({"h_q": 16, "d_qk": 320}, False),
        ({"h_q": 16, "tree": "drawn"}, False),
        ({"h_q": 16, "window": 70}, False),
        ({"h_q": 16, "batch_invariant": True}, False),
        ({"h_q": 16, "few_heads": False}, False),
    ],
)
def test_which_calls_take_it(device: RecordingDevice, fields: dict[str, Any], few: bool) -> None:
    """One CTA a part, and a part for each SM."""
    few = few and device.arch is SM100
    call_of("dense", **{"s_q": 1, **fields}).run()
    launch = decode_launch(device)
    assert (launch.kernel == FEW) == few
    assert launch.grid[2] == device.sm_count // (launch.grid[0] * launch.grid[1])
    assert launch.grid[0] == 1 or not few


def test_its_maps(device: RecordingDevice) -> None:
    """All columns of a key, RoPE columns too, come in boxes of 64 columns."""
    call = call_of("dense", h_q=16, page_size=64)
    call.run()
    args, cache = decode_launch(device).args, call["k_cache"]
    box = 64, 1, 64, 1
    assert args["kv_map"] == TensorMap("bf16", cache.data_ptr(), (576, 1, 64, len(cache)), (1152, 1152, 73_728), box, Swizzle.B128)


@pytest.mark.parametrize("is_fp8_q", [False, True])
def test_plans_made_ahead(device: RecordingDevice, is_fp8_q: bool) -> None:
    """A plan says by its parts which kernel it is for."""
    call = call_of("dense", h_q=16, s_q=1)
    metadata, num_splits = get_mla_metadata(call["cache_seqlens"], 16, 1, 16, is_fp8_q=is_fp8_q)
    call.run(tile_scheduler_metadata=metadata, num_splits=num_splits)
    launch = decode_launch(device)
    assert (launch.kernel == FEW) == (device.arch is SM100 and is_fp8_q)
    assert launch.grid[2] == len(metadata)


@pytest.mark.parametrize("metadata", ["object", "tensors"])
def test_workspace_suffices(device: RecordingDevice, metadata: str) -> None:
    """For either kernel: the call checks its size."""
    call = call_of("dense", h_q=16, s_q=1, metadata=metadata)
    nbytes = workspace_size("dense_decode", batch=2, s_q=1, h_q=16)
    call.run(workspace=torch.zeros(nbytes, dtype=torch.uint8))
    assert "dense_decode" in decode_launch(device).kernel


@pytest.mark.parametrize(
    ("features", "few"),
    [
        ({}, True),
        ({"h_q": 8, "s_q": 2}, True),
        ({"h_q": 32, "h_kv": 2}, True),
        ({"h_q": 17}, False),
        ({"dtype": "fp16"}, False),
        ({"head_dim": 512}, False),
        ({"head_dim": None}, False),
        ({"tree_mask": True}, False),
        ({"window": True}, False),
        ({"batch_invariant": True}, False),
    ],
)
@pytest.mark.parametrize("arch", ["sm90", "sm100"])
def test_is_supported_says_so(arch: str, features: dict[str, Any], few: bool) -> None:
    asked = {name: value for name, value in {"dtype": "bf16", "head_dim": 576, "h_q": 16, **features}.items() if value is not None}
    supported, said = is_supported("dense_decode", arch, **asked)
    assert supported
    assert ("keys on M" in said) == (few and arch == "sm100")
