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
from ..primitives.arithmetic import pin_address, pin_register
from ..primitives.pipeline import arrive, barrier_at
from ..primitives.rows import aligned
from .items import WorkItem
from .sm100_config import GROUP_WARPS, GROUPS, ITEM_COLUMNS, LANES, SCALE_STAGES, SCORE_STAGES, TMEM_LANE
from .sm100_item import Items

LOADED_AT_ONCE = 16  # columns of tensor memory
LOADS_AHEAD = BLOCK_COLUMNS // LOADED_AT_ONCE // 2

GROUP_PAIRS = 4  # pairs of neighbouring heads; the first of them go through the sum, the others through the maximum
DOUBLED_PAIRS = 3
LOGIT_BYTES = 4
SCALE_KEYS = SCALE_STAGES * TILE_KEYS  # of the ring
assert SCALE_KEYS & (SCALE_KEYS - 1) == 0

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
        value = cutlass.select_(sees, logit, -Float32.inf)
        if sees | (key < self.limit):
            address = self.key_zero + Int64(key) * LOGIT_BYTES
            cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=LOGIT_BYTES).store(value)


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
class ScoreStage:
    """A stage of the group's scores, which has every other round of an item. Kept by a warp, since it costs a tile 10 instructions anew.

    ready, free: addresses of its barriers. scores: its tensor memory, at the first lane of the warp. phase: of its first use in the item.
    """

    ready: Int32
    free: Int32
    scores: Int32
    phase: Int32

    def wait(self, pair: Int32) -> None:
        """Wait scores_ready of a pair of rounds of the item."""
        cute.arch.mbarrier_wait(barrier_at(self.ready), (self.phase + pair) & 1)
        tcgen05.fence_after_wait()

    def load(self, chunk: int) -> Any:
        """Load a chunk of the columns."""
        return tcgen05.load_columns(self.scores + chunk * LOADED_AT_ONCE, LOADED_AT_ONCE)

    def release(self) -> None:
        """Signal scores_free."""
        tcgen05.fence_before_signal()
        arrive(barrier_at(self.free))


@dataclass(frozen=True)
class ThreadKey:
    """The thread's key of a tile. scale: the place of its scale in the ring of shared memory."""

    key: Int32
    scale: Int32

    def after(self, keys: Int32) -> ThreadKey:
        """Return the thread's key so many keys later. keys: a multiple of TILE_KEYS."""
        return ThreadKey(self.key + keys, (self.scale + keys) & (SCALE_KEYS - 1))


@dataclass(frozen=True)
class MqaLogitsScoreRoleSm100:
    """Four warps of score group `group`. tmem: address of the tensor memory."""

    tmem: Int32
    group: Int32

    @cute.jit
    def run(self, items: Items):
        """Wait item_ready, scores_ready. Signal item_free, scores_free."""
        turn, more = Int32(0), Boolean(True)
        tile, number = Int32(0), Int32(0)
        while more:
            more, item = items.wait(turn)
            if more:
                rows = self.token_rows(items, item, turn)
                items.release(turn)
                self.score_item(items, rows, item, tile, number)
                tile, number = tile + (item.end - item.begin), number + items.rounds(item)
            else:
                items.release(turn)
            turn = turn + 1

    def token_rows(self, items: Items, item: WorkItem, turn: Int32) -> TokenRows:
        """Return the logits' rows of the group's tokens: those of its row block, or of the only one."""
        block = cutlass.select_(items.is_wide(item), self.group, Int32(0))
        first = block * items.config.block_tokens
        stage = items.smem.item_ready.stage(turn)
        tokens = tuple(
            TokenRow.create(items.args, item.first_token + first + j, first + j < item.tokens, items.posted_items.window(stage, first + j))
            for j in range(items.config.block_tokens)
        )
        return TokenRows(load_weights(items.weights(turn) + block * BLOCK_COLUMNS), tokens)

    @cute.jit
    def score_item(self, items: Items, rows: TokenRows, item: WorkItem, first_tile: Int32, number: Int32):
        """Score the group's tiles of an item: all, or every other one of a single row block. number: of the item's first round."""
        wide = items.is_wide(item)
        tiles = item.end - item.begin
        own = cutlass.select_(wide, Int32(0), self.group)
        step = pin_register(cutlass.select_(wide, Int32(TILE_KEYS), Int32(GROUPS * TILE_KEYS)))
        scored = cutlass.select_(wide, tiles, (tiles + 1 - self.group) >> 1)
        stages = tuple(self.stage(items, number + i) for i in range(SCORE_STAGES))
        thread = thread_of_group()
        scale_stage = items.smem.scale_ready.stage(first_tile + own)
        key, scale = pin_register((item.begin + own) * TILE_KEYS + thread), pin_register(scale_stage * TILE_KEYS + thread)
        pairs = scored >> 1
        for pair in cutlass.range(pairs, unroll=1):
            self.score_tiles(items, rows, stages, pair, ThreadKey(key, scale), step)
            following = ThreadKey(key, scale).after(2 * step)
            key, scale = following.key, following.scale
        if (scored & 1) != 0:
            self.score_tiles(items, rows, stages[:1], pairs, ThreadKey(key, scale), step)
        if scored < items.rounds(item):  # the last round has one tile, the other group's
            ready, free = items.smem.scores_of(self.group)
            ready.consumer_wait(number + scored)
            free.consumer_release(number + scored)

    def stage(self, items: Items, number: Int32) -> ScoreStage:
        """Return the stage of a round."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % GROUP_WARPS
        ready, free = items.smem.scores_of(self.group)
        scores = self.tmem + ready.stage(number) * ITEM_COLUMNS + self.group * BLOCK_COLUMNS + warp * (LANES * TMEM_LANE)
        words = ready.barrier(number).toint(), free.barrier(number).toint(), scores, ready.phase(number)
        return ScoreStage(*(pin_register(word) for word in words))

    def score_tiles(
        self, items: Items, rows: TokenRows, stages: tuple[ScoreStage, ...], pair: Int32, place: ThreadKey, step: Int32
    ) -> None:
        """Score a tile for each stage, `step` keys after one another.

        Half of the scores are loaded, and each chunk that has been summed up makes room for one of the other half. The accumulators are
        free once all scores are in registers. The first half of the next tile is loaded beside the last sums of this one: nothing may
        branch before it is there, or ptxas waits for it.
        """
        loads, scale = self.start(items, stages[0], pair, place)
        for i, stage in enumerate(stages):
            sums = [HeadSums.none() for _ in rows.tokens]
            tcgen05.await_loads()
            later = []
            for chunk in range(LOADS_AHEAD):
                rows.add_heads(sums, loads[chunk], chunk * LOADED_AT_ONCE)
                later.append(stage.load(LOADS_AHEAD + chunk))
            tcgen05.await_loads()
            stage.release()
            here, own_scale = place, scale
            for chunk in range(LOADS_AHEAD):
                if i + 1 < len(stages) and chunk + 1 == LOADS_AHEAD:
                    place = place.after(step)
                    loads, scale = self.start(items, stages[i + 1], pair, place)
                rows.add_heads(sums, later[chunk], (LOADS_AHEAD + chunk) * LOADED_AT_ONCE)
            for token, token_sums in zip(rows.tokens, sums, strict=True):
                token.store(here.key, token_sums.total() * own_scale)

    def start(self, items: Items, stage: ScoreStage, pair: Int32, place: ThreadKey) -> tuple[list[Any], Float32]:
        """Wait scores_ready. Return the first half of the scores on their way, and the scale of the thread's key."""
        stage.wait(pair)
        return [stage.load(chunk) for chunk in range(LOADS_AHEAD)], (items.smem.sScales + place.scale).load()


def thread_of_group() -> Int32:
    """Return the thread's number in its group, which is that of its key in a tile."""
    return cute.arch.thread_idx()[0] % (GROUP_WARPS * LANES)


def load_weights(source: cute.Pointer) -> cute.Tensor:
    """Return the weights of a row block."""
    rWeights = cute.make_rmem_tensor(cute.make_layout(BLOCK_COLUMNS), Float32)
    cute.autovec_copy(cute.make_tensor(aligned(source, 16), rWeights.layout), rWeights)
    return rWeights
