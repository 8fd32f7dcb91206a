"""The suites hold what `cute-mla verify` and `make quick` promise: every kernel, right calls, cases told apart by their ids."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.spec.arch import Arch
from cute_mla.testing.operations import operation
from cute_mla.testing.pairwise import pairs, pairwise_cover
from cute_mla.testing.suite import OPS, SUITES, suite, suite_kernels
from cute_mla.testing.suites.quick import kernels_of
from tests.support.recording_device import RecordingDevice


@pytest.mark.parametrize("op", OPS)
def test_quick_cases_launch_their_kernels_and_names_are_unique(op: str, arch: Arch) -> None:
    """`make quick` builds the kernels that kernels_of names and no others. Results have the shapes of the reference's."""
    for case in [entry.case for entry in suite("quick", op, simulated=True, arch=arch)]:
        calls = operation(case)
        tensors = calls.make_tensors(case, "cpu")
        with RecordingDevice(arch, case.sm_count or arch.sm_count).active() as device:
            results = calls.call(case, tensors, torch.zeros(calls.workspace_bytes(case, tensors), dtype=torch.uint8))
        assert [result.shape for result in results] == [wanted.shape for wanted in calls.reference(case, tensors)], case.id
        assert {launch.kernel for launch in device.launches} == kernels_of(case, arch), case.id
    cases = {name: [entry.case for entry in suite(name, op, simulated=True) if entry.mode != "skipped"] for name in SUITES}
    assert all(len({case.id for case in found}) == len(found) for found in cases.values())
    assert {*cases["quick"]} < {*cases["smoke"]}


def test_the_smoke_suite_reaches_every_kernel(arch: Arch) -> None:
    built = {name for name, entry in load_artifacts().manifest.kernels.items() if entry.arch == arch.name}
    assert {name for op in OPS for name in suite_kernels("smoke", op, arch)} == built


def test_unknown_suites_are_refused() -> None:
    with pytest.raises(ValueError, match="suite is 'huge'"):
        suite("huge", "dense_decode", simulated=True)


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 4), max_size=60))
def test_the_full_suite_draws_every_pair_of_factors(rows: list[tuple[int, ...]]) -> None:
    cover = pairwise_cover(rows)
    assert set().union(*(pairs(rows[index]) for index in cover)) == set().union(*map(pairs, rows))
