"""dK and dV of dense prefill on Hopper, from the statistics that dense_prefill_dq has left.

For every sequence and KV head, over the query rows i, of all heads that share it, that see key j:

    p_ij = exp(scale * <q_i, k_j> - lse_i)    ds_ij = p_ij (<dout_i, v_j> - delta_i)

    dv_j = sum_i p_ij dout_i    dk_j = scale * sum_i ds_ij q_i

A CTA takes one work item after the other: 128 keys of a KV head (64 with 256 columns), against tiles of 64 query rows, which
begin at the first row that sees any of the keys.

Roles (384 threads):
  queries  warp 0: TMA of Q and the statistics of its rows; zeroes rows past the last one
  dout     warp 1: TMA of dO; zeroes rows past the last one
  keys     warp 2: looks up the work items; TMA of K and V
  attend   warpgroups 1, 2: 64 keys each: S^T = K Q^T, dP^T = V dO^T, P^T, dS^T, dV += P^T dO, dK += dS^T Q; with 256 columns they
           share the keys: S^T, P^T and dV are the first one's, dP^T, dS^T and dK the second one's

Shared memory: K and V, three tiles (d_qk 192), four or two (d_qk 256) of Q, dO and the statistics, two posted work items; where the
warpgroups share the keys, P^T of two tiles.

Pipelines (producer -> consumer; arrivals per phase):
  query_ready[n]   queries -> attend   1 and the bytes of a tile; without them for a tile that ends past the last row
  query_free[n]    attend -> queries   8: the warps of both warpgroups
  dout_ready[n]    dout -> attend      as query_ready
  dout_free[n]     attend -> dout      8
  query_landed     queries -> itself   1 and the bytes of a tile whose rest it clears before it hands the tile on
  dout_landed      dout -> itself      likewise
  key_ready        keys -> attend      1 and the bytes of K and V, once per item, and once after the last item
  key_free         attend -> keys      8
  turn (bar.sync)  attend -> attend    the two warpgroups issue their products in turn, unless they share the keys
  probs_ready[2]   attend -> attend    4: P^T of a tile is in shared memory, where they do, and so is Q; its stage is free when Q's is

The trick: scores are computed transposed, keys in rows. P^T and dS^T, packed in pairs, are then A operands in registers, and dO and Q
are read a second time, transposed: no value of the tile leaves the registers but through a product, and no sum leaves the CTA.
The warpgroups issue in turn, half a tile apart: S^T of one, dV and dK of the other, dP^T of the one, S^T of the other, dV and dK of the
one, dP^T of the other. So the exponentials of one run while the tensor cores work for the other. Two sums of 256 columns do not fit
into the registers of a warpgroup. README.md has the clocks.
"""

from __future__ import annotations

import cutlass
from cutlass import cute

from ...manifest import NamedBarrier, Role
from ...spec.arch import Arch
from ...spec.dense_prefill_dkdv import DensePrefillDkdvConfig
from ..attention import cta
from ..attention.kernel import AttentionKernel
from ..definition import KernelDefinition
from ..dense_prefill.sm90_config import ATTEND_ROLES, GROUPS, THREADS, TURN_BARRIERS, WARPGROUP, WARPS_PER_GROUP
from ..primitives.smem import fields_of
from ..sm90.cta import set_registers
from .abi import DensePrefillDkdvAbi
from .load import DkdvKeyRole, DkdvRowRole
from .operands import DkdvOperands
from .sm90_attend import DkdvKeySum, DkdvSharedKeyRole, DkdvSm90AttendRole, DkdvValueSum
from .sm90_config import COMPUTE_REGISTERS, DOUT_WARP, KEY_WARP, LOAD_REGISTERS, QUERY_WARP, DkdvSm90Geometry, DkdvSm90Smem
from .sm90_load import DkdvSm90RowTiles


class DensePrefillDkdvSm90(AttentionKernel):
    """One variant of the kernel."""

    threads = THREADS

    def __init__(self, config: DensePrefillDkdvConfig, arch: Arch) -> None:
        super().__init__(DensePrefillDkdvAbi(config, arch), arch)
        self.geometry = DkdvSm90Geometry(config)
        self.smem = self.geometry.smem(self.dtype)

    @cute.jit
    def run(self, operands: DkdvOperands):
        """Allocate, initialise the barriers, and give each role its warps."""
        geometry, args = self.geometry, operands.args
        smem = DkdvSm90Smem(**fields_of(DkdvSm90Smem, self.smem.allocate()))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        maps = (args.q_map, args.dout_map, args.k_map, args.v_map, args.statistics_map)
        cta.initialise(warp, QUERY_WARP, arrivals(smem), maps)
        cute.arch.sync_threads()
        # the statistics, and copies of Q and dO, come from the kernel before
        cute.arch.griddepcontrol_wait()

        group = warp // WARPS_PER_GROUP
        if group == 0:
            set_registers(LOAD_REGISTERS)
            if warp == QUERY_WARP:
                query_pipe, statistics = (smem.query_ready, smem.query_free, smem.query_landed), (args.statistics_map, smem.statistics)
                queries = DkdvSm90RowTiles(*query_pipe, args.q_map, smem.sQ, geometry.query_bytes, statistics)
                DkdvRowRole(geometry, queries).run(operands)
            if warp == DOUT_WARP:
                dout_pipe = (smem.dout_ready, smem.dout_free, smem.dout_landed)
                DkdvRowRole(geometry, DkdvSm90RowTiles(*dout_pipe, args.dout_map, smem.sD, geometry.dout_bytes)).run(operands)
            if warp == KEY_WARP:
                DkdvKeyRole(geometry).run(operands, smem)
        else:
            set_registers(COMPUTE_REGISTERS)
            thread = cute.arch.thread_idx()[0] % WARPGROUP
            if cutlass.const_expr(not geometry.shares_keys):
                DkdvSm90AttendRole(self.dtype, geometry).run(operands, smem, thread, group - 1)
            elif group == 1:
                DkdvSharedKeyRole(self.dtype, geometry, DkdvValueSum()).run(operands, smem, thread)
            else:
                DkdvSharedKeyRole(self.dtype, geometry, DkdvKeySum()).run(operands, smem, thread)


def arrivals(smem: DkdvSm90Smem) -> tuple[cta.Arrivals, ...]:
    """Return the arrivals of every barrier."""
    return (
        (1, (smem.query_ready, smem.dout_ready, smem.query_landed, smem.dout_landed, smem.key_ready)),
        (GROUPS * WARPS_PER_GROUP, (smem.query_free, smem.dout_free, smem.key_free)),
        (WARPS_PER_GROUP, () if smem.probs_ready is None else (smem.probs_ready,)),
    )


def build(config: DensePrefillDkdvConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    kernel = DensePrefillDkdvSm90(config, arch)
    return kernel.definition(
        smem_bytes=kernel.smem.nbytes,
        barriers=kernel.smem.barriers(),
        named_barriers=() if kernel.geometry.shares_keys else tuple(NamedBarrier(*turn) for turn in TURN_BARRIERS),
        roles=(Role("queries", QUERY_WARP, 1), Role("dout", DOUT_WARP, 1), Role("keys", KEY_WARP, 1), *ATTEND_ROLES),
        expected={"HGMMA": kernel.geometry.wgmma_per_tile},
    )
