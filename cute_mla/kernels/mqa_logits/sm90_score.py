"""The role of the SM90 kernel that multiplies, sums over heads and writes: four warpgroups, of two row blocks and two halves of a tile."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, cute
from cutlass.cute.nvgpu import warpgroup

from ...spec.mqa_logits import BLOCK_COLUMNS, TILE_KEYS, MqaLogitsArguments
from ..dense_decode.sm90_fp8_gemm import tiled_mma
from ..primitives.arithmetic import pin_register
from ..primitives.pipeline import PipelineState
from ..primitives.wgmma import ROWS_APART, ROWS_PER_THREAD, flat, fragment_row
from .items import PostedItems, WorkItem
from .output import FLOAT_BYTES, ROW_BIT, TOKEN_BIT, OutputRow, exchange, fill_unscored, half_sums, load_weights, scale_at, seen_keys
from .sm90_config import K_STEPS, PAIR_THREADS, WARPGROUP
from .smem import BLOCKS, HALF_KEYS, HALVES, ITEM_COLUMNS, MqaLogitsSmem


class MqaLogitsScoreRoleSm90:
    """Four warpgroups, each with a row block of an item and half of the keys of a tile. head_tile: heads of a token within a row block."""

    def __init__(self, head_tile: int) -> None:
        self.head_tile = head_tile
        self.block_tokens = BLOCK_COLUMNS // head_tile

    @cute.jit
    def run(self, args: MqaLogitsArguments, smem: MqaLogitsSmem, group: Int32, thread: Int32):
        """Wait item_ready, key_ready. Signal item_free, key_free. thread: of the warpgroup."""
        block, side = group // HALVES, group % HALVES
        mma = tiled_mma(BLOCK_COLUMNS, warpgroup.OperandSource.SMEM)
        slice_ = mma.get_slice(thread)
        tK = slice_.make_fragment_A(slice_.partition_A(smem.sK))
        tQ = slice_.make_fragment_B(slice_.partition_B(smem.sQ))
        acc = cute.make_rmem_tensor(slice_.partition_shape_C((HALF_KEYS, BLOCK_COLUMNS)), Float32)
        rWeights = cute.make_rmem_tensor(cute.make_layout(cute.size(acc) // ROWS_PER_THREAD), Float32)
        # after the sums, the lanes of a quad have these: a row of the thread's two, and every other token
        row = pin_register(side * HALF_KEYS + fragment_row(thread, 0) + (thread & ROW_BIT) * ROWS_APART)
        scales = pin_register(smem.sScales.iterator.toint() + row * FLOAT_BYTES)
        thread = pin_register(thread)
        posted_items, first_token = PostedItems(smem.sItems, BLOCKS * self.block_tokens), block * self.block_tokens
        turn, keys = Int32(0), PipelineState(Int32(0), Int32(0))
        smem.item_ready.consumer_wait(turn)
        there, item = posted_items.take(turn)
        while there:
            stage = smem.item_ready.stage(turn)
            load_weights(rWeights, smem, stage * ITEM_COLUMNS + block * BLOCK_COLUMNS, thread)
            rows = self.output_rows(args, posted_items, item, stage, first_token, thread)
            begin, end = seen_keys(posted_items, stage, first_token, self.block_tokens)
            for tile in cutlass.range(item.begin, item.end, unroll=1):
                sums = cute.make_rmem_tensor(cute.make_layout(self.block_tokens // 2), Float32)
                sums.fill(0.0)
                smem.key_ready.consumer_wait(keys)
                if (tile * TILE_KEYS < end) & ((tile + 1) * TILE_KEYS > begin):
                    scale = scale_at(scales, keys.stage).load() * 0.5
                    multiply(mma, acc, tK[None, None, None, keys.stage * HALVES + side], tQ[None, None, None, stage * BLOCKS + block])
                    smem.key_free.consumer_release(keys)
                    self.reduce(sums, flat(acc), rWeights, scale, thread)
                else:
                    smem.key_free.consumer_release(keys)
                for pair in cutlass.range_constexpr(self.block_tokens // 2):
                    rows[pair].store(tile * TILE_KEYS + row, sums[pair])
                keys = smem.key_ready.advance(keys)
            smem.item_free.consumer_release(turn)
            if args.clean != 0:
                fill_unscored(args, item, (first_token, self.block_tokens), side * WARPGROUP + thread, PAIR_THREADS)
            turn = turn + 1
            smem.item_ready.consumer_wait(turn)
            there, item = posted_items.take(smem.item_ready.stage(turn))

    def output_rows(
        self, args: MqaLogitsArguments, posted_items: PostedItems, item: WorkItem, stage: Int32, first_token: Int32, thread: Int32
    ) -> list[OutputRow]:
        """Return the rows that this lane writes: every other token of the row block."""
        odd = (thread & TOKEN_BIT) // TOKEN_BIT
        tokens = [first_token + odd + 2 * pair for pair in range(self.block_tokens // 2)]
        return [OutputRow.create(args, item, token, posted_items.window(stage, token)) for token in tokens]

    def reduce(self, sums: cute.Tensor, acc: cute.Tensor, rWeights: cute.Tensor, scale: Float32, thread: Int32) -> None:
        """Sum weight * relu(product) over the heads: three shuffles for four sums. scale: half of the key's."""
        by_token = half_sums(acc, rWeights, self.head_tile, thread)
        for pair in range(self.block_tokens // 2):
            sums[pair] = exchange(by_token[2 * pair], by_token[2 * pair + 1], thread, TOKEN_BIT) * scale


def multiply(mma: cute.TiledMma, acc: cute.Tensor, tK: cute.Tensor, tQ: cute.Tensor) -> None:
    """Compute the products of 64 keys and 128 rows of queries, and wait for them."""
    warpgroup.fence()
    mma.set(warpgroup.Field.ACCUMULATE, False)
    for step in range(K_STEPS):
        cute.gemm(mma, acc, tK[None, None, step], tQ[None, None, step], acc)
        mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
    warpgroup.wait_group(0)
