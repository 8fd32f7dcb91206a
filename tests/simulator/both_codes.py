"""Launches run twice on equal memory: the PTX of a kernel, and the machine code of its cubin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from unittest import mock

import numpy as np

from cute_mla import simulator
from cute_mla.runtime.artifacts import artifacts_folder
from cute_mla.simulator.sass.module import load_machine_code
from cute_mla.simulator.sass.text_cache import disassembly

MAX_BYTES = 1 << 28


Edit = Callable[[str], str]


def unchanged(text: str) -> str:
    """Return the text."""
    return text


@cache
def machine_code_of(kernel: str, edit: Edit) -> simulator.Module:
    """Return the loaded machine code of a built kernel, whose text is edited first."""
    cubin = (artifacts_folder() / f"{kernel}.cubin").read_bytes()
    return load_machine_code(cubin, edit(disassembly(cubin)))


@dataclass
class Launches:
    """Launches that ran twice.

    kernels: their names. differing: bytes that differ after a launch. unchecked: buffers that were too large to compare. findings: those
    of the machine code.
    """

    kernels: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)


@contextmanager
def both_codes(*ops: str, edit: Edit = unchanged) -> Iterator[Launches]:
    """Run launches of the simulated device as PTX, then, from the same memory, as machine code, whose results stay.

    ops: beginnings of the names of the kernels that run twice; the others run as PTX. edit: changes the text of the machine code.
    """
    launches = Launches()
    run_once = simulator.run

    def run(
        launch: simulator.Launch, memory: simulator.GlobalMemory, given: simulator.Policy, observer: simulator.Observer | None
    ) -> simulator.Report:
        assert observer is None
        kernel = launch.entry.rpartition("_")[0]
        if not kernel.startswith(ops):
            return run_once(launch, memory, given, observer)
        buffers = [buffer for buffer in memory.buffers if buffer.nbytes < MAX_BYTES]
        launches.unchecked += [f"{kernel}: {buffer.name}" for buffer in memory.buffers if buffer.nbytes >= MAX_BYTES]
        before = [(buffer.data.copy(), None if buffer.valid is None else buffer.valid.copy()) for buffer in buffers]
        first = run_once(launch, memory, given)
        after = [buffer.data.copy() for buffer in buffers]
        for buffer, (data, valid) in zip(buffers, before, strict=True):
            if buffer.writable:
                buffer.data[...] = data
            if buffer.valid is not None and valid is not None:
                buffer.valid[...] = valid
        second = run_once(replace(launch, module=machine_code_of(kernel, edit)), memory, given)
        launches.kernels.append(kernel)
        launches.findings += [f"{kernel}: {finding}" for finding in second.findings]
        for buffer, data in zip(buffers, after, strict=True):
            wrong = np.flatnonzero(buffer.data != data)
            if len(wrong):
                launches.differing.append(f"{kernel}: {len(wrong)} of {buffer.nbytes} bytes of {buffer.name}, the first at {wrong[0]}")
        return first

    with mock.patch.object(simulator, "run", run):
        yield launches
