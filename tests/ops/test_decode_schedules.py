"""Both decode ops: what a schedule object was planned for, and what a call writes."""

from __future__ import annotations

from typing import Any

import pytest

import cute_mla
from cute_mla.testing.operations.sparse_decode.case import Pool
from tests.support.recording_device import RecordingDevice
from tests.support.right_calls import call_of, planned

OTHER_SHAPES: list[tuple[str, dict[str, Any], str]] = [
    *((kind, {"batch": 3}, "batch 3 after 2") for kind in ("dense", "sparse")),
    *((kind, {"s_q": 2}, "s_q 2 after 1") for kind in ("dense", "sparse")),
    *((kind, {"h_q": 32}, "h_q 32 after 64") for kind in ("dense", "sparse")),
    ("dense", {"h_kv": 2}, "h_kv 2 after 1"),
    ("dense", {"page_size": 128}, "page_size 128 after 64"),
    ("sparse", {"main": Pool(128, 64)}, "topk 64 after 128"),
    ("sparse", {"extra": Pool(64, 64, 2)}, "extra_topk 64 after 0"),
]


@pytest.mark.parametrize(("kind", "change", "said"), OTHER_SHAPES, ids=[f"{kind}-{next(iter(change))}" for kind, change, _ in OTHER_SHAPES])
def test_schedule_with_other_shapes_is_refused(device: RecordingDevice, kind: str, change: dict[str, Any], said: str) -> None:
    plan = planned(cute_mla.get_mla_metadata())
    call_of(kind).run(**plan)
    with pytest.raises(ValueError, match=f"planned for other shapes: .*{said}"):
        call_of(kind, **change).run(**plan)


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_outputs_and_workspace_are_declared_undefined(device: RecordingDevice, kind: str) -> None:
    workspace = call_of(kind, outputs="given")["workspace"]
    out, lse = call_of(kind).run(workspace=workspace)
    plan = device.launches[0].args
    written = (out, lse, workspace, plan["plan"], plan["num_splits"])
    assert {tensor.data_ptr() for tensor in written} == set(device.poisoned)
