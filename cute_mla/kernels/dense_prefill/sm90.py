"""Dense prefill on Hopper.

For every sequence and query head, over the keys j that row r sees:

    s_rj = <q_r, k_j> over 192 or 128 columns     p = softmax(scale * s)     out_r = sum_j p_rj v_j     (128 columns)

A CTA takes one work item after the other: 128 query rows of a head, against tiles of 128 keys, the last tile first, so that
the tiles that need a mask come before those that do not.

Roles (384 threads):
  keys     warp 0: TMA of K
  values   warp 1: TMA of V; zeroes what lies behind the last key
  queries  warp 2: TMA of Q (not in the `elements` variants, where the warpgroups load their rows themselves)
  attend   warpgroups 1, 2: 64 rows each: S = Q K^T, softmax, O += P V with P and O in registers, out, lse

Shared memory: Q (128 rows), and as many tiles of K and of V as fit: 2 each with 192 columns, 3 with 128.

Pipelines (producer -> consumer; arrivals per phase):
  key_ready[n]     keys -> attend      1 and the bytes of a tile
  key_free[n]      attend -> keys      8: the warps of both warpgroups
  value_ready[n]   values -> attend    1 and the bytes of a tile; without them for a tile that ends behind the last key
  value_free[n]    attend -> values    8
  value_landed     values -> itself    1 and the bytes of such a tile, which it clears the rest of before it hands it on
  query_ready[2]   queries -> attend   1 and the bytes of a warpgroup's rows, once per item
  query_free[2]    attend -> queries   4: the last S of the item is there
  turn (bar.sync)  attend -> attend    the two warpgroups issue their products in turn

The trick: nothing that is computed waits for the tensor cores, or they for it. A warpgroup issues S of the next tile together
with P V of this one, and is at its softmax while P V goes on; the two warpgroups issue in turn, so that each has the tensor
cores for itself while the other one is at its softmax. An item ends in the middle of that: P V of its last tile goes with the
first S of the next item, whose Q has come since the last S, and O is written behind that S's softmax. README.md has the clocks.
"""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup

from ...manifest import NamedBarrier, Role
from ...spec.arch import SM90, Arch
from ...spec.dense_prefill import BOX_COLUMNS, D_V, TILE_ROWS, DensePrefillConfig
from ...spec.mla import ELEMENT_BYTES
from ..attention.lengths import larger, smaller
from ..attention.softmax import LN2, OnlineSoftmax, mask_keys
from ..definition import KernelDefinition
from ..primitives.fragments import ROWS_PER_THREAD, fragment_row, gather_eights, load_pair, store_pair, store_words
from ..primitives.pipeline import Ring, arrive, barrier_table
from ..primitives.tma import prefetch_map
from ..sm90.roles import set_registers
from .entry import DensePrefill
from .operands import Item, Operands
from .sm90_config import (
    COMPUTE_REGISTERS,
    GROUP_ROWS,
    GROUPS,
    KEY_WARP,
    LOAD_REGISTERS,
    QUERY_WARP,
    STAGE_BARRIER,
    THREADS,
    TILE_ALIGNMENT,
    TILE_KEYS,
    TURN_BARRIER,
    VALUE_WARP,
    WARPGROUP,
    WARPS_PER_GROUP,
    Geometry,
    Pipes,
    Tiles,
    key_tiles,
)
from .sm90_gemm import Products, QueryStage
from .sm90_load import LoadRoles


class DensePrefillSm90(DensePrefill):
    """One variant of the kernel."""

    threads = THREADS
    rows_each = TILE_ROWS[SM90.name]

    def __init__(self, config: DensePrefillConfig, arch: Arch) -> None:
        super().__init__(config, arch)
        self.geometry = Geometry(config.d_qk)
        self.by_tma = config.access_bytes > ELEMENT_BYTES  # Q; else by the warpgroups that use it
        self.loads = LoadRoles(self.geometry, self.by_tma)

    @cute.jit
    def run(self, operands: Operands):
        tiles, pipes = self.carve_smem()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                self.initialise(pipes)
                for tensor_map in (operands.q_map, operands.k_map, operands.v_map):
                    prefetch_map(tensor_map)
        cute.arch.sync_threads()
        # Q, K, V and the lengths may come from the kernel before
        cute.arch.griddepcontrol_wait()

        group = warp // WARPS_PER_GROUP
        if group == 0:
            set_registers(LOAD_REGISTERS)
            if warp == KEY_WARP:
                self.loads.load_keys(operands, tiles, pipes)
            if warp == VALUE_WARP:
                self.loads.load_values(operands, tiles, pipes)
            if warp == QUERY_WARP:
                self.loads.load_queries(operands, tiles, pipes)
        else:
            set_registers(COMPUTE_REGISTERS)
            self.attend(operands, tiles, pipes, cute.arch.thread_idx()[0] % WARPGROUP, group - 1)

    def tile_layout(self, rows: int, columns: int, slots: int) -> cute.ComposedLayout:
        """rows x columns x slots in boxes of 64 columns, each `rows` rows of 128 bytes, 128-byte swizzle."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, self.dtype)
        return cute.tile_to_shape(atom, (rows, columns, slots), (0, 1, 2))

    def carve_smem(self) -> tuple[Tiles, Pipes]:
        """Places tiles and barriers, in the order of sm90_config."""
        geometry = self.geometry
        smem = cutlass.memory.SmemAllocator()
        shapes = (
            (GROUP_ROWS, geometry.d_qk, GROUPS),
            (TILE_KEYS, geometry.d_qk, geometry.slots),
            (TILE_KEYS, D_V, geometry.slots),
        )
        layouts = [self.tile_layout(*shape) for shape in shapes]
        tensors = [smem.allocate_tensor(self.dtype, layout.outer, TILE_ALIGNMENT, layout.inner) for layout in layouts]
        rings = {name: Ring(smem.allocate_array(Int64, slots), slots) for name, slots in geometry.barriers}
        return Tiles(*tensors), Pipes(**rings)

    def initialise(self, pipes: Pipes) -> None:
        """Sets the arrivals of every barrier."""
        for ready in (pipes.key_ready, pipes.value_ready, pipes.value_landed, pipes.query_ready):
            ready.initialise(1)
        for free in (pipes.key_free, pipes.value_free):
            free.initialise(GROUPS * WARPS_PER_GROUP)
        pipes.query_free.initialise(WARPS_PER_GROUP)
        cute.arch.mbarrier_init_fence()

    @cute.jit
    def attend(self, operands: Operands, tiles: Tiles, pipes: Pipes, thread: Int32, group: Int32):
        """Waits key_ready, value_ready, query_ready. Signals key_free, value_free, query_free. Writes out and lse.

        P V of an item's last tile goes with the first S of the next item; the very first S goes with a P of zeros."""
        products = Products.create(self.dtype, tiles, thread, group)
        products.clear()
        softmax, ended = (OnlineSoftmax.create(operands.scale_log2) for _ in range(2))
        factors = [Float32(1), Float32(1)]
        if group != 0:
            give_turn(group)
        use, done, pending = Int32(0), Int32(0), Boolean(False)
        before = operands.items.take(Int32(0))
        for turn in cutlass.range(operands.items.rounds(), unroll=1):
            item = operands.items.take(turn)
            if item.rows > 0:
                if item.keys > 0:
                    self.take_queries(operands, tiles, pipes, item, products, done)
                    self.settle_output(pipes, products, factors, use - 2, pending)
                    self.start_products(pipes, products, use, larger(use - 1, Int32(0)))
                    self.free_operands(pipes, group, use, done, key_tiles(item.keys) == 1)
                    start_anew(softmax, ended)
                    factors = self.weigh_tile(item, products, softmax, key_tiles(item.keys) - 1)
                    # in both branches: in front of them, ptxas would move it in front of the softmax
                    if done > 0:
                        warpgroup.wait_group(0)
                        arrive(pipes.value_free.barrier(use - 1))
                        self.finish_rows(operands, before, products, ended)
                    else:
                        warpgroup.wait_group(0)
                    products.clear_output()
                    factors = self.attend_tiles(pipes, item, products, softmax, factors, use, done)
                    use = use + key_tiles(item.keys)
                    done = done + 1
                    pending = key_tiles(item.keys) > 1
                    before = item
                else:
                    self.write_empty_rows(operands, item, products)
        if done > 0:
            self.settle_output(pipes, products, factors, use - 2, pending)
            pipes.value_ready.wait_ready(use - 1)
            warpgroup.fence()
            products.start_output(pipes.value_ready.slot(use - 1))
            warpgroup.wait_group(0)
            self.finish_rows(operands, before, products, softmax)
        if group == 0:
            take_turn(group)  # the one that the other warpgroup has given last

    @cute.jit
    def take_queries(self, operands: Operands, tiles: Tiles, pipes: Pipes, item: Item, products: Products, done: Int32):
        """Returns when the warpgroup's rows of Q are in shared memory. Rows behind the sequence's repeat its last one, or are
        whatever lies there; their results go nowhere."""
        if cutlass.const_expr(self.by_tma):
            pipes.query_ready.wait_ready(done * GROUPS + products.group)
        else:
            stage = QueryStage.create(self.dtype, tiles, products.thread)
            rows = []
            for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
                row = smaller(block_row(products, row_half), item.rows - 1)
                rows.append(operands.q_row(item, row) + 2 * (products.thread % 4))
            for tile in cutlass.range_constexpr(self.config.d_qk // BOX_COLUMNS):
                for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
                    for eight in cutlass.range_constexpr(BOX_COLUMNS // 8):
                        source = rows[row_half] + (tile * BOX_COLUMNS + 8 * eight)
                        stage.words[2 * eight + row_half] = load_pair(source, False)
                stage.store(tile, products.group)
            cute.arch.fence_proxy("async.shared", space="cta")
            cute.arch.barrier(barrier_id=STAGE_BARRIER + products.group, number_of_threads=WARPGROUP)

    @cute.jit
    def attend_tiles(
        self,
        pipes: Pipes,
        item: Item,
        products: Products,
        softmax: OnlineSoftmax,
        factors: list[Float32],
        use: Int32,
        done: Int32,
    ):
        """The tiles of an item behind the first, all but P V of the last one. factors: that O has to be multiplied with in front of
        the next P V; returns those of the last tile."""
        count = key_tiles(item.keys)
        for i in cutlass.range(1, count, unroll=1):
            self.settle_output(pipes, products, factors, use + i - 2, i > 1)
            self.start_products(pipes, products, use + i, use + i - 1)
            self.free_operands(pipes, products.group, use + i, done, i == count - 1)
            factors = self.weigh_tile(item, products, softmax, count - 1 - i)
        return factors

    def weigh_tile(self, item: Item, products: Products, softmax: OnlineSoftmax, tile: Int32) -> list[Float32]:
        """The scores of a tile become probabilities. Returns the factors that this asks of O."""
        self.mask(item, products, tile)
        return softmax.add_tile(products.scores)

    @cute.jit
    def start_products(self, pipes: Pipes, products: Products, key_use: Int32, value_use: Int32):
        """Issues S of one tile, and P V of the one before, in this warpgroup's turn. S is there on return."""
        pipes.key_ready.wait_ready(key_use)
        take_turn(products.group)
        warpgroup.fence()
        products.start_scores(pipes.key_ready.slot(key_use))
        pipes.value_ready.wait_ready(value_use)
        products.start_output(pipes.value_ready.slot(value_use))
        give_turn(products.group)
        warpgroup.wait_group(1)

    @cute.jit
    def settle_output(self, pipes: Pipes, products: Products, factors: list[Float32], use: Int32, pending: Boolean):
        """Makes ready for P V of a tile: O is relative to the maximum over all tiles up to it, and P is rounded. A `pending`
        P V, with the values of `use`, is complete.

        That wait stands here, at the head of the loop, and not behind the softmax that it must not delay: in one block with
        the softmax, ptxas would move it in front."""
        warpgroup.wait_group(0)
        if pending:
            arrive(pipes.value_free.barrier(use))
        if cute.arch.vote_any_sync((factors[0] != 1.0) | (factors[1] != 1.0)):
            products.scale_output(factors)
        products.round_probs()

    @cute.jit
    def free_operands(self, pipes: Pipes, group: Int32, use: Int32, done: Int32, last: Boolean):
        """S is complete: K may go, and Q after the last tile."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(pipes.key_free.barrier(use))
            if last:
                cute.arch.mbarrier_arrive(pipes.query_free.barrier(done * GROUPS + group))

    @cute.jit
    def mask(self, item: Item, products: Products, tile: Int32):
        """Keys past the end, and causally hidden ones."""
        left = item.keys - tile * TILE_KEYS
        seen = item.diagonal + 1 - tile * TILE_KEYS  # by row 0 of the block
        if smaller(left, seen + products.group * GROUP_ROWS) < TILE_KEYS:
            limits = [smaller(left, seen + block_row(products, row_half)) for row_half in range(ROWS_PER_THREAD)]
            mask_keys(products.scores, products.thread, limits)

    @cute.jit
    def finish_rows(self, operands: Operands, item: Item, products: Products, softmax: OnlineSoftmax):
        """Normalises, and writes the rows that the sequence has."""
        for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
            total = softmax.row_sum(row_half)
            empty = total == 0.0
            inverse = cutlass.select_(empty, Float32(0), 1.0 / total)
            lse = (softmax.rMax[row_half] + cute.math.log2(total, fastmath=True)) * LN2
            words = products.row_words(row_half, inverse)
            if cutlass.const_expr(self.by_tma):
                words = [word for i in range(0, len(words), 4) for word in gather_eights(words[i : i + 4], products.thread)]
            self.write_row(operands, item, products, row_half, words, cutlass.select_(empty, operands.empty_lse, lse))

    @cute.jit
    def write_empty_rows(self, operands: Operands, item: Item, products: Products):
        """The rows of a block that no key belongs to."""
        for row_half in cutlass.range_constexpr(ROWS_PER_THREAD):
            words = [Int32(0)] * (D_V // 8)
            self.write_row(operands, item, products, row_half, words, operands.empty_lse)

    @cute.jit
    def write_row(self, operands: Operands, item: Item, products: Products, row_half: int, words: list[Int32], lse: Float32):
        """One of the thread's rows, if the sequence has it."""
        row, thread = block_row(products, row_half), products.thread
        if row < item.rows:
            if thread % 4 == 0:
                operands.lse_of(item, row).store(lse)
            self.store_row(operands.out_row(item, row), words, thread)

    def store_row(self, target: cute.Pointer, words: list[Int32], thread: Int32) -> None:
        """A quad's row of out: a lane has runs of 8 columns, or pairs where rows begin at any element."""
        if self.by_tma:
            for i in range(0, len(words), 4):
                store_words(target + (8 * i + 8 * (thread % 4)), words[i : i + 4])
        else:
            for eight, word in enumerate(words):
                store_pair(target + (8 * eight + 2 * (thread % 4)), word, False)


def start_anew(softmax: OnlineSoftmax, ended: OnlineSoftmax) -> None:
    """Forgets all keys, but for a copy."""
    for row_half in range(ROWS_PER_THREAD):
        ended.rMax[row_half], ended.rSum[row_half] = softmax.rMax[row_half], softmax.rSum[row_half]
    softmax.reset()


def block_row(products: Products, row_half: int) -> Int32:
    """Row of the item's block that one of the thread's fragment rows is."""
    return products.group * GROUP_ROWS + fragment_row(products.thread, row_half)


def take_turn(group: Int32) -> None:
    """Waits until the other warpgroup has issued its products."""
    cute.arch.barrier(barrier_id=TURN_BARRIER + group, number_of_threads=GROUPS * WARPGROUP)


def give_turn(group: Int32) -> None:
    """Lets the other warpgroup issue."""
    cute.arch.barrier_arrive(barrier_id=TURN_BARRIER + 1 - group, number_of_threads=GROUPS * WARPGROUP)


def build(config: DensePrefillConfig, arch: Arch) -> KernelDefinition:
    """The variant, ready to compile."""
    kernel = DensePrefillSm90(config, arch)
    geometry = kernel.geometry
    scores, output = geometry.wgmma_per_tile
    named = [(f"turn_{group}", TURN_BARRIER + group) for group in range(GROUPS)]
    staged = [] if kernel.by_tma else [(f"stage_{group}", STAGE_BARRIER + group) for group in range(GROUPS)]
    return kernel.source(
        smem_bytes=geometry.smem_bytes,
        barriers=barrier_table(geometry.barrier_offset, geometry.barriers),
        named_barriers=tuple(NamedBarrier(name, number) for name, number in named + staged),
        roles=(
            Role("keys", KEY_WARP, 1),
            Role("values", VALUE_WARP, 1),
            Role("queries", QUERY_WARP, 1),
            *(Role(f"attend_{group}", (1 + group) * WARPS_PER_GROUP, WARPS_PER_GROUP) for group in range(GROUPS)),
        ),
        expected={"HGMMA": 2 * scores + 3 * output},  # once for the first tile of an item, once for the others; the very last P V
        overlapped={"MUFU.EX2": 2 * GROUP_ROWS * TILE_KEYS // WARPGROUP},  # P V goes on during both softmaxes
    )
