"""The role of the SM90 kernel that multiplies, sums over heads and writes: four warpgroups, of two row blocks and two halves of a tile."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from ...spec.mqa_logits import BLOCK_COLUMNS, TILE_KEYS, MqaLogitsArguments
from ..dense_decode.sm90_fp8_gemm import tiled_mma
from ..primitives.arithmetic import larger, pin_address, pin_register, smaller
from ..primitives.pipeline import PipelineState
from ..primitives.rows import aligned
from ..primitives.wgmma import ROWS_APART, ROWS_PER_THREAD, flat, fragment_row, half
from .items import MAX_INT32, PostedItems, WorkItem
from .sm90_config import (
    BLOCKS,
    GROUP_KEYS,
    HALVES,
    ITEM_COLUMNS,
    K_STEPS,
    PAIR_THREADS,
    WARPGROUP,
    MqaLogitsSmemSm90,
)

FLOAT_BYTES = 4
ROW_BIT, TOKEN_BIT = 1, 2  # of a lane of a quad: which of the sums it ends with


@dataclass(frozen=True)
class OutputRow:
    """A token's logits. first: address of key 0's. begin, end: of the keys that it sees. fill_end: of the columns that are all written."""

    first: Int64
    begin: Int32
    end: Int32
    fill_end: Int32

    @staticmethod
    def create(args: MqaLogitsArguments, item: WorkItem, token: Int32, window: tuple[Int32, Int32]) -> OutputRow:
        """Return the row of a token of the item, by its number, which need not be there: nothing is written of it then."""
        begin, end = window
        origin = cutlass.select_(args.relative != 0, begin, Int32(0))
        row = Int64(item.first_token + token) * args.logits_stride_token - origin
        fills = (args.clean != 0) & (token < item.tokens)
        first = pin_address(args.logits.toint() + row * FLOAT_BYTES)
        return OutputRow(first, begin, end, cutlass.select_(fills, args.columns, Int32(0)))

    @cute.jit
    def store(self, key: Int32, logit: Float32):
        """Write the logit of a key that the token sees; -inf for another one whose column is to be filled."""
        seen = (key >= self.begin) & (key < self.end)
        if seen | (key < self.fill_end):
            logit_at(self.first, key).store(cutlass.select_(seen, logit, -Float32.inf))


def logit_at(first: Int64, key: Int32) -> cute.Pointer:
    """Return the address of a key's logit."""
    return cute.make_ptr(Float32, first + Int64(key) * FLOAT_BYTES, cute.AddressSpace.gmem, assumed_align=FLOAT_BYTES)


def scale_at(first: Int32, stage: Int32) -> cute.Pointer:
    """Return the address of a key's scale. first: in stage 0."""
    return cute.make_ptr(Float32, first + stage * (TILE_KEYS * FLOAT_BYTES), cute.AddressSpace.smem, assumed_align=FLOAT_BYTES)


class MqaLogitsScoreRoleSm90:
    """Four warpgroups, each with a row block of an item and half of the keys of a tile. head_tile: heads of a token within a row block."""

    def __init__(self, head_tile: int) -> None:
        self.head_tile = head_tile
        self.block_tokens = BLOCK_COLUMNS // head_tile

    @cute.jit
    def run(self, args: MqaLogitsArguments, smem: MqaLogitsSmemSm90, group: Int32, thread: Int32):
        """Wait item_ready, key_ready. Signal item_free, key_free. thread: of the warpgroup."""
        block, side = group // HALVES, group % HALVES
        mma = tiled_mma(BLOCK_COLUMNS, warpgroup.OperandSource.SMEM)
        slice_ = mma.get_slice(thread)
        tK = slice_.make_fragment_A(slice_.partition_A(smem.sK))
        tQ = slice_.make_fragment_B(slice_.partition_B(smem.sQ))
        acc = cute.make_rmem_tensor(slice_.partition_shape_C((GROUP_KEYS, BLOCK_COLUMNS)), Float32)
        rWeights = cute.make_rmem_tensor(cute.make_layout(cute.size(acc) // ROWS_PER_THREAD), Float32)
        # after the sums, the lanes of a quad have these: a row of the thread's two, and every other token
        row = pin_register(side * GROUP_KEYS + fragment_row(thread, 0) + (thread & ROW_BIT) * ROWS_APART)
        scales = pin_register(smem.sScales.iterator.toint() + row * FLOAT_BYTES)
        thread = pin_register(thread)
        posted_items, first_token = PostedItems(smem.sItems, BLOCKS * self.block_tokens), block * self.block_tokens
        turn, keys = Int32(0), PipelineState(Int32(0), Int32(0))
        smem.item_ready.consumer_wait(turn)
        there, item = posted_items.take(turn)
        while there:
            stage = smem.item_ready.stage(turn)
            self.load_weights(rWeights, smem, stage, block, thread)
            rows = self.output_rows(args, posted_items, item, stage, first_token, thread)
            begin, end = self.seen(posted_items, stage, first_token)
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
                self.fill(args, item, first_token, side * WARPGROUP + thread)
            turn = turn + 1
            smem.item_ready.consumer_wait(turn)
            there, item = posted_items.take(smem.item_ready.stage(turn))

    def seen(self, posted_items: PostedItems, stage: Int32, first_token: Int32) -> tuple[Int32, Int32]:
        """Return begin and end of the keys that any token of the row block sees; begin is not less than end if there are none."""
        begin, end = Int32(MAX_INT32), Int32(0)
        for token in range(self.block_tokens):
            token_begin, token_end = posted_items.window(stage, first_token + token)
            sees = token_begin < token_end
            begin = cutlass.select_(sees, smaller(begin, token_begin), begin)
            end = cutlass.select_(sees, larger(end, token_end), end)
        return begin, end

    def load_weights(self, rWeights: cute.Tensor, smem: MqaLogitsSmemSm90, stage: Int32, block: Int32, thread: Int32) -> None:
        """Load the weights of the thread's columns: register 2 e + c is column 8 e + 2 (t % 4) + c."""
        source = smem.sWeights.iterator + (stage * ITEM_COLUMNS + block * BLOCK_COLUMNS + 2 * (thread % 4))
        for eight in range(BLOCK_COLUMNS // 8):
            pair = cute.make_tensor(aligned(source + 8 * eight, 8), cute.make_layout(2))
            cute.autovec_copy(pair, cute.make_tensor(rWeights.iterator + 2 * eight, cute.make_layout(2)))

    def output_rows(
        self, args: MqaLogitsArguments, posted_items: PostedItems, item: WorkItem, stage: Int32, first_token: Int32, thread: Int32
    ) -> list[OutputRow]:
        """Return the rows that this lane writes: every other token of the row block."""
        odd = (thread & TOKEN_BIT) // TOKEN_BIT
        tokens = [first_token + odd + 2 * pair for pair in range(self.block_tokens // 2)]
        return [OutputRow.create(args, item, token, posted_items.window(stage, token)) for token in tokens]

    def reduce(self, sums: cute.Tensor, acc: cute.Tensor, rWeights: cute.Tensor, scale: Float32, thread: Int32) -> None:
        """Sum weight * relu(product) over the heads. scale: half of the key's, since x + |x| is twice relu(x), exactly.

        A thread sums its columns of a token in ascending order; then the lanes of a quad exchange what each other one ends with: three
        shuffles for four sums. The tree is the same for every token and row.
        """
        partial = [[Float32(0) for _ in range(ROWS_PER_THREAD)] for _ in range(self.block_tokens)]
        for i in range(cute.size(acc)):
            token = 8 * (i // 4) // self.head_tile
            x = acc[i]
            partial[token][half(i)] = cute.math.fma(x + magnitude(x), rWeights[2 * (i // 4) + i % 2], partial[token][half(i)])
        by_token = [exchange(upper, lower, thread, ROW_BIT) for upper, lower in partial]
        for pair in range(self.block_tokens // 2):
            sums[pair] = exchange(by_token[2 * pair], by_token[2 * pair + 1], thread, TOKEN_BIT) * scale

    @cute.jit
    def fill(self, args: MqaLogitsArguments, item: WorkItem, first_token: Int32, thread: Int32):
        """Write -inf to the columns of the item's tiles that are not scored. thread: of those of the row block."""
        begin, end = item.begin * TILE_KEYS, item.end * TILE_KEYS
        until = smaller(item.until * TILE_KEYS, args.columns)
        logits = args.logits.toint()
        for token in cutlass.range(first_token, smaller(item.tokens, first_token + self.block_tokens), unroll=1):
            row = logits + Int64(item.first_token + token) * args.logits_stride_token * FLOAT_BYTES
            for column in cutlass.range(item.first * TILE_KEYS + thread, begin, PAIR_THREADS, unroll=1):
                logit_at(row, column).store(-Float32.inf)
            for column in cutlass.range(end + thread, until, PAIR_THREADS, unroll=1):
                logit_at(row, column).store(-Float32.inf)


def multiply(mma: cute.TiledMma, acc: cute.Tensor, tK: cute.Tensor, tQ: cute.Tensor) -> None:
    """Compute the products of 64 keys and 128 rows of queries, and wait for them."""
    warpgroup.fence()
    mma.set(warpgroup.Field.ACCUMULATE, False)
    for step in range(K_STEPS):
        cute.gemm(mma, acc, tK[None, None, step], tQ[None, None, step], acc)
        mma.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
    warpgroup.wait_group(0)


def magnitude(x: Float32) -> Float32:
    """Return |x|, which an addition takes for nothing."""
    return cute.arch.inline_ptx("abs.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def exchange(first: Float32, second: Float32, thread: Int32, bit: int) -> Float32:
    """Return the first value summed over two lanes that differ in a bit, in the lane without it; the second one in the other."""
    upper = (thread & bit) != 0
    kept, given = cutlass.select_(upper, second, first), cutlass.select_(upper, first, second)
    return kept + cute.arch.shuffle_sync_bfly(given, bit)
