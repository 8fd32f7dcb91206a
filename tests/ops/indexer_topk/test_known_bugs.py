"""Bugs that were reported of other indexers, by the number of their group. The smoke suites and the other tests of these ops have the rest.

[1] candidates beyond a list; [2] plateaus of 0 and -0; [3] positions out of NaN and infinities; [4] lengths of 0, below 0, about borders;
[5] more than 2^31 elements; [8] graphs with other lengths; [9] bits that vary; [10] numbers of heads; [11] scales taken for another format;
[12] layers that share positions.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import cute_mla
from cute_mla import reference
from cute_mla.indexer import fp8_mqa_logits, indexer_topk, indexer_topk_prefill, topk_indices
from cute_mla.spec.arch import Arch
from cute_mla.spec.topk_indices import RESIDENT
from cute_mla.testing.operations.indexer_topk import suites as chain_suite
from cute_mla.testing.operations.indexer_topk.case import IndexerTopkCase
from cute_mla.testing.operations.indexer_topk.record import INDEXER_TOPK
from cute_mla.testing.operations.mqa_logits import suites as logits_suite
from cute_mla.testing.operations.mqa_logits.case import MqaLogitsCase
from cute_mla.testing.operations.mqa_logits.record import expected_logits
from cute_mla.testing.operations.topk_indices import suites as topk_suite
from tests.support.recording_device import RecordingDevice
from tests.support.right_calls import call_of
from tests.support.zero_tensors import numbers

WHOLE = MqaLogitsCase(heads=8, windows="whole")


def chosen(arch: Arch, logits: torch.Tensor, lengths: torch.Tensor, topk: int, sm_count: int | None = None) -> torch.Tensor:
    """Return the positions on the simulated device, which are the reference's."""
    with cute_mla.simulate(arch.name, sm_count):
        found = topk_indices(logits, lengths, topk)
    assert torch.equal(found, reference.topk_indices(logits, lengths, topk))
    return found


@pytest.mark.parametrize("columns", [RESIDENT, RESIDENT + 1])
@pytest.mark.parametrize("values", ["bin", "equal", "above"])
def test_rows_in_one_digit_of_half_precision(arch: Arch, columns: int, values: str) -> None:
    """[1] 16,384 and 16,385 numbers in [1, 1.245), all equal, or with topk - 1 greater ones."""
    draw = torch.Generator().manual_seed(columns)
    logits = {
        "bin": 1 + 0.245 * torch.rand(1, columns, generator=draw),
        "equal": torch.full((1, columns), 1.125),
        "above": torch.full((1, columns), 1.0).scatter_(1, torch.randperm(columns, generator=draw)[None, :2047], 1.2),
    }[values]
    chosen(arch, logits, numbers(columns), 2048, sm_count=1)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_plateau_is_chosen_from_the_front(arch: Arch, sign: int) -> None:
    """[2] Where no head is positive, all logits are 0, or -0 with negative weights, which are equal: the first keys are chosen."""
    call = call_of(WHOLE, tokens=2, keys=300)
    keys, scales = call["kv"]
    q, keys = call["q"].float().abs().to(keys.dtype), keys.float().abs().neg().to(keys.dtype)
    arguments = (q, (keys, scales), sign * (call["weights"].abs() + 1))
    with cute_mla.simulate(arch.name):
        assert (fp8_mqa_logits(*arguments, numbers(0, 0), numbers(300, 300)) == 0).all()
        found = indexer_topk_prefill(arguments[0], arguments[1], arguments[2], numbers(0, 100), numbers(300, 300), 70)
    assert found.tolist() == [[*range(70)]] * 2


def test_nan_leads_to_no_position_outside(arch: Arch) -> None:
    """[3] Keys with NaN, infinities among the scales: each position occurs once, within the length, and NaN comes last."""
    call = call_of(WHOLE, tokens=3, keys=200, values="normal")
    keys, scales = call["kv"]
    keys.view(torch.uint8)[::3, 5], scales[1::30] = 0x7F, math.inf
    operands = (call["q"], call["kv"], call["weights"])
    lengths = numbers(200, 150, 90)
    with cute_mla.simulate(arch.name):
        found = indexer_topk_prefill(*operands, numbers(0, 0, 0), lengths, 80)
        logits = fp8_mqa_logits(*operands, numbers(0, 0, 0), lengths, False)
    assert torch.equal(found, reference.topk_indices(logits, lengths, 80))
    for row, length in zip(found, lengths.tolist(), strict=True):
        assert len(set(row.tolist())) == 80
        assert 0 <= int(row.min()) <= int(row.max()) < length
    assert not logits[0, found[0].long()].isnan().any()
    assert int(logits[2, found[2].long()].isnan().sum()) == 80 - int((~logits[2, :90].isnan()).sum())


def test_lengths_about_topk(arch: Arch) -> None:
    """[4] The indexer's topk, one below, at and above it; NaN behind the length."""
    logits = torch.randn(4, 2060, generator=torch.Generator().manual_seed(4))
    lengths = numbers(2047, 2048, 2049, -(1 << 31))
    for row, length in enumerate(lengths.tolist()):
        logits[row, max(length, 0) :] = math.nan
    found = chosen(arch, logits, lengths, 2048)
    assert found[0].tolist() == [*range(2047), -1]
    assert found[1].tolist() == [*range(2048)]
    assert (found[3] == -1).all()


def test_4096_requests(arch: Arch) -> None:
    """[4] Of which few have keys. The others' entries of the table name no page."""
    with_keys = {0: 17, 5: 1, 1029: 65, 4095: 40}
    call = call_of(MqaLogitsCase(requests=4096, tokens=1, heads=1, keys=65, page_size=64, layout="aliased"))
    call["context_lens"] = numbers(*(with_keys.get(request, -(request % 2)) for request in range(4096)))
    call["block_table"][call["context_lens"] <= 0] = 2_147_480_000
    logits = torch.full((4096, 65), math.inf)
    with cute_mla.simulate(arch.name):
        call.run(clean_logits=False, out=logits)
    assert {row: count for row, count in enumerate(logits.isfinite().sum(1).tolist()) if count} == with_keys
    rows = list(with_keys)
    expected = expected_logits(**call)[rows]
    assert torch.equal(logits[rows], expected.masked_fill(expected.isinf(), math.inf))


def test_suites_have_far_operands() -> None:
    """[5] The last row of each operand lies more than 2^31 elements from the first, in cases of the smoke suites."""
    assert {"far_q", "far_keys", "far_weights", "far_table"} <= {case.layout for case in logits_suite.SMOKE}
    assert "far_rows" in {case.layout for case in topk_suite.SMOKE}
    assert "far_keys" in {case.layout for case in chain_suite.SMOKE}
    for suite in (logits_suite, topk_suite, chain_suite):
        assert "far_requests" in {case.outputs for case in suite.SMOKE}


PAGED = IndexerTopkCase(requests=2, tokens=2, keys=300, heads=8, page_size=64, topk=40)


def test_a_call_again_with_other_lengths(arch: Arch) -> None:
    """[8] A captured graph makes the launches of its call again: nothing in them follows the lengths, which are read on the device."""
    with cute_mla.simulate(arch.name):
        arguments = call_of(PAGED, outputs="given")
    lengths, out = arguments["context_lens"], arguments["out"]
    launched = []
    for given in ((257, 300), (256, 0)):
        lengths.copy_(numbers(*given))
        with RecordingDevice(arch).active() as device:
            indexer_topk(**arguments)
        launched.append([(launch.kernel, launch.grid, plain(launch.args)) for launch in device.launches])
        with cute_mla.simulate(arch.name):
            indexer_topk(**arguments)
        expected = {name: value for name, value in arguments.items() if name not in ("out", "workspace")}
        assert torch.equal(out, reference.indexer_topk(**expected))
    assert launched[0] == launched[1]


def plain(arguments: Any) -> dict[str, Any]:
    """Return launch arguments with addresses in the place of tensors."""
    return {name: value.data_ptr() if hasattr(value, "data_ptr") else value for name, value in dict(arguments).items()}


def test_eight_runs_have_the_same_bits(arch: Arch) -> None:
    """[9] Whatever the order of warps and of atomic sums; logits whose last bits depend on the order of a sum."""
    call, results = call_of(MqaLogitsCase(requests=2, tokens=2, heads=33, keys=300, page_size=64, values="normal")), []
    for seed in range(8):
        with cute_mla.simulate(arch.name, schedule="random", seed=seed):
            logits = call.run()
            results.append((logits, topk_indices(torch.round(logits), numbers(299, 300, 299, 300), 60)))
    assert all(torch.equal(logits, results[0][0]) and torch.equal(found, results[0][1]) for logits, found in results)


def test_suites_have_every_number_of_heads() -> None:
    """[10] From 1 to 64, in both kinds of calls."""
    for is_paged in (False, True):
        heads = {case.heads for case in logits_suite.OP_SUITES.full() if (case.page_size is not None) == is_paged}
        assert heads == set(range(1, 65))


def test_scales_are_fp32_of_any_value(arch: Arch) -> None:
    """[11] Scales that are no powers of two, whose bytes are no four equal e8m0 numbers, in a cache as well as in a row."""
    call = call_of(MqaLogitsCase(tokens=1, heads=8, keys=130, page_size=64))
    count = call["cache"].shape[1] * 128
    scales = call["cache"].flatten(1)[:, count:].view(torch.float32)
    scales.copy_(torch.where(scales.isnan(), scales, scales * (3 / 448)))
    with cute_mla.simulate(arch.name):
        found = call.run()
    torch.testing.assert_close(found, expected_logits(**call), rtol=1e-6, atol=0)
    assert found.unique().numel() > 60


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e8m0fnu, torch.bfloat16])
def test_scales_of_another_type_are_refused(dtype: torch.dtype) -> None:
    """[11] A cache is bytes, so its scales are fp32 by contract; scales of keys in a row say what they are."""
    call = call_of(WHOLE, tokens=1, keys=40)
    scales = torch.zeros(40, dtype=torch.uint8).view(dtype) if dtype.itemsize == 1 else torch.zeros(40, dtype=dtype)
    with (
        RecordingDevice().active() as device,
        pytest.raises(ValueError, match=f"the scale of kv has dtype {dtype}; supported: torch.float32"),
    ):
        indexer_topk_prefill(call["q"], (call["kv"][0], scales), call["weights"], call["ks"], call["ke"], 5)
    assert device.launches == []


@pytest.mark.parametrize("slots", [False, True])
def test_every_entry_of_a_result_is_written(arch: Arch, slots: bool) -> None:
    """[12] A buffer that layers share holds nothing of the call before: -1 behind the last, also of requests without keys."""
    case = replace(PAGED, requests=3, lengths="edges", slots=slots, topk=90)
    call = call_of(case)
    out = torch.full((6, 90), 12345, dtype=torch.int32)
    with cute_mla.simulate(arch.name):
        call.run(out=out)
    assert not (out == 12345).any()
    assert torch.equal(out, INDEXER_TOPK.reference(case, call.tensors)[0])
