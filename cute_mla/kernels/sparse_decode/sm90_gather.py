"""The gather role of the SM90 kernel: the bytes of 64 slots become a tile of 16-bit columns in shared memory.

A thread has two keys of every tile, lane / 4 + 8 warp and the one 32 further, and of each of them every fourth 16 bytes: a
warp's load is 64 bytes of each of 8 keys. A tile is a list of steps of one key per thread each, in batches: the bytes of a batch are
asked for while the batch before is converted and stored, across the end of the tile. The RoPE columns, and all columns of a 16-bit
cache, are no step: cp.async copies them.

Of a pair of CTAs each converts the slots' columns of one half of the keys (sm90/gather_split.py). Their RoPE columns both
gather: they are not converted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, Uint32, cute

from ...spec.cache_format import CacheFormat
from ...spec.mla import D_LATENT, ELEMENT_BYTES
from ..attention.scheduler import BOX_COLUMNS
from ..primitives.arithmetic import smaller
from ..sm90.config import BOX_BYTES, STAGE_COLUMNS, STAGES_PER_TILE, Geometry
from ..sm90.gather_split import CHUNK, HALF_BYTES, HALF_KEYS, HALVES, KEYS_PER_WARP, Half
from ..sm90.row_conversion import CHUNK_WORDS, LANES_PER_KEY, Batch, Lane, Run, Step, load_if, load_runs_if, part_of, store_runs
from ..sm90.row_copy import copy_chunk
from .operands import NO_SLOT, IndexList, Operands, slot_address
from .sm90_scales import LOOKED_UP, Conversion, source_lane

ALL_PRESENT = -1
LOCAL_STAGES: tuple[int, ...] = (3,)  # of a tile: both CTAs of a pair convert all of them, so that fewer bytes go between the SMs


def tile_steps(cache_format: CacheFormat, geometry: Geometry, cluster: int) -> tuple[Step, ...]:
    """Return all steps of a tile, in order: stage by stage. The RoPE columns go another way."""
    steps: list[Step] = []
    for stage in range(STAGES_PER_TILE):
        first = geometry.first_column(stage)
        runs = [_run(cache_format, first, column) for column in range(first, first + STAGE_COLUMNS, BOX_COLUMNS)]
        scale_source = first // cache_format.group * cache_format.bytes_of_scale if cache_format.group else 0
        # a step of two quantised boxes has the bytes of one box of 16-bit columns
        together = [tuple(runs)] if cache_format.group else [(run,) for run in runs]
        keys = range(HALVES if stage in LOCAL_STAGES else HALVES // cluster)
        parts = [(part, key) for part in together for key in keys]
        for i, (part, key) in enumerate(parts):
            steps.append(Step(stage, key, part, scale_source, begins_stage=i == 0, ends_stage=i + 1 == len(parts)))
    return tuple(steps)


def _run(cache_format: CacheFormat, first: int, column: int) -> Run:
    quantised = column < cache_format.quantised
    source = column if quantised else cache_format.wide_offset + (column - cache_format.quantised) * ELEMENT_BYTES
    scale = (column - first) // max(cache_format.group, BOX_COLUMNS) if quantised else 0
    return Run((column - first) // BOX_COLUMNS, source, quantised, scale)


@dataclass(frozen=True)
class Indices:
    """The indices of a work tile.

    main: those before it are of the first cache. end: the list's or the work tile's, whichever comes first. first, second: where the
    indices of either cache would begin if they stood in one list.
    """

    main: Int32
    end: Int32
    first: cute.Pointer
    second: cute.Pointer

    @staticmethod
    def create(operands: Operands, req: Int32, end: Int32) -> Indices:
        """Return the those of a request before a position."""
        indices = IndexList.create(operands, req)
        end = smaller(indices.main + indices.extra, end)
        return Indices(indices.main, end, indices.main_indices, indices.extra_indices - Int64(indices.main))

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
class Keys:
    """A thread's keys of a tile.

    rows: addresses of the first bytes that it moves of its two keys, to be read only if the key is present. scales: address of its share
    of the scales of the key that it has looked up, 0 if that key is absent. valid: of all keys of the warp, a bit each, those of the
    first half of the tile first. narrow: likewise, which keys are of the second cache; None where both caches have one format.
    """

    rows: tuple[Int64, Int64]
    scales: Int64
    valid: Int32
    narrow: Int32 | None = None

    def present(self, half: Half, thread: Int32) -> Int32:
        """Return 1 if the thread's key of a half of the tile is present, else 0."""
        return (self.valid >> source_lane(thread, half)) & 1

    def is_narrow(self, half: Half, thread: Int32) -> Boolean:
        """Return whether the thread's key of a half of the tile is of the second cache, where that has a format of its own."""
        return ((self.narrow >> source_lane(thread, half)) & 1) != 0

    def behind(self, zero: Int32) -> Keys:
        """Return the same keys, known no sooner than a number that is 0."""
        return Keys((self.rows[0] + zero, self.rows[1] + zero), self.scales + zero, self.valid, self.narrow)


def position_in_tile(thread: Int32) -> Int32:
    """Return the key of a tile that this thread looks up: lane l of a warp has the warp's key l % 16."""
    own = thread % LOOKED_UP
    return own // KEYS_PER_WARP * HALF_KEYS + thread // 32 * KEYS_PER_WARP + own % KEYS_PER_WARP


def find_keys(
    operands: Operands, conversion: Conversion, index: Int32, in_extra: Boolean, halves: tuple[Half, Half], lane: Lane, thread: Int32
) -> Keys:
    """Return this thread's keys.

    Each lane computes one address, of the key that it has looked up, and gets those of its two keys, which lie in these halves of the
    tile, from the others.
    """
    row, scales = slot_address(operands, conversion.config, index, in_extra)
    if conversion.narrow:
        narrow, share = cute.arch.vote_ballot_sync(in_extra), cutlass.select_(in_extra, conversion.source(scales, thread), scales)
        found = Keys((row, row), cutlass.select_(scales != 0, share, scales), cute.arch.vote_ballot_sync(row != 0), narrow)
        sources = [cutlass.select_(found.is_narrow(half, thread), narrow_source(lane), lane.source) for half in halves]
        first, second = (shuffle_address(row, source_lane(thread, half)) + source for half, source in zip(halves, sources, strict=True))
        return Keys((first, second), found.scales, found.valid, narrow)
    first, second = (shuffle_address(row, source_lane(thread, half)) + lane.source for half in halves)
    if conversion.shares:
        scales = cutlass.select_(scales != 0, conversion.source(scales, thread), scales)
    return Keys((first, second), scales, cute.arch.vote_ballot_sync(row != 0))


def narrow_source(lane: Lane) -> Int32:
    """Return where a lane's 16 bytes begin of 64 columns of e2m1: two lanes load the same, and use a half each."""
    return (lane.source >> 1) & CHUNK


def shuffle_address(own: Int64, lane: Int32) -> Int64:
    """Return the address that another lane has. All lanes."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 lo, hi; mov.b64 {lo, hi}, {$r0}; "
        "shfl.sync.idx.b32 lo, lo, {$r1}, 31, -1; shfl.sync.idx.b32 hi, hi, {$r1}, 31, -1; mov.b64 {$w0}, {lo, hi}; }",
        write_only_types=[Int64],
        read_only_args=[own, lane],
    )


def load_batch(batch: Batch, buffers: list[cute.Tensor], keys: Keys, halves: tuple[Half, Half], lane: Lane, thread: Int32) -> None:
    """Start the loads of a batch of steps."""
    for step, words in zip(batch, buffers, strict=False):
        row, there = keys.rows[step.key], keys.present(halves[step.key], thread)
        if keys.narrow is None:
            load_runs_if(step, words, row, lane, there)
            continue
        narrow = keys.is_narrow(halves[step.key], thread)
        for i, run in enumerate(step.runs):
            source = cutlass.select_(narrow, Int32(run.source // HALVES), Int32(run.source))
            load_if(there, part_of(words, i * CHUNK_WORDS, CHUNK_WORDS), row + source)


@cute.jit
def clear_absent(step: cutlass.Constexpr[Step], words: cute.Tensor, keys: Keys, half: Half, thread: Int32):
    """Zero the bytes of a step if its key is absent: the registers still have those of another key."""
    if keys.valid != ALL_PRESENT:
        mask = Int32(0) - keys.present(half, thread)
        for i in cutlass.range_constexpr(step.words):
            words[i] = words[i] & mask


def copy_rope(
    cache_format: CacheFormat, keys: Keys, halves: tuple[Half, Half], targets: tuple[Int32, Int32], lane: Lane, thread: Int32
) -> None:
    """Start the copies of the RoPE columns of the thread's two keys. targets: shared memory addresses of the two halves of a RoPE stage."""
    source = _run(cache_format, D_LATENT, D_LATENT).source
    for row, half, target in zip(keys.rows, halves, targets, strict=True):
        copy_box(row + source, target, lane, keys.present(half, thread) != 0)


def copy_stage(first_column: int, keys: Keys, halves: tuple[Half, Half], target: Int32, lane: Lane, thread: Int32, count: int) -> None:
    """Start the copies of a stage's 16-bit columns of the thread's first `count` keys. target: shared memory address of its half."""
    for key in range(count):
        there = keys.present(halves[key], thread) != 0
        for box in range(STAGE_COLUMNS // BOX_COLUMNS):
            row = keys.rows[key] + (first_column + box * BOX_COLUMNS) * ELEMENT_BYTES
            copy_box(row, (target ^ (key * HALF_BYTES)) + box * BOX_BYTES, lane, there)


def copy_box(row: Int64, target: Int32, lane: Lane, there: Boolean) -> None:
    """Start the copy of 64 16-bit columns of a key to half a box; of an absent key nothing is read, and zeros are written."""
    other, place = LANES_PER_KEY * CHUNK, target + lane.wide
    copy_chunk(place, row + lane.swapped, there)
    copy_chunk(place ^ other, row + (lane.swapped ^ other), there)


def store_step(
    step: Step,
    loaded: cute.Tensor,
    factors: list[Any],
    target: Int32,
    lane: Lane,
    conversion: Conversion,
    acquire: Callable[[], None],
) -> None:
    """Convert a step and store it in the half of a stage that begins at a shared memory address. acquire: called before the first store."""

    def convert(words: cute.Tensor, run: Run) -> cute.Tensor:
        if run.box:
            cute.arch.sync_warp()  # keeps ptxas from converting both boxes at a time, for which registers are short
        return conversion.dequantise(words, factors[run.scale])

    store_runs(step, loaded, convert, target, lane, acquire)
