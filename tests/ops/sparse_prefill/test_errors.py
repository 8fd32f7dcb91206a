"""Bad input of sparse prefill: each mistake has a ValueError that says what was given and what is supported."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_mla.ops import sparse_prefill
from cute_mla.ops.tensor_spec import TensorSpec
from cute_mla.spec.arch import Arch
from cute_mla.spec.dense_decode import MAX_KEYS
from cute_mla.spec.sparse_prefill import MAX_TOKENS
from tests.support.recording_device import RecordingDevice
from tests.support.right_calls import call_of
from tests.support.zero_tensors import ints, zeros

pytestmark = pytest.mark.usefixtures("device")


def strided(shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> torch.Tensor:
    """bf16 zeros with these strides."""
    elements = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    return zeros(elements).as_strided(shape, strides, offset)


Change = dict[str, Any]  # values, and functions that make them

# Of a call with q [5, 64, 576], kv [100, 1, 576] and 64 indices.
OPERANDS: list[tuple[str, Change, str]] = [
    ("q of rank 2", {"q": lambda: zeros(5, 576)}, r"q has shape \[5, 576\]; supported with indices: \[s_q, h_q, 576 or 512\] or \[batch"),
    ("q of 128 columns", {"q": lambda: zeros(5, 64, 128)}, r"q has shape \[5, 64, 128\]; supported with indices"),
    ("q fp32", {"q": lambda: torch.zeros(5, 64, 576)}, "q has dtype torch.float32; supported: torch.bfloat16$"),
    ("q fp16", {"q": lambda: zeros(5, 64, 576).half()}, r"q has dtype torch.float16; supported: torch.bfloat16, as .to\(torch.bfloat16\)"),
    ("129 heads", {"q": lambda: zeros(5, 129, 576)}, "h_q is 129; supported: 1 to 128"),
    ("q of 512 columns", {"q": lambda: zeros(5, 64, 512)}, r"kv has shape \[100, 1, 576\]; supported without a batch: \[s_kv, 1, 512\]"),
    ("kv of rank 4", {"kv": lambda: zeros(1, 100, 1, 576)}, r"\[1, 100, 1, 576\]; supported without a batch: \[s_kv, 1, 576\]"),
    ("two KV heads", {"kv": lambda: zeros(100, 2, 576)}, r"kv has shape \[100, 2, 576\]; supported without a batch: \[s_kv, 1, 576\]"),
    ("FP8 kv", {"kv": lambda: zeros(100, 1, 576).to(torch.float8_e4m3fn)}, "kv has dtype torch.float8_e4m3fn; supported: torch.bfloat16"),
    ("rows of 580", {"kv": lambda: strided((100, 1, 576), (580, 1, 1))}, "580, 1, 1.*, 1160 bytes along dimension 0; supported: mul"),
    ("odd address", {"kv": lambda: strided((100, 1, 576), (584, 1, 1), 4)}, "kv starts at address .*multiples of 16 bytes"),
    ("indices of two KV heads", {"indices": lambda: ints(5, 2, 64)}, r"indices has shape \[5, 2, 64\]; supported: \[5, 1, topk\]"),
    ("one length", {"topk_length": lambda: ints(1)}, r"topk_length has shape \[1\]; supported: \[5\]"),
    ("sinks of other heads", {"attn_sink": lambda: torch.zeros(128)}, r"attn_sink has shape \[128\]; supported: \[64\]"),
    ("offsets without a batch", {"kv_offsets": lambda: ints(2)}, r"kv_offsets is given with q of shape \[5, 64, 576\]; supported: with q"),
]  # fmt: skip


SCALARS: list[tuple[str, Change, str]] = [
    ("d_v", {"d_v": 576}, "d_v is 576; supported: 512"),
    ("no scale", {"sm_scale": None}, "sm_scale is None; supported: a positive finite number"),
    ("scale beyond fp32", {"sm_scale": 1e39}, r"sm_scale is 1e\+39; supported: a positive finite number of fp32"),
    ("empty_lse", {"empty_lse": 0.0}, "empty_lse is 0.0; supported: inf and -inf"),
    ("indexer_topk beyond topk", {"indexer_topk": 65}, "indexer_topk is 65; supported: an integer, 0 to 64"),
    ("indexer_topk a flag", {"indexer_topk": True}, "indexer_topk is True; supported: an integer, 0 or more"),
]


RESULTS: list[tuple[str, Change, str]] = [
    ("out with a batch", {"out": lambda: zeros(1, 5, 64, 512)}, r"out has shape \[1, 5, 64, 512\]; supported: \[5, 64, 512\]"),
    ("out expanded", {"out": lambda: zeros(5, 1, 512).expand(5, 64, 512)}, "out has strides .*elements share memory"),
    ("lse head first", {"lse": lambda: torch.zeros(64, 5)}, r"lse has shape \[64, 5\]; supported: \[5, 64\]"),
    ("max_logits head first", {"max_logits": lambda: torch.zeros(64, 5)}, r"max_logits has shape \[64, 5\]; supported: \[5, 64\]"),
    ("lse_indexer head first", {"lse_indexer": lambda: torch.zeros(64, 5), "indexer_topk": 64}, r"lse_indexer has shape \[64, 5\]"),
    ("a gradient", {"lse_indexer": lambda: torch.zeros(5, 64, requires_grad=True), "indexer_topk": 64}, "lse_indexer requires grad"),
    ("lse_indexer not asked for", {"lse_indexer": lambda: torch.zeros(5, 64)}, "lse_indexer is given with indexer_topk 0; supported: with"),
]  # fmt: skip


# Of a call with q [2, 5, 64, 576], kv [2, 100, 1, 576] and 64 indices.
BATCHED: list[tuple[str, Change, str]] = [
    ("kv of one", {"kv": lambda: zeros(100, 1, 576)}, r"\[100, 1, 576\]; supported with a batch and no kv_offsets: \[2, s_kv, 1, 576\]"),
    ("kv of three", {"kv": lambda: zeros(3, 100, 1, 576)}, r"\[3, 100, 1, 576\]; supported with a batch .* \[2, s_kv, 1, 576\]"),
    ("offsets and a batch of kv", {"kv_offsets": lambda: ints(3)}, r"\[2, 100, 1, 576\]; supported with kv_offsets: \[s_kv, 1, 576\]"),
    ("batch of 8 more", {"kv": lambda: strided((2, 100, 1, 576), (57_604, 576, 1, 1))}, "115208 bytes along dimension 0; supported"),
    ("lengths of requests", {"topk_length": lambda: ints(2)}, r"topk_length has shape \[2\]; supported: \[2, 5\]"),
    ("lengths transposed", {"topk_length": lambda: ints(5, 2).mT}, "topk_length has shape .*supported: a contiguous tensor"),
    ("lse as in decode", {"lse": lambda: torch.zeros(2, 64, 5)}, r"lse has shape \[2, 64, 5\]; supported: \[2, 5, 64\]"),
]  # fmt: skip


# Of a call with q [2, 5, 64, 576], kv [100, 1, 576] and kv_offsets [3].
RAGGED: list[tuple[str, Change, str]] = [
    ("offsets of another batch", {"kv_offsets": lambda: ints(2)}, r"kv_offsets has shape \[2\]; supported: \[3\]"),
    ("two KV heads", {"kv": lambda: zeros(100, 2, 576)}, r"kv has shape \[100, 2, 576\]; supported with kv_offsets: \[s_kv, 1, 576\]"),
]


CASES = [
    pytest.param(shape, change, said, id=name)
    for shape, table in (({}, (*OPERANDS, *SCALARS, *RESULTS)), ({"form": "batched"}, BATCHED), ({"form": "ragged"}, RAGGED))
    for name, change, said in table
]


@pytest.mark.parametrize(("shape", "change", "said"), CASES)
def test_errors(device: RecordingDevice, shape: dict[str, Any], change: Change, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call_of("sparse_prefill", **shape, batch=2 if shape else 1).run(
            **{name: make() if callable(make) else make for name, make in change.items()}
        )
    assert device.launches == []


# Of a batch of 2; more than there is memory for, so by their specs.
COUNTED: list[tuple[str, tuple[int, int, int], str]] = [
    ("tokens", (MAX_TOKENS // 2 + 1, 64, 64), rf"q has shape .*, {2 * (MAX_TOKENS // 2 + 1)} query tokens; supported: to {MAX_TOKENS}"),
    ("s_kv", (5, 1 << 31, 64), rf"kv has shape \[2, {1 << 31}, 1, 576\]; supported: s_kv to {(1 << 31) - 1}"),
    ("topk", (5, 64, MAX_KEYS + 1), rf"indices has shape \[2, 5, 1, {MAX_KEYS + 1}\]; supported: topk to {MAX_KEYS}"),
]


@pytest.mark.parametrize(("sizes", "said"), [case[1:] for case in COUNTED], ids=[case[0] for case in COUNTED])
def test_more_than_32_bits_count(arch: Arch, sizes: tuple[int, int, int], said: str) -> None:
    s_q, s_kv, topk = sizes
    cpu = torch.device("cpu")
    call = sparse_prefill.CallSpec(
        q=TensorSpec((2, s_q, 1, 576), (0, 0, 0, 1), torch.bfloat16, cpu),
        kv=TensorSpec((2, s_kv, 1, 576), (0, 576, 576, 1), torch.bfloat16, cpu),
        indices=TensorSpec((2, s_q, 1, topk), (0, 0, 0, 1), torch.int32, cpu),
        topk_length=None,
        attn_sink=None,
        kv_offsets=None,
        out=None,
        max_logits=None,
        lse=None,
        lse_indexer=None,
        indexer_topk=0,
        address_alignment=16,
    )
    with pytest.raises(ValueError, match=said):
        sparse_prefill.plan(call, arch, 132)
