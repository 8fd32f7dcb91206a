"""The public functions: what they launch with which arguments, what they allocate, and how plans are reused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import cute_mla
from cute_mla.ops.split_plan import MlaSchedule
from cute_mla.spec.abi import ParamKind
from cute_mla.spec.arch import SM90, SM100, Arch
from cute_mla.spec.kernel_ops import PARAMS_OF
from cute_mla.spec.tensor_map import Swizzle, TensorMap
from tests.support.recording_device import RecordingDevice, row_ctas
from tests.support.right_calls import call_of, planned

SCALE_LOG2 = 576**-0.5 * math.log2(math.e)


def test_a_call_plans_decodes_and_combines(device: RecordingDevice) -> None:
    call = call_of("dense", s_q=2, h_q=128)
    out, lse = call.run(causal=True)
    plan, decode, combine = device.launches
    names = ("split_plan_{}_i32", "dense_decode_{}_bf16_cluster2", "combine_{}_bf16")
    assert (plan.kernel, decode.kernel, combine.kernel) == tuple(name.format(device.arch.name) for name in names)
    assert (plan.pdl, decode.pdl, combine.pdl) == (False, True, True)
    assert (plan.grid, decode.grid, combine.grid) == ((1, 1, 1), (4, 1, 33), (4, 16, 4))
    assert (out.shape, out.dtype) == ((2, 2, 128, 512), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 128, 2), torch.float32)


def test_split_plan_arguments(device: RecordingDevice) -> None:
    call = call_of("dense", batch=3)
    metadata, num_splits = call.plan()
    (plan,) = device.launches
    parts = 132 // row_ctas(device, 64)
    assert (metadata.shape, metadata.dtype, num_splits.shape, num_splits.dtype) == ((parts, 8), torch.int32, (4,), torch.int32)
    assert plan.args == {
        "lengths": call["cache_seqlens"],
        "extra_lengths": None,
        "plan": metadata,
        "num_splits": num_splits,
        "cu_seqlens_q": None,
        "units": None,
        "batch": 3,
        "num_parts": parts,
        "max_keys": (1 << 31) - 1,
        "extra_max_keys": 0,
        "requests": 0,
        "total_q": 0,
        "max_seqlen_q": 0,
        "unit_tokens": 1,
        "reach": (1 << 31) - 1,
        "sink_tiles": 0,
        "whole_eighths": 0,
    }


def test_dense_decode_arguments(device: RecordingDevice) -> None:
    call = call_of("dense", s_q=3, h_q=24, h_kv=3, page_size=32, table_pages=7, dtype="fp16")
    out, lse = call.run(causal=True, softmax_scale=0.25, empty_lse=-math.inf)
    args, pages = device.launches[1].args, len(call["k_cache"])
    ctas = row_ctas(device, 24)
    assert device.launches[1].kernel == f"dense_decode_{device.arch.name}_fp16_cluster{ctas}"
    assert device.launches[1].grid == (ctas, 3, 44 // ctas)
    assert args["kv_map"] == TensorMap(
        "fp16", call["k_cache"].data_ptr(), (576, 3, 32, pages), (1152, 3456, 110_592), (64, 1, 32, 1), Swizzle.B128
    )
    assert args["rope_map"] == replace(args["kv_map"], box=(32, 1, 32, 1), swizzle=Swizzle.B64)
    assert args["q"] is call["q"]
    assert args["block_table"] is call["block_table"]
    assert args["cache_seqlens"] is call["cache_seqlens"]
    assert (args["out"], args["lse"]) == (out, lse) or (args["out"] is out and args["lse"] is lse)
    assert [args[f"q_stride_{dim}"] for dim in ("batch", "token", "head")] == [3 * 24 * 576, 24 * 576, 576]
    assert [args[f"out_stride_{dim}"] for dim in ("batch", "token", "head")] == [3 * 24 * 512, 24 * 512, 512]
    assert [args[f"lse_stride_{dim}"] for dim in ("batch", "head", "token")] == [72, 3, 1]
    assert args["table_stride"] == call["block_table"].stride(0) == 9
    assert args["scale_log2"] == pytest.approx(0.25 * math.log2(math.e))
    assert args["empty_lse"] == -math.inf
    assert {param.name: args[param.name] for param in PARAMS_OF["dense_decode"] if param.kind is ParamKind.INT32} == {
        "s_q": 3, "h_q": 24, "heads_per_kv": 8, "page_size": 32, "pages": pages, "mask": 1, "batch": 2,
        "max_keys": 7 * 32, "max_splits": 0, "accum_rows": 2 + 44 // ctas - 1,
        "requests": 2, "total_q": 3, "hidden_keys": 2,
        **dict.fromkeys(("reach", "steady_keys", "steady_values"), (1 << 31) - 1), "sink_keys": 0,
    }  # fmt: skip


def test_combine_arguments(device: RecordingDevice) -> None:
    call = call_of("dense", s_q=3, h_q=24)
    lse = torch.empty(2, 3, 24).transpose(1, 2)
    call.run(lse=lse, empty_lse=-math.inf)
    decode, combine = device.launches[1].args, device.launches[2].args
    for name in ("num_splits", "out", "lse"):
        assert combine[name] is decode[name]
    assert [combine[name] for name in ("out_accum", "lse_accum")] == [decode[name] for name in ("out_accum", "lse_accum")]
    assert combine["lengths"] is decode["cache_seqlens"]
    assert (combine["extra_lengths"], combine["attn_sink"]) == (None, None)
    assert (combine["max_keys"], combine["extra_max_keys"]) == (call["block_table"].shape[1] * 64, 0)
    assert [combine[f"lse_stride_{dim}"] for dim in ("batch", "head", "token")] == [72, 1, 24]
    assert [combine[f"out_stride_{dim}"] for dim in ("batch", "token", "head")] == [3 * 24 * 512, 24 * 512, 512]
    assert (combine["empty_lse"], combine["s_q"], combine["h_q"]) == (-math.inf, 3, 24)
    assert (combine["max_splits"], combine["accum_rows"]) == (0, 2 + 132 // row_ctas(device, 72) - 1)


def test_default_scale_and_causal_of_one_token(device: RecordingDevice) -> None:
    call_of("dense").run(causal=True)
    args = device.launches[1].args
    assert args["scale_log2"] == pytest.approx(SCALE_LOG2)
    assert args["mask"] == 0
    assert args["empty_lse"] == math.inf


def test_accumulators_follow_one_another_in_the_workspace(device: RecordingDevice) -> None:
    call = call_of("dense", s_q=2, h_q=16)
    nbytes = cute_mla.workspace_size("dense_decode", batch=2, s_q=2, h_q=16, device="cpu")
    parts = 132 // row_ctas(device, 32)
    assert nbytes == (2 + parts - 1) * 2 * 16 * 513 * 4
    workspace = torch.empty(nbytes, dtype=torch.uint8)
    call.run(workspace=workspace)
    args = device.launches[1].args
    assert args["out_accum"].data_ptr() == workspace.data_ptr()
    assert args["lse_accum"].data_ptr() == workspace.data_ptr() + args["out_accum"].nbytes
    rows = (2 + parts - 1) * 2 * 16
    assert (args["out_accum"].nbytes, args["lse_accum"].nbytes) == (rows * 512 * 4, rows * 4)


def test_one_part_needs_neither_workspace_nor_combine(arch: Arch) -> None:
    with RecordingDevice(arch, sm_count=1).active() as device:
        call_of("dense").run()
    assert [launch.kernel.split(f"_{arch.name}")[0] for launch in device.launches] == ["split_plan", "dense_decode"]
    assert device.launches[1].args["out_accum"] is None


def test_a_device_of_more_sms_than_a_plan_can_have_parts(arch: Arch) -> None:
    with RecordingDevice(arch, sm_count=3000).active() as device:
        call_of("dense").run()
    assert (device.launches[0].args["num_parts"], device.launches[1].grid) == (1024, (row_ctas(device, 64), 1, 1024))


def test_strided_operands_are_passed_as_they_are(device: RecordingDevice) -> None:
    call = call_of("dense", s_q=2, h_q=8)
    call["q"] = torch.zeros(2, 3, 20, 608, dtype=torch.bfloat16)[:, 1:, 5:13, 8:584]
    call["k_cache"] = torch.zeros(4, 3, 64, 1, 640, dtype=torch.bfloat16)[:, 1, :, :, 64:]
    call["block_table"] = torch.zeros(2, 50, dtype=torch.int32)[:, :8]
    out = torch.zeros(2, 8, 2, 600, dtype=torch.bfloat16)[..., 8:520].transpose(1, 2)
    call.run(out=out)
    args = device.launches[1].args
    assert args["q"].data_ptr() == call["q"].data_ptr()
    assert [args[f"q_stride_{dim}"] for dim in ("batch", "token", "head")] == [3 * 20 * 608, 20 * 608, 608]
    assert [args[f"out_stride_{dim}"] for dim in ("batch", "token", "head")] == [8 * 2 * 600, 600, 2 * 600]
    assert args["kv_map"].strides == (1152, 1280, 3 * 64 * 1280)  # the stride of the single KV head is made up
    assert args["kv_map"].address == call["k_cache"].data_ptr()
    assert args["table_stride"] == 50


def test_batch_zero_and_no_query_tokens_return_at_once(device: RecordingDevice) -> None:
    for batch, s_q in ((0, 1), (2, 0)):
        out, lse = call_of("dense", batch=batch, s_q=s_q).run(workspace=torch.empty(0, dtype=torch.uint8))
        assert out.shape == (batch, s_q, 64, 512)
        assert lse.shape == (batch, 64, s_q)
    metadata, num_splits = call_of("dense", batch=0).plan()
    assert device.launches == []
    assert metadata.shape == (132 // row_ctas(device, 64), 8)
    assert num_splits.tolist() == [0]


@pytest.mark.parametrize("h_q", [1, 3, 9, 63, 64, 65, 126, 128])
def test_number_of_query_heads_decides_the_grid(device: RecordingDevice, h_q: int) -> None:
    call_of("dense", h_q=h_q, few_heads=False).run()
    ctas = row_ctas(device, h_q)
    assert ctas == (1 if h_q <= 64 and device.arch is SM90 else 2)
    assert device.launches[1].grid == (ctas, 1, 132 // ctas)
    assert device.launches[1].kernel.endswith(f"cluster{ctas}")


@pytest.mark.parametrize(("rows", "hopper", "blackwell"), [(1, 1, 2), (64, 1, 2), (65, 2, 2), (128, 2, 2), (129, 3, 4), (257, 5, 6)])
def test_number_of_query_rows_decides_the_parts_of_a_plan(device: RecordingDevice, rows: int, hopper: int, blackwell: int) -> None:
    ctas = {SM90: hopper, SM100: blackwell}[device.arch]
    metadata, _ = cute_mla.get_mla_metadata(torch.zeros(2, dtype=torch.int32), rows, 1)
    assert metadata.shape == (132 // ctas, 8)
    call_of("dense", s_q=rows, h_q=1).run(tile_scheduler_metadata=metadata, num_splits=torch.zeros(3, dtype=torch.int32))
    assert device.launches[-2].grid == (ctas, 1, 132 // ctas)
    call_of("dense", s_q=rows, h_q=1).run()  # a schedule object's plan has more parts where there is a kernel for few rows
    nbytes = cute_mla.workspace_size("dense_decode", batch=2, s_q=rows, h_q=1, device="cpu")
    launches = [launch for launch in device.launches if "dense_decode" in launch.kernel]
    assert nbytes == max(sum(launch.args[name].nbytes for name in ("out_accum", "lse_accum")) for launch in launches)


@pytest.mark.parametrize("columns", [0, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("given", "invariant", "empty_lse"), [(False, False, math.inf), (True, True, -math.inf)])
def test_a_cache_without_pages_holds_no_keys(
    device: RecordingDevice, columns: int, dtype: torch.dtype, given: bool, invariant: bool, empty_lse: float
) -> None:
    """Nothing is launched or planned. Lengths count as 0, whatever they are."""
    call = call_of("dense", lengths=(5, 5), table_pages=columns, s_q=2)
    call["k_cache"] = torch.zeros(0, 64, 1, 576).to(dtype)
    results = {}
    if given:
        results = {
            "out": torch.full((2, 2, 70, 512), math.nan, dtype=torch.bfloat16)[:, :, :64],
            "lse": torch.full((2, 2, 64), math.nan).mT,
        }
    for _ in range(2):  # checked, then found among the checked calls
        out, lse = call.run(**results, empty_lse=empty_lse, batch_invariant=invariant)
        assert (out.shape, lse.shape) == ((2, 2, 64, 512), (2, 64, 2))
        assert all(result is results.get(name, result) for name, result in (("out", out), ("lse", lse)))
        assert (out == 0).all()
        assert (lse == empty_lse).all()
        out.fill_(1)
        lse.fill_(1)
    assert device.launches == []
    call.run(k_cache=torch.zeros(1, 64, 1, 576, dtype=torch.bfloat16))
    assert device.launches


def test_schedule_is_planned_at_its_first_use_only(device: RecordingDevice) -> None:
    call = call_of("dense")
    schedule = call["tile_scheduler_metadata"]
    assert isinstance(schedule, MlaSchedule)
    assert (schedule.tile_scheduler_metadata, schedule.num_splits) == (None, None)
    for _ in range(3):
        call.run()
    assert [launch.kernel for launch in device.launches].count(f"split_plan_{device.arch.name}_i32") == 1
    assert schedule.tile_scheduler_metadata is not None
    assert all(launch.args["plan"] is schedule.tile_scheduler_metadata for launch in device.launches if "plan" in launch.args)


def test_schedule_with_other_lengths_is_used_again(device: RecordingDevice) -> None:
    call = call_of("dense")
    call.run()
    call["cache_seqlens"] = torch.ones(2, dtype=torch.int32)
    call.run()
    assert device.launches[-2].args["cache_seqlens"] is call["cache_seqlens"]


def test_batch_invariant_call(device: RecordingDevice) -> None:
    call = call_of("dense", batch=3, h_q=2, table_pages=300)
    limit = 300 * 64
    call.run(batch_invariant=True)
    _, decode, combine = (launch.args for launch in device.launches)
    for args in (decode, combine):
        assert (args["max_splits"], args["accum_rows"]) == (3, 9)
    nbytes = cute_mla.workspace_size("dense_decode", batch=3, s_q=1, h_q=2, batch_invariant=True, max_cache_seqlen=limit, device="cpu")
    assert nbytes == 3 * 3 * 2 * 513 * 4 == decode["out_accum"].nbytes + decode["lse_accum"].nbytes


def test_batch_invariant_short_requests_are_not_split(device: RecordingDevice) -> None:
    call_of("dense", table_pages=128).run(batch_invariant=True)
    assert len(device.launches) == 2
    assert (device.launches[1].args["max_splits"], device.launches[1].args["accum_rows"]) == (1, 0)
    assert cute_mla.workspace_size("dense_decode", batch=2, s_q=1, h_q=64, batch_invariant=True, max_cache_seqlen=8192, device="cpu") == 0


def test_one_plan_serves_both_kinds_of_calls_and_tables_of_any_width(device: RecordingDevice) -> None:
    call = call_of("dense")
    for plan in (call.plan(), cute_mla.get_mla_metadata()):
        for invariant in (False, True):
            for width in (300, 30):
                call.run(**planned(plan), block_table=torch.zeros(2, width, dtype=torch.int32), batch_invariant=invariant)
                decode = device.launches[-1 if device.launches[-1].kernel.startswith("dense") else -2].args
                assert decode["max_keys"] == width * 64
    assert [launch.kernel for launch in device.launches].count(f"split_plan_{device.arch.name}_i32") == 2


def test_copied_plans_are_taken(device: RecordingDevice) -> None:
    call = call_of("dense")
    metadata, num_splits = (part.clone() for part in call.plan())
    call.run(**planned((metadata, num_splits)))
    assert device.launches[-2].args["plan"] is metadata
