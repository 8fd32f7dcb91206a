"""Fixtures of the runtime tests: a fake driver behind the driver module, and a folder of fake artefacts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cute_mla.runtime.artifacts import FOLDER_VARIABLE, load_artifacts
from tests.runtime.fake_artifacts import write_artifacts
from tests.runtime.fake_driver import FakeDriver, installed


@pytest.fixture
def artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of artefacts for every kernel of dense decode, where the runtime looks."""
    write_artifacts(tmp_path)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.fixture
def fake(artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """Yield a fake driver that knows the parameters of those kernels; torch's current stream is 77."""
    manifest = load_artifacts().manifest
    fake = FakeDriver(params={kernel.entry: kernel.params for kernel in manifest.kernels.values()})
    with installed(fake, monkeypatch):
        yield fake
