"""A kernel that only walks: every part writes down the work tiles that the decode kernels would do in it."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute
from cutlass.cute.runtime import make_ptr

from cute_mla.kernels.attention.lengths import Lengths
from cute_mla.kernels.attention.split_kv_scheduler import SplitKvSchedule
from cute_mla.kernels.definition import KernelDefinition
from tests.support.params import int32s, pointers

RECORD = 6  # request, first tile, tiles, keys from the first tile on, direct, accumulator row
PARAMS = (
    *pointers("plan", "num_splits", "lengths", "extra_lengths", "records", "counts"),  # records: int32 [parts, capacity, RECORD]
    *int32s("batch", "max_keys", "extra_max_keys", "max_splits", "accum_rows", "capacity"),
)


@dataclass(frozen=True)
class WalkConfig:
    """The kernel has no variants."""

    name: str = "walk"


@cute.kernel
def walk(
    plan: cute.Pointer,
    num_splits: cute.Pointer,
    lengths: cute.Pointer,
    extra_lengths: cute.Pointer,
    records: cute.Pointer,
    counts: cute.Pointer,
    batch: Int32,
    max_keys: Int32,
    extra_max_keys: Int32,
    max_splits: Int32,
    accum_rows: Int32,
    capacity: Int32,
) -> None:
    schedule = SplitKvSchedule(plan, num_splits, Lengths(lengths, extra_lengths, max_keys, extra_max_keys), batch, max_splits, accum_rows)
    part = cute.arch.block_idx()[2]
    done = Int32(0)
    if cute.arch.thread_idx()[0] == 0:
        req, begin_tile = schedule.first_work_tile()
        while req <= schedule.last_request():
            tile_range = schedule.tile_range(req, begin_tile)
            work_tile = schedule.work_tile(req, begin_tile)
            record = records + (part * capacity + done) * RECORD
            record[0] = req
            record[1] = begin_tile
            record[2] = tile_range.tiles
            record[3] = tile_range.keys
            record[4] = cutlass.select_(work_tile.direct, Int32(1), Int32(0))
            record[5] = work_tile.accum_row
            done = done + 1
            req, begin_tile = work_tile.next_req, work_tile.next_tile
        counts[part] = done


@cute.jit
def host(
    plan: cute.Pointer,
    num_splits: cute.Pointer,
    lengths: cute.Pointer,
    extra_lengths: cute.Pointer,
    records: cute.Pointer,
    counts: cute.Pointer,
    batch: Int32,
    max_keys: Int32,
    extra_max_keys: Int32,
    max_splits: Int32,
    accum_rows: Int32,
    capacity: Int32,
) -> None:
    walk(
        plan, num_splits, lengths, extra_lengths, records, counts, batch, max_keys, extra_max_keys, max_splits, accum_rows, capacity
    ).launch(grid=(1, 1, 1), block=(32, 1, 1))


def source() -> KernelDefinition:
    """Return the kernel, ready to compile."""
    int32s_in_memory = make_ptr(Int32, 0, cute.AddressSpace.gmem, assumed_align=4)
    return KernelDefinition(
        op="walk",
        config=WalkConfig(),
        host=host,
        args=(*(int32s_in_memory for _ in range(6)), *(Int32(1) for _ in range(6))),
        params=PARAMS,
        block=(32, 1, 1),
        cluster=(1, 1, 1),
        smem_bytes=0,
    )
