"""Work items of a logits kernel: which tiles of keys a row block is scored against, and what each of its tokens sees.

One warp walks over the CTA's items, 32 at a time: each lane finds out about one of them, so that items without work cost next to nothing.
spec/mqa_logits.py has the order of the items.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import cutlass
from cutlass import Boolean, Int32, Uint32, cute

from ...spec.mqa_logits import TILE_KEYS, MqaLogitsArguments
from ..primitives.arithmetic import clip, larger, smaller
from ..primitives.rows import aligned

LANES = 32
MAX_INT32 = 0x7FFFFFFF


@dataclass(frozen=True)
class WorkItem:
    """One row block against the tiles of a chunk. Uniform in a warp.

    first_token: of the block, counted over all requests. tokens: of the block that exist. request: whose pages hold the keys; 0 without
    pages. begin, end: tiles to score, equal if there are none. first, until: all tiles of the item; with clean logits, columns of those
    that are not scored are to be filled. keys: after the last key that a token of the block sees.
    """

    first_token: Int32
    tokens: Int32
    request: Int32
    begin: Int32
    end: Int32
    first: Int32
    until: Int32
    keys: Int32


ITEM_WORDS = len(fields(WorkItem))  # of a posted item, before those of its tokens
TOKEN_WORDS = 2  # of a token of a posted item: the first key that it sees, and the one after the last


@dataclass(frozen=True)
class LaneItem:
    """The item that a lane has found. windows: (first key, key after the last) of each token, equal if it sees none."""

    item: WorkItem
    windows: tuple[tuple[Int32, Int32], ...]

    def broadcast(self, lane: Int32) -> WorkItem:
        """Return the item of a lane, in all lanes."""
        return WorkItem(*(cute.arch.shuffle_sync(getattr(self.item, field.name), lane) for field in fields(WorkItem)))


@dataclass(frozen=True)
class WorkItems:
    """All items of a launch. block_tokens: query tokens of a row block. paged: where the keys lie."""

    args: MqaLogitsArguments
    block_tokens: int
    paged: bool

    def request_blocks(self) -> Int32:
        """Return the row blocks of a request; without pages, of all tokens."""
        tokens = self.args.tokens_per_request if self.paged else self.args.tokens
        return Int32((Uint32(tokens) + (self.block_tokens - 1)) // self.block_tokens)

    def row_blocks(self) -> Int32:
        """Return the row blocks of all requests."""
        blocks = self.request_blocks()
        if self.paged:
            blocks = Int32(Uint32(self.args.tokens) // Uint32(self.args.tokens_per_request)) * blocks
        return blocks

    def tiles(self) -> Int32:
        """Return the tiles of keys of a row block: to the last key that can be seen, or to the last column where all are written."""
        args = self.args
        absolute = cutlass.select_(args.clean != 0, args.columns, smaller(args.keys, args.columns))
        keys = cutlass.select_(args.relative != 0, args.keys, absolute)
        return Int32((Uint32(keys) + (TILE_KEYS - 1)) // TILE_KEYS)

    def window(self, request: Int32, number: Int32, token: Int32) -> tuple[Int32, Int32]:
        """Return (the first key that a token sees and that has a column, the key after the last), equal if there are none.

        number: of the token within its request. token: among all tokens; both must exist.
        """
        args = self.args
        if self.paged:
            begin = Int32(0)
            per_token = args.length_per_token != 0
            length = clip((args.end_keys + cutlass.select_(per_token, token, request)).load(), args.keys)
            hidden = cutlass.select_(per_token, Int32(0), args.tokens_per_request - 1 - number)
            end = larger(length - hidden, Int32(0))
        else:
            begin = clip((args.first_keys + token).load(), args.keys)
            end = clip((args.end_keys + token).load(), args.keys)
        room = cutlass.select_(args.relative != 0, smaller(args.columns, MAX_INT32 - begin), args.columns - begin)
        return begin, larger(begin + clip(end - begin, larger(room, Int32(0))), begin)

    def of_lane(self, index: Int32) -> LaneItem:
        """Return the item of a number; different ones in different lanes."""
        blocks, request_blocks = self.row_blocks(), self.request_blocks()
        chunk = Int32(Uint32(index) // Uint32(blocks))
        block = index - chunk * blocks
        request = Int32(Uint32(block) // Uint32(request_blocks)) if self.paged else Int32(0)
        number = (block - request * request_blocks) * self.block_tokens
        of_request = self.args.tokens_per_request if self.paged else self.args.tokens
        first_token = request * of_request + number
        tokens = smaller(of_request - number, Int32(self.block_tokens))
        windows = []
        low, high = Int32(MAX_INT32), Int32(0)
        for j in range(self.block_tokens):
            there = smaller(Int32(j), tokens - 1)
            begin, end = self.window(request, number + there, first_token + there)
            end = cutlass.select_(j < tokens, end, begin)
            sees = begin < end
            low = cutlass.select_(sees, smaller(low, begin), low)
            high = cutlass.select_(sees, larger(high, end), high)
            windows.append((begin, end))
        first = chunk * self.args.chunk
        until = smaller(first + self.args.chunk, self.tiles())
        begin_tile = larger(Int32(Uint32(low) // TILE_KEYS), first)
        end_tile = smaller(Int32((Uint32(high) + (TILE_KEYS - 1)) // TILE_KEYS), until)
        has_keys = begin_tile < end_tile
        begin_tile = cutlass.select_(has_keys, begin_tile, first)
        end_tile = cutlass.select_(has_keys, end_tile, first)
        return LaneItem(WorkItem(first_token, tokens, request, begin_tile, end_tile, first, until, high), tuple(windows))


Visit = Callable[[LaneItem, Int32, Int32, Int32], None]


@cute.jit
def for_each_item(items: WorkItems, visit: cutlass.Constexpr[Visit]) -> tuple[Int32, Int32]:
    """Call visit(the lanes' items, lane whose item it is, items before it, tiles to score before it) for each item with work of this CTA.

    One warp, all lanes. An item has work if a tile of it is to be scored, or if all logits are written. Return the items and the tiles.
    """
    blocks, ctas = items.row_blocks(), cute.arch.grid_dim()[0]
    chunks = Int32((Uint32(items.tiles()) + Uint32(items.args.chunk - 1)) // Uint32(items.args.chunk))
    count = blocks * chunks
    lane = cute.arch.lane_idx()
    posted, tiles, first = Int32(0), Int32(0), cute.arch.block_idx()[0]
    while first < count:
        # the lanes' items are neighbours in the CTA's row; compared without a sum that may exceed an int32
        there = Uint32(lane) * Uint32(ctas) < Uint32(count - first)
        found = items.of_lane(cutlass.select_(there, first + lane * ctas, first))
        has_work = there & ((found.item.begin < found.item.end) | (items.args.clean != 0))
        waiting = Uint32(cute.arch.vote_ballot_sync(has_work))
        scored = found.item.end - found.item.begin
        while waiting != 0:
            owner = Int32(31) - Int32(cute.arch.clz(waiting & (Uint32(0) - waiting)))
            waiting = waiting & (waiting - 1)
            visit(found, owner, posted, tiles)
            posted = posted + 1
            tiles = tiles + cute.arch.shuffle_sync(scored, owner)
        step = Uint32(ctas) * LANES
        first = cutlass.select_(step < Uint32(count - first), first + Int32(step), count)
    return posted, tiles


@dataclass(frozen=True)
class PostedItems:
    """Items on their way to the roles that score. sItems: int32 (stages, words), 16-byte aligned. The barriers are the caller's."""

    sItems: cute.Pointer
    block_tokens: int

    @staticmethod
    def words(block_tokens: int) -> int:
        """Return the int32 numbers of a stage."""
        return ITEM_WORDS + TOKEN_WORDS * block_tokens

    @cute.jit
    def post(self, stage: Int32, found: LaneItem, owner: Int32):
        """Write the item of a lane to a stage. One warp; a __syncwarp has to follow before the stage is handed over."""
        if cute.arch.lane_idx() == owner:
            cell = self._cell(stage)
            for i, field in enumerate(fields(WorkItem)):
                (cell + i).store(getattr(found.item, field.name))
            for j, window in enumerate(found.windows):
                for i, key in enumerate(window):
                    (cell + (ITEM_WORDS + TOKEN_WORDS * j + i)).store(key)

    @cute.jit
    def post_end(self, stage: Int32):
        """Write to a stage that there is no further item: one without tokens and tiles. One warp, as for `post`."""
        if cute.arch.lane_idx() < ITEM_WORDS:
            (self._cell(stage) + cute.arch.lane_idx()).store(Int32(0))

    def take(self, stage: Int32) -> tuple[Boolean, WorkItem]:
        """Return (whether there is an item in a stage, the item, without tokens and tiles if not)."""
        rWords = cute.make_rmem_tensor(cute.make_layout(ITEM_WORDS), Int32)
        cute.autovec_copy(cute.make_tensor(aligned(self._cell(stage), 16), rWords.layout), rWords)
        item = WorkItem(*(cute.arch.make_warp_uniform(rWords[i]) for i in range(ITEM_WORDS)))
        return item.tokens != 0, item

    def window(self, stage: Int32, token: Int32 | int) -> tuple[Int32, Int32]:
        """Return (the first key that a token of the block sees, the key after the last), equal if it sees none."""
        cell = self._cell(stage) + (ITEM_WORDS + TOKEN_WORDS * token)
        return cell.load(), (cell + 1).load()

    def _cell(self, stage: Int32) -> cute.Pointer:
        return self.sItems + stage * PostedItems.words(self.block_tokens)
