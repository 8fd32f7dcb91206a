"""What the runtime tests share: a fake driver behind the one driver module, and a folder of made-up artefacts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cute_mla.runtime import library
from tests.runtime.fake_artifacts import write_artifacts
from tests.runtime.fake_driver import FakeDriver, installed


@pytest.fixture
def artifacts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of artefacts for every kernel of dense decode, where the runtime looks."""
    write_artifacts(tmp_path)
    monkeypatch.setenv(library.FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.fixture
def fake(artifacts: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """A fake driver that knows the parameters of those kernels; torch's current stream is 77."""
    manifest = library.load_artifacts().manifest
    fake = FakeDriver(params={kernel.entry: kernel.params for kernel in manifest.kernels.values()})
    with installed(fake, monkeypatch):
        yield fake
