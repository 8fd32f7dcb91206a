"""Dense prefill on Blackwell with heads of 256 columns, by pairs of CTAs.

O of 128 rows takes half of tensor memory, so a CTA has one Q tile, and S of two key tiles beside it. A pair takes one work item after
another: 256 query rows of a head, 128 a CTA, against the keys of their KV head, 128 (a key tile) at a time, from the last to the first.
The even CTA issues the products of both; each CTA holds half of K, 64 keys, and half of V, 128 columns, of a key tile.

Roles (384 threads of each CTA):
  softmax  warps 0..3: a thread a row: softmax, P to tensor memory, lse
  output   warps 4..7: rescale of O, epilogue
  mma      warp 8 of the even CTA: S = Q K^T and O += P V
  load     warp 9: TMA of K and V, and of Q

Tensor memory: two buffers of S of 128 columns, O in 256. P, 16-bit, overwrites the first half of its S.
Shared memory: 128 rows of Q, and 5 stages of 32 KB, each for half of K or half of V of a key tile.

Pipelines (producer -> consumer; arrivals per phase). Barriers that mma waits for are the even CTA's, and mma arrives in both:
  item_ready[4]     load -> all others            1: what the item of a round is
  item_free[4]      all others -> load            9 in the even CTA, 8 in the odd one
  kv_ready[5]       load -> mma                   2, and the bytes of both CTAs; without bytes for values that were cleared
  kv_free[5]        mma -> load                   1
  value_landed      load -> itself                1 and the bytes of values of which it clears the rest
  query_ready       load -> mma                   2 and the bytes of both CTAs; once per item
  query_free        mma -> load                   1: the item's last S is complete
  scores_ready[2]   mma -> softmax                1: S is complete
  alpha_ready[2]    softmax -> output             4: rescale factors
  probs_ready[2]    softmax, output -> mma        16: P of 96 keys is written, O is scaled or has been read out
  rest_ready[2]     softmax -> mma                8: P of the others is written
  output_ready[2]   mma -> output                 1: O is complete up to a key tile
  sums_ready        softmax -> output             4: 1 / row sum; once per item
  sums_free         output -> softmax             4

The trick: S of a key tile is multiplied in front of P V of the one before, in another buffer. So a softmax has the time of P V of the key
tile before and of the next S, 2,048 clocks. Between items, P V of the last key tile fills the time in which Q of the next item comes.
README.md has the clocks.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute

from ...manifest import Role
from ...spec.arch import Arch
from ...spec.dense_prefill import DensePrefillConfig
from ..attention.kernel import AttentionKernel
from ..definition import KernelDefinition
from ..primitives.smem import fields_of
from ..primitives.tma import prefetch_map
from ..sm100 import pair
from ..sm100.config import TMEM_COLUMNS
from .abi import DensePrefillAbi
from .board import Board
from .operands import Operands
from .sm100_config import GROUP_WARPS
from .sm100_pair_config import (
    EVEN_CTA,
    LOAD_WARP,
    MMA_WARP,
    OTHER_REGISTERS,
    OUTPUT_REGISTERS,
    OUTPUT_WARP,
    PAIR,
    SOFTMAX_REGISTERS,
    SOFTMAX_WARP,
    THREADS,
    PairGeometry,
    PairPipes,
    PairTiles,
    cta_rank,
)
from .sm100_pair_load import PairLoadRole
from .sm100_pair_mma import PairMmaRole, PairTileGemm
from .sm100_pair_rows import PairOutputRole, PairSoftmaxRole


class DensePrefillPairSm100(AttentionKernel):
    """One variant of the kernel."""

    threads = THREADS

    def __init__(self, config: DensePrefillConfig, arch: Arch) -> None:
        super().__init__(DensePrefillAbi(config, arch), arch)
        self.geometry = PairGeometry(config)
        self.smem = self.geometry.smem()

    @cute.jit
    def run(self, operands: Operands):
        """Allocate, initialise the barriers, and give each role its warps."""
        memory = self.smem.allocate()
        tiles, pipes = PairTiles(**fields_of(PairTiles, memory)), PairPipes(**fields_of(PairPipes, memory))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == LOAD_WARP:
            with cute.arch.elect_one():
                self.initialise(pipes)
                for tensor_map in (operands.args.k_map, operands.args.v_map, operands.args.q_map):
                    prefetch_map(tensor_map)
        tmem = pair.begin(tiles, warp, MMA_WARP)

        board = Board(tiles.sItems, pipes)
        if warp < OUTPUT_WARP:
            cute.arch.setmaxregister_increase(SOFTMAX_REGISTERS)
            PairSoftmaxRole(self.dtype).run(operands, board, tiles, pipes, tmem)
        elif warp < MMA_WARP:
            cute.arch.setmaxregister_increase(OUTPUT_REGISTERS)
            PairOutputRole(self.dtype, self.geometry).run(operands, board, tiles, pipes, tmem)
        else:
            cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
            if warp == MMA_WARP and cta_rank() == EVEN_CTA:
                PairMmaRole().run(board, pipes, PairTileGemm(self.dtype, self.geometry, tiles, tmem))
            elif warp == LOAD_WARP:
                PairLoadRole(self.geometry).run(operands, board, tiles, pipes)
        pair.end(warp, MMA_WARP, tmem)

    def initialise(self, pipes: PairPipes) -> None:
        """Set the arrivals of every barrier: warps of the arriving roles, of both CTAs where mma waits, or one commit."""
        for barriers in (pipes.kv_free, pipes.value_landed, pipes.query_free, pipes.scores_ready, pipes.output_ready, pipes.item_ready):
            barriers.initialise(1)
        pipes.kv_ready.initialise(PAIR)
        pipes.query_ready.initialise(PAIR)
        for barriers in (pipes.alpha_ready, pipes.sums_ready, pipes.sums_free):
            barriers.initialise(GROUP_WARPS)
        pipes.rest_ready.initialise(PAIR * GROUP_WARPS)
        pipes.probs_ready.initialise(2 * PAIR * GROUP_WARPS)
        readers = 2 * GROUP_WARPS
        pipes.item_free.initialise(cutlass.select_(cta_rank() == EVEN_CTA, Int32(readers + 1), Int32(readers)))
        cute.arch.mbarrier_init_fence()


def pair_definition(config: DensePrefillConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    kernel = DensePrefillPairSm100(config, arch)
    return kernel.definition(
        smem_bytes=kernel.smem.nbytes,
        barriers=kernel.smem.barriers(),
        named_barriers=(),
        roles=(
            Role("softmax", SOFTMAX_WARP, GROUP_WARPS),
            Role("output", OUTPUT_WARP, GROUP_WARPS),
            Role("mma", MMA_WARP, 1),
            Role("load", LOAD_WARP, 1),
        ),
        expected={"UTCHMMA": kernel.geometry.products},
        tmem_columns=TMEM_COLUMNS,
    )
