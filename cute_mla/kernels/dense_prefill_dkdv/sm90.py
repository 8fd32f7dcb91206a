"""dK and dV of dense prefill on Hopper, from the statistics that dense_prefill_dq has left.

For every sequence and KV head, over the query rows i, of all heads that share it, that see key j:

    p_ij = exp(scale * <q_i, k_j> - lse_i)    ds_ij = p_ij (<dout_i, v_j> - delta_i)

    dv_j = sum_i p_ij dout_i    dk_j = scale * sum_i ds_ij q_i

A CTA takes one work item after the other: 128 keys of a KV head (64 with 256 columns), against tiles of 64 query rows, which
begin at the first row that sees any of the keys.

Roles (384 threads):
  queries  warp 0: TMA of Q and the statistics of its rows; zeroes what lies behind the last row
  slopes   warp 1: TMA of dO; zeroes what lies behind the last row
  keys     warp 2: looks up the work items; TMA of K and V
  attend   warpgroups 1, 2: 64 keys each: S^T = K Q^T, dP^T = V dO^T, P^T, dS^T, dV += P^T dO, dK += dS^T Q; with 256 columns they
           share the keys: S^T, P^T and dV are the first one's, dP^T, dS^T and dK the second one's (sm90_shared.py)

Shared memory: K and V, three tiles (d_qk 192), four or two (d_qk 256) of Q, dO and the statistics, two posted work items; where the
warpgroups share the keys, P^T of two tiles.

Pipelines (producer -> consumer; arrivals per phase):
  query_ready[n]   queries -> attend   1 and the bytes of a tile; without them for a tile that ends behind the last row
  query_free[n]    attend -> queries   8: the warps of both warpgroups
  slope_ready[n]   slopes -> attend    as query_ready
  slope_free[n]    attend -> slopes    8
  query_landed     queries -> itself   1 and the bytes of a tile that it clears the rest of before it hands it on
  slope_landed     slopes -> itself    likewise
  key_ready        keys -> attend      1 and the bytes of K and V, once per item, and once behind the last item
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
from ..attention.kernel import AttentionKernel
from ..definition import KernelDefinition
from ..dense_prefill.sm90_config import GROUPS, THREADS, TURN_BARRIER, WARPGROUP, WARPS_PER_GROUP
from ..primitives.smem import fields_of
from ..primitives.tma import prefetch_map
from ..sm90.warpgroups import set_registers
from .abi import DensePrefillDkdvAbi
from .key_role import KeyRole
from .operands import Operands
from .sm90_attend import AttendRole
from .sm90_config import (
    COMPUTE_REGISTERS,
    KEY_WARP,
    LOAD_REGISTERS,
    QUERY_WARP,
    SLOPE_WARP,
    Geometry,
    Pipes,
    Tiles,
)
from .sm90_load import QueryRole, SlopeRole
from .sm90_shared import KeySumRole, ValueSumRole


class DensePrefillDkdvSm90(AttentionKernel):
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
        if warp == 0:
            with cute.arch.elect_one():
                initialise(pipes)
                for tensor_map in (args.q_map, args.dout_map, args.k_map, args.v_map, args.statistics_map):
                    prefetch_map(tensor_map)
        cute.arch.sync_threads()
        # the statistics, and copies of Q and dO, come from the kernel before
        cute.arch.griddepcontrol_wait()

        group = warp // WARPS_PER_GROUP
        if group == 0:
            set_registers(LOAD_REGISTERS)
            if warp == QUERY_WARP:
                QueryRole(geometry).run(operands, tiles, pipes)
            if warp == SLOPE_WARP:
                SlopeRole(geometry).run(operands, tiles, pipes)
            if warp == KEY_WARP:
                KeyRole(geometry).run(operands, tiles, pipes)
        else:
            set_registers(COMPUTE_REGISTERS)
            thread = cute.arch.thread_idx()[0] % WARPGROUP
            if cutlass.const_expr(not geometry.shares_keys):
                AttendRole(self.dtype, geometry).run(operands, tiles, pipes, thread, group - 1)
            elif group == 1:
                ValueSumRole(self.dtype, geometry).run(operands, tiles, pipes, thread)
            else:
                KeySumRole(self.dtype, geometry).run(operands, tiles, pipes, thread)


def initialise(pipes: Pipes) -> None:
    """Set the arrivals of every barrier."""
    for ready in (pipes.query_ready, pipes.slope_ready, pipes.query_landed, pipes.slope_landed, pipes.key_ready):
        ready.initialise(1)
    for free in (pipes.query_free, pipes.slope_free, pipes.key_free):
        free.initialise(GROUPS * WARPS_PER_GROUP)
    if pipes.probs_ready is not None:
        pipes.probs_ready.initialise(WARPS_PER_GROUP)
    cute.arch.mbarrier_init_fence()


def build(config: DensePrefillDkdvConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    kernel = DensePrefillDkdvSm90(config, arch)
    turns = tuple(NamedBarrier(f"turn_{group}", TURN_BARRIER + group) for group in range(GROUPS))
    return kernel.definition(
        smem_bytes=kernel.smem.nbytes,
        barriers=kernel.smem.barriers(),
        named_barriers=() if kernel.geometry.shares_keys else turns,
        roles=(
            Role("queries", QUERY_WARP, 1),
            Role("slopes", SLOPE_WARP, 1),
            Role("keys", KEY_WARP, 1),
            *(Role(f"attend_{group}", (1 + group) * WARPS_PER_GROUP, WARPS_PER_GROUP) for group in range(GROUPS)),
        ),
        expected={"HGMMA": kernel.geometry.wgmma_per_tile},
    )
