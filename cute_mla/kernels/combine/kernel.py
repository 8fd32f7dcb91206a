"""combine: merges the splits of each request. Every architecture.

    m = max_s lse_s     w_s = 2^(lse_s - m)     lse = (m + log2(sum_s w_s)) ln 2
    out = sum_s w_s out_s / (sum_s w_s + 2^(sink log2 e - m)), the last term only where there is an attention sink

    grid     (batch * s_q, ceil(h_q / 8), 1 or 4), 256 threads, no shared memory; one warp merges one row (query token, head)
             z = 1: the warp takes all 512 columns, 16 a lane; z = 4: 128 of them, 4 a lane, for batches too small to fill
             the GPU. The bits are the same: a column is summed over the splits in their order, whoever does it.
    lane     columns 128 g + 4 lane + {0..3}: 16-byte loads and 8-byte stores that a warp makes contiguous
    weights  lane l holds w_s of split 32 k + l; a shuffle hands them round, so any number of splits fits in registers
    loads    two register buffers of 32 floats a lane (2 splits of 16, or 8 of 4): one is summed while the other fills

The trick is what is not done: a request that was not split ends here after reading two integers, and a split whose weight is 0
(it was empty, and nobody wrote its row) is not read. Operands and their meaning: cute_mla/spec/combine.py.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64

from ...manifest import Role, kernel_name
from ...spec.arch import Arch
from ...spec.combine import COLUMN_BLOCKS, PARAMS, ROWS_PER_BLOCK, CombineConfig
from ...spec.mla import D_V
from ...spec.split_plan import INVARIANT_SPLIT_TILES, TILE_KEYS
from ..parts.example_arguments import example_arguments
from ..parts.lengths import Lengths, clip
from ..source import KernelSource

THREADS = 32 * ROWS_PER_BLOCK
VECTOR = 4  # floats of one 16-byte load
GROUP = 32 * VECTOR  # columns that a warp covers with one load
BUFFER = 32  # floats a lane has in flight per buffer
assert COLUMN_BLOCKS * GROUP == D_V, "along z, a warp takes one group of columns or all of them"
DTYPES = {"bf16": BFloat16, "fp16": Float16}


@cute.jit
def splits_of(lengths: Lengths, num_splits: cute.Pointer, request: Int32, max_splits: Int32, accum_rows: Int32):
    """(first accumulator row, rows to merge) of a request; with fewer than 2 rows the decode kernel wrote out itself."""
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
def lane_lse(lse_row: cute.Pointer, stride: Int64, split: Int32, count: Int32) -> Float32:
    """lse of a split, base 2; -inf past the last one."""
    lse = Float32(-math.inf)
    if split < count:
        lse = (lse_row + Int64(split) * stride).load()
    return lse


@cute.jit
def lane_weight(lse_row: cute.Pointer, stride: Int64, split: Int32, count: Int32, shift: Float32) -> Float32:
    """2^(lse - shift) of a split; 0 past the last one."""
    return cute.math.exp2(lane_lse(lse_row, stride, split, count) - shift, fastmath=True)


@cute.jit
def row_weights(lse_row: cute.Pointer, stride: Int64, count: Int32):
    """(m, or 0 if every split is empty; the weight of split `lane`; the sum of all weights). A NaN lse makes the sum NaN."""
    lane = cute.arch.lane_idx()
    own = lane_lse(lse_row, stride, lane, count)
    largest = own
    for base in cutlass.range(32, count, 32, unroll=1):
        largest = cute.arch.fmax(largest, lane_lse(lse_row, stride, base + lane, count))
    largest = cute.arch.warp_reduction_max(largest)
    shift = largest if largest > -math.inf else Float32(0)  # not -inf - -inf
    held = cute.math.exp2(own - shift, fastmath=True)
    total = held
    for base in cutlass.range(32, count, 32, unroll=1):
        total += lane_weight(lse_row, stride, base + lane, count, shift)
    return shift, held, cute.arch.warp_reduction_sum(total)


@cute.jit
def vector_at(pointer: cute.Pointer, align: cutlass.Constexpr) -> cute.Tensor:
    """The VECTOR elements at a pointer that is a multiple of `align` bytes."""
    aligned = cute.make_ptr(pointer.dtype, pointer.toint(), cute.AddressSpace.gmem, assumed_align=align)
    return cute.make_tensor(aligned, cute.make_layout(VECTOR))


@cute.jit
def fill(buffer: cute.Tensor, weights: cute.Tensor, row: cute.Pointer, stride: Int64, split: Int32, held: Float32):
    """Loads splits [split, split + size(weights)), 4 columns of each group, where their weight is not 0, and 0 elsewhere.

    buffer: (4, groups, splits) registers. row: this lane's first column in split 0. held: weight of split 32 k + lane, for
    the k that these splits belong to.
    """
    for step in cutlass.range_constexpr(cute.size(weights)):
        weight = cute.arch.shuffle_sync(held, (split & 31) + step)
        source = row + Int64(split + step) * stride
        weights[step] = weight
        for group in cutlass.range_constexpr(cute.size(buffer, mode=[1])):
            for i in cutlass.range_constexpr(VECTOR):
                buffer[i, group, step] = Float32(0)
        if weight != 0:  # true for NaN
            for group in cutlass.range_constexpr(cute.size(buffer, mode=[1])):
                cute.autovec_copy(vector_at(source + group * GROUP, 4 * VECTOR), buffer[None, group, step])


@cute.jit
def accumulate(sums: cute.Tensor, buffer: cute.Tensor, weights: cute.Tensor):
    """sums += weights * buffer, split after split."""
    for step in cutlass.range_constexpr(cute.size(weights)):
        for group in cutlass.range_constexpr(cute.size(buffer, mode=[1])):
            for i in cutlass.range_constexpr(VECTOR):
                sums[i, group] = sums[i, group] + weights[step] * buffer[i, group, step]


@cute.jit
def store(out_row: cute.Pointer, sums: cute.Tensor, scale: Float32):
    """Writes sums * scale to the columns of this lane. out_row: this lane's first column; its row may start at any element."""
    for group in cutlass.range_constexpr(cute.size(sums, mode=[1])):
        values = cute.make_rmem_tensor(VECTOR, out_row.dtype)
        values.store((sums[None, group].load() * scale).to(out_row.dtype))
        target = out_row + group * GROUP
        if (target.toint() & (2 * VECTOR - 1)) == 0:
            cute.autovec_copy(values, vector_at(target, 2 * VECTOR))
        else:
            for i in cutlass.range_constexpr(VECTOR):
                target[i] = values[i]


@cute.jit
def merge(
    out_row: cute.Pointer,
    accum_row: cute.Pointer,
    lse_row: cute.Pointer,
    stride: Int64,
    count: Int32,
    sink: Float32,
    groups: cutlass.Constexpr,
):
    """Merges `groups` groups of columns of a row and returns (m, sum of the splits' weights).

    stride: rows of lse_accum between two splits. count: splits. sink: base 2; it weighs on out alone.
    """
    steps = BUFFER // (VECTOR * groups)
    shape = cute.make_layout((VECTOR, groups, steps))
    even, odd = cute.make_rmem_tensor(shape, Float32), cute.make_rmem_tensor(shape, Float32)
    even_weights, odd_weights = cute.make_rmem_tensor(steps, Float32), cute.make_rmem_tensor(steps, Float32)
    sums = cute.make_rmem_tensor(cute.make_layout((VECTOR, groups)), Float32)
    sums.fill(0.0)
    lane = cute.arch.lane_idx()
    shift, held, total = row_weights(lse_row, stride, count)
    fill(even, even_weights, accum_row, stride * D_V, Int32(0), held)
    for split in cutlass.range(0, count, 2 * steps, unroll=1):
        fill(odd, odd_weights, accum_row, stride * D_V, split + steps, held)
        accumulate(sums, even, even_weights)
        following = split + 2 * steps
        if following % 32 == 0:
            held = lane_weight(lse_row, stride, following + lane, count, shift)
        fill(even, even_weights, accum_row, stride * D_V, following, held)
        accumulate(sums, odd, odd_weights)
    below = total + cute.math.exp2(sink - shift, fastmath=True)
    store(out_row, sums, Float32(0) if total == 0 else cute.arch.rcp_approx(below))
    return shift, total


@cute.kernel
def combine(
    lengths: cute.Pointer,
    extra_lengths: cute.Pointer,
    num_splits: cute.Pointer,
    attn_sink: cute.Pointer,
    out_accum: cute.Pointer,
    lse_accum: cute.Pointer,
    out: cute.Pointer,
    lse: cute.Pointer,
    out_stride_batch: Int64,
    out_stride_token: Int64,
    out_stride_head: Int64,
    lse_stride_batch: Int64,
    lse_stride_head: Int64,
    lse_stride_token: Int64,
    empty_lse: Float32,
    s_q: Int32,
    h_q: Int32,
    max_keys: Int32,
    extra_max_keys: Int32,
    max_splits: Int32,
    accum_rows: Int32,
):
    token_index, head_block, column_block = cute.arch.block_idx()
    _, _, column_blocks = cute.arch.grid_dim()
    thread, _, _ = cute.arch.thread_idx()
    lane = thread % 32
    head = head_block * ROWS_PER_BLOCK + thread // 32
    request, token = token_index // s_q, token_index % s_q

    # The next kernel may be launched now: one that reads out waits for this grid to end.
    cute.arch.griddepcontrol_launch_dependents()
    cute.arch.griddepcontrol_wait()

    keys = Lengths(lengths, extra_lengths, max_keys, extra_max_keys)
    first, count = splits_of(keys, num_splits, request, max_splits, accum_rows)
    if head < h_q and count > 1:
        stride = Int64(s_q) * h_q
        row = first * stride + (Int64(token) * h_q + head)
        column = column_block * GROUP + lane * VECTOR
        out_row = out + (request * out_stride_batch + token * out_stride_token + head * out_stride_head + column)
        accum_row = out_accum + (row * D_V + column)
        sink = Float32(-math.inf)
        if attn_sink.toint() != 0:
            sink = attn_sink[head] * math.log2(math.e)
        shift, total = Float32(0), Float32(0)
        if column_blocks == 1:
            shift, total = merge(out_row, accum_row, lse_accum + row, stride, count, sink, D_V // GROUP)
        else:
            shift, total = merge(out_row, accum_row, lse_accum + row, stride, count, sink, 1)
        if lane == 0 and column_block == 0:
            value = empty_lse
            if total != 0:  # true for NaN
                value = (shift + cute.math.log2(total, fastmath=True)) * math.log(2)
            (lse + (request * lse_stride_batch + head * lse_stride_head + token * lse_stride_token)).store(value)


@cute.jit
def launch(
    lengths: cute.Pointer,
    extra_lengths: cute.Pointer,
    num_splits: cute.Pointer,
    attn_sink: cute.Pointer,
    out_accum: cute.Pointer,
    lse_accum: cute.Pointer,
    out: cute.Pointer,
    lse: cute.Pointer,
    out_stride_batch: Int64,
    out_stride_token: Int64,
    out_stride_head: Int64,
    lse_stride_batch: Int64,
    lse_stride_head: Int64,
    lse_stride_token: Int64,
    empty_lse: Float32,
    s_q: Int32,
    h_q: Int32,
    max_keys: Int32,
    extra_max_keys: Int32,
    max_splits: Int32,
    accum_rows: Int32,
    name: cutlass.Constexpr,
):
    combine.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
    combine(
        lengths,
        extra_lengths,
        num_splits,
        attn_sink,
        out_accum,
        lse_accum,
        out,
        lse,
        out_stride_batch,
        out_stride_token,
        out_stride_head,
        lse_stride_batch,
        lse_stride_head,
        lse_stride_token,
        empty_lse,
        s_q,
        h_q,
        max_keys,
        extra_max_keys,
        max_splits,
        accum_rows,
    ).launch(
        grid=(1, 1, 1),
        block=(THREADS, 1, 1),
        use_pdl=True,
        # Tells ptxas that 128 registers may be used. Unasked it takes 80 and empties a buffer before it fills the other.
        min_blocks_per_mp=2,
        preferred_smem_carveout=100,  # of no effect here: without it the DSL asks the driver, which need not exist
    )


def build(config: CombineConfig, arch: Arch) -> KernelSource:
    """The kernel's source for one element type of out, ready to compile."""
    elements = {"attn_sink": Float32, "out_accum": Float32, "lse_accum": Float32, "out": DTYPES[config.dtype], "lse": Float32}
    args = (*example_arguments(PARAMS, elements), kernel_name("combine", arch.name, config.name))
    return KernelSource(
        op="combine",
        config=config,
        host=launch,
        args=args,
        params=PARAMS,
        block=(THREADS, 1, 1),
        cluster=(1, 1, 1),
        smem_bytes=0,
        barriers=(),
        named_barriers=(),
        roles=(Role("merge", 0, ROWS_PER_BLOCK),),
        # Two code paths, each sums two buffers, and fills three times: before the loop and twice in it.
        expected={"FFMA": 2 * 2 * BUFFER, "LDG.E.128": 2 * 3 * BUFFER // VECTOR},
    )
