"""flash_mla_sparse_bwd, and gradients of flash_mla_sparse_fwd by torch's autograd."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_mla
from cute_mla import reference
from cute_mla.spec.arch import Arch
from cute_mla.testing.compare import same_bits

SCALE = 0.04


def operands(form: str) -> dict[str, Any]:
    """Return the forward call's operands. form: "single", "batched" or "packed"."""
    draw = torch.Generator().manual_seed(11)
    leading = (3,) if form == "single" else (2, 3)
    kv = (70,) if form != "batched" else (2, 70)
    more: dict[str, Any] = {"kv_offsets": torch.tensor([0, 40, 70], dtype=torch.int32)} if form == "packed" else {}
    return {
        "q": torch.randn(*leading, 5, 576, generator=draw).bfloat16(),
        "kv": torch.randn(*kv, 1, 576, generator=draw).bfloat16(),
        "indices": torch.randint(-2, 70, (*leading, 1, 66), generator=draw, dtype=torch.int32),
        "sm_scale": SCALE,
        "attn_sink": torch.linspace(-1, 1, 5),
        "topk_length": torch.randint(0, 67, leading, generator=draw, dtype=torch.int32),
        **more,
    }


def expected(call: dict[str, Any], lse: Tensor, dout: Tensor, dlse: Tensor | None = None) -> tuple[Tensor, ...]:
    """Return dq, dkv and d_sink by the reference."""
    rest = (call["sm_scale"], call["attn_sink"], call["topk_length"], call.get("kv_offsets"))
    return reference.sparse_prefill_backward(dout, (call["q"], call["kv"], call["indices"]), lse, *rest, dlse=dlse)


def close(actual: Tensor, wanted: Tensor) -> None:
    assert actual.shape == wanted.shape
    assert (actual.double() - wanted.double()).norm() <= 5e-3 * wanted.double().norm()


def expect(actual: tuple[Tensor, ...], call: dict[str, Any], rows: tuple[Tensor, Tensor, Tensor], dlse: Tensor | None = None) -> None:
    """Assert that dq, dkv and d_sink are right. rows: out, lse and dout; d_sink follows from out as it is stored, whose rounding shows."""
    out, lse, dout = rows
    for gradient, wanted in zip(actual[:2], expected(call, lse, dout, dlse)[:2], strict=True):
        close(gradient, wanted)
    sink, lse = call["attn_sink"].double(), lse.double()
    terms = (sink - torch.logaddexp(lse, sink)).exp() * (out.double() * dout.double()).sum(dim=-1)
    torch.testing.assert_close(actual[2].double(), -terms.masked_fill(lse.isinf(), 0.0).flatten(0, -2).sum(dim=0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["single", "batched", "packed"])
def test_autograd(arch: Arch, form: str) -> None:
    """Gradients of out and of lse, together and alone, reach q, kv and the sinks, in their dtypes."""
    call = operands(form)
    leaves = [call[name].requires_grad_() for name in ("q", "kv", "attn_sink")]
    with cute_mla.simulate(arch.name, sm_count=4):
        out, _, lse = cute_mla.flash_mla_sparse_fwd(**call)
        seen = ~lse.isinf()
        dout, dlse = torch.randn(out.shape).bfloat16(), torch.randn(lse.shape).masked_fill(~seen, 0.0)
        both = torch.autograd.grad((out, lse), leaves, (dout, dlse), retain_graph=True)
        of_out = torch.autograd.grad(out.float().sum(), leaves, retain_graph=True)
        of_lse = torch.autograd.grad(lse[seen].sum(), leaves[:2])
    call = {name: value.detach() if isinstance(value, Tensor) else value for name, value in call.items()}
    out, lse = out.detach(), lse.detach()
    expect(both, call, (out, lse, dout), dlse)
    expect(of_out, call, (out, lse, torch.ones_like(out)))
    for actual, wanted in zip(of_lse, expected(call, lse.detach(), torch.zeros_like(out), seen.float()), strict=False):
        close(actual, wanted)
    assert [gradient.dtype for gradient in both] == [torch.bfloat16, torch.bfloat16, torch.float32]


def test_results_of_the_caller_and_small_workspaces(arch: Arch) -> None:
    """A workspace for one token, results of the caller and fp32 change no bit but those of fp32; accumulation adds."""
    call = operands("batched")
    with cute_mla.simulate(arch.name, sm_count=4):
        out, _, lse = cute_mla.flash_mla_sparse_fwd(**call)
        backward = {**call, "out": out, "lse": lse, "dout": torch.randn(out.shape).bfloat16()}
        dq, dkv, d_sink = cute_mla.flash_mla_sparse_bwd(**backward)
        given: dict[str, Any] = {"dq": torch.full((2, 3, 5, 584), math.nan).bfloat16()[..., :576], "dkv": torch.full(dkv.shape, math.nan)}
        given["d_sink"] = torch.full((5,), math.nan)
        results = cute_mla.flash_mla_sparse_bwd(**backward, **given, max_workspace=0)
        assert all(mine is its for mine, its in zip(given.values(), results, strict=True))
        first = given["dkv"].clone()
        cute_mla.flash_mla_sparse_bwd(**backward, **given, dkv_accumulate=True)
    assert same_bits(given["dq"], dq)
    assert same_bits(first.bfloat16(), dkv)
    assert same_bits(given["dkv"], first + first)
    torch.testing.assert_close(given["d_sink"], d_sink)


@pytest.mark.parametrize("form", ["single", "batched", "packed"])
def test_plans_do_not_change_a_bit(arch: Arch, form: str) -> None:
    """Plans have one chunk or several; the plan's chunks are those of the call. d_sink too is the same."""
    call = operands(form)
    tables = {name: call.get(name) for name in ("topk_length", "kv_offsets")}
    with cute_mla.simulate(arch.name, sm_count=4) as device:
        out, _, lse = cute_mla.flash_mla_sparse_fwd(**call)
        backward = {**call, "out": out, "lse": lse, "dout": torch.randn(out.shape).bfloat16()}
        usual = cute_mla.flash_mla_sparse_bwd(**backward)
        for chunk in (2, 100):
            plan = cute_mla.plan_sparse_backward(call["indices"], 70, **tables, chunk_tokens=chunk)
            before = device.launches
            assert all(map(same_bits, cute_mla.flash_mla_sparse_bwd(**backward, key_plan=plan), usual))
            assert device.launches - before == 1 + 3 * len(plan[0])  # statistics; dq, rows and sums of each chunk


def test_a_plan_of_other_sizes_is_refused(arch: Arch) -> None:
    call = operands("single")
    rows: dict[str, Any] = {"out": torch.zeros(3, 5, 512).bfloat16(), "lse": torch.zeros(3, 5), "dout": torch.zeros(3, 5, 512).bfloat16()}
    with cute_mla.simulate(arch.name, sm_count=4):
        plan = cute_mla.plan_sparse_backward(call["indices"], 69)
        with pytest.raises(ValueError, match=r"key_plan.row_starts has shape \[1, 70\]; supported: \[chunks, 71\]"):
            cute_mla.flash_mla_sparse_bwd(**call, **rows, key_plan=plan)


def test_the_order_of_d_sink_is_that_of_neighbours(arch: Arch) -> None:
    """Its bits are those of sums of neighbouring tokens' terms, each of which is the d_sink of the token alone."""
    call = operands("single")
    with cute_mla.simulate(arch.name, sm_count=4):
        out, _, lse = cute_mla.flash_mla_sparse_fwd(**call)
        backward = {**call, "out": out, "lse": lse, "dout": torch.randn(out.shape).bfloat16()}
        _, _, d_sink = cute_mla.flash_mla_sparse_bwd(**backward)
        by_token = ("q", "indices", "topk_length", "out", "lse", "dout")
        terms = [
            cute_mla.flash_mla_sparse_bwd(**{**backward, **{name: backward[name][i : i + 1] for name in by_token}})[2] for i in range(3)
        ]
    assert same_bits(d_sink, (terms[0] + terms[1]) + terms[2])


def test_dout_of_any_strides(arch: Arch) -> None:
    """The gradient of a sum is expanded, and has no rows that TMA could load."""
    call = operands("single")
    with cute_mla.simulate(arch.name, sm_count=4):
        out, _, lse = cute_mla.flash_mla_sparse_fwd(**call)
        backward = {**call, "out": out, "lse": lse}
        expanded = cute_mla.flash_mla_sparse_bwd(**backward, dout=torch.ones(1, 1, 1).bfloat16().expand(out.shape))
        plain = cute_mla.flash_mla_sparse_bwd(**backward, dout=torch.ones_like(out))
    assert all(same_bits(mine, its) for mine, its in zip(expanded, plain, strict=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dout": torch.zeros(3, 5, 576).bfloat16()}, r"dout has shape \[3, 5, 576\]; supported: \[3, 5, 512\]"),
        ({"out": None}, "out is None; supported: a torch tensor"),
        ({"lse": None}, "lse is None; supported: a torch tensor"),
        ({"dout": torch.zeros(3, 5, 512)}, "dout has dtype torch.float32; supported: torch.bfloat16"),
        ({"dlse": torch.zeros(3, 4)}, r"dlse has shape \[3, 4\]; supported: \[3, 5\]"),
        ({"dkv_accumulate": True}, "dkv is None with dkv_accumulate; supported: a tensor in fp32, to add to"),
        ({"dkv_accumulate": True, "dkv": torch.zeros(70, 1, 576).bfloat16()}, "dkv has dtype torch.bfloat16; supported: torch.float32"),
        ({"dkv": torch.zeros(70, 1, 584)[..., :576]}, "dkv has shape .* supported: a contiguous tensor"),
        ({"dq": torch.zeros(3, 5, 580).bfloat16()[..., :576]}, "dq has shape .* supported: multiples of 16 bytes"),
        ({"d_sink": torch.zeros(4)}, r"d_sink has shape \[4\]; supported: \[5\]"),
        ({"max_workspace": -1}, "max_workspace is -1; supported: an integer, 0 or more"),
        ({"sm_scale": 0.0}, "sm_scale is 0.0; supported: a positive finite number"),
    ],
)
def test_bad_arguments_are_refused(arch: Arch, changes: dict[str, Any], message: str) -> None:
    call = operands("single")
    rows = {"out": torch.zeros(3, 5, 512).bfloat16(), "lse": torch.zeros(3, 5), "dout": torch.zeros(3, 5, 512).bfloat16()}
    with cute_mla.simulate(arch.name), pytest.raises(ValueError, match=message):
        cute_mla.flash_mla_sparse_bwd(**{**call, **rows, **changes})


def test_what_has_no_gradient_is_refused_by_name(arch: Arch) -> None:
    call = operands("single")
    call["q"].requires_grad_()
    with cute_mla.simulate(arch.name, sm_count=4):
        _, max_logits, _ = cute_mla.flash_mla_sparse_fwd(**call)
        with pytest.raises(ValueError, match="max_logits has a gradient; supported: gradients of out and lse"):
            max_logits.sum().backward()
        with pytest.raises(ValueError, match="q requires grad; supported: gradients of calls without indexer_topk"):
            cute_mla.flash_mla_sparse_fwd(**call, indexer_topk=5)
