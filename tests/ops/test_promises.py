"""Promises of every function: it allocates nothing when all results are given, reads no tensor on the host, and checks a call once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor
from torch.utils import _pytree as pytree

import cute_mla
from cute_mla.ops import dense_prefill, dense_prefill_backward, merge_states, sparse_prefill
from tests.support.dispatch_modes import Allocations, NoReads
from tests.support.recording_device import RecordingDevice
from tests.support.right_calls import CASES, call_of, given_call
from tests.support.zero_tensors import ints

RESULTS = ("out", "lse", "max_logits", "lse_indexer", "dq", "dk", "dv", "out_weights")
TAKE_NO_RESULTS = ("sparse_backward", "indexer_backward")  # which allocate their own, and a workspace
PLANNERS: dict[str, Any] = {
    "dense_prefill": dense_prefill,
    "sparse_prefill": sparse_prefill,
    "backward": dense_prefill_backward,
    "merge": merge_states,
}


@pytest.fixture
def device() -> Iterator[RecordingDevice]:
    with RecordingDevice(sm_count=8).active() as device:
        yield device


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_read_by_the_host(device: RecordingDevice, name: str) -> None:
    call = given_call(name)
    device.launches.clear()
    with NoReads():
        call.run()
    assert device.launches


def test_no_length_is_read_to_plan(device: RecordingDevice) -> None:
    with NoReads():
        cute_mla.get_mla_metadata(ints(3), 8, 1)
    assert device.launches


@pytest.mark.parametrize("name", [name for name in CASES if name not in TAKE_NO_RESULTS])
def test_nothing_is_allocated_when_everything_is_given(device: RecordingDevice, name: str) -> None:
    for call in (given_call(name), given_call(name)):  # checked, then found among the checked calls
        with Allocations() as allocations:
            results = call.run()
        assert allocations.seen == []
        found = results if isinstance(results, tuple) else (results,)
        assert results is None or {id(result) for result in found} <= {id(call[name]) for name in RESULTS if name in call}


@pytest.mark.parametrize("name", PLANNERS)
def test_a_call_whose_specs_were_checked_is_not_checked_again(device: RecordingDevice, name: str) -> None:
    plan = PLANNERS[name].plan
    plan.cache_clear()
    for _ in range(3):
        given_call(name).run()
    assert (plan.cache_info().misses, plan.cache_info().hits) == (1, 2)


ON_KERNELS = [name for name in CASES if name not in ("index_write", "index_queries", "write", "insert", "gather")]  # others are torch, too


@pytest.mark.parametrize("name", ON_KERNELS)
def test_tensors_on_another_kind_of_device(name: str) -> None:
    call = call_of(name)
    elsewhere = pytree.tree_map(lambda value: value.to("meta") if isinstance(value, Tensor) else value, dict(call))
    with pytest.raises(ValueError, match="got tensors on meta: supported are CUDA tensors, and CPU tensors inside"):
        call.run(**elsewhere)
