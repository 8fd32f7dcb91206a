"""CUDA graphs: what a captured call puts into one, and replays of it for a smaller batch than was captured.

Requests that a batch lacks are padding: length 0 (in sparse calls, no index that counts), anything in their rows of the other tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

import cute_mla
from cute_mla.indexer import get_paged_mqa_logits_metadata, indexer_topk
from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.runtime.cuda_device import CudaDevice
from cute_mla.runtime.current import cpu_tensors_on
from cute_mla.runtime.errors import DeviceError
from cute_mla.spec.arch import Arch
from cute_mla.testing.operations import operation
from cute_mla.testing.operations.dense_decode.case import (
    UNUSED_TABLE_ENTRY,
    DenseDecodeCase,
    DenseDecodeTensors,
    make_dense_decode_tensors,
)
from cute_mla.testing.operations.dense_prefill.case import DensePrefillCase, make_dense_prefill_tensors
from cute_mla.testing.operations.mqa_logits.case import MqaLogitsCase
from cute_mla.testing.operations.mqa_logits.record import expected_logits
from cute_mla.testing.operations.sparse_decode.case import Pool, SparseDecodeCase, SparseDecodeTensors, make_sparse_decode_tensors
from cute_mla.testing.operations.sparse_prefill.case import SparsePrefillCase, make_sparse_prefill_tensors
from tests.runtime.captured_graph import CapturingDriver, Graph, captured
from tests.runtime.fake_driver import installed
from tests.support.bench import expect
from tests.support.public_calls import calls_of, function_of, public_names
from tests.support.right_calls import RightCall, call_of
from tests.support.zero_tensors import numbers

SM_COUNT = 6
LENGTHS = (140, 70, 100, 64)
DENSE = DenseDecodeCase(batch=4, s_q=2, lengths=LENGTHS, h_q=9, causal=True, metadata="tensors", outputs="given", sm_count=SM_COUNT)
SPARSE = SparseDecodeCase(
    batch=4, h_q=9, main=Pool(200, 130, lengths=(130, 70, 64, 1)), power_of_two=True, metadata="tensors", outputs="given", sm_count=SM_COUNT
)

T = TypeVar("T", DenseDecodeTensors, SparseDecodeTensors)


@pytest.fixture
def driver(arch: Arch, monkeypatch: pytest.MonkeyPatch) -> Iterator[CapturingDriver]:
    """Yield a driver for a GPU of the architecture, on which CPU tensors are."""
    params = {kernel.entry: kernel.params for kernel in load_artifacts().manifest.kernels.values()}
    fake = CapturingDriver(params, capability=arch.compute_capabilities[0], sm_count=SM_COUNT)
    with installed(fake, monkeypatch), cpu_tensors_on(CudaDevice(0)):
        yield fake


def recorded(driver: CapturingDriver, call: Callable[[], Any], *kernels: str) -> Graph:
    """Return the graph of a call that has been made once, and check that it holds these kernels and no operation of torch."""
    call()
    with captured(driver) as graph:
        call()
    assert (graph.kernels, graph.operations) == ([*kernels], [])
    return graph


def replay(graph: Graph, arch: Arch, *memory: Tensor) -> None:
    """Run a graph on the current contents of its tensors."""
    with cute_mla.simulate(arch, SM_COUNT) as device:
        graph.replay(device, memory)


class Step:
    """A decode step whose tensors stay where they are. plan: None to make one in each call."""

    def __init__(self, case: DenseDecodeCase | SparseDecodeCase, tensors: Any, *, planned: bool) -> None:
        self.case, self.tensors, self.planned = case, tensors, planned
        self.arguments = RightCall(case, tensors)

    def plan(self) -> tuple[Tensor, Tensor]:
        """Return a new plan for what the tensors hold now."""
        case, rows = self.case, self.case.s_q * self.case.h_q
        if isinstance(case, DenseDecodeCase):
            return cute_mla.get_mla_metadata(self.tensors.cache_seqlens, rows, 1, case.h_q)
        return cute_mla.get_mla_metadata(self.tensors.topk_length, rows, 1, case.h_q, True, case.main.topk)

    def __call__(self) -> None:
        if not self.planned:
            self.arguments["tile_scheduler_metadata"], self.arguments["num_splits"] = self.plan()
        out, lse = self.arguments.run()
        assert out is self.arguments["out"]
        assert lse is self.arguments["lse"]

    def replay(self, graph: Graph, arch: Arch) -> tuple[Tensor, Tensor]:
        """Replay the graph on the current contents of the tensors."""
        out, lse = self.arguments["out"].fill_(float("nan")), self.arguments["lse"].fill_(float("nan"))
        with cute_mla.simulate(arch, SM_COUNT) as device:
            if self.planned:
                for buffer, new in zip(("tile_scheduler_metadata", "num_splits"), self.plan(), strict=True):
                    self.arguments[buffer].copy_(new)
            graph.replay(device, [value for value in self.arguments.values() if isinstance(value, Tensor)])
        return out, lse


def shrink_dense(tensors: DenseDecodeTensors) -> None:
    """Two requests instead of four, in other places than they were."""
    tensors.block_table[:2] = tensors.block_table[[2, 0]]
    tensors.block_table[2:] = UNUSED_TABLE_ENTRY
    tensors.q[:2] = make_dense_decode_tensors(replace(DENSE, seed=1)).q[:2]
    tensors.q[2:] = float("nan")
    tensors.cache_seqlens.copy_(torch.tensor([100, 139, 0, 0]))


def shrink_sparse(tensors: SparseDecodeTensors) -> None:
    """Two requests instead of four."""
    assert tensors.topk_length is not None
    tensors.indices[:2] = tensors.indices[[2, 0]]
    tensors.indices[2:] = UNUSED_TABLE_ENTRY
    tensors.q[2:] = float("nan")
    tensors.topk_length.copy_(torch.tensor([130, 65, 0, 0]))


STEPS: dict[str, tuple[Any, Callable[[Any, str], Any], Callable[[Any], None]]] = {
    "dense": (DENSE, make_dense_decode_tensors, shrink_dense),
    "sparse": (SPARSE, make_sparse_decode_tensors, shrink_sparse),
}


@pytest.mark.parametrize(
    ("op", "planned"),
    [
        pytest.param("dense", False, id="dense-planned in the graph"),
        pytest.param("dense", True, id="dense-plan copied"),
        pytest.param("sparse", False, id="sparse-planned in the graph"),
        pytest.param("sparse", True, id="sparse-plan copied", marks=pytest.mark.slow),
    ],
)
def test_a_decode_step_is_replayed_for_a_smaller_batch(driver: CapturingDriver, arch: Arch, op: str, planned: bool) -> None:
    case, make, shrink = STEPS[op]
    tensors = make(case, "cpu")
    step = Step(case, tensors, planned=planned)
    step()
    with captured(driver) as graph:
        step()
    assert graph.kernels == ["split_plan"] * (not planned) + [case.op, "combine"]
    assert graph.operations == ["aten.empty.memory_format"] * (0 if planned else 2), "of the plan, where it is made in the graph"
    if not planned:
        expect(case, tensors, step.replay(graph, arch))
    shrink(tensors)
    out, lse = step.replay(graph, arch)
    real = slice(0, 2)
    expect(case, of_requests(tensors, real), (out[real], lse[real]))
    assert bool((out[2:] == 0).all())
    assert bool((lse[2:] == float("inf")).all())


def of_requests(tensors: T, requests: slice) -> T:
    """Return the operands of some requests."""
    if isinstance(tensors, DenseDecodeTensors):
        own = {name: getattr(tensors, name)[requests] for name in ("q", "block_table", "cache_seqlens")}
    else:
        own = {name: getattr(tensors, name)[requests] for name in ("q", "indices", "topk_length")}
    return replace(tensors, **own)


QUIET = {
    "empty",
    "empty_strided",
    "new_empty",
    "view",
    "slice",
    "select",
    "squeeze",
    "detach",
    "alias",
    "as_strided",
}  # operations of torch that do no work
# Counters of the lists begin at 0, and the gradient of sinks is a sum by torch, all on the device.
MORE = {
    "flash_mla_sparse_bwd": {"new_zeros", "add", "cat", "copy_"},
    **{name: {"new_zeros"} for name in ("plan_sparse_backward", "indexer_backward")},
}


@pytest.mark.parametrize("name", [name for name in public_names() if name != "get_paged_mqa_logits_metadata"])
def test_a_captured_call_launches_kernels_and_does_nothing_else(driver: CapturingDriver, name: str) -> None:
    """So that a replay reads all lengths, slots and indices from the device."""
    for arguments in calls_of(name):
        function_of(name)(**arguments)
        with captured(driver) as graph:
            function_of(name)(**arguments)
        assert graph.launches
        assert {operation.split(".")[1] for operation in graph.operations} <= QUIET | MORE.get(name, set())


def test_logits_are_computed_in_a_graph(driver: CapturingDriver, arch: Arch) -> None:
    """Replay with other queries, tables and lengths: one kernel, without metadata to be brought up to date."""
    case = MqaLogitsCase(requests=2, tokens=2, heads=40, keys=300, page_size=64, outputs="given")
    call, other = call_of(case), call_of(case, seed=1)
    call |= {"context_lens": numbers(1, 1), "block_table": torch.zeros_like(call["block_table"]), "cache": other["cache"]}
    call["metadata"] = get_paged_mqa_logits_metadata(call["context_lens"], 64, SM_COUNT)
    graph = recorded(driver, call.run, "mqa_logits")
    operands = ("q", "weights", "context_lens", "block_table")
    for name in operands:
        call[name].copy_(other[name])
    replay(graph, arch, call["cache"], *(call[name] for name in operands), call["out"])
    assert torch.equal(call["out"], expected_logits(**other))


def test_keys_are_chosen_in_a_graph(driver: CapturingDriver, arch: Arch) -> None:
    """Other keys, lengths and pages at the replay: lengths are read on the device, and the workspace is the caller's."""
    q, weights = torch.ones(2, 1, 8, 128).to(torch.float8_e4m3fn), torch.ones(2, 8)
    cache, table = torch.zeros(6, 64, 1, 132, dtype=torch.uint8), torch.zeros(2, 5, dtype=torch.int32)
    lengths, out, workspace = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 30, dtype=torch.int32), torch.zeros(4096, dtype=torch.uint8)
    given: dict[str, Any] = {"slots": True, "out": out, "workspace": workspace}
    indexer_topk(q, weights, cache, lengths, table, 30, **given)
    with captured(driver) as graph:
        indexer_topk(q, weights, cache, lengths, table, 30, **given)
    assert graph.kernels == ["mqa_logits", "topk_indices"]
    assert {operation.split(".")[1] for operation in graph.operations} <= {"view", "slice", "detach", "alias"}  # no work
    values, scales = cache.flatten(1).split([64 * 128, 64 * 4], dim=1)
    values.view(torch.float8_e4m3fn)[:] = 1.0
    scales.view(torch.float32)[:] = torch.randperm(6 * 64).view(6, 64).float()
    table.copy_(torch.tensor([[5, 3, 1, 0, 2], [4, 2, 0, 1, 3]]))
    lengths[0], lengths[1] = 257, 256
    replay(graph, arch, q, weights, cache, lengths, table, out, workspace)
    assert torch.equal(out, cute_mla.reference.indexer_topk(q, weights, cache, lengths, table, 30, slots=True))


def test_sparse_prefill_is_replayed_for_fewer_tokens(driver: CapturingDriver, arch: Arch) -> None:
    case = SparsePrefillCase(s_q=4, h_q=9, s_kv=200, lengths=(64, 64, 64, 64), outputs="given", sm_count=SM_COUNT)
    tensors = make_sparse_prefill_tensors(case, "cpu")
    call = RightCall(case, tensors)
    results = {name: call[name].zero_() for name in ("out", "max_logits", "lse")}
    graph = recorded(driver, call.run, case.op)
    assert tensors.topk_length is not None
    tensors.indices[:2] = tensors.indices[[3, 1]]
    tensors.indices[2:], tensors.q[2:] = -1, float("nan")
    tensors.topk_length.copy_(torch.tensor([64, 7, 0, 64]))
    replay(graph, arch, *(value for value in call.values() if isinstance(value, Tensor)))
    real = {name: getattr(tensors, name)[:2] for name in ("q", "indices", "topk_length")}
    expect(case, replace(tensors, **real), tuple(result[:2] for result in results.values()))
    assert bool((results["out"][2:] == 0).all())
    assert bool((results["lse"][2:] == float("inf")).all())
    assert bool((results["max_logits"][2:] == -float("inf")).all())


def test_dense_prefill_is_replayed_for_fewer_sequences(driver: CapturingDriver, arch: Arch) -> None:
    case = DensePrefillCase(lengths=((9, 70), (4, 9), (3, 130)), group=2, causal=True, outputs="given", sm_count=SM_COUNT)
    tensors = make_dense_prefill_tensors(case, "cpu")
    call = RightCall(case, tensors)
    results = {name: call[name].zero_() for name in ("out", "lse")}
    graph = recorded(driver, call.run, case.op)
    begin, keys = case.q_starts[0], case.k_starts[0]
    tensors.cu_seqlens_q.copy_(torch.tensor([begin, begin + 5, begin + 7, begin + 7]))
    tensors.cu_seqlens_k.copy_(torch.tensor([keys, keys + 40, keys + 75, keys + 75]))
    replay(graph, arch, *(value for value in call.values() if isinstance(value, Tensor)))
    wanted = operation(case).reference(case, tensors)
    written = slice(begin, begin + 7)
    torch.testing.assert_close(results["out"][written].float(), wanted[0][written].float(), atol=2e-3, rtol=2e-2)
    torch.testing.assert_close(results["lse"][written], wanted[1][written], atol=1e-4, rtol=1e-4)
    assert bool((results["out"][begin + 7 :] == 0).all()), "rows of no sequence were written"


def test_a_first_call_may_be_captured(driver: CapturingDriver, arch: Arch) -> None:
    step = Step(DENSE, make_dense_decode_tensors(DENSE, "cpu"), planned=True)  # whose plan has loaded one kernel of three
    with captured(driver, loading=True) as graph:
        step()
    assert len(driver.called("cuLibraryLoadData")) == 3
    expect(DENSE, step.tensors, step.replay(graph, arch))


def test_a_driver_that_loads_nothing_during_capture_is_answered_with_what_to_do(driver: CapturingDriver) -> None:
    step = Step(DENSE, make_dense_decode_tensors(DENSE, "cpu"), planned=True)
    driver.refuses_loading = True
    advice = r"make the same call once before the capture \(cuLibraryLoadData failed: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED \(900\)\)"
    with pytest.raises(DeviceError, match=advice) as caught, captured(driver, loading=True):
        step()
    assert caught.value.code == 900


LOOKING: dict[str, Callable[[Step], Any]] = {
    "reads a length": lambda step: int(step.tensors.cache_seqlens.max()),
    "lists lengths": lambda step: step.tensors.cache_seqlens.tolist(),
    "asks the driver to wait": lambda step: cute_mla.runtime.driver._call("cuCtxSynchronize"),
}


@pytest.mark.parametrize("look", LOOKING)
def test_the_stand_in_notices_a_call_that_cannot_be_captured(driver: CapturingDriver, look: str) -> None:
    step = Step(DENSE, make_dense_decode_tensors(DENSE, "cpu"), planned=True)
    step()

    def capture() -> None:
        with captured(driver):
            step()
            LOOKING[look](step)

    with pytest.raises(AssertionError):
        capture()
