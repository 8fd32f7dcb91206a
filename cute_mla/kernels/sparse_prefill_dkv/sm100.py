"""Rows of the gradient of the latent on Blackwell: what each query token adds to each row that it has chosen.

For every query token and slot j, over its heads h:

    row_j = sum_h dS_hj q_h + P_hj dout_h[:512]

A CTA takes the tokens z, z + grid z and so on, and 64 slots (one tile) at a time. Up to 64 heads it has all columns. With more, the two
CTAs along x have 256 of the 512 columns each, and those of RoPE of every other token. P and dS come as sparse_prefill_dq stores them,
[token][tile][head][64 slots].

Roles (192 threads):
  rows      warps 0..3: parts of a tile's rows, from tensor memory to the rows of the slots
  load      warp 4: looks ahead over the indices; TMA of P and dS of tiles that have keys, and of Q and dO of a token
  mma       warp 5: a tile's rows in parts of 256 columns, and one of the 64 columns of RoPE

Tensor memory: four parts. A part has 128 columns: lane s has columns 0..127 of slot s, lane 64 + s columns 128..255.

Pipelines (producer -> consumer; arrivals per phase):
  tile_ready[n]  load -> mma, rows  1 and the bytes of P and dS of 64 heads; without them behind the last tile
  tile_free[n]   mma, rows -> load  6: the tile's products are done, and each warp has read what the load role says of it
  query_ready    load -> mma        1 and the bytes of Q and dO, once per token that has keys, when the last token's tiles are all free
  part_ready[4]  mma -> rows        1: the part is complete
  part_free[4]   rows -> mma        4: it is in registers

The trick: products of 64 rows in all lanes ("weight stationary") run at the rate of 128 rows, and take half of the columns of tensor
memory, so that two tiles fit in parts. Both operands are read transposed as they lie. An absent slot spoils its own row alone, which is not
written. Heads that do not exist are zeros, by TMA, in all four operands. README.md has the clocks: memory binds.
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
from ..sparse_prefill.operands import SparsePrefillOperands
from .abi import SparsePrefillDkvAbi
from .load import DkvLoadRole
from .sm100_config import LOAD_WARP, MMA_WARP, ROW_WARPS, THREADS, DkvSm100Geometry, DkvSm100Smem
from .sm100_mma import DkvSm100MmaRole
from .sm100_rows import DkvSm100RowRole


class SparsePrefillDkvSm100(AttentionKernel):
    """One variant of the kernel."""

    threads = THREADS

    def __init__(self, config: SparsePrefillDkvConfig, arch: Arch) -> None:
        super().__init__(SparsePrefillDkvAbi(config), arch)
        self.geometry = DkvSm100Geometry(config)
        self.smem = self.geometry.smem(self.dtype)

    @cute.jit
    def run(self, operands: SparsePrefillOperands):
        """Allocate, initialise the barriers, and give each role its warps."""
        args = operands.args
        smem = DkvSm100Smem(**fields_of(DkvSm100Smem, self.smem.allocate()))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta.initialise(warp, LOAD_WARP, arrivals(smem), (args.q_map, args.dout_map, args.probs_map, args.dscores_map))
        tmem = cta.allocate_tmem(smem, warp, MMA_WARP)
        # P and dS come from the kernel before
        cute.arch.griddepcontrol_wait()

        if warp < ROW_WARPS:
            DkvSm100RowRole(self.dtype, self.geometry).run(operands, smem, tmem)
        if warp == LOAD_WARP:
            DkvLoadRole(self.geometry).run(operands, smem)
        if warp == MMA_WARP:
            DkvSm100MmaRole(self.dtype, self.geometry).run(smem, tmem)
        cta.free_tmem(tmem, warp, MMA_WARP)


def arrivals(smem: DkvSm100Smem) -> tuple[cta.Arrivals, ...]:
    """Return the arrivals of every barrier: warps of the arriving roles, loads, or a commit."""
    return (
        (1, (smem.tile_ready, smem.query_ready, smem.part_ready)),
        (ROW_WARPS, (smem.part_free,)),
        (2 + ROW_WARPS, (smem.tile_free,)),
    )


def build(config: SparsePrefillDkvConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    kernel = SparsePrefillDkvSm100(config, arch)
    return kernel.definition(
        smem_bytes=kernel.smem.nbytes,
        barriers=kernel.smem.barriers(),
        named_barriers=(),
        roles=(Role("rows", 0, ROW_WARPS), Role("load", LOAD_WARP, 1), Role("mma", MMA_WARP, 1)),
        expected={"UTCHMMA": kernel.geometry.products},
        tmem_columns=cta.TMEM_COLUMNS,
    )
