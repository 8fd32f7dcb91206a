"""Bugs planted in the kernels of the backward of sparse prefill: each is a finding of the simulator, or shows in a gradient."""

from __future__ import annotations

import re

import pytest

from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.simulator import SimulationError
from cute_mla.spec.arch import SM90, SM100
from tests.mutation.bench import launched_instead
from tests.ops.sparse_prefill_backward.keys import patterns
from tests.ops.sparse_prefill_backward.problems import Problem, keys_of, problem
from tests.ops.sparse_prefill_backward.rows import call_of, expect, run

SCHEDULES = (("adversarial", 0), ("lazy", 0))
DQ = "sparse_prefill_dq_sm90_bf16_d576_cluster1"
FILL, SUMS, STATISTICS = "key_lists_sm90_fill", "row_sums_sm90_bf16_d576", "row_statistics_sm90_bf16"
ROWS, ROWS_SM100 = (f"sparse_prefill_dkv_{arch}_bf16_d576_heads64" for arch in ("sm90", "sm100"))
ROW_ARCHS = {ROWS: SM90, ROWS_SM100: SM100}  # kernels that are judged alone
FENCES, WAITS = r"fence\.proxy\.async\.shared::cta;", r"wgmma\.wait_group\.sync\.aligned\s+\d+;"
NO_WAIT = r"setp.eq.b32 \1, 0, 0;"
PHASE = r"mbarrier\.try_wait\S*\s+(\w+)\s*,[^;]*;"

# Kernel, edit, and matches that are edited each by itself; () if all are at once.
BUGS = {
    "no fence": (DQ, FENCES, "", (0, 1, 3, 4, 5)),  # of RoPE columns, which S takes last, the later stages' fences tell
    "no wait for products": (DQ, WAITS, "", tuple(range(6))),
    "dQ of the RoPE columns before all of dS": (DQ, PHASE, NO_WAIT, (24,)),
    "rows: no wait for products": (ROWS, WAITS, "", (0, 1)),
    "rows: no wait for a phase": (ROWS, PHASE, NO_WAIT, tuple(range(9))),
    "rows of Blackwell: no wait for loads": (ROWS_SM100, r"tcgen05\.wait::ld\.sync\.aligned;", "", (0, 1, 2)),
    "rows of Blackwell: no wait for a phase": (ROWS_SM100, PHASE, NO_WAIT, tuple(range(14))),
    "lists: no barrier": (FILL, r"bar\.sync\s+0;", "", (1, 2)),
    "lists: a duplicate goes unnoticed": (FILL, r"setp\.(eq|ne)\.b32(\s+%p\d+, %r\d+), 0;(?=\s*@%p\d+ bra)", r"setp.\1.b32\2, 77;", ()),
    "sums: an entry twice": (SUMS, r"(shfl\.sync\.idx\.b32\s+[^;]*), 1, 31, -1;", r"\1, 0, 31, -1;", ()),
    "delta without a lane": (STATISTICS, r"(shfl\.sync\.bfly\.b32\s+[^;]*), 8, 31, -1;", r"\1, 0, 31, -1;", ()),
}
SITES = [(name, site) for name, bug in BUGS.items() for site in bug[3] or (None,)]


def broken(name: str, site: int | None, ptx: str) -> str:
    """Return the PTX of a kernel with a bug."""
    kernel, pattern, replacement, _ = BUGS[name]
    found = list(re.finditer(pattern, ptx))
    assert found, f"{pattern!r} does not occur in {kernel}: the planted bug is out of date"
    if site is None:
        return re.sub(pattern, replacement, ptx)
    match = found[site]
    return ptx[: match.start()] + match.expand(replacement) + ptx[match.end() :]


@pytest.fixture(scope="module")
def calls() -> dict[bool, Problem]:
    """Return two calls: with duplicates in a token, and without."""
    return {True: problem(3, 576, patterns()["duplicates"]), False: problem(64, 576, keys_of(), sinks=True)}


def judge(kernel: str, call: Problem) -> None:
    """Run a call under every schedule, or a kernel of rows alone, over tokens of more tiles than shared memory has stages."""
    for schedule in SCHEDULES:
        if kernel in ROW_ARCHS:
            expect(*run(ROW_ARCHS[kernel], call_of(450), (0, 6), (64, 576), schedule, sm_count=1))
        else:
            call.expect(call.run(SM90, schedule=schedule))


@pytest.mark.parametrize("kernel", [DQ, *ROW_ARCHS])
def test_nothing_is_noticed_without_a_bug(kernel: str, calls: dict[bool, Problem]) -> None:
    judge(kernel, calls[False])


@pytest.mark.parametrize(("name", "site"), SITES)
def test_bug_is_noticed(name: str, site: int | None, calls: dict[bool, Problem]) -> None:
    artifacts, kernel = load_artifacts(), BUGS[name][0]
    entry, call = artifacts.manifest.kernels[kernel], calls[kernel == FILL]
    with launched_instead(entry, broken(name, site, artifacts.ptx(entry))), pytest.raises((SimulationError, AssertionError)):
        judge(kernel, call)
