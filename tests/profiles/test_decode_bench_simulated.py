"""The bench and the real kernels together, on the simulated device: the calls that a GPU would time are the right calls."""

from __future__ import annotations

import benching
import pytest
import torch
from benching import bench, small_case

import cute_mla
from cute_mla.profiles import decode_bench
from cute_mla.profiles.decode_bench import DecodeBench
from cute_mla.profiles.measure import TIMED, measure_case
from cute_mla.profiles.rows import Case
from cute_mla.spec.arch import Arch
from cute_mla.spec.dense_decode import FP8, FP8_CACHE

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "case",
    [
        small_case(lengths=(130, 3, 0), s_q=2, h_q=4),
        small_case(lengths=(400,), s_q=1, h_q=128),
        small_case(lengths=(130, 3), s_q=2, h_q=4, operands=FP8_CACHE),
        small_case(lengths=(130, 3), s_q=2, h_q=4, operands=FP8),
    ],
    ids=["several requests", "one request, split", "e4m3 cache", "e4m3 cache and queries"],
)
def test_a_row_is_checked_and_timed_through_the_api(case: Case, arch: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_bench, "rotation_sets", lambda set_bytes, l2_bytes: 2)
    monkeypatch.setitem(benching.CALL_US, "estimate", 6000.0)  # one launch fills a graph, so that few are simulated
    with cute_mla.simulate(arch, sm_count=4) as device:
        record = measure_case(case, bench())
    assert (record["status"], record["reason"]) == (TIMED, "")
    assert (record["launches"], record["sets"]) == (2, 2)
    assert 0 < record["check"]["out_max_abs"] < (2e-2 if case.text.endswith(FP8) else 1e-3)
    assert device.instructions > 0


def test_a_plan_for_too_many_parts_is_not_what_the_bench_makes(arch: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan's parts, times the CTAs of one part, are the SMs of the device."""
    monkeypatch.setattr(decode_bench, "rotation_sets", lambda set_bytes, l2_bytes: 1)
    with cute_mla.simulate(arch, sm_count=8):
        subject = DecodeBench(small_case(lengths=(400,), s_q=1, h_q=128), CPU, 1)
    assert subject.metadata.shape == (4, 8)  # 128 heads are two row tiles
    assert subject.num_splits.tolist()[-1] > 1
    assert subject.workspace.nbytes >= 2 * 128 * 513 * 4
