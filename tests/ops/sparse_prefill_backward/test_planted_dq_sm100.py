"""Bugs planted in dQ of sparse prefill on Blackwell: each is a finding of the simulator, or shows in a gradient.

P and dS, which dQ's kernel stores, are what dkv is made of.
"""

from __future__ import annotations

import re

import pytest
import torch

from cute_mla.ops.key_lists import IndexedKeys
from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.simulator import SimulationError
from cute_mla.spec.arch import SM100
from tests.mutation.bench import launched_instead
from tests.mutation.planted import patterns as ptx
from tests.ops.sparse_prefill_backward.keys import drawn
from tests.ops.sparse_prefill_backward.problems import Problem, problem

SCHEDULES = (("lazy", 0), ("adversarial", 0), ("random", 1), ("random", 2), ("random", 3))

# Kinds of bugs, and of each the matches, without a pair and with one, that go unnoticed because nothing changes. Of a tile without keys,
# dprobs_ready comes after scores_ready and kv_free; nobody reads tensor memory after the last fences; the warps that store the first Q
# have waited for nothing; the loads of the first part of S are told of with those of the second; and a stage of keys is free when those
# for dP are, for whose time alone the copies of a pair wait again.
BUGS = {
    "no wait": (ptx.WAITS, ptx.NO_WAIT, {4, 5, 6}, {4, 5, 11}),
    "no wait for copies": (rf"{ptx.COPY_WAITS}|{ptx.COPY_WAITS_BUT_ONE}", "", set(), set()),
    "no arrival": (ptx.CLUSTER_ARRIVALS, "", set(), set()),
    "no proxy fence": (ptx.PROXY_FENCES, "", set(), set()),
    "no fence before a signal": (ptx.FENCES_BEFORE, "", {5}, {0, 6}),
    "no fence after a wait": (ptx.FENCES_AFTER, "", {2, 9}, {3, 10}),
    "no commit": (ptx.COMMITS, "", set(), set()),
    "no wait for stores": (ptx.STORE_WAITS, "", set(), set()),
    "no barrier of two warps": (r"bar\.sync \s*%r\d+, 64;", "", set(), set()),
}
HEADS = (64, 128)


@pytest.fixture(scope="module")
def walked() -> dict[int, Problem]:
    """Return calls, by heads, whose tokens one CTA or pair takes in turn: of none, one and many tiles, some or all without a row."""
    indices = drawn(1, 6, 250, 250)
    indices[0, 1, 64:128], indices[0, 4, :64], indices[0, 3] = -1, -1, -1
    lengths = torch.tensor([[130, 200, 0, 70, 250, 100]], dtype=torch.int32)
    return {heads: problem(heads, 576, IndexedKeys(indices, lengths, None, 250)) for heads in HEADS}


@pytest.mark.slow
@pytest.mark.parametrize("heads", HEADS)
def test_nothing_is_noticed_without_a_bug(heads: int, walked: dict[int, Problem]) -> None:
    judge(walked[heads], heads // HEADS[0])


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_noticed(name: str, heads: int, walked: dict[int, Problem]) -> None:
    artifacts, call, ctas = load_artifacts(), walked[heads], heads // HEADS[0]
    entry = artifacts.manifest.kernels[f"sparse_prefill_dq_sm100_bf16_d576_cluster{ctas}"]
    text = artifacts.ptx(entry)
    pattern, replacement, *harmless = BUGS[name]
    found = list(re.finditer(pattern, text))
    assert found or (name, ctas) == ("no barrier of two warps", 1), f"{pattern!r} does not occur: the planted bug is out of date"
    for i, match in enumerate(found):
        broken = text[: match.start()] + replacement + text[match.end() :]
        if i not in harmless[ctas - 1]:
            with launched_instead(entry, broken), pytest.raises((SimulationError, AssertionError)):
                judge(call, ctas)


def judge(call: Problem, ctas: int) -> None:
    """Run a call under every schedule, on so many SMs."""
    for schedule in SCHEDULES:
        call.expect(call.run(SM100, schedule=schedule, sm_count=ctas))
