"""dK and dV of dense prefill on Blackwell, from the statistics that dense_prefill_dq has left.

For every sequence and KV head, over the query rows i, of all heads that share it, that see key j:

    p_ij = exp(scale * <q_i, k_j> - lse_i)    ds_ij = p_ij (<dout_i, v_j> - delta_i)

    dv_j = sum_i p_ij dout_i    dk_j = scale * sum_i ds_ij q_i

A CTA takes one work item after the other: 128 keys of a KV head, against tiles of 96 query rows (d_qk 192), 128 or 64 (d_qk 256),
which begin at the first row that sees any of the keys. With 256 columns an item is dV or dK of these keys.

Roles (384 threads):
  attend   warps 0..3, 4..7: half of the query rows of a tile each, a warp 32 keys: P^T and dS^T; rows of dK and dV
  mma      warp 8: S^T = K Q^T, dP^T = V dO^T, dV += P^T dO, dK += dS^T Q
  queries  warp 9: TMA of Q and the statistics of its rows; zeroes what lies behind the last row
  slopes   warp 10: TMA of dO; zeroes what lies behind the last row
  keys     warp 11: looks up the work items; TMA of K and V

Tensor memory, a key a lane: dV in 128 columns, dK in d_qk, or one of them in 256, S^T and dP^T of a tile in a column for each of its
rows. P^T and dS^T, 16-bit, overwrite the first half of each half of these.
Shared memory: K and V (128 keys), boxes of 64 columns of a tile of Q and of dO, two tiles of statistics, two posted work items.

Pipelines (producer -> consumer; arrivals per phase):
  query_ready[n]     queries -> mma      1 and the bytes of a box; without them if the tile ends behind the last row; n = 9, 4, 8 by d_qk
  query_free[n]      mma -> queries      1: dK of the box, or of the tile, is done
  slope_ready[n]     slopes -> mma       as query_ready; n = 3 or 4
  slope_free[n]      mma -> slopes       1: dV of the box, or of the tile, is done
  statistic_ready[2] queries -> attend   1 and the bytes of the statistics of a tile, likewise
  statistic_free[2]  attend -> queries   8
  query_landed       queries -> itself   3 to 5: each box and the statistics, with their bytes, of a tile that it clears the rest of
  slope_landed       slopes -> itself    2 or 4, likewise
  key_ready          keys -> mma, attend 1 and the bytes of K and V, once per item, and once behind the last item
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
from ..attention.kernel import AttentionKernel
from ..definition import KernelDefinition
from ..primitives import tcgen05
from ..primitives.smem import fields_of
from ..primitives.tma import prefetch_map
from .abi import DensePrefillDkdvAbi
from .key_role import KeyRole
from .operands import Operands
from .sm100_attend import AttendRole
from .sm100_config import (
    ATTEND_REGISTERS,
    ATTEND_WARPS,
    GROUP_WARPS,
    HALVES,
    KEY_WARP,
    MMA_WARP,
    OTHER_REGISTERS,
    QUERY_WARP,
    SLOPE_WARP,
    THREADS,
    TMEM_COLUMNS,
    Geometry,
    Pipes,
    Tiles,
)
from .sm100_load import QueryRole, SlopeRole
from .sm100_mma import MmaRole, TileGemm


class DensePrefillDkdvSm100(AttentionKernel):
    """One variant of the kernel."""

    threads = THREADS

    def __init__(self, config: DensePrefillDkdvConfig, arch: Arch) -> None:
        super().__init__(DensePrefillDkdvAbi(config, arch), arch)
        self.geometry = Geometry(config.d_qk)
        self.smem = self.geometry.smem(self.dtype)

    @cute.jit
    def run(self, operands: Operands):
        """Allocate, initialise the barriers, and give each role its warps."""
        memory, geometry, args = self.smem.allocate(), self.geometry, operands.args
        tiles, pipes = Tiles(**fields_of(Tiles, memory)), Pipes(**fields_of(Pipes, memory))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == KEY_WARP:
            with cute.arch.elect_one():
                initialise(pipes, geometry)
                for tensor_map in (args.q_map, args.dout_map, args.k_map, args.v_map, args.statistics_map):
                    prefetch_map(tensor_map)
        if warp == MMA_WARP:
            tcgen05.allocate(tiles.tmem_cell, TMEM_COLUMNS, tcgen05.OWN_GROUP)
        cute.arch.sync_threads()
        tmem = tiles.tmem_cell.load()
        # the statistics, and copies of Q and dO, come from the kernel before
        cute.arch.griddepcontrol_wait()

        if warp < ATTEND_WARPS:
            cute.arch.setmaxregister_increase(ATTEND_REGISTERS)
            AttendRole(self.dtype, geometry).run(operands, tiles, pipes, tmem, warp // GROUP_WARPS)
        else:
            cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
            if warp == MMA_WARP:
                MmaRole(geometry).run(operands, tiles, pipes, TileGemm(self.dtype, geometry, tiles, tmem))
            if warp == QUERY_WARP:
                QueryRole(geometry).run(operands, tiles, pipes)
            if warp == SLOPE_WARP:
                SlopeRole(geometry).run(operands, tiles, pipes)
            if warp == KEY_WARP:
                KeyRole(geometry).run(operands, tiles, pipes)

        tcgen05.fence_before_signal()
        cute.arch.sync_threads()
        if warp == MMA_WARP:
            tcgen05.fence_after_wait()
            tcgen05.free(tmem, TMEM_COLUMNS, tcgen05.OWN_GROUP)


def initialise(pipes: Pipes, geometry: Geometry) -> None:
    """Set the arrivals of every barrier: warps of the arriving roles, loads, or a commit."""
    for by_one in (
        pipes.query_ready, pipes.query_free, pipes.slope_ready, pipes.slope_free, pipes.statistic_ready, pipes.key_ready,
        pipes.scores_ready, pipes.dprobs_ready, pipes.sums_ready,
    ):  # fmt: skip
        by_one.initialise(1)
    pipes.query_landed.initialise(geometry.query_boxes + 1)
    pipes.slope_landed.initialise(geometry.slope_boxes)
    for by_warps in (pipes.statistic_free, pipes.probs_ready, pipes.rest_ready, pipes.dscores_ready, pipes.sums_free):
        by_warps.initialise(ATTEND_WARPS)
    pipes.key_free.initialise(2 + ATTEND_WARPS)
    cute.arch.mbarrier_init_fence()


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
            Role("slopes", SLOPE_WARP, 1),
            Role("keys", KEY_WARP, 1),
        ),
        expected={"UTCHMMA": kernel.geometry.products},
        tmem_columns=TMEM_COLUMNS,
    )
