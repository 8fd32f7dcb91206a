"""Each example runs as its docstring says, here on the simulated device and with the kernels of `make quick`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cute_mla.spec.arch import Arch
from tests.support.in_turn import in_turn
from tests.support.tree import ROOT

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.skipif(torch.cuda.is_available(), reason="says how it fares on the simulated device")
@pytest.mark.usefixtures("quick_kernels_only")
@pytest.mark.parametrize(("example", "arch"), in_turn({example.name: example for example in EXAMPLES}))
def test_example_runs(example: Path, arch: Arch) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, str(example), arch.name], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    assert f"simulated {arch.name} with" in result.stdout
