"""Each example runs as its docstring says, here on the simulated device and with the kernels of `make quick`."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_mla.spec.arch import ARCHS
from tests.support.tree import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def runs() -> list[Any]:
    """List every example on every architecture. `make test` runs each on one of them, in turn; the others are marked slow."""
    return [
        pytest.param(example, arch, id=f"{example.name}-{arch}", marks=[pytest.mark.slow] if (i + j) % len(ARCHS) else [])
        for (i, example), (j, arch) in product(enumerate(EXAMPLES), enumerate(ARCHS))
    ]


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.skipif(torch.cuda.is_available(), reason="says how it fares on the simulated device")
@pytest.mark.usefixtures("quick_kernels_only")
@pytest.mark.parametrize(("example", "arch"), runs())
def test_example_runs(example: Path, arch: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, str(example), arch], capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert f"simulated {arch} with" in result.stdout
