"""Sparse MLA decode on Hopper for up to 16 heads, keys on M.

For a query token of a request with heads h, over the slots j that its indices name:

    s_jh = <k_j, q_h>    p = softmax(scale * s)    out_h = sum_j p_jh k_j[:512]

as S^T [64 keys x 16 heads] = K Q^T and O^T [512 columns x 16 heads] += V^T P^T. With rows on M, a WGMMA would have 64 of them.

Roles (384 threads):
  convert  warpgroups 0, 1, tiles of a work tile in turn: indices, bytes of the own tile after the next to registers, e4m3 to 16 bits as
           fragments of A, S^T from these registers, the same registers to shared memory as V, softmax, P
  output   warpgroup 2: Q to shared memory, O^T += V^T P^T, rescale, lse, out

Shared memory: V, 8 stages of 64 keys x 128 columns (two tiles); Q of two work tiles; P of two tiles, one for each group of columns; maxima,
references and sums of rows; O on its way to gmem.

Pipelines (producer -> consumer; arrivals per phase):
  v_free[8]           output -> convert    4: a stage of 128 columns has been multiplied; four stages for either converter
  p_ready[2]          convert -> output    4: V, P and rescale factors of a converter's tile are written
  loads_issued[2]     convert -> convert   4: most bytes of a converter's next tile are asked for, the other one's turn
  reference_ready[2]  convert -> convert   4: references of a converter's tile are written, those of the tile before read
  q_ready[2]          output -> convert    4: Q of a work tile is written, and sums of the work tile two before are read
  sums_ready[2]       convert -> output    8: sums of a work tile are written

P and rescale factors of a tile have no barrier that tells when they are free: v_free of the tile's stages does. Q's two tiles have none
either: the output role loads Q when sums_ready of the work tile before the last has come.

The trick: scales stay out of the conversion. S^T is summed over groups of columns, each with its scale by row; and P is written once for
each group, P x scale, rounded once. So e4m3 becomes 16 bits exactly, S is exact but for fp32 sums, and a thread that has two keys of S^T
needs the scales of these two alone. It looks them up itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute

from ...spec.cache_format import CacheFormat
from ...spec.sparse_decode import SparseDecodeConfig
from ...spec.split_plan import TILE_KEYS
from ..attention.kernel import ELEMENT_TYPES
from ..attention.scheduler import BOX_COLUMNS, INT32_BYTES, TileRange
from ..attention.softmax import SinkScale
from ..primitives.arithmetic import as_float, multiply_pairs, pin_register, widen
from ..primitives.copies import BOX_ROW_BYTES, LINE_BYTES, prefetch_line, writer_address
from ..primitives.pipeline import PipelineState
from ..primitives.rows import load_if
from ..primitives.wgmma import K_STEP, half
from ..sm90.cta import STEPS_PER_BOX
from ..sm90.few_heads_convert import KEYS, OWN_KEYS, FewHeadsConvertRole, FewHeadsKeys, FewHeadsPart, FewHeadsScores
from ..sm90.few_heads_cta import (
    BOXES,
    CONVERTERS,
    FewHeadsSm90Parts,
    FewHeadsSmem,
    FewHeadsThread,
)
from ..sm90.few_heads_output import FewHeadsOutputRole
from ..sm90.few_heads_softmax import KEYS_APART, REGISTERS, FewHeadsSoftmax, p_writer, store_p
from ..sm90.rows import CHUNK
from .operands import SparseDecodeOperands, slot_address
from .sm90_gather import SparseDecodeSm90Indices
from .sm90_scales import FIRST_HALVES, PAIR_CODES, SECOND_HALVES, powers_of_two


def parts_of(cache: CacheFormat) -> tuple[FewHeadsPart, ...]:
    """Return the parts of a tile: 16-bit columns that are not values, which are not stored, come first."""
    number = cache.quantised // BOX_COLUMNS
    boxes = [FewHeadsPart(b, b * BOX_COLUMNS, True, b, b * BOX_COLUMNS // cache.group if has_own_p(cache) else None) for b in range(number)]
    if number == cache.d_qk // BOX_COLUMNS:
        return tuple(boxes)
    wide = FewHeadsPart(number, cache.wide_offset, False, number if number < BOXES else None, None)
    return (*boxes, wide) if number < BOXES else (wide, *boxes)


def has_own_p(cache: CacheFormat) -> bool:
    """Return whether a P is written for each scale. Powers of two are multiplied with values instead, which is exact."""
    return cache.scale == "fp32"


def bf16_scales(cache: CacheFormat, words: list[Int32], lane: Int32) -> list[Int32]:
    """Return the scales of a key for the lane's columns as bf16, those of two boxes in a word: place_of_scale. words: their codes."""
    if cache.group < BOX_COLUMNS:  # one of two scales of a box
        return [powers_of_two((word >> (lane % 4 // 2 * 8)) & PAIR_CODES) for word in words]
    return [powers_of_two((word >> shift) & PAIR_CODES) for word in words for shift in (0, 8)]


def place_of_scale(cache: CacheFormat, box: int) -> tuple[int, int]:
    """Return word and half of a box's scale among bf16_scales."""
    return divmod(box, 2) if cache.group < BOX_COLUMNS else (2 * (box // 4) + box % 2, box % 4 // 2)


@dataclass(frozen=True)
class SparseDecodeFewHeadsKeys(FewHeadsKeys):
    """Keys with the addresses of their scales."""

    scales: tuple[Int64, ...]


class SparseDecodeSm90FewHeadsConvertRole(FewHeadsConvertRole):
    """One of two warpgroups."""

    def __init__(self, config: SparseDecodeConfig, dtype: type[cutlass.Numeric]) -> None:
        self.config = config
        self.dtype = dtype
        self.format = config.format
        self.parts = parts_of(self.format)
        self.scale_words = self.format.scale_bytes // 4
        self.q_boxes = self.format.d_qk // BOX_COLUMNS
        self.p_groups = self.format.groups if has_own_p(self.format) else 1

    @cute.jit
    def attend(
        self, operands: SparseDecodeOperands, softmax: FewHeadsSoftmax, scores: FewHeadsScores, bytes_of_keys: tuple,
        tiles: TileRange, before: tuple[Int32, Int32, Int32, Int32],
    ) -> Int32:  # fmt: skip
        """Score every other tile of a work tile. Return the next turn.

        before: pairs of tiles that the CTA had, work tiles, the parity of own tiles, and whether the last pair lacks the own tile.
        """
        raw, scales = bytes_of_keys
        pairs, done, turn, skipped = before
        smem, thread, group = softmax.smem, softmax.thread, softmax.group
        indices = SparseDecodeSm90Indices.create(operands, tiles.req, (tiles.begin + tiles.tiles) * TILE_KEYS)
        position = (tiles.begin + group) * TILE_KEYS + thread.key
        v_writer = pin_register(smem.sV.iterator.toint() + writer_address(thread.warp * (16 * BOX_ROW_BYTES), thread.lane, BOX_ROW_BYTES))
        writer = pin_register(p_writer(smem, thread))
        index0, index1 = indices.look_up(position), indices.look_up(position + KEYS_APART)
        keys = self.find_keys(operands, indices, position, index0, index1, thread)
        self.load_first_tile(keys, bytes_of_keys, thread, done, group)
        present0, present1 = keys.present
        position = position + OWN_KEYS
        index0, index1 = indices.look_up(position), indices.look_up(position + KEYS_APART)
        smem.q_ready.consumer_wait(done)
        if skipped != 0:
            softmax.skip_place(CONVERTERS * pairs - 1)
        t = Int32(group)
        while t < tiles.tiles:
            present = present0, present1
            whole = cute.arch.vote_all_sync((present0 & present1) != 0)
            indices = indices.found_again(operands, tiles.req)
            following = self.find_keys(operands, indices, position, index0, index1, thread)
            factors = self.take_scales(scales, present, thread)
            self.load_scales(following, scales)
            self.score_tile(
                smem,
                scores,
                raw,
                following,
                (present, whole, factors),
                (group, turn, CONVERTERS * pairs + t),
                (done & 1) * self.q_boxes,
                v_writer,
            )
            position = position + OWN_KEYS
            index0, index1 = indices.look_up(position), indices.look_up(position + KEYS_APART)
            for i in cutlass.range_constexpr(REGISTERS):
                scores.total[i] = cutlass.select_(present[half(i)] == 0, -Float32.inf, scores.total[i])
            softmax.add_tile(scores.total, CONVERTERS * pairs + t, t == 0, turn)
            for number in cutlass.range_constexpr(self.p_groups):
                scaled = factors[number] if has_own_p(self.format) else None
                store_p(writer, group * self.p_groups + number, scores.total, scaled, self.dtype)
            cute.arch.fence_proxy("async.shared", space="cta")
            smem.p_ready.producer_commit(PipelineState(group, turn))
            present0, present1 = following.present
            turn, t = turn ^ 1, t + CONVERTERS
        return turn

    def find_keys(
        self, operands: SparseDecodeOperands, indices: SparseDecodeSm90Indices, position: Int32, index0: Int32, index1: Int32,
        thread: FewHeadsThread,
    ) -> SparseDecodeFewHeadsKeys:  # fmt: skip
        """Return the thread's keys from their indices. position: of the first one."""
        own = thread.lane % 4 * CHUNK
        found = [
            slot_address(operands, self.config, index, indices.in_extra(position + KEYS_APART * key))
            for key, index in enumerate((index0, index1))
        ]
        present = tuple(cutlass.select_(row != 0, Int32(1), Int32(0)) for row, _ in found)
        return SparseDecodeFewHeadsKeys(tuple(row + own for row, _ in found), present, tuple(scales for _, scales in found))

    def load_scales(self, keys: SparseDecodeFewHeadsKeys, scales: list[cute.Tensor]) -> None:
        """Start the loads of the scales of a tile."""
        for words, address, present in zip(scales, keys.scales, keys.present, strict=True):
            load_if(present, words, address)

    def take_scales(self, scales: list[cute.Tensor], present: tuple[Int32, ...], thread: FewHeadsThread) -> list[list[Any]]:
        """Return the scales, those of absent keys finite, in registers of their own: by group of columns and key, or bf16_scales by key."""
        words = [[pin_register(own[i] & -there) for i in range(cute.size(own))] for own, there in zip(scales, present, strict=True)]
        if has_own_p(self.format):
            return [[as_float(own[group]) for own in words] for group in range(self.p_groups)]
        return [bf16_scales(self.format, own, thread.lane) for own in words]

    def convert(self, part: FewHeadsPart, words: list[cute.Tensor], fragment: cute.Tensor, factors: list[list[Any]]) -> None:
        """Convert a part to fragments of A: of each step of 16 columns two pairs of both keys."""
        for key in range(KEYS):
            pairs = widen(words[key], BFloat16) if part.quantised else words[key]
            scale = None
            if part.quantised and not has_own_p(self.format):
                word, second = place_of_scale(self.format, part.box)
                scale = cute.arch.prmt(factors[key][word], factors[key][word], Int32(SECOND_HALVES if second else FIRST_HALVES))
            for pair in range(2 * STEPS_PER_BOX):
                value = pairs[pair] if part.quantised else pin_register(pairs[pair])
                fragment[2 * pair + key] = value if scale is None else multiply_pairs(value, scale)


class SparseDecodeSm90FewHeads(FewHeadsSm90Parts):
    """One variant of the kernel."""

    def __init__(self, config: SparseDecodeConfig) -> None:
        self.dtype = ELEMENT_TYPES[config.dtype]
        self.role = SparseDecodeSm90FewHeadsConvertRole(config, self.dtype)
        self.layout = FewHeadsSmem.layout(self.dtype, self.role.q_boxes, self.role.p_groups)
        self.expected = len(self.role.parts) * STEPS_PER_BOX + BOXES * TILE_KEYS // K_STEP

    def convert(self, operands: SparseDecodeOperands, smem: FewHeadsSmem, group: Int32) -> None:
        """Run the role that converts and scores."""
        self.role.run(operands, smem, group)

    def output(self, operands: SparseDecodeOperands, smem: FewHeadsSmem) -> None:
        """Run the output role."""
        role = FewHeadsOutputRole(SinkScale(), self.dtype, self.role.q_boxes, self.role.p_groups)
        role.run(operands, smem, prefetch_indices)


@cute.jit
def prefetch_indices(operands: SparseDecodeOperands, req: Int32, begin_tile: Int32, lane: Int32):
    """Ask L2 for the indices of the first tiles of a work tile. One warp, the first lanes."""
    first = begin_tile * TILE_KEYS + lane * (LINE_BYTES // INT32_BYTES)
    if (lane < CONVERTERS * TILE_KEYS * INT32_BYTES // LINE_BYTES) & (first < operands.args.topk):
        prefetch_line(operands.cache.index_pointer(req) + first)
