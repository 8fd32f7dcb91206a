"""Sparse MLA prefill on Blackwell: each query token attends to its own rows of an unpaged 16-bit latent.

For every query token and head r, over the rows j that the token's indices name and that exist:

    s_rj = <q_r, k_j>     p = softmax(scale * s)     out_r = sum_j p_rj k_j[:512]     max_logits_r = max_j scale * s_rj

A pair of CTAs holds the heads of a token, 64 each, and walks every grid-th token, 64 indices (one tile) at a time. Each CTA
gathers its half of the columns of every key, by cp.async: a key is fetched once, as key and as value, for all heads. Roles
and pipelines: sm100/row_producer.py, sm100/indexed_producer.py, sm100/roles.py; what differs here:

  kv_free[5]       mma -> gather, output   1, and in the even CTA one more, when the bits have been read
  query_ready      output -> mma           8: Q of a token is in tensor memory, before the token before it is stored
  seen_ready[5]    gather -> score, output, and by way of kv_ready mma: a bit per key of the slot

A tile of which no index names a row is passed on by all roles: no copies, no products, no softmax, no rescale. Its barriers
complete as ever, so that use number n of every ring remains tile n.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Boolean, Int32, cute
from cutlass.experimental import primitives

from ...spec.arch import Arch
from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_LATENT
from ...spec.sparse_prefill import SparsePrefillConfig
from ...spec.split_plan import TILE_KEYS
from ..attention.tiles import ELEMENT_BYTES, first_query_row
from ..definition import KernelDefinition
from ..primitives import tcgen05
from ..primitives.pipeline import arrive, arrive_at
from ..sm100.config import CTA_COLUMNS, CTA_ROPE, HALF_KEYS, Tiles
from ..sm100.gemm import PairGemm
from ..sm100.indexed_producer import SEEN_WORDS, GatheredPair, SeenPipes
from ..sm100.roles import EVEN_CTA
from ..sm100.row_copy import WARP_KEYS, CopiedTile, LaneKeys, latent_columns, rope_columns
from ..sm100.row_producer import filled_source
from ..sm100.score_rows import ScoreRows
from .entry import SparsePrefill
from .operands import IndexList, Operands

LINE_ELEMENTS = 128 // ELEMENT_BYTES  # of a cache line


@dataclass(frozen=True)
class TileKeys(LaneKeys):
    """Where the keys of a warp lie, and which of the tile's are there: lane l has the l-th key from the warp's first one on,
    and the one 32 keys from it. other: that one counts."""

    other: Boolean

    def any_seen(self) -> Boolean:
        """Whether a key of the tile counts."""
        return (cute.arch.vote_ballot_sync(self.row != 0) | cute.arch.vote_ballot_sync(self.other)) != 0


class SparsePrefillSm100(GatheredPair, SparsePrefill):
    """One variant of the kernel."""

    loads_queries_ahead = True
    keeps_maximum = True

    def __init__(self, config: SparsePrefillConfig, arch: Arch) -> None:
        super().__init__(config, arch)
        self.has_rope = config.d_qk > D_LATENT

    # ---- gather -----------------------------------------------------------------------------------------------------

    def columns_of(self, rank: Int32) -> CopiedTile:
        """Half of the latent columns, and of the RoPE columns behind them."""
        runs = (latent_columns(rank), rope_columns(D_LATENT * ELEMENT_BYTES, rank))
        return CopiedTile(runs if self.has_rope else runs[:1])

    def index_list(self, operands: Operands, req: Int32) -> IndexList:
        """Those of a token."""
        return operands.index_list(req)

    def first_key(self, begin_tile: Int32, warp: Int32) -> Int32:
        """The place of the lane's key: the tile's keys in turn, from the warp's first one on."""
        return begin_tile * TILE_KEYS + (warp * WARP_KEYS + cute.arch.lane_idx()) % TILE_KEYS

    def look_up(self, indices: IndexList, position: Int32) -> tuple[Int32, Int32]:
        """The indices at the lane's place, and 32 places from it within the tile: a warp looks at all 64."""
        return indices.look_up(position), indices.look_up(position ^ HALF_KEYS)

    def locate(self, operands: Operands, indices: IndexList, found: tuple[Int32, Int32], position: Int32) -> TileKeys:
        """The row of the first index; of the second one, whether it names any."""
        return TileKeys(indices.row_address(found[0]), found[1] >= 0)

    @cute.jit
    def put(self, columns: CopiedTile, rows: cute.Pointer, keys: TileKeys, following: TileKeys):
        """Starts the copies of a tile that has keys."""
        if keys.any_seen():
            columns.start(rows, keys)
        columns.finish()

    # ---- Q, a token ahead --------------------------------------------------------------------------------------------

    @cute.jit
    def load_ahead(self, operands: Operands, pipes: SeenPipes, req: Int32, begin_tile: Int32, thread: Int32, lanes: Int32):
        """Q of a token that is still to come, if there is one, and a hint for the one after it."""
        GatheredPair.load_ahead(self, operands, pipes, req, begin_tile, thread, lanes)
        following = operands.schedule.piece(req, begin_tile).next_req
        row = first_query_row() + thread % TILE_ROWS
        if following <= operands.schedule.last_request() and row < operands.rows():
            half = thread // TILE_ROWS
            source = operands.q_row(following, row)
            for line in range(CTA_COLUMNS // LINE_ELEMENTS):
                primitives.prefetch_l2((source + (half * CTA_COLUMNS + line * LINE_ELEMENTS)).raw_ptr())
            if cutlass.const_expr(self.has_rope):
                primitives.prefetch_l2((source + (D_LATENT + half * CTA_ROPE)).raw_ptr())

    # ---- what is done with a tile, and with one that has no keys ------------------------------------------------------

    def kv_free_arrivals(self) -> Int32:
        """The mma role, which reads the bits, also says that it has: its commits order nothing but products."""
        return cutlass.select_(cute.arch.block_idx_in_cluster() == EVEN_CTA, Int32(2), Int32(1))

    def has_keys(self, pipes: SeenPipes, tile: Int32) -> Boolean:
        """Whether a key of a tile counts. Until the tile's kv_free is signalled."""
        words = pipes.sSeen + pipes.seen_ready.slot(tile) * SEEN_WORDS
        return cute.arch.make_warp_uniform(words.load() | (words + 1).load()) != 0

    @cute.jit
    def multiply_tiles(self, pipes: SeenPipes, gemm: PairGemm, tiles: Int32, tile: Int32):
        """The products of a token. The first tile with keys begins O anew."""
        begun, filled = Boolean(False), Boolean(False)
        for t in cutlass.range(tiles + 1, unroll=1):
            next_filled = Boolean(False)
            if t < tiles:
                next_filled = self.multiply_scores_of(pipes, gemm, tile + t)
            if t > 0:
                self.multiply_output_of(pipes, gemm, tile + t - 1, begun, filled)
            begun = begun | filled
            filled = next_filled

    @cute.jit
    def multiply_scores_of(self, pipes: SeenPipes, gemm: PairGemm, tile: Int32):
        """S of one tile. Returns whether it has keys."""
        keys = gemm.keys(pipes.kv_ready.slot(tile))
        pipes.kv_ready.wait_ready(tile)
        filled = self.has_keys(pipes, tile)
        arrive(pipes.kv_free.barrier(tile))
        pipes.scores_free.wait_free(tile)
        tcgen05.fence_after_wait()
        with cute.arch.elect_one():
            if filled:
                gemm.scores(keys)
            tcgen05.commit(pipes.scores_ready.barrier(tile))
        return filled

    @cute.jit
    def multiply_output_of(self, pipes: SeenPipes, gemm: PairGemm, tile: Int32, begun: Boolean, filled: Boolean):
        """P V of one tile."""
        probs, values = gemm.probs_and_values(pipes.kv_ready.slot(tile))
        pipes.probs_ready.wait_ready(tile)
        pipes.output_ready.wait_ready(tile)
        tcgen05.fence_after_wait()
        with cute.arch.elect_one():
            if filled:
                gemm.output(probs, values, begun)
            tcgen05.commit(pipes.kv_free.barrier(tile))

    @cute.jit
    def score_tile(self, operands: Operands, pipes: SeenPipes, rows: ScoreRows, left: Int32, use: Int32):
        """The softmax of one tile."""
        pipes.seen_ready.wait_ready(use)
        if self.has_keys(pipes, use):
            GatheredPair.score_tile(self, operands, pipes, rows, left, use)
        else:
            pipes.scores_ready.wait_ready(use)
            arrive_at(pipes.scores_free.barrier(use), EVEN_CTA)
            if rows.half == 0:
                arrive(pipes.alpha_ready.barrier(use))
            arrive_at(pipes.probs_ready.barrier(use), EVEN_CTA)

    def mask(self, operands: Operands, pipes: SeenPipes, rows: ScoreRows, left: Int32, tile: Int32) -> None:
        """Sets scores of keys that do not count to -inf; score_tile has waited for the bits."""
        self.mask_unseen(pipes, rows, tile)

    @cute.jit
    def scale_tiles(self, tiles: Tiles, pipes: SeenPipes, count: Int32, tile: Int32, thread: Int32, lanes: Int32):
        """Rescales of a token."""
        begun = Boolean(False)
        for t in cutlass.range(count, unroll=1):
            use = tile + t
            pipes.seen_ready.wait_ready(use)
            if self.has_keys(pipes, use):
                self.scale_output(tiles, pipes, use, thread, lanes, begun)
                begun = Boolean(True)
            else:
                pipes.alpha_ready.wait_ready(use)
                arrive_at(pipes.output_ready.barrier(use), EVEN_CTA)


def build(config: SparsePrefillConfig, arch: Arch) -> KernelDefinition:
    """The variant, ready to compile."""
    return filled_source(SparsePrefillSm100(config, arch))
