"""The chosen tests reach everything, cheapest first; what is lost is said."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.cover import tiers
from tests.cover.__main__ import main
from tests.cover.choosing import cover, missing
from tests.cover.records import CoverRecord, append, read


def record(test: str, seconds: float, elements: str, translation: float = 0.0, slow: bool = False) -> CoverRecord:
    """Return the record of a test that reaches these elements, one a letter."""
    return CoverRecord(test, seconds, translation, {"kernel": set(elements)}, slow)


def by_name(*records: CoverRecord) -> dict[str, CoverRecord]:
    return {item.test: item for item in records}


@pytest.mark.parametrize(
    ("records", "chosen"),
    [
        ([("dear", 9, "abc"), ("x", 1, "ab"), ("y", 1, "c")], {"x", "y"}),
        ([("dear", 9, "abcd"), ("x", 1, "ab"), ("y", 1, "c")], {"dear"}),  # needed for d, it makes the others redundant
        ([("twin", 2, "ab"), ("cheaper", 1, "ab")], {"cheaper"}),
        ([("first", 5, "ab", 4.5), ("second", 1, "ab")], {"first"}),  # whose translation the second would pay for
        ([("nothing", 1, "")], set()),
    ],
)
def test_the_cheapest_cover_is_chosen(records: list[tuple[str, float, str]], chosen: set[str]) -> None:
    assert cover(by_name(*(record(*item) for item in records))) == chosen


def test_cheap_tests_stay_and_nothing_dear_repeats_them() -> None:
    assert cover(by_name(record("cheap", 0.1, "a"), record("twin", 0.12, "ab"), record("dear", 1, "ab"))) == {"cheap", "twin"}


def test_an_element_counts_for_every_type_but_a_block_once() -> None:
    first, second = (CoverRecord("a", 1, 0, {"kernel": {"#1", "pdl=True", f"dtype={dtype}"}}, False) for dtype in ("bf16", "fp16"))
    assert first.elements & second.elements == {("kernel", "#1")}
    assert ("kernel dtype=bf16", "pdl=True") in first.elements


def test_tests_that_notice_something_stay() -> None:
    found = by_name(record("a", 1, "xy"), record("b", 5, "x"))
    assert cover(found) == {"a"}
    assert cover(found, ["b", "gone"]) == {"a", "b"}


def test_elements_that_no_kept_test_reaches_are_missing() -> None:
    assert missing([record("a", 1, "xy")], [record("b", 1, "yz"), record("c", 1, "x")]) == {"b": {("kernel", "z")}}


FAMILY = "tests/ops/dense_decode/test_shapes.py::test_heads"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the record of a family of three tests, and of others that never move; the list is written beside it."""
    monkeypatch.setattr(tiers, "FILE", tmp_path / "full_only.toml")
    monkeypatch.setattr(tiers, "moved", tiers.read_moved)  # without the cache
    made = [
        record(f"{FAMILY}[one]", 1, "ab"),
        record(f"{FAMILY}[two, or ]three]", 2, "bc"),
        record(f"{FAMILY}[four]", 3, "bc"),
        record(f"{FAMILY}[slow]", 90, "abcd", slow=True),
        record("tests/simulator/test_races.py::test_store[x]", 1, "a"),
        CoverRecord("tests/ops/dense_decode/test_errors.py::test_dtype[x]", 1, 0, {}, False),
    ]
    for item in made:
        append(tmp_path / "cover" / "1.jsonl", item)
    assert read(tmp_path / "cover") == by_name(*made)
    return tmp_path / "cover"


def test_the_commands_write_and_check_the_list(folder: Path) -> None:
    run = CliRunner().invoke
    chosen = run(main, ["choose", str(folder)])
    assert chosen.exit_code == 0, chosen.output
    assert tiers.moved() == {f"{FAMILY}[four]"}
    assert "     4" in chosen.output
    assert run(main, ["check", str(folder)]).exit_code == 0
    append(folder / "2.jsonl", record(f"{FAMILY}[four]", 3, "bce"))
    failed = run(main, ["check", str(folder)])
    assert failed.exit_code == 1
    assert f"{FAMILY}[four] alone reaches kernel e" in failed.output


def test_a_partial_record_leaves_other_tests_in_the_list(folder: Path) -> None:
    tiers.write([f"{FAMILY}[unrecorded]", f"{FAMILY}[one]"], {})
    assert CliRunner().invoke(main, ["choose", "--partial", str(folder)]).exit_code == 0
    assert tiers.moved() == {f"{FAMILY}[four]", f"{FAMILY}[unrecorded]"}
    assert CliRunner().invoke(main, ["choose", str(folder)]).exit_code == 0
    assert tiers.moved() == {f"{FAMILY}[four]"}


def test_moved_tests_without_a_record_fail_the_check(folder: Path) -> None:
    tiers.write([f"{FAMILY}[gone]"], {})
    result = CliRunner().invoke(main, ["check", str(folder)])
    assert result.exit_code == 1
    assert f"{FAMILY}[gone] was not recorded" in result.output


def test_tests_that_stay_are_kept_in_the_list(folder: Path) -> None:
    tiers.write([], {f"{FAMILY}[four]": "kernel:kind:3"})
    assert CliRunner().invoke(main, ["choose", str(folder)]).exit_code == 0
    assert tiers.notices() == {f"{FAMILY}[four]": "kernel:kind:3"}
    assert tiers.moved() == {f"{FAMILY}[two, or ]three]"}
