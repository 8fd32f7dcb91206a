"""dQ of dense prefill on Blackwell, and the statistics of the rows that dK and dV need.

For every sequence and query head, over the keys j that row r sees, with delta_r = <out_r, dout_r>:

    s_rj = <q_r, k_j>    p = exp(scale * s - lse_r)    ds_rj = p_rj (<dout_r, v_j> - delta_r)    dq_r = scale * sum_j ds_rj k_j

A CTA takes one work item after the other: 128 query rows of a head, against tiles of 128 keys, or 64 with 256 columns, from the last to
the first, so that the tiles that need a mask come before those that do not.

Roles (512 threads):
  attend   warps 0..3, 4..7: a thread a row, half of a tile's keys each: P, dS to tensor memory
  rows     warps 8..11: delta and lse of the next item's rows; dQ of an item to global memory
  mma      warp 12: S = Q K^T, dP = dO V^T, dQ += dS K
  keys     warp 13: finds the items; TMA of K and Q
  values   warp 14: TMA of V and dO

Tensor memory: S and dP in a column for each key of a tile, dQ in d_qk columns, dS, 16-bit, in half as many as S.
Shared memory: Q and dO, and stages of 64 columns of the keys of a tile for K and for V.

Pipelines (producer -> consumer; arrivals per phase):
  item_ready[4]     keys -> all others           1: what the item of a round is
  item_free[4]      all others -> keys           14: it has been read
  key_ready[n]      keys -> mma                  1 and the bytes of a stage; n = 7 (d_qk 192), 6 or 8 (256)
  key_free[n]       mma -> keys                  1: dQ has been multiplied with it
  value_ready[n]    values -> mma                1 and the bytes of a stage; n = 2 or 4
  value_free[n]     mma -> values                1
  query_ready       keys -> mma                  1 and the bytes of Q, once per item
  query_free        mma -> keys                  1: the item's last S is complete
  dout_ready        values -> mma                1 and the bytes of dO, once per item
  dout_free         mma -> values                1: the item's last dP is complete
  statistics_ready  rows -> attend               4: lse and delta of the item's rows
  statistics_free   attend -> rows               8
  scores_ready      mma -> attend                1: S is complete
  scores_free       attend -> mma                8: S has been read
  dprobs_ready      mma -> attend                1: dP is complete, and so is dQ of the tile before
  dscores_ready     attend -> mma                8: dS is there, dP has been read, keys past the last are zeros
  dq_ready          mma -> rows                  1: dQ is complete; once per item
  dq_free           rows -> mma                  4: it has been read

The trick: the products go in the order S of a tile, dQ of the tile before, dP of the tile. So exponentials run under dQ and dP, and
dS is computed under the next S. dQ is multiplied 64 columns after the other, which frees the stages of K one by one. README.md has
the clocks.
"""

from __future__ import annotations

from cutlass import cute

from ...manifest import Role
from ...spec.arch import Arch
from ...spec.dense_prefill import DensePrefillConfig
from ..attention import cta
from ..attention.kernel import AttentionKernel
from ..definition import KernelDefinition
from ..dense_prefill.operands import ItemQueue
from ..dense_prefill.sm100_config import GROUP_WARPS
from ..primitives.smem import fields_of
from .abi import DensePrefillDqAbi
from .operands import DqOperands
from .sm100_attend import DqSm100AttendRole
from .sm100_config import (
    ATTEND_REGISTERS,
    GROUPS,
    KEY_WARP,
    LAST_WARP,
    MMA_WARP,
    OTHER_REGISTERS,
    ROW_REGISTERS,
    ROW_WARP,
    THREADS,
    VALUE_WARP,
    DqSm100Geometry,
    DqSm100Smem,
)
from .sm100_load import DqSm100KeyRole, DqSm100ValueRole
from .sm100_mma import DqSm100MmaRole, DqTileGemm
from .sm100_rows import DqSm100RowRole


class DensePrefillDqSm100(AttentionKernel):
    """One variant of the kernel."""

    threads = THREADS

    def __init__(self, config: DensePrefillConfig, arch: Arch) -> None:
        self.geometry = DqSm100Geometry(config)
        super().__init__(DensePrefillDqAbi(config, self.geometry.tile_keys), arch)
        self.smem = self.geometry.smem()

    @cute.jit
    def run(self, operands: DqOperands):
        """Allocate, initialise the barriers, and give each role its warps."""
        args = operands.args
        smem = DqSm100Smem(**fields_of(DqSm100Smem, self.smem.allocate()))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta.initialise(warp, KEY_WARP, arrivals(smem), (args.q_map, args.dout_map, args.k_map, args.v_map))
        tmem = cta.allocate_tmem(smem, warp, MMA_WARP)
        # the lengths and all tensors may come from the kernel before
        cute.arch.griddepcontrol_wait()

        queue = ItemQueue(smem.sItems, smem)
        if warp < ROW_WARP:
            cute.arch.setmaxregister_increase(ATTEND_REGISTERS)
            DqSm100AttendRole(self.dtype, self.geometry).run(operands, queue, smem, tmem, warp // GROUP_WARPS)
        elif warp < MMA_WARP:
            cute.arch.setmaxregister_decrease(ROW_REGISTERS)
            DqSm100RowRole(self.dtype, self.geometry).run(operands, queue, smem, tmem)
        else:
            cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
            if warp == MMA_WARP:
                DqSm100MmaRole(self.geometry).run(queue, smem, DqTileGemm(self.dtype, self.geometry, smem, tmem))
            elif warp == KEY_WARP:
                DqSm100KeyRole(self.geometry).run(operands, queue, smem)
            elif warp == VALUE_WARP:
                DqSm100ValueRole(self.geometry).run(operands, queue, smem)
        cta.free_tmem(tmem, warp, MMA_WARP)


def arrivals(smem: DqSm100Smem) -> tuple[cta.Arrivals, ...]:
    """Return the arrivals of every barrier: warps of the arriving roles, or one commit or warp that loads."""
    loads = (smem.item_ready, smem.key_ready, smem.key_free, smem.value_ready, smem.value_free, smem.query_ready, smem.query_free)
    return (
        (1, (*loads, smem.dout_ready, smem.dout_free, smem.scores_ready, smem.dprobs_ready, smem.dq_ready)),
        (GROUPS * GROUP_WARPS, (smem.scores_free, smem.dscores_ready)),
        (GROUP_WARPS, (smem.statistics_ready, smem.dq_free)),
        (GROUPS * GROUP_WARPS, (smem.statistics_free,)),
        (LAST_WARP, (smem.item_free,)),
    )


def build(config: DensePrefillConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    kernel = DensePrefillDqSm100(config, arch)
    attend = tuple(Role(f"attend_{group}", group * GROUP_WARPS, GROUP_WARPS) for group in range(GROUPS))
    return kernel.definition(
        smem_bytes=kernel.smem.nbytes,
        barriers=kernel.smem.barriers(),
        named_barriers=(),
        roles=(
            *attend,
            Role("rows", ROW_WARP, GROUP_WARPS),
            Role("mma", MMA_WARP, 1),
            Role("keys", KEY_WARP, 1),
            Role("values", VALUE_WARP, 1),
        ),
        expected={"UTCHMMA": kernel.geometry.products},
        tmem_columns=cta.TMEM_COLUMNS,
    )
