"""The load role of the SM100 logits kernel: Q and keys by TMA, their scales by cp.async, ahead of the products.

sm100.py describes tiles and pipelines.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, Int64, Uint32, cute
from cutlass.experimental import primitives

from ...spec.mqa_logits import COLUMNS, SCALE_BYTES, TILE_KEYS, MqaLogitsArguments
from ..primitives.arithmetic import smaller
from ..primitives.copies import load_box, start_copy
from .items import WorkItem
from .sm100_config import BLOCK_BYTES, LANES, QUERY_BYTES, TILE_BYTES, MqaLogitsSmemSm100
from .sm100_item import Items

NO_PAGE = -1  # of which TMA makes zeros
TILE_SHIFT = TILE_KEYS.bit_length() - 1
LANE_SCALES = TILE_KEYS // LANES  # of a tile


class MqaLogitsLoadRoleSm100:
    """One warp."""

    @cute.jit
    def run(self, items: Items):
        """Wait item_ready, query_free, key_free. Signal item_free, query_ready, key_ready, scale_ready."""
        turn, more = Int32(0), Boolean(True)
        queries, loaded = Int32(0), Int32(0)
        while more:
            more, item = items.wait(turn)
            items.release(turn)
            if item.begin < item.end:
                self.load_queries(items, item, queries)
                if cutlass.const_expr(items.config.paged):
                    self.load_pages(items, item, loaded)
                else:
                    self.load_rows(items, item, loaded)
                queries, loaded = queries + 1, loaded + (item.end - item.begin)
            turn = turn + 1
        cute.arch.griddepcontrol_launch_dependents()
        smem = items.smem
        smem.key_free.drain(smem.key_free.state(loaded))
        smem.query_free.drain(smem.query_free.state(queries))

    @cute.jit
    def load_queries(self, items: Items, item: WorkItem, use: Int32):
        """Load Q of an item's row blocks. Rows of heads or tokens that are not there are zeros, or another request's."""
        ready, target = items.smem.query_ready.barrier(use), items.smem.sQ + items.smem.query_ready.stage(use) * QUERY_BYTES
        items.smem.query_free.producer_acquire(use)
        wide = items.is_wide(item)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(ready, cutlass.select_(wide, Int32(QUERY_BYTES), Int32(BLOCK_BYTES)))
            load_box(target, items.args.q_map, (0, 0, item.first_token), ready)
            if wide:
                second = item.first_token + items.config.block_tokens
                load_box(target + BLOCK_BYTES, items.args.q_map, (0, 0, second), ready)

    @cute.jit
    def load_rows(self, items: Items, item: WorkItem, first_use: Int32):
        """Load the tiles of an item from keys that lie in a row."""
        smem, args = items.smem, items.args
        for tile in cutlass.range(item.begin, item.end, unroll=1):
            use = first_use + (tile - item.begin)
            ready, target = smem.key_ready.barrier(use), key_stage(items, use)
            smem.key_free.producer_acquire(use)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(ready, TILE_BYTES)
                load_box(target, args.k_map, (0, tile * TILE_KEYS), ready)
            for i in cutlass.range_constexpr(LANE_SCALES):
                place = i * LANES + cute.arch.lane_idx()
                key = tile * TILE_KEYS + place
                start_copy(scale_of(items, use, place), (args.scales + key).toint(), key < item.keys, SCALE_BYTES)
            scales_landed(smem, use)

    @cute.jit
    def load_pages(self, items: Items, item: WorkItem, first_use: Int32):
        """Load the tiles of an item from pages. Lane l has looked up the l-th entry of the block table for the tiles of a group."""
        walk = PageWalk.create(items.args, item)
        page = walk.look_up(item.begin)
        for first in cutlass.range(item.begin, item.end, walk.group, unroll=1):
            # asked for a group ahead: the answer takes longer than a stage takes to come free
            following = walk.look_up(first + walk.group)
            for tile in cutlass.range(first, smaller(first + walk.group, item.end), unroll=1):
                self.load_paged_tile(items, item, walk, page, tile, tile - first, first_use + (tile - item.begin))
            page = following

    @cute.jit
    def load_paged_tile(self, items: Items, item: WorkItem, walk: PageWalk, pages: Int32, tile: Int32, in_group: Int32, use: Int32):
        """Load one tile, a box a page."""
        smem, args = items.smem, items.args
        lane = cute.arch.lane_idx()
        own = in_group * walk.tile_pages
        page = walk.checked(cute.arch.shuffle_sync(pages, own + lane))
        ready, target = smem.key_ready.barrier(use), key_stage(items, use)
        smem.key_free.producer_acquire(use)
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(ready, TILE_BYTES)
        cute.arch.sync_warp()
        if lane < walk.tile_pages:
            load_box(target + lane * (args.page_size * COLUMNS), args.k_map, (0, 0, page), ready)
        for i in cutlass.range_constexpr(LANE_SCALES):
            place = i * LANES + lane
            box = place >> walk.page_shift
            page = walk.checked(cute.arch.shuffle_sync(pages, own + box))
            offset = Int64(page) * args.scales_stride_page + (place - (box << walk.page_shift)) * SCALE_BYTES
            present = (page >= 0) & (tile * TILE_KEYS + place < item.keys)
            start_copy(scale_of(items, use, place), (args.scales + offset).toint(), present, SCALE_BYTES)
        scales_landed(smem, use)


@dataclass(frozen=True)
class PageWalk:
    """The pages of an item's keys. page_shift: log2 of a page's keys. tile_pages: of a tile. group: tiles whose pages 32 lanes know."""

    args: MqaLogitsArguments
    item: WorkItem
    page_shift: Int32
    tile_pages: Int32
    group: Int32

    @staticmethod
    def create(args: MqaLogitsArguments, item: WorkItem) -> PageWalk:
        """Return the walk of an item."""
        page_shift = Int32(LANES - 1) - Int32(cute.arch.clz(Uint32(args.page_size)))
        tile_pages = Int32(TILE_KEYS) >> page_shift
        return PageWalk(args, item, page_shift, tile_pages, Int32(LANES) >> (TILE_SHIFT - page_shift))

    @cute.jit
    def look_up(self, tile: Int32):
        """Return the lane's entry of the block table, counted from the first of a tile. One without a key in use is never read."""
        page = Int32(NO_PAGE)
        entry = tile * self.tile_pages + cute.arch.lane_idx()
        if entry < (self.item.keys + self.args.page_size - 1) >> self.page_shift:
            page = (self.args.block_table + (Int64(self.item.request) * self.args.table_stride + entry)).load()
        return page

    def checked(self, entry: Int32) -> Int32:
        """Return the page that an entry names, NO_PAGE if it is outside the cache."""
        return cutlass.select_(Uint32(entry) < Uint32(self.args.pages), entry, Int32(NO_PAGE))


def key_stage(items: Items, use: Int32) -> cute.Pointer:
    """Return the first byte of a stage of keys."""
    return items.smem.sKeys + items.smem.key_ready.stage(use) * TILE_BYTES


def scale_of(items: Items, use: Int32, key: Int32) -> cute.Pointer:
    """Return the scale of a key of a tile, in shared memory."""
    return items.smem.sScales + (items.smem.scale_ready.stage(use) * TILE_KEYS + key)


def scales_landed(smem: MqaLogitsSmemSm100, use: Int32) -> None:
    """Arrive for each lane as soon as all its copies up to here have landed."""
    primitives.cp_async_mbarrier_arrive(smem.scale_ready.barrier(use).raw_ptr(), noinc=True)
