"""Merging of results over disjoint sets of keys, each with its lse: a warp merges one row.

    m = max_s lse_s     w_s = 2^(lse_s - m)     out = sum_s w_s out_s / (sum_s w_s + 2^(sink log2 e - m))     lse_s in base 2

    lane     columns 128 g + 4 lane + {0..3}, or 2 lane + {0, 1}: loads and stores that a warp makes contiguous
    weights  lane l holds w_s of result 32 k + l; a shuffle hands them round. The lse of the first results are loaded at once and stay
             in registers; later ones are loaded again for each of their three uses
    loads    4 columns: two register buffers of 32 elements a lane, one is summed while the other fills
             2 columns: 32 results at once, so that few warps wait for memory as rarely as possible
             The first results are asked for as soon as their lse are known, before their weights, where warps share the columns of a
             row or results are states

An empty result, whose lse is -inf, is not read, and what a row of weight 0 holds does not matter. Columns are summed over the results in
their order, by one lane.
"""

from __future__ import annotations

import math
from typing import Any

import cutlass
from cutlass import Float32, Int32, cute

from ..primitives.arithmetic import pin_register
from .softmax import sink_weight

VECTOR = 4  # elements that a lane loads at a time
NARROW_VECTOR = 2  # where more warps share a row
GROUP = 32 * VECTOR  # columns that a warp covers with one load
BUFFER = 32  # elements a lane has in flight per buffer


class Results:
    """Results to merge. A kernel's subclass says where they lie.

    dtype: of the elements. in_place: whether the merged row may take the place of a result, so that lse is written last.
    """

    dtype: type[cutlass.Numeric]
    in_place = False

    def lse(self, result: Int32) -> Float32:
        """Return the lse of a result, base 2; a result with -inf has no weight."""
        raise NotImplementedError

    def row(self, result: Int32) -> cute.Pointer:
        """Return this lane's first column of a result."""
        raise NotImplementedError

    def load(self, target: cute.Tensor, source: cute.Pointer) -> None:
        """Load as many neighbouring columns as target has."""
        raise NotImplementedError

    def out_row(self) -> cute.Pointer:
        """Return this lane's first column of the merged row."""
        raise NotImplementedError

    def finish(self, shift: Float32, total: Float32) -> None:
        """Write the lse of the merged row. shift, total: m and the sum of the weights."""
        raise NotImplementedError


@cute.jit
def lane_lse(results: Any, result: Int32, count: Int32) -> Float32:
    """Return the lse of a result; -inf past the last one."""
    lse = Float32(-math.inf)
    if result < count:
        lse = results.lse(result)
    return lse


@cute.jit
def lane_weight(results: Any, result: Int32, count: Int32, shift: Float32) -> Float32:
    """Return 2^(lse - shift) of a result; 0 past the last one."""
    return cute.math.exp2(lane_lse(results, result, count) - shift, fastmath=True)


@cute.jit
def row_weights(results: Any, count: Int32, held: cute.Tensor):
    """Return (m, or 0 if every result is empty; the sum of all weights). A NaN lse makes the sum NaN.

    held: registers with the lse of the results 32 k + lane, as many as fit; then with their weights.
    """
    lane = cute.arch.lane_idx()
    largest = held[0]
    for k in cutlass.range_constexpr(1, cute.size(held)):
        largest = cute.arch.fmax(largest, held[k])
    for base in cutlass.range(32 * cute.size(held), count, 32, unroll=1):
        largest = cute.arch.fmax(largest, lane_lse(results, base + lane, count))
    largest = cute.arch.warp_reduction_max(largest)
    shift = largest if largest > -math.inf else Float32(0)  # not -inf - -inf
    total = Float32(0)
    for k in cutlass.range_constexpr(cute.size(held)):
        held[k] = cute.math.exp2(held[k] - shift, fastmath=True)
        total = held[k] if cutlass.const_expr(k == 0) else total + held[k]
    for base in cutlass.range(32 * cute.size(held), count, 32, unroll=1):
        total += lane_weight(results, base + lane, count, shift)
    return shift, cute.arch.warp_reduction_sum(total)


@cute.jit
def weight_from(results: Any, first: Int32, count: Int32, shift: Float32, held: cute.Tensor) -> Float32:
    """Return the weight of result first + lane; 0 past the last one. first: a multiple of 32. held: as in row_weights."""
    weight = held[0]
    for k in cutlass.range_constexpr(1, cute.size(held)):
        weight = cutlass.select_(first == 32 * k, held[k], weight)
    if first >= 32 * cute.size(held):
        weight = lane_weight(results, first + cute.arch.lane_idx(), count, shift)
    return weight


def vector_at(pointer: cute.Pointer, align: int, count: int) -> cute.Tensor:
    """Return `count` elements at a pointer that is a multiple of `align` bytes."""
    aligned = cute.make_ptr(pointer.dtype, pointer.toint(), cute.AddressSpace.gmem, assumed_align=align)
    return cute.make_tensor(aligned, cute.make_layout(count))


@cute.jit
def fill(buffer: cute.Tensor, results: Any, first: Int32, read: Int32):
    """Load the results from `first` on that a buffer has room for and whose bit in `read` is set, and 0 in place of others.

    buffer: (columns, groups, results) registers. read: a bit for each of the 32 results that these belong to.
    """
    bits = read >> pin_register(first & 31)  # an opaque number, lest ptxas takes a shift that wraps
    for step in cutlass.range_constexpr(cute.size(buffer, mode=[2])):
        source = results.row(first + step)
        for group in cutlass.range_constexpr(cute.size(buffer, mode=[1])):
            for i in cutlass.range_constexpr(cute.size(buffer, mode=[0])):
                buffer[i, group, step] = buffer.element_type(0)
        if (bits & (1 << step)) != 0:
            for group in cutlass.range_constexpr(cute.size(buffer, mode=[1])):
                results.load(buffer[None, group, step], source + group * GROUP)


@cute.jit
def clear(buffer: cute.Tensor, kept: Int32):
    """Replace the first results by 0 but for those whose bit in `kept` is set."""
    for step in cutlass.range_constexpr(cute.size(buffer, mode=[2])):
        if (kept & (1 << step)) == 0:
            buffer[None, None, step].fill(buffer.element_type(0))


@cute.jit
def accumulate(sums: cute.Tensor, buffer: cute.Tensor, first: Int32, held: Float32):
    """Add weights * buffer to the sums, result after result. held: weight of result 32 k + lane, for the k that these belong to."""
    for step in cutlass.range_constexpr(cute.size(buffer, mode=[2])):
        weight = cute.arch.shuffle_sync(held, (first & 31) + step)
        for group in cutlass.range_constexpr(cute.size(buffer, mode=[1])):
            for i in cutlass.range_constexpr(cute.size(buffer, mode=[0])):
                sums[i, group] = sums[i, group] + weight * Float32(buffer[i, group, step])


@cute.jit
def store(out_row: cute.Pointer, sums: cute.Tensor, scale: Float32):
    """Write sums * scale to the columns of this lane. out_row: this lane's first column; its row may start at any element."""
    vector = cute.size(sums, mode=[0])
    for group in cutlass.range_constexpr(cute.size(sums, mode=[1])):
        values = cute.make_rmem_tensor(vector, out_row.dtype)
        values.store((sums[None, group].load() * scale).to(out_row.dtype))
        target = out_row + group * GROUP
        if (target.toint() & (2 * vector - 1)) == 0:
            cute.autovec_copy(values, vector_at(target, 2 * vector, vector))
        else:
            for i in cutlass.range_constexpr(vector):
                target[i] = values[i]


@cute.jit
def merge_row(results: Any, count: Int32, sink: Float32 | None, columns: cutlass.Constexpr, weights: cutlass.Constexpr = 1):
    """Merge columns of a row. The first results may be asked for before the weights are known.

    count: results. sink: natural logarithm, or None where there is never one; it weighs on out alone. columns: (neighbouring ones of a
    lane, groups of 32 lanes' columns). weights: a lane keeps, of every 32nd result.
    """
    sums = cute.make_rmem_tensor(cute.make_layout(columns), Float32)
    sums.fill(0.0)
    steps = 32 if columns[0] == NARROW_VECTOR else BUFFER // cute.size(sums)
    buffer = cute.make_rmem_tensor(cute.make_layout((*columns, steps)), results.dtype)
    held = cute.make_rmem_tensor(weights, Float32)
    for k in cutlass.range_constexpr(weights):
        held[k] = lane_lse(results, 32 * k + cute.arch.lane_idx(), count)
    ahead = columns[1] == 1 or results.in_place  # where combine takes whole rows, memory binds and the order of before is faster
    read = Int32(0)
    if cutlass.const_expr(ahead):
        read = cute.arch.vote_ballot_sync(held[0] != -math.inf)  # NaN included
        fill(buffer, results, Int32(0), read)
    shift, total = row_weights(results, count, held)
    weighty = cute.arch.vote_ballot_sync(held[0] != 0)
    if cutlass.const_expr(ahead):
        if weighty != read:
            clear(buffer, weighty)
    else:
        fill(buffer, results, Int32(0), weighty)
    if cutlass.const_expr(not results.in_place):
        results.finish(shift, total)
    if cutlass.const_expr(steps == 32):
        add_blocks(sums, buffer, results, count, shift, held)
    else:
        add_stream(sums, buffer, results, count, shift, held)
    below = total
    if cutlass.const_expr(sink is not None):
        below = total + sink_weight(sink, shift)
    store(results.out_row(), sums, Float32(0) if total == 0 else cute.arch.rcp_approx(below))
    if cutlass.const_expr(results.in_place):
        results.finish(shift, total)


@cute.jit
def add_blocks(sums: cute.Tensor, buffer: cute.Tensor, results: Any, count: Int32, shift: Float32, kept: cute.Tensor):
    """Add the weighted results to the sums, 32 at a time. buffer: holds the first 32. kept: as in row_weights."""
    weight = kept[0]
    for first in cutlass.range(0, count, 32, unroll=1):
        accumulate(sums, buffer, Int32(0), weight)
        following = first + 32
        if following < count:
            weight = weight_from(results, following, count, shift, kept)
            fill(buffer, results, following, cute.arch.vote_ballot_sync(weight != 0))  # loads that wait for no shuffle


@cute.jit
def add_stream(sums: cute.Tensor, even: cute.Tensor, results: Any, count: Int32, shift: Float32, kept: cute.Tensor):
    """Add the weighted results to the sums: one buffer is summed while the other fills. even: holds the first ones. kept: likewise."""
    steps = cute.size(even, mode=[2])
    odd = cute.make_rmem_tensor(even.layout, results.dtype)
    weight = kept[0]
    for first in cutlass.range(0, count, 2 * steps, unroll=1):
        read = cute.arch.vote_ballot_sync(weight != 0)
        fill(odd, results, first + steps, read)
        accumulate(sums, even, first, weight)
        following, later = first + 2 * steps, weight
        if following % 32 == 0:
            later = weight_from(results, following, count, shift, kept)
        fill(even, results, following, cute.arch.vote_ballot_sync(later != 0))
        accumulate(sums, odd, first + steps, weight)
        weight = later
