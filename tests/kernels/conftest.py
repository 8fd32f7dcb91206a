"""The kernels that every architecture compiles are tested as compiled for each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cute_mla.spec.arch import Arch
from tests.kernels import launching


@pytest.fixture
def built_for(arch: Arch) -> Iterator[Arch]:
    """Kernels are compiled for every architecture in turn."""
    token = launching.built_for.set(arch)
    yield arch
    launching.built_for.reset(token)
