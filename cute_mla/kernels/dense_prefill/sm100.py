"""Dense prefill on Blackwell.

For every sequence, query head and query row i of s_q, over the keys j of s_k that the row sees:

    s_ij = <q_i, k_j> over 192 or 128 columns     p = softmax(scale * s)     out_i = sum_j p_ij v_j (128 columns)

Heads of 256 columns have another kernel, sm100_pair.py.

A CTA takes one work item after another: 256 query rows of a head, as two Q tiles of 128, against the keys of their KV head,
128 (a key tile) at a time, from the last to the first, so that masks are needed in front only.

Roles (512 threads):
  softmax  warps 0..3, 4..7: one group for each Q tile, a thread a row: softmax, P to tensor memory, lse
  output   warps 8..11: rescale of O, epilogue of both Q tiles
  mma      warp 12: S = Q K^T and O += P V of both
  load     warp 13: TMA of K and V, and of Q

Tensor memory: S of the Q tiles in 2 x 128 columns, O in 2 x 128. P, 16-bit, overwrites the first half of its S.
Shared memory: Q (2 tiles), and 16 KB stages for keys (64 columns of 128) and values (64 of them, all columns).

Pipelines (producer -> consumer; arrivals per phase). Those of [2] are one for each Q tile:
  item_ready[4]     load -> all others            1: what the item of a round is
  item_free[4]      all others -> load            13: it has been read
  kv_ready[n]       load -> mma, softmax          1 and the bytes of two boxes; n = 8 (d_qk 192) or 10
  kv_free[n]        mma -> load                   1: both Q tiles have been multiplied with it
  query_ready[2]    load -> mma                   1 and the bytes of Q; once per item
  query_free[2]     mma -> load                   1: the item's last S is complete
  scores_ready[2]   mma -> softmax                1: S is complete, and so is O up to the key tile before
  alpha_ready[2]    softmax -> output             4: rescale factors; not of an item's first key tile
  probs_ready[2]    softmax, output -> mma        8: P of 96 keys is written, O is scaled or has been read out
  rest_ready[2]     softmax -> mma                4: P of the others is written
  output_ready[2]   mma -> output                 1: O is complete; once per item
  sums_ready[2]     softmax -> output             4: 1 / row sum; once per item
  sums_free[2]      output -> softmax             4

The trick: the two Q tiles take turns. While the softmax of one runs, the tensor cores multiply for the other, in the order
P V of tile 0, next S of tile 0, P V of tile 1, next S of tile 1. P V starts when three quarters of P are there, and work of
the exponentials are polynomials on the FMA pipe. README.md has the clocks.
"""

from __future__ import annotations

import cutlass
from cutlass import cute

from ...manifest import Role
from ...spec.arch import Arch
from ...spec.dense_prefill import DensePrefillConfig
from ..attention.kernel import AttentionKernel
from ..definition import KernelDefinition
from ..primitives import tcgen05
from ..primitives.smem import fields_of
from ..primitives.tma import prefetch_map
from .abi import DensePrefillAbi
from .operands import Operands
from .sm100_config import (
    D_V,
    GROUP_WARPS,
    ITEM_WARP,
    LOAD_WARP,
    MMA_WARP,
    OUTPUT_WARP,
    QUERY_TILES,
    THREADS,
    TMEM_COLUMNS,
    Geometry,
    Pipes,
    Tiles,
)
from .sm100_load import ItemRole, LoadRole
from .sm100_mma import MmaRole, TileGemm
from .sm100_output import OutputRole
from .sm100_pair import pair_definition
from .sm100_softmax import SoftmaxRole


class DensePrefillSm100(AttentionKernel):
    """One variant of the kernel."""

    threads = THREADS
    abi: DensePrefillAbi

    def __init__(self, abi: DensePrefillAbi) -> None:
        super().__init__(abi, abi.arch)
        self.in_parts = abi.in_parts
        self.geometry = Geometry(abi.config.d_qk, abi.item_words)
        self.smem = self.geometry.smem()

    @cute.jit
    def run(self, operands: Operands):
        """Allocate, initialise the barriers, and give each role its warps."""
        memory = self.smem.allocate()
        tiles, pipes = Tiles(**fields_of(Tiles, memory)), Pipes(**fields_of(Pipes, memory))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD_WARP:
            with cute.arch.elect_one():
                self.initialise(pipes)
                for tensor_map in (operands.args.k_map, operands.args.v_map, operands.args.q_map):
                    prefetch_map(tensor_map)
        if warp == MMA_WARP:
            tcgen05.allocate(tiles.tmem_cell, TMEM_COLUMNS, tcgen05.OWN_GROUP)
        cute.arch.sync_threads()
        tmem = tiles.tmem_cell.load()
        # the lengths and all tensors may come from the kernel before
        cute.arch.griddepcontrol_wait()

        softmax, output, others = self.geometry.registers
        board = self.abi.board(operands, tiles.sItems, pipes)
        if warp < OUTPUT_WARP:
            cute.arch.setmaxregister_increase(softmax)
            role = SoftmaxRole(self.dtype, self.geometry, self.abi.key_mask(operands))
            role.run(operands, board, tiles, pipes, tmem, warp // GROUP_WARPS)
        elif warp < MMA_WARP:
            cute.arch.setmaxregister_decrease(output)
            OutputRole(self.dtype).run(operands, board, tiles, pipes, tmem)
        else:
            cute.arch.setmaxregister_decrease(others)
            if warp == MMA_WARP:
                MmaRole(self.geometry).run(board, pipes, TileGemm(self.dtype, self.geometry, tiles, tmem))
            elif warp == LOAD_WARP:
                LoadRole(self.geometry, not self.in_parts).run(operands, board, tiles, pipes)
            elif cutlass.const_expr(self.in_parts) and warp == ITEM_WARP:
                ItemRole().run(operands.items, board)

        tcgen05.fence_before_signal()
        cute.arch.sync_threads()
        if warp == MMA_WARP:
            tcgen05.fence_after_wait()
            tcgen05.free(tmem, TMEM_COLUMNS, tcgen05.OWN_GROUP)

    def initialise(self, pipes: Pipes) -> None:
        """Set the arrivals of every barrier: warps of the arriving roles, or one commit."""
        for barriers in (pipes.kv_ready, pipes.kv_free, pipes.query_free, pipes.scores_ready, pipes.output_ready, pipes.item_ready):
            barriers.initialise(1)
        pipes.query_ready.initialise(1)
        for barriers in (pipes.alpha_ready, pipes.rest_ready, pipes.sums_ready, pipes.sums_free):
            barriers.initialise(GROUP_WARPS)
        pipes.probs_ready.initialise(2 * GROUP_WARPS)
        pipes.item_free.initialise(MMA_WARP + 1 + (1 if self.in_parts else 0))
        cute.arch.mbarrier_init_fence()


def build(config: DensePrefillConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    if config.d_v > D_V:
        return pair_definition(config, arch)
    return definition(DensePrefillAbi(config, arch))


def definition(abi: DensePrefillAbi) -> KernelDefinition:
    """Return the kernel of one variant's arguments, ready to compile."""
    kernel = DensePrefillSm100(abi)
    geometry = kernel.geometry
    softmax = tuple(Role(f"softmax{tile}", tile * GROUP_WARPS, GROUP_WARPS) for tile in range(QUERY_TILES))
    items = (Role("items", ITEM_WARP, 1),) if kernel.in_parts else ()
    return kernel.definition(
        smem_bytes=kernel.smem.nbytes,
        barriers=kernel.smem.barriers(),
        named_barriers=(),
        roles=(*softmax, Role("output", OUTPUT_WARP, GROUP_WARPS), Role("mma", MMA_WARP, 1), Role("load", LOAD_WARP, 1), *items),
        expected={"UTCHMMA": geometry.products},
        tmem_columns=TMEM_COLUMNS,
    )
