"""What tests of several folders share."""

from __future__ import annotations

import pytest
from decoding import Decoder

from cute_mla.spec.arch import ARCHS, Arch


@pytest.fixture(scope="session", params=ARCHS.values(), ids=lambda arch: arch.name)
def arch(request: pytest.FixtureRequest) -> Arch:
    """Every architecture in turn."""
    found: Arch = request.param
    return found


@pytest.fixture
def decoder(arch: Arch) -> Decoder:
    """Dense decode on the simulated device of every architecture in turn."""
    return Decoder(arch)
