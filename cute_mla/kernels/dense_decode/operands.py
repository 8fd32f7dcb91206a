"""The arguments of the dense decode kernels by meaning: where a query row lies, which keys it sees, where a key lies."""

from __future__ import annotations

from dataclasses import dataclass, replace

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, Uint32, cute

from ...spec.dense_decode import CAUSAL, FP8, LATENT, SMALL_PAGES, TILE_ROWS, TREE, DenseDecodeArguments
from ...spec.mla import ELEMENT_BYTES
from ...spec.split_plan import NO_LIMIT, TILE_KEYS
from ..attention.lengths import RowRange, Units
from ..attention.scheduler import BOX_COLUMNS, KeyTile, LatentOperands, SplitKvSchedule, WorkTile
from ..attention.softmax import FindWorkTile, sink_weight
from ..primitives.arithmetic import computed_with, larger, pin_register, smaller
from ..primitives.copies import prefetch_line, prefetch_row
from ..primitives.rows import load_or_one
from ..primitives.wgmma import ROWS_APART

BOX_BYTES_PER_KEY = BOX_COLUMNS * ELEMENT_BYTES
NO_PAGE = -1  # of a box or key that is not in use: outside every cache


@dataclass(frozen=True)
class DenseDecodeOperands(LatentOperands):
    """The arguments by meaning.

    args.scale_log2: with the scales of e4m3 operands after with_descales. key_masks: whether calls of the variant may have tree masks and
    windows. most_box_keys: of a TMA box, where pages hold as many. column_ctas: CTAs that have the same rows.
    """

    args: DenseDecodeArguments
    schedule: SplitKvSchedule
    units: Units
    key_masks: bool
    most_box_keys: int = TILE_KEYS
    column_ctas: int = 1

    def with_descales(self, row_scale: DenseDecodeRowScale) -> DenseDecodeOperands:
        """Return operands whose scale_log2 includes the scales of q and cache."""
        return replace(self, args=self.args._replace(scale_log2=row_scale.score_scale(self)))

    # ---- query rows -------------------------------------------------------------------------------------------------

    def row_at(self, place: Int32, req: Int32) -> Int32:
        """Return the query row of a unit at a place of this CTA's products, on SM100; one past the last where there is none.

        Where two CTAs divide columns, the rows 0..7 and 8..15 of every 16 lie otherwise in the second one.
        """
        if self.column_ctas == 1:
            return super().row_at(place, req)
        x = computed_with(cute.arch.block_idx()[0], req)  # else rows live in registers through all loops
        return x // self.column_ctas * TILE_ROWS + (place ^ (x % self.column_ctas * ROWS_APART))

    def rows(self) -> Int32:
        """Return the number of query rows of one KV head. Computed at every call, lest it lives in a register through the main loop."""
        return pin_register(self.args.s_q) * self.args.heads_per_kv

    def row_range(self, req: Int32) -> RowRange:
        """Return the query rows that a unit has: those of its last tokens."""
        missing, token = self.units.missing_and_first(req)
        return RowRange(self, req, self.rows(), missing * self.args.heads_per_kv, (token,))

    def kv_head(self) -> Int32:
        """Return the KV head of this CTA."""
        return cute.arch.block_idx()[1]

    def token_and_head(self, row: Int32) -> tuple[Int32, Int32]:
        """Return the query token and query head of a row of this CTA's KV head."""
        token = Int32(Uint32(row) // Uint32(self.args.heads_per_kv))
        return token, pin_register(self.kv_head()) * self.args.heads_per_kv + (row - token * self.args.heads_per_kv)

    def _offset(self, strides: tuple[Int64, Int64, Int64], req: Int32, row: Int32, *first_token: Int32) -> Int64:
        (first,) = first_token
        token, head = self.token_and_head(row)
        return Int64(req) * strides[0] + Int64(first + token) * strides[1] + Int64(head) * strides[2]

    def accum_row(self, work_tile: WorkTile, row: Int32) -> Int64:
        """Return the number of a query row in the split accumulators."""
        token, head = self.token_and_head(row)
        return (Int64(work_tile.accum_row) * Int64(Uint32(self.args.s_q)) + token) * Int64(Uint32(self.args.h_q)) + head

    # ---- keys -------------------------------------------------------------------------------------------------------

    def hides_keys(self, keys: KeyTile) -> Boolean:
        """Return whether a row may not see a key of a tile."""
        return Uint32(keys.remaining - self.args.hidden_keys - TILE_KEYS) >= Uint32(self.args.steady_keys)

    def has_tree(self) -> Boolean:
        """Return whether a tree mask decides on the new tokens."""
        return self.args.mask == TREE

    def has_window(self) -> Boolean:
        """Return whether query tokens see a window of the keys."""
        return self.args.reach != NO_LIMIT

    def hides_values(self, keys: KeyTile) -> Boolean:
        """Return whether a tile has keys that no query token sees: past the end, or before all windows."""
        return Uint32(keys.remaining - TILE_KEYS) >= Uint32(self.args.steady_values)

    def unseen_keys(self, keys: KeyTile) -> tuple[Int32, Int32]:
        """Return the keys between the first ones, always seen, and all windows, counted within a tile: begin and end, or begin >= end."""
        return self.args.sink_keys - keys.first, keys.remaining - self.args.reach

    def key_limit(self, keys: KeyTile, token: Int32) -> Int32:
        """Return the key, counted within a tile, from which on a query token sees none: the end, or bottom-right causal.

        Tokens past the last one see no key past the end either.
        """
        return keys.remaining - cutlass.select_(self.args.mask == CAUSAL, larger(self.args.s_q - 1 - token, Int32(0)), Int32(0))

    def box_keys(self) -> Int32:
        """Return the keys of one TMA box: a page, or most_box_keys if that is less."""
        return smaller(self.args.page_size, Int32(self.most_box_keys))

    def page_entry(self, key: Int32) -> tuple[Int32, Int32]:
        """Return (entry in the block table, row in that page) of a key of a request."""
        entry = key // self.args.page_size
        return entry, key - entry * self.args.page_size

    def next_tile_entry(self, entry: Int32, row: Int32) -> tuple[Int32, Int32]:
        """Return page_entry of the key one tile further, without a division: a page holds a tile or more, or a small part of one."""
        first, second = SMALL_PAGES
        small = cutlass.select_(self.args.page_size == first, Int32(TILE_KEYS // first), Int32(TILE_KEYS // second))
        following = row + TILE_KEYS
        wrapped = cutlass.select_(following < self.args.page_size, Int32(0), Int32(1))
        is_small = self.args.page_size < TILE_KEYS
        return (
            entry + cutlass.select_(is_small, small, wrapped),
            cutlass.select_(is_small, row, following - wrapped * self.args.page_size),
        )

    @cute.jit
    def prefetch_table(self, req: Int32, tile: Int32):
        """Ask L2 for entries of the block table from a tile on, one a lane, as far as the table has room."""
        entry = tile * TILE_KEYS // self.args.page_size + cute.arch.lane_idx()
        if Uint32(entry * self.args.page_size) < Uint32(self.args.max_keys):
            prefetch_line(self.table_row(req) + entry)

    @cute.jit
    def prefetch_queries(self, req: Int32, column: int | Int32, row_bytes: cutlass.Constexpr[int]):
        """Ask L2 for this CTA's rows of Q of a unit, from a column on. One warp."""
        rows = self.row_range(req)
        for first in cutlass.range_constexpr(0, TILE_ROWS, cute.arch.WARP_SIZE):
            row = self.row_at(first + cute.arch.lane_idx(), req)
            if rows.holds(row):
                prefetch_row((rows.q_row(row) + column).toint(), row_bytes)

    def table_row(self, req: Int32) -> cute.Pointer:
        """Return the row of the block table of a unit's request."""
        return self.args.block_table + Int64(self.units.request(req)) * self.args.table_stride

    def cache_address(self, page: Int32, row: Int32, byte: Int32) -> Int64:
        """Return the address of a byte of a row of a cache that threads read; 0 for a page that the cache does not have."""
        offset = Int64(Uint32(page)) * self.args.page_stride + Int64(Uint32(row)) * self.args.row_stride + byte
        address = self.args.cache.toint() + offset
        return cutlass.select_(Uint32(page) < Uint32(self.args.pages), address, Int64(0))


@dataclass(frozen=True)
class DenseDecodeRowScale:
    """Row scale with attention sinks and the scales of e4m3 operands, read when asked for: the kernel before may have written them.

    kind: the variant's operands. k_scale: that of e4m3 values, of a role that has a register for it. rounds_probs: whether probabilities
    of e4m3 operands are e4m3 themselves.
    """

    kind: str
    k_scale: Float32 | None = None
    rounds_probs: bool = True

    def score_scale(self, operands: DenseDecodeOperands) -> Float32:
        """Return the factor of the scores, with the scales of q and cache."""
        if self.kind == LATENT:
            return operands.scale_log2
        scale_log2 = operands.scale_log2 * load_or_one(operands.args.descale_k)
        return scale_log2 * load_or_one(operands.args.descale_q) if self.kind == FP8 else scale_log2

    def weight(self, operands: DenseDecodeOperands, work_tile: FindWorkTile, row: Int32, total: Float32, reference: Float32) -> Float32:
        """Return the factor of a row of O: 1 / (row sum + weight of the row's sink), times the scale of e4m3 values.

        With e4m3 probabilities the output role divides by their sum as it was rounded, so here the row sum counts as 1. The scale is read
        again, once per work tile, unless a register holds it meanwhile.
        """
        weight = 1.0 / divisor_with_sink(operands, work_tile, row, (total, reference), self.kind == FP8 and self.rounds_probs)
        if self.kind == LATENT:
            return weight
        return weight * (load_or_one(operands.args.descale_k) if self.k_scale is None else self.k_scale)


@cute.jit
def divisor_with_sink(
    operands: DenseDecodeOperands, work_tile: FindWorkTile, row: Int32, softmax: tuple[Float32, Float32], relative: cutlass.Constexpr[bool]
) -> Float32:
    """Return the divisor of a row: its sum, and the weight of the row's sink where this work tile writes the output.

    A split does without the sink, since combine adds it. softmax: row sum, not 0, and reference. relative: in units of the row sum.
    """
    total, reference = softmax
    divisor = Float32(1) if cutlass.const_expr(relative) else total
    if operands.args.attn_sink.toint() != 0:  # noqa: SIM102  # of the DSL, which would read the work tile in every call
        if work_tile().direct:
            _, head = operands.token_and_head(row)
            weight = sink_weight((operands.args.attn_sink + head).load(), reference)
            divisor = divisor + (weight / total if cutlass.const_expr(relative) else weight)
    return divisor


@dataclass(frozen=True)
class LaneBox:
    """The box of keys that a lane of the load warp fetches of one tile: lane l has the keys from l boxes on.

    in_tile: whether the tile has a box for this lane. offset: its first key within the tile. page: what the block table says, or NO_PAGE
    for a box without a key in use. The TMA fills a box with zeros, and reads nothing, if the cache does not have its page. row: its first
    key within the page.
    """

    in_tile: Boolean
    offset: Int32
    page: Int32
    row: Int32

    @staticmethod
    def create(operands: DenseDecodeOperands, page: Int32, row: Int32) -> LaneBox:
        """Return this lane's box, from `row` of a page on."""
        offset = cute.arch.lane_idx() * operands.box_keys()
        return LaneBox(offset < TILE_KEYS, offset, page, row)
