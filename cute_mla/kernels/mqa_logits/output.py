"""Sums over heads in the lanes that have a quarter of a product's columns each, and their way to the logits: SM90, SM120."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, cute

from ...spec.mqa_logits import TILE_KEYS, MqaLogitsArguments
from ..primitives.arithmetic import larger, pin_address, smaller
from ..primitives.rows import aligned
from .items import MAX_INT32, PostedItems, WorkItem
from .smem import MqaLogitsSmem

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


def seen_keys(posted_items: PostedItems, stage: Int32, first_token: Int32, tokens: int) -> tuple[Int32, Int32]:
    """Return begin and end of the keys that any of some tokens sees; begin is not less than end if there are none."""
    begin, end = Int32(MAX_INT32), Int32(0)
    for token in range(tokens):
        token_begin, token_end = posted_items.window(stage, first_token + token)
        sees = token_begin < token_end
        begin = cutlass.select_(sees, smaller(begin, token_begin), begin)
        end = cutlass.select_(sees, larger(end, token_end), end)
    return begin, end


def load_weights(rWeights: cute.Tensor, smem: MqaLogitsSmem, first: Int32, thread: Int32) -> None:
    """Load the weights of the thread's columns: register 2 e + c is column 8 e + 2 (t % 4) + c. first: place of column 0 among all."""
    source = smem.sWeights.iterator + (first + 2 * (thread % 4))
    for eight in range(cute.size(rWeights) // 2):
        pair = cute.make_tensor(aligned(source + 8 * eight, 8), cute.make_layout(2))
        cute.autovec_copy(pair, cute.make_tensor(rWeights.iterator + 2 * eight, cute.make_layout(2)))


@cute.jit
def fill_unscored(args: MqaLogitsArguments, item: WorkItem, tokens: tuple[Int32, int], thread: Int32, threads: int | Int32):
    """Write -inf to the columns of the item's tiles that are not scored.

    tokens: the first of some, and their number. thread: of those that do this.
    """
    first_token, count = tokens
    begin, end = item.begin * TILE_KEYS, item.end * TILE_KEYS
    until = smaller(item.until * TILE_KEYS, args.columns)
    logits = args.logits.toint()
    for token in cutlass.range(first_token, smaller(item.tokens, first_token + count), unroll=1):
        row = logits + Int64(item.first_token + token) * args.logits_stride_token * FLOAT_BYTES
        for column in cutlass.range(item.first * TILE_KEYS + thread, begin, threads, unroll=1):
            logit_at(row, column).store(-Float32.inf)
        for column in cutlass.range(end + thread, until, threads, unroll=1):
            logit_at(row, column).store(-Float32.inf)


def half_sums(acc: cute.Tensor, rWeights: cute.Tensor, head_tile: int, thread: Int32) -> list[Float32]:
    """Return twice the sum of weight * relu(product) over half of the heads of each token, for one of the thread's two keys: by ROW_BIT.

    acc: sums as in a fragment of a product, whose columns are the heads of the tokens. x + |x| is twice relu(x), exactly. A thread sums its
    columns of a token in ascending order; then the lanes of a quad exchange what each other one ends with, first those ROW_BIT apart. The
    tree is the same for every token and key. The lane TOKEN_BIT apart has the other half.
    """
    partial = [[Float32(0), Float32(0)] for _ in range(2 * cute.size(acc) // head_tile)]
    for i in range(cute.size(acc)):
        token, half, x = 8 * (i // 4) // head_tile, i // 2 % 2, acc[i]
        partial[token][half] = cute.math.fma(x + magnitude(x), rWeights[2 * (i // 4) + i % 2], partial[token][half])
    return [exchange(upper, lower, thread, ROW_BIT) for upper, lower in partial]


def magnitude(x: Float32) -> Float32:
    """Return |x|, which an addition takes for nothing."""
    return cute.arch.inline_ptx("abs.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def exchange(first: Float32, second: Float32, thread: Int32, bit: int) -> Float32:
    """Return the first value summed over two lanes that differ in a bit, in the lane without it; the second one in the other."""
    upper = (thread & bit) != 0
    kept, given = cutlass.select_(upper, second, first), cutlass.select_(upper, first, second)
    return kept + cute.arch.shuffle_sync_bfly(given, bit)
