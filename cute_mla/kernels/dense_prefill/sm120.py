"""Dense prefill on RTX boards and DGX Spark.

For every sequence and query head, over the keys j that row r sees:

    s_rj = <q_r, k_j> over d_qk columns     p = softmax(scale * s)     out_r = sum_j p_rj v_j     (d_v columns)

d_qk and d_v are 192 and 128, 128 and 128, or 256 and 256.

A CTA takes one work item after the other: 128 query rows of a head, against tiles of 64 keys, of 32 with 256 columns, the last tile first,
so that the tiles that need a mask come before those that do not.

Roles (384 threads):
  keys     warp 0: TMA of Q, and of K
  values   warp 1: TMA of V; zeroes rows past the last key
  items    warp 2: finds the CTA's items, up to four ahead of the other roles (sm90_items.py)
  attend   warps 4..11: 16 rows each: S = Q K^T, softmax, O += P V with Q, P and O in registers, out, lse

Shared memory: as many tiles of K and of V as fit: 2 each with 192 and 256 columns, 3 with 128. With 256 columns each lane keeps its words
of the last 64 columns of Q there, where no other lane reads them: O and all of Q would not fit into registers.

Pipelines (producer -> consumer; arrivals per phase):
  key_ready[n]     keys -> attend      1 and the bytes of a tile
  key_free[n]      attend -> keys      8: S of a tile is complete, or Q is in registers
  value_ready[n]   values -> attend    1 and the bytes of a tile; without them for a tile that ends past the last key
  value_free[n]    attend -> values    8
  tail_landed      values -> itself    1 and the bytes of such a tile, whose rest it clears before it hands the tile on
  item_ready[4]    items -> others     1: what the next item is, or that there is none
  item_free[4]     others -> items     10: it has been read
  turn (bar.sync)  attend -> attend    warps 4..7 and 8..11 begin S in turn

The trick: Q has no room of its own. It goes through the pipeline of K as two tiles in front of an item's first, with 256 columns as four,
two at a time, and stays in registers: no product reads tiles of Q from shared memory again. The two warps of a scheduler begin S in turn,
so that one has the tensor core while the other one is at its softmax.
"""

from __future__ import annotations

from cutlass import Int32, cute

from ...manifest import NamedBarrier
from ...spec.arch import Arch
from ...spec.dense_prefill import DensePrefillConfig
from ..attention import cta
from ..attention.kernel import AttentionKernel
from ..definition import KernelDefinition
from ..primitives.smem import fields_of
from ..sm90.cta import set_registers
from .abi import DensePrefillAbi
from .operands import DensePrefillOperands, ItemQueue
from .sm90_config import TURN_BARRIERS
from .sm90_items import DensePrefillSm90ItemRole
from .sm90_load import DensePrefillTileRole
from .sm120_attend import DensePrefillSm120AttendRole, DensePrefillSm120KeyRole
from .sm120_config import (
    ITEM_WARP,
    KEY_WARP,
    LANES,
    LOAD_WARPS,
    ROLES,
    THREADS,
    VALUE_WARP,
    DensePrefillSm120Geometry,
    DensePrefillSm120Smem,
)


class DensePrefillSm120(AttentionKernel):
    """One variant of the kernel."""

    threads = THREADS
    abi: DensePrefillAbi

    def __init__(self, abi: DensePrefillAbi) -> None:
        super().__init__(abi, abi.arch)
        self.geometry = DensePrefillSm120Geometry(abi.config, abi.item_words)
        self.smem = self.geometry.smem(self.dtype)

    @cute.jit
    def run(self, operands: DensePrefillOperands):
        """Allocate, initialise the barriers, and give each role its warps."""
        args = operands.args
        smem = DensePrefillSm120Smem(**fields_of(DensePrefillSm120Smem, self.smem.allocate()))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta.initialise(warp, 0, smem.arrivals(), (args.q_map, args.k_map, args.v_map))
        cute.arch.sync_threads()
        # Q, K, V and the lengths may come from the kernel before
        cute.arch.griddepcontrol_wait()
        queue = self.abi.queue(operands, smem.sItems, smem)
        if warp < LOAD_WARPS:
            set_registers(self.geometry.registers[0])
            self.load(warp, operands, queue, smem)
        else:
            set_registers(self.geometry.registers[1])
            attend = DensePrefillSm120AttendRole(self.dtype, self.geometry, self.abi.key_mask(operands))
            attend.run(operands, queue, smem, cute.arch.thread_idx()[0] - LOAD_WARPS * LANES)

    @cute.jit
    def load(self, warp: Int32, operands: DensePrefillOperands, queue: ItemQueue, smem: DensePrefillSm120Smem):
        """Give the roles that bring operands and find items their warps."""
        geometry = self.geometry
        if warp == KEY_WARP:
            DensePrefillSm120KeyRole(geometry).run(operands.args, queue, smem)
            # the next kernel waits for the end of this one before it reads or writes anything
            cute.arch.griddepcontrol_launch_dependents()
        if warp == VALUE_WARP:
            pipe = smem.value_ready, smem.value_free
            values = DensePrefillTileRole(geometry.tile_keys, geometry.box_keys, geometry.value_bytes, pipe, smem.tail_landed)
            values.run(operands.args.v_map, queue, smem.sV)
        if warp == ITEM_WARP:
            DensePrefillSm90ItemRole().run(operands.items, queue)


def build(config: DensePrefillConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    return definition(DensePrefillAbi(config, arch))


def definition(abi: DensePrefillAbi) -> KernelDefinition:
    """Return the kernel of one variant's arguments, ready to compile."""
    kernel = DensePrefillSm120(abi)
    return kernel.definition(
        smem_bytes=kernel.smem.nbytes,
        barriers=kernel.smem.barriers(),
        named_barriers=tuple(NamedBarrier(*turn) for turn in TURN_BARRIERS),
        roles=ROLES,
        expected={"HMMA": kernel.geometry.products},
    )
