"""What tests of several folders share."""

from __future__ import annotations

import pytest
from bench import Bench

from cute_mla.spec.arch import ARCHS, Arch


@pytest.fixture(scope="session", params=ARCHS.values(), ids=lambda arch: arch.name)
def arch(request: pytest.FixtureRequest) -> Arch:
    """Every architecture in turn."""
    found: Arch = request.param
    return found


@pytest.fixture
def bench(arch: Arch) -> Bench:
    """The simulated device of every architecture in turn."""
    return Bench(arch)
