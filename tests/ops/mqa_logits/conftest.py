"""Fixtures for tests of this operation."""

from __future__ import annotations

import pytest

from cute_mla.spec.arch import Arch
from cute_mla.spec.kernel_ops import ARCHS_OF


@pytest.fixture(scope="session", params=ARCHS_OF["mqa_logits"], ids=lambda arch: arch.name)
def arch(request: pytest.FixtureRequest) -> Arch:
    """Return every architecture that has the kernels in turn."""
    found: Arch = request.param
    return found
