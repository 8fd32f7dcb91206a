"""Dense MLA decode on Hopper for up to 16 query rows over an e4m3 cache, keys on M.

The kernel of sparse_decode/sm90_few_heads.py, whose roles, shared memory, pipelines and trick these are, with other keys: those of pages,
e4m3 in all columns with one scale for all of them. So a tile has one sum of products and one P, and RoPE columns are converted as the
others are. The scale of the cache is a factor of the scores and of the output, as in sm90_convert.py: e4m3 becomes 16 bits exactly.

For every request and every query row r = (query token i, head), over the keys j that the row sees:

    s_jr = <k_j, q_r> over 576 columns     p = softmax(scale * s)     out_r = sum_j p_jr k_j[:512]

A thread has two keys, 8 apart, of 16 that a warp has. A page holds 16 keys or a multiple, so they share a page, which the thread looks up
two tiles of its warpgroup ahead. Of a key behind the end of the request, or in a page that the cache does not have, nothing is read, and
its columns are zeros.
"""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint32, cute

from ...spec.dense_decode import FP8_CACHE, DenseDecodeConfig
from ...spec.mla import D_QK
from ...spec.split_plan import TILE_KEYS
from ..attention.kernel import ELEMENT_TYPES
from ..attention.scheduler import BOX_COLUMNS, KeyTile, TileRange
from ..primitives.arithmetic import clip, pin_register
from ..primitives.copies import BOX_ROW_BYTES, prefetch_line, writer_address
from ..primitives.pipeline import PipelineState
from ..primitives.rows import load_or_one
from ..primitives.wgmma import K_STEP, half
from ..sm90.cta import STEPS_PER_BOX
from ..sm90.few_heads_convert import OWN_KEYS, FewHeadsConvertRole, FewHeadsKeys, FewHeadsPart, FewHeadsScores
from ..sm90.few_heads_cta import (
    BOXES,
    CONVERTERS,
    HEADS_PER_THREAD,
    FewHeadsSm90Parts,
    FewHeadsSmem,
    FewHeadsThread,
    head_number,
    head_of,
)
from ..sm90.few_heads_output import FewHeadsOutputRole
from ..sm90.few_heads_softmax import KEYS_APART, REGISTERS, FewHeadsSoftmax, p_writer, store_p
from ..sm90.rows import CHUNK
from .operands import NO_PAGE, DenseDecodeOperands, DenseDecodeRowScale
from .sm90_convert import DenseDecodeKeyPositions

PARTS = tuple(FewHeadsPart(b, b * BOX_COLUMNS, True, b if b < BOXES else None, None) for b in (BOXES, *range(BOXES)))


class DenseDecodeSm90FewHeadsConvertRole(FewHeadsConvertRole):
    """One of two warpgroups."""

    def __init__(self, dtype: type[cutlass.Numeric]) -> None:
        self.dtype = dtype
        self.parts = PARTS
        self.q_boxes = D_QK // BOX_COLUMNS
        self.p_groups = 1

    def score_scale(self, operands: DenseDecodeOperands) -> Float32:
        """Return the factor of the scores."""
        return DenseDecodeRowScale(FP8_CACHE).score_scale(operands)

    @cute.jit
    def attend(
        self, operands: DenseDecodeOperands, softmax: FewHeadsSoftmax, scores: FewHeadsScores, bytes_of_keys: tuple, tiles: TileRange,
        before: tuple[Int32, Int32, Int32, Int32],
    ) -> Int32:  # fmt: skip
        """Score every other tile of a work tile. Return the next turn.

        before: pairs of tiles that the CTA had, work tiles, the parity of own tiles, and whether the last pair lacks the own tile.
        """
        raw, _ = bytes_of_keys
        pairs, done, turn, skipped = before
        smem, thread, group = softmax.smem, softmax.thread, softmax.group
        v_writer = pin_register(smem.sV.iterator.toint() + writer_address(thread.warp * (16 * BOX_ROW_BYTES), thread.lane, BOX_ROW_BYTES))
        writer = pin_register(p_writer(smem, thread))
        request = operands.units.request(tiles.req)
        first = group * TILE_KEYS + thread.key
        entry, row = operands.page_entry(tiles.begin * TILE_KEYS + first)
        keys = DenseDecodeKeyPositions(entry, row, clip(tiles.keys, tiles.tiles * TILE_KEYS) - first)
        page = look_up(operands, request, keys)
        found = self.find_keys(operands, keys, page, thread)
        self.load_first_tile(found, bytes_of_keys, thread, done, group)
        present0, present1 = found.present
        keys = own_keys_behind(operands, keys)
        page = look_up(operands, request, keys)
        smem.q_ready.consumer_wait(done)
        if skipped != 0:
            softmax.skip_place(CONVERTERS * pairs - 1)
        t = Int32(group)
        while t < tiles.tiles:
            present = present0, present1
            place = CONVERTERS * pairs + t
            whole = cute.arch.vote_all_sync((present0 & present1) != 0)
            following = self.find_keys(operands, keys, page, thread)
            self.score_tile(
                smem, scores, raw, following, (present, whole, None), (group, turn, place), (done & 1) * self.q_boxes, v_writer
            )  # fmt: skip
            keys = own_keys_behind(operands, keys)
            page = look_up(operands, request, keys)
            self.mask(operands, scores.total, tiles.tile(t), thread)
            softmax.add_tile(scores.total, place, t == 0, turn)
            store_p(writer, group, scores.total, None, self.dtype)
            cute.arch.fence_proxy("async.shared", space="cta")
            smem.p_ready.producer_commit(PipelineState(group, turn))
            present0, present1 = following.present
            turn, t = turn ^ 1, t + CONVERTERS
        return turn

    def find_keys(self, operands: DenseDecodeOperands, keys: DenseDecodeKeyPositions, page: Int32, thread: FewHeadsThread) -> FewHeadsKeys:
        """Return the thread's keys from their page."""
        first = operands.cache_address(page, keys.row, thread.lane % 4 * CHUNK)
        there = cutlass.select_(first != 0, Int32(1), Int32(0))
        second = cutlass.select_(keys.remaining > KEYS_APART, there, Int32(0))
        return FewHeadsKeys((first, first + KEYS_APART * operands.args.row_stride), (there, second))

    @cute.jit
    def mask(self, operands: DenseDecodeOperands, scores: cute.Tensor, keys: KeyTile, thread: FewHeadsThread):
        """Set the scores of keys that a row does not see to -inf."""
        if keys.remaining - operands.args.hidden_keys < TILE_KEYS:
            for head in cutlass.range_constexpr(HEADS_PER_THREAD):
                token, _ = operands.token_and_head(head_number(thread, head))
                seen = operands.key_limit(keys, token) - thread.key
                for i in cutlass.range_constexpr(REGISTERS):
                    if cutlass.const_expr(head_of(i) == head):
                        scores[i] = cutlass.select_(half(i) * KEYS_APART >= seen, -Float32.inf, scores[i])


def own_keys_behind(operands: DenseDecodeOperands, keys: DenseDecodeKeyPositions) -> DenseDecodeKeyPositions:
    """Return the positions in the warpgroup's next tile."""
    for _ in range(CONVERTERS):
        keys = keys.following(operands)
    return keys


@cute.jit
def look_up(operands: DenseDecodeOperands, request: Int32, keys: DenseDecodeKeyPositions) -> Int32:
    """Return the page of the thread's keys; NO_PAGE if the work tile does not have the first of them: the entry is not read."""
    page = Int32(NO_PAGE)
    if keys.remaining > 0:
        page = (operands.args.block_table + (Int64(Uint32(request)) * operands.args.table_stride + Int64(Uint32(keys.entry)))).load()
    return page


class DenseDecodeSm90FewHeads(FewHeadsSm90Parts):
    """One variant of the kernel."""

    def __init__(self, config: DenseDecodeConfig) -> None:
        self.dtype = ELEMENT_TYPES[config.dtype]
        self.role = DenseDecodeSm90FewHeadsConvertRole(self.dtype)
        self.layout = FewHeadsSmem.layout(self.dtype, self.role.q_boxes, self.role.p_groups)
        self.expected = len(PARTS) * STEPS_PER_BOX + BOXES * TILE_KEYS // K_STEP

    def convert(self, operands: DenseDecodeOperands, smem: FewHeadsSmem, group: Int32) -> None:
        """Run the role that converts and scores."""
        self.role.run(operands, smem, group)

    def output(self, operands: DenseDecodeOperands, smem: FewHeadsSmem) -> None:
        """Run the output role."""
        row_scale = DenseDecodeRowScale(FP8_CACHE, load_or_one(operands.args.descale_k))
        role = FewHeadsOutputRole(row_scale, self.dtype, self.role.q_boxes, self.role.p_groups)
        role.run(operands, smem, prefetch_pages)


@cute.jit
def prefetch_pages(operands: DenseDecodeOperands, req: Int32, begin_tile: Int32, lane: Int32):
    """Ask L2 for the block table's entries of the first and of the last key of the two tiles that a work tile begins with."""
    key = begin_tile * TILE_KEYS + lane * (OWN_KEYS - 1)
    if (lane < 2) & (Uint32(key) < Uint32(operands.args.max_keys)):
        entry, _ = operands.page_entry(key)
        prefetch_line(operands.table_row(req) + entry)
