"""Public calls of the backward pass: what they launch with which arguments, and what they allocate."""

from __future__ import annotations

import math
from inspect import signature
from typing import Any

import pytest
import torch

import cute_mla
from cute_mla.runtime.arguments import Span
from cute_mla.runtime.simulated_device import simulated_map
from cute_mla.simulator.numerics.tma import validate
from cute_mla.spec.abi import ParamKind
from cute_mla.spec.dense_prefill import HEAD_DIMS
from cute_mla.spec.dense_prefill_dkdv import TILE_KEYS, TILE_QUERIES
from cute_mla.spec.kernel_ops import PARAMS_OF
from cute_mla.spec.mla import ceil_div
from cute_mla.spec.tensor_map import Swizzle, TensorMap
from tests.support.dispatch_modes import Allocations
from tests.support.recording_device import RecordingDevice
from tests.support.right_calls import call_of
from tests.support.zero_tensors import ints

LOG2_E = math.log2(math.e)


def of_kind(op: str, args: dict[str, Any], kind: ParamKind) -> dict[str, Any]:
    """Return the arguments of one kind."""
    return {param.name: args[param.name] for param in PARAMS_OF[op] if param.kind is kind}


def test_a_call_is_two_launches(device: RecordingDevice) -> None:
    gradients = call_of("backward").run()
    dq, dkdv = device.launches
    assert (dq.kernel, dkdv.kernel) == ("dense_prefill_dq_sm90_bf16_d192", "dense_prefill_dkdv_sm90_bf16_d192")
    assert (dq.grid, dkdv.grid) == ((min(3 * 2 * 8, 132), 1, 1), (min(4 * 2 * 2, 132), 1, 1))
    assert dq.pdl
    assert dkdv.pdl
    assert [tensor.shape for tensor in gradients] == [(300, 8, 192), (500, 2, 192), (500, 2, 128)]
    assert {tensor.dtype for tensor in gradients} == {torch.bfloat16}
    assert dq.args["dq"] is gradients[0]
    assert (dkdv.args["dk"], dkdv.args["dv"]) == gradients[1:]


@pytest.mark.parametrize("causal", [False, True])
def test_arguments_of_dq(device: RecordingDevice, causal: bool) -> None:
    call = call_of("backward")
    call.run(softmax_scale=0.25, causal=causal)
    args = device.launches[0].args
    renamed = {"cu_seqlens_q": "cu_seqlens_qo", "cu_seqlens_k": "cu_seqlens_kv"}
    for name in ("q", "dout", "out", "lse", *renamed):
        assert args[name] is call[renamed.get(name, name)]
    address = {name: call[name].data_ptr() for name in ("q", "dout", "k", "v")}
    assert of_kind("dense_prefill_dq", args, ParamKind.TENSOR_MAP) == {
        "q_map": TensorMap("bf16", address["q"], (192, 8, 300), (384, 8 * 384), (64, 1, 64), Swizzle.B128),
        "dout_map": TensorMap("bf16", address["dout"], (128, 8, 300), (256, 8 * 256), (64, 1, 64), Swizzle.B128),
        "k_map": TensorMap("bf16", address["k"], (192, 2, 500), (384, 2 * 384), (64, 1, 96), Swizzle.B128),
        "v_map": TensorMap("bf16", address["v"], (128, 2, 500), (256, 2 * 256), (64, 1, 96), Swizzle.B128),
    }
    assert of_kind("dense_prefill_dq", args, ParamKind.INT64) == {
        "q_stride_token": 8 * 192, "q_stride_head": 192, "dout_stride_token": 8 * 128, "dout_stride_head": 128,
        "out_stride_token": 8 * 128, "out_stride_head": 128, "lse_stride_token": 8, "lse_stride_head": 1,
        "dq_stride_token": 8 * 192, "dq_stride_head": 192, "statistics_stride": 300,
    }  # fmt: skip
    assert of_kind("dense_prefill_dq", args, ParamKind.INT32) == {
        "batch": 2, "h_q": 8, "heads_per_kv": 4, "total_q": 300, "total_k": 500, "row_blocks": 3, "causal": causal,
    }  # fmt: skip
    assert (args["softmax_scale"], args["scale_log2"]) == (0.25, pytest.approx(0.25 * LOG2_E))
    assert (args["q_copy"], args["dout_copy"]) == (None, None)


@pytest.mark.parametrize(("d_qk", "box_rows"), list(TILE_QUERIES["sm90"].items()))
def test_arguments_of_dk_and_dv(device: RecordingDevice, d_qk: int, box_rows: int) -> None:
    call, d_v = call_of("backward", d_qk=d_qk), HEAD_DIMS[d_qk]
    call.run()
    args = device.launches[1].args
    address = {name: call[name].data_ptr() for name in ("q", "dout", "k", "v")}
    statistics = device.launches[0].args["statistics"]
    assert isinstance(statistics, Span)
    assert of_kind("dense_prefill_dkdv", args, ParamKind.TENSOR_MAP) == {
        "q_map": TensorMap("bf16", address["q"], (d_qk, 8, 300), (2 * d_qk, 16 * d_qk), (64, 1, box_rows), Swizzle.B128),
        "dout_map": TensorMap("bf16", address["dout"], (d_v, 8, 300), (2 * d_v, 16 * d_v), (64, 1, box_rows), Swizzle.B128),
        "k_map": TensorMap("bf16", address["k"], (d_qk, 2, 500), (2 * d_qk, 4 * d_qk), (64, 1, 64), Swizzle.B128),
        "v_map": TensorMap("bf16", address["v"], (d_v, 2, 500), (2 * d_v, 4 * d_v), (64, 1, 64), Swizzle.B128),
        "statistics_map": TensorMap("fp32", statistics.data_ptr(), (300, 8, 2), (1200, 9600), (box_rows, 1, 2)),
    }
    assert of_kind("dense_prefill_dkdv", args, ParamKind.INT64) == {
        "dk_stride_token": 2 * d_qk, "dk_stride_head": d_qk, "dv_stride_token": 2 * d_v, "dv_stride_head": d_v,
    }  # fmt: skip
    assert of_kind("dense_prefill_dkdv", args, ParamKind.INT32) == {
        "batch": 2, "h_kv": 2, "heads_per_kv": 4, "total_q": 300, "total_k": 500, "query_limit": 300,
        "row_blocks": ceil_div(400, TILE_KEYS["sm90"][d_qk]), "causal": 0, "aligned": 1,
    }  # fmt: skip
    assert args["softmax_scale"] == pytest.approx(d_qk**-0.5)
    for name in ("q_map", "dout_map", "k_map", "v_map", "statistics_map"):
        validate(simulated_map(args[name]))


@pytest.mark.parametrize("d_qk", [192, 128, 256])
def test_columns_decide_the_variants(device: RecordingDevice, d_qk: int) -> None:
    gradients = call_of("backward", d_qk=d_qk).run()
    assert [launch.kernel for launch in device.launches] == [f"dense_prefill_{kernel}_sm90_bf16_d{d_qk}" for kernel in ("dq", "dkdv")]
    assert {gradient.dtype for gradient in gradients} == {torch.bfloat16}


def test_fp16_is_converted_by_the_caller(device: RecordingDevice) -> None:
    with pytest.raises(ValueError, match=r"q has dtype torch.float16; supported: torch.bfloat16, as .to\(torch.bfloat16\) gives"):
        call_of("backward", dtype="fp16").run()


def test_positional_arguments_and_other_names(device: RecordingDevice) -> None:
    call = call_of("backward")
    operands = [(name, call[name]) for name in list(signature(cute_mla.flash_attn_varlen_backward).parameters)[:10]]
    arguments: list[Any] = [*dict(operands).values(), 0.5, True]
    cute_mla.flash_attn_varlen_backward(*arguments)
    other = {
        "cu_seqlens_qo": "cu_seqlens_q", "cu_seqlens_kv": "cu_seqlens_k",
        "max_seqlen_qo": "max_seqlen_q", "max_seqlen_kv": "max_seqlen_k",
    }  # fmt: skip
    cute_mla.flash_attn_varlen_backward(**{other.get(name, name): value for name, value in operands})
    by_place, _, by_name, _ = (launch.args for launch in device.launches)
    assert (by_place["causal"], by_place["softmax_scale"]) == (1, 0.5)
    assert of_kind("dense_prefill_dq", by_place, ParamKind.INT64) == of_kind("dense_prefill_dq", by_name, ParamKind.INT64)


@pytest.mark.parametrize("gradient", ["dk", "dv"])
def test_gradients_of_keys_may_lie_anywhere(device: RecordingDevice, gradient: str) -> None:
    columns = {"dk": 192, "dv": 128}[gradient]
    call_of("backward").run(**{gradient: torch.zeros(500, 2, columns + 1, dtype=torch.bfloat16)[..., 1:]})
    dq, dkdv = device.launches
    assert dq.kernel == "dense_prefill_dq_sm90_bf16_d192"
    assert (dkdv.args["aligned"], dkdv.args[f"{gradient}_stride_token"]) == (0, 2 * (columns + 1))


def test_statistics_fill_the_workspace(device: RecordingDevice) -> None:
    size = cute_mla.workspace_size("dense_prefill_backward", batch=2, s_q=290, h_q=8, h_kv=2, total_q=301, device="cpu")
    workspace = torch.empty(size, dtype=torch.uint8)
    call_of("backward", lengths=((290, 400), (11, 100))).run(workspace=workspace)
    args = device.launches[0].args
    assert args["statistics_stride"] == 304
    assert (args["statistics"].tensor is workspace, args["statistics"].offset, args["statistics"].nbytes) == (True, 0, size)
    assert (args["q_copy"], args["dout_copy"]) == (None, None)
    assert 2 * 8 * 304 * 4 <= size < 2 * 8 * 304 * 4 + 128


@pytest.mark.parametrize(("total_q", "h_q", "size"), [(1, 1, 128), (4096, 128, 4096 * 128 * 8), (0, 7, 0)])
def test_the_workspace_has_8_bytes_a_row(device: RecordingDevice, total_q: int, h_q: int, size: int) -> None:
    asked = cute_mla.workspace_size("dense_prefill_backward", batch=3, s_q=9, h_q=h_q, h_kv=1, total_q=total_q, device="cpu")
    assert asked == size


def test_a_call_allocates_its_gradients_full_of_zeros_and_the_workspace(device: RecordingDevice) -> None:
    """Kernels leave rows of no sequence alone."""
    call = call_of("backward")
    with Allocations() as allocations:
        gradients = call.run()
    assert allocations.seen == ["aten.new_zeros.default"] * 3 + ["aten.new_empty.default"]
    assert not any(gradient.any() for gradient in gradients)
    assert all(gradient.is_contiguous() for gradient in gradients)


@pytest.mark.parametrize(
    ("lengths", "changes", "launched"),
    [
        (((0, 400), (0, 100)), {}, ["dkdv"]),
        (((290, 0), (10, 0)), {}, ["dq"]),
        (((290, 400), (10, 100)), {"cu_seqlens_qo": ints(1), "cu_seqlens_kv": ints(1)}, []),
        (((290, 400), (10, 100)), {"max_seqlen_kv": 0}, ["dq"]),
        (((0, 0), (0, 0)), {}, []),
    ],
)
def test_kernels_without_work_are_not_launched(
    device: RecordingDevice, lengths: tuple[tuple[int, int], ...], changes: dict[str, Any], launched: list[str]
) -> None:
    """Keys without queries get their zeros, queries without keys theirs."""
    call_of("backward", lengths=lengths).run(**{"max_seqlen_qo": 290, "max_seqlen_kv": 400, **changes})
    assert [launch.kernel for launch in device.launches] == [f"dense_prefill_{kernel}_sm90_bf16_d192" for kernel in launched]
    for launch in device.launches:
        for name, value in launch.args.items():
            if name.endswith("_map"):
                assert value.address % 16 == 0
                assert value.address > 0
