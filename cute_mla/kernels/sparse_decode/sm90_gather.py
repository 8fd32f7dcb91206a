"""The gather role of the SM90 kernel: the bytes of 64 slots become a tile of 16-bit columns in shared memory.

Threads, keys, steps and batches: sm90/rows.py. The RoPE columns, and all columns of a 16-bit cache, are no step: cp.async copies them.

Of a pair of CTAs each converts the slots' columns of one half of the keys. Their RoPE columns both gather: they are not converted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, Uint8, Uint32, cute

from ...spec.cache_format import CacheFormat
from ...spec.mla import D_LATENT, ELEMENT_BYTES
from ...spec.sparse_decode import SparseDecodeConfig
from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import BOX_COLUMNS, TileRange
from ..primitives.arithmetic import pin_register, smaller
from ..primitives.peer import peer_shift
from ..primitives.pipeline import PipelineState, arrive
from ..primitives.rows import load_if
from ..sm90.cta import (
    BOX_BYTES,
    OUTPUT_BARRIER,
    OUTPUT_GROUPS,
    STAGE_BOXES,
    STAGE_BYTES,
    STAGE_COLUMNS,
    VALID_BYTES,
    WARPGROUP,
    WARPS_PER_GROUP,
    LatentSm90Smem,
    LatentSm90Stages,
)
from ..sm90.rows import (
    CHUNK,
    CHUNK_WORDS,
    HALF_BYTES,
    HALF_KEYS,
    HALVES,
    KEYS_PER_WARP,
    LANES_PER_KEY,
    Half,
    LatentSm90Batch,
    LatentSm90Lane,
    LatentSm90Run,
    LatentSm90Step,
    batches_of,
    copy_chunk,
    halves_of_cta,
    hand_over,
    load_runs_if,
    new_buffers,
    part_of,
    store_chunk,
    zero_behind,
)
from .operands import NO_SLOT, SparseDecodeIndices, SparseDecodeOperands, slot_address
from .sm90_scales import LOOKED_UP, Conversion, conversion_of, load_scales, source_lane

GATHER_BARRIER = OUTPUT_BARRIER + OUTPUT_GROUPS  # and the following: one for each stage of a tile
ALL_PRESENT = -1
LOCAL_STAGES: tuple[int, ...] = (3,)  # of a tile: both CTAs of a pair convert all of them, so that fewer bytes go between the SMs


@dataclass(frozen=True)
class SparseDecodeGatherThread:
    """A thread of the gather role. halves: of a tile, in which its two keys lie."""

    number: Int32
    lane: LatentSm90Lane
    halves: tuple[Half, Half]

    @staticmethod
    def create(cluster: int) -> SparseDecodeGatherThread:
        """Return this thread, whose offsets are pinned in registers."""
        number = cute.arch.thread_idx()[0]  # of the first warpgroup
        return SparseDecodeGatherThread(number, LatentSm90Lane.pinned(number), halves_of_cta(cluster))


class SparseDecodeSm90GatherRole:
    """One warpgroup: indices, addresses, loads, conversion, and which keys are present.

    dtype: what e4m3 becomes.
    """

    def __init__(self, config: SparseDecodeConfig, dtype: type[cutlass.Numeric], stages: LatentSm90Stages) -> None:
        self.format = config.format
        self.conversion = conversion_of(config, dtype)
        self.stages = stages
        self.cluster = config.cluster
        self.batches = batches_of(tile_steps(self.format, stages, self.cluster)) if self.format.group else ()

    @cute.jit
    def run(self, operands: SparseDecodeOperands, smem: LatentSm90Smem, thread: Int32):
        """Wait kv_free, rope_free. Signal kv_ready, rope_ready."""
        schedule = operands.schedule
        req, begin_tile = schedule.first_work_tile()
        tile, kv, rope = Int32(0), smem.kv_free.state(Int32(0)), smem.rope_free.state(Int32(0))
        shift = peer_shift(smem.kv_ready.base) if self.cluster > 1 else Int32(0)
        while req <= schedule.last_request():
            tile_range = schedule.tile_range(req, begin_tile)
            # asked here, so that nothing but the answer is kept through the tiles
            work_tile = schedule.work_tile(req, begin_tile)
            if tile_range.tiles > 0:
                gather = self.convert_tiles if self.format.group else self.copy_tiles
                kv, rope = gather(operands, smem, tile_range, kv, rope, shift)
            tile = tile + tile_range.tiles
            req, begin_tile = work_tile.next_req, work_tile.next_tile
        cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(self.cluster > 1) and thread < 32:
            smem.await_peer(tile)

    def first_keys(
        self, operands: SparseDecodeOperands, tiles: TileRange, who: SparseDecodeGatherThread
    ) -> tuple[SparseDecodeSm90Indices, Int32, SparseDecodeSm90Keys]:
        """Return the indices of a work tile, and this thread's position and keys in its first tile."""
        indices = SparseDecodeSm90Indices.create(operands, tiles.req, (tiles.begin + tiles.tiles) * TILE_KEYS)
        position = tiles.begin * TILE_KEYS + position_in_tile(who.number)
        keys = find_keys(operands, self.conversion, indices.look_up(position), indices.in_extra(position), who)
        return indices, position, keys

    @cute.jit
    def convert_tiles(
        self, operands: SparseDecodeOperands, smem: LatentSm90Smem, tiles: TileRange, kv: PipelineState, rope: PipelineState, shift: Int32
    ) -> tuple[PipelineState, PipelineState]:
        """Gather the tiles of one work tile.

        Indices are asked for a tile ahead of the addresses, bytes a few steps ahead of their use.

        Return the pipeline states behind them.
        """
        batches = self.batches
        who = SparseDecodeGatherThread.create(self.cluster)
        # of a pair, the half of it that this CTA converts
        first_stage = pin_register(smem.sKv.iterator.toint() + who.halves[0] * HALF_BYTES)
        buffers = new_buffers(batches)
        indices, position, keys = self.first_keys(operands, tiles, who)
        row0, row1, valid, narrow, loaded = *keys.rows, keys.valid, keys.narrow, load_scales(self.conversion, keys.scales)
        index = indices.look_up(position + TILE_KEYS)
        load_batch(batches[0], buffers[0], keys, who)
        remaining = tiles.tiles
        while remaining > 0:
            remaining = remaining - 1
            keys, scales = SparseDecodeSm90Keys((row0, row1), Int64(0), valid, narrow), self.conversion.ready(loaded, narrow, who.number)
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
                load_batch(batches[(b + 1) % len(batches)], buffers[(b + 1) % 2], following.behind(zero), who)
                if cutlass.const_expr(b == 0):
                    self.begin_rope(smem, rope, keys, who)
                for i in cutlass.range_constexpr(len(batches[b])):
                    step, words = batches[b][i], buffers[b % 2][i]
                    acquire = stage_wait(smem, step, kv)
                    target = first_stage + kv.stage * STAGE_BYTES
                    clear_absent(step, words, keys, who)
                    if cutlass.const_expr(b + 2 == len(batches) and i + 1 == len(batches[b])):
                        # beside a conversion, whose instructions fill the time that each of these takes
                        following = find_keys(operands, self.conversion, index, indices.in_extra(position), who)
                    factors = self.conversion.of_step(step, words, scales, keys, who)
                    store_step(step, words, factors, target ^ (step.key * HALF_BYTES), who.lane, self.conversion, acquire)
                    if cutlass.const_expr(step.ends_stage):
                        if cutlass.const_expr(self.stages.has_rope and step.stage + 1 == self.stages.count):
                            cute.arch.cp_async_wait_group(0)  # the RoPE columns, which have had all the tile to land
                        # the peer gets this half unless it has made its own
                        self.commit_stage(smem, kv, rope, step.stage, step.key < HALVES - 1, target, shift)
                        kv = smem.kv_free.advance(kv)
            rope = smem.rope_free.advance(rope)
        return kv, rope

    @cute.jit
    def copy_tiles(
        self, operands: SparseDecodeOperands, smem: LatentSm90Smem, tiles: TileRange, kv: PipelineState, rope: PipelineState, shift: Int32
    ) -> tuple[PipelineState, PipelineState]:
        """Gather the tiles of one work tile from a 16-bit cache: cp.async moves all bytes, a stage ahead of the one that is handed over.

        Return the pipeline states behind them.
        """
        who = SparseDecodeGatherThread.create(self.cluster)
        first_stage = pin_register(smem.sKv.iterator.toint() + who.halves[0] * HALF_BYTES)
        indices, position, keys = self.first_keys(operands, tiles, who)
        row0, row1, valid = *keys.rows, keys.valid
        index = indices.look_up(position + TILE_KEYS)
        landing, landing_rope = kv, rope
        remaining = tiles.tiles
        while remaining > 0:
            keys = SparseDecodeSm90Keys((row0, row1), Int64(0), valid)
            for stage in cutlass.range_constexpr(self.stages.count):
                if cutlass.const_expr(stage == 0):
                    self.begin_rope(smem, rope, keys, who)
                    rope = smem.rope_free.advance(rope)
                smem.kv_free.producer_acquire(kv)
                target = first_stage + kv.stage * STAGE_BYTES
                copy_stage(self.stages.columns[stage], keys, target, who, HALVES // self.cluster)
                cute.arch.cp_async_commit_group()
                kv = smem.kv_free.advance(kv)
                if cutlass.const_expr(stage > 0):
                    landing = self.finish_copies(smem, landing, landing_rope, stage - 1, first_stage, shift, 1)
                elif remaining < tiles.tiles:
                    landing = self.finish_copies(smem, landing, landing_rope, self.stages.count - 1, first_stage, shift, 1)
                    landing_rope = smem.rope_free.advance(landing_rope)
            remaining = remaining - 1
            position = position + TILE_KEYS
            keys = find_keys(operands, self.conversion, index, indices.in_extra(position), who)
            row0, row1, valid = *keys.rows, keys.valid
            index = indices.look_up(position + TILE_KEYS)
        self.finish_copies(smem, landing, landing_rope, self.stages.count - 1, first_stage, shift, 0)
        return kv, rope

    @cute.jit
    def finish_copies(
        self, smem: LatentSm90Smem, kv: PipelineState, rope: PipelineState, stage: cutlass.Constexpr[int], first_stage: Int32, shift: Int32,
        in_flight: cutlass.Constexpr[int],
    ) -> PipelineState:  # fmt: skip
        """Commit a stage of a tile whose copies are the last but `in_flight` groups. Return the state of the next one."""
        cute.arch.cp_async_wait_group(in_flight)
        target = first_stage + kv.stage * STAGE_BYTES
        self.commit_stage(smem, kv, rope, stage, self.cluster > 1, target, shift)
        return smem.kv_free.advance(kv)

    @cute.jit
    def begin_rope(self, smem: LatentSm90Smem, state: PipelineState, keys: SparseDecodeSm90Keys, who: SparseDecodeGatherThread):
        """Acquire the RoPE stage, start the copies of its columns, and write beside it which keys are present: two bytes a warp."""
        smem.rope_free.producer_acquire(state)
        if cutlass.const_expr(self.stages.has_rope):
            own = smem.sRope.iterator.toint() + state.stage * BOX_BYTES + halves_of_cta(self.cluster)[0] * HALF_BYTES
            copy_rope(self.format, keys, (own, own ^ HALF_BYTES), who)
            if cutlass.const_expr(self.format.group):
                cute.arch.cp_async_commit_group()
        if who.number % 32 == 0:
            target = smem.sValid + (state.stage * VALID_BYTES + who.number // 32)
            target.store(Uint8(keys.valid & 0xFF))
            (target + WARPS_PER_GROUP).store(Uint8((keys.valid >> KEYS_PER_WARP) & 0xFF))

    @cute.jit
    def commit_stage(
        self, smem: LatentSm90Smem, kv: PipelineState, rope: PipelineState, stage: cutlass.Constexpr[int], shared: cutlass.Constexpr[bool],
        target: Int32, shift: Int32,
    ):  # fmt: skip
        """Fence and commit a stage of a tile, of which this thread has stored its part; with the last one the RoPE columns.

        One warp commits, and waits until all have stored and fenced. The others go on. The turns go round the warps, so that no warp is at
        a stage of the next tile before the one whose turn it is has been there: each has waited for all in between.

        shared: whether the half of it that begins at `target` is copied to the peer.
        """
        cute.arch.fence_proxy("async.shared", space="cta")
        ready = smem.kv_ready.barrier(kv)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == stage % WARPS_PER_GROUP:
            cute.arch.barrier(barrier_id=GATHER_BARRIER + stage, number_of_threads=WARPGROUP)
            if cutlass.const_expr(shared):
                hand_over(ready, target, STAGE_BOXES, shift)
            else:
                arrive(ready)
            if cutlass.const_expr(stage + 1 == self.stages.count):
                smem.rope_ready.producer_commit(rope)
        else:
            cute.arch.barrier_arrive(barrier_id=GATHER_BARRIER + stage, number_of_threads=WARPGROUP)


def stage_wait(smem: LatentSm90Smem, step: LatentSm90Step, state: PipelineState) -> Callable[[], None]:
    """Ask whether the stage that a step begins is free, and return the wait for it; no wait for any other step."""
    if step.key == 0:
        return partial(smem.kv_free.finish_acquire, state, smem.kv_free.try_acquire(state))
    cute.arch.sync_warp()  # keeps ptxas from converting more steps at a time than there are registers for
    return lambda: None


def tile_steps(cache_format: CacheFormat, stages: LatentSm90Stages, cluster: int) -> tuple[LatentSm90Step, ...]:
    """Return all steps of a tile of a format with scales, in order: stage by stage. The RoPE columns go another way."""
    steps: list[LatentSm90Step] = []
    for stage in range(stages.count):
        first = stages.columns[stage]
        runs = tuple(_run(cache_format, first, column) for column in range(first, first + STAGE_COLUMNS, BOX_COLUMNS))
        scale_source = first // cache_format.group * cache_format.bytes_of_scale
        keys = HALVES if stage in LOCAL_STAGES else HALVES // cluster
        steps += [LatentSm90Step(stage, key, runs, scale_source, ends_stage=key + 1 == keys) for key in range(keys)]
    return tuple(steps)


def _run(cache_format: CacheFormat, first: int, column: int) -> LatentSm90Run:
    quantised = column < cache_format.quantised
    source = column if quantised else cache_format.wide_offset + (column - cache_format.quantised) * ELEMENT_BYTES
    scale = (column - first) // max(cache_format.group, BOX_COLUMNS) if quantised else 0
    return LatentSm90Run((column - first) // BOX_COLUMNS, source, quantised, scale)


@dataclass(frozen=True)
class SparseDecodeSm90Indices:
    """The indices of a work tile.

    main: those before it are of the first cache. end: the list's or the work tile's, whichever comes first. first, second: where the
    indices of either cache would begin if they stood in one list.
    """

    main: Int32
    end: Int32
    first: cute.Pointer
    second: cute.Pointer

    @staticmethod
    def create(operands: SparseDecodeOperands, req: Int32, end: Int32) -> SparseDecodeSm90Indices:
        """Return the indices of a request before a position."""
        indices = SparseDecodeIndices.create(operands, req)
        end = smaller(indices.main + indices.extra, end)
        return SparseDecodeSm90Indices(indices.main, end, indices.main_indices, indices.extra_indices - Int64(indices.main))

    def found_again(self, operands: SparseDecodeOperands, req: Int32) -> SparseDecodeSm90Indices:
        """Return the same, with pointers that are computed here, for code whose registers are short."""
        req = pin_register(req)
        first, second = operands.cache.index_pointer(req), operands.extra.index_pointer(req)
        return SparseDecodeSm90Indices(self.main, self.end, first, second - Int64(self.main))

    def in_extra(self, position: Int32) -> Boolean:
        """Return whether a key lies in the second cache."""
        return position >= self.main

    @cute.jit
    def look_up(self, position: Int32) -> Int32:
        """Return the index at a position; NO_SLOT at the end, where nothing is read."""
        index = Int32(NO_SLOT)
        if Uint32(position) < Uint32(self.end):
            if position < self.main:
                index = (self.first + position).load()
            else:
                index = (self.second + position).load()
        return index


@dataclass(frozen=True)
class SparseDecodeSm90Keys:
    """A thread's keys of a tile.

    rows: addresses of the first bytes that it moves of its two keys, to be read only if the key is present. scales: address of its share
    of the scales of the key that it has looked up, 0 if that key is absent. valid: of all keys of the warp, a bit each, those of the
    first half of the tile first. narrow: likewise, which keys are of the second cache; None where both caches have one format.
    """

    rows: tuple[Int64, Int64]
    scales: Int64
    valid: Int32
    narrow: Int32 | None = None

    def present(self, key: int, who: SparseDecodeGatherThread) -> Int32:
        """Return 1 if one of the thread's two keys is present, else 0."""
        return has_key(self.valid, key, who)

    def is_narrow(self, key: int, who: SparseDecodeGatherThread) -> Boolean:
        """Return whether one of the thread's two keys is of the second cache, where that has a format of its own."""
        return has_key(self.narrow, key, who) != 0

    def behind(self, zero: Int32) -> SparseDecodeSm90Keys:
        """Return the same keys, known no sooner than a number that is 0."""
        return SparseDecodeSm90Keys((self.rows[0] + zero, self.rows[1] + zero), self.scales + zero, self.valid, self.narrow)


def has_key(keys: Int32, key: int, who: SparseDecodeGatherThread) -> Int32:
    """Return the bit of one of the thread's two keys. keys: a bit of each key of the warp."""
    return (keys >> source_lane(who, key)) & 1


def position_in_tile(thread: Int32) -> Int32:
    """Return the key of a tile that this thread looks up: lane l of a warp has the warp's key l % 16."""
    own = thread % LOOKED_UP
    return own // KEYS_PER_WARP * HALF_KEYS + thread // 32 * KEYS_PER_WARP + own % KEYS_PER_WARP


def find_keys(
    operands: SparseDecodeOperands, conversion: Conversion, index: Int32, in_extra: Boolean, who: SparseDecodeGatherThread
) -> SparseDecodeSm90Keys:
    """Return this thread's keys.

    Each lane computes one address, of the key that it has looked up, and gets those of its two keys from the others.
    """
    row, scales = slot_address(operands, conversion.config, index, in_extra)
    narrow, sources = None, [who.lane.source] * HALVES
    if conversion.narrow:
        narrow, share = cute.arch.vote_ballot_sync(in_extra), cutlass.select_(in_extra, conversion.source(scales, who.number), scales)
        scales, valid = cutlass.select_(scales != 0, share, scales), cute.arch.vote_ballot_sync(row != 0)
        # of 64 columns of e2m1 two lanes load the same 16 bytes, and use a half each
        lane = who.lane
        sources = [cutlass.select_(has_key(narrow, key, who) != 0, (lane.source >> 1) & CHUNK, lane.source) for key in range(HALVES)]
    first, second = (shuffle_address(row, source_lane(who, key)) + source for key, source in enumerate(sources))
    if not conversion.narrow:
        if conversion.shares:
            scales = cutlass.select_(scales != 0, conversion.source(scales, who.number), scales)
        valid = cute.arch.vote_ballot_sync(row != 0)
    return SparseDecodeSm90Keys((first, second), scales, valid, narrow)


def shuffle_address(own: Int64, lane: Int32) -> Int64:
    """Return the address that another lane has. All lanes."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 lo, hi; mov.b64 {lo, hi}, {$r0}; "
        "shfl.sync.idx.b32 lo, lo, {$r1}, 31, -1; shfl.sync.idx.b32 hi, hi, {$r1}, 31, -1; mov.b64 {$w0}, {lo, hi}; }",
        write_only_types=[Int64],
        read_only_args=[own, lane],
    )


def load_batch(batch: LatentSm90Batch, buffers: list[cute.Tensor], keys: SparseDecodeSm90Keys, who: SparseDecodeGatherThread) -> None:
    """Start the loads of a batch of steps."""
    for step, words in zip(batch, buffers, strict=False):
        row, there = keys.rows[step.key], keys.present(step.key, who)
        if keys.narrow is None:
            load_runs_if(step, words, row, who.lane, there)
            continue
        narrow = keys.is_narrow(step.key, who)
        for i, run in enumerate(step.runs):
            source = cutlass.select_(narrow, Int32(run.source // HALVES), Int32(run.source))
            load_if(there, part_of(words, i * CHUNK_WORDS, CHUNK_WORDS), row + source)


@cute.jit
def clear_absent(step: cutlass.Constexpr[LatentSm90Step], words: cute.Tensor, keys: SparseDecodeSm90Keys, who: SparseDecodeGatherThread):
    """Zero the bytes of a step if its key is absent: the registers still have those of another key."""
    if keys.valid != ALL_PRESENT:
        mask = Int32(0) - keys.present(step.key, who)
        for i in cutlass.range_constexpr(step.words):
            words[i] = words[i] & mask


def copy_rope(cache_format: CacheFormat, keys: SparseDecodeSm90Keys, targets: tuple[Int32, Int32], who: SparseDecodeGatherThread) -> None:
    """Start the copies of the RoPE columns of the thread's two keys. targets: shared memory addresses of the two halves of a RoPE stage."""
    source = _run(cache_format, D_LATENT, D_LATENT).source
    for key, target in enumerate(targets):
        copy_box(keys.rows[key] + source, target, who.lane, keys.present(key, who) != 0)


def copy_stage(first_column: int, keys: SparseDecodeSm90Keys, target: Int32, who: SparseDecodeGatherThread, count: int) -> None:
    """Start the copies of a stage's 16-bit columns of the thread's first `count` keys. target: shared memory address of its half."""
    for key in range(count):
        there = keys.present(key, who) != 0
        for box in range(STAGE_BOXES):
            row = keys.rows[key] + (first_column + box * BOX_COLUMNS) * ELEMENT_BYTES
            copy_box(row, (target ^ (key * HALF_BYTES)) + box * BOX_BYTES, who.lane, there)


def copy_box(row: Int64, target: Int32, lane: LatentSm90Lane, there: Boolean) -> None:
    """Start the copy of 64 16-bit columns of a key to half a box; of an absent key nothing is read, and zeros are written."""
    other, place = LANES_PER_KEY * CHUNK, target + lane.wide
    copy_chunk(place, row + lane.swapped, there)
    copy_chunk(place ^ other, row + (lane.swapped ^ other), there)


def store_step(
    step: LatentSm90Step,
    words: cute.Tensor,
    factors: list[Any],
    target: Int32,
    lane: LatentSm90Lane,
    conversion: Conversion,
    acquire: Callable[[], None],
) -> None:
    """Convert a step and store it in the half of a stage that begins at a shared memory address. acquire: called before the first store."""
    first = 0
    for run in step.runs:
        chunks, place, to_other = part_of(words, first, run.words), target + lane.wide, LANES_PER_KEY * CHUNK
        if run.quantised:
            if run.box:
                cute.arch.sync_warp()  # keeps ptxas from converting both boxes at a time, for which registers are short
            chunks, place, to_other = conversion.dequantise(chunks, factors[run.scale]), target + lane.narrow, CHUNK
        if first == 0:
            acquire()
        places = place, place ^ to_other  # stages begin at multiples of a row
        for i in range(2):
            store_chunk(part_of(chunks, i * CHUNK_WORDS, CHUNK_WORDS), places[i] + run.box * BOX_BYTES)
        first += run.words
