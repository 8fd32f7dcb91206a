"""Times against batch and length: which rows are joined, and that the plot holds them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any
from xml.etree import ElementTree

import pytest

from cute_mla.profiles.plots.latency_plot import OURS, WIDTH, Timed, latency_svg, lines_against, timed_of
from cute_mla.profiles.rows import every_case

SVG = "{http://www.w3.org/2000/svg}"


def record(name: str, us: float, **baselines: float) -> dict[str, Any]:
    """Return a timed record of a row of the suite."""
    (case,) = (case for case in every_case() if case.name == name)
    others = {baseline: {"status": "timed", "us": {"median": median}} for baseline, median in baselines.items()}
    others["Absent"] = {"status": "absent"}  # type: ignore[dict-item]
    return {"op": case.op, "shape": asdict(case.shape), "cold_us": {"median": us}, "peers": others}


def times(*records: dict[str, Any]) -> list[Timed]:
    return [time for made in records for time in timed_of(made)]


def test_rows_that_differ_in_batch_alone_are_a_line() -> None:
    found = lines_against(
        "batch", times(record("D1.fixed", 200.0), record("D14.b74", 120.0), record("D6.s1", 150.0), record("D4.fixed", 1500.0))
    )
    assert found == {("dense_decode", "h128 s1 L4096", OURS): [(74, 120.0), (128, 200.0)]}


def test_rows_that_differ_in_length_alone_are_a_line_and_so_are_a_baselines() -> None:
    rows = times(
        record("D1.fixed", 200.0, Theirs=240.0), record("D5.fixed", 60.0, Theirs=100.0), record("D14.len0", 9.0), record("F1.s1", 100.0)
    )
    assert lines_against("length", rows) == {
        ("dense_decode", "h128 s1 b128", OURS): [(1151, 60.0), (4096, 200.0)],
        ("dense_decode", "h128 s1 b128", "Theirs"): [(1151, 100.0), (4096, 240.0)],
    }


@pytest.mark.parametrize(
    ("axis", "names", "values"),
    [
        ("batch", ("S2.b64", "S2.b128"), [64, 128]),
        ("length", ("P1.8k", "P1.128k"), [8192, 131072]),
        ("length", ("M1.2k", "M1.8k"), [2048, 8192]),
        ("batch", ("C2.decode", "C2.chunks"), [128, 4096]),
    ],
)
def test_rows_of_every_op_have_their_axes(axis: str, names: tuple[str, str], values: list[int]) -> None:
    (line,) = lines_against(axis, times(*(record(name, 10.0) for name in names))).values()
    assert [value for value, _ in line] == values


def test_every_row_of_the_suite_can_be_drawn() -> None:
    root = ElementTree.fromstring(latency_svg(times(*(record(case.name, case.roof_us, Theirs=9.0) for case in every_case())), "a < b"))
    lines = list(root.iter(f"{SVG}polyline"))
    assert sum("stroke-dasharray" in line.attrib for line in lines) * 2 == len(lines) > 8
    corners = [tuple(map(float, corner.split(","))) for line in lines for corner in line.attrib["points"].split()]
    assert all(0 < x < WIDTH and y > 0 for x, y in corners)
    assert "a < b" in {element.text for element in root.iter(f"{SVG}text")}


def test_slower_is_higher_and_longer_is_further_right() -> None:
    root = ElementTree.fromstring(latency_svg(times(record("M1.2k", 10.0), record("M1.8k", 500.0)), "t"))
    (line,) = root.iter(f"{SVG}polyline")
    (x0, y0), (x1, y1) = (tuple(map(float, corner.split(","))) for corner in line.attrib["points"].split())
    assert x0 < x1
    assert y0 > y1
