"""topk_indices: the public call, what it launches, refuses and computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

import cute_mla
from cute_mla import reference
from cute_mla.indexer import topk_indices
from cute_mla.spec.arch import ARCHS, Arch
from cute_mla.spec.topk_indices import (
    BLOCKS_PER_SM,
    CLUSTERS,
    LEAST_SHARED,
    MAX_COLUMNS,
    MAX_ROWS,
    MAX_STREAMED_TOPK,
    MAX_TOPK,
    NARROW,
    RESIDENT,
    WIDE,
    TopkIndicesConfig,
    config_for,
)
from cute_mla.testing.operations.topk_indices.case import TopkIndicesCase
from tests.support.recording_device import RecordingDevice
from tests.support.right_calls import RightCall
from tests.support.right_calls import changed as changed_call
from tests.support.zero_tensors import numbers

FEW_SMS = 1  # of a device on which one CTA takes a row of up to RESIDENT numbers
SHARED = RESIDENT // WIDE + 1  # numbers of a row that a cluster shares where rows are few


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def selected(arch: Arch, logits: torch.Tensor, lengths: torch.Tensor, topk: int, sm_count: int | None = None) -> torch.Tensor:
    """Return the result on the simulated device, which is the reference's."""
    with cute_mla.simulate(arch.name, sm_count) as device:
        found = topk_indices(logits, lengths, topk)
        assert device.launches == 1
    assert torch.equal(found, reference.topk_indices(logits, lengths, topk))
    return found


@pytest.mark.parametrize("code", ["ptx", "sass"])
def test_ties_go_to_the_lower_position(arch: Arch, code: str) -> None:
    """-0 equals +0, NaN of either sign comes behind -inf, and all kinds occur among the chosen."""
    logits = torch.tensor([[-0.0, math.nan, 1.0, 0.0, -math.inf, -0.0, -math.nan, 1.0, math.inf, 0.0]])
    wanted = {1: [8], 3: [2, 7, 8], 4: [0, 2, 7, 8], 5: [0, 2, 3, 7, 8], 8: [0, 2, 3, 4, 5, 7, 8, 9], 9: [0, 1, 2, 3, 4, 5, 7, 8, 9]}
    for topk, positions in wanted.items():
        with cute_mla.simulate(arch.name, code=code):
            assert topk_indices(logits, numbers(10), topk).tolist() == [positions]


@pytest.mark.in_turn
@pytest.mark.parametrize("sm_count", [FEW_SMS, None], ids=["alone", "shared"])
@pytest.mark.parametrize("topk", [255, 256, 257])
def test_equal_numbers_beyond_any_list(arch: Arch, topk: int, sm_count: int | None) -> None:
    """Every number is a candidate of its warp, whose list holds 256; topk is one below, at and one above the greater numbers."""
    logits = torch.full((1, 8 * 512 + 5), -2.0)
    logits[:, 7 : 7 + 16 * 256 : 16] = 3.0
    selected(arch, logits, numbers(logits.shape[1]), topk, sm_count)


@pytest.mark.in_turn
@pytest.mark.parametrize("values", ["narrow", "rising", "falling", "next"])
def test_numbers_that_share_their_upper_bits(values: str, arch: Arch) -> None:
    """In one digit of the first histogram; neighbouring floats share all but the last bits."""
    places = torch.arange(SHARED)
    logits = {
        "narrow": 1.0 + 0.245 * torch.rand(SHARED, generator=torch.Generator().manual_seed(3)),
        "rising": places * 1e-5 + 1.0,
        "falling": 1.0 - places * 1e-5,
        "next": (places * 7919 % SHARED + (1 << 30)).int().view(torch.float32),
    }[values]
    selected(arch, logits[None], numbers(SHARED), 700)


def test_lengths_by_rule(arch: Arch) -> None:
    """Negative: none; more than n: n. What lies behind a length is never looked at."""
    lengths = numbers(0, -5, 1, 63, 64, 65, 300, 301, 1 << 30)
    logits = normal(9, 300)
    for row, length in enumerate(lengths.tolist()):
        logits[row, max(length, 0) :] = math.nan if row % 2 else math.inf
    found = selected(arch, logits, lengths, 64)
    assert (found[:2] == -1).all()
    assert found[2].tolist() == [0, *[-1] * 63]
    assert found[3].tolist() == [*range(63), -1]
    assert found[4].tolist() == [*range(64)]


@pytest.mark.in_turn
@pytest.mark.parametrize("schedule", ["random", "adversarial"])
def test_a_row_is_the_same_however_it_is_divided(schedule: str, arch: Arch) -> None:
    """Alone and among others, by one CTA and by a cluster, whatever the order of warps."""
    logits, lengths = torch.round(normal(3, SHARED) * 4), numbers(SHARED, SHARED - 9, 400)
    results = []
    for sm_count in (FEW_SMS, None):
        with cute_mla.simulate(arch.name, sm_count, schedule=schedule, seed=3):
            results.append(topk_indices(logits, lengths, 333))
            results.append(torch.cat([topk_indices(logits[row : row + 1], lengths[row : row + 1], 333) for row in range(3)]))
    assert all(torch.equal(found, results[0]) for found in results)


def test_what_is_launched(arch: Arch) -> None:
    logits, lengths = torch.zeros(3, 2 * SHARED)[:, ::1], numbers(1, 2, 3)
    with RecordingDevice(arch).active() as device:
        out = topk_indices(logits, lengths, 5)
        topk_indices(logits[:, :60], lengths, 5, out=out)
    shared, alone = device.launches
    assert (shared.kernel, shared.grid, shared.pdl) == (f"topk_indices_{arch.name}_fp32_cluster{WIDE}", (3 * WIDE, 1, 1), True)
    assert (alone.kernel, alone.grid) == (f"topk_indices_{arch.name}_fp32_cluster{NARROW}", (3, 1, 1))
    assert (alone.args["columns"], alone.args["logits_stride_row"], alone.args["topk"]) == (60, 2 * SHARED, 5)
    assert device.poisoned == [out.data_ptr()]


@pytest.mark.parametrize("name", ["sm90", "sm100"])
def test_the_variant_of_a_shape(name: str) -> None:
    """One CTA keeps at most RESIDENT numbers. CTAs share longer rows, and where rows are few shorter ones, as many as run at once.

    Where two CTAs for each row are too many, one reads a long row once, unless topk is more than its list has room for.
    """
    sms = ARCHS[name].sm_count
    many, more, most = (BLOCKS_PER_SM * sms // cluster + 1 for cluster in (8, 4, 2))
    for rows, columns, cluster in (
        (1, RESIDENT // WIDE, 1),
        (1, SHARED, 8),
        (many, SHARED, 1),
        (many, RESIDENT, 1),
        (many - 1, RESIDENT + 1, 8),
        (many, RESIDENT + 1, 4),
        (more - 1, 1 << 20, 4),
        (more, 1 << 20, 2),
        (most - 1, 1 << 20, 2),
    ):
        assert config_for(rows, columns, 64, sms) == TopkIndicesConfig("fp32", cluster)
    assert config_for(most, RESIDENT, 64, sms) == TopkIndicesConfig("fp32", NARROW)
    for topk in (1, MAX_STREAMED_TOPK):
        assert config_for(most, RESIDENT + 1, topk, sms, slots=True) == TopkIndicesConfig("fp32", NARROW, slots=True, stream=True)
    assert config_for(most, RESIDENT + 1, MAX_STREAMED_TOPK + 1, sms) == TopkIndicesConfig("fp32", LEAST_SHARED)
    found = {config_for(rows, columns, 64, sms).cluster for rows in (1, 40, sms, 9999) for columns in (1, 1 << 20)}
    assert found == set(CLUSTERS)


changed: Callable[..., RightCall] = partial(changed_call, TopkIndicesCase(rows=3, columns=40, topk=8, outputs="given"))
BAD = {
    "too many columns": (changed(logits=lambda _: torch.empty(3, MAX_COLUMNS + 1, device="meta")), f"rows of {MAX_COLUMNS} numbers"),
    "too many rows": (changed(logits=lambda _: torch.empty(MAX_ROWS + 1, 4, device="meta")), f"to {MAX_ROWS} rows"),
    "lengths": (changed(lengths=lambda lengths: lengths[:2]), r"lengths has shape \[2\]; supported: \[3\]"),
    "great topk": (changed(topk=lambda _: MAX_TOPK + 1), f"topk is {MAX_TOPK + 1}; supported"),
    "gradients": (changed(logits=torch.Tensor.requires_grad_), "logits requires grad"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    arguments, message = BAD[name]
    with RecordingDevice().active() as device, pytest.raises(ValueError, match=message):
        arguments.run()
    assert device.launches == []


def test_a_result_shares_no_memory() -> None:
    memory = torch.zeros(3, 40)
    with RecordingDevice().active(), pytest.raises(ValueError, match="out shares memory with logits"):
        topk_indices(memory, numbers(1, 2, 3), 8, out=memory.view(torch.int32)[:, 30:38])
    lengths = torch.zeros(24, dtype=torch.int32)
    with RecordingDevice().active(), pytest.raises(ValueError, match="out shares memory with lengths"):
        topk_indices(memory, lengths[:3], 8, out=lengths.view(3, 8))
