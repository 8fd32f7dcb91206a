"""Every bug that tests/mutation/planted declares is noticed: by a finding, an error, or a wrong answer.

`make test` plants every third one in the first of the ways that it declares, but for kernels that others resemble; `make test-full` plants
all of them, in all ways. Every second kernel without a bug runs under one schedule, and all of them under all four.
"""

from __future__ import annotations

import pytest

from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.spec.arch import Arch
from cute_mla.testing.cases.base import BaseCase
from cute_mla.testing.runner import Schedule, schedules
from tests.mutation.bench import kernel_of, outcomes_of_cases, run_with, unnoticed
from tests.mutation.planted import SUITES
from tests.mutation.planting import Bug, Planted, alone, each, together

SEEDS = 6  # some missing waits show only when one role is slow at one moment
FIRST, OTHERS = slice(1), slice(1, None)  # of the ways in which a bug breaks a kernel
SLOW = {  # suites of `make test-full`: kernels with the roles and pipelines of another suite's, and 318 bugs
    *("dense_decode_sm90_fp8", "dense_decode_sm90_fp8_cache", "dense_decode_sm100_fp8", "dense_decode_sm100_fp8_cache"),
    *("dense_prefill_dkdv_sm100", "dense_prefill_dq_sm100", "sparse_decode_sm90_528", "sparse_decode_sm100_528"),
}
EVERY_BUG = [
    pytest.param(planted, suite.arch, id=f"{name}: {planted.bug.name}", marks=[pytest.mark.slow] if i % 3 or name in SLOW else [])
    for name, suite in SUITES.items()
    for i, planted in enumerate(suite.bugs)
]
EVERY_UNBROKEN = [
    pytest.param(
        *(case, suite.arch, schedule),
        id=f"{name}: {case_name}, {schedule}",
        marks=[pytest.mark.slow] if (i + j) % 8 or name in SLOW else [],
    )
    for name, suite in SUITES.items()
    for i, (case_name, case) in enumerate(suite.unbroken.items())
    for j, schedule in enumerate(schedules(4, 0))
]


@pytest.mark.parametrize(("planted", "arch"), EVERY_BUG)
def test_planted_bugs_are_noticed(planted: Planted, arch: Arch) -> None:
    assert unnoticed(outcomes_of_cases(planted, arch, schedules(4 * SEEDS, 0), FIRST)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SUITES)
def test_planted_bugs_are_noticed_at_every_site(name: str) -> None:
    suite = SUITES[name]
    found = {planted.bug.name: outcomes_of_cases(planted, suite.arch, schedules(4 * SEEDS, 0), OTHERS) for planted in suite.bugs}
    assert {bug: left for bug, outcomes in found.items() if (left := unnoticed(outcomes))} == {}


@pytest.mark.parametrize(("case", "arch", "schedule"), EVERY_UNBROKEN)
def test_the_unbroken_kernel_passes(case: BaseCase, arch: Arch, schedule: Schedule) -> None:
    """The runner, with a kernel replaced by itself, notices nothing."""
    ptx = "// as it was " + load_artifacts().ptx(kernel_of(case, arch))  # which begins with a comment
    (record,) = run_with(ptx, case, arch, (schedule,))
    assert record.passed, record.reason


@pytest.mark.parametrize("name", SUITES)
def test_every_bug_has_sites(name: str) -> None:
    """Not only the bugs that `make test` plants fit the kernels that are built."""
    suite = SUITES[name]
    for planted in suite.bugs:
        planted.bug.groups(load_artifacts().ptx(kernel_of(planted.cases[0], suite.arch)))


def test_bugs_of_a_suite_have_names_of_their_own() -> None:
    for suite in SUITES.values():
        names = [planted.bug.name for planted in suite.bugs]
        assert len(set(names)) == len(names)


def test_a_bug_breaks_the_sites_that_it_picks() -> None:
    text = "wait 0;\nwait 1; // wait 7;\nwait 2;\n"
    picked = {pick: [ptx for _, ptx in Bug("x", r"wait (\d);", r"skip \1;", pick).broken(text)] for pick in (each, together)}
    skipped = [text.replace(f"wait {number}", f"skip {number}") for number in range(3)]
    assert picked == {each: skipped, together: ["skip 0;\nskip 1; // wait 7;\nskip 2;\n"]}
    assert [ptx for _, ptx in Bug("x", r"wait (\d);", r"skip \1;", alone(0, -1)).broken(text)] == [skipped[0], skipped[2]]


@pytest.mark.parametrize("bug", [Bug("x", "nothing"), Bug("x", "wait", count=2), Bug("x", "wait", "", lambda ptx, sites: [[]])])
def test_a_bug_that_no_longer_fits_is_an_error(bug: Bug) -> None:
    with pytest.raises(AssertionError, match="out of date"):
        bug.broken("wait; wait; wait;")
