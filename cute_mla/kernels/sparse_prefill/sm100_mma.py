"""The mma role of sparse prefill on Blackwell: S = Q K^T and O += P V, but of tiles without keys.

sm100.py describes tiles, pipelines and the trick.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Int32, cute

from ..primitives import tcgen05
from ..primitives.arithmetic import smaller
from ..sm100.config import LatentSmemSm100
from ..sm100.heads64 import Heads64Products
from ..sm100.mma import LatentGemmSm100, await_probs, await_score_role
from .operands import SparsePrefillOperands
from .sm100_config import SparsePrefillSmemSm100


@dataclass(frozen=True)
class SparsePrefillMmaRoleSm100:
    """One warp. products: PairProducts or TokenProducts."""

    products: Any

    @cute.jit
    def run(self, operands: SparsePrefillOperands, smem: SparsePrefillSmemSm100, gemm: Any):
        """Wait kv_ready, query_ready, scores_free, probs_ready, output_ready. Signal scores_ready, kv_free.

        The first tile with keys begins O anew. The first S of a token is issued before the last P V of the one before. It is not if
        either has no tiles: Q then comes when that P V has been read out.
        """
        schedule = operands.schedule
        req, begin_tile = schedule.first_work_tile()
        tile, queries, issued, filled = Int32(0), Int32(0), Int32(0), Boolean(False)
        tiles = self.tiles_of(operands, req, begin_tile)
        while req <= schedule.last_request():
            work_tile = schedule.work_tile(req, begin_tile)
            req, begin_tile = work_tile.next_req, work_tile.next_tile
            next_tiles = self.tiles_of(operands, req, begin_tile)
            ahead = smaller(smaller(tiles, next_tiles), Int32(1))
            begun = Boolean(False)
            for t in cutlass.range(issued, smaller(tiles, Int32(1)) + tiles, unroll=1):
                next_filled = Boolean(False)
                if t < tiles + ahead:
                    if t == 0 or t == tiles:
                        smem.query_ready.consumer_wait(queries)
                        queries = queries + 1
                    next_filled = self.products.multiply_scores(smem, gemm, tile + t)
                if t > 0:
                    self.products.multiply_output(smem, gemm, tile + t - 1, begun, filled)
                    begun = begun | filled
                filled = next_filled
            tile, tiles, issued = tile + tiles, next_tiles, ahead
        await_score_role(smem, tile)

    @cute.jit
    def tiles_of(self, operands: SparsePrefillOperands, req: Int32, begin_tile: Int32):
        """Return the tiles of a token, 0 after the last one."""
        last = operands.schedule.last_request()
        return cutlass.select_(req <= last, operands.schedule.tile_range(smaller(req, last), begin_tile).tiles, Int32(0))


class PairProducts:
    """Products of the tiles of a pair."""

    @cute.jit
    def multiply_scores(self, smem: SparsePrefillSmemSm100, gemm: LatentGemmSm100, tile: Int32):
        """Issue S of one tile. Return whether it has keys."""
        keys = gemm.keys(tile)
        smem.kv_ready.consumer_wait(tile)
        filled = smem.has_keys(tile)
        smem.kv_free.consumer_release(tile)  # the bits have been read
        for part in cutlass.range_constexpr(smem.geometry.score_parts):
            use = tile * smem.geometry.score_parts + part
            smem.scores_free.producer_acquire(use)
            tcgen05.fence_after_wait()
            with cute.arch.elect_one():
                if filled:
                    gemm.scores(keys, part)
                tcgen05.commit(smem.scores_ready.barrier(use))
        return filled

    @cute.jit
    def multiply_output(self, smem: SparsePrefillSmemSm100, gemm: LatentGemmSm100, tile: Int32, begun: Boolean, filled: Boolean):
        """Issue P V of one tile, if it has keys."""
        probs, values = gemm.probs_and_values(tile)
        await_probs(smem, tile)
        with cute.arch.elect_one():
            if filled:
                gemm.output(probs, values, begun)
            tcgen05.commit(smem.kv_free.barrier(tile))


class TokenProducts(Heads64Products):
    """Products of the tiles of a CTA that works alone."""

    def filled(self, smem: LatentSmemSm100, tile: Int32) -> Boolean:
        """Return whether a tile has keys. Release the bits."""
        filled = smem.has_keys(tile)
        smem.left_free.consumer_release(tile)
        return filled
