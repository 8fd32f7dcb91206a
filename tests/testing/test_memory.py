"""Memory of a worker of `cute-mla verify`: kernels, registers and shared memory that it keeps for later launches are bounded."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.tree import ROOT

MAX_MEGABYTES = 540  # 478 were measured, nearly 300 of them torch, and 565 without a bound on the pool of register files

PROGRAM = """
import resource
from cute_mla.testing.runner import Target, run_all, schedules
from cute_mla.testing.suite import suite

if __name__ == "__main__":
    entries = suite("quick", "sparse_decode", simulated=True)
    jobs = [(entry.case, Target(arch, "sim", schedules(1, 0)), "") for arch in ("sm90", "sm100") for entry in entries]
    records = [record for _, done in run_all(jobs, workers=1) for record in done]
    print(len(records) - len(jobs), sum(not record.passed for record in records), len({record.config for record in records}))
    print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024)  # the worker's: KiB on Linux
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the unit of ru_maxrss is that of Linux")
def test_a_worker_keeps_within_its_memory() -> None:
    """Run the op whose kernels are the largest, several of them on both architectures, in one worker."""
    result = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    counts, megabytes = result.stdout.splitlines()
    assert counts.split()[:2] == ["0", "0"]
    assert int(counts.split()[2]) > 2
    assert 100 < int(megabytes) <= MAX_MEGABYTES
