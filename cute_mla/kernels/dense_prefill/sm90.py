"""Dense prefill on Hopper.

For every sequence and query head, over the keys j that row r sees:

    s_rj = <q_r, k_j> over d_qk columns     p = softmax(scale * s)     out_r = sum_j p_rj v_j     (d_v columns)

d_qk and d_v are 192 and 128, 128 and 128, or 256 and 256.

A CTA takes one work item after the other: 128 query rows of a head, against tiles of 128 keys, the last tile first, so that
the tiles that need a mask come before those that do not. With 256 columns, where O takes half of the registers, tiles have 80 keys.

Roles (384 threads):
  keys     warp 0: TMA of K
  values   warp 1: TMA of V; zeroes rows past the last key
  queries  warp 2: TMA of Q
  items    warp 3: finds the CTA's items, up to four ahead of the other roles
  attend   warpgroups 1, 2: 64 rows each: S = Q K^T, softmax, O += P V with P and O in registers, out, lse

Shared memory: Q (128 rows), and as many tiles of K and of V as fit: 2 each with 192 or 256 columns, 3 with 128.

Pipelines (producer -> consumer; arrivals per phase):
  key_ready[n]     keys -> attend      1 and the bytes of a tile
  key_free[n]      attend -> keys      8: the warps of both warpgroups
  value_ready[n]   values -> attend    1 and the bytes of a tile; without them for a tile that ends past the last key
  value_free[n]    attend -> values    8
  tail_landed      values -> itself    1 and the bytes of such a tile, whose rest it clears before it hands the tile on
  query_ready[2]   queries -> attend   1 and the bytes of a warpgroup's rows, once per item
  query_free[2]    attend -> queries   4: the last S of the item is there
  item_ready[4]    items -> others     1: what the next item is, or that there is none
  item_free[4]     others -> items     11: it has been read
  turn (bar.sync)  attend -> attend    the two warpgroups issue their products in turn

The trick: nothing that is computed waits for the tensor cores, or they for it. A warpgroup issues S of the next tile together
with P V of this one, and is at its softmax while P V goes on; the two warpgroups issue in turn, so that each has the tensor
cores for itself while the other one is at its softmax. An item ends in the middle of that: P V of its last tile goes with the
first S of the next item, whose Q has come since the last S, and O is written after that S's softmax. README.md has the clocks.
"""

from __future__ import annotations

from cutlass import cute

from ...manifest import NamedBarrier
from ...spec.arch import Arch
from ...spec.dense_prefill import DensePrefillConfig
from ..attention import cta
from ..attention.kernel import AttentionKernel
from ..definition import KernelDefinition
from ..primitives.smem import fields_of
from ..sm90.cta import set_registers
from .abi import DensePrefillAbi
from .operands import DensePrefillOperands
from .sm90_attend import DensePrefillSm90AttendRole
from .sm90_config import (
    ATTEND_ROLES,
    GROUP_ROWS,
    LOAD_ROLES,
    THREADS,
    TURN_BARRIERS,
    WARPGROUP,
    WARPS_PER_GROUP,
    DensePrefillSm90Geometry,
    DensePrefillSm90Smem,
)
from .sm90_load import run_loads


class DensePrefillSm90(AttentionKernel):
    """One variant of the kernel."""

    threads = THREADS
    abi: DensePrefillAbi

    def __init__(self, abi: DensePrefillAbi) -> None:
        super().__init__(abi, abi.arch)
        self.geometry = DensePrefillSm90Geometry(abi.config, abi.item_words)
        self.smem = self.geometry.smem(self.dtype)

    @cute.jit
    def run(self, operands: DensePrefillOperands):
        """Allocate, initialise the barriers, and give each role its warps."""
        geometry, args = self.geometry, operands.args
        smem = DensePrefillSm90Smem(**fields_of(DensePrefillSm90Smem, self.smem.allocate()))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta.initialise(warp, 0, smem.arrivals(), (args.q_map, args.k_map, args.v_map))
        cute.arch.sync_threads()
        # Q, K, V and the lengths may come from the kernel before
        cute.arch.griddepcontrol_wait()

        group, queue = warp // WARPS_PER_GROUP, self.abi.queue(operands, smem.sItems, smem)
        if group == 0:
            run_loads(warp, geometry, operands, queue, smem, ((args.q_map, smem.sQ),), (None, smem.tail_landed))
        else:
            set_registers(geometry.registers[1])
            attend = DensePrefillSm90AttendRole(self.dtype, geometry, self.abi.key_mask(operands))
            attend.run(operands, queue, smem, cute.arch.thread_idx()[0] % WARPGROUP, group - 1)


def build(config: DensePrefillConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    return definition(DensePrefillAbi(config, arch))


def definition(abi: DensePrefillAbi) -> KernelDefinition:
    """Return the kernel of one variant's arguments, ready to compile."""
    kernel = DensePrefillSm90(abi)
    geometry = kernel.geometry
    scores, output = geometry.wgmma_per_tile
    return kernel.definition(
        smem_bytes=kernel.smem.nbytes,
        barriers=kernel.smem.barriers(),
        named_barriers=tuple(NamedBarrier(*turn) for turn in TURN_BARRIERS),
        roles=(*LOAD_ROLES, *ATTEND_ROLES),
        expected={"HGMMA": scores + 2 * output},  # of a tile, and the very last P V
        overlapped={"MUFU.EX2": GROUP_ROWS * geometry.tile_keys // WARPGROUP},  # P V goes on during the softmax
    )
