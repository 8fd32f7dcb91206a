"""Rows of a tile on their way to the stages on SM90, without TMA: the split of the keys, cp.async, conversion of e4m3 columns.

A tile has two halves. Of each a warp has eight neighbouring keys, which are neighbours in a box of shared memory, too. Of a
pair of CTAs each brings the stages' columns of one half, and copies them to the peer. The RoPE columns both
bring: P soon overwrites them, while the peer's copy may not have been read yet.

Where columns are converted, a warpgroup has a tile. A thread has two keys of it, lane / 4 + 8 warp and the one 32 further, and of each of
them every fourth 16 bytes: a warp's load is 64 bytes of each of 8 keys. A tile is a list of steps of one key per thread each, in batches:
the bytes of a batch are asked for while the batch before is converted and stored, across the end of the tile.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, Int64, cute
from cutlass.experimental import primitives

from ...spec.mla import ELEMENT_BYTES
from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import BOX_COLUMNS
from ..primitives.arithmetic import pin_register
from ..primitives.peer import copy_to_peer
from ..primitives.rows import load_if
from .cta import BOX_BYTES, WARPS_PER_GROUP

CHUNK = 16  # bytes that a thread loads or stores at a time
CHUNK_WORDS = CHUNK // 4
ROW_BYTES = BOX_COLUMNS * ELEMENT_BYTES  # of a key in a box
HALVES = 2
HALF_KEYS = TILE_KEYS // HALVES
HALF_BYTES = HALF_KEYS * ROW_BYTES  # from a key's row in a box to that of the key in the other half
KEYS_PER_WARP = HALF_KEYS // WARPS_PER_GROUP
LANES_PER_KEY = 4
IN_FLIGHT_WORDS = 48  # registers of a thread for bytes on their way: ptxas spills beyond

Half = Any  # of a tile: 0 or 1, an int or an Int32


def halves_of_cta(cluster: int) -> tuple[Half, Half]:
    """Return the halves of a tile; the first is the one whose columns this CTA brings if another CTA brings the other's."""
    if cluster == 1:
        return 0, 1
    rank = cute.arch.block_idx_in_cluster()
    return rank, 1 - rank


def hand_over(ready: cute.Pointer, target: Int32, boxes: int, shift: Int32) -> None:
    """Commit half a stage, which all who store to it have fenced, and copy it to the peer.

    target: shared memory address of the half. One warp. A barrier expects one arrival, and the bytes of the peer's half. They may come
    first: that stage has been free there too, since kv_free counts the consumers of both.
    """
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(ready, boxes * HALF_BYTES)
        there = Int32(ready.toint()) + shift
        for box in range(boxes):
            source = target + box * BOX_BYTES
            copy_to_peer(source + shift, source, there, HALF_BYTES)


def copy_chunk(target: Int32, source: Int64, wanted: Boolean | None = None, nbytes: int = CHUNK) -> None:
    """Start the copy of 16 or 4 bytes from gmem to a shared memory address, or of zeros unless wanted."""
    primitives.cp_async_shared_global(
        cute.make_ptr(Int32, target, cute.AddressSpace.smem, assumed_align=nbytes).raw_ptr(),
        cute.make_ptr(Int32, source, cute.AddressSpace.gmem, assumed_align=nbytes).raw_ptr(),
        nbytes,
        primitives.LoadCacheModifier.CG if nbytes == CHUNK else primitives.LoadCacheModifier.CA,
        cp_size=None if wanted is None else cutlass.select_(wanted, Int32(nbytes), Int32(0)),
    )


@dataclass(frozen=True)
class LatentSm90Run:
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
class LatentSm90Step:
    """Bytes that are loaded together: some columns of one of a thread's keys.

    stage: of the tile. key: 0 or 1, of the thread's keys; key 0 begins a stage. scale_source: byte of the first scale
    among the scales. ends_stage: whether it is the last step of its stage.
    """

    stage: int
    key: int
    runs: tuple[LatentSm90Run, ...]
    scale_source: int
    ends_stage: bool

    @property
    def words(self) -> int:
        """Return 32-bit words that a thread loads."""
        return sum(run.words for run in self.runs)

    @property
    def quantised(self) -> bool:
        """Return whether the step needs scales."""
        return any(run.quantised for run in self.runs)


LatentSm90Batch = tuple[LatentSm90Step, ...]


def batches_of(steps: LatentSm90Batch) -> tuple[LatentSm90Batch, ...]:
    """Return the steps in batches that are loaded together while the one before is converted: as few as IN_FLIGHT_WORDS allow.

    Their number is even, so that every step of every tile has the same registers.
    """
    for count in range(2, len(steps) + 1, 2):
        ends = [len(steps) * i // count for i in range(count + 1)]
        batches = tuple(steps[begin:end] for begin, end in itertools.pairwise(ends))
        if sum(widest.words for side in buffer_steps(batches) for widest in side) <= IN_FLIGHT_WORDS:
            return batches
    raise AssertionError("a step has more words than registers")


def buffer_steps(batches: tuple[LatentSm90Batch, ...]) -> list[LatentSm90Batch]:
    """Return, of each register buffer of even and of odd batches, the step with the most words."""
    columns = [itertools.zip_longest(*batches[side::2]) for side in range(2)]
    return [tuple(max(filter(None, steps), key=lambda step: step.words) for steps in column) for column in columns]


@dataclass(frozen=True)
class LatentSm90Lane:
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
    def pinned(thread: Int32) -> LatentSm90Lane:
        """Return the offsets of a thread of the warpgroup, pinned in registers."""
        row, part = thread // LANES_PER_KEY, thread % LANES_PER_KEY
        swizzle = row % KEYS_PER_WARP
        swapped = row % 2
        return LatentSm90Lane(
            narrow=pin_register(row * ROW_BYTES + ((2 * part) ^ swizzle) * CHUNK),
            wide=pin_register(row * ROW_BYTES + ((part + LANES_PER_KEY * swapped) ^ swizzle) * CHUNK),
            source=pin_register(part * CHUNK),
            swapped=swapped * (LANES_PER_KEY * CHUNK),
        )


def part_of(words: cute.Tensor, first: int, count: int) -> cute.Tensor:
    """Return some neighbouring registers of a buffer."""
    return cute.make_tensor(words.iterator + first, cute.make_layout(count))


def load_runs_if(step: LatentSm90Step, words: cute.Tensor, row: Int64, lane: LatentSm90Lane, wanted: Boolean | Int32) -> None:
    """Start the loads of a step, from the first byte of a row that the thread moves; no access, registers as they were, unless wanted."""
    first = 0
    for run in step.runs:
        address = row + run.source
        if run.quantised:
            load_if(wanted, part_of(words, first, CHUNK_WORDS), address)
        else:
            load_if(wanted, part_of(words, first, CHUNK_WORDS), address + lane.swapped)
            load_if(wanted, part_of(words, first + CHUNK_WORDS, CHUNK_WORDS), address + (lane.swapped ^ (LANES_PER_KEY * CHUNK)))
        first += run.words


def new_buffers(batches: tuple[LatentSm90Batch, ...]) -> list[list[cute.Tensor]]:
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
