"""Decode over keys that are dealt to processes, through gloo, against the reference and the kernel over all keys in one place."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from cute_mla.parallel import ContextParallel, ContextShard
from cute_mla.runtime.current import simulate
from cute_mla.testing.compare import DENSE_DECODE_OUT, FP8_DENSE_OUT, LSE, SPARSE_DECODE_OUT, compare, same_bits
from tests.parallel.dealing import SPARE_TOKENS, DealtCall, Result, expected, rank_main, run, undealt

# Requests with keys on all ranks, on the first alone, on none, and around the ends of blocks; with two tokens, the first of the second
# request sees nothing.
SPECULATIVE = DealtCall((150, 1, 0, 65), s_q=2, interleave=1, causal=True)
BLOCKS = DealtCall((150, 64, 3, 0), s_q=3, interleave=64, batch_invariant=True, empty_lse=-math.inf)
SPARSE = DealtCall((200, 2, 0), s_q=2, interleave=16, topk=90, sinks=True)

CALLS = {
    ("sm90", 2): (SPECULATIVE, BLOCKS, replace(SPARSE, fp8=True), replace(SPECULATIVE, s_q=3, tokens=(3, 2, 0, 1))),
    ("sm100", 3): (
        replace(SPECULATIVE, interleave=4),
        replace(BLOCKS, causal=True, s_q=2),
        SPARSE,
        DealtCall((130, 0, 7), interleave=8, fp8=True),
    ),
}


class Ran(NamedTuple):
    """A call of all ranks: what each got, and the bytes that each received."""

    call: DealtCall
    arch: str
    of_ranks: list[tuple[Result, list[int]]]

    @property
    def world(self) -> int:
        return len(self.of_ranks)

    def result(self) -> Result:
        """Return the result of all heads."""
        outs, lses = zip(*(results for results, _ in self.of_ranks), strict=True)
        return torch.cat(outs, dim=2), torch.cat(lses, dim=1)


@pytest.fixture(scope="module", params=CALLS, ids=lambda key: f"{key[0]} on {key[1]}")
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Ran]:
    """Return every call, the first twice, by as many processes as it says."""
    (arch, world), calls = request.param, CALLS[request.param]
    folder: Path = tmp_path_factory.mktemp("ranks")
    spawn(rank_main, (world, arch, list(calls), folder), nprocs=world)
    of_ranks = [torch.load(folder / f"rank{rank}.pt") for rank in range(world)]
    return [Ran(call, arch, [of_rank[number] for of_rank in of_ranks]) for number, call in enumerate((calls[0], *calls))]


def check(result: Result, wanted: tuple[Tensor, Tensor], call: DealtCall) -> None:
    """Results at the tolerance of the op."""
    dense = FP8_DENSE_OUT if call.fp8 else DENSE_DECODE_OUT
    for name, tolerance, one, other in zip(("out", "lse"), (SPARSE_DECODE_OUT if call.topk else dense, LSE), result, wanted, strict=True):
        comparison = compare(name, one, other, tolerance)
        assert comparison.passed, f"{call}: {comparison.reason}"


def test_agrees_with_the_reference_over_all_keys(ran: list[Ran]) -> None:
    for one in ran:
        check(one.result(), expected(one.call, one.world), one.call)


def test_agrees_with_the_kernel_over_all_keys(ran: list[Ran]) -> None:
    for one in ran[1:]:
        if not one.call.topk and not one.call.fp8 and not one.call.tokens:
            out, lse = undealt(one.call, one.world, one.arch)
            check(one.result(), (out.float(), lse), one.call)


def test_the_same_bits_whichever_rank_is_ready_first(ran: list[Ran]) -> None:
    first, again = ran[:2]
    assert first.call == again.call
    assert all(map(same_bits, first.result(), again.result()))


def test_what_goes_over_the_wire(ran: list[Ran]) -> None:
    """Queries and states of a rank's own heads from every other rank, each once, as the docstring counts them."""
    for one in ran:
        tokens = sum(one.call.tokens) + SPARE_TOKENS if one.call.tokens else len(one.call.lengths) * one.call.s_q
        rows = (one.world - 1) * tokens * one.call.heads
        wanted = [rows * 576 * (1 if one.call.fp8 and not one.call.topk else 2), rows * 1040]
        for _, received in one.of_ranks:
            assert received == wanted, one.call


class Alone(ContextParallel):
    """The only rank, without a group."""

    def __init__(self, interleave: int = 1) -> None:
        self.group, self.shard = None, ContextShard(0, 1, interleave)


def test_one_rank_needs_no_communication() -> None:
    for call in (SPECULATIVE, replace(SPARSE, sinks=False), replace(SPARSE, fp8=True, kv_format="v41")):
        with simulate("sm90", 4):
            check(run(call, Alone(call.interleave)), expected(call, 1), call)


def test_bad_arguments() -> None:
    context, table = Alone(), torch.zeros(2, 3, dtype=torch.int32)
    lengths = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match="s_q is 0; supported: an integer, 1 to 16777216"):
        context.plan(lengths, table, 0)
    with pytest.raises(ValueError, match="causal is 1; supported: True and False"):
        context.plan(lengths, table, 2, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"block_table has dtype torch.int64"):
        context.plan(lengths, table.long())
    with pytest.raises(ValueError, match=r"cache_seqlens has dtype torch.int64"):
        context.plan(lengths.long(), table)
    with pytest.raises(ValueError, match=r"block_table has shape \[2, 3\]; supported: \[3, pages per request\]"):
        context.plan(torch.zeros(3, dtype=torch.int32), table)
    with pytest.raises(ValueError, match=r"cu_seqlens_q is None, total_q 3, s_q 1; supported: both with s_q 1, or neither"):
        context.plan(lengths, table, total_q=3)
    with pytest.raises(ValueError, match=r"cu_seqlens_q has shape \[2\]; supported: \[3\]"):
        context.plan(lengths, table, cu_seqlens_q=lengths, total_q=3)
    q, cache = torch.zeros(2, 2, 3, 576, dtype=torch.bfloat16), torch.zeros(4, 64, 1, 576, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"q has shape \[2, 2, 3, 576\]; supported with these requests: \[2, 1, h_q, d_qk\]"):
        context.decode(q, cache, context.plan(lengths, table))
    with pytest.raises(ValueError, match="requests is None; supported: a ShardedRequests"):
        context.decode(q, cache, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="selected is None; supported: a LocalIndices"):
        context.sparse_decode(q, cache, None)  # type: ignore[arg-type]
    selected = context.shard.local_indices(torch.zeros(2, 1, 5, dtype=torch.int32), table, 64)
    with pytest.raises(ValueError, match=r"supported with these indices: \[2, 1, h_q, d_qk\]"):
        context.sparse_decode(q, cache, selected)
    with pytest.raises(ValueError, match=r"attn_sink has shape \[4\]; supported: \[3\]"):
        context.sparse_decode(q[:, :1], cache, selected, attn_sink=torch.zeros(4))
