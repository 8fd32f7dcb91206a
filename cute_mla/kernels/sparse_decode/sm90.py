"""Sparse MLA decode on Hopper.

The dense kernel (dense_decode/sm90.py) with another role in front: four warps gather the 64 slots that the indices of a tile
name, from a cache of any format, and write them as 16-bit columns to the stages of the pipelines. The roles score and output are
the dense kernel's, and so are tiles, barriers and the trick.

Roles (512 threads):
  gather   warpgroup 0: indices, addresses, loads, value x scale, rounded once; which keys are present
  score    warpgroup 1: S = Q K^T, softmax, P to shared memory, lse; the sink
  output   warpgroups 2, 3

A CTA holds up to 64 heads of one query token. Pipelines: as in dense_decode, with an arrival on kv_ready and rope_ready instead of
bytes: of the one warp of the gather role whose turn it is, when all four have stored and fenced. RoPE columns, which nobody converts,
go by cp.async. Where q has 512 columns, a key has none but its values: the RoPE stages then hold P and validity alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import cutlass
from cutlass import Boolean, Int32, Int64, Uint8, cute

from ...manifest import NamedBarrier
from ...spec.arch import Arch
from ...spec.cache_format import CacheFormat
from ...spec.mla import D_LATENT
from ...spec.sparse_decode import SparseDecodeConfig
from ...spec.split_plan import TILE_KEYS
from ..attention.kernel import AttentionKernel
from ..attention.scheduler import BOX_COLUMNS
from ..attention.softmax import SinkScale
from ..definition import KernelDefinition
from ..primitives.arithmetic import pin_register
from ..primitives.pipeline import PipelineState, arrive
from ..sm90.arrivals import await_peer, initialise
from ..sm90.config import (
    ALL_REGISTERS,
    BOX_BYTES,
    OUTPUT_REGISTERS,
    STAGE_BYTES,
    STAGE_COLUMNS,
    STAGES_PER_TILE,
    VALID_BYTES,
    Geometry,
    Pipes,
    Tiles,
)
from ..sm90.gather_split import HALF_BYTES, HALVES, KEYS_PER_WARP, Half, halves_of_cta, hand_over, peer_shift
from ..sm90.output import LatentOutput, OutputRole
from ..sm90.row_conversion import Lane, Step, batches_of, new_buffers, no_wait, pinned_lane, zero_behind
from ..sm90.score import LatentScores, ScoreRole
from ..sm90.valid_keys import AbsentKeyMask
from ..sm90.warpgroups import (
    OUTPUT_BARRIER,
    OUTPUT_GROUPS,
    THREADS,
    WARPGROUP,
    WARPS_PER_GROUP,
    group_of,
    named_barriers,
    role_table,
    set_registers,
    sync_start,
)
from .abi import SparseDecodeAbi
from .operands import Operands
from .sm90_gather import (
    Indices,
    Keys,
    clear_absent,
    copy_rope,
    copy_stage,
    find_keys,
    load_batch,
    position_in_tile,
    store_step,
    tile_steps,
)
from .sm90_scales import conversion_of, load_scales

GATHER_BARRIER = OUTPUT_BARRIER + OUTPUT_GROUPS  # and the following: one for each stage of a tile and one for its RoPE columns
SHARED_REGISTERS = ALL_REGISTERS - OUTPUT_GROUPS * OUTPUT_REGISTERS  # by gather and score


def geometry_of(cache_format: CacheFormat) -> Geometry:
    """Return the geometry of a cache format.

    Copies of 16-bit columns take no registers, so that Q has them, and a tenth stage the shared memory. Few column tiles of Q in registers
    leave the gather role those for its loads in flight where it converts.
    """
    q_tiles_in_registers, kv_stages, producer_registers = (4, 10, 56)
    if cache_format.group:
        q_tiles_in_registers, kv_stages, producer_registers = (2, 9, 88) if cache_format.d_qk > D_LATENT else (1, 9, 96)
    return Geometry(
        d_qk=cache_format.d_qk,
        q_tiles_in_registers=q_tiles_in_registers,
        kv_stages=kv_stages,
        rope_stages=3,
        producer_registers=producer_registers,
        score_registers=SHARED_REGISTERS - producer_registers,
        ready_arrivals=1,
        valid_stages=3,
        alternating=True,
        tells_targets=False,
    )


class SparseDecodeSm90(AttentionKernel):
    """One variant of the kernel."""

    threads = THREADS

    def __init__(self, config: SparseDecodeConfig, arch: Arch) -> None:
        super().__init__(SparseDecodeAbi(config), arch)
        self.config = config
        self.cluster = config.cluster
        self.geometry = geometry_of(config.format)
        self.smem = self.geometry.smem(self.dtype)

    @cute.jit
    def run(self, operands: Operands):
        """Allocate, initialise the barriers, and give each role its warps."""
        memory, geometry = self.smem.allocate(), self.geometry
        tiles, pipes = Tiles.create(memory), Pipes.create(memory)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                initialise(pipes, geometry, self.cluster)
        elif warp == 1:
            operands.schedule.prefetch()
        sync_start(self.cluster)
        # the plan, the lengths, the indices, Q and the cache may come from the kernel before
        cute.arch.griddepcontrol_wait()

        group = group_of(warp)
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        if group == 0:
            set_registers(geometry.producer_registers)
            GatherRole(self.config, self.dtype, geometry).run(operands, tiles, pipes, thread)
        elif group == 1:
            set_registers(geometry.score_registers)
            scores = partial(LatentScores.create, geometry, self.dtype)
            ScoreRole(scores, AbsentKeyMask(), SinkScale()).run(operands, tiles, pipes, thread)
        else:
            set_registers(OUTPUT_REGISTERS)
            output = partial(LatentOutput.create, geometry, self.dtype, self.cluster)
            OutputRole(geometry.stage_strides[0], output, self.dtype).run(operands, tiles, pipes, thread, group - 2)


@dataclass(frozen=True)
class Span:
    """The tiles of a work tile."""

    req: Int32
    begin_tile: Int32
    tiles: Int32


class GatherRole:
    """One warpgroup: indices, addresses, loads, conversion, and which keys are present.

    dtype: what e4m3 becomes.
    """

    def __init__(self, config: SparseDecodeConfig, dtype: type[cutlass.Numeric], geometry: Geometry) -> None:
        self.format = config.format
        self.conversion = conversion_of(config, dtype)
        self.geometry = geometry
        self.cluster = config.cluster
        self.batches = batches_of(tile_steps(self.format, geometry, self.cluster)) if self.format.group else ()

    @cute.jit
    def run(self, operands: Operands, tiles: Tiles, pipes: Pipes, thread: Int32):
        """Wait kv_free, rope_free. Signal kv_ready, rope_ready."""
        schedule = operands.schedule
        req, begin_tile = schedule.first_work_tile()
        tile, kv, rope = Int32(0), pipes.kv_free.state(Int32(0)), pipes.rope_free.state(Int32(0))
        shift = peer_shift(pipes.kv_ready.base) if self.cluster > 1 else Int32(0)
        while req <= schedule.last_request():
            tile_range = schedule.tile_range(req, begin_tile)
            # asked here, so that nothing but the answer is kept through the tiles
            work_tile = schedule.work_tile(req, begin_tile)
            if tile_range.tiles > 0:
                span = Span(req, begin_tile, tile_range.tiles)
                if cutlass.const_expr(self.format.group):
                    kv, rope = self.convert_tiles(operands, tiles, pipes, span, kv, rope, shift)
                else:
                    kv, rope = self.copy_tiles(operands, tiles, pipes, span, kv, rope, shift)
            tile = tile + tile_range.tiles
            req, begin_tile = work_tile.next_req, work_tile.next_tile
        cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(self.cluster > 1) and thread < 32:
            await_peer(pipes, self.geometry, tile)

    def first_keys(
        self, operands: Operands, span: Span, halves: tuple[Half, Half], lane: Lane, thread: Int32
    ) -> tuple[Indices, Int32, Keys]:
        """Return the indices of a work tile, and this thread's position and keys in its first tile."""
        indices = Indices.create(operands, span.req, (span.begin_tile + span.tiles) * TILE_KEYS)
        position = span.begin_tile * TILE_KEYS + position_in_tile(thread)
        keys = find_keys(operands, self.conversion, indices.look_up(position), indices.in_extra(position), halves, lane, thread)
        return indices, position, keys

    @cute.jit
    def convert_tiles(
        self, operands: Operands, tiles: Tiles, pipes: Pipes, span: Span, kv: PipelineState, rope: PipelineState, shift: Int32
    ) -> tuple[PipelineState, PipelineState]:
        """Gather the tiles of one work tile.

        Indices are asked for a tile ahead of the addresses, bytes a few steps ahead of their use.

        Return the pipeline states behind them.
        """
        batches = self.batches
        thread = cute.arch.thread_idx()[0]  # of the first warpgroup
        lane, halves = pinned_lane(thread), halves_of_cta(self.cluster)
        # of a pair, the half of it that this CTA converts
        first_stage = pin_register(tiles.sKv.iterator.toint() + halves[0] * HALF_BYTES)
        buffers = new_buffers(batches)
        indices, position, keys = self.first_keys(operands, span, halves, lane, thread)
        row0, row1, valid, narrow, loaded = *keys.rows, keys.valid, keys.narrow, load_scales(self.conversion, keys.scales)
        index = indices.look_up(position + TILE_KEYS)
        load_batch(batches[0], buffers[0], keys, halves, lane, thread)
        left = span.tiles
        while left > 0:
            left = left - 1
            keys, scales = Keys((row0, row1), Int64(0), valid, narrow), self.conversion.ready(loaded, narrow, thread)
            position = position + TILE_KEYS
            following = keys
            for b in cutlass.range_constexpr(len(batches)):
                last = b + 1 == len(batches)
                zero = zero_behind(buffers[b % 2][0], row0)
                if cutlass.const_expr(last):
                    # whatever is loaded from here on belongs to the next tile
                    row0, row1, valid, narrow = *following.rows, following.valid, following.narrow
                    loaded = load_scales(self.conversion, following.behind(zero).scales)
                    index = indices.look_up(position + zero + TILE_KEYS)
                load_batch(batches[(b + 1) % len(batches)], buffers[(b + 1) % 2], following.behind(zero), halves, lane, thread)
                if cutlass.const_expr(b == 0):
                    self.begin_rope(tiles, pipes, rope, keys, halves, lane, thread)
                for i in cutlass.range_constexpr(len(batches[b])):
                    step, words = batches[b][i], buffers[b % 2][i]
                    acquire = stage_wait(pipes, step, kv)
                    target = first_stage + kv.stage * STAGE_BYTES
                    clear_absent(step, words, keys, halves[step.key], thread)
                    if cutlass.const_expr(b + 2 == len(batches) and i + 1 == len(batches[b])):
                        # beside a conversion, whose instructions fill the time that each of these takes
                        following = find_keys(operands, self.conversion, index, indices.in_extra(position), halves, lane, thread)
                    factors = self.conversion.of_step(step, words, scales, keys, halves[step.key], thread)
                    store_step(step, words, factors, target ^ (step.key * HALF_BYTES), lane, self.conversion, acquire)
                    if cutlass.const_expr(step.ends_stage):
                        self.finish_stage(pipes, kv, rope, step, target, shift)
                        kv = pipes.kv_free.advance(kv)
            rope = pipes.rope_free.advance(rope)
        return kv, rope

    @cute.jit
    def copy_tiles(
        self, operands: Operands, tiles: Tiles, pipes: Pipes, span: Span, kv: PipelineState, rope: PipelineState, shift: Int32
    ) -> tuple[PipelineState, PipelineState]:
        """Gather the tiles of one work tile from a 16-bit cache: cp.async moves all bytes, a stage ahead of the one that is handed over.

        Return the pipeline states behind them.
        """
        thread = cute.arch.thread_idx()[0]  # of the first warpgroup
        lane, halves = pinned_lane(thread), halves_of_cta(self.cluster)
        first_stage = pin_register(tiles.sKv.iterator.toint() + halves[0] * HALF_BYTES)
        indices, position, keys = self.first_keys(operands, span, halves, lane, thread)
        row0, row1, valid = *keys.rows, keys.valid
        index = indices.look_up(position + TILE_KEYS)
        landing, landing_rope = kv, rope
        left = span.tiles
        while left > 0:
            keys = Keys((row0, row1), Int64(0), valid)
            for stage in cutlass.range_constexpr(STAGES_PER_TILE):
                if cutlass.const_expr(stage == 0):
                    self.begin_rope(tiles, pipes, rope, keys, halves, lane, thread)
                    rope = pipes.rope_free.advance(rope)
                pipes.kv_free.producer_acquire(kv)
                target = first_stage + kv.stage * STAGE_BYTES
                copy_stage(self.geometry.first_column(stage), keys, halves, target, lane, thread, HALVES // self.cluster)
                cute.arch.cp_async_commit_group()
                kv = pipes.kv_free.advance(kv)
                if cutlass.const_expr(stage > 0):
                    landing = self.finish_copies(pipes, landing, landing_rope, stage - 1, first_stage, shift, 1)
                elif left < span.tiles:
                    landing = self.finish_copies(pipes, landing, landing_rope, STAGES_PER_TILE - 1, first_stage, shift, 1)
                    landing_rope = pipes.rope_free.advance(landing_rope)
            left = left - 1
            position = position + TILE_KEYS
            keys = find_keys(operands, self.conversion, index, indices.in_extra(position), halves, lane, thread)
            row0, row1, valid = *keys.rows, keys.valid
            index = indices.look_up(position + TILE_KEYS)
        self.finish_copies(pipes, landing, landing_rope, STAGES_PER_TILE - 1, first_stage, shift, 0)
        return kv, rope

    @cute.jit
    def finish_copies(
        self, pipes: Pipes, kv: PipelineState, rope: PipelineState, stage: cutlass.Constexpr[int], first_stage: Int32, shift: Int32,
        in_flight: cutlass.Constexpr[int],
    ) -> PipelineState:  # fmt: skip
        """Commit a stage of a tile whose copies are the last but `in_flight` groups. Return the state of the next one."""
        cute.arch.cp_async_wait_group(in_flight)
        target = first_stage + kv.stage * STAGE_BYTES
        self.commit_stage(pipes, kv, rope, stage, self.cluster > 1, target, shift)
        return pipes.kv_free.advance(kv)

    @cute.jit
    def begin_rope(
        self, tiles: Tiles, pipes: Pipes, state: PipelineState, keys: Keys, halves: tuple[Half, Half], lane: Lane, thread: Int32
    ):
        """Acquire the RoPE stage, start the copies of its columns, and write beside it which keys are present: two bytes a warp."""
        pipes.rope_free.producer_acquire(state)
        if cutlass.const_expr(self.geometry.has_rope):
            own = tiles.sRope.iterator.toint() + state.stage * BOX_BYTES + halves_of_cta(self.cluster)[0] * HALF_BYTES
            copy_rope(self.format, keys, halves, (own, own ^ HALF_BYTES), lane, thread)
            if cutlass.const_expr(self.format.group):
                cute.arch.cp_async_commit_group()
        if thread % 32 == 0:
            target = tiles.sValid + (state.stage * VALID_BYTES + thread // 32)
            target.store(Uint8(keys.valid & 0xFF))
            (target + WARPS_PER_GROUP).store(Uint8((keys.valid >> KEYS_PER_WARP) & 0xFF))

    def finish_stage(self, pipes: Pipes, kv: PipelineState, rope: PipelineState, step: Step, target: Int32, shift: Int32) -> None:
        """Commit a stage of a tile whose last step has been stored; `target` is the half that the peer gets unless it has made its own."""
        if step.stage + 1 == STAGES_PER_TILE and self.geometry.has_rope:
            cute.arch.cp_async_wait_group(0)  # the RoPE columns, which have had all the tile to land
        self.commit_stage(pipes, kv, rope, step.stage, step.key < HALVES - 1, target, shift)

    @cute.jit
    def commit_stage(
        self, pipes: Pipes, kv: PipelineState, rope: PipelineState, stage: cutlass.Constexpr[int], shared: cutlass.Constexpr[bool],
        target: Int32, shift: Int32,
    ):  # fmt: skip
        """Fence and commit a stage of a tile, of which all threads have stored their part; with the last one the RoPE columns.

        shared: whether the half of it that begins at `target` is copied to the peer.
        """
        cute.arch.fence_proxy("async.shared", space="cta")
        ready = pipes.kv_ready.barrier(kv)
        if self.is_last(stage):
            if cutlass.const_expr(shared):
                hand_over(ready, target, STAGE_COLUMNS // BOX_COLUMNS, shift)
            else:
                arrive(ready)
            if cutlass.const_expr(stage + 1 == STAGES_PER_TILE):
                pipes.rope_ready.producer_commit(rope)

    @cute.jit
    def is_last(self, stage: cutlass.Constexpr[int]) -> Boolean:
        """Return whether this warp commits a stage of a tile: one does, and waits until all have stored and fenced. The others go on.

        The turns go round the warps, so that no warp is at a stage of the next tile before the one whose turn it is has been there:
        each has waited for all in between.
        """
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        mine = warp == stage % WARPS_PER_GROUP
        if mine:
            cute.arch.barrier(barrier_id=GATHER_BARRIER + stage, number_of_threads=WARPGROUP)
        else:
            cute.arch.barrier_arrive(barrier_id=GATHER_BARRIER + stage, number_of_threads=WARPGROUP)
        return mine


def stage_wait(pipes: Pipes, step: Step, state: PipelineState) -> Callable[[], None]:
    """Ask whether the stage that a step begins is free, and return the wait for it; no wait for any other step."""
    if step.begins_stage:
        return partial(pipes.kv_free.finish_acquire, state, pipes.kv_free.try_acquire(state))
    cute.arch.sync_warp()  # keeps ptxas from converting more steps at a time than there are registers for
    return no_wait


def gather_barriers() -> tuple[NamedBarrier, ...]:
    """Return the named barriers of the gather role: one for each stage of a tile."""
    return tuple(NamedBarrier(f"slot_{stage}", GATHER_BARRIER + stage) for stage in range(STAGES_PER_TILE))


def build(config: SparseDecodeConfig, arch: Arch) -> KernelDefinition:
    """Return the variant, ready to compile."""
    kernel = SparseDecodeSm90(config, arch)
    return kernel.definition(
        smem_bytes=kernel.smem.nbytes,
        barriers=kernel.smem.barriers(),
        named_barriers=named_barriers() + gather_barriers(),
        roles=role_table("gather"),
        expected={"HGMMA": kernel.geometry.wgmma_per_tile},
    )
