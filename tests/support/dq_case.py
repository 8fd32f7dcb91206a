"""Cases of the backward pass, which launches two kernels, that are about the first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cute_mla.spec.arch import Arch
from cute_mla.testing.cases.dense_prefill_backward import DensePrefillBackwardCase


@dataclass(frozen=True)
class DqCase(DensePrefillBackwardCase):
    """A call of which the kernel that computes dq is of interest; that of dk and dv serves the case as it is."""

    @property
    def kernel_op(self) -> str:
        """Return the op of the kernel."""
        return "dense_prefill_dq"

    def problem(self, arch: Arch) -> Any:
        """Return the shapes of dq."""
        return self.dq_problem(arch)
