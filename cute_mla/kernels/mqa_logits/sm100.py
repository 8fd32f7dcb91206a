"""The indexer's logits on Blackwell, from e4m3 queries and keys.

    logit[t, s] = scale[s] * sum_h weight[t, h] * relu(<q[t, h], k[s]>)        128 columns, sums in fp32

Keys are the rows of a product and heads its columns, so that a thread has a key and sums over the heads alone. An item is two row blocks,
256 columns, against a chunk of tiles of 128 keys. In a round each score group has a tile and a row block: a tile is multiplied with one
row block after the other, and group g takes row block g. Where an item has one row block, a round is two tiles, and group g takes tile g.

Roles (384 threads):
  score  warps 0..3, 4..7: two groups, a thread a key: relu, sum over the heads, scale, logits
  mma    warp 8: scores = keys Q^T
  load   warp 9: TMA of Q and of keys, and their scales by cp.async; page numbers 32 at a time
  item   warp 10: finds items with work, what each token sees, and the weights
  fill   warp 11: -inf for columns of tiles that are not scored

Tensor memory: scores of 2 rounds x 2 groups x 128 columns.
Shared memory: Q (2 stages of 32 KB), keys (9 stages of 16 KB), scales (16 stages), 4 items with their weights.

Pipelines (producer -> consumer; arrivals per phase):
  item_ready[4]      item -> all others    33: the item is written, and the weights of each lane have landed
  item_free[4]       all others -> item    11
  query_ready[2]     load -> mma           1 and the bytes of Q; items without tiles have none
  query_free[2]      mma -> load           1
  key_ready[9]       load -> mma           1 and the bytes of a tile
  key_free[9]        mma -> load           1
  scale_ready[16]    load -> mma           32: the copies of each lane have landed
  scores_ready[2x2]  mma -> score          2: scores, and the scales of their keys; two of each group
  scores_free[2x2]   score -> mma          4

The trick: relu is shared between two pipes. x + |x| is an addition on the FMA pipe, beside the products with the weights; the maximum goes
through the ALU pipe at half of the rate. Three of four pairs of heads take the first way, so that both pipes and the issue of instructions
have less to do than the tensor cores.
"""

from __future__ import annotations

from cutlass import cute

from ...manifest import Role
from ...spec.arch import Arch
from ...spec.mqa_logits import MqaLogitsArguments, MqaLogitsConfig
from ..attention import cta
from ..attention.kernel import AttentionKernel
from ..definition import KernelDefinition
from ..primitives.smem import fields_of
from .abi import MqaLogitsAbi
from .sm100_config import (
    FILL_WARP,
    GROUP_WARPS,
    GROUPS,
    ITEM_WARP,
    K_STEPS,
    LOAD_WARP,
    MMA_WARP,
    OTHER_REGISTERS,
    SCORE_REGISTERS,
    THREADS,
    MqaLogitsSmemSm100,
    smem_layout,
)
from .sm100_item import Items, MqaLogitsFillRoleSm100, MqaLogitsItemRoleSm100
from .sm100_load import MqaLogitsLoadRoleSm100
from .sm100_mma import MqaLogitsMmaRoleSm100
from .sm100_score import MqaLogitsScoreRoleSm100


class MqaLogitsSm100(AttentionKernel):
    """One variant of the kernel."""

    threads = THREADS

    def __init__(self, config: MqaLogitsConfig, arch: Arch) -> None:
        super().__init__(MqaLogitsAbi(config), arch)
        self.config = config
        self.smem = smem_layout(config)

    @cute.jit
    def run(self, args: MqaLogitsArguments):
        """Allocate, initialise the barriers, and give each role its warps."""
        smem = MqaLogitsSmemSm100(**fields_of(MqaLogitsSmemSm100, self.smem.allocate()))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta.initialise(warp, LOAD_WARP, smem.arrivals(), (args.q_map, args.k_map))
        tmem = cta.allocate_tmem(smem, warp, MMA_WARP)
        # the lengths and all tensors may come from the kernel before
        cute.arch.griddepcontrol_wait()

        items = Items(args, self.config, smem)
        if warp < MMA_WARP:
            cute.arch.setmaxregister_increase(SCORE_REGISTERS)
            MqaLogitsScoreRoleSm100(tmem, warp // GROUP_WARPS).run(items)
        else:
            cute.arch.setmaxregister_decrease(OTHER_REGISTERS)
            if warp == MMA_WARP:
                MqaLogitsMmaRoleSm100(tmem).run(items)
            elif warp == LOAD_WARP:
                MqaLogitsLoadRoleSm100().run(items)
            elif warp == ITEM_WARP:
                MqaLogitsItemRoleSm100().run(items)
            else:
                MqaLogitsFillRoleSm100().run(items)
        cta.free_tmem(tmem, warp, MMA_WARP)


def build(config: MqaLogitsConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    kernel = MqaLogitsSm100(config, arch)
    score = tuple(Role(f"score{group}", group * GROUP_WARPS, GROUP_WARPS) for group in range(GROUPS))
    others = (("mma", MMA_WARP), ("load", LOAD_WARP), ("item", ITEM_WARP), ("fill", FILL_WARP))
    return kernel.definition(
        smem_bytes=kernel.smem.nbytes,
        barriers=kernel.smem.barriers(),
        named_barriers=(),
        roles=(*score, *(Role(name, warp, 1) for name, warp in others)),
        expected={"UTCQMMA": 2 * GROUPS * K_STEPS},
        tmem_columns=cta.TMEM_COLUMNS,
    )
