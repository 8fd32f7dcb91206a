"""Fixtures for tests of the backward pass, on Hopper."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cute_mla.spec.arch import SM90
from tests.support.bench import Bench
from tests.support.recording_device import RecordingDevice


@pytest.fixture
def device() -> Iterator[RecordingDevice]:
    """Yield an active recording device of 132 SMs."""
    with RecordingDevice(SM90).active() as device:
        yield device


@pytest.fixture
def bench() -> Bench:
    """Return the simulated device."""
    return Bench(SM90)
