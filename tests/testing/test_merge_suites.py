"""The suites of merge_states: every factor value, every variant, operands as the cases say, and what the API launches for them."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from cute_mla.manifest import kernel_name
from cute_mla.spec.arch import Arch
from cute_mla.spec.merge_states import HEAD_DIMS, LISTED_STATES, closed_variants
from cute_mla.testing.cases.far import FAR_DIMENSIONS, FAR_ELEMENTS
from cute_mla.testing.cases.merge_states import EmptyStates, LseValues, MergeStatesCase, StateForm, StateLayout, make_merge_states_tensors
from cute_mla.testing.operations import operation
from cute_mla.testing.runner import Target, run_case, schedules
from cute_mla.testing.suites import suite
from cute_mla.testing.suites.entries import SMOKE_TILES
from cute_mla.testing.suites.merge_states import SMOKE, full_cases
from tests.support.recording_device import RecordingDevice

FACTORS: dict[str, tuple[object, ...]] = {
    "dtype": ("bf16", "fp16"),
    "head_dim": HEAD_DIMS,
    "form": get_args(StateForm),
    "layout": get_args(StateLayout),
    "empty": get_args(EmptyStates),
    "outputs": ("allocated", "given", "strided", "odd", *FAR_DIMENSIONS),
    "in_place": (False, True),
    "states": (1, 2, 3, LISTED_STATES, 33, 40, 65),
    "values": get_args(LseValues),
    "empty_lse": (None, -math.inf),
    "tokens": (0, 2, 3),
}


@pytest.mark.parametrize(("factor", "value"), [(factor, value) for factor, values in FACTORS.items() for value in values])
def test_smoke_has_every_factor_value(factor: str, value: object) -> None:
    assert any(getattr(case, factor) == value for case in SMOKE)


def test_smoke_has_every_variant_and_is_small(arch: Arch) -> None:
    assert {case.problem(arch).config for case in SMOKE if case.tokens} == set(closed_variants())
    assert 12 <= len(SMOKE) == len({case.id for case in SMOKE}) <= 60
    assert all(case.tiles <= SMOKE_TILES for case in SMOKE)
    assert [entry.case for entry in suite("smoke", "merge_states", simulated=True)] == list(SMOKE)


def test_full_is_run_whole() -> None:
    every = full_cases()
    assert len(every) == len({case.id for case in every}) > 500
    assert {entry.mode for entry in suite("full", "merge_states", simulated=True)} == {"whole"}


@pytest.mark.parametrize("case", SMOKE, ids=lambda case: case.id)
def test_a_case_launches_its_kernel_and_gets_its_outputs(case: MergeStatesCase, arch: Arch) -> None:
    op = operation(case)
    tensors = op.make_tensors(case, "cpu")
    with RecordingDevice(arch).active() as device:
        results = dict(zip(op.results, op.call(case, tensors, None), strict=True))
    assert [result.shape for result in results.values()] == [(*case.rows_shape, case.head_dim), case.rows_shape]
    assert all(results[name] is given.tensor for name, given in tensors.output_buffers.items())
    name = kernel_name("merge_states", arch.name, case.problem(arch).config.name)
    assert [launch.kernel for launch in device.launches] == ([name] if case.tokens else [])


def test_empty_rows_are_infinite_and_nan() -> None:
    case = MergeStatesCase(states=3, tokens=7, h_q=3, empty="some")
    tensors = make_merge_states_tensors(case)
    empty = tensors.lses.isinf()
    assert (tensors.lses[empty] > 0).any()
    assert (tensors.lses[empty] < 0).any()
    assert torch.equal(tensors.outs.isnan().all(dim=-1), empty)
    assert torch.equal(tensors.outs.isnan().any(dim=-1), empty)
    assert empty.all(dim=0).any()
    assert ((~empty).sum(dim=0) > 1).any()
    assert not make_merge_states_tensors(MergeStatesCase()).lses.isinf().any()


@pytest.mark.parametrize("layout", get_args(StateLayout))
def test_layouts_change_places_and_no_values(layout: StateLayout) -> None:
    packed, placed = (make_merge_states_tensors(MergeStatesCase(tokens=4, h_q=3, batch=2, layout=name)) for name in ("packed", layout))
    assert torch.equal(packed.outs, placed.outs)
    assert torch.equal(packed.lses, placed.lses)
    assert placed.outs.is_contiguous() == (layout == "packed")
    assert (placed.outs.stride(-2) < placed.outs.stride(-3)) == (layout not in ("heads_first", "far_heads"))
    assert (placed.lses.stride(-1) == 1) == (layout not in ("heads_first", "far_heads"))


@pytest.mark.parametrize("layout", ["far_states", *FAR_DIMENSIONS])
def test_the_last_of_a_far_dimension_is_far(layout: StateLayout) -> None:
    tensors = make_merge_states_tensors(MergeStatesCase(states=3, tokens=4, h_q=3, batch=2, form="stacked", layout=layout))
    dim = ("far_states", *FAR_DIMENSIONS).index(layout)
    for tensor in (tensors.outs, tensors.lses):
        assert (tensor.shape[dim] - 1) * tensor.stride(dim) >= FAR_ELEMENTS
        assert max(stride for other, stride in enumerate(tensor.stride()) if other != dim) < FAR_ELEMENTS // 8


def test_a_case_in_place_leaves_the_operands_to_the_next_run(arch: Arch) -> None:
    case = next(case for case in SMOKE if case.in_place)
    assert all(record.passed for record in run_case(case, Target(arch.name, "sim", schedules(2, 0))))
