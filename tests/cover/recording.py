"""Recorder of the cover: a pytest plugin that notes what each test reaches on the simulated device, and its CPU seconds."""

from __future__ import annotations

import os
import re
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from cute_mla import simulator
from cute_mla.manifest import KernelEntry
from cute_mla.runtime.simulated_device import SimulatedDevice
from cute_mla.simulator.codegen.translator import Translator
from cute_mla.testing.cases.base import BaseCase
from cute_mla.testing.operations import Operation
from tests.cover.elements import argument_elements, block_elements, case_elements, structure_of, value_classes
from tests.cover.records import CoverRecord, Reached, append
from tests.cover.tiers import may_move

NOTICED = "noticed"  # property of a test that plants a bug: the group of its elements, and how and by whom the bug was noticed

_case: ContextVar[BaseCase | None] = ContextVar("case", default=None)


def _cpu_seconds() -> float:
    """Return user and system time of this process and of its children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


class CoverRecorder:
    """Plugin that appends a record of each test to folder/<process id>.jsonl.

    Elements are recorded for tests that may move to `make test-full`, seconds for all.
    """

    def __init__(self, folder: Path) -> None:
        self.file = folder / f"{os.getpid()}.jsonl"
        self.reached: Reached = defaultdict(set)
        self.translation = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Record a test with its set-up and tear-down."""
        self.reached, self.translation = defaultdict(set), 0.0
        began = _cpu_seconds()
        with self.listening() if may_move(item.nodeid) else ExitStack():
            result = yield
        seconds = _cpu_seconds() - began
        slow = any("cover" not in mark.kwargs for mark in item.iter_markers("slow"))
        append(self.file, CoverRecord(item.nodeid, seconds, self.translation, self.elements(item), slow))
        return result

    def elements(self, item: pytest.Item) -> Reached:
        """Return the elements of a test: what its launches and parameters reach, or how a bug is noticed if it plants one."""
        noticed = dict(item.user_properties).get(NOTICED)
        if isinstance(noticed, list):
            group, *items = noticed
            return {group: set(items)}
        return {**self.reached, **of_parameters(item, self.reached)}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note launches of kernels inside, and the time that their translation takes."""
        reports: list[simulator.Report] = []
        with (
            patch.object(simulator, "run", _reporting(simulator.run, reports)),
            patch.object(SimulatedDevice, "launch", self._noting(SimulatedDevice.launch, reports)),
            patch.object(Operation, "call", _with_case(Operation.call)),
            patch.object(simulator, "load_module", self._timed(simulator.load_module)),
            patch.object(Translator, "compile", self._timed(Translator.compile)),
        ):
            yield

    def _noting(self, launch: Callable[..., None], reports: list[simulator.Report]) -> Callable[..., None]:
        def noted(device: SimulatedDevice, kernel: KernelEntry, grid: Any, args: Any, **options: Any) -> None:
            reports.clear()
            try:
                launch(device, kernel, grid, args, **options)
            finally:
                if reports:
                    elements = self.reached[structure_of(kernel)]
                    elements.update(block_elements(reports[-1]), argument_elements(kernel.params, grid, args))
                    elements.add(device._order.split(",")[0])
                    elements.add(f"pdl={options.get('pdl', False)}")
                    case = _case.get()
                    if case is not None:
                        elements.update(case_elements(case))

        return noted

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began = time.process_time()
            try:
                return function(*args, **options)
            finally:
                self.translation += time.process_time() - began

        return timed


def _reporting(run: Callable[..., simulator.Report], reports: list[simulator.Report]) -> Callable[..., simulator.Report]:
    def reported(*args: Any, **options: Any) -> simulator.Report:
        reports.append(run(*args, **options))
        return reports[-1]

    return reported


def _with_case(call: Callable[..., Any]) -> Callable[..., Any]:
    def called(operation: Operation, case: Any, tensors: Any, workspace: Any) -> Any:
        token = _case.set(case)
        try:
            return call(operation, case, tensors, workspace)
        finally:
            _case.reset(token)

    return called


def of_parameters(item: pytest.Item, reached: Reached) -> Reached:
    """Return the elements of a test beside those of its launches: its function and its parameters, for every architecture it ran on.

    Parameters that are fields of its cases are left out, since the elements of the cases have them.
    """
    of_cases = (element for elements in reached.values() for element in elements if element[0] not in "#@")
    shown = {"arch", *map(_name, of_cases)}
    callspec = getattr(item, "callspec", None)
    elements = {"itself"}
    for name, value in () if callspec is None else callspec.params.items():
        plain = isinstance(value, int | float | str | tuple | BaseCase)
        classes = value_classes(name, value) if plain else iter((f"{name}={value}",))
        elements |= {found for found in classes if _name(found) not in shown}
    archs = {name.split()[1] for name in reached}
    return {f"{item.nodeid.split('[')[0]} {arch}": elements for arch in sorted(archs)}


def _name(element: str) -> str:
    """Return the name of the field that an element is about."""
    return re.split("[= ]", element)[0].rpartition(".")[2]
