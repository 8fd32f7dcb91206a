"""Promises of every function: it allocates nothing when all results are given, reads no tensor on the host, and checks a call once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cute_mla.ops import dense_prefill, dense_prefill_backward, merge_states, sparse_prefill
from tests.ops.right_calls import CALLS
from tests.support.dispatch_modes import Allocations, NoReads
from tests.support.recording_device import RecordingDevice

RESULTS = ("out", "lse", "max_logits", "lse_indexer", "dq", "dk", "dv", "out_weights")
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


@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_read_by_the_host(device: RecordingDevice, call: str) -> None:
    function, make = CALLS[call]
    arguments = make()
    device.launches.clear()
    with NoReads():
        function(**arguments)
    assert device.launches


@pytest.mark.parametrize("call", [call for call in CALLS if call != "plan"])
def test_nothing_is_allocated_when_everything_is_given(device: RecordingDevice, call: str) -> None:
    function, make = CALLS[call]
    for arguments in (make(), make()):  # checked, then found among the checked calls
        with Allocations() as allocations:
            results = function(**arguments)
        assert allocations.seen == []
        found = results if isinstance(results, tuple) else (results,)
        assert results is None or {id(result) for result in found} <= {id(arguments[name]) for name in RESULTS if name in arguments}


@pytest.mark.parametrize("call", PLANNERS)
def test_a_call_whose_specs_were_checked_is_not_checked_again(device: RecordingDevice, call: str) -> None:
    function, make = CALLS[call]
    plan = PLANNERS[call].plan
    plan.cache_clear()
    for _ in range(3):
        function(**make())
    assert (plan.cache_info().misses, plan.cache_info().hits) == (1, 2)
