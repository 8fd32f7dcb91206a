"""Bad calls of the backward pass: each says what was given and what is supported, and launches nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cute_mla
from tests.support.recording_device import RecordingDevice
from tests.support.right_calls import call_of
from tests.support.zero_tensors import zeros

Change = dict[str, Any]  # values, and functions that make them


OPERANDS: list[tuple[str, Change, str]] = [
    ("dout of other columns", {"dout": lambda: zeros(300, 8, 192)}, r"dout has shape \[300, 8, 192\]; supported: \[300, 8, 128\]"),
    ("out of other heads", {"out": lambda: zeros(300, 2, 128)}, r"out has shape \[300, 2, 128\]; supported: \[300, 8, 128\]"),
    ("lse of heads first", {"lse": lambda: torch.zeros(8, 300)}, r"lse has shape \[8, 300\]; supported: \[300, 8\]"),
    (
        "q of other columns",
        {"q": lambda: zeros(300, 8, 576)},
        r"q has shape \[300, 8, 576\]; supported: \[total_q, h_q, 192 or 128 or 256\]",
    ),
    ("k of unaligned rows", {"k": lambda: zeros(500, 2, 193)[..., :192]}, "k has shape .* supported: positive multiples of 16 bytes"),
    ("v of unaligned address", {"v": lambda: zeros(500, 2, 136)[..., 1:129]}, "v starts at address 0x.*; supported: multiples of 16 bytes"),
    ("heads", {"k": lambda: zeros(500, 3, 192), "v": lambda: zeros(500, 3, 128)}, "h_kv is 3 with h_q 8; supported: divisors of h_q"),
    ("offsets", {"cu_seqlens_kv": lambda: torch.zeros(4, dtype=torch.int32)}, r"cu_seqlens_kv has shape \[4\]; supported: \[3\]"),
]


RESULTS: list[tuple[str, Change, str]] = [
    ("dq of other columns", {"dq": lambda: zeros(300, 8, 128)}, r"dq has shape \[300, 8, 128\]; supported: \[300, 8, 192\]"),
    ("dk of query heads", {"dk": lambda: zeros(500, 8, 192)}, r"dk has shape \[500, 8, 192\]; supported: \[500, 2, 192\]"),
    ("dv expanded", {"dv": lambda: zeros(1, 2, 128).expand(500, 2, 128)}, "dv has strides .* elements share memory"),
    ("workspace too small", {"workspace": lambda: zeros(5)}, r"workspace has 10 bytes; supported: at least 19200, see workspace_size"),
    (
        "workspace not contiguous",
        {"workspace": lambda: torch.zeros(40_000, dtype=torch.uint8)[::2]},
        "workspace has shape .* supported: a contiguous tensor",
    ),
    (
        "workspace not aligned",
        {"workspace": lambda: torch.zeros(40_000, dtype=torch.uint8)[8:]},
        "workspace starts at address 0x.*; supported: multiples of 16 bytes",
    ),
]


ERRORS = (*OPERANDS, *RESULTS)


@pytest.mark.parametrize(("change", "said"), [case[1:] for case in ERRORS], ids=[case[0] for case in ERRORS])
def test_errors(device: RecordingDevice, change: Change, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call_of("backward").run(**{name: make() if callable(make) else make for name, make in change.items()})
    assert device.launches == []


@pytest.mark.parametrize(("gradient", "operand"), [("dq", "q"), ("dk", "k"), ("dv", "v")])
def test_a_gradient_in_place_of_its_operand(device: RecordingDevice, gradient: str, operand: str) -> None:
    call = call_of("backward")
    with pytest.raises(
        ValueError, match=f"{gradient} shares memory with {operand}; supported: results and workspace with memory of their own"
    ):
        call.run(**{gradient: call[operand]})
    assert device.launches == []


def test_gradients_of_keys_and_values_in_one_tensor(device: RecordingDevice) -> None:
    both = zeros(500, 2, 320)
    call_of("backward").run(dk=both[..., :192], dv=both[..., 192:])
    with pytest.raises(ValueError, match="dk shares memory with dv"):
        call_of("backward").run(dk=both[..., :192], dv=both[..., 191:-1])


@pytest.mark.parametrize("tensor", ["dout", "q", "k", "v", "out", "lse", "dq", "dk", "dv"])
def test_double_backward(device: RecordingDevice, tensor: str) -> None:
    call = call_of("backward", outputs="given")
    call[tensor].requires_grad_()
    with pytest.raises(ValueError, match=rf"^{tensor} requires grad; supported: .*\(double backward\)"):
        call.run()
    assert device.launches == []
    with torch.no_grad():
        call.run()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"total_q": None}, "total_q is None; supported: an integer, 0 to"),
        ({"topk": 4}, "topk is 4; supported with dense_prefill_backward: None"),
        ({"h_kv": 3}, "h_kv is 3 with h_q 8"),
        ({"op": "dense_prefill"}, "total_q is 300; supported with dense_prefill: None"),
    ],
)
def test_workspace_size(device: RecordingDevice, change: dict[str, Any], said: str) -> None:
    shape = {"op": "dense_prefill_backward", "batch": 2, "s_q": 290, "h_q": 8, "h_kv": 2, "total_q": 300, "device": "cpu"}
    with pytest.raises(ValueError, match=said):
        cute_mla.workspace_size(**{**shape, **change})
