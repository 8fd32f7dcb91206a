"""The plot: well-formed, with each mark where its values say."""

from __future__ import annotations

from itertools import combinations
from xml.etree import ElementTree

from cute_mla.profiles.plots.roofline_plot import HEIGHT, OP_COLORS, WIDTH, Point, roofline_svg
from cute_mla.profiles.plots.svg import text_width
from cute_mla.profiles.roofline import GPUS, roof
from cute_mla.profiles.rows import OPS, every_case

SVG = "{http://www.w3.org/2000/svg}"
H200 = GPUS["H200"]


def drawn(points: list[Point], title: str = "a < b & c") -> ElementTree.Element:
    return ElementTree.fromstring(roofline_svg(H200, points, title))


def circles(root: ElementTree.Element) -> list[tuple[float, float, str]]:
    return [(float(mark.attrib["cx"]), float(mark.attrib["cy"]), mark.attrib["fill"]) for mark in root.iter(f"{SVG}circle")]


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def test_marks_lie_on_the_roof_when_they_are_bounds() -> None:
    root = drawn([Point("dense_decode", "M", 10.0, 10.0 * H200.tbytes, False), Point("dense_decode", "C", 900.0, H200.tflops, False)])
    polyline = next(root.iter(f"{SVG}polyline")).attrib["points"].split()
    (x0, y0), (x1, y1), (x2, y2) = (tuple(map(float, corner.split(","))) for corner in polyline)
    (mx, my, fill), (cx, cy, _) = circles(root)
    assert fill == "#fff"
    assert abs((y1 - y0) / (x1 - x0) - (my - y0) / (mx - x0)) < 0.01  # on the slope
    assert x0 < mx < x1
    assert x1 < cx < x2
    assert cy == y1 == y2
    assert "nothing here is measured" in " ".join(texts(root))


def test_a_prediction_is_a_range_below_the_roofs_with_a_line_to_its_label() -> None:
    svg = roofline_svg(H200, [Point("dense_decode", "D1", 228.0, 650.0, False, best=900.0)], "t", best_tflops=949.0)
    root = ElementTree.fromstring(svg)
    ((x, y, _),) = circles(root)
    roof, dashed = ([tuple(map(float, at.split(","))) for at in each.attrib["points"].split()] for each in root.iter(f"{SVG}polyline"))
    ranges = [each.attrib for each in root.iter(f"{SVG}line") if each.attrib["stroke"] == OP_COLORS["dense_decode"]]
    (range_, leader) = sorted(ranges, key=lambda each: -float(each["stroke-width"]))
    assert (float(range_["x1"]), float(range_["y1"]), float(range_["x2"])) == (x, y, x)
    assert dashed[-1][1] < float(range_["y2"]) < roof[-1][1] < y  # the best case is above the roof and below the dashed one
    label = next(each for each in root.iter(f"{SVG}text") if each.text == "D1")
    assert (float(leader["x1"]), float(leader["y1"])) == (x, y)
    assert 0 < float(leader["x2"]) - float(label.attrib["x"]) < 20
    assert 0 < float(label.attrib["y"]) - float(leader["y2"]) < 20
    assert "949 TFLOP/s at best" in texts(root)


def test_measured_marks_are_filled_and_said_to_be() -> None:
    root = drawn([Point("dense_decode", "D1", 228.0, 600.0, True)])
    ((_, y, fill),) = circles(root)
    assert fill != "#fff"
    assert y > circles(drawn([Point("dense_decode", "D1", 228.0, 700.0, True)]))[0][1]  # slower is lower
    assert "filled: measured" in texts(root)


def test_marks_that_touch_share_labels_and_titles_are_escaped() -> None:
    root = drawn(
        [
            Point("dense_decode", "D10", 100.0, 400.0, False),
            Point("dense_decode", "D2", 101.0, 401.0, False),
            Point("dense_decode", "D7", 20.0, 80.0, False),
        ]
    )
    assert {"D2, D10", "D7", "a < b & c"} <= set(texts(root))


def test_ops_have_colors_and_never_share_a_mark() -> None:
    root = drawn([Point("dense_decode", "D1", 100.0, 400.0, True), Point("combine", "C1", 100.0, 400.0, True)])
    assert len({fill for _, _, fill in circles(root)}) == 2
    assert {"D1", "C1", "dense decode", "combine"} <= set(texts(root))


def test_every_op_has_a_color() -> None:
    assert set(OP_COLORS) == set(OPS)


def test_every_row_of_the_suite_has_a_place() -> None:
    for case in (case for case in every_case() if case.work.flops):
        bound = roof(case.work, H200).us
        if bound < 5:
            continue  # too little work to be on the roof at all
        assert len(circles(drawn([Point(case.op, case.row, case.work.intensity, case.work.flops / bound / 1e6, False)]))) == 1, case.name


def test_what_lies_outside_the_axes_is_left_out() -> None:
    assert circles(drawn([Point("dense_decode", "D14", 0.0, 0.0, False), Point("dense_decode", "D15", 500000.0, 790.0, False)])) == []


def test_labels_stay_inside_and_apart() -> None:
    root = drawn([Point("dense_decode", f"D{number}", 10.0 + number * 9, 500.0, False) for number in range(12)])
    labels = [element for element in root.iter(f"{SVG}text") if (element.text or "").startswith("D")]
    boxes = [(float(each.attrib["x"]), float(each.attrib["y"]), text_width(each.text or "", 11)) for each in labels]
    assert all(x > 0 and x + width < WIDTH and 0 < y < HEIGHT for x, y, width in boxes)
    for (x, y, width), (other_x, other_y, other_width) in combinations(boxes, 2):
        assert abs(y - other_y) >= 11 or x + width <= other_x or other_x + other_width <= x
    for x, y, _ in circles(root):
        assert all(x < left or x > left + width or not baseline - 11 < y < baseline for left, baseline, width in boxes)
