"""Sparse decode's public call: what it launches with which arguments, what it allocates, and how plans are made and reused."""

from __future__ import annotations

import math

import pytest
import torch

import cute_mla
from cute_mla.ops.paged_cache import gathered_cache
from cute_mla.ops.tensor_spec import TensorSpec
from cute_mla.spec.abi import ParamKind
from cute_mla.spec.kernel_ops import PARAMS_OF
from cute_mla.spec.sparse_decode import DECODED, SparseDecodeProblem
from cute_mla.testing.operations.sparse_decode.case import Pool
from tests.support.recording_device import RecordingDevice
from tests.support.right_calls import planned, sparse_call
from tests.support.zero_tensors import ints

LOG2_E = math.log2(math.e)


def test_a_call_plans_decodes_and_combines(device: RecordingDevice) -> None:
    out, lse = sparse_call(s_q=2, h_q=128).run()
    plan, decode, combine = device.launches
    variant = SparseDecodeProblem(device.arch, "bf16", "fp8_656", batch=2, s_q=2, h_q=128, topk=128).config.name
    names = ("split_plan_{}_i32", f"sparse_decode_{{}}_{variant}", "combine_{}_bf16")
    assert (plan.kernel, decode.kernel, combine.kernel) == tuple(name.format(device.arch.name) for name in names)
    assert (plan.pdl, decode.pdl, combine.pdl) == (False, True, True)
    assert (plan.grid, decode.grid, combine.grid) == ((1, 1, 1), (2, 2, 33), (4, 16, 4))
    assert (out.shape, out.dtype) == ((2, 2, 128, 512), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 128, 2), torch.float32)


@pytest.mark.parametrize("told", [False, True])
def test_a_schedule_object_plans_by_lengths_and_topk(device: RecordingDevice, told: bool) -> None:
    call = sparse_call(topk=100, extra_topk=7)
    lengths = {"topk_length": ints(2), "extra_topk_length": ints(2)} if told else {}
    call.run(**lengths)
    plan, decode, combine = (launch.args for launch in device.launches)
    for args in (plan, combine):
        assert args["lengths"] is lengths.get("topk_length")
        assert args["extra_lengths"] is lengths.get("extra_topk_length")
        assert (args["max_keys"], args["extra_max_keys"]) == (100, 7)
    assert decode["topk_length"] is lengths.get("topk_length")
    assert decode["extra_topk_length"] is lengths.get("extra_topk_length")
    assert plan["batch"] == 2
    assert plan["num_parts"] == 132


def test_arguments_of_one_cache(device: RecordingDevice) -> None:
    call = sparse_call(s_q=3, h_q=24, topk=65)
    out, lse = call.run(softmax_scale=0.25, empty_lse=-math.inf)
    args = device.launches[1].args
    given = {"q": call["q"], "cache": call["k_cache"], "indices": call["indices"], "out": out, "lse": lse}
    assert all(args[name] is tensor for name, tensor in given.items())
    for name in ("topk_length", "extra_cache", "extra_indices", "extra_topk_length", "attn_sink"):
        assert args[name] is None
    assert device.launches[2].args["attn_sink"] is None
    assert device.launches[1].grid == (1, 3, 44)
    assert {param.name: args[param.name] for param in PARAMS_OF["sparse_decode"] if param.kind is ParamKind.INT64} == {
        "q_stride_batch": 3 * 24 * 576, "q_stride_token": 24 * 576, "q_stride_head": 576,
        "out_stride_batch": 3 * 24 * 512, "out_stride_token": 24 * 512, "out_stride_head": 512,
        "lse_stride_batch": 72, "lse_stride_head": 3, "lse_stride_token": 1,
        "indices_stride_batch": 195, "indices_stride_token": 65, "extra_indices_stride_batch": 0, "extra_indices_stride_token": 0,
        "page_stride": 64 * 656, "row_stride": 656, "extra_page_stride": 0, "extra_row_stride": 0,
    }  # fmt: skip
    assert {param.name: args[param.name] for param in PARAMS_OF["sparse_decode"] if param.kind is ParamKind.INT32} == {
        "batch": 2, "s_q": 3, "h_q": 24, "page_size": 64, "slots": 64 * len(call["k_cache"]), "topk": 65,
        "extra_page_size": 1, "extra_slots": 0, "extra_topk": 0, "max_splits": 0, "accum_rows": 2 + 44 - 1,
    }  # fmt: skip
    assert args["scale_log2"] == pytest.approx(0.25 * LOG2_E)
    assert args["empty_lse"] == device.launches[2].args["empty_lse"] == -math.inf


def test_arguments_of_the_second_cache_and_the_sink(device: RecordingDevice) -> None:
    call = sparse_call(64, cache="fp8_584", extra=Pool(64, 70, 3))
    sink, lengths, extra_lengths = torch.zeros(64), ints(2), ints(2)
    call.run(attn_sink=sink, topk_length=lengths, extra_topk_length=extra_lengths)
    args, merged = device.launches[1].args, device.launches[2].args
    given = {"topk_length": lengths, "extra_topk_length": extra_lengths, "attn_sink": sink}
    given |= {"extra_cache": call["extra_k_cache"], "extra_indices": call["extra_indices_in_kvcache"]}
    assert all(args[name] is tensor for name, tensor in given.items())
    assert merged["attn_sink"] is sink
    assert (args["extra_page_size"], args["extra_slots"], args["extra_topk"]) == (3, 3 * len(call["extra_k_cache"]), 70)
    assert (args["extra_indices_stride_batch"], args["extra_indices_stride_token"]) == (70, 70)
    assert (args["page_stride"], args["row_stride"]) == (65 * 576, 576)  # pages end at multiples of 576 bytes
    assert (args["extra_page_stride"], args["extra_row_stride"]) == (4 * 576, 576)
    assert args["scale_log2"] == pytest.approx(512**-0.5 * LOG2_E)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("cache", ["fp8_656", "fp8_584"])
def test_bytes_of_any_name_are_an_fp8_cache(device: RecordingDevice, cache: str, dtype: torch.dtype) -> None:
    call = sparse_call(cache=cache)
    call["k_cache"] = call["k_cache"].view(dtype)
    call.run()
    assert f"bf16_{cache}_cluster" in device.launches[1].kernel
    assert device.launches[1].args["cache"] is call["k_cache"]


def test_latent_caches(device: RecordingDevice) -> None:
    call = sparse_call(cache="latent", page_size=61)
    out, _ = call.run()
    assert "bf16_latent_cluster" in device.launches[1].kernel
    assert device.launches[2].kernel == f"combine_{device.arch.name}_bf16"
    args = device.launches[1].args
    assert (args["page_stride"], args["row_stride"], args["page_size"], args["slots"]) == (61 * 1152, 1152, 61, 61 * len(call["k_cache"]))
    assert out.dtype == torch.bfloat16


def test_strided_operands_are_passed_as_they_are(device: RecordingDevice) -> None:
    call = sparse_call(s_q=2, h_q=8)
    call["q"] = torch.zeros(2, 3, 20, 608, dtype=torch.bfloat16)[:, 1:, 5:13, 8:584]
    call["k_cache"] = torch.zeros(4, 3, 64, 1, 672, dtype=torch.uint8)[:, 1, :, :, 16:]
    call["indices"] = torch.zeros(2, 5, 300, dtype=torch.int32)[:, ::2, 9:137][:, :2]
    out = torch.zeros(2, 8, 2, 600, dtype=torch.bfloat16)[..., 8:520].transpose(1, 2)
    call.run(out=out)
    args = device.launches[1].args
    assert args["q"].data_ptr() == call["q"].data_ptr()
    assert [args[f"q_stride_{dim}"] for dim in ("batch", "token", "head")] == [3 * 20 * 608, 20 * 608, 608]
    assert [args[f"out_stride_{dim}"] for dim in ("batch", "token", "head")] == [8 * 2 * 600, 600, 2 * 600]
    assert (args["page_stride"], args["row_stride"]) == (3 * 64 * 672, 672)
    assert (args["indices_stride_batch"], args["indices_stride_token"], args["topk"]) == (1500, 600, 128)


def test_pages_far_apart_and_more_slots_than_an_index_names() -> None:
    cpu = torch.device("cpu")
    q = TensorSpec((2, 1, 64, 576), (64 * 576, 64 * 576, 576, 1), torch.bfloat16, cpu)
    spec = TensorSpec((1 << 25, 64, 1, 656), (1 << 33, 656, 656, 1), torch.uint8, cpu)
    layout = gathered_cache("k_cache", spec, q, is_fp8_kvcache=True)
    assert (layout.slots, layout.page_stride) == ((1 << 31) - 1, 1 << 33)


@pytest.mark.parametrize("cache", DECODED)
@pytest.mark.parametrize("page_size", [1, 2, 61, 64, 69, 576])
def test_pages_of_any_size(device: RecordingDevice, cache: str, page_size: int) -> None:
    sparse_call(cache=cache, page_size=page_size).run()
    assert device.launches[1].args["page_size"] == page_size


@pytest.mark.parametrize(("pages", "page_size"), [(1, 1), (1, 64), (3, 1)])
def test_strides_of_dimensions_of_one_are_not_looked_at(device: RecordingDevice, pages: int, page_size: int) -> None:
    stride = (7 if pages == 1 else 656, 7 if page_size == 1 else 656, 7, 1)
    sparse_call().run(k_cache=torch.zeros(pages * page_size * 656, dtype=torch.uint8).as_strided((pages, page_size, 1, 656), stride))
    args = device.launches[1].args
    assert args["row_stride"] == 656
    assert args["page_stride"] % 16 == 0


@pytest.mark.parametrize("h_q", [1, 3, 8, 16, 48, 64, 65, 96, 128])
@pytest.mark.parametrize("s_q", [1, 3])
def test_heads_and_tokens_decide_the_grid(device: RecordingDevice, h_q: int, s_q: int) -> None:
    call = sparse_call(h_q=h_q, s_q=s_q)
    ctas = 1 if h_q <= 64 else 2
    for plan in (cute_mla.get_mla_metadata(), call.plan()):
        call.run(**planned(plan))
        assert device.launches[-2].grid == (ctas, s_q, 132 // s_q // ctas)
    assert isinstance(plan[0], torch.Tensor)
    assert plan[0].shape == (132 // s_q // ctas, 8)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_plan_made_beforehand_takes_every_request_for_topk_keys(device: RecordingDevice, fp8: bool) -> None:
    metadata, num_splits = cute_mla.get_mla_metadata(torch.zeros(5, dtype=torch.int32), 3 * 32, 1, 32, fp8, 2048)
    (plan,) = device.launches
    parts = 44
    assert (metadata.shape, num_splits.shape) == ((parts, 8), (6,))
    assert plan.args == {
        "lengths": None, "extra_lengths": None, "plan": metadata, "num_splits": num_splits,
        "cu_seqlens_q": None, "units": None, "batch": 5, "num_parts": parts, "max_keys": 2048, "extra_max_keys": 0,
        "requests": 0, "total_q": 0, "max_seqlen_q": 0, "unit_tokens": 1, "reach": (1 << 31) - 1, "sink_tiles": 0,
        "whole_eighths": 0,
    }  # fmt: skip


def test_batch_invariant_call(device: RecordingDevice) -> None:
    sparse_call(16_000, 3000, batch=3).run(batch_invariant=True)
    _, decode, combine = (launch.args for launch in device.launches)
    for args in (decode, combine):
        assert (args["max_splits"], args["accum_rows"]) == (3, 9)


@pytest.mark.parametrize(("topk", "extra_topk"), [(2048, None), (8000, 192), (0, 5)])
def test_no_combine_where_no_request_is_cut(device: RecordingDevice, topk: int, extra_topk: int | None) -> None:
    parts = 132
    sparse_call(topk=topk, extra_topk=extra_topk, batch=parts).run()
    _, decode = device.launches
    args = decode.args
    assert (decode.grid[2], args["max_splits"], args["accum_rows"], args["out_accum"], args["lse_accum"]) == (parts, 1, 0, None, None)


@pytest.mark.parametrize("told", ["topk_length", "extra_topk_length"])
def test_a_combine_where_requests_may_have_fewer_indices(device: RecordingDevice, told: str) -> None:
    sparse_call(topk=64, extra_topk=64, batch=66).run(**{told: ints(66)})
    assert len(device.launches) == 3


def test_a_combine_where_a_batch_invariant_call_would_cut(device: RecordingDevice) -> None:
    sparse_call(topk=8193, batch=66).run()
    assert len(device.launches) == 3


def test_block_table_and_lengths_are_not_looked_at(device: RecordingDevice) -> None:
    sparse_call().run(block_table="anything", cache_seqlens=object())
    assert len(device.launches) == 3


@pytest.mark.parametrize(("batch", "s_q"), [(0, 1), (2, 0)])
def test_nothing_to_compute(device: RecordingDevice, batch: int, s_q: int) -> None:
    call = sparse_call(batch=batch)
    none = {name: call[name][:, :s_q] for name in ("q", "indices")}
    out, lse = call.run(**none, workspace=torch.empty(0, dtype=torch.uint8))
    assert cute_mla.workspace_size("sparse_decode", batch=batch, s_q=s_q, h_q=64, device="cpu") == 0
    assert device.launches == []
    assert out.shape == (batch, s_q, 64, 512)
    assert lse.shape == (batch, 64, s_q)


@pytest.mark.parametrize("extra_topk", [None, 0, 5])
def test_no_indices_are_none_valid(device: RecordingDevice, extra_topk: int | None) -> None:
    sparse_call(0, extra_topk).run()
    args = device.launches[1].args
    assert (args["topk"], args["extra_topk"]) == (0, extra_topk or 0)
