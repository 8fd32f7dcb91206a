"""mqa_logits on RTX boards and DGX Spark.

For query token t and key s that it sees, over the heads h:

    logit[t, s] = scale[s] * sum_h weight[t, h] * relu(<q[t, h], k[s]>)        e4m3 products of 128 columns, sums in fp32

A CTA takes one work item after the other: two row blocks, each 128 rows of queries (2 tokens of 64 heads or 4 of 32, zeros after the last
head), against a run of tiles of 128 keys. Keys are the rows of a product and queries its columns, so that a thread sums over the heads
within two rows of its own.

Roles (288 threads):
  score   warps 0..7: products of 64 rows of queries with some keys of every tile, 16 at a time; sums, logits; -inf where wanted
  load    warp 8: items, TMA of queries and keys, cp.async of weights and scales (load.py, as on Hopper)

Shared memory: three tiles of keys with their scales, one item with queries and weights.

Pipelines (producer -> consumer; arrivals per phase):
  key_ready[3]    load -> score   33 and the bytes of a tile: each lane when its copies of scales have landed, and one for the tile
  key_free[3]     score -> load   8: the warps that score
  item_ready[1]   load -> score   33 and the bytes of two row blocks: what the next item is, or that there is none; queries, weights
  item_free[1]    score -> load   8: a warp has its queries, weights and windows in registers

The trick: queries stay in registers as operands of products, 64 rows a warp, so that only keys are read from shared memory, once for 64
rows, and one place for items is enough. Warps share out what an item has: four groups of columns with half of the keys each; where an item
has tokens of two groups or of one, as in decode, a warp has a fourth or an eighth of the keys. Products are those with scales, all 1: a
GeForce board has plain ones at half of the rate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
from cutlass import Float8E4M3FN, Float32, Int32, cute

from ...manifest import Role
from ...spec.arch import Arch
from ...spec.mqa_logits import COLUMNS, TILE_KEYS, MqaLogitsArguments, MqaLogitsConfig
from ..attention import cta
from ..attention.kernel import AttentionKernel
from ..definition import KernelDefinition
from ..primitives.arithmetic import pin_register
from ..primitives.copies import load_groups
from ..primitives.pipeline import PipelineState
from ..primitives.smem import fields_of
from ..primitives.warp_products import SUMS, M, N, load_wide, multiply
from .abi import MqaLogitsAbi
from .items import PostedItems, WorkItem, WorkItems
from .load import MqaLogitsLoadRole
from .output import FLOAT_BYTES, ROW_BIT, TOKEN_BIT, OutputRow, exchange, fill_unscored, half_sums, load_weights, scale_at, seen_keys
from .smem import BLOCKS, ITEM_COLUMNS, LANES, TILE_BYTES, MqaLogitsSmem

WARPS = 8  # that score
THREADS = (WARPS + 1) * LANES
GROUP_COLUMNS = 64  # rows of queries that a warp has in registers
GROUPS = ITEM_COLUMNS // GROUP_COLUMNS
PAIRS = GROUP_COLUMNS // (2 * N)  # of products, whose operands come together
STEP = 32  # contraction depth of one product
STEPS = COLUMNS // STEP
STEP_BYTES = STEP
KEY_STAGES = 3
ITEM_STAGES = 1
PARTS = TILE_KEYS // M  # of a tile
SMEM = MqaLogitsSmem.layout(KEY_STAGES, ITEM_STAGES)


@dataclass(frozen=True)
class Share:
    """A warp's share of an item. group: of columns. part, parts: of each tile. thread, threads: those of the group."""

    group: Int32
    part: Int32
    parts: Int32
    thread: Int32
    threads: Int32

    @staticmethod
    def create(warp: Int32, lane: Int32, groups: Int32) -> Share:
        """Return the share of one of eight warps. groups: of columns, 1 to 4, that the item has; of three, the fourth has warps, too."""
        doublings = cutlass.select_(groups > 2, Int32(2), groups - 1)
        parts = pin_register(Int32(1) << doublings)
        group = warp & (parts - 1)
        thread = (warp >> doublings) * LANES + lane
        return Share(group, warp - group, parts, thread, Int32(WARPS * LANES) >> doublings)


class MqaLogitsScoreRoleSm120:
    """Eight warps. head_tile: heads of a token within a row block."""

    def __init__(self, head_tile: int) -> None:
        self.head_tile = head_tile
        self.tokens = GROUP_COLUMNS // head_tile  # of a group

    @cute.jit
    def run(self, args: MqaLogitsArguments, smem: MqaLogitsSmem, warp: Int32, lane: Int32):
        """Wait item_ready, key_ready. Signal item_free, key_free."""
        rQueries = cute.make_rmem_tensor(cute.make_layout(PAIRS * STEPS * 4), Int32)
        rWeights = cute.make_rmem_tensor(cute.make_layout(GROUP_COLUMNS // 4), Float32)
        # after the sums, the lanes of a quad have these: a row of the thread's two, and one of two tokens, or the same
        row = pin_register(lane // 4 + (lane & ROW_BIT) * N)
        place = pin_register(smem.sK.iterator.toint() + key_operand(lane))
        posted_items = PostedItems(smem.sItems, GROUPS * self.tokens)
        turn, keys = Int32(0), PipelineState(Int32(0), Int32(0))
        smem.item_ready.consumer_wait(turn)
        there, item = posted_items.take(Int32(0))
        while there:
            share = Share.create(warp, lane, (item.tokens + (self.tokens - 1)) // self.tokens)
            first_token = share.group * self.tokens
            load_weights(rWeights, smem, share.group * GROUP_COLUMNS, lane)
            load_queries(rQueries, smem, share.group)
            output = self.output_row(args, posted_items, item, first_token, lane)
            begin, end = seen_keys(posted_items, Int32(0), first_token, self.tokens)
            smem.item_free.consumer_release(turn)
            for tile in cutlass.range(item.begin, item.end, unroll=1):
                smem.key_ready.consumer_wait(keys)
                sees = (tile * TILE_KEYS < end) & ((tile + 1) * TILE_KEYS > begin)
                scales = smem.sScales.iterator.toint() + row * FLOAT_BYTES
                for part in cutlass.range(share.part, share.part + share.parts, unroll=1):
                    logit = Float32(0)
                    if sees:
                        acc = products(rQueries, place + keys.stage * TILE_BYTES + part * (M * COLUMNS))
                        scale = scale_at(scales + part * (M * FLOAT_BYTES), keys.stage).load() * 0.5
                        logit = self.reduce(acc, rWeights, lane) * scale
                    output.store(tile * TILE_KEYS + part * M + row, logit)
                smem.key_free.consumer_release(keys)
                keys = smem.key_ready.advance(keys)
            if args.clean != 0:
                fill_unscored(args, item, (first_token, self.tokens), share.thread, share.threads)
            turn = turn + 1
            smem.item_ready.consumer_wait(turn)
            there, item = posted_items.take(Int32(0))

    def output_row(self, args: MqaLogitsArguments, posted_items: PostedItems, item: WorkItem, first_token: Int32, lane: Int32) -> OutputRow:
        """Return the row that this lane writes, of one of two tokens of the group; if it has one, two lanes of a quad write none."""
        second = (lane & TOKEN_BIT) // TOKEN_BIT
        if self.tokens == 2:
            token = first_token + second
            return OutputRow.create(args, item, token, posted_items.window(Int32(0), token))
        output = OutputRow.create(args, item, first_token, posted_items.window(Int32(0), first_token))
        end, fill_end = (cutlass.select_(second == 0, value, Int32(0)) for value in (output.end, output.fill_end))
        return replace(output, end=end, fill_end=fill_end)

    def reduce(self, acc: cute.Tensor, rWeights: cute.Tensor, lane: Int32) -> Float32:
        """Return twice the sum of weight * relu(product) over the heads, for the lane's key and token."""
        by_token = half_sums(acc, rWeights, self.head_tile, lane)
        if self.tokens == 2:
            return exchange(by_token[0], by_token[1], lane, TOKEN_BIT)
        return by_token[0] + cute.arch.shuffle_sync_bfly(by_token[0], TOKEN_BIT)


def key_operand(lane: Int32) -> Int32:
    """Return the offset of a lane's 16 bytes of 16 keys: A of the first product. A step further is 32 bytes further, with bits flipped."""
    row = lane % M
    return row * COLUMNS + ((lane // M) ^ (row % N)) * 16


def load_queries(rQueries: cute.Tensor, smem: MqaLogitsSmem, group: Int32) -> None:
    """Load 64 rows of queries as B of products: words of step s and of rows 16 p .. 16 p + 15 from 4 (PAIRS s + p) on."""
    first = smem.sQ.iterator.toint() + group * (GROUP_COLUMNS * COLUMNS)
    for step in range(STEPS):
        for pair in range(PAIRS):
            words = load_wide(first, Int32(2 * N * pair), Int32(2 * step))
            for i, word in enumerate(words):
                rQueries[4 * (PAIRS * step + pair) + i] = word


def products(rQueries: cute.Tensor, keys: Int32) -> cute.Tensor:
    """Return the products of 16 keys and 64 rows of queries, as in a fragment. keys: address of the lane's first 16 bytes."""
    acc = cute.make_rmem_tensor(cute.make_layout(GROUP_COLUMNS // N * SUMS), Float32)
    acc.fill(0.0)
    for step in range(STEPS):
        a = load_groups(keys ^ (step * STEP_BYTES), transposed=False)
        for n in range(GROUP_COLUMNS // N):
            word = 4 * (PAIRS * step + n // 2) + n % 2 * 2
            multiply(acc, n * SUMS, a, [rQueries[word], rQueries[word + 1]], Float8E4M3FN)
    return acc


class MqaLogitsSm120(AttentionKernel):
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
        arrivals = (LANES + 1, (smem.key_ready, smem.item_ready)), (WARPS, (smem.key_free, smem.item_free))
        cta.initialise(warp, 0, arrivals, (args.q_map, args.k_map))
        cute.arch.sync_threads()
        # everything may come from the kernel before
        cute.arch.griddepcontrol_wait()

        if warp < WARPS:
            MqaLogitsScoreRoleSm120(config.head_tile).run(args, smem, warp, cute.arch.lane_idx())
        else:
            items = WorkItems(args, BLOCKS * config.block_tokens, config.paged)
            MqaLogitsLoadRole(config.paged, config.head_tile).run(items, smem)
            # the kernel after this one waits for the end of it before it reads or writes anything
            cute.arch.griddepcontrol_launch_dependents()


def build(config: MqaLogitsConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    return MqaLogitsSm120(config, arch).definition(
        smem_bytes=SMEM.nbytes,
        barriers=SMEM.barriers(),
        named_barriers=(),
        roles=(Role("score", 0, WARPS), Role("load", WARPS, 1)),
        expected={"QMMA": STEPS * GROUP_COLUMNS // N},
    )
