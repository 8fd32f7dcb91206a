"""Pictures of three tiles: rows, waits, colours and axis; and the committed ones."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cute_mla.profiles.plots.svg import text_width
from cute_mla.profiles.plots.tiles_plot import FOLDER, PALETTE, PICTURES, RIGHT, WAIT, WIDTH, WORK, draw, steady_start, tiles_svg
from cute_mla.runtime.artifacts import load_artifacts
from tests.profiles.clock.recordings import TILE, recorded
from tests.support.tree import ROOT

SVG = "{http://www.w3.org/2000/svg}"


def elements(svg: str, tag: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter(f"{SVG}{tag}"))


def texts(svg: str) -> list[str]:
    return [str(item.text) for item in elements(svg, "text")]


def bars(svg: str, fill: str) -> list[tuple[float, float]]:
    """Return start and width of the bars of a colour, without the legend's."""
    return [(float(item.get("x", 0)), float(item.get("width", 0))) for item in elements(svg, "rect")
            if item.get("fill") == fill and item.get("height") != "12"]  # fmt: skip


def test_rows_are_roles_and_units() -> None:
    svg = tiles_svg(recorded(), TILE)
    assert [name for name in texts(svg) if name in ("load", "score", "tensor core", "shared-memory port", "TMA")] == [
        "load", "score", "tensor core", "shared-memory port", "TMA"
    ]  # fmt: skip
    assert f"predicted by the clock for an {recorded().gpu}, not measured: 100 clocks a tile; CTA 0, first warp of each role" in texts(svg)
    assert {"issues instructions", "waits", "score: m64n64k16 SS"} <= set(texts(svg))


def test_three_tiles_fill_the_width() -> None:
    assert steady_start(recorded()) == 3 * TILE + 4
    svg = tiles_svg(recorded(), TILE)
    products = bars(svg, PALETTE[0])
    assert len(products) == 3
    pitch = products[1][0] - products[0][0]
    assert pitch == pytest.approx((WIDTH - products[0][0] - RIGHT) / 3, abs=0.2)
    assert products[0][1] == pytest.approx(0.32 * pitch, abs=0.2)
    assert all(start + width <= WIDTH for fill in (WORK, WAIT, *PALETTE) for start, width in bars(svg, fill))


def test_long_waits_are_hatched_and_short_ones_are_not() -> None:
    svg = tiles_svg(recorded(), TILE)
    assert len(bars(svg, WAIT)) == 4 + 3  # the last tile of load is cut by the picture's end into a fourth part
    run = recorded()
    short = replace(
        run, spans=tuple(span._replace(end=span.start + 20) if span.name in ("products", "mbarrier") else span for span in run.spans)
    )
    assert bars(tiles_svg(short, TILE), WAIT) == []


def test_a_kernel_without_products_is_refused() -> None:
    run = recorded()
    with pytest.raises(ValueError, match="k has no products on a tensor core"):
        tiles_svg(replace(run, spans=tuple(span for span in run.spans if span.track != "tensor core")), TILE)


def structure(svg: str) -> list[str]:
    """Return the texts of a picture without their numbers."""
    return [re.sub(r"[\d,]+ clocks", "clocks", item) for item in texts(svg) if not re.fullmatch(r"[\d,]+", item)]


@pytest.mark.parametrize("kernel", PICTURES)
def test_committed_pictures_show_the_roles_of_the_kernel(kernel: str) -> None:
    svg = (FOLDER / PICTURES[kernel]).read_text(encoding="utf-8")
    entry = load_artifacts().manifest.kernels[kernel]
    assert kernel in texts(svg)
    working = set(texts(svg)) & {role.name for role in entry.roles}
    assert len(working) >= 3
    assert "tensor core" in texts(svg)
    assert "not measured" in svg
    readme = ROOT / "cute_mla" / "kernels" / entry.op / "README.md"
    assert f"docs/images/{PICTURES[kernel]}" in readme.read_text(encoding="utf-8")
    assert Path(FOLDER) == ROOT / "docs" / "images"


@pytest.mark.parametrize("picture", sorted(FOLDER.glob("*-clock*.svg")), ids=lambda picture: picture.stem)
def test_no_text_of_a_committed_picture_is_cut_off(picture: Path) -> None:
    svg = picture.read_text(encoding="utf-8")
    left, _, width, height = map(float, ElementTree.fromstring(svg).attrib["viewBox"].split())
    for item in elements(svg, "text"):
        size, x = text_width(str(item.text), int(item.attrib["font-size"])), float(item.attrib["x"])
        begin = x - size * {"start": 0.0, "middle": 0.5, "end": 1.0}[item.attrib["text-anchor"]]
        assert left <= begin, item.text
        assert begin + size <= left + width, item.text
        assert float(item.attrib["y"]) + 4 <= height, item.text


@pytest.mark.slow
@pytest.mark.parametrize("kernel", PICTURES)
def test_committed_pictures_are_those_of_the_command(kernel: str) -> None:
    assert structure(draw(kernel)) == structure((FOLDER / PICTURES[kernel]).read_text(encoding="utf-8"))
