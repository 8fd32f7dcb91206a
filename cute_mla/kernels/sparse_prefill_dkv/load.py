"""The load role of sparse_prefill_dkv: one warp that looks ahead over the indices, and copies tiles that have keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Int32, Uint32, cute

from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_LATENT
from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import BOX_COLUMNS
from ..primitives.copies import load_box
from ..primitives.pipeline import arrive
from ..sm90.cta import BOX_BYTES, BOX_ELEMENTS
from ..sparse_prefill.operands import SparsePrefillOperands
from ..sparse_prefill.sm90_indices import first_tile, next_tile
from .tiles import END, STAGE_BYTES, DkvGeometry, DkvSmem, DkvTile


@dataclass(frozen=True)
class DkvLoadRole:
    """One warp."""

    geometry: DkvGeometry

    @cute.jit
    def run(self, operands: SparsePrefillOperands, smem: DkvSmem):
        """Wait tile_free. Signal tile_ready, query_ready. Indices are asked for a tile ahead."""
        cursor = first_tile(operands)
        entries = cursor.entries()
        use, tokens, begins = Int32(0), Int32(0), Int32(1)
        while cursor.token <= operands.schedule.last_request():
            low, high = (cute.arch.vote_ballot_sync(cursor.indices.checked(entry) >= 0) for entry in entries)
            following = next_tile(operands, cursor, 0)
            entries = following.entries()
            if (low | high) != 0:
                place = cursor.token - operands.args.first_token
                tile = DkvTile(place * operands.args.topk + cursor.position, begins, low, high)
                self.load_tile(operands, smem, tile, place, cursor.position, use)
                if begins != 0:
                    self.await_tiles(smem, use)
                    self.load_queries(operands, smem, cursor.token, tokens)
                    tokens = tokens + 1
                use = use + self.geometry.config.head_tiles
                begins = Int32(0)
            if following.position == 0:
                begins = Int32(1)
            cursor = following
        self.await_tiles(smem, use)
        with cute.arch.elect_one():
            DkvTile(Int32(END), Int32(0), Int32(0), Int32(0)).store(smem, use)
        arrive(smem.tile_ready.barrier(use))
        # the next kernel waits for the end of this one before it reads or writes anything
        cute.arch.griddepcontrol_launch_dependents()

    def await_tiles(self, smem: DkvSmem, use: Int32) -> None:
        """Wait until the tiles before a use have been multiplied, and with them Q and dO of their token are free."""
        smem.tile_free.producer_acquire(use + (self.geometry.stages - 1))

    @cute.jit
    def load_tile(self, operands: SparsePrefillOperands, smem: DkvSmem, tile: DkvTile, place: Int32, position: Int32, use: Int32):
        """Start the copies of P and dS of a tile, of 64 heads a stage. place: of the token in the chunk. Wait tile_free."""
        args = operands.args
        number = place * args.tiles + position // TILE_KEYS
        for head_tile in cutlass.range_constexpr(self.geometry.config.head_tiles):
            part = use + head_tile
            smem.tile_free.producer_acquire(part)
            stage, ready = smem.tile_ready.stage(part), smem.tile_ready.barrier(part)
            with cute.arch.elect_one():
                if cutlass.const_expr(head_tile == 0):
                    tile.store(smem, part)
                cute.arch.mbarrier_arrive_and_expect_tx(ready, STAGE_BYTES)
                for tensor_map, target in ((args.dscores_map, smem.sS), (args.probs_map, smem.sP)):
                    load_box(target.iterator + stage * BOX_ELEMENTS, tensor_map, (0, head_tile * TILE_ROWS, number), ready)

    @cute.jit
    def load_queries(self, operands: SparsePrefillOperands, smem: DkvSmem, token: Int32, number: Int32):
        """Start the copies of the CTA's columns of Q and dO of a token, the number-th that has keys."""
        args, geometry = operands.args, self.geometry
        request = Int32(Uint32(token) // Uint32(args.s_q))
        where = token - request * args.s_q, request
        first = cute.arch.block_idx()[0] * geometry.columns
        ready = smem.query_ready.barrier(number)
        takes_rope = geometry.takes_rope(number)
        boxes = geometry.config.head_tiles * (2 * geometry.columns // BOX_COLUMNS)
        rope_boxes = cutlass.select_(takes_rope, Int32(geometry.config.head_tiles), Int32(0))
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(ready, (boxes + rope_boxes) * BOX_BYTES)
            load_columns(args.q_map, smem.sQ, first, where, ready)
            load_columns(args.dout_map, smem.sD, first, where, ready)
            if cutlass.const_expr(geometry.has_rope):  # noqa: SIM102  # one is known when compiling
                if takes_rope:
                    load_columns(args.q_map, smem.sRope, Int32(D_LATENT), where, ready)


def load_columns(tensor_map: Any, target: cute.Tensor, first: Int32, where: tuple[Int32, Int32], ready: cute.Pointer) -> None:
    """Start the copies of all columns of a tensor (64 heads, columns, head tiles). One thread."""
    boxes = cute.size(target, mode=[1]) // BOX_COLUMNS
    for head_tile in range(cute.size(target, mode=[2])):
        for box in range(boxes):
            place = target.iterator + (head_tile * boxes + box) * BOX_ELEMENTS
            load_box(place, tensor_map, (first + box * BOX_COLUMNS, head_tile * TILE_ROWS, *where), ready)
