"""mqa_logits on Hopper.

For query token t and key s that it sees, over the heads h:

    logit[t, s] = scale[s] * sum_h weight[t, h] * relu(<q[t, h], k[s]>)        e4m3 products of 128 columns, sums in fp32

A CTA takes one work item after the other: two row blocks, each 128 rows of queries (2 tokens of 64 heads or 4 of 32, zeros behind the last
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
from ..definition import KernelDefinition
from ..primitives.copies import prefetch_map
from ..primitives.smem import fields_of
from .abi import MqaLogitsKernel
from .items import WorkItems
from .sm90_config import (
    BLOCKS,
    COMPUTE_REGISTERS,
    COMPUTE_WARPS,
    GROUPS,
    K_STEPS,
    LANES,
    LOAD_REGISTERS,
    LOAD_WARP,
    SMEM,
    THREADS,
    WARPGROUP,
    WARPS_PER_GROUP,
    Pipes,
    Tiles,
)
from .sm90_load import LoadRole
from .sm90_score import ScoreRole


class MqaLogitsSm90(MqaLogitsKernel):
    """One variant of the kernel."""

    threads = THREADS

    @cute.jit
    def run(self, args: MqaLogitsArguments):
        """Allocate, initialise the barriers, and give each role its warps."""
        memory, config = SMEM.allocate(), self.config
        tiles, pipes = Tiles(**fields_of(Tiles, memory)), Pipes(**fields_of(Pipes, memory))
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                initialise(pipes)
                for tensor_map in (args.q_map, args.k_map):
                    prefetch_map(tensor_map)
        cute.arch.sync_threads()
        # everything may come from the kernel before
        cute.arch.griddepcontrol_wait()

        if warp < COMPUTE_WARPS:
            cute.arch.setmaxregister_increase(COMPUTE_REGISTERS)
            ScoreRole(config.head_tile).run(args, tiles, pipes, warp // WARPS_PER_GROUP, cute.arch.thread_idx()[0] % WARPGROUP)
        else:
            cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
            if warp == LOAD_WARP:
                items = WorkItems(args, BLOCKS * config.block_tokens, config.paged)
                LoadRole(config.paged, config.head_tile).run(items, tiles, pipes)
                # the kernel behind this one waits for the end of it before it reads or writes anything
                cute.arch.griddepcontrol_launch_dependents()


def initialise(pipes: Pipes) -> None:
    """Set the arrivals of every barrier."""
    for ready in (pipes.key_ready, pipes.item_ready):
        ready.initialise(LANES + 1)
    for free in (pipes.key_free, pipes.item_free):
        free.initialise(COMPUTE_WARPS)
    cute.arch.mbarrier_init_fence()


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
