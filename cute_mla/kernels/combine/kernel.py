"""combine: merges the splits of each request. Every architecture.

    m = max_s lse_s     w_s = 2^(lse_s - m)     lse = (m + log2(sum_s w_s)) ln 2
    out = sum_s w_s out_s / (sum_s w_s + 2^(sink log2 e - m)), the last term only where there is an attention sink

    grid     (x, y, 1, 4 or 8), 256 threads, no shared memory; a CTA takes every x-th query token of the batch and every y-th head,
             at most 8, and one warp merges one row (query token, head)
             z = 1: the warp takes all columns, 16 a lane of 512; z = 4: 128 of them, 4 a lane; z = 8: 64, 2 a lane, for batches too
             small to fill the GPU; with rows of 256 columns z = 1, 2, 4. The bits are the same: a column is summed over the splits in
             their order, whoever does it.
    a row    as in attention/merge_rows.py, 2 splits of 16 columns a lane in flight per buffer, 8 of 4, or 32 of 2 at once

The trick is what is not done: a request that was not split is passed by after reading two integers, 32 query tokens of a CTA at once, and
a split that was empty, whose row nobody wrote, is not read. Operands and their meaning: cute_mla/spec/combine.py.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

from ...spec.arch import Arch
from ...spec.combine import BLOCK_COLUMNS, NARROW_COLUMNS, ROWS_PER_BLOCK, CombineArguments, CombineConfig
from ...spec.split_plan import INVARIANT_SPLIT_TILES, TILE_KEYS
from ..attention.kernel import ELEMENT_TYPES
from ..attention.lengths import Lengths, Units, VisibleTiles
from ..attention.merge_rows import BUFFER, GROUP, NARROW_VECTOR, VECTOR, Results, merge_row, vector_at
from ..attention.softmax import LN2
from ..definition import KernelDefinition
from ..primitives.arithmetic import clip
from ..warp_kernel import WarpKernel, WarpLaunch

THREADS = 32 * ROWS_PER_BLOCK
KEPT_WEIGHTS = 4  # of a lane where a few rows have many splits
assert (BLOCK_COLUMNS, NARROW_COLUMNS) == (GROUP, 32 * NARROW_VECTOR), "along z, a warp takes one group of columns or all of them"


@cute.jit
def splits_of(lengths: Lengths, num_splits: cute.Pointer, request: Int32, max_splits: Int32, accum_rows: Int32):
    """Return (first accumulator row, rows to merge) of a request; with fewer than 2 rows the decode kernel wrote out itself."""
    first, count = request * max_splits, Int32(0)
    if max_splits > 0:
        # Rows are kept for the longest length: only those of this length were written. No length overflows here.
        count = cutlass.min((cutlass.max(lengths.keys(request), Int32(1)) - 1) // (TILE_KEYS * INVARIANT_SPLIT_TILES) + 1, max_splits)
    else:
        # The caller's num_splits may hold anything: what it says of rows that do not exist is not believed.
        first = clip(num_splits[request], accum_rows)
        count = clip(num_splits[request + 1], accum_rows) - first
    return first, count


@cute.jit
def token_count(args: CombineArguments) -> Int32:
    """Return the number of query tokens of all requests or units, those that a unit lacks included."""
    tokens = args.batch * args.s_q
    if args.cu_seqlens_q.toint() != 0:
        tokens = clip(args.cu_seqlens_q[args.requests], tokens)
    return tokens


@dataclass(frozen=True)
class Splits(Results):
    """The splits of a row.

    first: this lane's first column in the first one. lse_row: its lse. strides: elements of either between splits.
    args, units: of the launch. place: unit, query token and head of the row, first column of the lane. writes_lse: whether this lane does.
    """

    first: cute.Pointer
    lse_row: cute.Pointer
    row_stride: Int64
    lse_stride: Int64
    args: CombineArguments
    units: Units
    place: tuple[Int32, Int32, Int32, Int32]
    writes_lse: Boolean

    dtype = Float32

    def lse(self, result: Int32) -> Float32:
        """Return the lse of a split, base 2 as it is stored."""
        return (self.lse_row + Int64(result) * self.lse_stride).load()

    def row(self, result: Int32) -> cute.Pointer:
        """Return one row of the accumulators."""
        return self.first + Int64(result) * self.row_stride

    def load(self, target: cute.Tensor, source: cute.Pointer) -> None:
        """Load a lane's neighbouring columns at once: all rows are aligned."""
        cute.autovec_copy(vector_at(source, 4 * cute.size(target), cute.size(target)), target)

    def token(self) -> Int32:
        """Return the query token among those of out."""
        unit, token, _, _ = self.place
        _, first_token = self.units.missing_and_first(unit)
        return token + first_token

    def out_row(self) -> cute.Pointer:
        """Return this lane's first column of the merged row."""
        args, (unit, _, head, column) = self.args, self.place
        strides = args.out_stride_batch, args.out_stride_token, args.out_stride_head
        return args.out + (unit * strides[0] + self.token() * strides[1] + head * strides[2] + column)

    @cute.jit
    def finish(self, shift: Float32, total: Float32):
        """Write lse, natural logarithm."""
        args, (unit, _, head, _) = self.args, self.place
        if self.writes_lse:
            value = args.empty_lse
            if total != 0:  # true for NaN
                value = (shift + cute.math.log2(total, fastmath=True)) * LN2
            strides = args.lse_stride_batch, args.lse_stride_token, args.lse_stride_head
            (args.lse + (unit * strides[0] + self.token() * strides[1] + head * strides[2])).store(value)


class Combine(WarpKernel):
    """One variant of the kernel."""

    # 128 registers may be used. Unasked ptxas takes 80 and empties a buffer before it fills the other.
    launch = WarpLaunch("combine", "merge", CombineArguments, THREADS, min_blocks_per_sm=2)

    @cute.kernel
    def kernel(self, args: CombineArguments):
        """Merge the splits of every row that has several, a warp a row."""
        d_v = self.config.d_v
        first_token, head_block, column_block = cute.arch.block_idx()
        token_step, head_step, column_blocks = cute.arch.grid_dim()
        thread, _, _ = cute.arch.thread_idx()
        lane = thread % 32
        head = head_block + thread // 32 * head_step
        column = column_block * GROUP + lane * VECTOR
        if column_blocks == d_v // NARROW_COLUMNS:
            column = (column_block * 32 + lane) * NARROW_VECTOR
        stride = Int64(args.s_q) * args.h_q

        # The next kernel may be launched now: one that reads out waits for this grid to end.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

        units = Units(args.units, args.requests, args.total_q, args.s_q, args.causal)
        window = VisibleTiles(args.reach, args.sink_tiles)
        keys = Lengths(args.lengths, args.extra_lengths, args.max_keys, args.extra_max_keys, units, window)
        tokens = token_count(args)
        sink = Float32(-math.inf)
        if args.attn_sink.toint() != 0 and head < args.h_q:
            sink = args.attn_sink[head]
        begin = first_token
        while begin < tokens:
            mine = begin + lane * token_step  # lane l asks for the l-th query token from here on
            request = Int32(Uint32(mine) // Uint32(args.s_q))
            first, count = Int32(0), Int32(0)
            if mine < tokens:
                first, count = splits_of(keys, args.num_splits, request, args.max_splits, args.accum_rows)
                missing, _ = units.missing_and_first(request)
                if mine - request * args.s_q < missing:
                    count = Int32(0)
            split = cute.arch.vote_ballot_sync(count > 1) if head < args.h_q else Int32(0)
            while split != 0:
                index = cute.arch.popc((split & -split) - 1)  # of the lowest bit
                split = split & (split - 1)
                cut = cute.arch.shuffle_sync(request, index)
                token = begin + index * token_step - cut * args.s_q
                row = cute.arch.shuffle_sync(first, index) * stride + (Int64(token) * args.h_q + head)
                splits = Splits(
                    args.out_accum + (row * d_v + column), args.lse_accum + row, stride * d_v, stride,
                    args, units, (cut, token, head, column), (lane == 0) & (column_block == 0),
                )  # fmt: skip
                results = cute.arch.shuffle_sync(count, index)
                if column_blocks == 1:
                    merge_row(splits, results, sink, (VECTOR, d_v // GROUP))
                elif column_blocks == d_v // NARROW_COLUMNS:
                    merge_row(splits, results, sink, (NARROW_VECTOR, 1), KEPT_WEIGHTS)
                else:
                    merge_row(splits, results, sink, (VECTOR, 1))
            begin += 32 * token_step


def build(config: CombineConfig, arch: Arch) -> KernelDefinition:
    """Return the kernel's source for one element type and number of columns of out, ready to compile."""
    elements = {"attn_sink": Float32, "out_accum": Float32, "lse_accum": Float32, "out": ELEMENT_TYPES[config.dtype], "lse": Float32}
    # Three code paths, each sums 64 elements and weighs the sink, which two fill by halves: one before the loop, both in it.
    expected = {"FFMA": 3 * (2 * BUFFER + 1), "LDG.E.128": 2 * 3 * BUFFER // VECTOR, "LDG.E.64": 2 * 2 * BUFFER // NARROW_VECTOR}
    return Combine(config, arch).definition(elements, expected)
