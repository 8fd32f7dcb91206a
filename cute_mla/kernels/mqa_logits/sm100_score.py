"""The score role of the SM100 logits kernel: weighted sums of relu(scores) over the heads, and their way to the logits.

sm100.py describes tiles and pipelines. A thread has a key: its scores are a lane of tensor memory, and it sums them up alone. Of every four
pairs of heads, three go through x + |x| = 2 relu(x) on the FMA pipe, and one through the maximum with 0 on the ALU pipe, which takes two
clocks a warp. The sums are the same whatever the shape of an item.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute

from ...spec.mqa_logits import BLOCK_COLUMNS, TILE_KEYS, MqaLogitsArguments
from ..primitives import tcgen05
from ..primitives.elements import aligned
from ..primitives.registers import pin_address, pin_register
from .items import WorkItem
from .sm100_config import GROUP_WARPS, GROUPS, ITEM_COLUMNS, LANES, SCORE_STAGES, TMEM_LANE
from .sm100_item import Items

LOADED_AT_ONCE = 16  # columns of tensor memory
LOADS_AHEAD = BLOCK_COLUMNS // LOADED_AT_ONCE // 2

GROUP_PAIRS = 4  # pairs of neighbouring heads; the first of them go through the sum, the others through the maximum
DOUBLED_PAIRS = 3
LOGIT_BYTES = 4

Pair = tuple[Float32, Float32]


def twice_relu(scores: Pair) -> Pair:
    """Return x + |x| of two scores."""
    result: Pair = cute.arch.add_packed_f32x2(scores, (cute.math.absf(scores[0]), cute.math.absf(scores[1])))
    return result


def relu(scores: Pair) -> Pair:
    """Return the maxima of two scores and 0; NaN for NaN."""
    return cute.arch.fmax(scores[0], 0.0, nan=True), cute.arch.fmax(scores[1], 0.0, nan=True)


@dataclass(frozen=True)
class HeadSums:
    """A thread's running sums over the heads of a token: of pairs, so that neighbouring products do not wait for each other.

    doubled: two pairs, of weighted x + |x|. maxima: of weighted max(x, 0).
    """

    doubled: tuple[Pair, Pair]
    maxima: Pair

    @staticmethod
    def none() -> HeadSums:
        """Return the sums over no heads."""
        zeros = Float32(0), Float32(0)
        return HeadSums((zeros, zeros), zeros)

    def add(self, scores: list[Pair], weights: list[Pair]) -> HeadSums:
        """Return the sums with the heads of a group more, in pairs."""
        doubled, maxima = list(self.doubled), self.maxima
        for i in range(DOUBLED_PAIRS):
            doubled[i % 2] = cute.arch.fma_packed_f32x2(twice_relu(scores[i]), weights[i], doubled[i % 2])
        for i in range(DOUBLED_PAIRS, GROUP_PAIRS):
            maxima = cute.arch.fma_packed_f32x2(relu(scores[i]), weights[i], maxima)
        return HeadSums((doubled[0], doubled[1]), maxima)

    def total(self) -> Float32:
        """Return the sum over all heads. Halves are exact."""
        doubled = cute.arch.add_packed_f32x2(*self.doubled)
        even, odd = cute.arch.fma_packed_f32x2(doubled, (Float32(0.5), Float32(0.5)), self.maxima)
        return even + odd


@dataclass(frozen=True)
class TokenRow:
    """A token that a group has of an item. It sees `keys` keys from `begin` on.

    limit: of its columns that are wanted as -inf where it sees no key; 0: none are. key_zero: address of the logit of key 0, or where it
    would lie.
    """

    begin: Int32
    keys: Int32
    limit: Int32
    key_zero: Int64

    @staticmethod
    def create(args: MqaLogitsArguments, token: Int32, there: Boolean, window: tuple[Int32, Int32]) -> TokenRow:
        """Return a token by its number among all tokens. there: whether it exists. The address is not computed anew for every tile."""
        begin, end = window
        limit = pin_register(cutlass.select_(there & (args.clean != 0), args.columns, Int32(0)))
        shift = cutlass.select_(args.relative != 0, begin, Int32(0))
        key_zero = (args.logits + (Int64(token) * args.logits_stride_token - shift)).toint()
        return TokenRow(begin, cutlass.select_(there, end - begin, Int32(0)), limit, pin_address(key_zero))

    @cute.jit
    def store(self, key: Int32, logit: Float32):
        """Store the logit of a key that the token sees; with all logits wanted, -inf of one that it does not."""
        sees = Uint32(key - self.begin) < Uint32(self.keys)
        if sees | (key < self.limit):
            address = self.key_zero + Int64(key) * LOGIT_BYTES
            cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=LOGIT_BYTES).store(
                cutlass.select_(sees, logit, -Float32.inf)
            )


@dataclass(frozen=True)
class TokenRows:
    """Tokens that a group has of an item, as a thread keeps them. rWeights: fp32 (128 columns)."""

    rWeights: cute.Tensor
    tokens: tuple[TokenRow, ...]

    def add_heads(self, sums: list[HeadSums], scores: Any, first: int) -> None:
        """Add loaded scores of the columns from `first` on to the sums of their token."""
        token = first * len(self.tokens) // BLOCK_COLUMNS
        for begin in range(0, LOADED_AT_ONCE, 2 * GROUP_PAIRS):
            columns = range(begin, begin + 2 * GROUP_PAIRS, 2)
            pairs = [(scores[i], scores[i + 1]) for i in columns]
            sums[token] = sums[token].add(pairs, [(self.rWeights[first + i], self.rWeights[first + i + 1]) for i in columns])


@dataclass(frozen=True)
class ScoreRole:
    """Four warps of score group `group`. tmem: address of the tensor memory."""

    tmem: Int32
    group: Int32

    @cute.jit
    def run(self, items: Items):
        """Wait item_ready, scale_ready, scores_ready. Signal item_free, scores_free."""
        turn, more = Int32(0), Boolean(True)
        tile, number = Int32(0), Int32(0)
        while more:
            more, item = items.wait(turn)
            if more:
                rows = self.token_rows(items, item, turn)
                items.release(turn)
                rounds = items.rounds(item)
                if items.is_wide(item):
                    for r in cutlass.range(rounds, unroll=1):
                        self.score_tile(items, rows, item.begin + r, tile + r, number + r)
                else:
                    for r in cutlass.range(rounds, unroll=1):
                        self.score_narrow_round(items, rows, item, tile, r, number + r)
                tile, number = tile + (item.end - item.begin), number + rounds
            else:
                items.release(turn)
            turn = turn + 1

    def token_rows(self, items: Items, item: WorkItem, turn: Int32) -> TokenRows:
        """Return what belongs to the group's tokens: those of its row block, or of the only one."""
        block = cutlass.select_(items.is_wide(item), self.group, Int32(0))
        first = block * items.config.block_tokens
        stage = items.pipes.item_ready.stage(turn)
        tokens = tuple(
            TokenRow.create(items.args, item.first_token + first + j, first + j < item.tokens, items.board.window(stage, first + j))
            for j in range(items.config.block_tokens)
        )
        return TokenRows(load_weights(items.weights(turn) + block * BLOCK_COLUMNS), tokens)

    @cute.jit
    def score_narrow_round(self, items: Items, rows: TokenRows, item: WorkItem, first_use: Int32, in_item: Int32, number: Int32):
        """Score the group's tile of a round of two, if it has one."""
        place = in_item * GROUPS + self.group
        tiles = item.end - item.begin
        if place < tiles:
            self.score_tile(items, rows, item.begin + place, first_use + place, number)
        else:
            ready, free = items.pipes.scores_of(self.group)
            ready.consumer_wait(number)
            free.consumer_release(number)

    def score_tile(self, items: Items, rows: TokenRows, tile: Int32, use: Int32, number: Int32) -> None:
        """Score a tile. use: of the pipeline of scales. number: of the round.

        Half of the scores are loaded, and each chunk that has been summed up makes room for one of the other half. The accumulators are
        free once all scores are in registers.
        """
        ready, free = items.pipes.scores_of(self.group)
        ready.consumer_wait(number)
        tcgen05.fence_after_wait()
        scores = self.scores(number)
        sums = [HeadSums.none() for _ in rows.tokens]
        ahead = [tcgen05.load_columns(scores + i * LOADED_AT_ONCE, LOADED_AT_ONCE) for i in range(LOADS_AHEAD)]
        scale = self.load_scale(items, use)  # waits beside the loads, and before the release that stands for it too
        tcgen05.await_loads()
        loads = []
        for i in range(LOADS_AHEAD):
            rows.add_heads(sums, ahead[i], i * LOADED_AT_ONCE)
            loads.append(tcgen05.load_columns(scores + (LOADS_AHEAD + i) * LOADED_AT_ONCE, LOADED_AT_ONCE))
        tcgen05.await_loads()
        tcgen05.fence_before_signal()
        free.consumer_release(number)
        for i in range(LOADS_AHEAD):
            rows.add_heads(sums, loads[i], (LOADS_AHEAD + i) * LOADED_AT_ONCE)
        key = tile * TILE_KEYS + thread_of_group()
        for token, token_sums in zip(rows.tokens, sums, strict=True):
            token.store(key, token_sums.total() * scale)

    def load_scale(self, items: Items, use: Int32) -> Float32:
        """Return the scale of the thread's key."""
        items.pipes.scale_ready.consumer_wait(use)
        return (items.tiles.sScales + (items.pipes.scale_ready.stage(use) * TILE_KEYS + thread_of_group())).load()

    def scores(self, number: Int32) -> Int32:
        """Return the tensor memory of the group's scores in a round, at the first lane of the warp."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % GROUP_WARPS
        stage = Int32(Uint32(number) % SCORE_STAGES)
        return self.tmem + stage * ITEM_COLUMNS + self.group * BLOCK_COLUMNS + warp * (LANES * TMEM_LANE)


def thread_of_group() -> Int32:
    """Return the thread's number in its group, which is that of its key in a tile."""
    return cute.arch.thread_idx()[0] % (GROUP_WARPS * LANES)


def load_weights(source: cute.Pointer) -> cute.Tensor:
    """Return the weights of a row block."""
    rWeights = cute.make_rmem_tensor(cute.make_layout(BLOCK_COLUMNS), Float32)
    cute.autovec_copy(cute.make_tensor(aligned(source, 16), rWeights.layout), rWeights)
    return rWeights
