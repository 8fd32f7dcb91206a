"""Dense prefill on Blackwell with heads of 256 columns, by pairs of CTAs.

O of 128 rows takes half of tensor memory, so a CTA has one Q tile, and S of two key tiles. A pair takes one work item after
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
from ..attention import cta
from ..attention.kernel import AttentionKernel
from ..definition import KernelDefinition
from ..primitives.smem import fields_of
from .abi import DensePrefillAbi
from .operands import DensePrefillOperands, ItemQueue
from .sm100_config import EVEN_CTA, GROUP_WARPS, PAIR, DensePrefillPairGeometry, DensePrefillPairSmem, cta_rank
from .sm100_load import DensePrefillPairLoadRole
from .sm100_mma import DensePrefillPairMmaRole, DensePrefillPairTileGemm
from .sm100_output import DensePrefillPairOutputRole
from .sm100_softmax import DensePrefillPairSoftmaxRole

SOFTMAX_WARP, OUTPUT_WARP, MMA_WARP, LOAD_WARP = 0, GROUP_WARPS, 2 * GROUP_WARPS, 2 * GROUP_WARPS + 1
THREADS = 3 * GROUP_WARPS * 32

# per lane of a warp, by setmaxnreg: 512 together; all threads start with 168
SOFTMAX_REGISTERS = 184
OUTPUT_REGISTERS = 200
OTHER_REGISTERS = 128


class DensePrefillPairSm100(AttentionKernel):
    """One variant of the kernel."""

    threads = THREADS

    def __init__(self, config: DensePrefillConfig, arch: Arch) -> None:
        super().__init__(DensePrefillAbi(config, arch), arch)
        self.geometry = DensePrefillPairGeometry(config)
        self.smem = self.geometry.smem()

    @cute.jit
    def run(self, operands: DensePrefillOperands):
        """Allocate, initialise the barriers, and give each role its warps."""
        args = operands.args
        smem = DensePrefillPairSmem(**fields_of(DensePrefillPairSmem, self.smem.allocate()))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta.initialise(warp, LOAD_WARP, arrivals(smem), (args.k_map, args.v_map, args.q_map))
        tmem = cta.allocate_tmem(smem, warp, MMA_WARP, paired=True)
        # the lengths and all tensors may come from the kernel before
        cute.arch.griddepcontrol_wait()

        queue = ItemQueue(smem.sItems, smem)
        if warp < OUTPUT_WARP:
            cute.arch.setmaxregister_increase(SOFTMAX_REGISTERS)
            DensePrefillPairSoftmaxRole(self.dtype).run(operands, queue, smem, tmem)
        elif warp < MMA_WARP:
            cute.arch.setmaxregister_increase(OUTPUT_REGISTERS)
            DensePrefillPairOutputRole(self.dtype, self.geometry).run(operands, queue, smem, tmem)
        else:
            cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
            if warp == MMA_WARP and cta_rank() == EVEN_CTA:
                DensePrefillPairMmaRole().run(queue, smem, DensePrefillPairTileGemm(self.dtype, self.geometry, smem, tmem))
            elif warp == LOAD_WARP:
                DensePrefillPairLoadRole(self.geometry).run(operands, queue, smem)
        cta.free_tmem(tmem, warp, MMA_WARP, paired=True)


def arrivals(smem: DensePrefillPairSmem) -> tuple[cta.Arrivals, ...]:
    """Return the arrivals of every barrier: warps of the arriving roles, of both CTAs where mma waits, or one commit."""
    return (
        (1, (smem.kv_free, smem.value_landed, smem.query_free, smem.scores_ready, smem.output_ready, smem.item_ready)),
        (PAIR, (smem.kv_ready, smem.query_ready)),
        (GROUP_WARPS, (smem.alpha_ready, smem.sums_ready, smem.sums_free)),
        (PAIR * GROUP_WARPS, (smem.rest_ready,)),
        (2 * PAIR * GROUP_WARPS, (smem.probs_ready,)),
        (lambda: cutlass.select_(cta_rank() == EVEN_CTA, Int32(2 * GROUP_WARPS + 1), Int32(2 * GROUP_WARPS)), (smem.item_free,)),
    )


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
        tmem_columns=cta.TMEM_COLUMNS,
    )
