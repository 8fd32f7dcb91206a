"""A kernel that only walks: every part writes down the work tiles that the decode kernels would do in it."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, cute

from cute_mla.kernels.attention.lengths import Lengths
from cute_mla.kernels.attention.split_kv_scheduler import SplitKvSchedule
from cute_mla.kernels.definition import KernelDefinition
from cute_mla.spec import abi
from tests.kernels.plain_kernel import plain_kernel

RECORD = 6  # request, first tile, tiles, keys from the first tile on, direct, accumulator row


class WalkArguments(NamedTuple):
    """Arguments of the kernel. records: int32 [parts, capacity, RECORD]. The others: as in the decode kernels."""

    plan: abi.Pointer
    num_splits: abi.Pointer
    lengths: abi.Pointer
    extra_lengths: abi.Pointer
    records: abi.Pointer
    counts: abi.Pointer
    batch: abi.Int32
    max_keys: abi.Int32
    extra_max_keys: abi.Int32
    max_splits: abi.Int32
    accum_rows: abi.Int32
    capacity: abi.Int32


@cute.kernel
def walk(args: WalkArguments) -> None:
    lengths = Lengths(args.lengths, args.extra_lengths, args.max_keys, args.extra_max_keys)
    schedule = SplitKvSchedule(args.plan, args.num_splits, lengths, args.batch, args.max_splits, args.accum_rows)
    part = cute.arch.block_idx()[2]
    done = Int32(0)
    if cute.arch.thread_idx()[0] == 0:
        req, begin_tile = schedule.first_work_tile()
        while req <= schedule.last_request():
            tile_range = schedule.tile_range(req, begin_tile)
            work_tile = schedule.work_tile(req, begin_tile)
            record = args.records + (part * args.capacity + done) * RECORD
            record[0] = req
            record[1] = begin_tile
            record[2] = tile_range.tiles
            record[3] = tile_range.keys
            record[4] = cutlass.select_(work_tile.direct, Int32(1), Int32(0))
            record[5] = work_tile.accum_row
            done = done + 1
            req, begin_tile = work_tile.next_req, work_tile.next_tile
        args.counts[part] = done


@cute.jit
def host(args: WalkArguments) -> None:
    walk(args).launch(grid=(1, 1, 1), block=(32, 1, 1))


def source() -> KernelDefinition:
    """Return the kernel, ready to compile."""
    return plain_kernel("walk", host, WalkArguments)
