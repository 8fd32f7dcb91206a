"""head_sums: a function of every head's score, summed over the heads, at the keys that each token has chosen. Every architecture.

    probs    out_j = sum_h exp2(scale_log2 <q_h, k_j> - lse'_h)     lse' = log2(e^lse + e^sink)
    scores   out_j = sum_h weight_h max(<q_h, k_j>, 0)

    grid     (tokens), 128 threads; a CTA has one token and walks its keys in tiles of 64
    a warp   16 keys of a tile and all heads: S^T by mma.sync, A = keys, B = Q
    a lane   keys l / 4 and l / 4 + 8 of its warp, every fourth pair of heads; sums over its heads in ascending order, then over the quad
    memory   Q (128 heads x 576: 147,456 bytes) and a ring: one tile of nine boxes that come one by one, or two tiles of 128 columns

Copies: cp.async by all threads, one group a step. A step waits for its group and for the CTA, then starts the copy that takes the place of
the step before; the indices of a tile are loaded a tile ahead.

The trick: keys are the rows of the product. So a head's sum is a lane's sum, neither shared memory nor a barrier is needed for it, and a
key that is absent spoils its own row alone. Operands and their meaning: cute_mla/spec/head_sums.py.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from ...spec.arch import Arch
from ...spec.head_sums import HeadSumsArguments, HeadSumsConfig
from ...spec.mla import LOG2E
from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import tiles_of
from ..definition import KernelDefinition
from ..primitives.smem import SmemLayout
from ..primitives.warp_products import BOX_COLUMNS, K, SUMS
from ..row_statistics.kernel import log2_with_sink
from ..sparse_prefill.operands import NO_ROW, SparsePrefillOperands
from ..warp_kernel import WarpKernel, WarpLaunch
from .chosen_keys import (
    ELEMENTS,
    ROW_HALVES,
    THREADS,
    ChosenShape,
    KeyRing,
    add_scores,
    chosen_operands,
    load_queries,
    own_head,
    own_key,
    relu,
)

ABSENT = {"probs": 0.0, "scores": -math.inf}  # the sum of a slot that names no key


def shape_of(config: HeadSumsConfig) -> ChosenShape:
    """Return the sizes of a variant."""
    if config.kind == "probs":
        return ChosenShape(config.columns, config.heads, steps=config.columns // BOX_COLUMNS, tiles=1)
    return ChosenShape(config.columns, config.heads, steps=1, tiles=2)


@dataclass(frozen=True)
class HeadReduction:
    """What becomes of the scores of a key. terms: fp32 [heads] in shared memory, lse' in log2 units or weights."""

    config: HeadSumsConfig
    terms: cute.Pointer

    @cute.jit
    def load_terms(self, operands: SparsePrefillOperands, token: Int32):
        """Write the term of a head, a thread each. A head that does not exist adds nothing."""
        head, _, _ = cute.arch.thread_idx()
        absent = math.inf if self.config.kind == "probs" else 0.0
        term, sink = Float32(absent), Float32(-math.inf)
        if head < operands.rows():
            term = operands.element("terms", token, head).load()
        if cutlass.const_expr(self.config.kind == "probs"):
            if (head < operands.rows()) & (operands.attn_sink.toint() != 0):
                sink = (operands.attn_sink + head).load()
            with_sink, dead = log2_with_sink(term, sink)
            term = cutlass.select_(dead, Float32.inf, with_sink)
        if head < self.config.heads:
            (self.terms + head).store(term)

    def sum(self, operands: SparsePrefillOperands, scores: cute.Tensor, half: int) -> Float32:
        """Return the sum over the heads of one of the lane's keys, in all lanes of the quad."""
        total = Float32(0)
        for column in range(cute.size(scores) // SUMS):
            for i in range(2):
                score, term = scores[column * SUMS + 2 * half + i], self.terms[own_head(column) + i]
                if self.config.kind == "probs":
                    total = total + cute.math.exp2(cute.math.fma(score, operands.scale_log2, -term), fastmath=True)
                else:
                    total = cute.math.fma(relu(score), term, total)
        for lane in (1, 2):
            total = total + cute.arch.shuffle_sync_bfly(total, lane)
        return total


class HeadSums(WarpKernel):
    """One variant of the kernel."""

    launch = WarpLaunch("head_sums", "sum", HeadSumsArguments, THREADS)

    def __init__(self, config: HeadSumsConfig, arch: Arch) -> None:
        super().__init__(config, arch)
        self.shape = shape_of(config)
        self.smem = SmemLayout(self.shape.fields())

    @cute.kernel
    def kernel(self, args: HeadSumsArguments):
        """Compute the sums of one token."""
        token, _, _ = cute.arch.block_idx()
        memory = self.smem.allocate()
        operands = chosen_operands(args)
        # The next kernel may be launched now: one that reads the sums waits for this grid to end.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        indices = operands.index_list(token)
        ring = KeyRing.create(self.shape, indices, memory["ring"])
        reduction = HeadReduction(self.config, memory["terms"])
        tiles = tiles_of(indices.count)
        load_queries(operands, self.shape, memory["queries"], token)
        reduction.load_terms(operands, token)
        ring.begin()
        scores = cute.make_rmem_tensor(cute.make_layout(self.shape.sums), Float32)
        out = args.sums + Int64(token) * args.topk
        for tile in cutlass.range(tiles, unroll=1):
            first = tile * TILE_KEYS
            present = [indices.look_up(first + own_key(half)) != NO_ROW for half in range(ROW_HALVES)]
            scores.fill(0.0)
            for step in cutlass.range_constexpr(self.shape.steps):
                ring.take(tile, step)
                for i in cutlass.range_constexpr(self.shape.step_boxes):
                    box = step * self.shape.step_boxes + i
                    add_scores(self.shape, scores, ring.box(tile, box), memory["queries"].toint() + box * self.shape.queries_bytes)
            for half in cutlass.range_constexpr(ROW_HALVES):
                self.write(out, first + own_key(half), args.topk, present[half], reduction.sum(operands, scores, half))
        ring.end()
        self.write_rest(out, tiles * TILE_KEYS, args.topk)

    @cute.jit
    def write(self, out: cute.Pointer, slot: Int32, topk: Int32, present: Boolean, total: Float32):
        """Write the sum of a slot that exists, one lane of a quad."""
        if (cute.arch.lane_idx() % 4 == 0) & (slot < topk):
            (out + slot).store(cutlass.select_(present, total, Float32(ABSENT[self.config.kind])))

    @cute.jit
    def write_rest(self, out: cute.Pointer, first: Int32, topk: Int32):
        """Write the slots behind the last tile."""
        thread, _, _ = cute.arch.thread_idx()
        for slot in cutlass.range(first + thread, topk, THREADS, unroll=1):
            (out + slot).store(Float32(ABSENT[self.config.kind]))


def build(config: HeadSumsConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    kernel = HeadSums(config, arch)
    shape = kernel.shape
    products = shape.columns // K * (shape.sums // SUMS)
    elements = {**ELEMENTS, "attn_sink": Float32, "sums": Float32}
    return kernel.definition(elements, {"HMMA": products}, kernel.smem.nbytes)
