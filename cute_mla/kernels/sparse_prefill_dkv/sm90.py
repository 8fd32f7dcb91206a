"""Rows of the gradient of the latent on Hopper: what each query token adds to each row that it has chosen.

For every query token and slot j, over its heads h:

    row_j = sum_h dS_hj q_h + P_hj dout_h[:512]

A CTA takes the tokens z, z + grid z and so on, and 64 slots (one tile) at a time. Up to 64 heads it has all columns. With more, the two
CTAs along x have 256 of the 512 columns each, and those of RoPE of every other token. P and dS come as sparse_prefill_dq stores them,
[token][tile][head][64 slots].

Roles (384 threads):
  load      warp 0: looks ahead over the indices; TMA of P and dS of tiles that have keys, and of Q and dO of a token
  rows      warpgroups 1, 2: rows of a tile, half of the CTA's columns each; the first one has the RoPE columns as well

Pipelines (producer -> consumer; arrivals per phase):
  tile_ready[n]  load -> rows    1 and the bytes of P and dS of 64 heads; without them behind the last tile
  tile_free[n]   rows -> load    8: the warps of both warpgroups
  query_ready    load -> rows    1 and the bytes of Q and dO, once per token that has keys, when the last token's tiles are all free

The trick: slots are rows of the product and heads its depth, so both operands are read transposed as they lie, and nothing is gathered. An
absent slot spoils its own row alone, which is not written. Heads that do not exist are zeros, by TMA, in all four operands. While
one warpgroup stores its rows the other one multiplies. README.md has the clocks: memory binds.
"""

from __future__ import annotations

from cutlass import cute

from ...manifest import Role
from ...spec.arch import Arch
from ...spec.sparse_prefill_dkv import SparsePrefillDkvConfig
from ..attention import cta
from ..attention.kernel import AttentionKernel
from ..definition import KernelDefinition
from ..primitives.smem import fields_of
from ..sm90.cta import WARPGROUP, WARPS_PER_GROUP, set_registers
from ..sparse_prefill.operands import SparsePrefillOperands
from .abi import SparsePrefillDkvAbi
from .load import DkvLoadRole
from .sm90_config import GROUPS, LOAD_REGISTERS, LOAD_WARP, MULTIPLY_REGISTERS, THREADS, DkvSm90Geometry
from .sm90_rows import DkvSm90RowRole
from .tiles import DkvSmem

LOADS = Role("load", LOAD_WARP, 1)
ROWS = tuple(Role(f"rows_{side}", group * WARPS_PER_GROUP, WARPS_PER_GROUP) for group, side in ((1, "left"), (2, "right")))


class SparsePrefillDkvSm90(AttentionKernel):
    """One variant of the kernel."""

    threads = THREADS

    def __init__(self, config: SparsePrefillDkvConfig, arch: Arch) -> None:
        super().__init__(SparsePrefillDkvAbi(config), arch)
        self.geometry = DkvSm90Geometry(config)
        self.smem = self.geometry.smem(self.dtype)

    @cute.jit
    def run(self, operands: SparsePrefillOperands):
        """Allocate, initialise the barriers, and give each role its warps."""
        args = operands.args
        smem = DkvSmem(**fields_of(DkvSmem, self.smem.allocate()))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta.initialise(warp, LOAD_WARP, arrivals(smem), (args.q_map, args.dout_map, args.probs_map, args.dscores_map))
        cute.arch.sync_threads()
        # P and dS come from the kernel before
        cute.arch.griddepcontrol_wait()

        group, thread = warp // WARPS_PER_GROUP, cute.arch.thread_idx()[0] % WARPGROUP
        if group == 0:
            set_registers(LOAD_REGISTERS)
            if warp == LOAD_WARP:
                DkvLoadRole(self.geometry).run(operands, smem)
        else:
            set_registers(MULTIPLY_REGISTERS)
            if group == 1:
                DkvSm90RowRole(self.dtype, self.geometry, 0).run(operands, smem, thread)
            else:
                DkvSm90RowRole(self.dtype, self.geometry, 1).run(operands, smem, thread)


def arrivals(smem: DkvSmem) -> tuple[cta.Arrivals, ...]:
    """Return the arrivals of every barrier."""
    return (1, (smem.tile_ready, smem.query_ready)), (GROUPS * WARPS_PER_GROUP, (smem.tile_free,))


def build(config: SparsePrefillDkvConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    kernel = SparsePrefillDkvSm90(config, arch)
    return kernel.definition(
        smem_bytes=kernel.smem.nbytes,
        barriers=kernel.smem.barriers(),
        named_barriers=(),
        roles=(LOADS, *ROWS),
        expected={"HGMMA": kernel.geometry.wgmma_per_tile},
    )
