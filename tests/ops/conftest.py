"""Fixtures for tests of single operations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cute_mla.spec.arch import Arch
from tests.support.recording_device import RecordingDevice


@pytest.fixture
def device(arch: Arch) -> Iterator[RecordingDevice]:
    """Yield an active recording device of 132 SMs, for every architecture in turn."""
    with RecordingDevice(arch).active() as device:
        yield device
