"""Elements of launches and parameters, and how they are recorded."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import cute_mla
from cute_mla.runtime import simulated_device
from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.spec.arch import Arch
from cute_mla.testing.cases.dense_decode import DenseDecodeCase
from cute_mla.testing.cases.sparse_decode import Pool, SparseDecodeCase
from tests.cover.elements import case_elements, float_class, number_class, structure_of, value_classes
from tests.cover.recording import CoverRecorder, of_parameters
from tests.cover.records import Reached
from tests.support.bench import Bench


@pytest.mark.parametrize(
    ("alike", "other"),
    [
        ((2, 62), 63),
        ((3, 61), 1),
        ((5, 7), 6),
        ((66, 126), 64),
        ((65,), 129),
        ((130, 1_000_002), 1 << 31),
        ((-2, -6), 2),
        ((0,), 64),
        ((127,), 63),
    ],
)
def test_numbers_of_a_class(alike: tuple[int, ...], other: int) -> None:
    assert len({number_class(number) for number in alike}) == 1
    assert number_class(other) != number_class(alike[0])


def test_floats_of_a_class() -> None:
    classes = [float_class(number) for number in (0.0, float("inf"), -float("inf"), float("nan"), 1e-4, 0.04, 1.0, 30.0, -30.0)]
    assert len(set(classes)) == len(classes)
    assert float_class(0.04) == float_class(0.05)


def test_fields_of_a_case_and_of_its_parts() -> None:
    case = SparseDecodeCase(batch=2, h_q=9, main=Pool(100, 64, 61, (0, 65)), seed=3)
    found = set(case_elements(case))
    assert {"h_q=<64:odd", "main.topk=<128:0", "main.page_size=<64:odd", "main.lengths=0", "main.lengths=<128:1"} <= found
    assert {"main.lengths items=<64:even", "extra=None", "cache=fp8_656", "dtype=bf16"} <= found
    assert not any(item.startswith("seed") for item in found)
    assert set(case_elements(replace(case, seed=4))) == found
    assert list(value_classes("flag", True)) == ["flag=True"]


def reached(bench: Bench, case: DenseDecodeCase, folder: Path) -> Reached:
    """Return what a case reaches."""
    recorder = CoverRecorder(folder)
    with recorder.listening():
        bench.judge(case)
    return recorder.reached


def test_types_share_a_structure_and_its_blocks(bench: Bench, tmp_path: Path) -> None:
    """But for a few blocks that convert; other elements tell the types apart, and longer keys reach more blocks."""
    case = DenseDecodeCase(lengths=(20,), h_q=3, sm_count=1)
    short, other, long = (
        reached(bench, changed, tmp_path)
        for changed in (case, replace(case, dtype="fp16"), replace(case, lengths=(2500, 300), batch=2, s_q=2, causal=True))
    )
    (name,) = (name for name in short if name.startswith(f"dense_decode {bench.arch.name}"))
    assert short.keys() == other.keys() == long.keys()
    blocks = [{item for item in found[name] if item.startswith("#")} for found in (short, other, long)]
    assert len(blocks[0] ^ blocks[1]) <= len(blocks[0]) / 16
    assert blocks[2] - blocks[0]
    assert short[name] - other[name] >= {"dtype=bf16"}
    assert {"causal=True", "schedule round_robin"} <= long[name]
    assert any(item.startswith("@") for item in short[name])


def test_a_structure_is_that_of_the_mutations() -> None:
    kernels = load_artifacts().manifest.kernels
    names = [f"dense_decode_sm90_{config}" for config in ("bf16_cluster1", "fp16_cluster1", "bf16_cluster2")]
    first, twin, other = (structure_of(kernels[name]) for name in names)
    assert first == twin != other


def test_calls_without_a_case_are_recorded_by_their_arguments(arch: Arch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_device, "_modules", {})  # the kernels loaded so far, whose translation takes no time again
    recorder = CoverRecorder(tmp_path)
    outs, lses = torch.zeros(2, 3, 4, 512, dtype=torch.bfloat16), torch.zeros(2, 3, 4)
    with recorder.listening(), cute_mla.simulate(arch.name, schedule="lazy"):
        cute_mla.merge_states(outs, lses)
    ((name, elements),) = recorder.reached.items()
    assert name.startswith(f"merge_states {arch.name} ")
    assert {"schedule lazy", "pdl=True"} <= elements
    assert recorder.translation > 0


def test_parameters_that_no_case_shows_are_elements() -> None:
    item = SimpleNamespace(
        nodeid="tests/x.py::test_x[sm90-5-7-nan]", callspec=SimpleNamespace(params={"h_q": 5, "index": 7, "pages": math.nan})
    )
    reached = {"dense_decode sm90 ab": {"#ab.0", "h_q=<64:odd", "@pages=1"}, "combine sm90 cd": {"h_q=<64:odd"}}
    assert of_parameters(item, reached) == {"tests/x.py::test_x sm90": {"itself", "index=<64:odd", "pages=nan"}}  # type: ignore[arg-type]
    assert of_parameters(item, {}) == {}  # type: ignore[arg-type]
