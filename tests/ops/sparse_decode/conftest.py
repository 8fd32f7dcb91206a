"""Fixtures for tests of sparse decode."""

from __future__ import annotations

import pytest

from cute_mla.spec.kernel_ops import ARCHS_OF
from tests.support.bench import Bench


@pytest.fixture(params=ARCHS_OF["sparse_decode"], ids=lambda arch: arch.name)
def bench(request: pytest.FixtureRequest) -> Bench:
    """Return the simulated device of every architecture that has kernels of sparse decode in turn, also of those without dense decode."""
    return Bench(request.param)
