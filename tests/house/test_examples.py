"""Each example runs as its docstring says, here on the simulated device and with the kernels of `make quick`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cute_mla.spec.arch import Arch
from tests.support.tree import ROOT

OTHER_KERNELS = ("train_indexer.py",)  # tests/ops/indexer_training runs it
EXAMPLES = sorted(example for example in (ROOT / "examples").glob("*.py") if example.name not in OTHER_KERNELS)


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.skipif(torch.cuda.is_available(), reason="says how it fares on the simulated device")
@pytest.mark.usefixtures("quick_kernels_only")
@pytest.mark.slow  # CI runs them apart, with the kernels of the quick suite alone
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_example_runs(example: Path, arch: Arch) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, str(example), arch.name], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    assert f"simulated {arch.name} with" in result.stdout
