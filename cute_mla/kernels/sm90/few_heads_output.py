"""The output role of the SM90 kernels with keys on M: Q to shared memory, O^T += V^T P^T, rescale, epilogue.

One warpgroup, with 64 accumulators a thread. V is the converted tile as it lies, read MN-major. O^T has rows in neighbouring registers and
columns in lanes, so O goes to gmem through shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ...spec.mla import D_LATENT, ELEMENT_BYTES
from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import BOX_COLUMNS, LatentOperands, WorkTile
from ..attention.softmax import LN2, RowScale, shift_of
from ..primitives.arithmetic import pack_pair, pin_register
from ..primitives.pipeline import PipelineState
from ..primitives.rows import aligned, store_word
from ..primitives.wgmma import K_STEP, flat, half
from .cta import STAGE_COLUMNS, WARPGROUP, WARPS_PER_GROUP
from .few_heads_cta import (
    BOXES,
    CONVERTERS,
    HEADS,
    OUT_ROW,
    OUTPUT_BARRIER,
    TILE_STAGES,
    FewHeadsSmem,
    FewHeadsThread,
    head_number,
    head_of,
    load_heads,
)
from .rows import CHUNK, copy_chunk

STAGE_REGISTERS = STAGE_COLUMNS // 8  # of a thread, for the columns of a stage
BOX_REGISTERS = BOX_COLUMNS // 8
QUERY_LANES = 8  # threads of a row of Q
WORD_BYTES = 4


def load_queries(operands: LatentOperands, smem: FewHeadsSmem, thread: FewHeadsThread, req: Int32, work_tile: Int32, boxes: int) -> None:
    """Load Q of a work tile, rows past the last one as zeros. Signal q_ready. work_tile: its number in the CTA. boxes: of 64 columns.

    Word 8 q + c of 64 columns goes to place 4 c + q.
    """
    number = pin_register(thread.warp * 32 + thread.lane)  # lest places live through the tiles
    row, c = number // QUERY_LANES, number % QUERY_LANES
    stored = operands.row_range(req)
    source = stored.q_row(stored.nearest(row)).toint() + c * WORD_BYTES
    tile = smem.sQ.iterator.toint() + (work_tile & 1) * (boxes * HEADS * BOX_COLUMNS * ELEMENT_BYTES)
    target = tile + row * (BOX_COLUMNS * ELEMENT_BYTES) + (c ^ row % 8) * CHUNK
    for box in range(boxes):
        for q in range(4):
            place = target + box * (HEADS * BOX_COLUMNS * ELEMENT_BYTES) + q * WORD_BYTES
            copy_chunk(place, source + (box * BOX_COLUMNS * ELEMENT_BYTES + q * (QUERY_LANES * WORD_BYTES)), stored.holds(row), WORD_BYTES)
    cute.arch.cp_async_commit_group()
    cute.arch.cp_async_wait_group(0)
    cute.arch.fence_proxy("async.shared", space="cta")
    smem.q_ready.producer_commit(work_tile)


@dataclass(frozen=True)
class FewHeadsOutput:
    """O^T of one thread, as stages of 128 columns. p_groups: Ps of a tile, one for equally many stages each."""

    smem: FewHeadsSmem
    thread: FewHeadsThread
    mma: cute.TiledMma
    tV: cute.Tensor
    tP: cute.Tensor
    accumulators: tuple[cute.Tensor, ...]
    p_groups: int

    @staticmethod
    def create(smem: FewHeadsSmem, thread: FewHeadsThread, p_groups: int) -> FewHeadsOutput:
        """Partition the tiles for one thread."""
        dtype, source = smem.sV.element_type, warpgroup.OperandSource.SMEM
        op = warpgroup.MmaF16BF16Op(dtype, Float32, (64, HEADS, K_STEP), source, OperandMajorMode.MN, OperandMajorMode.MN)
        mma = cute.make_tiled_mma(op)
        slice_ = mma.get_slice(thread.warp * 32 + thread.lane)
        stages = cute.size(smem.sV, mode=[2])
        transposed = cute.make_layout((STAGE_COLUMNS, TILE_KEYS, stages), stride=(TILE_KEYS, 1, TILE_KEYS * STAGE_COLUMNS))
        shape = slice_.partition_shape_C((STAGE_COLUMNS, HEADS))
        return FewHeadsOutput(
            smem=smem,
            thread=thread,
            mma=mma,
            tV=slice_.make_fragment_A(slice_.partition_A(cute.composition(smem.sV, transposed))),
            tP=slice_.make_fragment_B(slice_.partition_B(smem.sP)),
            accumulators=tuple(cute.make_rmem_tensor(shape, Float32) for _ in range(TILE_STAGES)),
            p_groups=p_groups,
        )

    @cute.jit
    def add_tile(self, group: Int32, turn: Int32, begun: Boolean):
        """Add V^T P^T of a converter's tile to O^T; O^T = V^T P^T unless it has begun. Wait p_ready. Signal v_free. turn: as in v_state."""
        smem = self.smem
        smem.p_ready.consumer_wait(PipelineState(group, turn))
        self.rescale(group, begun)
        warpgroup.fence()
        for stage in cutlass.range_constexpr(TILE_STAGES):
            v_stage = smem.v_state(group, turn, stage).stage
            p_number = group * self.p_groups + stage * self.p_groups // TILE_STAGES
            for step in cutlass.range_constexpr(TILE_KEYS // K_STEP):
                self.mma.set(warpgroup.Field.ACCUMULATE, begun if step == 0 else True)
                accumulator = self.accumulators[stage]
                cute.gemm(self.mma, accumulator, self.tV[None, None, step, v_stage], self.tP[None, None, step, p_number], accumulator)
            warpgroup.commit_group()
            # few products at a time, since those of the converters queue behind them
            warpgroup.wait_group(0)
            smem.v_free.consumer_release(smem.v_state(group, turn, stage))

    @cute.jit
    def rescale(self, group: Int32, begun: Boolean):
        """Multiply O^T, if it has begun, by the factors of a converter's tile."""
        alpha = load_heads(self.smem.table(self.smem.sAlpha, group, self.thread))
        moved = (alpha[0] != 1.0) | (alpha[1] != 1.0) | (alpha[2] != 1.0) | (alpha[3] != 1.0)
        if cute.arch.vote_any_sync(begun & moved):
            for accumulator in self.accumulators:
                rO = flat(accumulator)
                for i in cutlass.range_constexpr(STAGE_REGISTERS):
                    rO[i] = rO[i] * alpha[head_of(i % BOX_REGISTERS)]

    @cute.jit
    def clear_weightless(self, weights: list[Float32]):
        """Make rows of weight 0 finite: they attend to nothing, and are 0 whatever was accumulated, if anything was."""
        if cute.arch.vote_any_sync((weights[0] == 0.0) | (weights[1] == 0.0) | (weights[2] == 0.0) | (weights[3] == 0.0)):
            for accumulator in self.accumulators:
                rO = flat(accumulator)
                for i in cutlass.range_constexpr(STAGE_REGISTERS):
                    rO[i] = cutlass.select_(weights[head_of(i % BOX_REGISTERS)] == 0.0, Float32(0), rO[i])

    def scatter(self, weights: list[Float32]) -> None:
        """Write O, normalised, to shared memory by places of columns."""
        place = pin_register(self.smem.sOut.toint() + (head_number(self.thread, 0) * OUT_ROW + self.thread.key) * WORD_BYTES)
        for stage, accumulator in enumerate(self.accumulators):
            rO = flat(accumulator)
            for i in range(STAGE_REGISTERS):
                box, register = divmod(i, BOX_REGISTERS)
                head = head_of(register)
                column = (2 * stage + box) * BOX_COLUMNS + 8 * half(register)
                offset = ((head >> 1) * 8 + (head & 1)) * OUT_ROW + column
                target = cute.make_ptr(Float32, place + offset * WORD_BYTES, cute.AddressSpace.smem, assumed_align=WORD_BYTES)
                target.store(rO[i] * weights[head])


@dataclass(frozen=True)
class FewHeadsOutputRole:
    """One warpgroup. dtype: of out. q_boxes: of 64 columns. p_groups: as in FewHeadsOutput."""

    row_scale: RowScale
    dtype: type[cutlass.Numeric]
    q_boxes: int
    p_groups: int

    @cute.jit
    def run(self, operands: LatentOperands, smem: FewHeadsSmem, ahead: Callable[[Any, Int32, Int32, Int32], None]):
        """Wait p_ready, sums_ready. Signal q_ready, v_free. Write lse, and out or out_accum.

        ahead(operands, request, tile, thread): asks L2 for what the first keys wait for, ahead of Q.
        """
        schedule, thread = operands.schedule, FewHeadsThread.create()
        req, begin_tile = schedule.first_work_tile()
        turns, done = Int32(0), Int32(0)  # turns: a bit for each converter
        output = FewHeadsOutput.create(smem, thread, self.p_groups)
        last = schedule.last_request()
        if req <= last:
            ahead(operands, req, begin_tile, thread.warp * 32 + thread.lane)
            load_queries(operands, smem, thread, req, done, self.q_boxes)
        while req <= last:
            tile_range = schedule.tile_range(req, begin_tile)
            work_tile = schedule.work_tile_of(tile_range, req, begin_tile)
            if work_tile.next_req <= last:
                load_queries(operands, smem, thread, work_tile.next_req, done + 1, self.q_boxes)
            if thread.warp == 0:
                self.find_places(operands, smem, thread.lane % HEADS, req, work_tile, done)
            for t in cutlass.range(tile_range.tiles, unroll=1):
                group = t % CONVERTERS
                output.add_tile(group, (turns >> group) & 1, t > 0)
                turns = turns ^ (1 << group)
            smem.sums_ready.consumer_wait(done)
            if thread.warp == 0:
                self.finish_rows(operands, smem, thread.lane % HEADS, work_tile, done)
            # behind it, all have read O of the work tile before, too
            cute.arch.barrier(barrier_id=OUTPUT_BARRIER, number_of_threads=WARPGROUP)
            weights = load_heads(smem.table(smem.sWeights, Int32(0), thread))
            output.clear_weightless(weights)
            output.scatter(weights)
            cute.arch.barrier(barrier_id=OUTPUT_BARRIER, number_of_threads=WARPGROUP)
            self.store_rows(smem, thread, work_tile, done)
            done = done + 1
            req, begin_tile = work_tile.next_req, work_tile.next_tile

    @cute.jit
    def find_places(self, operands: LatentOperands, smem: FewHeadsSmem, row: Int32, req: Int32, work_tile: WorkTile, done: Int32):
        """Write the addresses of a row of O and of its lse, 0 for a row that there is not. One warp, ahead of the tiles."""
        stored = operands.row_range(req)
        out, lse = Int64(0), Int64(0)
        if stored.holds(row):
            if work_tile.direct:
                out, lse = stored.out_row(row).toint(), stored.lse_of(row).toint()
            else:
                accum = operands.accum_row(work_tile, row)
                out, lse = (operands.out_accum + accum * D_LATENT).toint(), (operands.lse_accum + accum).toint()
        places = self.places(smem, done) + row
        places.store(out)
        (places + HEADS).store(lse)

    def places(self, smem: FewHeadsSmem, done: Int32) -> cute.Pointer:
        """Return the addresses of rows of O of a work tile; those of lse follow. done: number of the work tile in the CTA."""
        return smem.sPlaces + (done & 1) * (2 * HEADS)

    @cute.jit
    def finish_rows(self, operands: LatentOperands, smem: FewHeadsSmem, row: Int32, work_tile: WorkTile, done: Int32):
        """Write the factor of a row of O, and lse: natural log if the request is not cut, else base 2. One warp, a row a lane."""
        first = (done & 1) * CONVERTERS
        place = (self.places(smem, done) + (HEADS + row)).load()
        seen = [(smem.sSeen + ((first + group) * HEADS + row)).load() for group in range(CONVERTERS)]
        reference = cute.arch.fmax(*seen)
        total, shift = Float32(0), shift_of(reference)
        for group in cutlass.range_constexpr(CONVERTERS):
            sums = smem.sSums + ((first + group) * (WARPS_PER_GROUP * HEADS) + row)
            warps = [(sums + warp * HEADS).load() for warp in range(WARPS_PER_GROUP)]
            total = total + ((warps[0] + warps[1]) + (warps[2] + warps[3])) * cute.math.exp2(seen[group] - shift, fastmath=True)
        empty = total == 0.0
        weight = self.row_scale.weight(operands, lambda: work_tile, row, total, reference)
        (smem.sWeights + row).store(cutlass.select_(empty, Float32(0), weight))
        if place != 0:
            lse = reference + cute.math.log2(total, fastmath=True)
            whole = cutlass.select_(empty, operands.empty_lse, lse * LN2)
            cut = cutlass.select_(empty, -Float32.inf, lse)
            target = cute.make_ptr(Float32, place, cute.AddressSpace.gmem, assumed_align=WORD_BYTES)
            target.store(cutlass.select_(work_tile.direct, whole, cut))

    @cute.jit
    def store_rows(self, smem: FewHeadsSmem, thread: FewHeadsThread, work_tile: WorkTile, done: Int32):
        """Store rows of O: a warp takes every fourth one, a lane two neighbouring columns of each box of 64."""
        q, c = thread.lane % 4, thread.lane // 4 % 4 + 4 * (thread.lane // 16)
        column, place = 16 * q + 2 * c, 8 * c + 2 * q
        targets = [(self.places(smem, done) + (thread.warp + i * WARPS_PER_GROUP)).load() for i in range(HEADS // WARPS_PER_GROUP)]
        source = smem.sOut + (thread.warp * OUT_ROW + place)
        if work_tile.direct:
            for i, target in enumerate(targets):
                words = [pack_pair(pair[0], pair[1], self.dtype) for pair in self.load_row(source + i * (WARPS_PER_GROUP * OUT_ROW))]
                if target != 0:
                    row = cute.make_ptr(self.dtype, target, cute.AddressSpace.gmem, assumed_align=WORD_BYTES) + column
                    for box, word in enumerate(words):
                        store_word(row + box * BOX_COLUMNS, word)
        else:
            for i, target in enumerate(targets):
                pairs = self.load_row(source + i * (WARPS_PER_GROUP * OUT_ROW))
                if target != 0:
                    row = cute.make_ptr(Float32, target, cute.AddressSpace.gmem, assumed_align=8) + column
                    for box, pair in enumerate(pairs):
                        cute.autovec_copy(pair, cute.make_tensor(aligned(row + box * BOX_COLUMNS, 8), cute.make_layout(2)))

    def load_row(self, source: cute.Pointer) -> list[cute.Tensor]:
        """Load two neighbouring columns of each box of a row of O from shared memory."""
        pairs = []
        for box in range(BOXES):
            pair = cute.make_rmem_tensor(cute.make_layout(2), Float32)
            cute.autovec_copy(cute.make_tensor(aligned(source + box * BOX_COLUMNS, 8), cute.make_layout(2)), pair)
            pairs.append(pair)
        return pairs
