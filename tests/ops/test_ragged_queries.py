"""Decode of requests with different numbers of query tokens: what a call promises beside its results, and its errors.

Results are those of cases with `tokens` in the suites of both ops; tests/kernels/test_split_plan_units.py has the plans.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import cute_mla
from cute_mla.testing.operations import operation
from cute_mla.testing.operations.dense_decode.case import DenseDecodeCase, DenseDecodeTensors, make_dense_decode_tensors
from cute_mla.testing.operations.sparse_decode.case import Pool, SparseDecodeCase
from tests.support.bench import Bench, expect, identical
from tests.support.recording_device import RecordingDevice
from tests.support.right_calls import RightCall, call_of

CASE = DenseDecodeCase(batch=4, tokens=(2, 0, 1, 3), lengths=(140, 70, 300, 2), h_q=16, causal=True, outputs="given", sm_count=12)
SPARSE = SparseDecodeCase(
    cache="latent", batch=4, tokens=(1, 0, 3), main=Pool(140, 130, 62, (130, 0, 3, 500)), outputs="given", sm_count=12
)
UNTOUCHED = 77.0


def offsets(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def decode(
    case: DenseDecodeCase, tensors: DenseDecodeTensors, cu_seqlens_q: Tensor, results: tuple[Tensor, Tensor], **options: Any
) -> None:
    """Decode with a plan of tensors, made anew, into given results."""
    total_q, h_q, _ = tensors.q.shape
    most = 4
    options = {"causal": case.causal, "max_seqlen_q": most, **options}
    plan = cute_mla.get_mla_metadata(tensors.cache_seqlens, most * h_q, 1, h_q, cu_seqlens_q=cu_seqlens_q, total_q=total_q)
    out, lse = results
    operands = (tensors.q, tensors.k_cache, tensors.block_table, tensors.cache_seqlens, 512)
    cute_mla.flash_mla_with_kvcache(*operands, *plan, out=out, lse=lse, cu_seqlens_q=cu_seqlens_q, **options)


def results_for(tensors: DenseDecodeTensors) -> tuple[Tensor, Tensor]:
    total_q, h_q, _ = tensors.q.shape
    return torch.full((total_q, h_q, 512), UNTOUCHED, dtype=tensors.q.dtype), torch.full((total_q, h_q), UNTOUCHED)


def test_a_call_that_is_repeated_with_fewer_tokens_and_requests(bench: Bench) -> None:
    """Repeat a call as a captured graph does: the same tensors, whose contents say how many tokens and requests there are."""
    tensors = make_dense_decode_tensors(CASE)
    cu_seqlens_q = offsets(*CASE.offsets)
    for tokens in ((2, 0, 1, 3), (1, 0, 1, 0), (0, 0, 0, 0), (0, 4, 1, 1)):
        used = sum(tokens)
        cu_seqlens_q.copy_(offsets(*replace(CASE, tokens=tokens).offsets))
        q = torch.cat([tensors.q[:used].nan_to_num(0.5), torch.full_like(tensors.q[used:], math.nan)])
        own = replace(tensors, q=q)
        out, lse = results_for(own)
        with cute_mla.simulate(bench.arch, CASE.sm_count):
            decode(CASE, own, cu_seqlens_q, (out, lse))
        assert all((result[used:] == UNTOUCHED).all() for result in (out, lse))
        part = replace(CASE, tokens=tokens, outputs="allocated")
        expect(part, replace(own, q=q[:used], cu_seqlens_q=cu_seqlens_q, output_buffers={}), (out[:used], lse[:used]))


def test_a_batch_invariant_request_has_the_bits_that_it_has_alone(bench: Bench) -> None:
    case = replace(CASE, batch_invariant=True)
    tensors = make_dense_decode_tensors(case)
    with cute_mla.simulate(bench.arch, 12):
        batch = results_for(tensors)
        decode(case, tensors, offsets(*case.offsets), batch, batch_invariant=True)
    for request, (first, tokens) in enumerate(zip(case.offsets, case.tokens or (), strict=False)):
        if not tokens:
            continue
        one = slice(request, request + 1)
        q, table, keys = tensors.q[first : first + tokens], tensors.block_table[one], tensors.cache_seqlens[one].contiguous()
        own = replace(tensors, q=q, block_table=table, cache_seqlens=keys)
        with cute_mla.simulate(bench.arch, 5):
            alone = results_for(own)
            decode(case, own, offsets(0, tokens), alone, batch_invariant=True)
        assert identical(alone, tuple(result[first : first + tokens] for result in batch))


@pytest.mark.parametrize("values", [(0, 900, 3, 9, 9), (-7, 1 << 30, -1, 2, 9), (9, 7, 5, 3, 1), (0, 1, 2, 3, 1 << 30)], ids=str)
@pytest.mark.parametrize("changed_after_plan", [False, True])
def test_offsets_that_are_none_keep_to_the_operands(bench: Bench, values: tuple[int, ...], changed_after_plan: bool) -> None:
    """The results are undefined, but the call ends, and accesses are in bounds."""
    tensors = make_dense_decode_tensors(CASE)
    total_q = len(tensors.q)
    wrong, right = offsets(*values), offsets(*CASE.offsets)
    with cute_mla.simulate(bench.arch, CASE.sm_count, on_finding="collect") as device:
        plan = cute_mla.get_mla_metadata(
            tensors.cache_seqlens, 4 * 16, 1, 16, cu_seqlens_q=right if changed_after_plan else wrong, total_q=total_q
        )
        results = results_for(tensors)
        operands = (tensors.q, tensors.k_cache, tensors.block_table, tensors.cache_seqlens, 512)
        cute_mla.flash_mla_with_kvcache(*operands, *plan, causal=True, out=results[0], lse=results[1], cu_seqlens_q=wrong, max_seqlen_q=4)
    assert {finding.kind for finding in device.findings} <= {"race"}  # requests that overlap


def test_a_cache_without_pages(bench: Bench) -> None:
    tensors = replace(make_dense_decode_tensors(CASE), k_cache=torch.empty(0, 64, 1, 576, dtype=torch.bfloat16))
    out, lse = results_for(tensors)
    with cute_mla.simulate(bench.arch, CASE.sm_count):
        decode(CASE, tensors, offsets(0, 1, 1, 3, 4), (out, lse))
    assert all((result[:4] == value).all() for result, value in ((out, 0), (lse, math.inf)))
    assert all((result[4:] == UNTOUCHED).all() for result in (out, lse))


@pytest.mark.parametrize("metadata", ["object", "tensors"])
@pytest.mark.parametrize("case", [replace(CASE, outputs="allocated"), replace(SPARSE, outputs="allocated")], ids=["dense", "sparse"])
def test_ops_of_torch(bench: Bench, case: Any, metadata: str) -> None:
    """The ops have the fakes' shapes, and a compiled call has the bits of an eager one."""
    case = replace(case, metadata=metadata)
    tensors = operation(case).make_tensors(case, "cpu")

    def call() -> Any:
        return cute_mla.flash_mla_with_kvcache(**RightCall(case, tensors))

    with cute_mla.simulate(bench.arch, case.sm_count):
        eager = call()
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)()
        assert identical(tuple(eager), tuple(compiled))
        arguments = RightCall(case, tensors).items()
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes: dict[str, Any] = {key: mode.from_tensor(value) if isinstance(value, Tensor) else value for key, value in arguments}
            out, lse = cute_mla.flash_mla_with_kvcache(**fakes)
    assert (out.shape, lse.shape) == (eager[0].shape, eager[1].shape)


WRONG: list[tuple[str, str, Callable[[dict[str, Any]], Any], str]] = [
    ("offsets of another batch", "cu_seqlens_q", lambda call: offsets(0, 1, 2), r"cu_seqlens_q has shape \[3\]; supported: \[5\]"),
    ("offsets of int64", "cu_seqlens_q", lambda call: call["cu_seqlens_q"].long(), "has dtype torch.int64; supported: torch.int32"),
    ("offsets strided", "cu_seqlens_q", lambda call: offsets(*range(10))[::2], "cu_seqlens_q has shape .*; supported: a contiguous tensor"),
    ("offsets a list", "cu_seqlens_q", lambda call: [0, 1, 2, 3, 4], r"cu_seqlens_q is \[0, 1, 2, 3, 4\]; supported: a torch tensor"),
    ("no offsets", "cu_seqlens_q", lambda call: None, "cu_seqlens_q is None beside max_seqlen_q; supported: both, or neither"),
    ("no bound", "max_seqlen_q", lambda call: None, "max_seqlen_q is None beside cu_seqlens_q; supported: both, or neither"),
    ("a bound of 0", "max_seqlen_q", lambda call: 0, "max_seqlen_q is 0; supported: an integer, 1 to"),
    ("a bound that is a flag", "max_seqlen_q", lambda call: True, "max_seqlen_q is True; supported: an integer"),
    ("q of rank 4", "q", lambda call: call["q"][None], r"\[1, 9, 16, 576\]; supported .* cu_seqlens_q: \[total_q, h_q, columns\]"),
    ("out of rank 4", "out", lambda call: call["out"][None], r"out has shape \[1, 9, 16, 512\]; supported: \[9, 16, 512\]"),
    ("lse of heads first", "lse", lambda call: call["lse"].T.contiguous(), r"lse has shape \[16, 9\]; supported: \[9, 16\]"),
    ("a shorter plan", "tile_scheduler_metadata", lambda call: call["tile_scheduler_metadata"][:-1], "metadata has .* rows; supported"),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "make", "said"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_errors(device: RecordingDevice, argument: str, make: Callable[[dict[str, Any]], Any], said: str) -> None:
    call = call_of(CASE, metadata="tensors")
    device.launches.clear()
    with pytest.raises(ValueError, match=said):
        call.run(**{argument: make(call)})
    assert device.launches == []


def test_errors_of_sparse_calls(device: RecordingDevice) -> None:
    call = call_of(SPARSE)
    for argument, value, said in (
        ("indices", call["indices"][:, None], r"indices has shape \[7, 1, 130\]; supported: \[7, topk\]"),
        ("topk_length", call["topk_length"][:3], r"topk_length has shape \[3\]; supported: \[7\]"),
        ("cu_seqlens_q", torch.zeros(0, dtype=torch.int32), r"cu_seqlens_q has shape \[0\]; supported: \[batch \+ 1\]"),
    ):
        with pytest.raises(ValueError, match=said):
            call.run(**{argument: value})
    assert device.launches == []


def test_errors_of_plans(device: RecordingDevice) -> None:
    lengths = torch.zeros(2, dtype=torch.int32)
    for options, said in (
        ({"cu_seqlens_q": offsets(0, 1, 2)}, "total_q is None beside cu_seqlens_q; supported: both, or neither"),
        ({"total_q": 2}, "cu_seqlens_q is None beside total_q; supported: both, or neither"),
        ({"cu_seqlens_q": offsets(0, 1), "total_q": 2}, r"cu_seqlens_q has shape \[2\]; supported: \[3\]"),
        ({"cu_seqlens_q": offsets(0, 1, 2), "total_q": -1}, "total_q is -1; supported: an integer, 0 to"),
    ):
        with pytest.raises(ValueError, match=said):
            cute_mla.get_mla_metadata(lengths, 32, 1, 16, **options)
    with pytest.raises(ValueError, match="num_heads_q is None with cu_seqlens_q; supported: 1 to 128"):
        cute_mla.get_mla_metadata(lengths, 32, 1, cu_seqlens_q=offsets(0, 1, 2), total_q=2)
    call = call_of(CASE, metadata="object")
    call.run()
    with pytest.raises(ValueError, match="planned for other shapes: s_q 5 after 3"):
        call.run(max_seqlen_q=5, workspace=None)
    assert len(device.launches) == 3
