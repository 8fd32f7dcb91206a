"""torch.compile of functions that call the library: one graph, no recompilation for another batch or length, the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import TorchRuntimeError, Unsupported

import cute_mla
from cute_mla.ops.split_plan import MlaSchedule
from cute_mla.testing.cases.base import BaseCase
from cute_mla.testing.operations.dense_decode.case import DenseDecodeCase
from cute_mla.testing.operations.dense_prefill.case import DensePrefillCase
from cute_mla.testing.operations.sparse_decode.case import Pool, SparseDecodeCase
from cute_mla.testing.operations.sparse_prefill.case import SparsePrefillCase
from tests.support.compiling import compiled, fresh
from tests.support.recording_device import RecordingDevice
from tests.support.right_calls import RightCall

assert fresh

Call = Callable[..., Any]
Arguments = dict[str, Any]


def arguments_of(case: BaseCase, *left_out: str) -> Arguments:
    """Return arguments of the public function, without results and what else is left out."""
    left_out = (*left_out, "out", "lse", "max_logits", "lse_indexer", "workspace")
    return {key: value for key, value in RightCall(case).items() if key not in left_out}


def dense(*lengths: int, **changes: Any) -> Arguments:
    """Return arguments of dense decode, without a plan; the batch is dynamic, and the pages of a request and of the cache."""
    case = DenseDecodeCase(batch=len(lengths), lengths=lengths, h_q=3, **changes)
    arguments = arguments_of(case, "tile_scheduler_metadata", "num_splits")
    for name, dimension in (("q", 0), ("block_table", 0), ("block_table", 1), ("cache_seqlens", 0), ("k_cache", 0)):
        torch._dynamo.mark_dynamic(arguments[name], dimension)
    return arguments


def same(results: Any, others: Any) -> bool:
    return all(torch.equal(result, other) for result, other in zip(results, others, strict=True))


def decode_step(q: Tensor, cache_seqlens: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
    """Plan, decode, and use the result."""
    planned = cute_mla.get_mla_metadata(cache_seqlens, q.shape[1] * q.shape[2], 1, q.shape[2])
    tensors: dict[str, Any] = dict(zip(("tile_scheduler_metadata", "num_splits"), planned, strict=True))
    out, lse = cute_mla.flash_mla_with_kvcache(q * 2, cache_seqlens=cache_seqlens, **tensors, **arguments)
    return out.float().sum(-1), lse + 1


def decode_layers(**arguments: Any) -> tuple[Tensor, Tensor]:
    """Return two layers that share a schedule object."""
    schedule, none = cute_mla.get_mla_metadata()
    for _ in range(2):
        out, lse = cute_mla.flash_mla_with_kvcache(**arguments, tile_scheduler_metadata=schedule, num_splits=none)
        arguments["q"] = torch.cat((out, arguments["q"][..., 512:]), dim=-1)
    return out, lse


@pytest.mark.parametrize("step", [decode_step, decode_layers])
def test_a_decode_step_is_one_graph_for_all_batches_and_lengths(step: Call) -> None:
    call, counter = compiled(step)
    with cute_mla.simulate("sm90", 3):
        for lengths in ((70, 3), (1, 0, 65)):
            arguments = dense(*lengths)
            assert same(call(**arguments), step(**arguments))
    assert counter.frame_count == 1


def test_a_schedule_object_planned_in_a_graph_knows_what_for() -> None:
    def plan(schedule: MlaSchedule, **arguments: Any) -> Tensor:
        return cute_mla.flash_mla_with_kvcache(**arguments, tile_scheduler_metadata=schedule)[0]

    call, _ = compiled(plan)
    schedule, _ = cute_mla.get_mla_metadata()
    with cute_mla.simulate("sm90", 3):
        arguments = dense(70, 3)
        out = call(schedule, **arguments)
        assert torch.equal(plan(schedule, **arguments), out)
        with pytest.raises(ValueError, match="was planned for other shapes: batch 3 after 2"):
            plan(schedule, **dense(70, 3, 9))
        with pytest.raises(ValueError, match=r"num_splits has shape \[3\]; supported: \[4\]"):
            call(schedule, **dense(70, 3, 9))


def with_states(q: Tensor, chunks: list[Arguments], **shared: Any) -> tuple[Tensor, Tensor]:
    """Prefill over chunks of keys, merged."""
    outs, lses = zip(*(cute_mla.flash_attn_varlen_func(q, **chunk, **shared) for chunk in chunks), strict=True)
    return cute_mla.merge_states(outs, lses)


def test_prefill_and_merging_are_one_graph() -> None:
    arguments = arguments_of(DensePrefillCase(lengths=((3, 70), (2, 5))))
    q = arguments.pop("q")
    arguments["cu_seqlens_qo"][0], arguments["cu_seqlens_qo"][-1] = 0, q.shape[0]
    chunk = {name: arguments.pop(name) for name in ("k", "v", "cu_seqlens_kv", "max_seqlen_kv")}
    chunks = [chunk, {**chunk, "v": chunk["v"] * 2}]
    shared = {**arguments, "max_seqlen_qo": q.shape[0]}
    call, counter = compiled(with_states)
    with cute_mla.simulate("sm90", 3):
        assert same(call(q, chunks, **shared), with_states(q, chunks, **shared))
    assert counter.frame_count == 1


def test_packed_prefill_is_one_graph() -> None:
    def packed(qkv: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        return cute_mla.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 4, 128, causal=True)

    call, _ = compiled(packed)
    qkv = torch.randn(6, 1, 384, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    with cute_mla.simulate("sm90", 3):
        lengths = torch.tensor([0, 4, 6], dtype=torch.int32)
        assert same(call(qkv, lengths), packed(qkv, lengths))


@pytest.mark.parametrize(
    "case",
    [
        SparseDecodeCase(batch=2, h_q=3, main=Pool(80, 70, lengths="drawn"), extra=Pool(9, 5), sinks="drawn"),
        SparsePrefillCase(s_q=2, h_q=3, s_kv=90, sinks="drawn"),
        SparsePrefillCase(s_q=2, h_q=3, s_kv=90, sinks="drawn", indexer_topk=7),
    ],
    ids=["decode", "prefill", "indexer"],
)
def test_sparse_calls_are_one_graph(case: BaseCase) -> None:
    def step(q: Tensor, **arguments: Any) -> Any:
        if case.op == "sparse_decode":
            arguments["tile_scheduler_metadata"], arguments["num_splits"] = cute_mla.get_mla_metadata()
            return cute_mla.flash_mla_with_kvcache(q.clone(), **arguments)
        return cute_mla.flash_mla_sparse_fwd(q.clone(), **arguments)

    call, _ = compiled(step)
    with cute_mla.simulate("sm90", 3):
        arguments = arguments_of(case, "tile_scheduler_metadata", "num_splits")
        assert same(call(**arguments), step(**arguments))


RESULTS = ("out", "lse", "workspace")


@pytest.mark.parametrize("given", [("lse", "workspace"), RESULTS])
def test_results_are_written_to_tensors_of_the_caller(given: tuple[str, ...]) -> None:
    def step(results: dict[str, Tensor], **arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        results["out"][0] = 1
        out, lse = decode_step(**arguments, **{name: results[name] for name in given})
        return out, lse, results["out"] + 0

    def results() -> dict[str, Tensor]:
        return {"out": torch.zeros(2, 1, 3, 512, dtype=torch.bfloat16), "lse": torch.zeros(2, 3, 1), "workspace": workspace.clone()}

    call, counter = compiled(step)
    with cute_mla.simulate("sm90", 3):
        workspace = torch.zeros(cute_mla.workspace_size("dense_decode", batch=2, s_q=1, h_q=3, device="cpu"), dtype=torch.uint8)
        arguments = dense(70, 3)
        ours, theirs = results(), results()
        assert same(call(ours, **arguments), step(theirs, **arguments))
    assert same([ours["out"], ours["lse"]], [theirs["out"], theirs["lse"]])
    assert counter.frame_count == 1


@pytest.mark.slow  # compiles C++
def test_inductor_writes_to_the_tensors_of_the_caller_without_a_copy() -> None:
    out, lse = torch.zeros(2, 1, 3, 512, dtype=torch.bfloat16), torch.zeros(2, 3, 1)
    call, _ = compiled(decode_step, "inductor")
    with RecordingDevice(sm_count=3).active() as device:
        call(**dense(70, 3), out=out, lse=lse)
    decode = device.launches[-2]
    assert (decode.args["out"].data_ptr(), decode.args["lse"].data_ptr()) == (out.data_ptr(), lse.data_ptr())


@pytest.mark.slow  # compiles C++
def test_inductor_gives_the_same_bits() -> None:
    call, _ = compiled(decode_layers, "inductor")
    with cute_mla.simulate("sm90", 3):
        arguments = dense(70, 3)
        assert same(call(**arguments), decode_layers(**arguments))


def test_an_exported_program_holds_ops() -> None:
    class Step(torch.nn.Module):
        def forward(self, q: Tensor, k_cache: Tensor, block_table: Tensor, cache_seqlens: Tensor) -> tuple[Tensor, Tensor]:
            return decode_step(q, cache_seqlens, k_cache=k_cache, block_table=block_table, head_dim_v=512)

    names = ("q", "k_cache", "block_table", "cache_seqlens")
    with RecordingDevice(sm_count=3).active() as device:
        program = torch.export.export(Step(), tuple(dense(70, 3)[name] for name in names))
        assert device.launches == []
        program.module()(*(dense(70, 3)[name] for name in names))
    assert [launch.kernel.split("_sm")[0] for launch in device.launches] == ["split_plan", "dense_decode", "combine"]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tile_scheduler_metadata": None, "num_splits": None}, Unsupported, "supported: what get_mla_metadata returns"),
        ({"q": torch.zeros(2, 1, 3, 576, dtype=torch.bfloat16, requires_grad=True)}, TorchRuntimeError, "q requires grad; supported"),
        ({"causal": True, "k_cache": torch.zeros(4, 24, 1, 576, dtype=torch.bfloat16)}, ValueError, "supported: 16, 32"),
    ],
    ids=["plan", "gradients", "page size"],
)
def test_what_is_not_supported_is_said(change: Arguments, error: type[Exception], message: str) -> None:
    def step(**arguments: Any) -> Any:
        return cute_mla.flash_mla_with_kvcache(**arguments)[0] * 2

    call, _ = compiled(step)
    with RecordingDevice(sm_count=3).active():
        plan = cute_mla.get_mla_metadata(torch.zeros(2, dtype=torch.int32), 3, 1)
        arguments = {**dense(70, 3), "tile_scheduler_metadata": plan[0], "num_splits": plan[1]}
        with pytest.raises(error, match=message):
            call(**{**arguments, **change})
