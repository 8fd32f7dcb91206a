"""Kernels that only walk: every CTA writes down the work tiles that it would do as one of a decode kernel."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
from cutlass import Int32, cute

from cute_mla.kernels.attention.lengths import Lengths, RowTile
from cute_mla.kernels.attention.scheduler import SplitKvSchedule
from cute_mla.kernels.definition import KernelDefinition
from cute_mla.spec import abi
from cute_mla.spec.dense_decode import TILE_ROWS
from tests.kernels.plain_kernel import plain_kernel

RECORD = 6  # request, first tile, tiles, keys from the first tile on, direct, accumulator row


class WalkArguments(NamedTuple):
    """Arguments of the kernels.

    records: int32 [CTAs, capacity, RECORD]; CTA (x, 0, part) is number x * parts + part. The others: as in the decode kernels.
    """

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
    mask: abi.Int32
    s_q: abi.Int32
    heads_per_kv: abi.Int32
    reach: abi.Int32


@cute.kernel
def walk(args: WalkArguments, cluster: cutlass.Constexpr[int]) -> None:
    lengths = Lengths(args.lengths, args.extra_lengths, args.max_keys, args.extra_max_keys)
    rows = RowTile(args.mask, args.s_q, args.heads_per_kv, args.reach, cluster, cluster * TILE_ROWS) if cluster else None
    schedule = SplitKvSchedule(args.plan, args.num_splits, lengths, args.batch, args.max_splits, args.accum_rows, rows)
    x, _, part = cute.arch.block_idx()
    cta = x * cute.arch.grid_dim()[2] + part
    done = Int32(0)
    if cute.arch.thread_idx()[0] == 0:
        req, begin_tile = schedule.first_work_tile()
        while req <= schedule.last_request():
            tile_range = schedule.tile_range(req, begin_tile)
            work_tile = schedule.work_tile(req, begin_tile)
            record = args.records + (cta * args.capacity + done) * RECORD
            record[0] = req
            record[1] = begin_tile
            record[2] = tile_range.tiles
            record[3] = tile_range.keys
            record[4] = cutlass.select_(work_tile.direct, Int32(1), Int32(0))
            record[5] = work_tile.accum_row
            done = done + 1
            req, begin_tile = work_tile.next_req, work_tile.next_tile
        args.counts[cta] = done


@cute.jit
def walk_all_tiles(args: WalkArguments) -> None:
    walk(args, 0).launch(grid=(1, 1, 1), block=(32, 1, 1))


@cute.jit
def walk_alone(args: WalkArguments) -> None:
    walk(args, 1).launch(grid=(1, 1, 1), block=(32, 1, 1))


@cute.jit
def walk_as_pair(args: WalkArguments) -> None:
    walk(args, 2).launch(grid=(1, 1, 1), block=(32, 1, 1))


def source(cluster: int = 0) -> KernelDefinition:
    """Return a kernel, ready to compile. cluster: CTAs of a cluster whose rows decide which tiles a CTA does; 0: it does all of them."""
    return plain_kernel("walk", (walk_all_tiles, walk_alone, walk_as_pair)[cluster], WalkArguments)
