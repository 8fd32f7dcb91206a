"""Fixtures for tests of what a new user runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cute_mla.runtime.artifacts import FOLDER_VARIABLE
from tests.support.quick_folder import link_quick_kernels


@pytest.fixture(scope="session")
def quick_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the kernels of `make quick`, all that a new clone has."""
    folder = tmp_path_factory.mktemp("quick")
    link_quick_kernels(folder)
    return folder


@pytest.fixture
def quick_kernels_only(quick_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load kernels from the folder of `make quick`, also in processes that the test starts."""
    monkeypatch.setenv(FOLDER_VARIABLE, os.fspath(quick_folder))
