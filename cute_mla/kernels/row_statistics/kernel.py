"""row_statistics: lse with the sink, and delta, of every query row. Every architecture.

    lse' = lse + ln(1 + e^(sink - lse))     delta = <out, dout>     delta' = delta - dlse e^(lse' - lse)

    grid     (ceil(rows / 8)), 256 threads; one warp has one row (token, head)
    a lane   16 of the 512 columns of out and of dout, 16 bytes at a time; sums by butterflies, so that all lanes have the same bits

Bytes of a row, each once: 2,048 in, 8 out. Operands and their meaning: cute_mla/spec/row_statistics.py.
"""

import math

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Uint32

from ...spec.arch import Arch
from ...spec.mla import D_LATENT, LOG2E
from ...spec.row_statistics import ROWS_PER_BLOCK, RowStatisticsArguments, RowStatisticsConfig
from ..definition import KernelDefinition
from ..primitives.arithmetic import unpack_bf16
from ..primitives.rows import aligned
from ..warp_kernel import WarpKernel, WarpLaunch

CHUNK = 8  # columns of 16 bytes
CHUNK_WORDS = CHUNK // 2
LANES = 32


def load_chunks(row: cute.Pointer) -> list[Float32]:
    """Load a lane's columns of a row."""
    values: list[Float32] = []
    for first in range(0, D_LATENT, LANES * CHUNK):
        words = cute.make_rmem_tensor(cute.make_layout(CHUNK_WORDS), Int32)
        source = aligned(cute.recast_ptr(row + (first + cute.arch.lane_idx() * CHUNK), dtype=Int32), 16)
        cute.autovec_copy(cute.make_tensor(source, cute.make_layout(CHUNK_WORDS)), words)
        for i in range(CHUNK_WORDS):
            values += unpack_bf16(words[i])
    return values


def exp(value: Float32) -> Float32:
    """Return e to the power of a value."""
    return cute.math.exp2(value * LOG2E, fastmath=True)


def log2_with_sink(lse: Float32, sink: Float32) -> tuple[Float32, Boolean]:
    """Return lse' in log2 units, and whether the row has no gradient: its lse is infinite, or its sink inf."""
    dead = (lse == Float32.inf) | (lse == -Float32.inf) | (sink == Float32.inf)
    above = cutlass.select_(lse >= sink, lse, sink)
    share = cute.math.log2(exp(lse - above) + exp(sink - above), fastmath=True)
    return cute.math.fma(above, Float32(LOG2E), share), dead


class RowStatistics(WarpKernel):
    """The kernel."""

    launch = WarpLaunch("row_statistics", "statistics", RowStatisticsArguments, LANES * ROWS_PER_BLOCK)

    @cute.kernel
    def kernel(self, args: RowStatisticsArguments):
        """Compute the statistics of one row per warp."""
        block, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        row = block * ROWS_PER_BLOCK + thread // LANES
        # The next kernel may be launched now: one that reads the statistics waits for this grid to end.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        if row < args.rows:
            token = Int32(Uint32(row) // Uint32(args.h_q))
            request = Int32(Uint32(token) // Uint32(args.s_q))
            place = request, token - request * args.s_q, row - token * args.h_q
            delta = self.dot(element(args, "out", place), element(args, "dout", place))
            if thread % LANES == 0:
                self.finish(args, row, place[2], element(args, "lse", place).load(), delta)

    def dot(self, out: cute.Pointer, dout: cute.Pointer) -> Float32:
        """Return the sum of the products of two rows, in all lanes."""
        total = Float32(0)
        for x, y in zip(load_chunks(out), load_chunks(dout), strict=True):
            total = cute.math.fma(x, y, total)
        for level in range(LANES.bit_length() - 1):
            total = total + cute.arch.shuffle_sync_bfly(total, 1 << level)
        return total

    @cute.jit
    def finish(self, args: RowStatisticsArguments, row: Int32, head: Int32, lse: Float32, delta: Float32):
        """Write the statistics of a row. One lane."""
        sink = Float32(-math.inf)
        if args.attn_sink.toint() != 0:
            sink = (args.attn_sink + head).load()
        with_sink, dead = log2_with_sink(lse, sink)
        if args.sink_terms.toint() != 0:
            term = -cute.math.exp2(cute.math.fma(sink, Float32(LOG2E), -with_sink), fastmath=True) * delta
            (args.sink_terms + Int64(row)).store(cutlass.select_(dead, Float32(0), term))
        if args.dlse.toint() != 0:
            grown = cute.math.exp2(cute.math.fma(lse, Float32(-LOG2E), with_sink), fastmath=True)
            delta = cute.math.fma((args.dlse + Int64(row)).load(), -grown, delta)
        (args.statistics + Int64(row)).store(cutlass.select_(dead, Float32.inf, with_sink))
        (args.statistics + (Int64(args.rows) + row)).store(cutlass.select_(dead, Float32(0), delta))


def element(args: RowStatisticsArguments, name: str, place: tuple[Int32, Int32, Int32]) -> cute.Pointer:
    """Return the first element of a row in the argument of a name. place: request, token and head."""
    offset = Int64(0)
    for axis, number in zip(("batch", "token", "head"), place, strict=True):
        offset = offset + Int64(number) * getattr(args, f"{name}_stride_{axis}")
    return getattr(args, name) + offset


def build(config: RowStatisticsConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    kernel = RowStatistics(config, arch)
    floats = dict.fromkeys(("lse", "dlse", "attn_sink", "statistics", "sink_terms"), Float32)
    return kernel.definition({"out": BFloat16, "dout": BFloat16, **floats}, {"LDG.E.128": 4})
