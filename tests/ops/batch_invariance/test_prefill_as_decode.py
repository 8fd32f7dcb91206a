"""Sparse prefill of a token and batch-invariant decode of it over the same rows of a 16-bit latent have the same bits, and one order."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_mla
from cute_mla.spec.arch import SM90, SM120, Arch
from cute_mla.testing.compare import same_bits
from cute_mla.testing.operations.sparse_prefill.case import SparsePrefillCase, SparsePrefillTensors, make_sparse_prefill_tensors
from cute_mla.testing.suites.cover import ramps

MORE_THAN_A_SPLIT = 8193  # indices of a token

TOKENS = SparsePrefillCase(s_q=7, s_kv=140, topk=130, lengths="edges", indices="mixed", sinks="infinite", sm_count=4)


def cases() -> Iterator[SparsePrefillCase]:
    """Yield calls of a few heads, of one tile of them and of two, with all kinds of scores; some indices name no row."""
    for h_q in (5, 64, 68, 128):
        yield replace(TOKENS, h_q=h_q)
        yield replace(TOKENS, h_q=h_q, softmax_scale=2.0, sinks="none", kv_layout="padded_rows")
    for values, scale in ramps():
        rows = 256 if values == "steps" else 192
        kind: dict[str, Any] = {"s_kv": rows, "topk": rows, "indices": "valid", "lengths": None, "values": values, "softmax_scale": scale}
        yield from (replace(TOKENS, s_q=2, h_q=h_q, **kind) for h_q in (64, 128))
    yield replace(TOKENS, s_q=2, h_q=128, s_kv=700, topk=600, indices="valid", lengths=(600, 333), values="rising")


def decoded(case: SparsePrefillCase, tensors: SparsePrefillTensors) -> tuple[Tensor, Tensor]:
    """Return out and lse of the tokens, each a request of its own, over rows that are pages of one."""
    results = cute_mla.flash_mla_with_kvcache(
        tensors.q[:, None],
        tensors.kv[:, None],
        None,
        None,
        512,
        *cute_mla.get_mla_metadata(),
        softmax_scale=case.scale,
        indices=tensors.indices,
        topk_length=tensors.topk_length,
        attn_sink=tensors.attn_sink,
        batch_invariant=True,
    )
    return results[0][:, 0], results[1][:, :, 0]


def check_decode_has_the_bits_of_prefill(arch: Arch, case: SparsePrefillCase) -> None:
    """Check it on other numbers of SMs, and with as many orders: one. A row without keys has an lse of inf either way."""
    tensors = make_sparse_prefill_tensors(case)
    with cute_mla.simulate(arch, case.sm_count), cute_mla.record() as calls:
        out, _, lse = cute_mla.flash_mla_sparse_fwd(
            tensors.q, tensors.kv, tensors.indices, case.scale, attn_sink=tensors.attn_sink, topk_length=tensors.topk_length
        )
    with cute_mla.simulate(arch, 7), cute_mla.record() as others:
        theirs = decoded(case, tensors)
    assert same_bits(out, theirs[0])
    assert same_bits(lse, theirs[1].contiguous())
    named = {cute_mla.fingerprint(op, arch.name, h_q=case.h_q, head_dim=576).order for op in ("sparse_prefill", "sparse_decode")}
    assert {call.order for call in (*calls, *others)} == named
    assert [call.op for call in (*calls, *others)] == ["sparse_prefill", "sparse_decode"]
    assert len(named) == 1


@pytest.mark.in_turn
@pytest.mark.parametrize("case", [pytest.param(case, id=case.id) for case in cases()])
def test_decode_has_the_bits_of_prefill(arch: Arch, case: SparsePrefillCase) -> None:
    check_decode_has_the_bits_of_prefill(arch, case)


@pytest.mark.parametrize("values", ["normal", "rising"])
@pytest.mark.parametrize("h_q", [5, 16, 17, 70])
def test_decode_has_the_bits_of_prefill_on_rtx_boards(h_q: int, values: Any) -> None:
    rising: dict[str, Any] = {"s_q": 2, "s_kv": 192, "topk": 192, "indices": "valid", "lengths": None} if values == "rising" else {}
    check_decode_has_the_bits_of_prefill(SM120, replace(TOKENS, h_q=h_q, values=values, **rising))


def test_heads_beside_others_have_the_bits_of_prefill_on_hopper() -> None:
    """On Hopper ranks with half of the heads agree with one that has all, in prefill and in decode."""
    whole = replace(TOKENS, h_q=128)
    tensors = make_sparse_prefill_tensors(whole)
    assert tensors.attn_sink is not None
    half = replace(tensors, q=tensors.q[:, 64:], attn_sink=tensors.attn_sink[64:])
    with cute_mla.simulate(SM90, 4):
        out, _, _ = cute_mla.flash_mla_sparse_fwd(
            tensors.q, tensors.kv, tensors.indices, whole.scale, attn_sink=tensors.attn_sink, topk_length=tensors.topk_length
        )
        assert same_bits(out[:, 64:].contiguous(), decoded(whole, half)[0])


@pytest.mark.parametrize("h_q", [3, 128])
def test_calls_with_room_for_more_keys_than_a_split_have_another_order(arch: Arch, h_q: int) -> None:
    """Since decode cuts their requests, and prefill does not."""
    case = replace(TOKENS, s_q=1, h_q=h_q, topk=MORE_THAN_A_SPLIT, lengths=(3,), indices="valid")
    with cute_mla.simulate(arch, 4), cute_mla.record() as calls:
        out, lse = decoded(case, make_sparse_prefill_tensors(case))
    assert not out.isnan().any()
    assert not torch.isinf(lse[lse != math.inf]).any()
    shape: dict[str, Any] = {"h_q": h_q, "head_dim": 576}
    cut = cute_mla.fingerprint("sparse_decode", arch.name, topk=MORE_THAN_A_SPLIT, **shape)
    assert [(call.order, call.code) for call in calls] == [(cut.order, cut.code)]
    assert "8192" in cut.terms
    assert cut.order != cute_mla.fingerprint("sparse_decode", arch.name, topk=MORE_THAN_A_SPLIT - 1, **shape).order
    assert "8192" not in cute_mla.fingerprint("sparse_prefill", arch.name, topk=MORE_THAN_A_SPLIT, **shape).terms
