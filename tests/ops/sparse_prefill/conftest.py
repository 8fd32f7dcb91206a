"""Fixtures for tests of sparse prefill."""

from __future__ import annotations

import pytest

from cute_mla.spec.arch import Arch
from cute_mla.spec.kernel_ops import ARCHS_OF


@pytest.fixture(scope="session", params=ARCHS_OF["sparse_prefill"], ids=lambda arch: arch.name)
def arch(request: pytest.FixtureRequest) -> Arch:
    """Return every architecture that has kernels of sparse prefill in turn, also those without dense prefill."""
    found: Arch = request.param
    return found
