"""head_sums: a function of every head's score, summed over the heads, at the keys that each token has chosen. Every architecture.

    probs    out_j = sum_h exp2(scale_log2 <q_h, k_j> - lse'_h)     lse' = log2(e^lse + e^sink)
    scores   out_j = sum_h weight_h max(<q_h, k_j>, 0)

    grid     (tokens), 128 threads; a CTA has one token and walks its keys in tiles of 64
    a warp   32 keys of a tile and half of the heads, or 16 keys and all heads: S^T by mma.sync, A = keys, B = Q
    a lane   rows l / 4 and l / 4 + 8 of a product, every fourth pair of heads; sums over its heads in ascending order, then over the quad.
             Behind the next tile's first barrier a thread adds up the groups of heads of a key and writes the sum
    memory   Q (128 heads x 576: 147,456 bytes) and a ring: one tile of nine boxes that come one by one, or two tiles of 128 columns

Copies: cp.async by all threads, one group a step. A step waits for its group and for the CTA, then starts the copy that takes the place of
the step before; the indices of a tile are loaded a tile ahead.

The trick: keys are the rows of the product. So a sum over heads is a lane's sum, and a key that is absent spoils its own row alone. With
two groups of 64 heads, a warp reads half of Q for twice the keys: 3,456 clocks of the port of shared memory a tile, not 5,184. Operands
and their meaning: cute_mla/spec/head_sums.py.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ...spec.arch import Arch
from ...spec.head_sums import HeadSumsArguments, HeadSumsConfig
from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import tiles_of
from ..definition import KernelDefinition
from ..primitives.smem import Array, SmemLayout
from ..primitives.warp_products import BOX_COLUMNS, SUMS, K, N
from ..row_statistics.kernel import log2_with_sink
from ..sparse_prefill.operands import NO_ROW, SparsePrefillIndices, SparsePrefillOperands
from ..warp_kernel import WarpKernel, WarpLaunch
from .chosen_keys import ELEMENTS, THREADS, ChosenShape, KeyRing, add_scores, chosen_operands, load_queries, relu

ABSENT = {"probs": 0.0, "scores": -math.inf}  # the sum of a slot that names no key


def shape_of(config: HeadSumsConfig) -> ChosenShape:
    """Return the sizes of a variant."""
    if config.kind == "probs":
        return ChosenShape(config.columns, config.heads, steps=config.columns // BOX_COLUMNS, tiles=1, groups=2)
    return ChosenShape(config.columns, config.heads, steps=1, tiles=2, groups=1)


@dataclass(frozen=True)
class HeadReduction:
    """Sum of a function of the scores of a key. terms: fp32 [heads] in shared memory, lse' in log2 units or weights."""

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

    @cute.jit
    def store(self, operands: SparsePrefillOperands, shape: cutlass.Constexpr, scores: cute.Tensor, sums: cute.Pointer):
        """Write the sums of the lane's keys over its group of heads. sums: those of a tile, [groups, 64 keys]."""
        for key in cutlass.range_constexpr(shape.own_keys):
            total = Float32(0)
            for column in cutlass.range_constexpr(shape.group_heads // N):
                for i in cutlass.range_constexpr(2):
                    score, term = scores[shape.place(key, column, i)], self.terms[shape.own_head(column) + i]
                    if cutlass.const_expr(self.config.kind == "probs"):
                        total = total + cute.math.exp2(cute.math.fma(score, operands.scale_log2, -term), fastmath=True)
                    else:
                        total = cute.math.fma(relu(score), term, total)
            for lane in cutlass.range_constexpr(1, 3):
                total = total + cute.arch.shuffle_sync_bfly(total, lane)
            if cute.arch.lane_idx() % 4 == 0:
                (sums + (shape.group() * TILE_KEYS + shape.own_key(key))).store(total)


class HeadSums(WarpKernel):
    """One variant of the kernel."""

    launch = WarpLaunch("head_sums", "sum", HeadSumsArguments, THREADS)

    def __init__(self, config: HeadSumsConfig, arch: Arch) -> None:
        super().__init__(config, arch)
        self.shape = shape_of(config)
        self.tile_sums = self.shape.groups * TILE_KEYS
        self.smem = SmemLayout((*self.shape.fields(), Array("sums", Float32, 2 * self.tile_sums, 16)))

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
        for tile in cutlass.range(tiles, unroll=1):
            scores.fill(0.0)
            for step in cutlass.range_constexpr(self.shape.steps):
                ring.take(tile, step)
                if cutlass.const_expr(step == 0):
                    self.write(args, indices, memory["sums"], tile - 1)
                for i in cutlass.range_constexpr(self.shape.step_boxes):
                    box = step * self.shape.step_boxes + i
                    add_scores(self.shape, scores, ring.box(tile, box), memory["queries"].toint() + box * self.shape.queries_bytes)
            reduction.store(operands, self.shape, scores, memory["sums"] + tile % 2 * self.tile_sums)
        ring.end()
        cute.arch.sync_threads()  # the sums of the last tile are there
        self.write(args, indices, memory["sums"], tiles - 1)
        self.write_rest(args.sums + Int64(token) * args.topk, tiles * TILE_KEYS, args.topk)

    @cute.jit
    def write(self, args: HeadSumsArguments, indices: SparsePrefillIndices, sums: cute.Pointer, tile: Int32):
        """Write the sums of a tile, a thread each, of slots that exist. tile: -1 for none."""
        token, _, _ = cute.arch.block_idx()
        thread, _, _ = cute.arch.thread_idx()
        slot = tile * TILE_KEYS + thread
        if (tile >= 0) & (thread < TILE_KEYS) & (slot < args.topk):
            own = sums + (tile % 2 * self.tile_sums + thread)
            total = own.load()
            for group in cutlass.range_constexpr(1, self.shape.groups):
                total = total + (own + group * TILE_KEYS).load()
            present = indices.look_up(slot) != NO_ROW
            (args.sums + (Int64(token) * args.topk + slot)).store(cutlass.select_(present, total, Float32(ABSENT[self.config.kind])))

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
