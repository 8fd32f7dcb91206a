"""Progress of `cute-mla verify` on stderr: the cases that run, and the time left. A bar on a terminal, else a line as each case starts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn
from rich.progress import Progress as ProgressBar
from rich.table import Column
from rich.text import Text

from .output import duration
from .verify_summary import failure

if TYPE_CHECKING:
    from cute_mla.testing.cases.base import BaseCase
    from cute_mla.testing.runner import Record

_FIXED_TILES = 4  # cost of a case besides its tiles, in tiles


def cost_of(case: BaseCase) -> float:
    """Return the expected cost of a case on the simulated device, in tiles."""
    return case.tiles + _FIXED_TILES


@dataclass
class Progress:
    """Cases that have ended and cases that run, out of those with the given costs. A case that runs counts half in the time left."""

    costs: Sequence[float]
    begin: float = field(default_factory=time.monotonic)
    ended: int = 0
    cost_ended: float = 0.0
    cost_running: float = 0.0
    running: Counter[str] = field(default_factory=Counter)

    def start(self, case: Any) -> None:
        """Note that a case starts."""
        self.running[f"{case.op} {case.id}"] += 1
        self.cost_running += cost_of(case)

    def end(self, index: int, records: list[Record]) -> None:
        """Note that the job with this index has ended; print its failure, if any, without waiting for the others."""
        self.ended += 1
        self.cost_ended += self.costs[index]
        self.cost_running = max(self.cost_running - self.costs[index], 0.0)
        self.running = +(self.running - Counter([f"{records[0].op} {records[0].case}"]))
        for record in records:
            if record.passed is False:
                self.say(f"{failure(record)} {record.arch} {record.op} {record.case}: {record.reason}")

    def say(self, line: str) -> None:
        """Print a line on stderr."""
        click.echo(line, err=True)

    @property
    def left(self) -> str:
        """Return the time left as text, such as "about 3 min 20 s left"; empty before the first case has ended."""
        if not self.cost_ended:
            return ""
        done = self.cost_ended + self.cost_running / 2
        seconds = (time.monotonic() - self.begin) * (sum(self.costs) / done - 1)
        return f"about {duration(seconds)} left"


class Lines(Progress):
    """Progress in a pipe: one line as each case starts."""

    def start(self, case: Any) -> None:
        """Note that a case starts, and print it."""
        super().start(case)
        left = f", {self.left}" if self.left else ""
        self.say(f"[{self.ended}/{len(self.costs)} done{left}] running {case.op} {case.id}")


@dataclass
class Bar(Progress):
    """Progress on a terminal: a bar with the cases that run."""

    bar: ProgressBar | None = None

    def start(self, case: Any) -> None:
        """Note that a case starts, and show it."""
        super().start(case)
        self._show()

    def end(self, index: int, records: list[Record]) -> None:
        """Note that the job with this index has ended, and show it."""
        super().end(index, records)
        self._show()

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        assert self.bar is not None
        self.bar.console.print(Text(line))

    def _show(self) -> None:
        assert self.bar is not None
        self.bar.update(self.bar.task_ids[0], completed=self.ended, description=", ".join(self.running))


class _Left(ProgressColumn):
    """Column of the time left."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        super().__init__(table_column=Column(no_wrap=True))

    def render(self, task: Task) -> Text:
        """Return the time left."""
        return Text(self.progress.left)


@contextmanager
def progress_of(cases: Sequence[BaseCase]) -> Iterator[Progress]:
    """Show the progress of these cases, which are the jobs in order."""
    costs = [cost_of(case) for case in cases]
    console = Console(stderr=True)
    if not console.is_terminal:
        yield Lines(costs)
        return
    progress = Bar(costs)
    running = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
    with ProgressBar(BarColumn(12), MofNCompleteColumn(), _Left(progress), running, transient=True, console=console, expand=True) as bar:
        bar.add_task("", total=len(costs))
        progress.bar = bar
        yield progress
