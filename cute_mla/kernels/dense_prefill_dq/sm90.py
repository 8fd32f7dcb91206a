"""dQ of dense prefill on Hopper, and the statistics of the rows that dK and dV need.

For every sequence and query head, over the keys j that row r sees, with delta_r = <out_r, dout_r>:

    s_rj = <q_r, k_j>    p = exp(scale * s - lse_r)    ds_rj = p_rj (<dout_r, v_j> - delta_r)    dq_r = scale * sum_j ds_rj k_j

A CTA takes one work item after the other: 128 query rows of a head, against tiles of 96 keys (d_qk 192), 128 (d_qk 128) or 64
(d_qk 256), the last tile first, so that the tiles that need a mask come before those that do not.

Roles (384 threads):
  keys     warp 0: TMA of K; zeroes what lies behind the last key
  values   warp 1: TMA of V
  queries  warp 2: TMA of Q and dO
  items    warp 3: finds the CTA's items, up to four ahead of the other roles; the forward's
  attend   warpgroups 1, 2: 64 rows each: delta, S = Q K^T, dP = dO V^T, dS, dQ += dS K with dS and dQ in registers

Shared memory: Q and dO (128 rows), two tiles of K, two of V or one (d_qk 256).

Pipelines (producer -> consumer; arrivals per phase):
  key_ready[n]     keys -> attend      1 and the bytes of a tile; without them for a tile that ends behind the last key
  key_free[n]      attend -> keys      8: the warps of both warpgroups
  key_landed       keys -> itself      1 and the bytes of such a tile, which it clears the rest of before it hands it on
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

from ...manifest import NamedBarrier, Role
from ...spec.arch import Arch
from ...spec.dense_prefill import DensePrefillConfig
from ..attention.kernel import AttentionKernel
from ..definition import KernelDefinition
from ..dense_prefill.board import Board
from ..dense_prefill.sm90_config import (
    COMPUTE_REGISTERS,
    GROUPS,
    ITEM_READERS,
    ITEM_WARP,
    KEY_WARP,
    LOAD_REGISTERS,
    QUERY_WARP,
    THREADS,
    TURN_BARRIER,
    VALUE_WARP,
    WARPGROUP,
    WARPS_PER_GROUP,
)
from ..dense_prefill.sm90_items import ItemRole
from ..dense_prefill.sm90_load import QueryRole, TilePipe, TileRole
from ..primitives.smem import fields_of
from ..primitives.tma import prefetch_map
from ..sm90.warpgroups import set_registers
from .abi import DensePrefillDqAbi
from .operands import Operands
from .sm90_attend import AttendRole
from .sm90_config import Geometry, Pipes, Tiles


class DensePrefillDqSm90(AttentionKernel):
    """One variant of the kernel."""

    threads = THREADS

    def __init__(self, config: DensePrefillConfig, arch: Arch) -> None:
        self.geometry = Geometry(config.d_qk)
        super().__init__(DensePrefillDqAbi(config, self.geometry.tile_keys), arch)
        self.smem = self.geometry.smem(self.dtype)

    @cute.jit
    def run(self, operands: Operands):
        """Allocate, initialise the barriers, and give each role its warps."""
        memory, geometry = self.smem.allocate(), self.geometry
        tiles, pipes = Tiles(**fields_of(Tiles, memory)), Pipes(**fields_of(Pipes, memory))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                initialise(pipes)
                for tensor_map in (operands.args.q_map, operands.args.dout_map, operands.args.k_map, operands.args.v_map):
                    prefetch_map(tensor_map)
        cute.arch.sync_threads()
        # all operands may come from the kernel before
        cute.arch.griddepcontrol_wait()

        group, board, size = warp // WARPS_PER_GROUP, Board(tiles.sItems, pipes), geometry.tile_keys
        if group == 0:
            set_registers(LOAD_REGISTERS)
            if warp == KEY_WARP:
                keys = TilePipe(pipes.key_ready, pipes.key_free, pipes.key_landed)
                TileRole(size, geometry.key_bytes, size).run(operands.args.k_map, board, tiles.sK, keys)
                # the kernel behind this one waits for the end of it before it reads or writes anything
                cute.arch.griddepcontrol_launch_dependents()
            if warp == VALUE_WARP:
                # what lies behind the last key reaches columns of dP that are not used
                values = TilePipe(pipes.value_ready, pipes.value_free)
                TileRole(size, geometry.value_bytes, size).run(operands.args.v_map, board, tiles.sV, values)
            if warp == ITEM_WARP:
                ItemRole().run(operands.items, board)
            if warp == QUERY_WARP:
                QueryRole(geometry.row_bytes).run(((operands.args.q_map, tiles.sQ), (operands.args.dout_map, tiles.sD)), board, pipes)
        else:
            set_registers(COMPUTE_REGISTERS)
            attend = AttendRole(self.dtype, geometry)
            attend.run(operands, board, tiles, pipes, cute.arch.thread_idx()[0] % WARPGROUP, group - 1)


def initialise(pipes: Pipes) -> None:
    """Set the arrivals of every barrier."""
    for ready in (pipes.key_ready, pipes.value_ready, pipes.key_landed, pipes.query_ready, pipes.item_ready):
        ready.initialise(1)
    for free in (pipes.key_free, pipes.value_free):
        free.initialise(GROUPS * WARPS_PER_GROUP)
    pipes.query_free.initialise(WARPS_PER_GROUP)
    pipes.item_free.initialise(ITEM_READERS)
    cute.arch.mbarrier_init_fence()


def build(config: DensePrefillConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    kernel = DensePrefillDqSm90(config, arch)
    named = [(f"turn_{group}", TURN_BARRIER + group) for group in range(GROUPS)]
    return kernel.definition(
        smem_bytes=kernel.smem.nbytes,
        barriers=kernel.smem.barriers(),
        named_barriers=tuple(NamedBarrier(name, number) for name, number in named),
        roles=(
            Role("keys", KEY_WARP, 1),
            Role("values", VALUE_WARP, 1),
            Role("queries", QUERY_WARP, 1),
            Role("items", ITEM_WARP, 1),
            *(Role(f"attend_{group}", (1 + group) * WARPS_PER_GROUP, WARPS_PER_GROUP) for group in range(GROUPS)),
        ),
        expected={"HGMMA": kernel.geometry.wgmma_per_tile},
    )
