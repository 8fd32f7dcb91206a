"""The architecture whose kernels the tests of this folder launch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cute_mla.spec.arch import Arch
from tests.kernels import launching


@pytest.fixture
def built_for(arch: Arch) -> Iterator[Arch]:
    """Yield every architecture in turn, with `shipped` set to its kernels."""
    token = launching.built_for.set(arch)
    yield arch
    launching.built_for.reset(token)
