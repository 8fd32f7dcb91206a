"""The item of a round trip through the SM100 logits kernel: the roles that find items, take them, and fill what no key is scored for."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.experimental import primitives

from ...spec.mqa_logits import TILE_KEYS, MqaLogitsArguments, MqaLogitsConfig
from ..primitives.arithmetic import smaller
from ..primitives.copies import start_copy
from .items import LaneItem, PostedItems, WorkItem, WorkItems, for_each_item
from .sm100_config import GROUPS, ITEM_COLUMNS, LANES, MqaLogitsSmemSm100

WEIGHT_BYTES = 4


@dataclass(frozen=True)
class Items:
    """The items of a CTA on their way to its roles, with the weights of their tokens."""

    args: MqaLogitsArguments
    config: MqaLogitsConfig
    smem: MqaLogitsSmemSm100

    @property
    def tokens(self) -> int:
        """Return the query tokens of an item."""
        return GROUPS * self.config.block_tokens

    @property
    def posted_items(self) -> PostedItems:
        """Return the items that have been posted."""
        return PostedItems(self.smem.sItems, self.tokens)

    def work_items(self) -> WorkItems:
        """Return the items of the launch."""
        return WorkItems(self.args, self.tokens, self.config.paged)

    def weights(self, turn: Int32) -> cute.Pointer:
        """Return the weights of an item, fp32 (256 columns)."""
        return self.smem.sWeights + self.smem.item_ready.stage(turn) * ITEM_COLUMNS

    def is_wide(self, item: WorkItem) -> Boolean:
        """Return whether an item has two row blocks."""
        return item.tokens > self.config.block_tokens

    def rounds(self, item: WorkItem) -> Int32:
        """Return the rounds of an item: a tile each, or two tiles where there is one row block."""
        tiles = item.end - item.begin
        return cutlass.select_(self.is_wide(item), tiles, (tiles + 1) >> 1)

    def wait(self, turn: Int32) -> tuple[Boolean, WorkItem]:
        """Wait item_ready. Return (whether there is an item of that number, the item, without tiles if not)."""
        self.smem.item_ready.consumer_wait(turn)
        return self.posted_items.take(self.smem.item_ready.stage(turn))

    def release(self, turn: Int32) -> None:
        """Signal item_free. One warp."""
        self.smem.item_free.consumer_release(turn)


class MqaLogitsItemRoleSm100:
    """One warp."""

    @cute.jit
    def run(self, items: Items):
        """Wait item_free. Signal item_ready."""

        def visit(found: LaneItem, owner: Int32, posted: Int32, tiles: Int32) -> None:
            self.post(items, found, owner, posted)

        posted, _ = for_each_item(items.work_items(), visit)
        items.smem.item_free.producer_acquire(posted)
        items.posted_items.post_end(items.smem.item_ready.stage(posted))
        items.smem.item_ready.producer_commit(posted)
        primitives.cp_async_mbarrier_arrive(items.smem.item_ready.barrier(posted).raw_ptr(), noinc=True)

    @cute.jit
    def post(self, items: Items, found: LaneItem, owner: Int32, turn: Int32):
        """Post the item of a lane, with its weights."""
        ready = items.smem.item_ready
        first_token, tokens = (cute.arch.shuffle_sync(number, owner) for number in (found.item.first_token, found.item.tokens))
        items.smem.item_free.producer_acquire(turn)
        items.posted_items.post(ready.stage(turn), found, owner)
        self.copy_weights(items, first_token, tokens, items.weights(turn))
        primitives.cp_async_mbarrier_arrive(ready.barrier(turn).raw_ptr(), noinc=True)
        ready.producer_commit(turn)

    def copy_weights(self, items: Items, first_token: Int32, tokens: Int32, target: cute.Pointer) -> None:
        """Start the copies of an item's weights: 0 where there is no token or no head. A lane has every 32nd column."""
        args = items.args
        for i in range(ITEM_COLUMNS // LANES):
            token, first_head = divmod(i * LANES, items.config.head_tile)
            head = first_head + cute.arch.lane_idx()
            source = args.weights + (Int64(first_token + token) * args.weights_stride_token + head)
            present = (token < tokens) & (head < args.heads)
            start_copy(target + (i * LANES + cute.arch.lane_idx()), source.toint(), present, WEIGHT_BYTES)


class MqaLogitsFillRoleSm100:
    """One warp, for columns of tiles that no token of an item sees."""

    @cute.jit
    def run(self, items: Items):
        """Wait item_ready. Signal item_free."""
        args = items.args
        turn, more = Int32(0), Boolean(True)
        while more:
            more, item = items.wait(turn)
            items.release(turn)
            if args.clean != 0:
                for token in cutlass.range(item.tokens, unroll=1):
                    row = args.logits + Int64(item.first_token + token) * args.logits_stride_token
                    fill_columns(row, item.first * TILE_KEYS, item.begin * TILE_KEYS)
                    fill_columns(row, item.end * TILE_KEYS, smaller(item.until * TILE_KEYS, args.columns))
            turn = turn + 1


@cute.jit
def fill_columns(row: cute.Pointer, begin: Int32, end: Int32):
    """Set columns of a row to -inf. One warp."""
    for column in cutlass.range(begin + cute.arch.lane_idx(), end, LANES, unroll=4):
        (row + column).store(-Float32.inf)
