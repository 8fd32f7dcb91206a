"""The commands: choose and check."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path

import click

from tests.cover import tiers
from tests.cover.choosing import cover, missing
from tests.cover.records import CoverRecord, read

SHOWN = 20
_folder = click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))


@click.group()
def main() -> None:
    """Choose the tests of `make test` from a record of their cover."""


def _movable(folder: Path) -> dict[str, CoverRecord]:
    """Return the records of tests that may move."""
    return {test: record for test, record in read(folder).items() if record.reached and tiers.may_move(test) and not record.slow}


@main.command()
@_folder
@click.option("--partial", is_flag=True, help="Not all tests were recorded: leave the other listed ones in the list.")
def choose(folder: Path, partial: bool) -> None:
    """Write the list of tests that only `make test-full` runs. FOLDER: of a run with --record-cover."""
    records = _movable(folder)
    kept = cover(records, tiers.notices())
    unrecorded = tiers.moved() - records.keys() if partial else frozenset()
    tiers.write(records.keys() - kept | unrecorded, tiers.notices())
    report(read(folder), records.keys() - kept)


@main.command()
@_folder
def check(folder: Path) -> None:
    """Fail if the tests of `make test` miss something that a moved test reaches. FOLDER: of a run with --record-cover."""
    records = _movable(folder)
    moved = [record for test, record in records.items() if test in tiers.moved()]
    lost = missing([record for test, record in records.items() if test not in tiers.moved()], moved)
    for test, elements in sorted(lost.items())[:SHOWN]:
        click.echo(f"{test} alone reaches {', '.join(' '.join(element) for element in sorted(elements)[:SHOWN])}")
    unrecorded = tiers.moved() - records.keys()
    for test in sorted(unrecorded)[:SHOWN]:
        click.echo(f"{test} was not recorded")
    click.echo(f"{len(records) - len(moved)} tests reach what {len(records)} reach, but for {len(lost)}")
    if lost or unrecorded:
        raise click.ClickException(f"`make test` misses something: run `python -m tests.cover choose {folder}`")


def report(records: Mapping[str, CoverRecord], moved: Collection[str]) -> None:
    """Print tests and CPU seconds of `make test` and of what moved, by file."""
    rows: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0, 0.0])
    for test, record in records.items():
        if not record.slow:
            row = rows[test.partition("::")[0]]
            first = 2 if test in moved else 0
            row[first] += 1
            row[first + 1] += record.seconds
    click.echo(f"{'kept':>6} {'s':>7} {'moved':>6} {'s':>7}")
    total = [sum(column) for column in zip(*rows.values(), strict=True)]
    for file, row in [*sorted(rows.items(), key=lambda item: -item[1][1]), ("all", total)]:
        click.echo(f"{row[0]:6.0f} {row[1]:7.1f} {row[2]:6.0f} {row[3]:7.1f}  {file}")


if __name__ == "__main__":
    main()
