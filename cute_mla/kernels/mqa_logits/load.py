"""The role that brings items, queries, weights, keys and scales on SM90 and SM120: one warp, as far ahead as there are stages."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, Int64, Uint32, cute

from ...spec.mqa_logits import BLOCK_COLUMNS, COLUMNS, TILE_KEYS, MqaLogitsArguments
from ..primitives.arithmetic import smaller
from ..primitives.copies import arrive_landed, load_box, start_copy
from ..sm90.rows import copy_chunk
from .items import LaneItem, PostedItems, WorkItem, WorkItems, for_each_item
from .smem import BLOCKS, ITEM_COLUMNS, LANES, QUERY_BLOCK_BYTES, TILE_BYTES, MqaLogitsSmem

SCALES_PER_LANE = TILE_KEYS // LANES
FLOAT_BYTES = 4
NO_PAGE = -1


@dataclass(frozen=True)
class PageBoxes:
    """Places of pages in a tile. page_size: keys of a page. pages: of a tile. page, row: where the lane's four keys lie."""

    page_size: Int32
    pages: Int32
    page: Int32
    row: Int32

    @staticmethod
    def create(page_size: Int32) -> PageBoxes:
        """Return it for a lane."""
        key = cute.arch.lane_idx() * SCALES_PER_LANE
        page = Int32(Uint32(key) // Uint32(page_size))
        return PageBoxes(page_size, Int32(Uint32(TILE_KEYS) // Uint32(page_size)), page, key - page * page_size)


class MqaLogitsLoadRole:
    """One warp. head_tile: heads of a token within a row block."""

    def __init__(self, paged: bool, head_tile: int) -> None:
        self.paged = paged
        self.head_tile = head_tile
        self.block_tokens = BLOCK_COLUMNS // head_tile

    @cute.jit
    def run(self, items: WorkItems, smem: MqaLogitsSmem):
        """Wait key_free, item_free. Signal key_ready, item_ready. Behind the last item comes the word that there is none."""
        posted_items = PostedItems(smem.sItems, items.block_tokens)
        boxes = PageBoxes.create(items.args.page_size) if self.paged else None

        def visit(found: LaneItem, owner: Int32, posted: Int32, use: Int32) -> None:
            item = found.broadcast(owner)
            stage = self.take_stage(smem, posted)
            posted_items.post(stage, found, owner)
            self.load_queries(items.args, smem, smem.item_ready.barrier(posted), item, stage)
            if cutlass.const_expr(self.paged):
                self.load_pages(items.args, smem, item, boxes, use)
            else:
                self.load_rows(items.args, smem, item, use)

        posted, _ = for_each_item(items, visit)
        stage = self.take_stage(smem, posted)
        posted_items.post_end(stage)
        arrive_landed(smem.item_ready.barrier(posted))
        smem.item_ready.producer_commit(posted)

    def take_stage(self, smem: MqaLogitsSmem, number: Int32) -> Int32:
        """Wait item_free. Return the stage of an item."""
        smem.item_free.producer_acquire(number)
        return smem.item_ready.stage(number)

    @cute.jit
    def load_queries(self, args: MqaLogitsArguments, smem: MqaLogitsSmem, ready: cute.Pointer, item: WorkItem, stage: Int32):
        """Start the copies of an item's weights and queries, and hand on what the warp has written of it."""
        lane = cute.arch.lane_idx()
        for row in cutlass.range_constexpr(0, ITEM_COLUMNS, LANES):
            token, head = (row + lane) // self.head_tile, (row + lane) % self.head_tile
            there = (token < item.tokens) & (head < args.heads)
            source = args.weights.toint() + (Int64(item.first_token + token) * args.weights_stride_token + head) * FLOAT_BYTES
            target = smem.sWeights.iterator.toint() + (stage * ITEM_COLUMNS + row + lane) * FLOAT_BYTES
            copy_word(target, source, there)
        arrive_landed(ready)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(ready, BLOCKS * QUERY_BLOCK_BYTES)
            for block in range(BLOCKS):
                box = smem.sQ.iterator + (stage * BLOCKS + block) * QUERY_BLOCK_BYTES
                load_box(box, args.q_map, (0, 0, item.first_token + block * self.block_tokens), ready)

    @cute.jit
    def load_rows(self, args: MqaLogitsArguments, smem: MqaLogitsSmem, item: WorkItem, use: Int32):
        """Start the copies of an item's keys in a row and of their scales. Keys after the last one are zeros. use: of the first tile."""
        lane, keys, scales = cute.arch.lane_idx(), smem.key_ready.state(use), args.scales.toint()
        for tile in cutlass.range(item.begin, item.end, unroll=1):
            smem.key_free.producer_acquire(keys)
            ready = smem.key_ready.barrier(keys)
            for i in cutlass.range_constexpr(SCALES_PER_LANE):
                row = i * LANES + lane
                key = tile * TILE_KEYS + row
                target = smem.sScales.iterator.toint() + (keys.stage * TILE_KEYS + row) * FLOAT_BYTES
                copy_word(target, scales + Int64(key) * FLOAT_BYTES, key < args.keys)
            arrive_landed(ready)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(ready, TILE_BYTES)
                load_box(tile_of(smem, keys.stage), args.k_map, (0, tile * TILE_KEYS), ready)
            keys = smem.key_ready.advance(keys)

    @cute.jit
    def load_pages(self, args: MqaLogitsArguments, smem: MqaLogitsSmem, item: WorkItem, boxes: PageBoxes, use: Int32):
        """Start the copies of an item's keys in pages and of their scales.

        A page is a box. One after the last key that is seen, and one that is none of the cache's, is zeros, and so are its scales.
        """
        table = args.block_table + Int64(item.request) * args.table_stride
        keys, scales = smem.key_ready.state(use), args.scales.toint()
        together = Int32(Uint32(LANES) // Uint32(boxes.pages))  # tiles whose entries of the table a warp holds
        for first in cutlass.range(item.begin, item.end, together, unroll=1):
            entry = first * boxes.pages + cute.arch.lane_idx()
            held = Int32(NO_PAGE)
            if entry * boxes.page_size < item.keys:
                held = (table + entry).load()
            held = cutlass.select_(Uint32(held) < Uint32(args.pages), held, Int32(NO_PAGE))
            for tile in cutlass.range(first, smaller(first + together, item.end), unroll=1):
                smem.key_free.producer_acquire(keys)
                ready, before = smem.key_ready.barrier(keys), (tile - first) * boxes.pages
                mine = cute.arch.shuffle_sync(held, before + boxes.page)
                source = scales + Int64(mine) * args.scales_stride_page + boxes.row * FLOAT_BYTES
                row = keys.stage * TILE_KEYS + cute.arch.lane_idx() * SCALES_PER_LANE
                copy_chunk(smem.sScales.iterator.toint() + row * FLOAT_BYTES, source, mine >= 0)
                arrive_landed(ready)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(ready, TILE_BYTES)
                target = tile_of(smem, keys.stage)
                for box in cutlass.range(boxes.pages, unroll=1):
                    page = cute.arch.shuffle_sync(held, before + box)
                    with cute.arch.elect_one():
                        load_box(target + box * boxes.page_size * COLUMNS, args.k_map, (0, 0, page), ready)
                keys = smem.key_ready.advance(keys)


def tile_of(smem: MqaLogitsSmem, stage: Int32) -> cute.Pointer:
    """Return the first byte of a stage of keys."""
    return smem.sK.iterator + stage * TILE_BYTES


def copy_word(target: Int32, source: Int64, wanted: Boolean) -> None:
    """Start the copy of 4 bytes from gmem to a shared memory address, or of zeros."""
    start_copy(cute.make_ptr(Int32, target, cute.AddressSpace.smem, assumed_align=FLOAT_BYTES), source, wanted, FLOAT_BYTES)
