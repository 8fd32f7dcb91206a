"""The transpose role of the SM90 kernel with e4m3 operands: V^T, of one byte an element and 64 keys a row, in shared memory.

e4m3 products read both operands along the contracted dimension only, so V has to be transposed.

A tile: rows of 64 bytes, 64-byte swizzle. A row's 16 bytes from 16 m on are the keys of a group, in an order of their own:

    byte 4 q + j of a group is key 2 q + j (j < 2) or 8 + 2 q + j - 2 (j >= 2),  q, j < 4

Both operands have it, so their product is that of the natural order. For the probabilities it is the order in which an
accumulator fragment holds them: a thread packs its own four and stores. For the values it is what a transposing matrix load
of pairs of bytes gives: of two 8 x 8 matrices of pairs (8 keys x 16 columns each), a lane has the same column pair of keys 2 q
and 2 q + 1 of each, and two byte permutations part the columns. The even ones of a group of 16 become its first 8 rows, the odd
ones its last 8, so that a matrix store writes 8 neighbouring rows, which lie in different banks.
"""

from __future__ import annotations

import cutlass
from cutlass import Int32, cute
from cutlass.experimental import primitives

from ...spec.split_plan import TILE_KEYS
from ..primitives.copies import BOX_ROW_BYTES, CHUNK, MATRIX_ROWS, ROW_BYTES, load_groups, smem_pointer, store_groups, writer_address
from ..sm90.cta import OUTPUT_BARRIER, WARPGROUP
from .operands import DenseDecodeOperands
from .sm90_fp8_gemm import BOX_BYTES, CHUNKS, KEY_GROUPS, LATENT_BOXES, ONES_ROWS, VALUE_BYTES, VALUE_STAGES, DenseDecodeSm90Fp8Smem

TRANSPOSERS = 3  # warps; a chunk each, by turns
BOX_GROUPS = BOX_ROW_BYTES // CHUNK  # of columns
GROUPS_AT_ONCE = 4  # whose words a warp holds: 8 loads before the first store
ALL_BYTES = -1
ONES = 0x38383838  # four e4m3 numbers
EVEN_BYTES, ODD_BYTES = 0x6420, 0x7531  # of two words, the first one's first


def part_columns(words: list[Int32]) -> list[Int32]:
    """Turn words that load_groups returns, of 32 keys and 16 columns, into words that store_groups takes."""
    parted = []
    for first, second in ((words[0], words[1]), (words[2], words[3])):
        for selector in (EVEN_BYTES, ODD_BYTES):
            parted.append(primitives.prmt(first, selector, primitives.PermuteMode.DEFAULT, hi=second))
    return parted


def key_mask(remaining: Int32, group: int, lane: Int32) -> Int32:
    """Return the bytes of a lane's word of a group that are keys before `remaining`, as a mask."""
    mask = Int32(0)
    for byte in range(4):
        key = CHUNK * group + 2 * (lane % 4) + byte % 2 + MATRIX_ROWS * (byte // 2)
        bits = 0xFF << 8 * byte
        mask = mask | cutlass.select_(key < remaining, Int32(bits - (1 << 32) if byte == 3 else bits), Int32(0))
    return mask


class DenseDecodeSm90TransposeRole:
    """Three warps, by turns: 128 columns of V of a tile, from shared memory to shared memory. cluster: CTAs that share the keys."""

    def __init__(self, cluster: int) -> None:
        self.cluster = cluster

    @cute.jit
    def run(self, operands: DenseDecodeOperands, smem: DenseDecodeSm90Fp8Smem, rank: Int32):
        """Wait kv_ready, values_ready, values_free. Signal values_ready, keys_free. One warp; rank: which of the transposing warps."""
        schedule = operands.schedule
        req, begin_tile = schedule.first_work_tile()
        last = schedule.last_request()
        tile = Int32(0)
        while req <= last:
            tile_range = schedule.tile_range(req, begin_tile)
            for t in cutlass.range(tile_range.tiles, unroll=1):
                # chunks are counted through all tiles; a tile's first one is number 4 tile, which is tile modulo 3
                first = (rank + (TRANSPOSERS - 1) * (tile + t)) % TRANSPOSERS
                for chunk in cutlass.range(first, LATENT_BOXES, TRANSPOSERS, unroll=1):
                    self.transpose_chunk(smem, tile + t, chunk, tile_range.keys - t * TILE_KEYS)
            tile = tile + tile_range.tiles
            work_tile = schedule.work_tile_of(tile_range, req, begin_tile)
            req, begin_tile = work_tile.next_req, work_tile.next_tile

    @cute.jit
    def transpose_chunk(self, smem: DenseDecodeSm90Fp8Smem, tile: Int32, chunk: Int32, remaining: Int32):
        """Transpose 128 columns of V of a tile. Keys past the end become zeros: P is 0 there, but 0 times NaN is NaN."""
        smem.kv_ready.box(chunk).consumer_wait(tile)
        # another warp wrote the stage's last tile: until it has, the stage may look as free as it was for that one
        smem.values_ready.box(chunk).producer_acquire(tile)
        smem.values_free.box(chunk).producer_acquire(tile)
        source = smem.sKv.iterator.toint() + smem.kv_ready.stage(chunk, tile) * BOX_BYTES
        target = smem.sVt.iterator.toint() + smem.values_ready.stage(chunk, tile) * VALUE_BYTES
        if remaining < TILE_KEYS:
            transpose_box(source, target, remaining, True)
        else:
            transpose_box(source, target, remaining, False)
        cute.arch.fence_proxy("async.shared", space="cta")
        smem.values_ready.box(chunk).producer_commit(tile)
        if cutlass.const_expr(self.cluster > 1):
            # a box of the peer's: its load role has found the stage free, so this arrival cannot count for the tile before
            smem.kv_ready.box(chunk ^ 1).consumer_wait(tile)
        smem.keys_free.consumer_release_in_cluster(tile, self.cluster)


@cute.jit
def transpose_box(source: Int32, target: Int32, remaining: Int32, masked: cutlass.Constexpr[bool]):
    """Transpose a box of 64 keys x 128 columns of bytes to 128 rows of a tile. One warp. Keys from `remaining` on become 0 if masked.

    source, target: addresses, multiples of 1024 bytes.
    """
    lane = cute.arch.lane_idx()
    row = source + lane * BOX_ROW_BYTES + lane % MATRIX_ROWS * CHUNK
    place = writer_address(target, lane)
    masks = [key_mask(remaining, group, lane) if masked else Int32(ALL_BYTES) for group in range(KEY_GROUPS)]
    for step in cutlass.range(BOX_GROUPS // GROUPS_AT_ONCE, unroll=1):
        units = [(group, pair) for group in range(GROUPS_AT_ONCE) for pair in range(KEY_GROUPS // 2)]
        first = row ^ (step * (GROUPS_AT_ONCE * CHUNK))
        loaded = [load_groups((first ^ (group * CHUNK)) + pair * (TILE_KEYS // 2 * BOX_ROW_BYTES)) for group, pair in units]
        for unit in cutlass.range_constexpr(len(units)):
            group, pair = units[unit]
            words = part_columns(loaded[unit])
            if cutlass.const_expr(masked):
                words = [word & masks[2 * pair + j // 2] for j, word in enumerate(words)]
            store_groups(place + step * (GROUPS_AT_ONCE * CHUNK * ROW_BYTES), group * CHUNK, pair, words)


@cute.jit
def write_ones(smem: DenseDecodeSm90Fp8Smem, thread: Int32, side: Int32):
    """Write the rows of ones of a side's stages of V^T, once."""
    stages = CHUNKS * VALUE_STAGES
    words = ONES_ROWS * TILE_KEYS // 4
    ones = cute.make_rmem_tensor(cute.make_layout(stages * words // WARPGROUP), Int32)
    ones.fill(ONES)
    threads = WARPGROUP // stages
    stage = smem.values_ready.stage(side * CHUNKS, Int32(0)) + thread // threads
    target = smem.sVt.iterator.toint() + stage * VALUE_BYTES + (BOX_BYTES + thread % threads * (4 * cute.size(ones)))
    cute.autovec_copy(ones, cute.make_tensor(cute.recast_ptr(smem_pointer(target), dtype=Int32), ones.layout))
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.barrier(barrier_id=OUTPUT_BARRIER + side, number_of_threads=WARPGROUP)
