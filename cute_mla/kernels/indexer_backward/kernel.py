"""indexer_backward: gradients of an indexer's scores at the keys that each token has chosen. Every architecture.

    s_hj = <q_h, k_j>     g_hj = d_j w_h where s_hj > 0, else 0
    dq_h = sum_j g_hj k_j     dw_h = sum_j d_j max(s_hj, 0)     row_j = sum_h g_hj q_h

    grid     (tokens of a chunk), 128 threads; a CTA has one token and walks its keys in tiles of 64
    S^T, row   a warp has 16 keys of a tile: S^T = K Q^T as in head_sums, row = G^T Q, whose A is G^T as S^T left it in registers
    dQ         a warp has 16 heads: dQ += G K, whose A is G from shared memory, transposed as it is loaded
    dw         a lane sums over its two keys of each tile, then over the lanes of the warp, then over the warps in ascending order
    memory     Q 16,384, two tiles of keys 32,768, G (64 keys x 64 heads) 8,192 bytes

Copies are those of head_sums, a tile at a time and one ahead. Two barriers a tile: the keys are there and G has been read; G is there.

The trick: with keys as rows, S^T is the A operand of the rows in place, so that G passes through shared memory once, for dQ alone.
G is rounded to bf16 once, dw is summed in fp32. A token's sums are made by one CTA, tile after tile: bits depend on the token alone.
Operands and their meaning: cute_mla/spec/indexer_backward.py.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64
from cutlass.experimental import primitives

from ...spec.arch import Arch
from ...spec.head_sums import INDEX_COLUMNS, INDEX_HEADS
from ...spec.indexer_backward import IndexerBackwardArguments, IndexerBackwardConfig
from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import tiles_of
from ..definition import KernelDefinition
from ..dense_prefill.sm90_gemm import gather_runs, store_row_words
from ..head_sums.chosen_keys import (
    ELEMENTS,
    ROW_HALVES,
    THREADS,
    TILE_BOX_BYTES,
    WARPS,
    ChosenShape,
    KeyRing,
    add_scores,
    chosen_operands,
    load_queries,
    relu,
)
from ..primitives.arithmetic import pack_pair
from ..primitives.copies import CHUNK, smem_pointer
from ..primitives.smem import SWIZZLE_PERIOD, Array, SmemLayout
from ..primitives.warp_products import (
    BOX_COLUMNS,
    SUMS,
    K,
    M,
    N,
    chunk_address,
    load_tall,
    load_wide,
    multiply,
)
from ..sparse_prefill.operands import NO_ROW, SparsePrefillIndices, SparsePrefillOperands
from ..warp_kernel import WarpKernel, WarpLaunch

SHAPE = ChosenShape(INDEX_COLUMNS, INDEX_HEADS, steps=1, tiles=2, groups=1)
COLUMNS = INDEX_HEADS // N  # products of a score's row: a lane has two heads of each
BOX_SUMS = BOX_COLUMNS // N * SUMS
SMEM = SmemLayout(
    (
        *SHAPE.fields(),
        Array("gradients", cutlass.Uint8, TILE_BOX_BYTES, SWIZZLE_PERIOD),
        Array("dweights", Float32, WARPS * INDEX_HEADS, CHUNK),
    )
)
assert WARPS * M == INDEX_HEADS, "a warp has 16 heads of dQ"
assert SHAPE.warp_keys == M, "a warp has 16 keys of a tile"


@dataclass(frozen=True)
class BackwardTile:
    """Registers of a lane: a tile, and sums over tiles.

    scores: S^T, then G^T, of 16 keys and all heads. words: G^T in bf16, A of the rows. dweights: of its heads. dq: of 16 heads.
    """

    memory: dict
    scores: cute.Tensor
    words: cute.Tensor
    dweights: cute.Tensor
    dq: cute.Tensor

    @staticmethod
    def create(memory: dict) -> "BackwardTile":
        """Return the registers of a token, sums at 0."""
        sizes = (SHAPE.sums, SHAPE.boxes * BOX_SUMS, 2 * COLUMNS)
        scores, dq, dweights = (cute.make_rmem_tensor(cute.make_layout(size), Float32) for size in sizes)
        dq.fill(0.0)
        dweights.fill(0.0)
        return BackwardTile(memory, scores, cute.make_rmem_tensor(cute.make_layout(SHAPE.sums // 2), Int32), dweights, dq)

    def queries(self, box: int) -> Int32:
        """Return the address of a box of Q."""
        return self.memory["queries"].toint() + box * SHAPE.queries_bytes

    def make_gradients(self, dscores: list[Float32]) -> None:
        """Turn S^T into G^T, and add up dw. dscores: gradients of the lane's two keys, 0 for absent ones."""
        terms = self.memory["terms"]
        for column in range(COLUMNS):
            for i in range(2):
                weight = terms[SHAPE.own_head(column) + i]
                for half in range(ROW_HALVES):
                    place = SHAPE.place(half, column, i)
                    score = self.scores[place]
                    self.dweights[2 * column + i] = cute.math.fma(dscores[half], relu(score), self.dweights[2 * column + i])
                    self.scores[place] = cutlass.select_(score > 0, dscores[half] * weight, Float32(0))
            for half in range(ROW_HALVES):
                place = SHAPE.place(half, column, 0)
                self.words[2 * column + half] = pack_pair(self.scores[place], self.scores[place + 1], BFloat16)

    def store_gradients(self) -> None:
        """Write the warp's rows of G^T to shared memory."""
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        for pair in range(INDEX_HEADS // M):
            target = chunk_address(self.memory["gradients"].toint(), warp * M + lane % M, 2 * pair + lane // M)
            words = [self.words[4 * pair + i] for i in range(4)]
            primitives.stmatrix(smem_pointer(target).raw_ptr(), words, primitives.MMALayout.ROW)

    def row_box(self, box: int) -> cute.Tensor:
        """Return 64 columns of the rows of the warp's keys."""
        sums = cute.make_rmem_tensor(cute.make_layout(BOX_SUMS), Float32)
        sums.fill(0.0)
        for step in range(INDEX_HEADS // K):
            a = [self.words[4 * step + i] for i in range(4)]
            add_columns(sums, 0, a, self.queries(box), step * K)
        return sums

    def add_dq(self, keys: list[Int32]) -> None:
        """Add G K of a tile to dQ of the warp's heads. keys: the addresses of its boxes."""
        gradients, warp = self.memory["gradients"].toint(), cute.arch.warp_idx()
        for step in range(TILE_KEYS // K):
            a = load_wide(gradients, Int32(step * K), warp * 2, transposed=True)
            for box, address in enumerate(keys):
                add_columns(self.dq, box * BOX_SUMS, a, address, step * K)


def add_columns(total: cute.Tensor, first: int, a: list[Int32], box: Int32, row: int) -> None:
    """Add A times 16 rows of a box to 64 columns of sums."""
    for pair in range(BOX_COLUMNS // M):
        b = load_tall(box, Int32(row), Int32(2 * pair), transposed=True)
        for half in range(2):
            multiply(total, first + (2 * pair + half) * SUMS, a, b[2 * half : 2 * half + 2])


class IndexerBackward(WarpKernel):
    """The kernel."""

    launch = WarpLaunch("indexer_backward", "backward", IndexerBackwardArguments, THREADS)

    @cute.kernel
    def kernel(self, args: IndexerBackwardArguments):
        """Compute the gradients of one token."""
        place, _, _ = cute.arch.block_idx()
        memory = SMEM.allocate()
        operands = chosen_operands(args)
        token = args.first_token + place
        # The next kernel may be launched now: one that reads the results waits for this grid to end.
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        indices = operands.index_list(token)
        ring = KeyRing.create(SHAPE, indices, memory["ring"])
        load_queries(operands, SHAPE, memory["queries"], token)
        self.load_weights(operands, memory["terms"], token)
        ring.begin()
        state = BackwardTile.create(memory)
        dscores, rows = args.dscores + Int64(token) * args.topk, args.rows + Int64(place) * args.topk * INDEX_COLUMNS
        for tile in cutlass.range(tiles_of(indices.count), unroll=1):
            slots = [tile * TILE_KEYS + SHAPE.own_key(half) for half in range(ROW_HALVES)]
            own = [self.gradient(dscores, indices, slot) for slot in slots]
            ring.take(tile, 0)
            state.scores.fill(0.0)
            for box in cutlass.range_constexpr(SHAPE.boxes):
                add_scores(SHAPE, state.scores, ring.box(tile, box), state.queries(box))
            state.make_gradients([gradient for gradient, _ in own])
            state.store_gradients()
            for box in cutlass.range_constexpr(SHAPE.boxes):
                self.write_rows(rows + box * BOX_COLUMNS, state.row_box(box), slots, [present for _, present in own])
            cute.arch.sync_threads()  # G is there
            state.add_dq([ring.box(tile, box) for box in range(SHAPE.boxes)])
        ring.end()
        self.write_dq(args, token, state.dq)
        self.write_dweights(args, token, state.dweights, memory["dweights"])

    @cute.jit
    def load_weights(self, operands: SparsePrefillOperands, terms: cute.Pointer, token: Int32):
        """Write the weights to shared memory, 0 for heads that do not exist."""
        head, _, _ = cute.arch.thread_idx()
        weight = Float32(0)
        if head < operands.rows():
            weight = operands.element("terms", token, head).load()
        if head < INDEX_HEADS:
            (terms + head).store(weight)

    @cute.jit
    def gradient(self, dscores: cute.Pointer, indices: SparsePrefillIndices, slot: Int32) -> tuple[Float32, Boolean]:
        """Return the gradient of a slot's score, 0 if it names no key, and whether it does."""
        present = indices.look_up(slot) != NO_ROW
        gradient = Float32(0)
        if present:
            gradient = (dscores + slot).load()
        return gradient, present

    @cute.jit
    def write_rows(self, rows: cute.Pointer, sums: cute.Tensor, slots: list, present: list):
        """Write 64 columns of the rows of the lane's keys, of those that are there."""
        thread, _, _ = cute.arch.thread_idx()
        for half in cutlass.range_constexpr(ROW_HALVES):
            words = gather_runs(row_words(sums, half), thread)
            if present[half]:
                store_row_words(rows + Int64(slots[half]) * INDEX_COLUMNS, words, thread, True)

    @cute.jit
    def write_dq(self, args: IndexerBackwardArguments, token: Int32, dq: cute.Tensor):
        """Write the rows of dq of the warp's heads that exist."""
        thread, _, _ = cute.arch.thread_idx()
        for half in cutlass.range_constexpr(ROW_HALVES):
            head = SHAPE.own_key(half)  # a warp has as many heads as keys of a tile
            words = gather_runs(row_words(dq, half), thread)
            if head < args.h_q:
                store_row_words(args.dq + (Int64(token) * args.h_q + head) * INDEX_COLUMNS, words, thread, True)

    @cute.jit
    def write_dweights(self, args: IndexerBackwardArguments, token: Int32, own: cute.Tensor, memory: cute.Pointer):
        """Add the lanes' sums of dw, then the warps', and write them."""
        thread, _, _ = cute.arch.thread_idx()
        for column in cutlass.range_constexpr(COLUMNS):
            for i in cutlass.range_constexpr(2):
                total = own[2 * column + i]
                for lane in (4, 8, 16):
                    total = total + cute.arch.shuffle_sync_bfly(total, lane)
                if thread % 32 < 4:
                    (memory + (thread // 32 * INDEX_HEADS + SHAPE.own_head(column) + i)).store(total)
        cute.arch.sync_threads()
        if thread < args.h_q:
            total = (memory + thread).load()
            for warp in cutlass.range_constexpr(1, WARPS):
                total = total + (memory + (warp * INDEX_HEADS + thread)).load()
            (args.dweights + (Int64(token) * args.h_q + thread)).store(total)


def row_words(sums: cute.Tensor, half: int) -> list[Int32]:
    """Round one of a lane's two rows of sums to pairs of bf16."""
    return [pack_pair(sums[i], sums[i + 1], BFloat16) for i in range(2 * half, cute.size(sums), SUMS)]


def build(config: IndexerBackwardConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    scores = INDEX_COLUMNS // K * (SHAPE.sums // SUMS)
    rows = INDEX_HEADS // K * (INDEX_COLUMNS // N)
    dq = TILE_KEYS // K * (INDEX_COLUMNS // N)
    elements = {**ELEMENTS, "dscores": Float32, "dq": BFloat16, "dweights": Float32, "rows": BFloat16}
    return IndexerBackward(config, arch).definition(elements, {"HMMA": scores + rows + dq}, SMEM.nbytes)
