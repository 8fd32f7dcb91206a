"""row_sums: adds the rows of each key's list in the order of the list. Every architecture.

    sum_s = (.. ((sum_s + rows[e_0]) + rows[e_1]) + ..)     over the entries e_0, e_1, .. of key s, in fp32, per column
    out_s = scale * sum_s, or out_s + scale * sum_s         the last chunk alone

    grid     (keys, 1, 1); a CTA has one key, and a warp 64 of its columns: 9, 8 or 2 warps
    a lane   2 neighbouring columns: a warp's load is one line of 128 bytes
    a batch  16 rows in flight a warp. Lanes 0..15 load the entries of the next batch meanwhile, and shuffles hand them round

The trick is to have none: a column is summed by one lane, one row after the other, so its bits follow from the list alone. The latency of
memory is hidden by 16 loads a lane and by the warps of other keys. A sum begins at +0 and never becomes -0, so the 0 that stands for a row
past the list's end leaves it as it is. Operands and their meaning: cute_mla/spec/row_sums.py.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from ...spec.arch import Arch
from ...spec.mla import ELEMENT_BYTES
from ...spec.row_sums import FP32, WARP_COLUMNS, RowSumsArguments, RowSumsConfig
from ..definition import KernelDefinition
from ..primitives.arithmetic import pack_pair, smaller, unpack_bf16
from ..primitives.rows import aligned, load_word, store_word
from ..warp_kernel import WarpKernel, WarpLaunch

BATCH = 16  # rows of a lane in flight
PAIR = 2  # columns of a lane


def load_pair(source: cute.Pointer) -> cute.Tensor:
    """Load two neighbouring fp32 numbers."""
    pair = cute.make_rmem_tensor(cute.make_layout(PAIR), Float32)
    cute.autovec_copy(cute.make_tensor(aligned(source, 8), cute.make_layout(PAIR)), pair)
    return pair


class RowSums(WarpKernel):
    """One variant of the kernel."""

    def __init__(self, config: RowSumsConfig, arch: Arch) -> None:
        self.launch = WarpLaunch("row_sums", "sum", RowSumsArguments, 32 * config.columns // WARP_COLUMNS)
        super().__init__(config, arch)

    @cute.kernel
    def kernel(self, args: RowSumsArguments):
        """Add the rows of one key."""
        key, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        column = thread * PAIR
        # The next kernel may be launched now: one that reads out waits for this grid to end.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

        begin, end = args.row_starts[key], args.row_starts[key + 1]
        total = cute.make_rmem_tensor(cute.make_layout(PAIR), Float32)
        total.fill(0.0)
        place = args.sums + (Int64(key) * self.config.columns + column)
        if args.first == 0:
            total.store(load_pair(place).load())
        if begin < end:
            self.add_list(args, total, begin, end, column)
        if args.last != 0:
            self.write(args, total, args.out + (Int64(key) * args.out_stride_key + column))
        else:
            cute.autovec_copy(total, cute.make_tensor(aligned(place, 8), cute.make_layout(PAIR)))

    @cute.jit
    def add_list(self, args: RowSumsArguments, total: cute.Tensor, begin: Int32, end: Int32, column: Int32):
        """Add the rows of the entries begin .. end - 1, of which there is one at least, to the lane's columns."""
        lane = cute.arch.lane_idx() % BATCH
        rows = args.rows + column
        words = cute.make_rmem_tensor(cute.make_layout(BATCH), Int32)
        ahead = args.entries[smaller(begin + lane, end - 1)]
        for first in cutlass.range(begin, end, BATCH, unroll=1):
            held = ahead
            ahead = args.entries[smaller(first + BATCH + lane, end - 1)]
            for i in cutlass.range_constexpr(BATCH):
                entry = cute.arch.shuffle_sync(held, i)
                words[i] = load_word(rows + Int64(entry) * self.config.columns)
            for i in cutlass.range_constexpr(BATCH):
                word = cutlass.select_(first + i < end, words[i], Int32(0))
                for which, number in enumerate(unpack_bf16(word)):
                    total[which] = total[which] + number

    @cute.jit
    def write(self, args: RowSumsArguments, total: cute.Tensor, target: cute.Pointer):
        """Write scale * total to out, or add it."""
        if cutlass.const_expr(self.config.out_dtype == FP32):
            before = cute.make_rmem_tensor(cute.make_layout(PAIR), Float32)
            before.fill(0.0)
            if args.accumulate != 0:
                before.store(load_pair(target).load())
            for i in cutlass.range_constexpr(PAIR):
                total[i] = cute.math.fma(total[i], args.scale, before[i])
            cute.autovec_copy(total, cute.make_tensor(aligned(target, 8), cute.make_layout(PAIR)))
        else:
            store_word(target, pack_pair(total[0] * args.scale, total[1] * args.scale, BFloat16))


def build(config: RowSumsConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    assert PAIR * ELEMENT_BYTES == 4, "a lane loads one word of a row"
    kernel = RowSums(config, arch)
    out = Float32 if config.out_dtype == FP32 else BFloat16
    return kernel.definition({"rows": BFloat16, "sums": Float32, "out": out}, {"SHFL": BATCH})
