"""Sparse prefill on RTX boards and DGX Spark.

For every query token and head r, over the rows j that the token's indices name and that exist:

    s_rj = <q_r, k_j>     p = softmax(scale * s)     out_r = sum_j p_rj k_j[:512]

Roles (256 threads):
  attend   warps 0..3: Q to shared memory, S = Q K^T, softmax, O += P V, out, lse, the greatest logit, lse of the first indices
           (sm120/attend.py, sm120_rows.py)
  load     warps 4..7: indices, cp.async of the rows of 8 keys of a stage, a bit for each of its 32 keys (sm120_rows.py)

A CTA has 16 heads of a query token and takes the tokens z, z + grid z and so on; CTAs of other heads find the keys in L2.

Pipelines (producer -> consumer; arrivals per phase):
  k_ready[2]   load -> attend   129: the threads' copies, as they complete; the bits of a stage
  k_free[2]    attend -> load   4: a stage has been multiplied, or passed by

The trick: no byte of a key passes a register, and rows 16 bytes longer than their columns need no swizzle, so that products read rows as
they lie, K by rows and V by columns of the same bytes. A stage without any key is passed by: nothing is copied, and no sum or maximum
changes by it.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32

from ...spec.arch import Arch
from ...spec.mla import D_V
from ...spec.sparse_prefill import SparsePrefillConfig
from ..attention.kernel import ELEMENT_TYPES
from ..attention.softmax import SinkScale
from ..definition import KernelDefinition
from ..primitives.smem import Array, SmemLayout
from ..sm120 import keys_on_m
from ..sm120.attend import Sm120AttendRole
from ..sm120.cta import COPY_ARRIVALS, HEADS_ON_M, KEYS_ON_M, STAGES, Sm120Form, Sm120Kernel, Sm120Parts, Sm120Smem, products_of_stage
from ..sm120.roles import Sm120BitMask, Sm120Role
from .abi import SparsePrefillAbi
from .operands import SparsePrefillOperands
from .sm120_rows import SparsePrefillSm120LoadRole, SparsePrefillSm120Results


@dataclass(frozen=True)
class SparsePrefillSm120(Sm120Parts):
    """One variant of the kernel."""

    config: SparsePrefillConfig

    producers = COPY_ARRIVALS

    @property
    def role(self) -> type[Sm120Role]:
        """Return the role that multiplies."""
        return keys_on_m.Sm120KeysOnMRole if self.config.rows64 else Sm120AttendRole

    @property
    def form(self) -> Sm120Form:
        """Return how the CTA multiplies."""
        return KEYS_ON_M if self.config.rows64 else HEADS_ON_M

    @property
    def dtype(self) -> type[cutlass.Numeric]:
        """Return the element type of q, rows and out."""
        return ELEMENT_TYPES[self.config.dtype]

    @property
    def layout(self) -> SmemLayout:
        """Return the fields of shared memory."""
        present, kept = Array("sPresent", Int32, STAGES), Array("sKept", Float32, self.role.kept_floats, 16)
        return Sm120Smem.layout(self.dtype, self.config.d_qk, present, kept, form=self.form)

    @property
    def expected(self) -> int:
        """Return the products in the code."""
        return (keys_on_m.products_of_stage if self.config.rows64 else products_of_stage)(self.config.d_qk, D_V)

    def load(self, operands: SparsePrefillOperands, smem: Sm120Smem) -> None:
        """Run the role that brings keys."""
        SparsePrefillSm120LoadRole(self.config.d_qk).run(operands, smem)

    def attend(self, operands: SparsePrefillOperands, smem: Sm120Smem) -> None:
        """Run the role that multiplies."""
        mask, results = Sm120BitMask(self.role), SparsePrefillSm120Results.create(operands)
        self.role(mask, SinkScale(), self.dtype, self.config.d_qk, D_V, results).run(operands, smem)


def build(config: SparsePrefillConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    return Sm120Kernel(SparsePrefillAbi(config, 1), arch, SparsePrefillSm120(config)).complete()
