"""Programs around one product of ones: what the tests of tensor memory break, and the report of a run."""

from __future__ import annotations

import numpy as np

from cute_mla.simulator import Policy, Report
from tests.simulator.small_kernels import LAZY
from tests.simulator.tensor_kernels import TensorKernel, commit, encode, instruction_descriptor, mma, place, smem_descriptor, wait

IDESC = instruction_descriptor(128, 32)
SIZE = 16 * 1024


def image(group: int = 1) -> np.ndarray:
    """Return A (64 rows suffice: the rest is read from what follows) and B, all ones."""
    out = np.zeros((group, 2 * SIZE), np.uint8)
    for rank in range(group):
        place(out[rank], encode(np.ones((128, 64)), "bf16"), 0, 2, False)
        place(out[rank], encode(np.ones((32, 64)), "bf16"), SIZE, 2, False)
    return out


A, B = smem_descriptor(0), smem_descriptor(SIZE)
GOOD = mma(A, B, IDESC)
LOAD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r30}, [%r5];\n"
STORE = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r5], {%r0};\n"
WAITED = GOOD + commit() + wait("$done")


def report_of(program: str, policy: Policy = LAZY, group: int = 1, cells: int = 32, **options: object) -> Report:
    kernel = TensorKernel(program, group, cells, 2 * SIZE, **options)  # type: ignore[arg-type]
    return kernel.run(image(group), policy=policy)[1]


def message(report: Report) -> str:
    """Return the only finding's text."""
    assert len({finding.kind for finding in report.findings}) == 1, [str(finding) for finding in report.findings]
    return report.findings[0].message
