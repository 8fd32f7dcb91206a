"""mqa_logits on Hopper.

For query token t and key s that it sees, over the heads h:

    logit[t, s] = scale[s] * sum_h weight[t, h] * relu(<q[t, h], k[s]>)        e4m3 products of 128 columns, sums in fp32

A CTA takes one work item after the other: two row blocks, each 128 rows of queries (2 tokens of 64 heads or 4 of 32, zeros after the last
head), against a run of tiles of 128 keys. Keys are the rows of a product and queries its columns, so that a thread sums over the heads
within two rows of its own.

Roles (640 threads):
  score   warpgroups 0..3: products of half a tile (group % 2) and a row block (group / 2), sums, logits; -inf where wanted
  load    warp 16: items, TMA of queries and keys, cp.async of weights and scales. Warps 17..19 only give up their registers

Shared memory: eight tiles of keys with their scales, two items with queries and weights.

Pipelines (producer -> consumer; arrivals per phase):
  key_ready[8]    load -> score   33 and the bytes of a tile: each lane when its copies of scales have landed, and one for the tile
  key_free[8]     score -> load   16: the warps of all warpgroups
  item_ready[2]   load -> score   33 and the bytes of two row blocks: what the next item is, or that there is none; queries, weights
  item_free[2]    score -> load   16

The trick: two row blocks share the tiles that are loaded, which halves what comes from L2, and four warpgroups share the tensor cores, each
with one accumulator: while one has its product, 256 clocks of the 1,024 that a tile takes, the others sum, and no order has to be kept
between them. x + |x| is twice relu(x), one addition at full rate where a maximum takes two turns; the half goes with the key's scale.
README.md has the clocks.
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
from .items import WorkItems
from .load import MqaLogitsLoadRole
from .sm90_config import (
    COMPUTE_REGISTERS,
    COMPUTE_WARPS,
    GROUPS,
    K_STEPS,
    LOAD_REGISTERS,
    LOAD_WARP,
    SMEM,
    THREADS,
    WARPGROUP,
    WARPS_PER_GROUP,
)
from .sm90_score import MqaLogitsScoreRoleSm90
from .smem import BLOCKS, LANES, MqaLogitsSmem


class MqaLogitsSm90(AttentionKernel):
    """One variant of the kernel."""

    threads = THREADS

    def __init__(self, config: MqaLogitsConfig, arch: Arch) -> None:
        super().__init__(MqaLogitsAbi(config), arch)
        self.config = config

    @cute.jit
    def run(self, args: MqaLogitsArguments):
        """Allocate, initialise the barriers, and give each role its warps."""
        smem, config = MqaLogitsSmem(**fields_of(MqaLogitsSmem, SMEM.allocate())), self.config
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        cta.initialise(warp, 0, arrivals(smem), (args.q_map, args.k_map))
        cute.arch.sync_threads()
        # everything may come from the kernel before
        cute.arch.griddepcontrol_wait()

        if warp < COMPUTE_WARPS:
            cute.arch.setmaxregister_increase(COMPUTE_REGISTERS)
            MqaLogitsScoreRoleSm90(config.head_tile).run(args, smem, warp // WARPS_PER_GROUP, cute.arch.thread_idx()[0] % WARPGROUP)
        else:
            cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            if warp == LOAD_WARP:
                items = WorkItems(args, BLOCKS * config.block_tokens, config.paged)
                MqaLogitsLoadRole(config.paged, config.head_tile).run(items, smem)
                # the kernel after this one waits for the end of it before it reads or writes anything
                cute.arch.griddepcontrol_launch_dependents()


def arrivals(smem: MqaLogitsSmem) -> tuple[cta.Arrivals, ...]:
    """Return the arrivals of every barrier: lanes of the load role and one for bytes, or warps that score."""
    return (LANES + 1, (smem.key_ready, smem.item_ready)), (COMPUTE_WARPS, (smem.key_free, smem.item_free))


def build(config: MqaLogitsConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    kernel = MqaLogitsSm90(config, arch)
    return kernel.definition(
        smem_bytes=SMEM.nbytes,
        barriers=SMEM.barriers(),
        named_barriers=(),
        roles=(
            *(Role(f"score_{group}", group * WARPS_PER_GROUP, WARPS_PER_GROUP) for group in range(GROUPS)),
            Role("load", LOAD_WARP, 1),
        ),
        expected={"QGMMA": K_STEPS},
    )
