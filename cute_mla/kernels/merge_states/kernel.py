"""merge_states: merges attention over disjoint sets of keys. Every architecture.

    w_s = exp(lse_s - max lse), 0 where lse_s is infinite     out = sum_s w_s out_s / sum_s w_s     lse = ln sum_s exp(lse_s)

    grid     (batch * tokens, ceil(heads / 8)), 256 threads, no shared memory; one warp merges one row (token, head)
    a row    as in attention/merge_rows.py, 2 states of 16 columns a lane in flight per buffer (head_dim 512), or 8 of 4 (128)

The trick is shared with combine: every load of a row is on its way before the first is summed, and a state without weight is
not read. A warp reads its row of every state before it writes it, so the result may replace a state. Operands and their
meaning: cute_mla/spec/merge_states.py.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from ...spec.arch import Arch
from ...spec.merge_states import LISTED_STATES, ROWS_PER_BLOCK, MergeStatesArguments, MergeStatesConfig
from ...spec.mla import LOG2E
from ..attention.kernel import ELEMENT_TYPES
from ..attention.merge_rows import BUFFER, GROUP, VECTOR, Results, merge_row, vector_at
from ..attention.softmax import LN2
from ..definition import KernelDefinition
from ..warp_kernel import WarpKernel, WarpLaunch

THREADS = 32 * ROWS_PER_BLOCK
WIDE_BYTES = 2 * VECTOR


@dataclass(frozen=True)
class Places:
    """Addresses of one part of a row (out or lse) in each state.

    offset: elements from the state's first. stride: elements from state to state, counted from the first; 0 if each has a pointer.
    """

    firsts: tuple[cute.Pointer, ...]
    offset: Int64
    stride: Int64

    def of(self, state: Int32) -> cute.Pointer:
        """Return the address in one state."""
        first = self.firsts[0]
        address = first.toint()
        for listed, own in enumerate(self.firsts):
            address = cutlass.select_((state == listed) & (self.stride == 0), own.toint(), address)
        pointer = cute.make_ptr(first.dtype, address, cute.AddressSpace.gmem, assumed_align=first.dtype.width // 8)
        return pointer + (self.offset + Int64(state) * self.stride)


@dataclass(frozen=True)
class States(Results):
    """The states of a row: this lane's first column, and the lse. place: request, token and head of the row."""

    dtype: type[cutlass.Numeric]
    outs: Places
    lses: Places
    args: MergeStatesArguments
    place: tuple[Int32, Int32, Int32]

    in_place = True

    def lse(self, result: Int32) -> Float32:
        """Return the lse of a state, base 2; -inf of a state without keys, whatever its convention."""
        value = self.lses.of(result).load()
        infinite = (value == Float32.inf) | (value == -Float32.inf)
        return cutlass.select_(infinite, -Float32.inf, value * LOG2E)

    def row(self, result: Int32) -> cute.Pointer:
        """Return this lane's first column of a state."""
        return self.outs.of(result)

    def load(self, target: cute.Tensor, source: cute.Pointer) -> None:
        """Load 4 columns, at once where the row allows it."""
        load_columns(target, source, (source.toint() & (WIDE_BYTES - 1)) == 0)

    def out_row(self) -> cute.Pointer:
        """Return this lane's first column of the merged row."""
        strides = self.args.out_stride_batch, self.args.out_stride_token, self.args.out_stride_head
        return self.args.out + (offset(strides, *self.place) + cute.arch.lane_idx() * VECTOR)

    @cute.jit
    def finish(self, shift: Float32, total: Float32):
        """Write lse, natural logarithm."""
        args = self.args
        if cute.arch.lane_idx() == 0:
            value = args.empty_lse
            if total != 0:  # true for NaN
                value = (shift + cute.math.log2(total, fastmath=True)) * LN2
            (args.lse + offset((args.lse_stride_batch, args.lse_stride_token, args.lse_stride_head), *self.place)).store(value)


@cute.jit
def load_columns(target: cute.Tensor, source: cute.Pointer, wide: Boolean):
    """Load 4 columns of a row that may start at any element."""
    if wide:
        cute.autovec_copy(vector_at(source, WIDE_BYTES, VECTOR), target)
    else:
        for i in cutlass.range_constexpr(VECTOR):
            target[i] = source[i]


def offset(strides: tuple[Int64, Int64, Int64], req: Int32, token: Int32, head: Int32) -> Int64:
    """Return the elements from the first row to another."""
    return req * strides[0] + token * strides[1] + head * strides[2]


class MergeStates(WarpKernel):
    """One variant of the kernel."""

    launch = WarpLaunch("merge_states", "merge", MergeStatesArguments, THREADS, min_blocks_per_sm=2)  # as in combine

    def __init__(self, config: MergeStatesConfig, arch: Arch) -> None:
        super().__init__(config, arch)
        self.dtype = ELEMENT_TYPES[config.dtype]

    @cute.kernel
    def kernel(self, args: MergeStatesArguments):
        """Process one key or row per warp."""
        place, head_block, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        lane, head = thread % 32, head_block * ROWS_PER_BLOCK + thread // 32
        req, token = place // args.tokens, place % args.tokens

        # The next kernel may be launched now: one that reads out waits for this grid to end.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()

        if head < args.heads:
            strides = (args.state_out_stride_batch, args.state_out_stride_token, args.state_out_stride_head)
            outs = Places(
                tuple(getattr(args, f"state_out_{state}") for state in range(LISTED_STATES)),
                offset(strides, req, token, head) + lane * VECTOR,
                args.state_out_stride_state,
            )
            strides = (args.state_lse_stride_batch, args.state_lse_stride_token, args.state_lse_stride_head)
            lses = Places(
                tuple(getattr(args, f"state_lse_{state}") for state in range(LISTED_STATES)),
                offset(strides, req, token, head),
                args.state_lse_stride_state,
            )
            states = States(self.dtype, outs, lses, args, (req, token, head))
            merge_row(states, args.states, None, (VECTOR, self.config.head_dim // GROUP))


def build(config: MergeStatesConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    kernel = MergeStates(config, arch)
    outs, lses = ([f"state_{name}_{state}" for state in range(LISTED_STATES)] for name in ("out", "lse"))
    elements = {**dict.fromkeys((*outs, "out"), kernel.dtype), **dict.fromkeys((*lses, "lse"), Float32)}
    return kernel.definition(elements, {"FFMA": 2 * BUFFER, "LDG.E.64": 3 * BUFFER // VECTOR})
