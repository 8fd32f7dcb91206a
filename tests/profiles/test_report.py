"""The document of `profile`: rows chosen, plotted, and kept while a run is under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cute_mla.profiles import report
from cute_mla.profiles.clock.constants import constants
from cute_mla.profiles.measure import cuda_bench, environment
from cute_mla.profiles.plots.roofline_plot import Point
from cute_mla.profiles.report import Limits
from cute_mla.profiles.roofline import GPUS, Gpu
from cute_mla.profiles.rows import OPS
from cute_mla.spec.arch import SM90, SM100
from cute_mla.testing import processes
from tests.profiles.benching import FakeKernel, InProcess, bench, install, small_case
from tests.support.tree import ROOT

PLOT = ROOT / "profiles" / "plots" / "roofline.svg"


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Point]:
    """Return the points that a plot is asked to draw."""
    points: list[Point] = []

    def roofline_svg(gpu: Gpu, given: Sequence[Point], title: str, best_tflops: float | None = None) -> str:
        points.extend(given)
        return f"{gpu.name}: {title}"

    monkeypatch.setattr(report, "roofline_svg", roofline_svg)
    return points


def test_predictions_are_plotted_under_their_roof(drawn: list[Point]) -> None:
    document = report.model_document([SM90], ["dense_decode"], report.cases_for(["dense_decode"], ["D1.fixed", "D8.s1"]))
    assert report.plot(document).startswith("H200: Predictions under the roofline of an H200")
    model = {row["row"]: row["model"]["H200"] for row in document["rows"]}
    flops = {row["row"]: row["flops"] for row in document["rows"]}
    ends = {name: [flops[name] / model[name][end] / 1e6 for end in ("high_us", "low_us")] for name in ("D1", "D8")}
    expected = [(name, *ends[name], False) for name in ("D1", "D8")]
    assert [(point.label, point.tflops, point.best, point.measured) for point in drawn] == expected


def test_no_prediction_is_above_its_roof(drawn: list[Point]) -> None:
    """None is above the roof of the best matrix rate."""
    for arch in (SM90, SM100):
        document = report.model_document([arch], OPS, report.cases_for(OPS, []))
        gpu = GPUS[document["gpus"][0]["name"]]
        drawn.clear()
        report.plot(document)
        values = constants(gpu.name)
        best = values.sm_count * values.boost_ghz * values.product_flops / 1e3
        assert len(drawn) > 30  # rows that are recorded
        for point in drawn:
            assert point.best is not None
            assert point.tflops <= point.best <= min(best, gpu.tbytes * point.intensity) * (1 + 1e-9)


def test_the_model_of_blackwell_is_plotted_on_its_own_roof(drawn: list[Point]) -> None:
    document = report.model_document([SM100], ["dense_decode"], report.cases_for(["dense_decode"], ["D2.fixed", "D8.s1"]))
    assert report.plot(document).startswith("B200: Predictions under the roofline of a B200")
    assert [point.label for point in drawn] == ["D2", "D8"]
    assert [row["tile_padding"] for row in document["rows"]] == [{"sm100": 1.0}, {"sm100": 8.0}]
    assert {name for row in document["rows"] for name in row["roofs"]} == {"B200", "B300"}


def test_a_measurement_is_plotted_where_it_was(drawn: list[Point]) -> None:
    rows = [
        {"op": "dense_decode", "row": "D1", "status": "timed", "rate": 1.0, "intensity": 228.0, "tflops": 640.0},
        {"op": "dense_decode", "row": "D2", "status": "wrong", "intensity": 432.0},
    ]
    assert report.plot({"device": "cuda", "environment": {"gpu": "NVIDIA H100 80GB HBM3"}, "rows": rows}).startswith("H100: ")
    assert drawn == [Point("dense_decode", "D1", 228.0, 640.0, True)]


def test_the_plot_of_the_readme_is_the_one_that_the_command_draws() -> None:
    document = report.model_document([SM90], OPS, report.cases_for(OPS, []))
    assert PLOT.read_text() == report.plot(document)


@pytest.mark.parametrize(
    ("ops", "names", "found"),
    [
        (["combine"], [], ["C1.two", "C1.many"]),
        (["split_plan"], [], []),
        (["combine", "dense_decode"], ["D5", "C1.two"], ["D5.fixed", "C1.two"]),
    ],
)
def test_cases_are_of_the_ops_asked_for(ops: list[str], names: list[str], found: list[str]) -> None:
    assert [case.name for case in report.cases_for(ops, names)] == found


def test_a_run_that_is_cut_short_has_left_its_rows_and_the_name_of_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeKernel())
    monkeypatch.setattr(cuda_bench, "matching_arch", lambda archs: SM90)
    monkeypatch.setattr(cuda_bench, "cuda_bench", lambda arch: bench())
    monkeypatch.setattr(processes, "Worker", InProcess)
    monkeypatch.setattr(environment, "environment", lambda: {"gpu": "NVIDIA H200"})
    left: list[dict[str, Any]] = []
    cases = [small_case("A.x"), small_case("B.x")]
    document = report.cuda_document(
        [SM90], ["dense_decode"], cases, Limits(1000.0, 20.0), lambda name, so_far: left.append(report.plain(so_far))
    )
    assert [(so_far["running"], [row["name"] for row in so_far["rows"]]) for so_far in left[:2]] == [("A.x", []), ("B.x", ["A.x"])]
    assert document["running"] is None
    assert [(row["name"], row["status"]) for row in document["rows"]] == [("A.x", "timed"), ("B.x", "timed")]
    late = report.cuda_document([SM90], ["dense_decode"], cases, Limits(0.0, 20.0), lambda name, so_far: None)
    assert late["not_run"] == ["A.x", "B.x"]


@pytest.mark.parametrize(
    ("available", "capability", "message"),
    [
        (False, (9, 0), "no CUDA GPU is available to torch"),
        (True, (10, 0), r"NVIDIA B200 has compute capability 10\.0; wanted is sm90 \(9\.0\)"),
    ],
)
def test_a_gpu_that_does_not_match_is_named(
    monkeypatch: pytest.MonkeyPatch, available: bool, capability: tuple[int, int], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA B200")
    with pytest.raises(cuda_bench.GpuMismatchError, match=message):
        cuda_bench.matching_arch([SM90])


def test_peers_have_their_version_or_why_they_are_absent() -> None:
    ready, absent = {"status": "wrong", "reason": "off", "version": "1.2"}, {"status": "absent", "reason": "not installed: no"}
    rows = [{"peers": {"A": {"status": "not_covered", "reason": "-"}, "B": absent, "C": {"status": "hung", "reason": "-"}}}, {}]
    assert report.peer_versions([*rows, {"peers": {"A": ready}}]) == {"A": "1.2", "B": "not installed: no"}
