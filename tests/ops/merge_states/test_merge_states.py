"""merge_states: the public call, what it launches, refuses and computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

import cute_mla
from cute_mla import reference
from cute_mla.spec.arch import Arch
from cute_mla.spec.merge_states import MAX_HEADS
from cute_mla.testing.operations.merge_states.case import MergeStatesCase
from tests.support.recording_device import RecordingDevice
from tests.support.right_calls import RightCall
from tests.support.right_calls import changed as changed_call

HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # relative to the value, at worst


def states(count: int, *shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Outs and lses, stacked."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, *shape, generator=draw).to(dtype), 3 * torch.randn(count, *shape[:-1], generator=draw)


def expect(result: tuple[torch.Tensor, torch.Tensor], outs: torch.Tensor, lses: torch.Tensor, empty_lse: float = math.inf) -> None:
    """Compare the result with the reference."""
    (out, lse), (expected, expected_lse) = result, reference.merge_states(outs, lses, empty_lse)
    assert ((out.float() - expected).abs() <= expected.abs() * 1.01 * HALF_ULP[out.dtype] + 1e-5).all()
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("empty_lse", [math.inf, -math.inf])
def test_infinite_lse_of_either_sign_weighs_nothing(arch: Arch, empty_lse: float) -> None:
    outs, lses = states(3, 4, 2, 512)
    for state, token, value in ((0, 0, math.inf), (2, 0, -math.inf), (0, 1, -math.inf), (1, 1, math.inf), (2, 1, math.inf)):
        outs[state, token], lses[state, token] = math.nan, value
    with cute_mla.simulate(arch.name):
        result = cute_mla.merge_states(outs, lses, empty_lse=empty_lse)
    expect(result, outs, lses, empty_lse)
    assert (result[1][1] == empty_lse).all()
    assert (result[0][1] == 0).all()


def test_merging_in_two_steps_is_merging_at_once(arch: Arch) -> None:
    outs, lses = states(4, 6, 2, 128, dtype=torch.float16)
    with cute_mla.simulate(arch.name):
        halves = [cute_mla.merge_states(outs[i : i + 2], lses[i : i + 2]) for i in (0, 2)]
        out, lse = cute_mla.merge_states([half[0] for half in halves], [half[1] for half in halves])
        whole, whole_lse = cute_mla.merge_states(outs, lses)
    torch.testing.assert_close(out, whole, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-6, atol=2e-6)


def test_what_is_launched(arch: Arch) -> None:
    outs, lses = states(3, 2, 5, 9, 128)
    with RecordingDevice(arch).active() as device:
        out, lse = cute_mla.merge_states(list(outs), list(lses))
        cute_mla.merge_states(outs, lses, out=out, lse=lse)
    listed, stacked = device.launches
    assert listed.kernel == f"merge_states_{arch.name}_bf16_d128"
    assert (listed.grid, listed.pdl) == ((10, 2, 1), True)
    assert [listed.args[f"state_out_{i}"].data_ptr() for i in range(3)] == [out.data_ptr() for out in outs]
    assert listed.args["state_lse_3"] is None
    assert (listed.args["state_out_stride_state"], listed.args["states"]) == (0, 3)
    assert stacked.args["state_out_1"] is None
    assert (stacked.args["state_out_stride_state"], stacked.args["state_lse_stride_state"]) == (2 * 5 * 9 * 128, 2 * 5 * 9)
    assert device.poisoned == [out.data_ptr(), lse.data_ptr()]


changed: Callable[..., RightCall] = partial(changed_call, MergeStatesCase(tokens=5, h_q=4, form="stacked", outputs="given"))
MANY_HEADS = torch.empty(2, 1, MAX_HEADS + 1, device="meta")
BAD = {
    "too many tensors": (changed(outs=lambda outs: [outs[0]] * 9, lses=lambda lses: [lses[0]] * 9), "outs has 9 tensors"),
    "no tensors": (changed(outs=lambda _: [1, 2], lses=list), r"outs\[0\] is 1; supported: a torch tensor"),
    "shapes differ": (changed(outs=lambda outs: [outs[0], outs[1, :4]], lses=list), r"outs\[1\] is .*shape \[4, 4, 512\]"),
    "strides differ": (changed(outs=list, lses=lambda lses: [lses[0], lses[1].T.contiguous().T]), r"lses\[1\] is .*strides \[1, 5\]"),
    "columns": (changed(outs=lambda outs: outs[..., :64]), r"out of shape \[5, 4, 64\]"),
    "type of 256 columns": (
        changed(outs=lambda outs: outs[..., :256].half()),
        r"a state's out has dtype torch\.float16 with 256 columns; supported: torch\.bfloat16",
    ),
    "shape of lses": (changed(lses=lambda lses: lses[:, :4]), r"a state's lse has shape \[4, 4\]; supported: \[5, 4\]"),
    "states upon one another": (changed(outs=lambda outs: outs[:1].expand(2, -1, -1, -1)), "states apart"),
    "heads": (
        changed(outs=lambda _: torch.empty(2, 1, MAX_HEADS + 1, 512, device="meta", dtype=torch.bfloat16), lses=lambda _: MANY_HEADS),
        f"supported: to {MAX_HEADS} heads",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    arguments, message = BAD[name]
    with RecordingDevice().active() as device, pytest.raises(ValueError, match=message):
        arguments.run()
    assert device.launches == []


def test_empty_lse_is_an_infinity() -> None:
    with RecordingDevice().active(), pytest.raises(ValueError, match="empty_lse is 0"):
        changed().run(empty_lse=0.0)
