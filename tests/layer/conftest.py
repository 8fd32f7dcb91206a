"""Fixtures for tests of the layer."""

from __future__ import annotations

import pytest

from cute_mla.spec.arch import Arch
from cute_mla.spec.kernel_ops import ARCHS_OF


@pytest.fixture(scope="session", params=ARCHS_OF["dense_prefill"], ids=lambda arch: arch.name)
def arch(request: pytest.FixtureRequest) -> Arch:
    """Return every architecture by whose kernels the layer runs without gradients in turn."""
    found: Arch = request.param
    return found
