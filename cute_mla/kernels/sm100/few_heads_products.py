"""The roles query, scores and values of the SM100 kernels with keys on M: Q to shared memory, S^T = K Q^T, O^T += V^T P^T.

A warp each. The two that multiply share the tensor cores in the order of issue. So S^T of the next work tile does not wait for the last P
of this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute

from ...spec.mla import D_LATENT, D_QK
from ...spec.split_plan import TILE_KEYS
from ..primitives import tcgen05
from ..primitives.copies import CHUNK, start_copy
from .config import BOX_BYTES, ROW_BYTES, STEP_BYTES, STEPS_PER_BOX
from .few_heads_cta import BLOCK_COLUMNS, BLOCKS, PART_BOXES, FewHeadsSmemSm100, query_place

CHUNKS_PER_BOX = ROW_BYTES // CHUNK
WARP = 32
PART_STEPS = PART_BOXES * STEPS_PER_BOX  # products of S^T of the latent columns of a stage


@dataclass(frozen=True)
class FewHeadsQueryRoleSm100:
    """One warp."""

    @cute.jit
    def run(self, operands: Any, smem: FewHeadsSmemSm100):
        """Wait query_free, signal query_ready, for every work tile that has keys."""
        schedule = operands.schedule
        req, begin_tile = schedule.first_work_tile()
        last = schedule.last_request()
        number = Int32(0)
        while req <= last:
            tile_range = schedule.tile_range(req, begin_tile)
            if tile_range.tiles > 0:
                smem.query_free.producer_acquire(number)
                self.load(operands, smem, req, number)
                number = number + 1
            work_tile = schedule.work_tile_of(tile_range, req, begin_tile)
            req, begin_tile = work_tile.next_req, work_tile.next_tile
        # no commit may reach a CTA that is gone
        for i in cutlass.range_constexpr(smem.geometry.query_buffers):
            smem.query_free.producer_acquire(number + i)

    @cute.jit
    def load(self, operands: Any, smem: FewHeadsSmemSm100, req: Int32, number: Int32):
        """Load Q of a work tile, rows that it lacks as zeros. Each lane has a row, or every other 16 bytes of one."""
        geometry, lane = smem.geometry, cute.arch.lane_idx()
        shares = max(WARP // geometry.rows, 1)
        stored, base = operands.row_range(req), smem.queries(number)
        for part in cutlass.range_constexpr(max(geometry.rows // WARP, 1)):
            row = lane // shares + part * WARP
            source, place = stored.q_row(stored.nearest(row)).toint(), query_place(row)
            latent = base + place * ROW_BYTES
            rope = base + (geometry.boxes * geometry.rows * ROW_BYTES + place * geometry.rope_bytes)
            rope_flip = place // (ROW_BYTES // geometry.rope_bytes) % (geometry.rope_bytes // CHUNK)
            for i in cutlass.range_constexpr(D_QK * geometry.element_bytes // CHUNK // shares):
                chunk = lane % shares + i * shares
                box, within = i * shares // CHUNKS_PER_BOX, (chunk % CHUNKS_PER_BOX)
                if cutlass.const_expr(i * shares < D_LATENT * geometry.element_bytes // CHUNK):
                    target = latent + (box * (geometry.rows * ROW_BYTES) + (within ^ place % CHUNKS_PER_BOX) * CHUNK)
                else:
                    target = rope + (within ^ rope_flip) * CHUNK
                start_copy(target, source + chunk * CHUNK, stored.holds(row), CHUNK)
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)
        cute.arch.fence_proxy("async.shared", space="cta")
        smem.query_ready.producer_commit(number)


@dataclass(frozen=True)
class FewHeadsScoresRoleSm100:
    """One warp. dtype: of Q and K."""

    dtype: type[cutlass.Numeric]

    @cute.jit
    def run(self, operands: Any, smem: FewHeadsSmemSm100, tmem: Int32):
        """Wait kv_ready, query_ready, scores_free. Signal scores_ready, query_free."""
        schedule = operands.schedule
        req, begin_tile = schedule.first_work_tile()
        last = schedule.last_request()
        tile, number = Int32(0), Int32(0)
        while req <= last:
            tile_range = schedule.tile_range(req, begin_tile)
            if tile_range.tiles > 0:
                smem.query_ready.consumer_wait(number)
                queries = smem.queries(number)
                for t in cutlass.range(tile_range.tiles, unroll=1):
                    self.multiply(smem, tmem, queries, tile + t)
                with cute.arch.elect_one():
                    tcgen05.commit_alone(smem.query_free.barrier(number))
                number = number + 1
            tile = tile + tile_range.tiles
            work_tile = schedule.work_tile_of(tile_range, req, begin_tile)
            req, begin_tile = work_tile.next_req, work_tile.next_tile

    def multiply(self, smem: FewHeadsSmemSm100, tmem: Int32, queries: cute.Pointer, tile: Int32) -> None:
        """Issue S^T = K Q^T of one tile."""
        geometry, rows = smem.geometry, smem.geometry.rows
        boxes, rope_bytes = geometry.boxes, geometry.rope_bytes
        rope = tcgen05.k_major(smem.rope(tile), rope_bytes)
        q_latent, q_rope = tcgen05.k_major(queries), tcgen05.k_major(queries + boxes * rows * ROW_BYTES, rope_bytes)
        scores = tmem + (geometry.score_column + smem.scores_ready.stage(tile) * rows)
        shape = tcgen05.instruction(self.dtype, rows=64, columns=rows)
        smem.scores_free.producer_acquire(tile)
        # one thread issues all products: a commit waits for those of its own thread
        with cute.arch.elect_one():
            for part in range(geometry.parts):
                number, latent = tile * geometry.parts + part, tcgen05.k_major(smem.part(tile, part))
                first, end = part * PART_STEPS, geometry.score_steps if part + 1 == geometry.parts else (part + 1) * PART_STEPS
                smem.kv_ready.consumer_wait(number)
                if part == 0:
                    tcgen05.fence_after_wait()
                for step in range(first, end):
                    box, step_in_box = divmod(step, STEPS_PER_BOX)
                    offset = step_in_box * STEP_BYTES
                    if box < boxes:
                        a = latent.advance_start_address(box % PART_BOXES * BOX_BYTES + offset)
                        b = q_latent.advance_start_address(box * rows * ROW_BYTES + offset)
                    else:
                        a, b = rope.advance_start_address(offset), q_rope.advance_start_address(offset)
                    tcgen05.multiply(scores, a, b, shape, accumulate=step > 0, group=tcgen05.OWN_GROUP)
                if geometry.parts > 1:
                    tcgen05.commit_alone(smem.kv_free.barrier(number))
            tcgen05.commit_alone(smem.scores_ready.barrier(tile))


@dataclass(frozen=True)
class FewHeadsValuesRoleSm100:
    """One warp. dtype: of V and P."""

    dtype: type[cutlass.Numeric]

    @cute.jit
    def run(self, operands: Any, smem: FewHeadsSmemSm100, tmem: Int32):
        """Wait probs_ready, output_ready. Signal kv_free."""
        schedule = operands.schedule
        req, begin_tile = schedule.first_work_tile()
        last = schedule.last_request()
        tile = Int32(0)
        while req <= last:
            tile_range = schedule.tile_range(req, begin_tile)
            for t in cutlass.range(tile_range.tiles, unroll=1):
                self.multiply(smem, tmem, tile + t, t > 0)
            tile = tile + tile_range.tiles
            work_tile = schedule.work_tile_of(tile_range, req, begin_tile)
            req, begin_tile = work_tile.next_req, work_tile.next_tile

    def multiply(self, smem: FewHeadsSmemSm100, tmem: Int32, tile: Int32, accumulate: Boolean) -> None:
        """Issue O^T += V^T P^T, or O^T = V^T P^T, of one tile, and the sums of e4m3 P."""
        geometry, rows = smem.geometry, smem.geometry.rows
        step_keys, probs_bytes, blocks = geometry.step_keys, geometry.probs_bytes, BLOCKS // geometry.parts
        probs = tcgen05.mn_major(smem.rope(tile), 8 * probs_bytes, probs_bytes)
        shape = tcgen05.instruction(self.dtype, rows=BLOCK_COLUMNS, columns=rows, transpose_a=True, transpose_b=True)
        sums = tcgen05.instruction(self.dtype, rows=BLOCK_COLUMNS, columns=rows, transpose_b=True)
        smem.probs_ready.consumer_wait(tile)
        smem.output_ready.consumer_wait(tile)
        tcgen05.fence_after_wait()
        with cute.arch.elect_one():
            for part in range(geometry.parts):
                values = tcgen05.mn_major(smem.part(tile, part), BOX_BYTES)
                for step in range(TILE_KEYS // step_keys):
                    b = probs.advance_start_address(step * step_keys * probs_bytes)
                    more = accumulate if step == 0 else True
                    for block in range(blocks):
                        a = values.advance_start_address(block * (PART_BOXES // blocks) * BOX_BYTES + step * step_keys * ROW_BYTES)
                        target = tmem + (part * blocks + block) * rows
                        tcgen05.multiply(target, a, b, shape, accumulate=more, group=tcgen05.OWN_GROUP)
                    if geometry.sums_probs:
                        ones = tcgen05.a_in_tmem(tmem + geometry.ones_column)
                        tcgen05.multiply(tmem + geometry.sum_column, ones, b, sums, accumulate=more, group=tcgen05.OWN_GROUP)
                tcgen05.commit_alone(smem.kv_free.barrier(tile * geometry.parts + part))
