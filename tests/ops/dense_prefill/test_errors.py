"""Bad input of dense prefill: each mistake has a ValueError that says what was given and what is supported."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import cute_mla
from cute_mla.ops import dense_prefill
from cute_mla.spec.arch import Arch
from cute_mla.spec.dense_prefill import MAX_ITEMS, MAX_TOKENS
from tests.ops.dense_prefill.far_call import far_call
from tests.support.recording_device import RecordingDevice
from tests.support.right_calls import call_of
from tests.support.zero_tensors import ints, zeros

pytestmark = pytest.mark.usefixtures("device")

Change = dict[str, Any]  # values, and functions that make them

# Of a call with q [300, 8, 192], k [500, 2, 192], v [500, 2, 128] and two sequences.
OPERANDS: list[tuple[str, Change, str]] = [
    ("q of rank 2", {"q": lambda: zeros(300, 192)}, r"q has shape \[300, 192\]; supported: \[total_q, h_q, 192 or 128 or 256"),
    ("head size 64", {"q": lambda: zeros(300, 8, 64)}, r"\[300, 8, 64\]; supported: .*, the head sizes that kernels are built for"),
    ("q fp32", {"q": lambda: torch.zeros(300, 8, 192)}, "q has dtype torch.float32; supported: torch.bfloat16, torch.float16"),
    ("no heads", {"q": lambda: zeros(300, 0, 192)}, "h_q is 0; supported: 1 to"),
    ("no KV heads", {"k": lambda: zeros(500, 0, 192), "v": lambda: zeros(500, 0, 128)}, "h_kv is 0 with h_q 8; supported: divisors of h_q"),
    ("3 KV heads", {"k": lambda: zeros(500, 3, 192), "v": lambda: zeros(500, 3, 128)}, "h_kv is 3 with h_q 8; supported: divisors of h_q"),
    ("k narrower than q", {"k": lambda: zeros(500, 2, 128)}, r"k has shape \[500, 2, 128\]; supported: \[total_k, h_kv, 192\]"),
    ("k in rows of 196", {"k": lambda: zeros(500, 2, 196)[..., :192]}, "196, 1.*, 392 bytes along dimension 1; supported: positive mul"),
    ("k expanded to heads", {"k": lambda: zeros(500, 1, 192).expand(-1, 2, -1)}, ", 0 bytes along dimension 1; supported: positive mul"),
    ("k at an odd address", {"k": lambda: zeros(500, 2, 200)[..., 4:196]}, "k starts at address .*; supported: multiples of 16 bytes"),
    ("v as wide as k", {"v": lambda: zeros(500, 2, 192)}, r"v has shape \[500, 2, 192\]; supported: \[500, 2, 128\]"),
    ("lengths of rank 2", {"cu_seqlens_qo": lambda: ints(3, 1)}, r"cu_seqlens_qo has shape \[3, 1\]; supported: \[batch \+ 1\]"),
    ("no lengths", {"cu_seqlens_qo": lambda: ints(0)}, r"cu_seqlens_qo has shape \[0\]; supported: \[batch \+ 1\], at least 1"),
    ("lengths strided", {"cu_seqlens_qo": lambda: ints(6)[::2]}, "cu_seqlens_qo has shape .*supported: a contiguous tensor"),
    ("another batch", {"cu_seqlens_kv": lambda: ints(4)}, r"cu_seqlens_kv has shape \[4\]; supported: \[3\]"),
]  # fmt: skip


SCALARS: list[tuple[str, Change, str]] = [
    ("dropout", {"dropout_p": 0.1}, "dropout_p is 0.1; supported: 0"),
    ("scale nan", {"softmax_scale": math.nan}, "softmax_scale is nan; supported: a positive finite number"),
    ("empty_lse", {"empty_lse": 0.0}, "empty_lse is 0.0; supported: inf and -inf"),
    ("longest query negative", {"max_seqlen_qo": -1}, "max_seqlen_qo is -1; supported: an integer, 0 or more"),
    ("longest query a tensor", {"max_seqlen_qo": ints(1)}, r"max_seqlen_qo is a tensor of shape \[1\]; supported: an integer, 0 or more"),
]


RESULTS: list[tuple[str, Change, str]] = [
    ("out as wide as q", {"out": lambda: zeros(300, 8, 192)}, r"out has shape \[300, 8, 192\]; supported: \[300, 8, 128\]"),
    ("out expanded", {"out": lambda: zeros(300, 1, 128).expand(-1, 8, -1)}, "out has strides .*elements share memory"),
    ("lse head first", {"lse": lambda: torch.zeros(8, 300)}, r"lse has shape \[8, 300\]; supported: \[300, 8\]"),
]  # fmt: skip


ERRORS = (*OPERANDS, *SCALARS, *RESULTS)


@pytest.mark.parametrize(("change", "said"), [case[1:] for case in ERRORS], ids=[case[0] for case in ERRORS])
def test_errors(device: RecordingDevice, change: Change, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call_of("dense_prefill").run(**{name: make() if callable(make) else make for name, make in change.items()})
    assert device.launches == []


@pytest.mark.parametrize("result", ["out", "lse"])
@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_gradients_of_a_call_with_results(device: RecordingDevice, operand: str, result: str) -> None:
    call = call_of("dense_prefill", outputs="given")
    call[operand].requires_grad_()
    with pytest.raises(ValueError, match=f"^{operand} requires grad; supported: gradients of calls that allocate their results"):
        call.run(**dict.fromkeys({"out", "lse"} - {result}))
    assert device.launches == []


PACKED: list[tuple[str, Change, str]] = [
    ("not a tensor", {"packed": 3}, "{} is 3; supported: a torch tensor"),
    ("no head size", {"head_dim_qk": None}, "head_dim_qk is None; supported: 192, 128, 256"),
    ("another head size", {"head_dim_qk": 128}, r"{} has shape \[500, 8, \d+\]; supported with head_dim_qk 128: \[total\S*, h\S*, \d+\]"),
    ("rank 4", {"packed": zeros(500, 2, 8, 320)}, r"{} has shape \[500, 2, 8, 320\]; supported with head_dim_qk 192: \[total"),
]


@pytest.mark.parametrize(("change", "said"), [case[1:] for case in PACKED], ids=[case[0] for case in PACKED])
@pytest.mark.parametrize("name", ["kv", "qkv"])
def test_packed(device: RecordingDevice, name: str, change: dict[str, Any], said: str) -> None:
    call = {"packed": zeros(500, 8, 320 if name == "kv" else 512), "head_dim_qk": 192, **change}
    with pytest.raises(ValueError, match=said.format(name)):
        run_packed(name, **call)
    assert device.launches == []


def test_heads_of_256_columns_are_bf16(device: RecordingDevice) -> None:
    with pytest.raises(ValueError, match=r"q has dtype torch\.float16 with 256 columns; supported: torch\.bfloat16, as \.to"):
        call_of("dense_prefill", d_qk=256, dtype="fp16").run()
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
    with pytest.raises(ValueError, match=rf"[qk] has .*, {1 << 40} bytes along dimension 1; supported: .* below {1 << 40}"):
        dense_prefill.plan(call, arch, 132)
