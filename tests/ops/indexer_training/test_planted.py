"""Bugs planted in head_sums and indexer_backward: each is a finding of the simulator, or shows in a result."""

from __future__ import annotations

import re

import pytest

from cute_mla.ops.key_lists import IndexedKeys
from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.simulator import SimulationError
from cute_mla.spec.arch import SM90
from tests.mutation.bench import launched_instead
from tests.ops.indexer_training.problems import Simulated, chosen, drawn_gradients, expect_gradients, expect_probs, expect_scores
from tests.ops.sparse_prefill_backward.keys import drawn

ORDERS = (Simulated(SM90.name, "adversarial"), Simulated(SM90.name, "lazy"))
SCORES, PROBS, BACKWARD = "head_sums_sm90_bf16_scores_d128", "head_sums_sm90_bf16_probs_d512", "indexer_backward_sm90_bf16"
BARRIER, WAIT = r"bar\.sync\s+0;", r"cp\.async\.wait_group\s+0;"
TRANSPOSED = r"ldmatrix\.sync\.aligned\.m8n8\.x4\.trans"

# Kernel, edit, and matches that are edited each by itself; () if all are at once.
BUGS = {
    "scores: no wait for keys": (SCORES, WAIT, "", (0,)),
    "scores: no barrier before keys are read": (SCORES, BARRIER, "", (0,)),
    "scores: half of the quad is left out": (SCORES, r"(shfl\.sync\.bfly\.b32\s+[^;]*), 2, 31, -1;", r"\1, 0, 31, -1;", ()),
    "scores: copies that nobody waits for": (SCORES, WAIT, "", (1,)),
    "scores: negative products count": (SCORES, r"setp\.le\.f32", "setp.eq.f32", ()),
    "probabilities: a box is read before it has come": (PROBS, r"cp\.async\.wait_group\s+6;", "cp.async.wait_group 7;", (0, 3, 7)),
    "probabilities: no barrier before a box is overwritten": (PROBS, BARRIER, "", (0, 1, 7)),
    "backward: no wait for keys": (BACKWARD, WAIT, "", (0,)),
    "backward: no barrier": (BACKWARD, BARRIER, "", (0, 1, 2)),
    "backward: G as it lies": (BACKWARD, TRANSPOSED, "ldmatrix.sync.aligned.m8n8.x4", (0, 40)),
    "backward: weights of an eighth of the keys": (BACKWARD, r"(shfl\.sync\.bfly\.b32\s+[^;]*), 16, 31, -1;", r"\1, 0, 31, -1;", ()),
    "backward: negative products have gradients": (BACKWARD, r"setp\.gt\.f32", "setp.ne.f32", ()),
    "backward: negative products add to weights": (BACKWARD, r"setp\.le\.f32", "setp.eq.f32", ()),
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


def judge(kernel: str) -> None:
    """Run a call of three tiles a token under both orders."""
    keys = IndexedKeys(drawn(1, 2, 150, 170), None, None, 170)
    call = chosen(keys, 20, 512 if kernel == PROBS else 128)
    for run in ORDERS:
        if kernel == PROBS:
            expect_probs(call, call.probs(run))
        elif kernel == SCORES:
            expect_scores(call, call.scores(run))
        else:
            dscores = drawn_gradients(call)
            expect_gradients(call.gradients(run, dscores), call.expected_gradients(dscores))


@pytest.mark.parametrize("kernel", [SCORES, PROBS, BACKWARD])
def test_the_kernel_itself_is_right(kernel: str) -> None:
    judge(kernel)


@pytest.mark.parametrize(("name", "site"), SITES)
def test_bug_is_noticed(name: str, site: int | None) -> None:
    artifacts, kernel = load_artifacts(), BUGS[name][0]
    entry = artifacts.manifest.kernels[kernel]
    with launched_instead(entry, broken(name, site, artifacts.ptx(entry))), pytest.raises((SimulationError, AssertionError)):
        judge(kernel)
