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
P V of tile 0, next S of tile 0, P V of tile 1, next S of tile 1. P V starts when three quarters of P are there, and a
fourth of the exponentials are polynomials on the FMA pipe. README.md has the clocks.
"""

from __future__ import annotations

import cutlass
from cutlass import cute

from ...manifest import Role
from ...spec.arch import Arch
from ...spec.dense_prefill import DensePrefillConfig
from ..attention import cta
from ..attention.kernel import AttentionKernel
from ..definition import KernelDefinition
from ..primitives.smem import fields_of
from .abi import DensePrefillAbi
from .operands import DensePrefillOperands
from .sm100_config import (
    D_V,
    GROUP_WARPS,
    ITEM_WARP,
    LOAD_WARP,
    MMA_WARP,
    OUTPUT_WARP,
    QUERY_TILES,
    THREADS,
    DensePrefillSm100Geometry,
    DensePrefillSm100Smem,
)
from .sm100_load import DensePrefillSm100ItemRole, DensePrefillSm100LoadRole
from .sm100_mma import DensePrefillSm100MmaRole, DensePrefillTileGemm
from .sm100_output import DensePrefillSm100OutputRole
from .sm100_pair import pair_definition
from .sm100_softmax import DensePrefillSm100SoftmaxRole


class DensePrefillSm100(AttentionKernel):
    """One variant of the kernel."""

    threads = THREADS
    abi: DensePrefillAbi

    def __init__(self, abi: DensePrefillAbi) -> None:
        super().__init__(abi, abi.arch)
        self.in_parts = abi.in_parts
        self.geometry = DensePrefillSm100Geometry(abi.config.d_qk, abi.item_words)
        self.smem = self.geometry.smem()

    @cute.jit
    def run(self, operands: DensePrefillOperands):
        """Allocate, initialise the barriers, and give each role its warps."""
        args = operands.args
        smem = DensePrefillSm100Smem(**fields_of(DensePrefillSm100Smem, self.smem.allocate()))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta.initialise(warp, LOAD_WARP, arrivals(smem, self.in_parts), (args.k_map, args.v_map, args.q_map))
        tmem = cta.allocate_tmem(smem, warp, MMA_WARP)
        # the lengths and all tensors may come from the kernel before
        cute.arch.griddepcontrol_wait()

        softmax, output, others = self.geometry.registers
        queue = self.abi.queue(operands, smem.sItems, smem)
        if warp < OUTPUT_WARP:
            cute.arch.setmaxregister_increase(softmax)
            role = DensePrefillSm100SoftmaxRole(self.dtype, self.geometry, self.abi.key_mask(operands))
            role.run(operands, queue, smem, tmem, warp // GROUP_WARPS)
        elif warp < MMA_WARP:
            cute.arch.setmaxregister_decrease(output)
            DensePrefillSm100OutputRole(self.dtype).run(operands, queue, smem, tmem)
        else:
            cute.arch.setmaxregister_decrease(others)
            if warp == MMA_WARP:
                DensePrefillSm100MmaRole(self.geometry).run(queue, smem, DensePrefillTileGemm(self.dtype, self.geometry, smem, tmem))
            elif warp == LOAD_WARP:
                DensePrefillSm100LoadRole(self.geometry, not self.in_parts).run(operands, queue, smem)
            elif cutlass.const_expr(self.in_parts) and warp == ITEM_WARP:
                DensePrefillSm100ItemRole().run(operands.items, queue)
        cta.free_tmem(tmem, warp, MMA_WARP)


def arrivals(smem: DensePrefillSm100Smem, in_parts: bool) -> tuple[cta.Arrivals, ...]:
    """Return the arrivals of every barrier: warps of the arriving roles, or one commit. in_parts: whether the load role takes items."""
    once = (smem.kv_ready, smem.kv_free, smem.query_free, smem.scores_ready, smem.output_ready, smem.item_ready, smem.query_ready)
    return (
        (1, once),
        (GROUP_WARPS, (smem.alpha_ready, smem.rest_ready, smem.sums_ready, smem.sums_free)),
        (2 * GROUP_WARPS, (smem.probs_ready,)),
        (MMA_WARP + 1 + in_parts, (smem.item_free,)),
    )


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
        tmem_columns=cta.TMEM_COLUMNS,
    )
