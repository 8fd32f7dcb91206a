"""Cases on every architecture, of which `make test` runs one each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from cute_mla.spec.arch import ARCHS


def in_turn(cases: Mapping[str, Any]) -> list[Any]:
    """Return parameters (case, arch) of every case on every architecture. All but one of each case, in turn, have the mark slow."""
    return [
        pytest.param(case, arch, id=f"{name}-{arch.name}", marks=[pytest.mark.slow] if (i + j) % len(ARCHS) else [])
        for i, (name, case) in enumerate(cases.items())
        for j, arch in enumerate(ARCHS.values())
    ]
