"""Gradients of the forward functions: which kernels they launch, what they are, and which are refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.optests import aot_autograd_check

import cute_mla
import cute_mla.torch_ops
from cute_mla import flash_mla
from cute_mla.testing.operations.dense_prefill_backward.case import (
    DensePrefillBackwardCase,
    DensePrefillBackwardTensors,
    make_dense_prefill_backward_tensors,
)
from tests.support.bench import Bench, expect, identical
from tests.support.recording_device import RecordingDevice
from tests.support.right_calls import call_of

CASE = DensePrefillBackwardCase(lengths=((20, 30), (9, 70)), group=2, causal=True, outputs="given", sm_count=2)
DQ, DKDV = "dense_prefill_dq_sm90_bf16_d192", "dense_prefill_dkdv_sm90_bf16_d192"

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def leaves_of(tensors: DensePrefillBackwardTensors) -> tuple[Tensor, ...]:
    """Return q, k and v that require gradients, with zeros in rows of no sequence."""
    return tuple(tensor.nan_to_num(0.0).requires_grad_() for tensor in (tensors.q, tensors.k, tensors.v))


def attend(tensors: DensePrefillBackwardTensors) -> Attend:
    """Return the forward call of a case as a function of q, k and v."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cute_mla.flash_attn_varlen_func(q, k, v, tensors.cu_seqlens_q, tensors.cu_seqlens_k, 20, 70, causal=True)[0]

    return call


def backward(out: Tensor, dout: Tensor) -> None:
    """Run the backward pass of a loss of which dout is the gradient in rows of a sequence. Rows of none hold anything."""
    out.backward(dout.nan_to_num(0.0))


def test_a_backward_pass_is_two_launches(device: RecordingDevice) -> None:
    call = call_of("dense_prefill")
    q, k, v = (call[name].requires_grad_() for name in "qkv")
    out, lse = call.run(softmax_scale=0.25, causal=True)
    assert [launch.kernel for launch in device.launches] == ["dense_prefill_sm90_bf16_d192"]
    out.backward(torch.ones_like(out))
    forward, dq, dkdv = device.launches
    assert (dq.kernel, dkdv.kernel) == (DQ, DKDV)
    assert [dq.args[name].data_ptr() for name in ("q", "out", "lse")] == [tensor.data_ptr() for tensor in (q, out, lse)]
    for name in ("softmax_scale", "causal"):
        assert dq.args[name] == dkdv.args[name]
    assert (dq.args["softmax_scale"], dq.args["causal"], forward.args["causal"]) == (0.25, 1, 1)
    assert [tensor.grad.shape for tensor in (q, k, v) if tensor.grad is not None] == [q.shape, k.shape, v.shape]


def test_the_expanded_gradient_of_a_sum_is_made_contiguous(device: RecordingDevice) -> None:
    call = call_of("dense_prefill")
    call["q"].requires_grad_()
    call.run()[0].sum().backward()
    assert [launch.kernel for launch in device.launches[1:]] == [DQ, DKDV]
    assert device.launches[1].args["dout_stride_token"] == 8 * 128


def test_gradients_are_those_of_the_reference(bench: Bench) -> None:
    tensors = make_dense_prefill_backward_tensors(CASE)
    leaves = leaves_of(tensors)
    with cute_mla.simulate(bench.arch, 2) as device:
        backward(attend(tensors)(*leaves), tensors.dout)
        assert device.launches == 3
    gradients = tuple(leaf.grad for leaf in leaves if leaf.grad is not None)
    for gradient, starts in zip(gradients, (CASE.q_starts, CASE.k_starts, CASE.k_starts), strict=True):
        assert not gradient[: starts[0]].any()
        assert not gradient[starts[-1] :].any()
        gradient[: starts[0]] = gradient[starts[-1] :] = torch.nan  # as the reference
    expect(CASE, tensors, gradients)


def test_gradients_of_packed_keys_and_values_are_those_of_their_parts(bench: Bench) -> None:
    tensors = make_dense_prefill_backward_tensors(CASE)
    q, k, v = leaves_of(tensors)
    other, both = q.detach().requires_grad_(), torch.cat([k, v], dim=-1).detach().requires_grad_()
    with cute_mla.simulate(bench.arch, 2):
        backward(attend(tensors)(q, k, v), tensors.dout)
        ends = (tensors.cu_seqlens_q, tensors.cu_seqlens_k)
        out, _ = cute_mla.flash_attn_varlen_kvpacked_func(other, both, *ends, 20, 70, 192, causal=True)
        backward(out, tensors.dout)
    parts = (grad_of(other), *(part.contiguous() for part in grad_of(both).split((192, 128), dim=-1)))
    assert identical(parts, (grad_of(q), grad_of(k), grad_of(v)))


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_gradients_of_packed_queries_keys_and_values_are_those_of_their_parts(bench: Bench, how: str) -> None:
    """17 of 20 tokens belong to a sequence; gradients of the others are 0."""
    draw = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(20, 2, columns, generator=draw).bfloat16().requires_grad_() for columns in (128, 128, 128))
    dout, ends = torch.randn(20, 2, 128, generator=draw).bfloat16(), torch.tensor([1, 5, 5, 18], dtype=torch.int32)
    packed = torch.cat([q, k, v], dim=-1).detach().requires_grad_()

    def call(packed: Tensor) -> Tensor:
        return cute_mla.flash_attn_varlen_qkvpacked_func(packed, ends, 13, 128, softmax_scale=0.2, causal=True, empty_lse=-math.inf)[0]

    with cute_mla.simulate(bench.arch, 2) as device:
        out, _ = cute_mla.flash_attn_varlen_func(q, k, v, ends, ends, 13, 13, softmax_scale=0.2, causal=True)
        out.backward(dout)
        launches = device.launches
        traced = torch.compile(call, fullgraph=True, backend="aot_eager") if how == "compiled" else call
        packed_out = traced(packed)
        packed_out.backward(dout)
        assert device.launches == 2 * launches
    assert torch.equal(packed_out[1:18], out[1:18])
    assert identical((grad_of(packed),), (torch.cat([grad_of(q), grad_of(k), grad_of(v)], dim=-1),))
    assert not grad_of(packed)[[0, 18, 19]].any()


@pytest.mark.parametrize("form", ["kvpacked", "qkvpacked"])
def test_gradients_of_slices_are_written_into_the_gradient_of_a_packed_tensor(device: RecordingDevice, form: str) -> None:
    """One allocation of zeros for each gradient and two kernels, but no copy, sum or concatenation."""
    ends, q = torch.tensor([0, 50], dtype=torch.int32), torch.randn(50, 4, 192).bfloat16().requires_grad_()
    if form == "kvpacked":
        packed = torch.randn(50, 2, 192 + 128).bfloat16().requires_grad_()
        out, _ = cute_mla.flash_attn_varlen_kvpacked_func(q, packed, ends, ends, 50, 50, 192)
    else:
        packed = torch.randn(50, 4, 2 * 192 + 128).bfloat16().requires_grad_()
        out, _ = cute_mla.flash_attn_varlen_qkvpacked_func(packed, ends, 50, 192)
    leaves, dout = [q, packed] if form == "kvpacked" else [packed], torch.ones_like(out)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        gradients = torch.autograd.grad(out, leaves, dout)
    ran = [event.name for event in profile.events()]
    assert ran.count("aten::zero_") == len(leaves)
    assert not {"aten::copy_", "aten::add", "aten::add_", "aten::cat", "aten::slice_backward"} & set(ran)
    assert ran.count("aten::new_empty") <= 1 + len(leaves)  # the workspace too
    dq, dkdv = device.launches[1:]
    assert (dq.kernel, dkdv.kernel) == (DQ, DKDV)
    last = gradients[-1]
    parts = [gradients[0], last, last[..., 192:]] if form == "kvpacked" else [last, last[..., 192:], last[..., 384:]]
    for launch, name, part in ((dq, "dq", parts[0]), (dkdv, "dk", parts[1]), (dkdv, "dv", parts[2])):
        assert launch.args[name].data_ptr() == part.data_ptr()
        assert (launch.args[f"{name}_stride_token"], launch.args[f"{name}_stride_head"]) == part.stride()[:2]


def test_only_one_of_the_packed_operands_requires_a_gradient(device: RecordingDevice) -> None:
    ends = torch.tensor([0, 50], dtype=torch.int32)
    q, kv = torch.randn(50, 4, 192).bfloat16(), torch.randn(50, 2, 320).bfloat16()
    for leaf in (q, kv):
        leaf.requires_grad_()
        out, _ = cute_mla.flash_attn_varlen_kvpacked_func(q, kv, ends, ends, 50, 50, 192)
        out.sum().backward()
        assert grad_of(leaf).shape == leaf.shape
        leaf.grad = None
        leaf.requires_grad_(False)
        assert (q.grad, kv.grad) == (None, None)


def test_what_a_packed_form_refuses_with_gradients(device: RecordingDevice) -> None:
    ends, qkv = torch.tensor([0, 50], dtype=torch.int32), torch.randn(50, 4, 512).bfloat16().requires_grad_()
    out, lse = cute_mla.flash_attn_varlen_qkvpacked_func(qkv, ends, 50, 192)
    with pytest.raises(ValueError, match="lse has a gradient; supported: gradients of out only"):
        lse.sum().backward()
    (gradient,) = torch.autograd.grad(out.float().sum(), qkv, create_graph=True)
    with pytest.raises(ValueError, match=r"supported: .*\(double backward\)"):
        gradient.float().sum().backward()
    with pytest.raises(ValueError, match=r"requires grad; supported: gradients of calls that allocate their results"):
        cute_mla.flash_attn_varlen_qkvpacked_func(qkv, ends, 50, 192, out=torch.empty_like(out))


def test_a_compiled_function_has_the_same_gradients(bench: Bench) -> None:
    tensors = make_dense_prefill_backward_tensors(CASE)
    eager, traced = leaves_of(tensors), leaves_of(tensors)
    compiled = torch.compile(attend(tensors), fullgraph=True, backend="aot_eager")
    with cute_mla.simulate(bench.arch, 2) as device:
        backward(attend(tensors)(*eager), tensors.dout)
        launches = device.launches
        backward(compiled(*traced), tensors.dout)
        assert device.launches == 2 * launches
    assert identical(tuple(map(grad_of, traced)), tuple(map(grad_of, eager)))


def grad_of(leaf: Tensor) -> Tensor:
    """Return a gradient that is there."""
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_finds_no_fault_with_the_gradients(bench: Bench, dynamic: bool) -> None:
    """The check of torch.library.opcheck, of out alone: it would also ask for gradients of lse."""
    q, k, v = (torch.randn(29, heads, columns, dtype=torch.bfloat16) for heads, columns in ((2, 192), (1, 192), (1, 128)))
    ends = (torch.tensor([0, 20, 29], dtype=torch.int32),) * 2

    def call(q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor) -> Any:
        return torch.ops.cute_mla.flash_attn_varlen_func(q, k, v, ends_q, ends_k, 20, 20, causal=True)[0]

    leaves = tuple(tensor.requires_grad_() for tensor in (q, k, v))
    with cute_mla.simulate(bench.arch, 2):
        aot_autograd_check(call, (*leaves, *ends), {}, dynamic=dynamic)


@pytest.mark.parametrize("with_q", [False, True])
def test_torch_finds_no_fault_with_the_ops_of_packed_forms(bench: Bench, with_q: bool) -> None:
    packed = torch.randn(29, 2, 128 * (2 if with_q else 3), dtype=torch.bfloat16)
    q = torch.randn(29, 2, 128, dtype=torch.bfloat16) if with_q else None
    ends = (torch.tensor([0, 20, 29], dtype=torch.int32),) * 2
    with cute_mla.simulate(bench.arch, 2):
        forward = torch.ops.cute_mla.flash_attn_varlen_packed.default
        arguments = (q, packed, 128, *ends, 20, 20)
        torch.library.opcheck(forward, arguments)
        out, lse = forward(*arguments)
        backward = torch.ops.cute_mla.flash_attn_varlen_packed_backward.default
        torch.library.opcheck(backward, (torch.ones_like(out), *arguments[:3], out, lse, *arguments[3:]))

        def call(packed: Tensor, *others: Any) -> Any:
            return forward(None if q is None else others[0], packed, 128, *others[1:], 20, 20, causal=True)[0]

        leaf = None if q is None else q.requires_grad_()
        aot_autograd_check(call, (packed.requires_grad_(), leaf, *ends), {}, dynamic=True)


def test_a_gradient_of_lse_is_refused(device: RecordingDevice) -> None:
    call = call_of("dense_prefill")
    call["k"].requires_grad_()
    out, lse = call.run()
    for loss in (lse.sum(), out.float().sum() + lse.sum()):
        with pytest.raises(ValueError, match="lse has a gradient; supported: gradients of out only"):
            loss.backward()
    out, lse = call.run()
    (out.float().sum() + lse.detach().sum()).backward()
    assert [launch.kernel for launch in device.launches[-2:]] == [DQ, DKDV]


def test_a_double_backward_is_refused(device: RecordingDevice) -> None:
    call = call_of("dense_prefill")
    q = call["q"].requires_grad_()
    out, _ = call.run()
    (gradient,) = torch.autograd.grad(out.float().sum(), q, create_graph=True)
    with pytest.raises(ValueError, match=r"supported: .*\(double backward\)"):
        gradient.float().sum().backward()


def test_what_needs_no_gradient_goes_the_short_way(device: RecordingDevice) -> None:
    """No op of torch is called, and out requires no gradient."""
    call = call_of("dense_prefill")
    out, _ = call.run()
    assert out.grad_fn is None
    call["v"].requires_grad_()
    with torch.no_grad():
        out, _ = call.run()
    assert out.grad_fn is None
    out, lse = call.run()
    assert out.grad_fn is lse.grad_fn is not None


def test_the_drop_in_module_is_differentiable(device: RecordingDevice) -> None:
    """Its lse keeps FlashMLA's strides, and refuses gradients by name."""
    call = call_of("dense_prefill")
    call["q"].requires_grad_()
    arguments = tuple(call.values())[:7]
    out, lse = flash_mla.flash_attn_varlen_func(*arguments)
    assert lse.stride() == (1, 300)
    out.sum().backward()
    assert [launch.kernel for launch in device.launches[1:]] == [DQ, DKDV]
    out, lse = flash_mla.flash_attn_varlen_func(*arguments)
    with pytest.raises(ValueError, match="lse has a gradient"):
        lse.sum().backward()
