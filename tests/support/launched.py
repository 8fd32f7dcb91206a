"""The simulated device, with a list of the ops whose kernels it launches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import cute_mla
from cute_mla.spec.arch import Arch


@contextmanager
def launched_ops(arch: Arch, sm_count: int = 6) -> Iterator[list[str]]:
    """Run CPU calls on the simulated device and yield the ops of its launches, in order. Findings fail the test."""
    ops: list[str] = []
    with cute_mla.simulate(arch, sm_count) as device:
        launch = device.launch

        def noting(kernel: Any, *arguments: Any, **options: Any) -> None:
            ops.append(kernel.op)
            launch(kernel, *arguments, **options)

        with mock.patch.object(device, "launch", noting):
            yield ops
    assert device.findings == []
