"""The gather role of the SM90 kernel: the bytes of 64 slots become a tile of 16-bit columns in shared memory.

A thread has two keys of every tile, lane / 4 + 8 warp and the one 32 further, and of each of them every fourth 16 bytes: a
warp's load is 64 bytes of each of 8 keys. A tile is a list of steps of one key per thread each; the bytes of a step are
asked for several steps before they are converted and stored, across the end of the tile.

Of a pair of CTAs each converts the slots' columns of one half of the keys (parts/sm90_shares.py). Their RoPE columns both
gather: they are not converted.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float32, Int32, Int64, cute

from ...spec.cache_format import CacheFormat
from ..parts.sm90_geometry import BOX_BYTES, SLOT_COLUMNS, SLOTS_PER_TILE
from ..parts.sm90_shares import CHUNK, HALF_KEYS, HALVES, KEYS_PER_WARP, ROW_BYTES, Half
from ..parts.tiles import BOX_COLUMNS, ELEMENT_BYTES
from .operands import Operands, slot_address

CHUNK_WORDS = CHUNK // 4
LANES_PER_KEY = 4
LOOKED_UP = HALVES * KEYS_PER_WARP  # keys of a warp; one lane each finds where they lie
ROPE_SLOT = SLOTS_PER_TILE  # the "slot" of a tile that is in the RoPE ring
E8M0_BITS = 255 << 23  # as the exponent of an fp32 number
E8M0_ONE = 1 << 23
IN_FLIGHT_WORDS = 48  # registers of a thread for bytes on their way: ptxas spills beyond


@dataclass(frozen=True)
class Run:
    """64 columns of a key.

    box: of the slot they go to. source: their first byte in the key's row. quantised: e4m3, 64 bytes; else 16-bit columns,
    128 bytes. scale: which scale applies, counted from the step's first one.
    """

    box: int
    source: int
    quantised: bool
    scale: int

    @property
    def words(self) -> int:
        """32-bit words that a thread loads."""
        return (BOX_COLUMNS if self.quantised else ROW_BYTES) // LANES_PER_KEY // 4


@dataclass(frozen=True)
class Step:
    """What is loaded together: some columns of one of a thread's keys.

    slot: of the tile, ROPE_SLOT for the RoPE columns. key: 0 or 1, of the thread's keys. scale_source: byte of the first scale
    among the scales.
    """

    slot: int
    key: int
    runs: tuple[Run, ...]
    scale_source: int

    @property
    def words(self) -> int:
        """32-bit words that a thread loads."""
        return sum(run.words for run in self.runs)

    @property
    def quantised(self) -> bool:
        """Whether it needs scales."""
        return any(run.quantised for run in self.runs)


def tile_steps(cache_format: CacheFormat, cluster: int) -> tuple[Step, ...]:
    """All steps of a tile, in order: slot by slot."""
    steps: list[Step] = []
    for first in range(0, cache_format.d_qk, SLOT_COLUMNS):
        columns = range(first, min(first + SLOT_COLUMNS, cache_format.d_qk), BOX_COLUMNS)
        runs = [_run(cache_format, first, column) for column in columns]
        scale_bytes = cache_format.scale_bytes // (cache_format.groups or 1)
        scale_source = first // cache_format.group * max(scale_bytes, 1) if cache_format.group else 0
        # a step of two quantised boxes has the bytes of one box of 16-bit columns
        together = [tuple(runs)] if cache_format.group else [(run,) for run in runs]
        slot = first // SLOT_COLUMNS
        keys = range(HALVES if slot == ROPE_SLOT else HALVES // cluster)
        steps += [Step(slot, key, part, scale_source) for part in together for key in keys]
    return tuple(steps)


def _run(cache_format: CacheFormat, first: int, column: int) -> Run:
    quantised = column < cache_format.quantised
    source = column if quantised else cache_format.wide_offset + (column - cache_format.quantised) * ELEMENT_BYTES
    scale = (column - first) // cache_format.group if quantised else 0
    return Run((column - first) // BOX_COLUMNS, source, quantised, scale)


def steps_ahead(steps: tuple[Step, ...]) -> int:
    """Steps in flight: as many as the role's registers hold, and a divisor of all steps, so that every step of every tile
    has the same registers."""

    def words(ahead: int) -> int:
        return sum(max(step.words + step.quantised for step in steps[i::ahead]) for i in range(ahead))

    return max(ahead for ahead in range(1, len(steps)) if len(steps) % ahead == 0 and words(ahead) <= IN_FLIGHT_WORDS)


@dataclass(frozen=True)
class Lane:
    """Where this thread reads and writes, in bytes. All constant.

    narrow, wide: within a box of the shared memory ring, the first of the two chunks that it makes of 16 e4m3 values, and
    that it copies of 128 bytes; the other one is at ^ 16, ^ 64. source: of its e4m3 values within 64 bytes, and of its first
    chunk of 128 within each 64. swapped: 64 if it copies the second half of the 128 bytes first.

    In every quarter of a warp lie two keys, whose rows differ in the lowest bit of the swizzle: the eight chunks that are
    stored at a time are in eight different banks.
    """

    narrow: Int32
    wide: Int32
    source: Int32
    swapped: Int32

    @staticmethod
    def of(thread: Int32) -> Lane:
        """Of a thread of the warpgroup."""
        row, part = thread // LANES_PER_KEY, thread % LANES_PER_KEY
        swizzle = row % KEYS_PER_WARP
        swapped = row % 2
        return Lane(
            narrow=row * ROW_BYTES + ((2 * part) ^ swizzle) * CHUNK,
            wide=row * ROW_BYTES + ((part + LANES_PER_KEY * swapped) ^ swizzle) * CHUNK,
            source=part * CHUNK,
            swapped=swapped * (LANES_PER_KEY * CHUNK),
        )


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
    """The key of a tile that this thread looks up: lane l of a warp has the warp's key l % 16."""
    own = thread % LOOKED_UP
    return own // KEYS_PER_WARP * HALF_KEYS + thread // 32 * KEYS_PER_WARP + own % KEYS_PER_WARP


def source_lane(thread: Int32, half: int | Int32) -> Int32:
    """The lane that looked up the thread's key of one half of the tile."""
    return thread % 32 // LANES_PER_KEY + half * KEYS_PER_WARP


def find_keys(
    operands: Operands, cache_format: CacheFormat, index: Int32, in_extra: cutlass.Boolean, halves: tuple[Half, Half], thread: Int32
) -> Keys:
    """Each lane works out one address, of the key that it has looked up, and gets those of its two keys, which lie in these
    halves of the tile, from the others."""
    row, scales = slot_address(operands, cache_format, index, in_extra)
    first, second = (cute.arch.shuffle_sync(row, source_lane(thread, half)) for half in halves)
    own = (Int32(0), Int32(0)) if cache_format.scales_inside else load_scales(scales)
    return Keys((first, second), own, cute.arch.vote_ballot_sync(row != 0))


@cute.jit
def load_scales(address: Int64) -> tuple[Int32, Int32]:
    """The eight bytes with a key's e8m0 scales; 0 if it is not there."""
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
        """Registers for a step of up to so many words."""
        return Buffer(
            cute.make_rmem_tensor(cute.make_layout(words), Int32), cute.make_rmem_tensor(cute.make_layout(1), Int32)
        )


def global_words(address: Int64, count: int, align: int) -> cute.Tensor:
    """Words of gmem."""
    return cute.make_tensor(cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=align), cute.make_layout(count))


def part_of(words: cute.Tensor, first: int, count: int) -> cute.Tensor:
    """Some registers of a buffer."""
    return cute.make_tensor(words.iterator + first, cute.make_layout(count))


@cute.jit
def load_step(
    cache_format: cutlass.Constexpr[CacheFormat], step: cutlass.Constexpr[Step], buffer: Buffer, row: Int64, lane: Lane
):
    """Asks for the bytes of a step; zeros, and no access, for a key that is not there."""
    buffer.words.fill(0)
    buffer.scale.fill(0)
    if row != 0:
        first = 0
        for run in step.runs:
            address = row + (lane.source + run.source)
            if cutlass.const_expr(run.quantised):
                cute.autovec_copy(global_words(address, CHUNK_WORDS, CHUNK), part_of(buffer.words, first, CHUNK_WORDS))
            else:
                half = LANES_PER_KEY * CHUNK
                cute.autovec_copy(global_words(address + lane.swapped, CHUNK_WORDS, CHUNK), part_of(buffer.words, first, CHUNK_WORDS))
                cute.autovec_copy(
                    global_words(address + (lane.swapped ^ half), CHUNK_WORDS, CHUNK),
                    part_of(buffer.words, first + CHUNK_WORDS, CHUNK_WORDS),
                )
            first = first + run.words
        if cutlass.const_expr(step.quantised and cache_format.scales_inside):
            buffer.scale[0] = global_words(row + (cache_format.quantised + step.scale_source), 1, 4)[0]


def step_scales(
    cache_format: CacheFormat, step: Step, buffer: Buffer, keys: Keys, half: Half, thread: Int32
) -> list[Float32]:
    """The scales of a step's runs, whose key lies in this half of the tile. All lanes."""
    if not step.quantised:
        return []
    if cache_format.scales_inside:
        return [as_float(buffer.scale[0])]
    word, byte = divmod(step.scale_source, 4)
    scales = cute.arch.shuffle_sync(keys.own_scales[word], source_lane(thread, half))
    return [power_of_two(scales, byte + run.scale) for run in step.runs if run.quantised]


def power_of_two(word: Int32, byte: int) -> Float32:
    """2^(e8m0 - 127) of a byte of a word, NaN for 255."""
    bits = (word << (23 - 8 * byte) if byte < 3 else word >> 1) & E8M0_BITS
    # 2^-127 is subnormal: it and NaN, which differ from their neighbours by more than the exponent, have this bit too
    special = ((bits + E8M0_ONE) & (E8M0_BITS - E8M0_ONE)) == 0
    return as_float(bits | cutlass.select_(special, Int32(E8M0_ONE >> 1), Int32(0)))


def as_float(bits: Int32) -> Float32:
    """The fp32 number of these bits."""
    word = cute.make_rmem_tensor(cute.make_layout(1), Int32)
    word[0] = bits
    return cute.recast_tensor(word, Float32)[0]


def dequantise(words: cute.Tensor, scale: Float32, dtype: type[cutlass.Numeric]) -> cute.Tensor:
    """16 e4m3 values in 4 words times a scale, formed in fp32 and rounded once, in 8 words."""
    values = cute.recast_tensor(words, cutlass.Float8E4M3FN).load().to(Float32)
    rounded = cute.make_rmem_tensor(cute.make_layout(CHUNK), dtype)
    rounded.store((values * scale).to(dtype))
    return cute.recast_tensor(rounded, Int32)


def store_chunk(words: cute.Tensor, target: Int32) -> None:
    """16 bytes to a shared memory address."""
    pointer = cute.make_ptr(Int32, target, cute.AddressSpace.smem, assumed_align=CHUNK)
    cute.autovec_copy(words, cute.make_tensor(pointer, cute.make_layout(CHUNK_WORDS)))


def store_step(
    step: Step, buffer: Buffer, scales: list[Float32], target: Int32, lane: Lane, dtype: type[cutlass.Numeric]
) -> None:
    """Converts a step and stores it in the half of a slot at a shared memory address."""
    first = 0
    for run in step.runs:
        base = target + run.box * BOX_BYTES
        if run.quantised:
            words = dequantise(part_of(buffer.words, first, CHUNK_WORDS), scales[run.scale], dtype)
            places = (lane.narrow, lane.narrow ^ CHUNK)
        else:
            words = part_of(buffer.words, first, run.words)
            places = (lane.wide, lane.wide ^ (LANES_PER_KEY * CHUNK))
        for i in range(2):
            store_chunk(part_of(words, i * CHUNK_WORDS, CHUNK_WORDS), base + places[i])
        first += run.words
