"""Fixtures for tests of dense decode."""

from __future__ import annotations

import pytest

from cute_mla.spec.kernel_ops import ARCHS_OF
from tests.support.bench import Bench


@pytest.fixture(params=ARCHS_OF["dense_decode"], ids=lambda arch: arch.name)
def bench(request: pytest.FixtureRequest) -> Bench:
    """Return the simulated device of every architecture that has kernels of dense decode in turn."""
    return Bench(request.param)
