"""Dense prefill on Hopper.

For every sequence and query head, over the keys j that row r sees:

    s_rj = <q_r, k_j> over d_qk columns     p = softmax(scale * s)     out_r = sum_j p_rj v_j     (d_v columns)

d_qk and d_v are 192 and 128, 128 and 128, or 256 and 256.

A CTA takes one work item after the other: 128 query rows of a head, against tiles of 128 keys, the last tile first, so that
the tiles that need a mask come before those that do not. With 256 columns, where O takes half of the registers, tiles have 80 keys.

Roles (384 threads):
  keys     warp 0: TMA of K
  values   warp 1: TMA of V; zeroes what lies behind the last key
  queries  warp 2: TMA of Q
  items    warp 3: finds the CTA's items, up to four ahead of the other roles
  attend   warpgroups 1, 2: 64 rows each: S = Q K^T, softmax, O += P V with P and O in registers, out, lse

Shared memory: Q (128 rows), and as many tiles of K and of V as fit: 2 each with 192 or 256 columns, 3 with 128.

Pipelines (producer -> consumer; arrivals per phase):
  key_ready[n]     keys -> attend      1 and the bytes of a tile
  key_free[n]      attend -> keys      8: the warps of both warpgroups
  value_ready[n]   values -> attend    1 and the bytes of a tile; without them for a tile that ends behind the last key
  value_free[n]    attend -> values    8
  value_landed     values -> itself    1 and the bytes of such a tile, which it clears the rest of before it hands it on
  query_ready[2]   queries -> attend   1 and the bytes of a warpgroup's rows, once per item
  query_free[2]    attend -> queries   4: the last S of the item is there
  item_ready[4]    items -> others     1: what the next item is, or that there is none
  item_free[4]     others -> items     11: it has been read
  turn (bar.sync)  attend -> attend    the two warpgroups issue their products in turn

The trick: nothing that is computed waits for the tensor cores, or they for it. A warpgroup issues S of the next tile together
with P V of this one, and is at its softmax while P V goes on; the two warpgroups issue in turn, so that each has the tensor
cores for itself while the other one is at its softmax. An item ends in the middle of that: P V of its last tile goes with the
first S of the next item, whose Q has come since the last S, and O is written behind that S's softmax. README.md has the clocks.
"""

from __future__ import annotations

from cutlass import cute

from ...manifest import NamedBarrier, Role
from ...spec.arch import Arch
from ...spec.dense_prefill import DensePrefillConfig
from ..attention.kernel import AttentionKernel
from ..definition import KernelDefinition
from ..primitives.smem import fields_of
from ..primitives.tma import prefetch_map
from ..sm90.warpgroups import set_registers
from .abi import DensePrefillAbi
from .operands import Operands
from .sm90_attend import AttendRole
from .sm90_config import (
    GROUP_ROWS,
    GROUPS,
    ITEM_READERS,
    ITEM_WARP,
    KEY_WARP,
    QUERY_WARP,
    THREADS,
    TURN_BARRIER,
    VALUE_WARP,
    WARPGROUP,
    WARPS_PER_GROUP,
    Geometry,
    Pipes,
    Tiles,
)
from .sm90_items import ItemRole
from .sm90_load import QueryRole, TilePipe, TileRole


class DensePrefillSm90(AttentionKernel):
    """One variant of the kernel."""

    threads = THREADS
    abi: DensePrefillAbi

    def __init__(self, abi: DensePrefillAbi) -> None:
        super().__init__(abi, abi.arch)
        self.geometry = Geometry(abi.config, abi.item_words)
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
                for tensor_map in (operands.args.q_map, operands.args.k_map, operands.args.v_map):
                    prefetch_map(tensor_map)
        cute.arch.sync_threads()
        # Q, K, V and the lengths may come from the kernel before
        cute.arch.griddepcontrol_wait()

        group, board = warp // WARPS_PER_GROUP, self.abi.board(operands, tiles.sItems, pipes)
        if group == 0:
            set_registers(geometry.registers[0])
            if warp == KEY_WARP:
                keys = TilePipe(pipes.key_ready, pipes.key_free)
                TileRole(geometry.tile_keys, geometry.key_bytes, geometry.box_keys).run(operands.args.k_map, board, tiles.sK, keys)
                # the kernel behind this one waits for the end of it before it reads or writes anything
                cute.arch.griddepcontrol_launch_dependents()
            if warp == VALUE_WARP:
                values = TilePipe(pipes.value_ready, pipes.value_free, pipes.value_landed)
                TileRole(geometry.tile_keys, geometry.value_bytes, geometry.box_keys).run(operands.args.v_map, board, tiles.sV, values)
            if warp == ITEM_WARP:
                ItemRole().run(operands.items, board)
            if warp == QUERY_WARP:
                QueryRole(geometry.query_bytes).run(((operands.args.q_map, tiles.sQ),), board, pipes)
        else:
            set_registers(geometry.registers[1])
            attend = AttendRole(self.dtype, geometry, self.abi.key_mask(operands))
            attend.run(operands, board, tiles, pipes, cute.arch.thread_idx()[0] % WARPGROUP, group - 1)


def initialise(pipes: Pipes) -> None:
    """Set the arrivals of every barrier."""
    for ready in (pipes.key_ready, pipes.value_ready, pipes.value_landed, pipes.query_ready, pipes.item_ready):
        ready.initialise(1)
    for free in (pipes.key_free, pipes.value_free):
        free.initialise(GROUPS * WARPS_PER_GROUP)
    pipes.query_free.initialise(WARPS_PER_GROUP)
    pipes.item_free.initialise(ITEM_READERS)
    cute.arch.mbarrier_init_fence()


def build(config: DensePrefillConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    return definition(DensePrefillAbi(config, arch))


def definition(abi: DensePrefillAbi) -> KernelDefinition:
    """Return the kernel of one variant's arguments, ready to compile."""
    kernel = DensePrefillSm90(abi)
    geometry = kernel.geometry
    scores, output = geometry.wgmma_per_tile
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
        expected={"HGMMA": scores + 2 * output},  # of a tile, and the very last P V
        overlapped={"MUFU.EX2": GROUP_ROWS * geometry.tile_keys // WARPGROUP},  # P V goes on during the softmax
    )
