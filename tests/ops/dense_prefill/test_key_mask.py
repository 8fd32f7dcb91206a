"""Dense prefill with a mask of keys: its arguments, what it refuses, and what of the mask, of keys and of values must not matter."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import cute_mla
from cute_mla import reference
from cute_mla.ops import dense_prefill
from cute_mla.ops.tensor_spec import TensorSpec
from cute_mla.spec.abi import ParamKind
from cute_mla.spec.arch import Arch
from cute_mla.spec.dense_prefill import MAX_TOKENS
from cute_mla.spec.kernel_ops import PARAMS_OF
from cute_mla.testing.operations.dense_prefill.case import DensePrefillCase, make_dense_prefill_tensors, pack_bits
from tests.ops.dense_prefill.far_call import far_call
from tests.support.bench import Bench, expect, identical
from tests.support.dispatch_modes import Allocations, NoReads
from tests.support.recording_device import RecordingDevice
from tests.support.right_calls import RightCall, call_of
from tests.support.zero_tensors import ints

MASKED = DensePrefillCase(
    lengths=((65, 150), (0, 20), (3, 1), (130, 300), (9, 0)), group=2, mask="random", mask_layout="padded", ends="clipped", sm_count=1
)


def test_a_call_is_one_launch(device: RecordingDevice) -> None:
    call = call_of("dense_prefill", outputs="given")
    mask = torch.zeros(300, 20, dtype=torch.int32)[:, 3:18]
    with Allocations() as allocations, NoReads():
        call.run(key_mask=mask, max_seqlen_kv=480)
    assert allocations.seen == []
    (launch,) = device.launches
    assert launch.kernel == f"masked_prefill_{device.arch.name}_bf16_d192"
    assert launch.args["key_mask"] is mask
    assert (launch.args["mask_stride_token"], launch.args["mask_words"]) == (20, 15)
    call.run()
    other = device.launches[1].args
    for param in PARAMS_OF["dense_prefill"]:
        if param.kind in (ParamKind.INT32, ParamKind.INT64, ParamKind.FLOAT32):
            assert launch.args[param.name] == other[param.name], param.name


def test_words_beyond_all_keys_are_not_counted(device: RecordingDevice) -> None:
    call_of("dense_prefill").run(key_mask=ints(300, 1000))
    assert device.launches[0].args["mask_words"] == math.ceil(500 / 32)


def test_a_mask_of_far_tokens(arch: Arch) -> None:
    call = far_call(1 << 36)
    words = math.ceil(MAX_TOKENS / 32)
    mask = TensorSpec((MAX_TOKENS, words), (1 << 40, 1), torch.int32, torch.device("cpu"))
    plan = dense_prefill.plan(call._replace(key_mask=mask, max_seqlen_kv=MAX_TOKENS), arch, 132)
    assert (plan.op, plan.scalars["mask_stride_token"], plan.scalars["mask_words"]) == ("masked_prefill", 1 << 40, words)
    assert 32 * words < 1 << 31


def odd_rows(name: str) -> Callable[[], Any]:
    """Return a maker of q or out whose rows begin anywhere."""
    columns = {"q": 192, "out": 128}[name]
    return lambda: torch.zeros(300, 8, columns + 1, dtype=torch.bfloat16)[..., :columns]


REFUSED: list[tuple[str, dict[str, Any], dict[str, Callable[[], Any]], str]] = [
    ("of rank 1", {}, {"key_mask": lambda: ints(300)}, r"key_mask has shape \[300\]; supported: \[300, 13 or more\]"),
    ("of too few words", {}, {"key_mask": lambda: ints(300, 12)}, r"key_mask has shape \[300, 12\]; supported: \[300, 13 or more\]"),
    ("of bool", {}, {"key_mask": lambda: ints(300, 13).bool()}, "key_mask has dtype torch.bool; supported: torch.int32"),
    ("fp16", {"dtype": "fp16"}, {}, "q with key_mask has dtype torch.float16 with 192 columns; supported: torch.bfloat16"),
    ("256 columns", {"d_qk": 256}, {}, "q has 256 columns with key_mask; supported: 192 or 128"),
    ("odd rows of q", {}, {"q": odd_rows("q")}, "q has shape .* begin at multiples of 2 bytes; supported: multiples of 16 bytes"),
    (
        "odd rows of out",
        {},
        {"out": odd_rows("out")},
        "out has shape .* begin at multiples of 2 bytes; supported: multiples of 16 bytes",
    ),
]


@pytest.mark.parametrize(("shape", "options", "message"), [entry[1:] for entry in REFUSED], ids=[entry[0] for entry in REFUSED])
def test_what_a_call_with_a_mask_refuses(
    device: RecordingDevice, shape: dict[str, Any], options: dict[str, Callable[[], Any]], message: str
) -> None:
    made = {"key_mask": ints(300, 13), **{name: make() for name, make in options.items()}}
    with pytest.raises(ValueError, match=message):
        call_of("dense_prefill", **shape).run(**made)
    assert device.launches == []


def test_gradients_are_refused(device: RecordingDevice) -> None:
    call = call_of("dense_prefill")
    call["k"].requires_grad_()
    with pytest.raises(ValueError, match="k requires grad; supported: gradients of calls without key_mask"):
        call.run(key_mask=ints(300, 13))
    with torch.no_grad():
        call.run(key_mask=ints(300, 13))
    assert len(device.launches) == 1


def test_results_may_not_lie_in_the_mask(device: RecordingDevice) -> None:
    storage = torch.zeros(300, 13, dtype=torch.int32)
    with pytest.raises(ValueError, match="lse shares memory with key_mask"):
        call_of("dense_prefill").run(key_mask=storage, lse=storage.view(torch.float32)[:, :8])


def test_the_machine_code_gives_the_same_bits(arch: Arch) -> None:
    case = replace(MASKED, lengths=((65, 150), (3, 20)), group=1, mask="edges", causal=True)
    tensors = make_dense_prefill_tensors(case)
    results = []
    for code in ("ptx", "sass"):
        with cute_mla.simulate(arch, 1, code=code):
            results.append(RightCall(case, tensors).run())
    assert identical(*results)
    expect(case, tensors, results[0])


def test_a_mask_of_ones_gives_the_bits_of_a_call_without(bench: Bench) -> None:
    case = replace(MASKED, lengths=((130, 300), (3, 1)), mask=None, causal=True)
    tensors = make_dense_prefill_tensors(case)
    with cute_mla.simulate(bench.arch, 2):
        plain, masked = (RightCall(case, tensors).run(key_mask=mask) for mask in (None, ints(case.total_q, 10) - 1))
    assert identical(plain, masked)


def test_what_hides_a_key_twice_may_say_anything_once(bench: Bench) -> None:
    """Bits that causal hides, bits behind the last key, and words beyond the mask's columns that the call gives."""
    case = replace(MASKED, causal=True)
    tensors = make_dense_prefill_tensors(case)
    assert tensors.key_mask is not None
    clean = torch.zeros_like(tensors.key_mask)
    for sequence, (s_q, s_k) in enumerate(case.lengths):
        rows = slice(case.q_starts[sequence], case.q_starts[sequence] + s_q)
        seen = reference.mask_keys(tensors.key_mask[rows], s_k) & reference.visible_keys(s_q, s_k, True, torch.device("cpu"))
        pack_bits(seen, clean[rows])
    assert not torch.equal(clean, tensors.key_mask)
    with cute_mla.simulate(bench.arch, 2):
        dirty, other = (RightCall(case, tensors).run(key_mask=mask) for mask in (tensors.key_mask, clean))
    assert identical(dirty, other)


@pytest.mark.parametrize("s_k", [128, 129, 4097])
def test_tiles_without_a_visible_key_are_not_touched(bench: Bench, s_k: int) -> None:
    """Their values may even be NaN. Of all tiles the rows see one key in the first, or one in the last."""
    case = DensePrefillCase(lengths=((130, s_k),), sm_count=1)
    tensors = make_dense_prefill_tensors(case)
    last = (s_k - 1) // 128 * 128
    mask = ints(case.total_q, math.ceil(s_k / 32))
    seen = torch.zeros(130, s_k, dtype=torch.bool)
    seen[:, last + (s_k - 1 - last) // 2] = True
    pack_bits(seen, mask[case.q_starts[0] : case.q_starts[0] + 130])
    tensors = replace(tensors, key_mask=mask)
    own = slice(case.k_starts[0], case.k_starts[0] + last)
    with cute_mla.simulate(bench.arch, 1):
        expected = RightCall(case, tensors).run()
        tensors.k[own], tensors.v[own] = math.nan, math.nan
        assert identical(RightCall(case, tensors).run(), expected)
    assert expected[0].isfinite().all()


def test_rows_that_see_nothing(bench: Bench) -> None:
    """Rows in a tile that others see something of, and where nobody does."""
    case = replace(MASKED, lengths=((130, 300), (3, 64), (1, 1)), empty_lse=-math.inf)
    tensors = make_dense_prefill_tensors(case)
    assert tensors.key_mask is not None
    tensors.key_mask[130:] = 0
    tensors.key_mask[:130:3] = 0
    with cute_mla.simulate(bench.arch, 1):
        out, lse = RightCall(case, tensors).run(empty_lse=-math.inf)
    hidden = torch.zeros(case.total_q, dtype=torch.bool)
    hidden[130:], hidden[:130:3] = True, True
    assert (out[hidden] == 0).all()
    assert (lse[hidden] == -math.inf).all()
    assert lse[~hidden].isfinite().any()


@pytest.mark.parametrize("hidden", [30.0, 1e30, math.inf, -math.inf, math.nan])
def test_hidden_scores_decide_nothing(bench: Bench, hidden: float) -> None:
    """Neither scores far above all that a row sees, nor numbers that are none; other rows see some of the keys.

    Rows of one warp see a key less or more, so that only some of the warp's references could follow a hidden score.
    """
    case = replace(MASKED, lengths=((130, 300),), mask="edges", mask_layout="packed")
    tensors = make_dense_prefill_tensors(case)
    first, mask = case.k_starts[0], tensors.key_mask
    assert mask is not None
    rows = slice(case.q_starts[0], case.q_starts[0] + 130)
    seen = torch.rand(130, 300, generator=torch.Generator().manual_seed(0)) < 0.5
    seen[:, 2::7] = False
    seen[::3, 5::7] = False
    pack_bits(seen, mask[rows])
    tensors.k[first : first + 300] = torch.randn(
        tensors.k[first : first + 300].shape, generator=torch.Generator().manual_seed(1)
    ).bfloat16()
    tensors.k[first + 5 : first + 300 : 7] *= 20
    with cute_mla.simulate(bench.arch, 1):
        expected = RightCall(case, tensors).run()
        expect(case, tensors, expected)
        tensors.k[first + 2 : first + 300 : 7] = hidden * tensors.q[rows].mean(0)[:1] if hidden == 30.0 else hidden
        assert identical(RightCall(case, tensors).run(), expected)


def test_keys_beyond_the_mask_are_hidden(bench: Bench) -> None:
    """A sequence that is longer than the call says."""
    case = replace(MASKED, lengths=((5, 300),), mask="edges", mask_layout="packed")
    tensors = make_dense_prefill_tensors(case)
    assert tensors.key_mask is not None
    short = tensors.key_mask[:, :3]
    with cute_mla.simulate(bench.arch, 1):
        out, lse = RightCall(case, tensors).run(key_mask=short, max_seqlen_kv=96)
    wanted = reference.masked_prefill(tensors.q, tensors.k, tensors.v, (tensors.cu_seqlens_q, tensors.cu_seqlens_k), short)
    torch.testing.assert_close(out.float(), wanted[0], rtol=0, atol=1e-2)
    torch.testing.assert_close(lse, wanted[1], rtol=1e-5, atol=1e-5)
