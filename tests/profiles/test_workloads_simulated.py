"""Workloads and the real kernels together, on the simulated device: the calls that a GPU would time are the right calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_mla
from cute_mla.ops.limits import SPARSE_BACKWARD
from cute_mla.profiles.measure.runner import TIMED, WRONG, measure_case
from cute_mla.profiles.rows import OPS, Case
from cute_mla.profiles.shapes import (
    CacheInsertShape,
    CacheWriteShape,
    CombineShape,
    DecodeShape,
    DensePrefillBackwardShape,
    DensePrefillShape,
    IndexerShape,
    IndexWriteShape,
    MergeShape,
    SparseDecodeShape,
    SparsePrefillBackwardShape,
    SparsePrefillShape,
    TopkShape,
)
from cute_mla.profiles.workloads import make_workload, workload
from cute_mla.profiles.workloads.calls import CALLS
from cute_mla.profiles.workloads.combine import Combine
from cute_mla.profiles.workloads.operands import generator, selections
from cute_mla.runtime.simulated_device import SimulatedDevice
from cute_mla.spec.arch import Arch
from cute_mla.spec.dense_decode import FP8, FP8_CACHE
from cute_mla.testing.operations import OPERATIONS
from tests.profiles import benching
from tests.profiles.benching import bench, case_of, small_case, with_function
from tests.support.dispatch_modes import Allocations
from tests.support.recording_device import RecordingDevice

CPU = torch.device("cpu")

CASES = {
    "several requests": small_case(lengths=(130, 3, 0), s_q=2, h_q=4),
    "one request, split": small_case(lengths=(400,), s_q=1, h_q=128),
    "e4m3 cache": small_case(lengths=(130, 3), s_q=2, h_q=4, operands=FP8_CACHE),
    "e4m3 cache and queries": small_case(lengths=(130, 3), s_q=2, h_q=4, operands=FP8),
    "sparse decode": case_of("sparse_decode", SparseDecodeShape(batch=2, s_q=2, h_q=16, topk=70, context=150)),
    "sparse decode, bf16 cache": case_of(
        "sparse_decode", SparseDecodeShape(batch=1, s_q=1, h_q=8, topk=200, context=300, cache="latent", page_size=2)
    ),
    "packed query tokens": case_of("dense_decode", DecodeShape(lengths=(130, 3, 70), s_q=3, h_q=4, tokens=(2, 0, 3))),
    "sparse decode, packed query tokens": case_of(
        "sparse_decode", SparseDecodeShape(batch=3, s_q=2, h_q=16, topk=70, context=150, tokens=(2, 0, 1))
    ),
    "sparse prefill": case_of("sparse_prefill", SparsePrefillShape(s_q=3, h_q=16, s_kv=150, topk=70)),
    "sparse prefill, backward": case_of("sparse_prefill_backward", SparsePrefillBackwardShape(s_q=3, h_q=16, s_kv=150, topk=70)),
    "dense prefill, causal": case_of("dense_prefill", DensePrefillShape(lengths=(130, 1, 40), h_q=2, h_kv=1, causal=True)),
    "dense prefill": case_of("dense_prefill", DensePrefillShape(lengths=(70,), h_q=1, h_kv=1, causal=False)),
    "dense prefill, masked": case_of(
        "dense_prefill", DensePrefillShape(lengths=(130, 1, 40), h_q=2, h_kv=1, causal=True, cached=33, shown=20)
    ),
    "dense prefill, backward": case_of("dense_prefill_backward", DensePrefillBackwardShape(lengths=(130, 40), h_q=2, h_kv=1, causal=True)),
    "combine": case_of("combine", CombineShape(batch=3, s_q=2, h_q=9, splits=2)),
    "combine of many": case_of("combine", CombineShape(batch=1, s_q=1, h_q=4, splits=37)),
    "merge_states": case_of("merge_states", MergeShape(tokens=3, h_q=9, states=3)),
}
# what these leave is equal to the reference
WRITES = {
    name: case_of("cache_write", CacheWriteShape(tokens=5, cache=name, page_size=3)) for name in ("latent", "fp8_656", "fp8_584", "fp8_576")
}
INSERTS = {
    name: case_of("cache_insert", CacheInsertShape(tokens=5, h_q=heads, cache=name, page_size=3))
    for name, heads in (("fp8_656", 3), ("fp8_576", 2), ("v41", 2), ("latent_512", 0))
}
PREPARED = {name: case_of("index_write", IndexWriteShape(tokens=5, h_q=heads, page_size=16)) for name, heads in (("keys", 0), ("h3", 3))}
SELECTED = case_of("topk_indices", TopkShape(rows=2, columns=300, topk=20))
INDEXED = {
    "pages": case_of("indexer_topk", IndexerShape(tokens=2, h_q=33, context=300, topk=20, paged=True)),
    "rows": case_of("indexer_topk", IndexerShape(tokens=3, h_q=16, context=150, topk=20, paged=False)),
}


@pytest.fixture
def few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sets, and graphs of one launch each, so that few launches are simulated."""
    monkeypatch.setattr(workload, "rotation_sets", lambda set_bytes, l2_bytes: 2)
    monkeypatch.setitem(benching.CALL_US, "estimate", 6000.0)


def test_every_op_with_rows_has_a_workload_and_a_case_here() -> None:
    assert {*CALLS, "combine"} == set(OPS) == {case.op for case in EVERY.values()}


EVERY = {**CASES, **WRITES, **INSERTS, **PREPARED, "selected": SELECTED, **INDEXED}


@pytest.mark.parametrize("case", EVERY.values(), ids=EVERY.keys())
def test_a_timed_call_allocates_nothing(case: Case) -> None:
    with RecordingDevice(sm_count=8).active() as device:
        made = make_workload(case, CPU, 1, 2)
        made.call(made.sets[0])
        launched = len(device.launches)
        with Allocations() as allocations:
            made.call(made.sets[1])
        assert allocations.seen == [] or case.op == SPARSE_BACKWARD  # which allocates what lies between its kernels
        assert len(device.launches) > launched


@pytest.mark.usefixtures("few_launches")
@pytest.mark.in_turn
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_row_is_checked_and_timed_through_the_api(case: Case, arch: Arch) -> None:
    with cute_mla.simulate(arch, sm_count=4) as device:
        record = measure_case(case, bench())
    assert (record["status"], record["reason"]) == (TIMED, "")
    assert (record["launches"], record["sets"]) == (2, 2)
    assert 0 < record["check"]["out_max_abs"] < (2e-2 if case.text.endswith(FP8) or case.op.endswith("_backward") else 1e-3)
    assert (record["plan_us"] is not None) == case.op.endswith("decode")
    assert device.instructions > 0


def assert_timed(case: Case) -> None:
    record = measure_case(case, bench())
    assert (record["status"], record["reason"], record["check"]["out_max_abs"]) == (TIMED, "", 0)


def reason_with(monkeypatch: pytest.MonkeyPatch, case: Case, function: Callable[..., Any]) -> str:
    """Return why a row is wrong with another function in the place of the op's; function: as the op's, with the op's in front."""
    right = OPERATIONS[case.op].function
    with monkeypatch.context() as patch:
        with_function(patch, case.op, lambda **arguments: function(right, **arguments))
        record = measure_case(case, bench())
    assert record["status"] == WRONG
    return str(record["reason"])


def does_nothing(right: Callable[..., Any], **arguments: Any) -> None:
    pass


@pytest.mark.usefixtures("few_launches")
@pytest.mark.parametrize("name", ["latent", "fp8_656", "fp8_576"])
def test_a_row_of_written_keys_is_checked_and_timed(name: str, arch: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_but_one(right: Callable[..., Any], *, kv_c: Tensor, k_pe: Tensor, slot_mapping: Tensor, **rest: Any) -> None:
        right(kv_c=kv_c[1:], k_pe=k_pe[1:], slot_mapping=slot_mapping[1:], **rest)

    with cute_mla.simulate(arch, sm_count=4):
        assert_timed(WRITES[name])
        spoilt = reason_with(monkeypatch, WRITES[name], lambda right, kv_c, **rest: right(kv_c=kv_c * 1.02, **rest))
        assert spoilt.startswith("out[0]")
        assert reason_with(monkeypatch, WRITES[name], all_but_one).startswith("out[0]")


@pytest.mark.usefixtures("few_launches")
@pytest.mark.in_turn
@pytest.mark.parametrize("name", INSERTS)
def test_a_row_of_inserted_keys_is_checked_and_timed(name: str, arch: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_other_angles(right: Callable[..., Any], *, positions: Tensor, **rest: Any) -> None:
        right(positions=positions.flip(0), **rest)

    def with_half_the_weights(right: Callable[..., Any], *, norm_weight: Tensor, **rest: Any) -> None:
        right(norm_weight=norm_weight / 2, **rest)

    with cute_mla.simulate(arch, sm_count=4):
        assert_timed(INSERTS[name])
        if name != "latent_512":
            reason_with(monkeypatch, INSERTS[name], with_other_angles)
        for wrong in (with_half_the_weights, does_nothing):
            assert reason_with(monkeypatch, INSERTS[name], wrong).startswith("out[0]")


@pytest.mark.usefixtures("few_launches")
@pytest.mark.parametrize(("name", "rows"), [("keys", "k"), ("h3", "q")])
def test_a_row_of_an_indexer_is_checked_and_timed(name: str, rows: str, arch: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    def flipped(right: Callable[..., Any], **arguments: Any) -> None:
        right(**{**arguments, rows: arguments[rows].flip(-1)})

    with cute_mla.simulate(arch, sm_count=4):
        assert_timed(PREPARED[name])
        assert reason_with(monkeypatch, PREPARED[name], flipped).startswith("out[0]")
        unwritten = "out[0]" if name == "keys" else "a result has NaN, or was not written everywhere"
        assert reason_with(monkeypatch, PREPARED[name], does_nothing).startswith(unwritten)


@pytest.mark.usefixtures("few_launches")
def test_a_row_of_selected_positions_is_checked_and_timed(arch: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    def fewer(right: Callable[..., Any], *, topk: int, out: Tensor, **rest: Any) -> None:
        right(topk=topk - 1, out=out[:, 1:], **rest)

    with cute_mla.simulate(arch, sm_count=4):
        assert_timed(SELECTED)
        assert reason_with(monkeypatch, SELECTED, lambda right, logits, **rest: right(logits=-logits, **rest)).startswith("out[0]")
        assert "was not written everywhere" in reason_with(monkeypatch, SELECTED, fewer)


@pytest.mark.usefixtures("few_launches")
@pytest.mark.in_turn
@pytest.mark.parametrize("name", INDEXED)
def test_a_row_of_scored_and_selected_keys_is_checked_and_timed(name: str, arch: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    def negated(right: Callable[..., Any], *, q: Tensor, **rest: Any) -> None:
        right(q=(-q.float()).to(q.dtype), **rest)

    with cute_mla.simulate(arch, sm_count=4):
        assert_timed(INDEXED[name])
        assert reason_with(monkeypatch, INDEXED[name], negated).startswith("out[0]")
        assert "was not written everywhere" in reason_with(monkeypatch, INDEXED[name], does_nothing)


@pytest.mark.usefixtures("few_launches")
@pytest.mark.parametrize(
    "name",
    [
        *("sparse decode", "sparse decode, packed query tokens", "sparse prefill", "dense prefill, causal", "dense prefill, masked"),
        *("dense prefill, backward", "combine", "merge_states"),
    ],
)
def test_a_result_that_is_off_by_a_little_is_wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    spoiled = Combine if case.op == "combine" else workload.Workload
    call = spoiled.call

    def off(self: Any, operands: Any) -> None:
        call(self, operands)
        result = next(iter(self.results(operands).values()))
        (result if case.op.endswith("_backward") else result[0]).mul_(1.02)  # the first row of dq is 0

    monkeypatch.setattr(spoiled, "call", off)
    with cute_mla.simulate(sm_count=4):
        record = measure_case(case, bench())
    assert record["status"] == WRONG
    assert record["reason"].startswith(("out[0]", "dq[0]"))


@pytest.mark.usefixtures("few_launches")
@pytest.mark.parametrize("name", ["several requests", "sparse decode", "sparse prefill", "dense prefill", "combine", "merge_states"])
def test_all_results_are_checked_for_poison_and_compared(name: str) -> None:
    with cute_mla.simulate(sm_count=4):
        made = make_workload(CASES[name], CPU, 1)
        made.poison()
        for operands in made.sets:
            assert all(bool(tensor.isnan().all()) for tensor in made.results(operands).values())
            made.call(operands)
        assert made.check_sets(made.sets, made.sets).passed
        for result, tensor in made.results(made.sets[1]).items():
            kept = tensor.clone()
            tensor.flatten()[-1].fill_(math.nan)
            assert made.check_sets(made.sets, made.sets[:1]).reason == "a result has NaN, or was not written everywhere"
            tensor.copy_(kept)
            tensor.add_(0.05)
            assert made.check_sets([], made.sets[1:]).reason.startswith(f"{result}[0]")
            tensor.copy_(kept)


def test_a_plan_for_too_many_parts_is_not_what_a_workload_makes(arch: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan's parts, times the CTAs of one part, are the SMs of the device."""
    monkeypatch.setattr(workload, "rotation_sets", lambda set_bytes, l2_bytes: 1)
    with cute_mla.simulate(arch, sm_count=8):
        made = make_workload(small_case(lengths=(400,), s_q=1, h_q=128), CPU, 1)
    assert made.shared["tile_scheduler_metadata"].shape == (4, 8)  # 128 heads are two row tiles
    assert made.shared["num_splits"].tolist()[-1] > 1
    assert made.workspace is not None
    assert made.workspace.nbytes >= 2 * 128 * 513 * 4


def test_selections_are_different_rows_in_random_order() -> None:
    chosen = selections(generator(CPU, 3), 5, 20, 50)
    assert all(len(set(token)) == 20 and min(token) >= 0 and max(token) < 50 for token in chosen.tolist())
    assert len({tuple(token) for token in chosen.tolist()}) == 5
    assert any(token != sorted(token) for token in chosen.tolist())
    assert torch.equal(chosen, selections(generator(CPU, 3), 5, 20, 50))


def test_every_token_selects_among_its_own_request(arch: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "rotation_sets", lambda set_bytes, l2_bytes: 1)
    shape = SparseDecodeShape(batch=3, s_q=2, h_q=4, topk=100, context=100, page_size=16)
    with cute_mla.simulate(arch, sm_count=4):
        made = make_workload(replace(CASES["sparse decode"], shape=shape), CPU, 1)
    slots = made.sets[0].indices.flatten(1)
    assert [len(set(request.tolist())) for request in slots] == [100, 100, 100]  # both tokens took all that there are
    assert len(set(slots.flatten().tolist())) == 300


@pytest.mark.usefixtures("few_launches")
def test_combine_is_launched_as_a_decode_launches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[str, bool]] = []
    launch = SimulatedDevice.launch

    def noted(self: SimulatedDevice, kernel, grid, args, **kwargs) -> None:  # type: ignore[no-untyped-def]
        launched.append((kernel.op, kwargs["pdl"]))
        launch(self, kernel, grid, args, **kwargs)

    monkeypatch.setattr(SimulatedDevice, "launch", noted)
    with cute_mla.simulate(sm_count=4):
        made = make_workload(CASES["combine"], CPU, 1)
        made.call(made.sets[0])
    assert launched == [("combine", True)]
