"""dQ of dense prefill on Hopper, and the statistics of the rows that dK and dV need.

For every sequence and query head, over the keys j that row r sees, with delta_r = <out_r, dout_r>:

    s_rj = <q_r, k_j>    p = exp(scale * s - lse_r)    ds_rj = p_rj (<dout_r, v_j> - delta_r)    dq_r = scale * sum_j ds_rj k_j

A CTA takes one work item after the other: 128 query rows of a head, against tiles of 96 keys (d_qk 192), 128 (d_qk 128) or 64
(d_qk 256), the last tile first, so that the tiles that need a mask come before those that do not.

Roles (384 threads):
  keys     warp 0: TMA of K; zeroes rows past the last key
  values   warp 1: TMA of V
  queries  warp 2: TMA of Q and dO
  items    warp 3: finds the CTA's items, up to four ahead of the other roles; the forward's
  attend   warpgroups 1, 2: 64 rows each: delta, S = Q K^T, dP = dO V^T, dS, dQ += dS K with dS and dQ in registers

Shared memory: Q and dO (128 rows), two tiles of K, two of V or one (d_qk 256).

Pipelines (producer -> consumer; arrivals per phase):
  key_ready[n]     keys -> attend      1 and the bytes of a tile; without them for a tile that ends past the last key
  key_free[n]      attend -> keys      8: the warps of both warpgroups
  tail_landed       keys -> itself      1 and the bytes of such a tile, whose rest it clears before it hands the tile on
  value_ready[n]   values -> attend    1 and the bytes of a tile
  value_free[n]    attend -> values    8
  query_ready[2]   queries -> attend   1 and the bytes of a warpgroup's rows of Q and dO, once per item
  query_free[2]    attend -> queries   4: the last S and dP of the item are there
  item_ready[4]    items -> others     1: what the next item is, or that there is none
  item_free[4]     others -> items     11: it has been read
  turn (bar.sync)  attend -> attend    the two warpgroups issue their products in turn

The trick: no value of the tile leaves the registers but through a product. dS, packed in pairs, is the A operand of dQ, and K is
read a second time, transposed. The warpgroups issue in turn: S and dP of one, of the other, dQ of one, of the other. So one is at its
exponentials while the tensor cores work for the other. README.md has the clocks.
"""

from __future__ import annotations

from cutlass import cute

from ...manifest import NamedBarrier
from ...spec.arch import Arch
from ...spec.dense_prefill import DensePrefillConfig
from ..attention import cta
from ..attention.kernel import AttentionKernel
from ..definition import KernelDefinition
from ..dense_prefill.operands import ItemQueue
from ..dense_prefill.sm90_config import ATTEND_ROLES, LOAD_ROLES, THREADS, TURN_BARRIERS, WARPGROUP, WARPS_PER_GROUP
from ..dense_prefill.sm90_load import run_loads
from ..primitives.smem import fields_of
from ..sm90.cta import set_registers
from .abi import DensePrefillDqAbi
from .operands import DqOperands
from .sm90_attend import DqSm90AttendRole
from .sm90_config import DqSm90Geometry, DqSm90Smem


class DensePrefillDqSm90(AttentionKernel):
    """One variant of the kernel."""

    threads = THREADS

    def __init__(self, config: DensePrefillConfig, arch: Arch) -> None:
        self.geometry = DqSm90Geometry(config)
        super().__init__(DensePrefillDqAbi(config, self.geometry.tile_keys), arch)
        self.smem = self.geometry.smem(self.dtype)

    @cute.jit
    def run(self, operands: DqOperands):
        """Allocate, initialise the barriers, and give each role its warps."""
        geometry, args = self.geometry, operands.args
        smem = DqSm90Smem(**fields_of(DqSm90Smem, self.smem.allocate()))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta.initialise(warp, 0, smem.arrivals(), (args.q_map, args.dout_map, args.k_map, args.v_map))
        cute.arch.sync_threads()
        # all operands may come from the kernel before
        cute.arch.griddepcontrol_wait()

        group, queue = warp // WARPS_PER_GROUP, ItemQueue(smem.sItems, smem)
        if group == 0:
            # values past the last key reach columns of dP that are not used
            rows = ((args.q_map, smem.sQ), (args.dout_map, smem.sD))
            run_loads(warp, geometry, operands, queue, smem, rows, (smem.tail_landed, None))
        else:
            set_registers(geometry.registers[1])
            attend = DqSm90AttendRole(self.dtype, geometry)
            attend.run(operands, queue, smem, cute.arch.thread_idx()[0] % WARPGROUP, group - 1)


def build(config: DensePrefillConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    kernel = DensePrefillDqSm90(config, arch)
    return kernel.definition(
        smem_bytes=kernel.smem.nbytes,
        barriers=kernel.smem.barriers(),
        named_barriers=tuple(NamedBarrier(*turn) for turn in TURN_BARRIERS),
        roles=(*LOAD_ROLES, *ATTEND_ROLES),
        expected={"HGMMA": sum(kernel.geometry.wgmma_per_tile)},
    )
