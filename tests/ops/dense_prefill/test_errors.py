"""Bad input of dense prefill: each mistake has a ValueError that says what was given and what is supported."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cute_mla
from cute_mla.ops import dense_prefill
from cute_mla.spec.arch import Arch
from cute_mla.spec.dense_prefill import MAX_ITEMS, MAX_TOKENS
from tests.ops.dense_prefill.varlen_call import VarlenCall, far_call
from tests.support.recording_device import RecordingDevice
from tests.support.zero_tensors import ints, zeros

pytestmark = pytest.mark.usefixtures("device")

Change = dict[str, Callable[[], Any]]

# Of a call with q [300, 8, 192], k [500, 2, 192], v [500, 2, 128] and two sequences.
OPERANDS: list[tuple[str, Change, str]] = [
    ("q not a tensor", {"q": lambda: None}, "q is None; supported: a torch tensor"),
    ("q of rank 2", {"q": lambda: zeros(300, 192)}, r"q has shape \[300, 192\]; supported: \[total_q, h_q, 192 or 128 or 256"),
    ("q of rank 4", {"q": lambda: zeros(2, 150, 8, 192)}, r"q has shape \[2, 150, 8, 192\]; supported: \[total_q, h_q, 192 or 128 or 256"),
    ("head size 64", {"q": lambda: zeros(300, 8, 64)}, r"\[300, 8, 64\]; supported: .*, the head sizes that kernels are built for"),
    ("head size 576", {"q": lambda: zeros(300, 8, 576)}, r"\[300, 8, 576\]; supported: .*, the head sizes that kernels are built for"),
    ("q fp32", {"q": lambda: torch.zeros(300, 8, 192)}, "q has dtype torch.float32; supported: torch.bfloat16, torch.float16"),
    ("q transposed", {"q": lambda: zeros(300, 192, 8).mT}, r"q has stride 8 along its last dimension .*supported: 1"),
    ("no heads", {"q": lambda: zeros(300, 0, 192)}, "h_q is 0; supported: 1 to"),
    ("no KV heads", {"k": lambda: zeros(500, 0, 192), "v": lambda: zeros(500, 0, 128)}, "h_kv is 0 with h_q 8; supported: divisors of h_q"),
    ("3 KV heads", {"k": lambda: zeros(500, 3, 192), "v": lambda: zeros(500, 3, 128)}, "h_kv is 3 with h_q 8; supported: divisors of h_q"),
    ("k not a tensor", {"k": lambda: 3}, "k is 3; supported: a torch tensor"),
    ("k of rank 2", {"k": lambda: zeros(500, 192)}, r"k has shape \[500, 192\]; supported: \[total_k, h_kv, 192\]"),
    ("k narrower than q", {"k": lambda: zeros(500, 2, 128)}, r"k has shape \[500, 2, 128\]; supported: \[total_k, h_kv, 192\]"),
    ("k of another dtype", {"k": lambda: zeros(500, 2, 192).half()}, "k has dtype torch.float16; supported: torch.bfloat16"),
    ("k of every other column", {"k": lambda: zeros(500, 2, 384)[..., ::2]}, "k has stride 2 along its last dimension"),
    ("k in rows of 196", {"k": lambda: zeros(500, 2, 196)[..., :192]}, "196, 1.*, 392 bytes along dimension 1; supported: positive mul"),
    ("k with odd tokens", {"k": lambda: zeros(500, 388)[:, :384].view(500, 2, -1)}, "776 bytes along dimension 0; supported: positive mul"),
    ("k expanded to heads", {"k": lambda: zeros(500, 1, 192).expand(-1, 2, -1)}, ", 0 bytes along dimension 1; supported: positive mul"),
    ("k at an odd address", {"k": lambda: zeros(500, 2, 200)[..., 4:196]}, "k starts at address .*; supported: multiples of 16 bytes"),
    ("v not a tensor", {"v": lambda: [1]}, r"v is \[1\]; supported: a torch tensor"),
    ("v as wide as k", {"v": lambda: zeros(500, 2, 192)}, r"v has shape \[500, 2, 192\]; supported: \[500, 2, 128\]"),
    ("v of other tokens", {"v": lambda: zeros(501, 2, 128)}, r"v has shape \[501, 2, 128\]; supported: \[500, 2, 128\]"),
    ("v of other heads", {"v": lambda: zeros(500, 4, 128)}, r"v has shape \[500, 4, 128\]; supported: \[500, 2, 128\]"),
    ("v of another dtype", {"v": lambda: zeros(500, 2, 128).half()}, "v has dtype torch.float16; supported: torch.bfloat16"),
    ("v transposed", {"v": lambda: zeros(500, 128, 2).mT}, "v has stride 2 along its last dimension"),
    ("v in rows of 132", {"v": lambda: zeros(500, 2, 132)[..., :128]}, "132, 1.*, 264 bytes along dimension 1; supported: positive mul"),
    ("v at an odd address", {"v": lambda: zeros(500, 2, 136)[..., 7:135]}, "v starts at address .*; supported: multiples of 16 bytes"),
    ("lengths a list", {"cu_seqlens_qo": lambda: [0, 1, 2]}, r"cu_seqlens_qo is \[0, 1, 2\]; supported: a torch tensor"),
    ("lengths of rank 2", {"cu_seqlens_qo": lambda: ints(3, 1)}, r"cu_seqlens_qo has shape \[3, 1\]; supported: \[batch \+ 1\]"),
    ("no lengths", {"cu_seqlens_qo": lambda: ints(0)}, r"cu_seqlens_qo has shape \[0\]; supported: \[batch \+ 1\], at least 1"),
    ("lengths of int64", {"cu_seqlens_qo": lambda: ints(3).long()}, "cu_seqlens_qo has dtype torch.int64; supported: torch.int32"),
    ("lengths strided", {"cu_seqlens_qo": lambda: ints(6)[::2]}, "cu_seqlens_qo has shape .*supported: a contiguous tensor"),
    ("another batch", {"cu_seqlens_kv": lambda: ints(4)}, r"cu_seqlens_kv has shape \[4\]; supported: \[3\]"),
    ("k lengths None", {"cu_seqlens_kv": lambda: None}, "cu_seqlens_kv is None; supported: a torch tensor"),
    ("k lengths of int64", {"cu_seqlens_kv": lambda: ints(3).long()}, "cu_seqlens_kv has dtype torch.int64; supported: torch.int32"),
    ("k lengths strided", {"cu_seqlens_kv": lambda: ints(6)[::2]}, "cu_seqlens_kv has shape .*supported: a contiguous tensor"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "said"), [case[1:] for case in OPERANDS], ids=[case[0] for case in OPERANDS])
def test_operands(device: RecordingDevice, change: Change, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        VarlenCall().run(**{name: make() for name, make in change.items()})
    assert device.launches == []


SCALARS: list[tuple[str, dict[str, Any], str]] = [
    ("dropout", {"dropout_p": 0.1}, "dropout_p is 0.1; supported: 0"),
    ("scale 0", {"softmax_scale": 0}, "softmax_scale is 0; supported: a positive finite number"),
    ("scale negative", {"softmax_scale": -0.1}, "softmax_scale is -0.1; supported: a positive finite number"),
    ("scale nan", {"softmax_scale": math.nan}, "softmax_scale is nan; supported: a positive finite number"),
    ("scale inf", {"softmax_scale": math.inf}, "softmax_scale is inf; supported: a positive finite number"),
    ("empty_lse", {"empty_lse": 0.0}, "empty_lse is 0.0; supported: inf and -inf"),
    ("longest query negative", {"max_seqlen_qo": -1}, "max_seqlen_qo is -1; supported: an integer, 0 or more"),
    ("longest query None", {"max_seqlen_qo": None}, "max_seqlen_qo is None; supported: an integer, 0 or more"),
    ("longest query a tensor", {"max_seqlen_qo": ints(1)}, r"max_seqlen_qo is a tensor of shape \[1\]; supported: an integer, 0 or more"),
    ("longest keys negative", {"max_seqlen_kv": -7}, "max_seqlen_kv is -7; supported: an integer, 0 or more"),
    ("longest keys a float", {"max_seqlen_kv": 7.0}, "max_seqlen_kv is 7.0; supported: an integer, 0 or more"),
]


@pytest.mark.parametrize(("change", "said"), [case[1:] for case in SCALARS], ids=[case[0] for case in SCALARS])
def test_scalars(device: RecordingDevice, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        VarlenCall().run(**change)
    assert device.launches == []


RESULTS: list[tuple[str, Change, str]] = [
    ("out as wide as q", {"out": lambda: zeros(300, 8, 192)}, r"out has shape \[300, 8, 192\]; supported: \[300, 8, 128\]"),
    ("out of another dtype", {"out": lambda: torch.zeros(300, 8, 128)}, "out has dtype torch.float32; supported: torch.bfloat16"),
    ("out transposed", {"out": lambda: zeros(300, 128, 8).mT}, "out has stride 8 along its last dimension"),
    ("out expanded", {"out": lambda: zeros(300, 1, 128).expand(-1, 8, -1)}, "out has strides .*elements share memory"),
    ("lse head first", {"lse": lambda: torch.zeros(8, 300)}, r"lse has shape \[8, 300\]; supported: \[300, 8\]"),
    ("lse of another dtype", {"lse": lambda: zeros(300, 8)}, "lse has dtype torch.bfloat16; supported: torch.float32"),
    ("lse expanded", {"lse": lambda: torch.zeros(1, 8).expand(300, -1)}, "lse has strides .*elements share memory"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "said"), [case[1:] for case in RESULTS], ids=[case[0] for case in RESULTS])
def test_results(device: RecordingDevice, change: Change, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        VarlenCall().run(**{name: make() for name, make in change.items()})
    assert device.launches == []


@pytest.mark.parametrize("result", ["out", "lse"])
@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_gradients_of_a_call_with_results(device: RecordingDevice, operand: str, result: str) -> None:
    call = VarlenCall()
    call.operands[operand].requires_grad_()
    with pytest.raises(ValueError, match=f"^{operand} requires grad; supported: gradients of calls that allocate their results"):
        call.run(**{result: call.results()[result]})
    assert device.launches == []


@pytest.mark.parametrize("operand", ["k", "v", "cu_seqlens_qo", "cu_seqlens_kv", "out", "lse"])
def test_tensors_on_different_devices(device: RecordingDevice, operand: str) -> None:
    call = VarlenCall()
    given = {**call.operands, **call.results()}
    with pytest.raises(ValueError, match=f"^{operand} is on meta; supported: the device of q, cpu"):
        call.run(**{**given, operand: given[operand].to("meta")})
    assert device.launches == []


def test_tensors_on_another_kind_of_device() -> None:
    with pytest.raises(ValueError, match="got tensors on meta: supported are CUDA tensors, and CPU tensors inside"):
        VarlenCall().run(q=zeros(300, 8, 192).to("meta"))


PACKED: list[tuple[str, dict[str, Any], str]] = [
    ("not a tensor", {"packed": 3}, "{} is 3; supported: a torch tensor"),
    ("head size 64", {"head_dim_qk": 64}, "head_dim_qk is 64; supported: 192, 128, 256"),
    ("no head size", {"head_dim_qk": None}, "head_dim_qk is None; supported: 192, 128, 256"),
    ("another head size", {"head_dim_qk": 128}, r"{} has shape \[500, 8, \d+\]; supported with head_dim_qk 128: \[total\S*, h\S*, \d+\]"),
    ("one column more", {"packed": zeros(500, 8, 513)}, r"{} has shape \[500, 8, 513\]; supported with head_dim_qk 192: \[total"),
    ("rank 4", {"packed": zeros(500, 2, 8, 320)}, r"{} has shape \[500, 2, 8, 320\]; supported with head_dim_qk 192: \[total"),
    ("dropout", {"dropout_p": 0.5}, "dropout_p is 0.5; supported: 0"),
    ("empty_lse", {"empty_lse": 1.0}, "empty_lse is 1.0; supported: inf and -inf"),
]


@pytest.mark.parametrize(("change", "said"), [case[1:] for case in PACKED], ids=[case[0] for case in PACKED])
@pytest.mark.parametrize("name", ["kv", "qkv"])
def test_packed(device: RecordingDevice, name: str, change: dict[str, Any], said: str) -> None:
    call = {"packed": zeros(500, 8, 320 if name == "kv" else 512), "head_dim_qk": 192, **change}
    with pytest.raises(ValueError, match=said.format(name)):
        run_packed(name, **call)
    assert device.launches == []


def test_heads_of_256_columns_are_bf16(device: RecordingDevice) -> None:
    call = VarlenCall(d_qk=256)
    for name in ("q", "k", "v"):
        call.operands[name] = call.operands[name].half()
    with pytest.raises(ValueError, match=r"q has dtype torch\.float16 with 256 columns; supported: torch\.bfloat16$"):
        call.run()
    assert device.launches == []


def run_packed(name: str, packed: Any, head_dim_qk: Any, **options: Any) -> None:
    """Call the form of flash_attn_varlen_func that takes this tensor."""
    if name == "kv":
        cute_mla.flash_attn_varlen_kvpacked_func(
            zeros(300, 8, 256 if head_dim_qk == 256 else 192), packed, ints(3), ints(3), 290, 400, head_dim_qk, **options
        )
    else:
        cute_mla.flash_attn_varlen_qkvpacked_func(packed, ints(3), 290, head_dim_qk, **options)


@pytest.mark.parametrize("operand", ["q", "k"])
def test_more_tokens_than_32_bits_count(arch: Arch, operand: str) -> None:
    call = far_call(1 << 30)
    shape = (MAX_TOKENS + 1, 3, 192)
    call = call._replace(**{operand: getattr(call, operand)._replace(shape=shape)})
    if operand == "k":
        call = call._replace(v=call.v._replace(shape=(MAX_TOKENS + 1, 3, 128)))
    with pytest.raises(ValueError, match=rf"{operand} has shape \[{MAX_TOKENS + 1}, 3, 192\]; supported: to {MAX_TOKENS} tokens"):
        dense_prefill.plan(call, arch, 132)


def test_more_work_than_32_bits_count(arch: Arch) -> None:
    call = far_call(1 << 30)
    ends = call.cu_seqlens_qo._replace(shape=(1 << 20,))
    with pytest.raises(ValueError, match=rf"q has .*, cu_seqlens_qo \[{1 << 20}\], and max_seqlen_qo .*items; supported: to {MAX_ITEMS}"):
        dense_prefill.plan(call._replace(cu_seqlens_qo=ends, cu_seqlens_kv=ends), arch, 132)


def test_strides_beyond_what_a_tensor_map_holds(arch: Arch) -> None:
    call = far_call(1 << 38)
    with pytest.raises(ValueError, match=rf"k has .*, {1 << 40} bytes along dimension 1; supported: .* below {1 << 40}"):
        dense_prefill.plan(call, arch, 132)
