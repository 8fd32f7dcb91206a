"""The gather role of the SM90 kernel: the bytes of 64 slots become a tile of 16-bit columns in shared memory.

A thread has two keys of every tile, lane / 4 + 8 warp and the one 32 further, and of each of them every fourth 16 bytes: a
warp's load is 64 bytes of each of 8 keys. A tile is a list of steps of one key per thread each; the bytes of a step are
asked for several steps before they are converted and stored, across the end of the tile. The RoPE columns are no step: cp.async
copies them while the tile's other columns are converted.

Of a pair of CTAs each converts the slots' columns of one half of the keys (sm90/gather_split.py). Their RoPE columns both
gather: they are not converted.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute

from ...spec.cache_format import CacheFormat
from ...spec.mla import D_LATENT, ELEMENT_BYTES
from ..attention.tiles import BOX_COLUMNS
from ..primitives.integers import smaller
from ..primitives.registers import as_float
from ..sm90.config import STAGE_COLUMNS
from ..sm90.gather_split import CHUNK, HALF_KEYS, HALVES, KEYS_PER_WARP, Half
from ..sm90.row_conversion import LANES_PER_KEY, Lane, Run, Step, global_words, load_runs, store_runs
from ..sm90.row_copy import copy_chunk
from .operands import NO_SLOT, IndexList, Operands, slot_address

LOOKED_UP = HALVES * KEYS_PER_WARP  # keys of a warp; one lane each finds where they lie
E8M0_BITS = 255 << 23  # as the exponent of an fp32 number
E8M0_ONE = 1 << 23


def tile_steps(cache_format: CacheFormat, cluster: int) -> tuple[Step, ...]:
    """Return all steps of a tile, in order: stage by stage. The RoPE columns go another way."""
    steps: list[Step] = []
    for first in range(0, D_LATENT, STAGE_COLUMNS):
        runs = [_run(cache_format, first, column) for column in range(first, first + STAGE_COLUMNS, BOX_COLUMNS)]
        scale_bytes = cache_format.scale_bytes // (cache_format.groups or 1)
        scale_source = first // cache_format.group * max(scale_bytes, 1) if cache_format.group else 0
        # a step of two quantised boxes has the bytes of one box of 16-bit columns
        together = [tuple(runs)] if cache_format.group else [(run,) for run in runs]
        slot = first // STAGE_COLUMNS
        steps += [Step(slot, key, part, scale_source) for part in together for key in range(HALVES // cluster)]
    return tuple(steps)


def _run(cache_format: CacheFormat, first: int, column: int) -> Run:
    quantised = column < cache_format.quantised
    source = column if quantised else cache_format.wide_offset + (column - cache_format.quantised) * ELEMENT_BYTES
    scale = (column - first) // cache_format.group if quantised else 0
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

    rows: addresses of its two keys' rows, 0 for a key that is not there. own_scales: the scales of the key that it has looked
    up, where they do not lie in the row. valid: of all keys of the warp, a bit each, those of the first half of the tile first.
    """

    rows: tuple[Int64, Int64]
    own_scales: tuple[Int32, Int32]
    valid: Int32


def position_in_tile(thread: Int32) -> Int32:
    """Return the key of a tile that this thread looks up: lane l of a warp has the warp's key l % 16."""
    own = thread % LOOKED_UP
    return own // KEYS_PER_WARP * HALF_KEYS + thread // 32 * KEYS_PER_WARP + own % KEYS_PER_WARP


def source_lane(thread: Int32, half: int | Int32) -> Int32:
    """Return the lane that looked up the thread's key of one half of the tile."""
    return thread % 32 // LANES_PER_KEY + half * KEYS_PER_WARP


def find_keys(
    operands: Operands, cache_format: CacheFormat, index: Int32, in_extra: Boolean, halves: tuple[Half, Half], thread: Int32
) -> Keys:
    """Return this thread's keys.

    Each lane computes one address, of the key that it has looked up, and gets those of its two keys, which lie in these halves of the
    tile, from the others.
    """
    row, scales = slot_address(operands, cache_format, index, in_extra)
    first, second = (shuffle_address(row, source_lane(thread, half)) for half in halves)
    own = (Int32(0), Int32(0)) if cache_format.scales_inside else load_scales(scales)
    return Keys((first, second), own, cute.arch.vote_ballot_sync(row != 0))


def shuffle_address(own: Int64, lane: Int32) -> Int64:
    """Return the address that another lane has. All lanes."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 lo, hi; mov.b64 {lo, hi}, {$r0}; "
        "shfl.sync.idx.b32 lo, lo, {$r1}, 31, -1; shfl.sync.idx.b32 hi, hi, {$r1}, 31, -1; mov.b64 {$w0}, {lo, hi}; }",
        write_only_types=[Int64],
        read_only_args=[own, lane],
    )


@cute.jit
def load_scales(address: Int64) -> tuple[Int32, Int32]:
    """Load the eight bytes with a key's e8m0 scales; 0, and no access, for an absent key."""
    words = cute.make_rmem_tensor(cute.make_layout(2), Int32)
    words.fill(0)
    if address != 0:
        cute.autovec_copy(global_words(address, 2, 8), words)
    return words[0], words[1]


@dataclass(frozen=True)
class Buffer:
    """The bytes of one step on their way. words: all its runs. scale: a scale that lies in the row."""

    words: cute.Tensor
    scale: cute.Tensor

    @staticmethod
    def create(words: int) -> Buffer:
        """Return the registers for a step of up to so many words."""
        return Buffer(cute.make_rmem_tensor(cute.make_layout(words), Int32), cute.make_rmem_tensor(cute.make_layout(1), Int32))


@cute.jit
def load_step(
    cache_format: cutlass.Constexpr[CacheFormat], step: cutlass.Constexpr[Step], buffer: Buffer, row: Int64, near: Int64, lane: Lane
):
    """Start the loads of a step; zeros, and no access, for an absent key."""
    scaled = step.quantised and cache_format.scales_inside
    if row != 0:
        load_runs(step, buffer.words, near, lane)
        if cutlass.const_expr(scaled):
            buffer.scale[0] = global_words(row + (cache_format.quantised + step.scale_source), 1, 4)[0]
    else:
        clear(buffer.words, step.words)
        if cutlass.const_expr(scaled):
            clear(buffer.scale, 1)


def clear(words: cute.Tensor, count: int) -> None:
    """Zero the first registers of a buffer. As PTX, which stays in its branch: nothing is zeroed ahead of a load."""
    zeros = cute.arch.inline_ptx(" ".join(f"mov.b32 {{$w{i}}}, 0;" for i in range(count)), write_only_types=[Int32] * count)
    for i, zero in enumerate(zeros if count > 1 else (zeros,)):
        words[i] = zero


def copy_rope(cache_format: CacheFormat, rows: tuple[Int64, Int64], targets: tuple[Int32, Int32], lane: Lane) -> None:
    """Start the copies of the RoPE columns of the thread's two keys.

    targets: shared memory addresses of the two halves of a RoPE stage. Zeros are copied for an absent key, of which nothing is read.
    """
    other, first = LANES_PER_KEY * CHUNK, _run(cache_format, D_LATENT, D_LATENT).source
    for row, target in zip(rows, targets, strict=True):
        there = row != 0
        place = target + lane.wide
        copy_chunk(place, row + (lane.source + lane.swapped) + first, there)
        copy_chunk(place ^ other, row + ((lane.source + lane.swapped) ^ other) + first, there)


def step_scales(cache_format: CacheFormat, step: Step, buffer: Buffer, keys: Keys, half: Half, thread: Int32) -> list[Float32]:
    """Return the scales of a step's runs, whose key lies in this half of the tile. All lanes."""
    if not step.quantised:
        return []
    if cache_format.scales_inside:
        return [as_float(buffer.scale[0])]
    word, byte = divmod(step.scale_source, 4)
    scales = cute.arch.shuffle_sync(keys.own_scales[word], source_lane(thread, half))
    return [power_of_two(scales, byte + run.scale) for run in step.runs if run.quantised]


def power_of_two(word: Int32, byte: int) -> Float32:
    """Return 2^(e8m0 - 127) of a byte of a word, NaN for 255."""
    bits = (word << (23 - 8 * byte) if byte < 3 else word >> 1) & E8M0_BITS
    # 2^-127 is subnormal: it and NaN, which differ from their neighbours by more than the exponent, have this bit too
    special = ((bits + E8M0_ONE) & (E8M0_BITS - E8M0_ONE)) == 0
    return as_float(bits | cutlass.select_(special, Int32(E8M0_ONE >> 1), Int32(0)))


def dequantise(words: cute.Tensor, scale: Float32, dtype: type[cutlass.Numeric]) -> cute.Tensor:
    """Return 16 e4m3 values in 4 words times a scale, formed in fp32 and rounded once, in 8 words."""
    values = cute.recast_tensor(words, cutlass.Float8E4M3FN).load().to(Float32)
    rounded = cute.make_rmem_tensor(cute.make_layout(CHUNK), dtype)
    rounded.store((values * scale).to(dtype))
    return cute.recast_tensor(rounded, Int32)


def store_step(
    step: Step, buffer: Buffer, scales: list[Float32], target: Int32, lane: Lane, offset: int, dtype: type[cutlass.Numeric]
) -> None:
    """Convert a step and store it in the half of a stage that begins `offset` bytes behind a shared memory address."""

    def convert(words: cute.Tensor, run: Run) -> cute.Tensor:
        if run.box:
            cute.arch.sync_warp()  # keeps ptxas from converting both boxes at a time, for which registers are short
        return dequantise(words, scales[run.scale], dtype)

    store_runs(step, buffer.words, convert, target, lane, offset)
