"""dQ of sparse prefill on Blackwell, and P and dS, which the gradient of the latent is made of, against fp64."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace

import pytest
import torch

import cute_mla
from cute_mla.ops.key_lists import IndexedKeys
from cute_mla.ops.sparse_prefill_backward import launch_dq, launch_statistics
from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.simulator import SimulationError
from cute_mla.spec.arch import SM100
from cute_mla.testing.compare import same_bits
from tests.mutation.bench import launched_instead
from tests.mutation.planted import patterns as ptx
from tests.ops.sparse_prefill_backward.keys import drawn, key_of_slots, patterns
from tests.ops.sparse_prefill_backward.problems import Problem, keys_of, problem

VARIANTS = ((64, 576), (64, 512), (128, 576), (128, 512))  # heads, columns
SCHEDULES = (("lazy", 0), ("adversarial", 0), ("random", 1), ("random", 2), ("random", 3))


@dataclass(frozen=True)
class Scores:
    """Results of launches over all tokens. probs, dscores: [tokens, heads, slots], 0 where a slot names no row."""

    dq: torch.Tensor
    probs: torch.Tensor
    dscores: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all of them."""
        return self.dq, self.probs, self.dscores


def run(
    call: Problem, chunk_tokens: int = 1 << 20, schedule: tuple[str, int] = ("round_robin", 0), code: str = "ptx", sm_count: int = 4
) -> Scores:
    """Launch dQ over all tokens, by chunks."""
    saved = call.saved
    dq = torch.full_like(saved.q, math.nan)
    with cute_mla.simulate(SM100.name, sm_count=sm_count, schedule=schedule[0], seed=schedule[1], code=code) as device:
        statistics, _ = launch_statistics(device, saved, call.dout, call.dlse)
        parts = [launch_dq(device, saved, chunk, call.dout, statistics, dq) for chunk in saved.keys.chunks(chunk_tokens)]
    named = torch.from_numpy(key_of_slots(saved.keys) >= 0)[:, None]
    joined = (torch.cat(tensors).transpose(1, 2).flatten(2) for tensors in zip(*((p.probs, p.dscores) for p in parts), strict=True))
    probs, dscores = (scores[..., : saved.keys.topk].masked_fill(~named, 0.0) for scores in joined)
    return Scores(dq, probs, dscores)


def exact_scores(call: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Return P / scale and dS in fp64, [tokens, heads, slots], 0 where a slot names no row."""
    saved, keys = call.saved, torch.from_numpy(key_of_slots(call.saved.keys))
    rows = saved.kv.flatten(0, -2).double()[keys.clamp(min=0)]  # [tokens, slots, columns]
    q, dout, out = (tensor.flatten(0, 1).double() for tensor in (saved.q, call.dout, saved.out))
    lse = saved.lse.flatten(0, 1).double()
    merged = lse if saved.attn_sink is None else torch.logaddexp(lse, saved.attn_sink.double())
    delta = (out * dout).sum(dim=-1)
    if call.dlse is not None:
        delta = delta - call.dlse.flatten(0, 1).double() * (merged - lse).exp()
    absent = (keys < 0)[:, None] | lse.isinf()[..., None]
    probs = (saved.sm_scale * q @ rows.mT - merged[..., None]).exp()
    dscores = probs * (dout @ rows[..., :512].mT - delta[..., None])
    return (probs / saved.sm_scale).masked_fill(absent, 0.0), dscores.masked_fill(absent, 0.0)


def expect(call: Problem, scores: Scores) -> None:
    """Assert that all agree with fp64."""
    for actual, expected in zip(scores.tensors(), (call.expected[0], *exact_scores(call)), strict=True):
        wanted = expected.reshape(actual.shape).double()
        assert not actual.isnan().any()
        assert (actual.double() - wanted).norm() <= 4e-3 * wanted.norm() + 1e-4
        assert ((actual.double() - wanted).abs() <= 2**-7 * max(wanted.abs().flatten().tolist(), default=0.0) + 1e-5).all()


def expect_same(scores: Scores, others: Scores) -> None:
    for actual, usual in zip(scores.tensors(), others.tensors(), strict=True):
        assert same_bits(actual, usual)


@pytest.mark.parametrize(("heads", "columns"), [(64, 576), (1, 576), (65, 512), (128, 576), (12, 512)])
def test_dq(heads: int, columns: int) -> None:
    call = problem(heads, columns, keys_of(), sinks=heads != 64, dlse=heads == 12)
    expect(call, run(call))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("heads", "columns"), VARIANTS)
def test_schedules(heads: int, columns: int, schedule: tuple[str, int]) -> None:
    """No order of warps and copies changes a bit, nor does the number of SMs."""
    call = problem(heads, columns, keys_of(), sinks=True)
    scores = run(call, schedule=schedule)
    expect(call, scores)
    expect_same(scores, run(call, sm_count=1))


@pytest.mark.parametrize(("heads", "columns"), VARIANTS)
def test_machine_code(heads: int, columns: int) -> None:
    call = problem(heads, columns, keys_of(260, 300), dlse=True)
    expect(call, run(call, code="sass", sm_count=2))


@pytest.mark.parametrize(("heads", "chunk_tokens"), [(16, 1), (16, 4), (70, 4)])
def test_chunks_do_not_change_a_bit(heads: int, chunk_tokens: int) -> None:
    call = problem(heads, 576, keys_of(66, 40))
    scores = run(call, chunk_tokens)
    expect(call, scores)
    expect_same(scores, run(call))


@pytest.mark.parametrize("name", [name for name in patterns() if not name.startswith("no ")])
@pytest.mark.parametrize("heads", [3, 67])
def test_indices_of_every_kind(name: str, heads: int) -> None:
    keys = patterns()[name]
    if name == "two rounds":
        keys = IndexedKeys(keys.indices[..., :200] % 190, None, None, 200)
    call = problem(heads, 512, keys)
    expect(call, run(call, 7))


@pytest.mark.parametrize("topk", [1, 63, 64, 65])
@pytest.mark.parametrize("heads", [20, 80])
def test_short_lists(topk: int, heads: int) -> None:
    """A token with one tile, without tiles, and with tiles that name no row, in turn in one CTA."""
    lengths = torch.tensor([[topk, 0, 1], [topk + 1, -1, topk // 2]], dtype=torch.int32)
    call = problem(heads, 576, replace(keys_of(topk, 90), topk_length=lengths))
    expect(call, run(call, schedule=("lazy", 0), sm_count=1))


@pytest.mark.parametrize("heads", [8, 96])
def test_a_request_has_the_bits_that_it_has_alone(heads: int) -> None:
    call = problem(heads, 576, keys_of(65, 60))
    dq = run(call).dq
    for request in range(2):
        saved, own = call.saved, slice(request, request + 1)
        keys = replace(saved.keys, indices=saved.keys.indices[own])
        alone = replace(saved, q=saved.q[own], kv=saved.kv[own], out=saved.out[own], lse=saved.lse[own], keys=keys)
        assert same_bits(run(Problem(alone, call.dout[own], None, ())).dq, dq[own])


@pytest.mark.parametrize("heads", [33, 65])
def test_strided_operands(heads: int) -> None:
    """Rows of wide tensors have the same bits, by accesses of 16 bytes."""
    call = problem(heads, 576, keys_of(33, 50))
    saved = call.saved

    def wide(tensor: torch.Tensor) -> torch.Tensor:
        padded = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 24), math.nan, dtype=tensor.dtype)
        return padded[..., 8:-16].copy_(tensor)

    moved = replace(saved, q=wide(saved.q), kv=wide(saved.kv), out=wide(saved.out), lse=saved.lse.mT.contiguous().mT)
    expect_same(run(replace(call, saved=moved, dout=wide(call.dout))), run(call))


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
    for schedule in (("lazy", 0), *SCHEDULES):
        expect(call, run(call, schedule=schedule, sm_count=ctas))
