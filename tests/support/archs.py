"""The fixture `arch` of tests of an op: every architecture that has its kernels, in turn."""

from __future__ import annotations

from typing import Any

import pytest

from cute_mla.spec.kernel_ops import ARCHS_OF


def archs_of(op: str) -> Any:
    """Return the fixture."""
    return pytest.fixture(lambda request: request.param, scope="session", params=ARCHS_OF[op], ids=lambda arch: arch.name, name="arch")
