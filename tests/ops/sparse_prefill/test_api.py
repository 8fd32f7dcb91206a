"""Sparse prefill's public call: what it launches with which arguments, and what it allocates."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import cute_mla
from cute_mla.ops import sparse_prefill
from cute_mla.ops.tensor_spec import TensorSpec
from cute_mla.runtime.arguments import ArgumentBlock
from cute_mla.spec.abi import ParamKind
from cute_mla.spec.arch import SM120, Arch
from cute_mla.spec.kernel_ops import PARAMS_OF
from cute_mla.spec.sparse_prefill import MAX_GROUPS, SparsePrefillProblem
from tests.support.dispatch_modes import Allocations
from tests.support.recording_device import RecordingDevice
from tests.support.right_calls import call_of
from tests.support.zero_tensors import ints

LOG2_E = math.log2(math.e)


def of_kind(args: dict[str, Any], kind: ParamKind) -> dict[str, Any]:
    """Return the arguments of one kind."""
    return {param.name: args[param.name] for param in PARAMS_OF["sparse_prefill"] if param.kind is kind}


def strides(args: dict[str, Any], tensor: str) -> list[int]:
    """Return a tensor's strides along batch, tokens and heads."""
    return [args[f"{tensor}_stride_{dim}"] for dim in ("batch", "token", "head")]


def test_a_call_is_one_launch(device: RecordingDevice) -> None:
    out, max_logits, lse = call_of("sparse_prefill", s_q=100, h_q=128).run()
    (launch,) = device.launches
    form = "rows64" if device.arch is SM120 else "cluster2"
    assert launch.kernel == f"sparse_prefill_{device.arch.name}_bf16_d576_{form}"
    assert launch.grid == (2, 1, 66)
    assert launch.pdl
    assert (out.shape, out.dtype) == ((100, 128, 512), torch.bfloat16)
    for rows in (max_logits, lse):
        assert (rows.shape, rows.dtype) == ((100, 128), torch.float32)
    assert [launch.args[name] is tensor for name, tensor in (("out", out), ("max_logits", max_logits), ("lse", lse))] == [True] * 3


def test_arguments(device: RecordingDevice) -> None:
    call = call_of("sparse_prefill", s_q=3, h_q=24, topk=65)
    out, max_logits, lse = call.run(empty_lse=-math.inf)
    (launch,) = device.launches
    args = launch.args
    given = {**{name: call[name] for name in ("q", "kv", "indices")}, "out": out, "max_logits": max_logits, "lse": lse}
    assert all(args[name] is tensor for name, tensor in given.items())
    assert [args[name] for name in ("kv_offsets", "topk_length", "attn_sink", "lse_indexer")] == [None] * 4
    assert of_kind(args, ParamKind.INT64) == {
        "q_stride_batch": 0, "q_stride_token": 24 * 576, "q_stride_head": 576,
        "out_stride_batch": 0, "out_stride_token": 24 * 512, "out_stride_head": 512,
        "max_logits_stride_batch": 0, "max_logits_stride_token": 24, "max_logits_stride_head": 1,
        "lse_stride_batch": 0, "lse_stride_token": 24, "lse_stride_head": 1,
        "lse_indexer_stride_batch": 0, "lse_indexer_stride_token": 0, "lse_indexer_stride_head": 0,
        "indices_stride_batch": 0, "indices_stride_token": 65, "kv_stride_batch": 0, "kv_stride_row": 1152,
    }  # fmt: skip
    assert of_kind(args, ParamKind.INT32) == {"tokens": 3, "s_q": 3, "h_q": 24, "s_kv": 100, "topk": 65, "indexer_topk": 0}
    assert args["scale_log2"] == pytest.approx(0.25 * LOG2_E)
    assert args["empty_lse"] == -math.inf


@pytest.mark.parametrize("form", ["batched", "ragged"])
def test_arguments_of_a_batch(device: RecordingDevice, form: str) -> None:
    call = call_of("sparse_prefill", batch=2, form=form, s_q=3, h_q=24, d_qk=512)
    out, max_logits, lse, lse_indexer = call.run(indexer_topk=7)
    (launch,) = device.launches
    args = launch.args
    assert args["lse_indexer"] is lse_indexer
    assert args["kv_offsets"] is call["kv_offsets"]
    assert (call["kv_offsets"] is not None) == (form == "ragged")
    assert of_kind(args, ParamKind.INT64) == {
        "q_stride_batch": 3 * 24 * 512, "q_stride_token": 24 * 512, "q_stride_head": 512,
        "out_stride_batch": 3 * 24 * 512, "out_stride_token": 24 * 512, "out_stride_head": 512,
        "max_logits_stride_batch": 72, "max_logits_stride_token": 24, "max_logits_stride_head": 1,
        "lse_stride_batch": 72, "lse_stride_token": 24, "lse_stride_head": 1,
        "lse_indexer_stride_batch": 72, "lse_indexer_stride_token": 24, "lse_indexer_stride_head": 1,
        "indices_stride_batch": 3 * 64, "indices_stride_token": 64,
        "kv_stride_batch": 0 if form == "ragged" else 100 * 1024, "kv_stride_row": 1024,
    }  # fmt: skip
    rows = call["kv"].shape[-3]
    assert of_kind(args, ParamKind.INT32) == {"tokens": 6, "s_q": 3, "h_q": 24, "s_kv": rows, "topk": 64, "indexer_topk": 7}
    assert args["empty_lse"] == math.inf
    assert [tensor.shape for tensor in (out, max_logits, lse, lse_indexer)] == [(2, 3, 24, 512), *[(2, 3, 24)] * 3]
    assert lse_indexer.dtype == torch.float32


@pytest.mark.parametrize(("form", "batch"), [("single", 1), ("batched", 2)])
def test_lengths_and_sinks(device: RecordingDevice, form: str, batch: int) -> None:
    call = call_of("sparse_prefill", form=form, batch=batch, lengths="drawn", sinks="drawn")
    call.run()
    assert all(device.launches[0].args[name] is call[name] is not None for name in ("topk_length", "attn_sink"))


@pytest.mark.parametrize("d_qk", [576, 512])
def test_columns_decide_the_variant(device: RecordingDevice, d_qk: int) -> None:
    out, _, _ = call_of("sparse_prefill", d_qk=d_qk).run()
    variant = SparsePrefillProblem(device.arch, "bf16", d_qk, batch=1, s_q=5, h_q=64).config.name
    assert variant.startswith(f"bf16_d{d_qk}_")
    assert device.launches[0].kernel == f"sparse_prefill_{device.arch.name}_{variant}"
    assert out.dtype == torch.bfloat16


def test_strided_operands_are_passed_as_they_are(device: RecordingDevice) -> None:
    call = call_of("sparse_prefill", form="batched", batch=2, s_q=2, h_q=8)
    call["q"] = torch.zeros(2, 3, 20, 608, dtype=torch.bfloat16)[:, 1:, 5:13, 8:584]
    call["kv"] = torch.zeros(4, 3, 50, 640, dtype=torch.bfloat16)[::2, 1, 5:45:2, None, 64:]
    call["indices"] = torch.zeros(2, 5, 300, dtype=torch.int32)[:, ::2, None, 9:137][:, :2]
    out = torch.zeros(2, 8, 2, 600, dtype=torch.bfloat16)[..., 8:520].transpose(1, 2)
    lse = torch.zeros(8, 2, 7).permute(2, 1, 0)[1:5:3]
    max_logits = torch.zeros(2, 30, 33)[:, 1:3, ::4][:, :, 1:]
    lse_indexer = torch.zeros(8, 2, 2).permute(2, 1, 0)
    assert call.run(out=out, lse=lse, max_logits=max_logits, lse_indexer=lse_indexer, indexer_topk=128)[3] is lse_indexer
    args = device.launches[0].args
    assert args["q"].data_ptr() == call["q"].data_ptr()
    assert strides(args, "q") == [3 * 20 * 608, 20 * 608, 608]
    assert strides(args, "out") == [8 * 2 * 600, 600, 2 * 600]
    assert strides(args, "lse") == [3, 7, 14]
    assert strides(args, "max_logits") == [990, 33, 4]
    assert strides(args, "lse_indexer") == [1, 2, 4]
    assert (args["kv_stride_batch"], args["kv_stride_row"], args["s_kv"]) == (2 * 3 * 50 * 1280, 2560, 20)
    assert (args["indices_stride_batch"], args["indices_stride_token"], args["topk"]) == (1500, 600, 128)


def test_strides_of_dimensions_of_one_are_not_looked_at(device: RecordingDevice) -> None:
    call = call_of("sparse_prefill", form="batched", s_q=1, h_q=1)
    one = {name: call[name].as_strided((1, 1, 1, 576), (7, 7, 7, 1)) for name in ("q", "kv")}
    call.run(**one, out=torch.zeros(512, dtype=torch.bfloat16).as_strided((1, 1, 1, 512), (7, 7, 7, 1)))
    args = device.launches[0].args
    assert (args["kv_stride_batch"], args["kv_stride_row"]) == (0, 0)


def test_requests_may_share_their_rows(device: RecordingDevice) -> None:
    call = call_of("sparse_prefill", form="batched", batch=3)
    call.run(kv=call["kv"][:1].expand(3, -1, -1, -1))
    args = device.launches[0].args
    assert (args["kv_stride_batch"], args["kv_stride_row"], args["s_kv"]) == (0, 1152, 100)


def test_operands_far_apart(arch: Arch) -> None:
    """More than 2^31 elements, and bytes, between neighbours of every dimension."""
    far, cpu = 1 << 33, torch.device("cpu")
    rows = TensorSpec((2, 3, 128), (600 * far, 200 * far, far), torch.float32, cpu)
    call = sparse_prefill.CallSpec(
        q=TensorSpec((2, 3, 128, 576), (5 * far, 2 * far, far, 1), torch.bfloat16, cpu),
        kv=TensorSpec((2, 2_000_000_000, 1, 576), (3 * far, far, 1, 1), torch.bfloat16, cpu),
        indices=TensorSpec((2, 3, 1, 2_000_000_000), (2 * far, far, 1, 1), torch.int32, cpu),
        topk_length=None,
        attn_sink=None,
        kv_offsets=None,
        out=TensorSpec((2, 3, 128, 512), (600 * far, 200 * far, far, 1), torch.bfloat16, cpu),
        max_logits=rows,
        lse=rows,
        lse_indexer=rows,
        indexer_topk=1_999_999_999,
        address_alignment=16,
    )
    plan = sparse_prefill.plan(call, arch, 132)
    strides = (5 * far, 2 * far, far, *[600 * far, 200 * far, far] * 4, 2 * far, far, 6 * far, 2 * far)
    assert tuple(plan.scalars.values()) == (*strides, 6, 3, 128, 2_000_000_000, 2_000_000_000, 1_999_999_999)


@pytest.mark.parametrize("h_q", [1, 3, 16, 48, 64, 65, 96, 128])
@pytest.mark.parametrize("s_q", [1, 3, 66, 67, 500])
def test_heads_and_tokens_decide_the_grid(device: RecordingDevice, h_q: int, s_q: int) -> None:
    call_of("sparse_prefill", h_q=h_q, s_q=s_q).run()
    ctas = -(-h_q // 64)
    assert device.launches[0].grid == (ctas, 1, min(132 // ctas, s_q))


@pytest.mark.parametrize(("h_q", "cluster"), [(1, 1), (16, 1), (17, 1), (64, 1), (65, 2), (128, 2)])
def test_heads_decide_the_variant(device: RecordingDevice, h_q: int, cluster: int) -> None:
    call_of("sparse_prefill", h_q=h_q).run()
    form = ("rows64" if h_q > 16 else "cluster1") if device.arch is SM120 else f"cluster{cluster}"
    assert device.launches[0].kernel.endswith(f"_{form}")


@pytest.mark.parametrize("sm_count", [1, 2, 3, 148])
def test_sms_decide_the_grid(arch: Arch, sm_count: int) -> None:
    with RecordingDevice(arch, sm_count).active() as device:
        call_of("sparse_prefill", h_q=128, s_q=500).run()
    assert device.launches[0].grid == (2, 1, max(sm_count // 2, 1))


@pytest.mark.parametrize(("form", "batch"), [("single", 1), ("batched", 1), ("batched", 3)])
def test_more_tokens_than_a_dimension_of_a_grid_holds(device: RecordingDevice, form: str, batch: int) -> None:
    call = call_of("sparse_prefill", form=form, batch=batch, s_q=1, h_q=1, topk=3)
    leading = (70_000,) if form == "single" else (batch, 70_000)
    many = {name: call[name].expand(*leading, -1, -1) for name in ("q", "indices")}
    out, max_logits, _ = call.run(**many, topk_length=ints(*leading))
    (launch,) = device.launches
    assert launch.grid == (1, 1, 132)
    assert (launch.args["tokens"], launch.args["s_q"]) == (70_000 * batch, 70_000)
    assert (launch.args["q_stride_token"], launch.args["indices_stride_token"]) == (0, 0)
    assert out.shape == (*leading, 1, 512)
    assert strides(launch.args, "max_logits") == [0 if form == "single" else 70_000, 1, 1]
    assert max_logits.shape == (*leading, 1)


def test_many_short_requests_fill_the_grid_as_one_long_one_does(device: RecordingDevice) -> None:
    call_of("sparse_prefill", form="batched", batch=70, s_q=3, h_q=1).run()
    assert device.launches[0].grid[2] == 132
    call_of("sparse_prefill", form="batched", batch=7, s_q=3, h_q=1).run()
    assert device.launches[1].grid[2] == 21


def test_more_sms_than_a_grid_has_groups(arch: Arch) -> None:
    problem = SparsePrefillProblem(arch, "bf16", 576, batch=1, s_q=1 << 30, h_q=1)
    assert problem.grid(1 << 20) == (1, 1, MAX_GROUPS)


def test_a_call_allocates_what_it_returns_and_no_more(device: RecordingDevice) -> None:
    call = call_of("sparse_prefill")
    with Allocations() as allocations:
        call.run()
    assert allocations.seen == ["aten.new_empty.default"] * 3
    with Allocations() as allocations:
        call.run(indexer_topk=1)
    assert allocations.seen == ["aten.new_empty.default"] * 4
    assert cute_mla.workspace_size("sparse_prefill", batch=1, s_q=5, h_q=64, topk=64, device="cpu") == 0


def test_results_are_declared_undefined(device: RecordingDevice) -> None:
    results = call_of("sparse_prefill").run(indexer_topk=64)
    assert len(results) == 4
    assert device.poisoned == [tensor.data_ptr() for tensor in results]


@pytest.mark.parametrize(
    "shape", [{"s_q": 0}, {"form": "batched", "batch": 0}, {"form": "batched", "batch": 2, "s_q": 0}, {"form": "ragged", "batch": 0}]
)
@pytest.mark.parametrize("given", [False, True])
def test_nothing_to_compute(device: RecordingDevice, shape: dict[str, Any], given: bool) -> None:
    call = call_of("sparse_prefill", outputs="given" if given else "allocated", **shape)
    results = dict(zip(("out", "max_logits", "lse"), call.run(), strict=True))
    assert (device.launches, device.poisoned) == ([], [])
    rows = call["q"].shape[:-1]
    assert [tensor.shape for tensor in results.values()] == [(*rows, 512), rows, rows]
    assert [call[name] is tensor for name, tensor in results.items()] == [given] * 3


@pytest.mark.parametrize("empty", [{"s_kv": 0}, {"topk": 0}, {"s_kv": 0, "topk": 0}])
@pytest.mark.parametrize(("form", "batch"), [("single", 1), ("batched", 2), ("ragged", 2)])
def test_rows_that_attend_to_nothing_are_written_all_the_same(
    device: RecordingDevice, empty: dict[str, Any], form: str, batch: int
) -> None:
    call = call_of("sparse_prefill", form=form, batch=batch, **empty)
    if form == "ragged":  # without the rows of no request
        call["kv"] = call["kv"][: empty.get("s_kv", 100)]
    call.run()
    (launch,) = device.launches
    assert (launch.args["s_kv"], launch.args["topk"]) == (empty.get("s_kv", 100), empty.get("topk", 64))
    ArgumentBlock(PARAMS_OF["sparse_prefill"]).fill(list(launch.args.values()))
    assert [launch.args[name] for name in ("topk_length", "attn_sink")] == [None, None]
