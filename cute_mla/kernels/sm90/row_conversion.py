"""Rows of e4m3 columns on their way to the stages through registers on SM90, where they become 16-bit columns.

A warpgroup has a tile. A thread has two keys of it, lane / 4 + 8 warp and the one 32 further, and of each of them every fourth
16 bytes: a warp's load is 64 bytes of each of 8 keys. A tile is a list of steps of one key per thread each, in batches: the bytes of a
batch are asked for while the batch before is converted and stored, across the end of the tile.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cutlass import Boolean, Int32, Int64, cute

from ..attention.scheduler import BOX_COLUMNS
from ..primitives.arithmetic import pin_register
from .config import BOX_BYTES, STAGES_PER_TILE
from .gather_split import CHUNK, KEYS_PER_WARP, ROW_BYTES

CHUNK_WORDS = CHUNK // 4
LANES_PER_KEY = 4
ROPE_STAGE = STAGES_PER_TILE  # the "stage" of a tile that is in the RoPE ring
IN_FLIGHT_WORDS = 48  # registers of a thread for bytes on their way: ptxas spills beyond


@dataclass(frozen=True)
class Run:
    """64 columns of a key.

    box: of the stage they go to. source: their first byte in the key's row. quantised: e4m3, 64 bytes; else 16-bit columns,
    128 bytes. scale: which scale applies, counted from the step's first one.
    """

    box: int
    source: int
    quantised: bool
    scale: int = 0

    @property
    def words(self) -> int:
        """Return 32-bit words that a thread loads."""
        return (BOX_COLUMNS if self.quantised else ROW_BYTES) // LANES_PER_KEY // 4


@dataclass(frozen=True)
class Step:
    """Bytes that are loaded together: some columns of one of a thread's keys.

    stage: of the tile, ROPE_STAGE for the RoPE columns. key: 0 or 1, of the thread's keys. scale_source: byte of the first scale
    among the scales. begins_stage, ends_stage: whether it is the first, the last step of its stage.
    """

    stage: int
    key: int
    runs: tuple[Run, ...]
    scale_source: int = 0
    begins_stage: bool = True
    ends_stage: bool = True

    @property
    def words(self) -> int:
        """Return 32-bit words that a thread loads."""
        return sum(run.words for run in self.runs)

    @property
    def quantised(self) -> bool:
        """Return whether the step needs scales."""
        return any(run.quantised for run in self.runs)


Batch = tuple[Step, ...]


def batches_of(steps: Batch) -> tuple[Batch, ...]:
    """Return the steps in batches that are loaded together while the one before is converted: as few as IN_FLIGHT_WORDS allow.

    Their number is even, so that every step of every tile has the same registers.
    """
    for count in range(2, len(steps) + 1, 2):
        ends = [len(steps) * i // count for i in range(count + 1)]
        batches = tuple(steps[begin:end] for begin, end in itertools.pairwise(ends))
        if sum(widest.words for side in buffer_steps(batches) for widest in side) <= IN_FLIGHT_WORDS:
            return batches
    raise AssertionError("a step has more words than registers")


def buffer_steps(batches: tuple[Batch, ...]) -> list[Batch]:
    """Return, of each register buffer of even and of odd batches, the step with the most words."""
    columns = [itertools.zip_longest(*batches[side::2]) for side in range(2)]
    return [tuple(max(filter(None, steps), key=lambda step: step.words) for steps in column) for column in columns]


@dataclass(frozen=True)
class Lane:
    """Offsets at which this thread reads and writes, in bytes. All constant.

    narrow, wide: within a box of shared memory, the first of the two chunks that the thread makes of 16 e4m3 values, and that it
    copies of 128 bytes; the other one is at ^ 16, ^ 64. source: of its e4m3 values within 64 bytes, and of its first chunk of 128
    within each 64. swapped: 64 if it copies the second half of the 128 bytes first.

    In every quarter of a warp lie two keys, whose rows differ in the lowest bit of the swizzle: the eight chunks that are
    stored at a time are in eight different banks.
    """

    narrow: Int32
    wide: Int32
    source: Int32
    swapped: Int32

    @staticmethod
    def of(thread: Int32) -> Lane:
        """Return the offsets of a thread of the warpgroup."""
        row, part = thread // LANES_PER_KEY, thread % LANES_PER_KEY
        swizzle = row % KEYS_PER_WARP
        swapped = row % 2
        return Lane(
            narrow=row * ROW_BYTES + ((2 * part) ^ swizzle) * CHUNK,
            wide=row * ROW_BYTES + ((part + LANES_PER_KEY * swapped) ^ swizzle) * CHUNK,
            source=part * CHUNK,
            swapped=swapped * (LANES_PER_KEY * CHUNK),
        )


def pinned_lane(thread: Int32) -> Lane:
    """Return Lane.of, pinned in registers."""
    lane = Lane.of(thread)
    return Lane(pin_register(lane.narrow), pin_register(lane.wide), pin_register(lane.source), lane.swapped)


def part_of(words: cute.Tensor, first: int, count: int) -> cute.Tensor:
    """Return the some registers of a buffer."""
    return cute.make_tensor(words.iterator + first, cute.make_layout(count))


def load_if(wanted: Boolean | Int32, words: cute.Tensor, address: Int64) -> None:
    """Start the load of some neighbouring words at a multiple of their size; no access, and registers as they were, unless wanted.

    One predicated instruction. Zeros for what is not there would be moves to the same registers, which wait for the load.
    """
    count = cute.size(words)
    before = " ".join(f"mov.b32 {{$w{i}}}, {{$r{i + 2}}};" for i in range(count))
    targets = ", ".join(f"{{$w{i}}}" for i in range(count))
    load = f"ld.global.b32 {targets}" if count == 1 else f"ld.global.v{count}.b32 {{{targets}}}"
    loaded = cute.arch.inline_ptx(
        f"{{ .reg .pred wanted; setp.ne.b32 wanted, {{$r1}}, 0; {before} @wanted {load}, [{{$r0}}]; }}",
        write_only_types=[Int32] * count,
        read_only_args=[address, Int32(wanted), *(words[i] for i in range(count))],
    )
    for i, word in enumerate(loaded if count > 1 else (loaded,)):
        words[i] = word


def load_runs_if(step: Step, words: cute.Tensor, row: Int64, lane: Lane, wanted: Boolean) -> None:
    """Start the loads of a step, from the first byte of a row that the thread moves; no access, registers as they were, unless wanted."""
    for part, address in chunks_of(step, words, row, lane):
        load_if(wanted, part, address)


def chunks_of(step: Step, words: cute.Tensor, row: Int64, lane: Lane) -> Iterator[tuple[cute.Tensor, Int64]]:
    """Yield the registers and the address of each 16 bytes of a step, from the first byte of a row that the thread moves."""
    first = 0
    for run in step.runs:
        address = row + run.source
        if run.quantised:
            yield part_of(words, first, CHUNK_WORDS), address
        else:
            yield part_of(words, first, CHUNK_WORDS), address + lane.swapped
            yield part_of(words, first + CHUNK_WORDS, CHUNK_WORDS), address + (lane.swapped ^ (LANES_PER_KEY * CHUNK))
        first += run.words


def new_buffers(batches: tuple[Batch, ...]) -> list[list[cute.Tensor]]:
    """Return the registers of even and of odd batches, all zero: what an absent key leaves must be defined."""
    buffers = [[cute.make_rmem_tensor(cute.make_layout(step.words), Int32) for step in side] for side in buffer_steps(batches)]
    for words in itertools.chain(*buffers):
        words.fill(0)
    return buffers


def zero_behind(words: cute.Tensor, row: Int64) -> Int32:
    """Return 0 once the loads of a buffer have come. row: a multiple of 16, which ptxas does not know.

    ptxas gives all loads that are in flight across a branch one scoreboard, so a wait for any of them is a wait for the last one: those
    of the next batch must be issued behind the wait for this one.
    """
    return Int32(row) & (CHUNK - 1) & words[0]


def load_chunk(source: Int32) -> cute.Tensor:
    """Load 16 bytes from a shared memory address."""
    words = cute.make_rmem_tensor(cute.make_layout(CHUNK_WORDS), Int32)
    cute.autovec_copy(chunk_at(source), words)
    return words


def store_chunk(words: cute.Tensor, target: Int32) -> None:
    """Store 16 bytes to a shared memory address."""
    cute.autovec_copy(words, chunk_at(target))


def chunk_at(address: Int32) -> cute.Tensor:
    """Return the words of 16 bytes at a shared memory address."""
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.smem, assumed_align=CHUNK)
    return cute.make_tensor(pointer, cute.make_layout(CHUNK_WORDS))


def no_wait() -> None:
    """Wait for nothing: the stage is acquired."""


def store_runs(
    step: Step,
    words: cute.Tensor,
    convert: Callable[[cute.Tensor, Run], cute.Tensor],
    target: Int32,
    lane: Lane,
    acquire: Callable[[], None] = no_wait,
) -> None:
    """Store the bytes of a step in the half of a stage that begins at a shared memory address.

    convert: 16 e4m3 values of a run in 4 words to 8 words of 16-bit columns. acquire: called before the first store.
    """
    first = 0
    for run in step.runs:
        if run.quantised:
            chunks = convert(part_of(words, first, CHUNK_WORDS), run)
            place, to_other = target + lane.narrow, CHUNK
        else:
            chunks = part_of(words, first, run.words)
            place, to_other = target + lane.wide, LANES_PER_KEY * CHUNK
        if first == 0:
            acquire()
        places = place, place ^ to_other  # stages begin at multiples of a row
        for i in range(2):
            store_chunk(part_of(chunks, i * CHUNK_WORDS, CHUNK_WORDS), places[i] + run.box * BOX_BYTES)
        first += run.words
