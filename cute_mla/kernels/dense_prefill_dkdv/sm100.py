"""dK and dV of dense prefill on Blackwell, from the statistics that dense_prefill_dq has left.

For every sequence and KV head, over the query rows i, of all heads that share it, that see key j:

    p_ij = exp(scale * <q_i, k_j> - lse_i)    ds_ij = p_ij (<dout_i, v_j> - delta_i)

    dv_j = sum_i p_ij dout_i    dk_j = scale * sum_i ds_ij q_i

A CTA takes one work item after the other: 128 keys of a KV head, against tiles of 96 query rows (d_qk 192), 128 or 64 (d_qk 256),
which begin at the first row that sees any of the keys. With 256 columns an item is dV or dK of these keys.

Roles (384 threads):
  attend   warps 0..3, 4..7: half of the query rows of a tile each, a warp 32 keys: P^T and dS^T; rows of dK and dV
  mma      warp 8: S^T = K Q^T, dP^T = V dO^T, dV += P^T dO, dK += dS^T Q
  queries  warp 9: TMA of Q and the statistics of its rows; zeroes rows past the last one
  dout     warp 10: TMA of dO; zeroes rows past the last one
  keys     warp 11: looks up the work items; TMA of K and V

Tensor memory, a key a lane: dV in 128 columns, dK in d_qk, or one of them in 256, S^T and dP^T of a tile in a column for each of its
rows. P^T and dS^T, 16-bit, overwrite the first half of each half of these.
Shared memory: K and V (128 keys), boxes of 64 columns of a tile of Q and of dO, two tiles of statistics, two posted work items.

Pipelines (producer -> consumer; arrivals per phase):
  query_ready[n]     queries -> mma      1 and the bytes of a box; without them if the tile ends past the last row; n = 9, 4, 8 by d_qk
  query_free[n]      mma -> queries      1: dK of the box, or of the tile, is done
  dout_ready[n]      dout -> mma         as query_ready; n = 3 or 4
  dout_free[n]       mma -> dout         1: dV of the box, or of the tile, is done
  statistic_ready[2] queries -> attend   1 and the bytes of the statistics of a tile, likewise
  statistic_free[2]  attend -> queries   8
  query_landed       queries -> itself   3 to 5: each box and the statistics, with their bytes, of a tile whose rest it clears
  dout_landed        dout -> itself      2 or 4, likewise
  key_ready          keys -> mma, attend 1 and the bytes of K and V, once per item, and once after the last item
  key_free           mma, attend -> keys 10: the posted item has been read, and the item's last dP^T is done
  scores_ready       mma -> attend       1: S^T is complete
  probs_ready        attend -> mma       8: P^T of two thirds of the rows (d_qk 192) or half of them is written, if it is needed
  rest_ready         attend -> mma       8: P^T of the others is written
  dprobs_ready       mma -> attend       1: dP^T is complete
  dscores_ready      attend -> mma       8: dS^T is written
  sums_ready         mma -> attend       1: dV and dK are complete; once per item with tiles
  sums_free          attend -> mma       8: they have been read

The trick: scores are computed transposed, keys in lanes. P^T and dS^T are then A operands in tensor memory where S^T and dP^T were, and
dO and Q are read a second time, transposed. The tensor cores go dV of a tile, S^T of the next, dK, dP^T of the next: P^T of the next is
computed under dK and dP^T, dS^T under dV and S^T. An item of dV alone goes through the same signals without the products dP^T and dK,
one of dK alone without dV. README.md has the clocks.
"""

from __future__ import annotations

from cutlass import cute

from ...manifest import Role
from ...spec.arch import Arch
from ...spec.dense_prefill_dkdv import DensePrefillDkdvConfig
from ..attention import cta
from ..attention.kernel import AttentionKernel
from ..definition import KernelDefinition
from ..primitives.smem import fields_of
from .abi import DensePrefillDkdvAbi
from .load import DkdvKeyRole, DkdvRowRole
from .operands import DkdvOperands
from .sm100_attend import DkdvSm100AttendRole
from .sm100_config import (
    ATTEND_REGISTERS,
    ATTEND_WARPS,
    DOUT_WARP,
    GROUP_WARPS,
    HALVES,
    KEY_WARP,
    MMA_WARP,
    OTHER_REGISTERS,
    QUERY_WARP,
    THREADS,
    DkdvSm100Geometry,
    DkdvSm100Smem,
)
from .sm100_load import DkdvSm100RowTiles, DkdvStatisticTiles
from .sm100_mma import DkdvSm100MmaRole, DkdvTileGemm


class DensePrefillDkdvSm100(AttentionKernel):
    """One variant of the kernel."""

    threads = THREADS

    def __init__(self, config: DensePrefillDkdvConfig, arch: Arch) -> None:
        super().__init__(DensePrefillDkdvAbi(config, arch), arch)
        self.geometry = DkdvSm100Geometry(config)
        self.smem = self.geometry.smem(self.dtype)

    @cute.jit
    def run(self, operands: DkdvOperands):
        """Allocate, initialise the barriers, and give each role its warps."""
        geometry, args = self.geometry, operands.args
        smem = DkdvSm100Smem(**fields_of(DkdvSm100Smem, self.smem.allocate()))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        maps = (args.q_map, args.dout_map, args.k_map, args.v_map, args.statistics_map)
        cta.initialise(warp, KEY_WARP, arrivals(smem, geometry), maps)
        tmem = cta.allocate_tmem(smem, warp, MMA_WARP)
        # the statistics, and copies of Q and dO, come from the kernel before
        cute.arch.griddepcontrol_wait()

        if warp < ATTEND_WARPS:
            cute.arch.setmaxregister_increase(ATTEND_REGISTERS)
            DkdvSm100AttendRole(self.dtype, geometry).run(operands, smem, tmem, warp // GROUP_WARPS)
        else:
            cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
            if warp == MMA_WARP:
                DkdvSm100MmaRole(geometry).run(operands, smem, DkdvTileGemm(self.dtype, geometry, smem, tmem))
            if warp == QUERY_WARP:
                query_pipe = (smem.query_ready, smem.query_free, smem.query_landed)
                statistics = DkdvStatisticTiles(smem.statistic_ready, smem.statistic_free, args.statistics_map, smem.statistics)
                queries = DkdvSm100RowTiles(geometry, *query_pipe, args.q_map, smem.sQ, geometry.query_boxes, statistics)
                DkdvRowRole(geometry, queries).run(operands)
            if warp == DOUT_WARP:
                dout_pipe = (smem.dout_ready, smem.dout_free, smem.dout_landed)
                DkdvRowRole(geometry, DkdvSm100RowTiles(geometry, *dout_pipe, args.dout_map, smem.sD, geometry.dout_boxes)).run(operands)
            if warp == KEY_WARP:
                DkdvKeyRole(geometry).run(operands, smem)
        cta.free_tmem(tmem, warp, MMA_WARP)


def arrivals(smem: DkdvSm100Smem, geometry: DkdvSm100Geometry) -> tuple[cta.Arrivals, ...]:
    """Return the arrivals of every barrier: warps of the arriving roles, loads, or a commit."""
    loads = (smem.query_ready, smem.query_free, smem.dout_ready, smem.dout_free, smem.statistic_ready, smem.key_ready)
    return (
        (1, (*loads, smem.scores_ready, smem.dprobs_ready, smem.sums_ready)),
        (geometry.query_boxes + 1, (smem.query_landed,)),
        (geometry.dout_boxes, (smem.dout_landed,)),
        (ATTEND_WARPS, (smem.statistic_free, smem.probs_ready, smem.rest_ready, smem.dscores_ready, smem.sums_free)),
        (2 + ATTEND_WARPS, (smem.key_free,)),
    )


def build(config: DensePrefillDkdvConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    kernel = DensePrefillDkdvSm100(config, arch)
    return kernel.definition(
        smem_bytes=kernel.smem.nbytes,
        barriers=kernel.smem.barriers(),
        named_barriers=(),
        roles=(
            *(Role(f"attend_{half}", half * GROUP_WARPS, GROUP_WARPS) for half in range(HALVES)),
            Role("mma", MMA_WARP, 1),
            Role("queries", QUERY_WARP, 1),
            Role("dout", DOUT_WARP, 1),
            Role("keys", KEY_WARP, 1),
        ),
        expected={"UTCHMMA": kernel.geometry.products},
        tmem_columns=cta.TMEM_COLUMNS,
    )
