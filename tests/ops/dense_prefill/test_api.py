"""Dense prefill's public calls: what they launch with which arguments, and what they allocate."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

import cute_mla
from cute_mla.ops import dense_prefill
from cute_mla.runtime.simulated_device import simulated_map
from cute_mla.simulator.numerics.tma import validate
from cute_mla.spec.abi import ParamKind
from cute_mla.spec.arch import SM100, Arch
from cute_mla.spec.dense_prefill import MAX_TOKENS
from cute_mla.spec.kernel_ops import PARAMS_OF
from cute_mla.spec.tensor_map import Swizzle, TensorMap
from cute_mla.testing.cases.base import DTYPES
from tests.ops.dense_prefill.far_call import far_call
from tests.support.dispatch_modes import Allocations
from tests.support.recording_device import RecordingDevice
from tests.support.right_calls import call_of
from tests.support.zero_tensors import ints

LOG2_E = math.log2(math.e)


def of_kind(args: dict[str, Any], kind: ParamKind) -> dict[str, Any]:
    """Return the arguments of one kind."""
    return {param.name: args[param.name] for param in PARAMS_OF["dense_prefill"] if param.kind is kind}


def strides(args: dict[str, Any], tensor: str) -> list[int]:
    """Return a tensor's strides along tokens and heads."""
    return [args[f"{tensor}_stride_{dim}"] for dim in ("token", "head")]


def blocks(device: RecordingDevice, rows: int) -> int:
    """Return work items of a sequence of so many query tokens, for each of its heads."""
    return -(-rows // (256 if device.arch is SM100 else 128))


def test_a_call_is_one_launch(device: RecordingDevice) -> None:
    out, lse = call_of("dense_prefill").run()
    (launch,) = device.launches
    assert launch.kernel == f"dense_prefill_{device.arch.name}_bf16_d192"
    assert launch.grid == (min(blocks(device, 290) * 2 * 8, 132), 1, 1)
    assert launch.pdl
    assert (out.shape, out.dtype) == ((300, 8, 128), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((300, 8), torch.float32)
    assert launch.args["out"] is out
    assert launch.args["lse"] is lse


@pytest.mark.parametrize("causal", [False, True])
def test_arguments(device: RecordingDevice, causal: bool) -> None:
    call = call_of("dense_prefill")
    call.run(softmax_scale=0.25, causal=causal, empty_lse=-math.inf)
    args = device.launches[0].args
    for parameter, name in (("q", "q"), ("cu_seqlens_q", "cu_seqlens_qo"), ("cu_seqlens_k", "cu_seqlens_kv")):
        assert args[parameter] is call[name]
    q, k, v = (call[name].data_ptr() for name in ("q", "k", "v"))
    assert of_kind(args, ParamKind.TENSOR_MAP) == {
        "q_map": TensorMap("bf16", q, (192, 8, 300), (384, 8 * 384), (64, 1, 64), Swizzle.B128),
        "k_map": TensorMap("bf16", k, (192, 2, 500), (384, 2 * 384), (64, 1, 64), Swizzle.B128),
        "v_map": TensorMap("bf16", v, (128, 2, 500), (256, 2 * 256), (64, 1, 64), Swizzle.B128),
    }
    assert of_kind(args, ParamKind.INT64) == {
        "q_stride_token": 8 * 192, "q_stride_head": 192, "out_stride_token": 8 * 128, "out_stride_head": 128,
        "lse_stride_token": 8, "lse_stride_head": 1,
    }  # fmt: skip
    assert of_kind(args, ParamKind.INT32) == {
        "batch": 2, "h_q": 8, "heads_per_kv": 4, "total_q": 300, "total_k": 500, "row_blocks": blocks(device, 290), "causal": causal,
    }  # fmt: skip
    assert args["scale_log2"] == pytest.approx(0.25 * LOG2_E)
    assert args["empty_lse"] == -math.inf


@pytest.mark.parametrize(
    ("name", "d_qk", "d_v"), [("bf16", 192, 128), ("fp16", 192, 128), ("bf16", 128, 128), ("fp16", 128, 128), ("bf16", 256, 256)]
)
def test_types_and_columns_decide_the_variant(device: RecordingDevice, name: str, d_qk: int, d_v: int) -> None:
    out, _ = call_of("dense_prefill", dtype=name, d_qk=d_qk).run()
    assert out.shape == (300, 8, d_v)
    (launch,) = device.launches
    assert launch.kernel == f"dense_prefill_{device.arch.name}_{name}_d{d_qk}"
    assert out.dtype == DTYPES[name]
    assert {launch.args[f"{operand}_map"].dtype for operand in "qkv"} == {name}
    assert [launch.args[f"{operand}_map"].dims[0] for operand in "qkv"] == [d_qk, d_qk, d_v]
    rows = {"sm90": 80, "sm120": 32}.get(device.arch.name, 64) if d_v == 256 else 64  # of a box of keys or values, which divides a tile
    assert [launch.args[f"{operand}_map"].box for operand in "qkv"] == [(64, 1, min(rows, 64)), (64, 1, rows), (64, 1, rows)]
    assert launch.args["scale_log2"] == pytest.approx(d_qk**-0.5 * LOG2_E)
    assert launch.args["empty_lse"] == math.inf
    assert launch.args["causal"] == 0


def test_positional_arguments_are_those_of_other_libraries(device: RecordingDevice) -> None:
    call_of("dense_prefill").run()
    arguments: list[Any] = [*list(call_of("dense_prefill").values())[:7], 0.0, 0.5, True]
    cute_mla.flash_attn_varlen_func(*arguments)
    by_name, by_place = (launch.args for launch in device.launches)
    assert (by_name["causal"], by_place["causal"], by_place["scale_log2"]) == (0, 1, pytest.approx(0.5 * LOG2_E))
    assert of_kind(by_name, ParamKind.INT64) == of_kind(by_place, ParamKind.INT64)


def test_keywords_may_have_the_names_of_flash_attention(device: RecordingDevice) -> None:
    operands: dict[str, Any] = dict(list(call_of("dense_prefill").items())[:7])
    other = {
        "cu_seqlens_qo": "cu_seqlens_q",
        "cu_seqlens_kv": "cu_seqlens_k",
        "max_seqlen_qo": "max_seqlen_q",
        "max_seqlen_kv": "max_seqlen_k",
    }
    cute_mla.flash_attn_varlen_func(**operands)
    cute_mla.flash_attn_varlen_func(**{other.get(name, name): value for name, value in operands.items()})
    first, second = ({**launch.args, "out": None, "lse": None} for launch in device.launches)
    assert first.keys() == second.keys()
    assert all(first[name] is second[name] or first[name] == second[name] for name in first)
    with pytest.raises(TypeError, match="cu_seqlens_q and cu_seqlens_qo, two names of one argument"):
        cute_mla.flash_attn_varlen_func(**operands, cu_seqlens_q=operands["cu_seqlens_qo"])  # type: ignore[call-arg]


def test_keys_and_values_in_one_tensor_are_sliced_in_place(device: RecordingDevice) -> None:
    call = call_of("dense_prefill", h_kv=4, group=1, outputs="given")
    kv = torch.zeros(500, 4, 320, dtype=torch.bfloat16)
    rest: dict[str, Any] = {name: value for name, value in call.items() if name not in ("k", "v")} | {"causal": True, "softmax_scale": 0.5}
    with Allocations() as allocations:
        cute_mla.flash_attn_varlen_kvpacked_func(kv=kv, head_dim_qk=192, **rest)
    assert allocations.seen == []
    args = device.launches[0].args
    assert args["q"] is call["q"]
    assert args["k_map"] == TensorMap("bf16", kv.data_ptr(), (192, 4, 500), (640, 2560), (64, 1, 64), Swizzle.B128)
    assert args["v_map"] == TensorMap("bf16", kv.data_ptr() + 384, (128, 4, 500), (640, 2560), (64, 1, 64), Swizzle.B128)
    assert (args["causal"], args["heads_per_kv"], args["scale_log2"]) == (1, 1, pytest.approx(0.5 * LOG2_E))


@pytest.mark.parametrize("d_qk", [192, 128])
def test_queries_keys_and_values_in_one_tensor_are_sliced_in_place(device: RecordingDevice, d_qk: int) -> None:
    width = 2 * d_qk + 128
    qkv, ends = torch.zeros(70, 3, width, dtype=torch.float16), torch.zeros(5, dtype=torch.int32)
    results: dict[str, Any] = {"out": torch.empty(70, 3, 128, dtype=torch.float16), "lse": torch.empty(70, 3)}
    with Allocations() as allocations:
        out, lse = cute_mla.flash_attn_varlen_qkvpacked_func(qkv, ends, 70, d_qk, 0.0, 0.5, True, **results, empty_lse=-math.inf)
    assert allocations.seen == []
    assert out is results["out"]
    assert lse is results["lse"]
    (launch,) = device.launches
    assert launch.kernel == f"dense_prefill_{device.arch.name}_fp16_d{d_qk}"
    args, steps = launch.args, (2 * width, 6 * width)
    for name, offset, columns in (("q_map", 0, d_qk), ("k_map", d_qk, d_qk), ("v_map", 2 * d_qk, 128)):
        assert args[name] == TensorMap("fp16", qkv.data_ptr() + 2 * offset, (columns, 3, 70), steps, (64, 1, 64), Swizzle.B128)
    assert args["q"].data_ptr() == qkv.data_ptr()
    assert strides(args, "q") == [3 * width, width]
    assert args["cu_seqlens_q"] is args["cu_seqlens_k"] is ends
    assert of_kind(args, ParamKind.INT32) == {
        "batch": 4, "h_q": 3, "heads_per_kv": 1, "total_q": 70, "total_k": 70, "row_blocks": 1, "causal": 1,
    }  # fmt: skip
    assert (args["scale_log2"], args["empty_lse"]) == (pytest.approx(0.5 * LOG2_E), -math.inf)


def test_strided_operands_are_passed_as_they_are(device: RecordingDevice) -> None:
    call = call_of("dense_prefill", lengths=((13, 400), (7, 100)), h_kv=3, group=2)
    q = torch.zeros(21, 10, 208, dtype=torch.bfloat16)[1:, 2:8, 8:200]
    k = torch.zeros(3, 1000, 200, dtype=torch.bfloat16).transpose(0, 1)[::2, :, 8:]
    v = torch.zeros(500, 5, 136, dtype=torch.bfloat16)[:, 1:4, :128]
    out = torch.zeros(6, 20, 136, dtype=torch.bfloat16)[..., 8:].transpose(0, 1)
    lse = torch.zeros(6, 2, 40)[:, 1, ::2].mT
    call.run(q=q, k=k, v=v, out=out, lse=lse)
    (launch,) = device.launches
    args = launch.args
    assert args["q_map"] == TensorMap("bf16", q.data_ptr(), (192, 6, 20), (416, 4160), (64, 1, 64), Swizzle.B128)
    assert args["k_map"] == TensorMap("bf16", k.data_ptr(), (192, 3, 500), (400_000, 800), (64, 1, 64), Swizzle.B128)
    assert args["v_map"] == TensorMap("bf16", v.data_ptr(), (128, 3, 500), (272, 1360), (64, 1, 64), Swizzle.B128)
    assert strides(args, "q") == [2080, 208]
    assert strides(args, "out") == [136, 20 * 136]
    assert strides(args, "lse") == [2, 80]


def test_strides_of_dimensions_of_one_are_not_looked_at(device: RecordingDevice) -> None:
    call = call_of("dense_prefill", lengths=((1, 1), (0, 0)), h_kv=1, group=1)
    one = {name: call[name].as_strided((1, 1, columns), (7, 7, 1)) for name, columns in (("q", 192), ("k", 192), ("v", 128))}
    call.run(**one, out=torch.zeros(128, dtype=torch.bfloat16).as_strided((1, 1, 128), (7, 7, 1)))
    (launch,) = device.launches
    assert [launch.args[f"{operand}_map"].strides for operand in "qkv"] == [(384, 384), (384, 384), (256, 256)]


def test_operands_far_apart(arch: Arch) -> None:
    """More than 2^31 elements, and bytes, between neighbours of every dimension."""
    far = 1 << 36
    plan = dense_prefill.plan(far_call(far), arch, 132)
    assert plan.kernel == "bf16_d192"
    sizes = (1, 3, 1, MAX_TOKENS, MAX_TOKENS, blocks(RecordingDevice(arch), MAX_TOKENS), 1)
    assert tuple(plan.scalars.values()) == (far, 2 * far, *(3 * far, far) * 2, *sizes)
    assert [layout.strides for layout in plan.layouts if layout is not None] == [(4 * far, 2 * far)] * 3


def test_queries_farther_apart_than_a_tensor_map_holds(arch: Arch) -> None:
    call = far_call(1 << 36)
    q = call.q._replace(stride=(1 << 39, 192, 1))
    with pytest.raises(ValueError, match=r"q has .* supported: positive multiples of 16 bytes below .*, as in a copy by .contiguous\(\)"):
        dense_prefill.plan(call._replace(q=q), arch, 132)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("h_q", [1, 5, 128, 200])
@pytest.mark.parametrize("max_seqlen_qo", [1, 128, 129, 256, 257, 5000])
def test_the_grid_is_the_items_or_the_sms(device: RecordingDevice, batch: int, h_q: int, max_seqlen_qo: int) -> None:
    total = max_seqlen_qo * batch
    call = call_of("dense_prefill", lengths=((1, 400),) * batch, h_kv=1, group=h_q)
    q = torch.zeros(h_q * 192 + 8 * total, dtype=torch.bfloat16).as_strided((total, h_q, 192), (8, 192, 1))
    call.run(q=q, max_seqlen_qo=max_seqlen_qo)
    (launch,) = device.launches
    assert launch.args["row_blocks"] == blocks(device, max_seqlen_qo)
    assert launch.grid == (min(blocks(device, max_seqlen_qo) * batch * h_q, 132), 1, 1)


@pytest.mark.parametrize("sm_count", [1, 3, 148])
def test_sms_decide_the_grid(arch: Arch, sm_count: int) -> None:
    with RecordingDevice(arch, sm_count).active() as device:
        call_of("dense_prefill", group=64).run()
    assert device.launches[0].grid == (sm_count, 1, 1)


@pytest.mark.parametrize("longest", [np.int64(300), 10_000_000_000])
def test_no_sequence_is_longer_than_all_together(device: RecordingDevice, longest: int) -> None:
    call_of("dense_prefill").run(max_seqlen_qo=longest, max_seqlen_kv=longest)
    assert device.launches[0].args["row_blocks"] == blocks(device, 300)


def test_a_call_allocates_what_it_returns_and_no_more(device: RecordingDevice) -> None:
    call = call_of("dense_prefill")
    with Allocations() as allocations:
        out, lse = call.run()
    assert allocations.seen == ["aten.new_empty.default"] * 2
    assert device.poisoned == [out.data_ptr(), lse.data_ptr()]


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("s_q", "h_q", "h_kv"), [(1, 8, 2), (1, 200, 1), (290, 128, 128)])
def test_no_workspace_is_needed(device: RecordingDevice, s_q: int, h_q: int, h_kv: int, batch_invariant: bool) -> None:
    """For none of the shapes in which decode needs some, either."""
    size = cute_mla.workspace_size("dense_prefill", batch=2, s_q=s_q, h_q=h_q, h_kv=h_kv, batch_invariant=batch_invariant, device="cpu")
    assert size == 0


@pytest.mark.parametrize("given", ["out", "lse"])
def test_only_what_is_allocated_is_declared_undefined(device: RecordingDevice, given: str) -> None:
    out, lse = call_of("dense_prefill").run(**{given: call_of("dense_prefill", outputs="given")[given]})
    assert device.poisoned == [(lse if given == "out" else out).data_ptr()]


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({"lengths": ((0, 400), (0, 100))}, {"max_seqlen_qo": 290}),
        ({}, {"cu_seqlens_qo": ints(1), "cu_seqlens_kv": ints(1)}),
        ({}, {"max_seqlen_qo": 0}),
        ({"lengths": ()}, {"max_seqlen_qo": 290, "max_seqlen_kv": 400}),
    ],
)
@pytest.mark.parametrize("given", [False, True])
def test_nothing_to_compute(device: RecordingDevice, fields: dict[str, Any], changes: dict[str, Any], given: bool) -> None:
    call = call_of("dense_prefill", outputs="given" if given else "allocated", **fields)
    out, lse = call.run(**changes)
    assert device.launches == []
    assert [out.shape, lse.shape] == [(len(call["q"]), 8, 128), (len(call["q"]), 8)]
    assert [out is call["out"], lse is call["lse"]] == [given] * 2


def test_rows_without_any_keys_are_written_all_the_same(device: RecordingDevice) -> None:
    """There is no memory of keys and values that their maps could describe."""
    call = call_of("dense_prefill", lengths=((290, 0), (10, 0)))
    call.run(max_seqlen_kv=400)
    (launch,) = device.launches
    assert launch.args["total_k"] == 0
    q = call["q"].data_ptr()
    for name in ("k_map", "v_map"):
        validate(simulated_map(launch.args[name]))
        assert q - 16 < launch.args[name].address <= q
        assert launch.args[name].dims == (8, 1, 1)
    assert launch.args["q_map"].dims == (192, 8, 300)


def test_tensors_that_require_grad_where_there_is_none(device: RecordingDevice) -> None:
    call = call_of("dense_prefill")
    call["q"].requires_grad_()
    with torch.no_grad():
        out, _ = call.run()
    assert not out.requires_grad
    with torch.inference_mode():
        call.run()
    assert len(device.launches) == 2
