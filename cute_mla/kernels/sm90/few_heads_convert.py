"""The role of the SM90 kernels with keys on M that converts and scores: what does not ask where keys lie.

A tile is a list of parts of 64 columns. A lane has 16 bytes of each of two keys of a part, as fragments of A once converted. Its bytes of
the next own tile are asked for in place of those that it has converted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from ...spec.split_plan import TILE_KEYS
from ..attention.scheduler import LatentOperands, TileRange
from ..primitives.arithmetic import widen
from ..primitives.copies import store_groups
from ..primitives.rows import load_if
from ..primitives.wgmma import A_STRIDES, A_VALUES, K_STEP, REGISTERS_PER_STEP, flat, half, packed
from .cta import BOX_BYTES, STAGE_BOXES, STAGE_BYTES, STEPS_PER_BOX, WARPGROUP
from .few_heads_cta import CONVERTERS, HEADS, STAGGER_BARRIER, FewHeadsSmem, FewHeadsThread
from .few_heads_softmax import REGISTERS, FewHeadsSoftmax
from .rows import CHUNK, CHUNK_WORDS, part_of

TURN_PART = 6
KEYS = 2  # of a thread in a tile
OWN_KEYS = CONVERTERS * TILE_KEYS  # from an own tile to the next


@dataclass(frozen=True)
class FewHeadsPart:
    """64 columns of a tile, in the order of their products.

    box: of Q. source: their first byte in a key's row. v_box: of V; None: they are not values. group: of columns with one fp32 scale, whose
    products are summed apart; None: those without. words: that a lane has of a key.
    """

    box: int
    source: int
    quantised: bool
    v_box: int | None
    group: int | None

    @property
    def words(self) -> int:
        """Return the 32-bit words of a lane, of a key."""
        return CHUNK_WORDS if self.quantised else 2 * CHUNK_WORDS


@dataclass(frozen=True)
class FewHeadsKeys:
    """A thread's two keys of a tile. rows: addresses of the lane's first 16 bytes. present: 1 or 0."""

    rows: tuple[Int64, ...]
    present: tuple[Int32, ...]


@dataclass(frozen=True)
class FewHeadsScores:
    """S^T of one thread, and its A fragments: of a part and of the one before, which is multiplied meanwhile."""

    mma: cute.TiledMma
    tQ: cute.Tensor
    fragments: tuple[cute.Tensor, ...]
    sums: tuple[cute.Tensor, ...]  # of a group of columns, and of the one before
    total: cute.Tensor

    @staticmethod
    def create(smem: FewHeadsSmem, thread: FewHeadsThread) -> FewHeadsScores:
        """Partition the tiles for one thread."""
        dtype, source = smem.sQ.element_type, warpgroup.OperandSource.RMEM
        op = warpgroup.MmaF16BF16Op(dtype, Float32, (TILE_KEYS, HEADS, K_STEP), source, OperandMajorMode.K, OperandMajorMode.K)
        mma = cute.make_tiled_mma(op)
        slice_ = mma.get_slice(thread.warp * 32 + thread.lane)
        fragment = cute.make_layout((A_VALUES, 1, STEPS_PER_BOX), stride=(A_STRIDES, 0, REGISTERS_PER_STEP))
        return FewHeadsScores(
            mma=mma,
            tQ=slice_.make_fragment_B(slice_.partition_B(smem.sQ)),
            fragments=tuple(cute.make_rmem_tensor(fragment, dtype) for _ in range(2)),
            sums=tuple(cute.make_rmem_tensor(slice_.partition_shape_C((TILE_KEYS, HEADS)), Float32) for _ in range(2)),
            total=cute.make_rmem_tensor(cute.make_layout(REGISTERS), Float32),
        )

    def multiply(self, number: int, sums: int, box: Int32, begins: bool) -> None:
        """Issue the products of a part. number: of the fragments. sums: number of the accumulators, overwritten if it begins a group."""
        warpgroup.fence()
        for step in range(STEPS_PER_BOX):
            self.mma.set(warpgroup.Field.ACCUMULATE, not (begins and step == 0))
            accumulator = self.sums[sums]
            cute.gemm(self.mma, accumulator, self.fragments[number][None, None, step], self.tQ[None, None, step, box], accumulator)
        warpgroup.commit_group()

    def fold(self, sums: int, factors: list[Float32] | None, begins: bool) -> None:
        """Add the sums of a group of columns, times the scales of the thread's keys, to S^T; or begin it with them."""
        values = flat(self.sums[sums])
        for i in range(REGISTERS):
            scaled = values[i] if factors is None else values[i] * factors[half(i)]
            self.total[i] = scaled if begins else self.total[i] + scaled


class FewHeadsConvertRole:
    """One of two warpgroups. A subclass finds keys.

    dtype: what e4m3 becomes. parts: of a tile, in the order of their products. q_boxes: of 64 columns. p_groups: Ps of a tile.
    scale_words: 32-bit words of scales of a key.
    """

    dtype: type[cutlass.Numeric]
    parts: tuple[FewHeadsPart, ...]
    q_boxes: int
    p_groups: int
    scale_words = 0

    def score_scale(self, operands: Any) -> Float32:
        """Return the factor of the scores."""
        return operands.scale_log2

    def attend(
        self, operands: Any, softmax: FewHeadsSoftmax, scores: FewHeadsScores, bytes_of_keys: tuple, tiles: TileRange,
        before: tuple[Int32, Int32, Int32, Int32],
    ) -> Int32:  # fmt: skip
        """Score every other tile of a work tile. Return the next turn.

        before: pairs of tiles that the CTA had, work tiles, the parity of own tiles, and whether the last pair lacks the own tile.
        """
        raise NotImplementedError

    @cute.jit
    def run(self, operands: LatentOperands, smem: FewHeadsSmem, group: Int32):
        """Wait loads_issued, v_free, reference_ready, q_ready. Signal loads_issued, p_ready, reference_ready, sums_ready."""
        schedule, thread = operands.schedule, FewHeadsThread.create()
        req, begin_tile = schedule.first_work_tile()
        pairs, done, turn, skipped = Int32(0), Int32(0), Int32(0), Int32(0)
        softmax = FewHeadsSoftmax.create(smem, thread, group, self.score_scale(operands))
        scores = FewHeadsScores.create(smem, thread)
        raw = [[cute.make_rmem_tensor(cute.make_layout(part.words), Int32) for _ in range(KEYS)] for part in self.parts]
        scales = [cute.make_rmem_tensor(cute.make_layout(self.scale_words), Int32) for _ in range(KEYS if self.scale_words else 0)]
        for words in (*scales, *(words for both in raw for words in both)):
            words.fill(0)  # what an absent key leaves must be defined
        while req <= schedule.last_request():
            tile_range = schedule.tile_range(req, begin_tile)
            softmax.reset()
            turn = self.attend(operands, softmax, scores, (raw, scales), tile_range, (pairs, done, turn, skipped))
            softmax.publish(done)
            pairs, done = pairs + (tile_range.tiles + 1) // CONVERTERS, done + 1
            skipped = group & tile_range.tiles
            # asked here, since few registers are left through the tiles
            work_tile = schedule.work_tile(req, begin_tile)
            req, begin_tile = work_tile.next_req, work_tile.next_tile
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def score_tile(
        self, smem: FewHeadsSmem, scores: FewHeadsScores, raw: list, following: FewHeadsKeys, now: tuple,
        own: tuple[Int32, Int32, Int32], first_box: Int32, v_writer: Int32,
    ):  # fmt: skip
        """Compute S^T of a tile and store V; load the bytes of the next own tile in place of those that are converted.

        now: of this tile, which keys are present, whether all of the warp are, and the scales. own: warpgroup, turn, and place in the order
        of tiles.
        """
        present, whole, factors = now
        thread = FewHeadsThread.create()
        last = len(self.parts) - 1
        smem.loads_issued.producer_acquire(own[2] + 1)  # completed by the tile before
        for i in cutlass.range_constexpr(len(self.parts)):
            part = self.parts[i]
            if cutlass.const_expr(i >= 2):
                warpgroup.wait_group(1)
                self.fold_behind(scores, i - 2, factors)
            stage = 0 if part.v_box is None else part.v_box // STAGE_BOXES
            state = smem.v_state(own[0], own[1], stage)
            begins_stage = part.v_box is not None and part.v_box % STAGE_BOXES == 0
            free = smem.v_free.try_acquire(state) if begins_stage else None
            self.clear_absent(raw[i], present, whole)
            self.convert(part, raw[i], packed(scores.fragments[i % 2]), factors)
            self.load_part(part, following, raw[i], thread)
            if cutlass.const_expr(i == TURN_PART):
                smem.loads_issued.producer_commit(own[2])
            scores.multiply(i % 2, self.sums_of(i), first_box + part.box, self.begins_group(i))
            if cutlass.const_expr(part.v_box is not None):
                if cutlass.const_expr(begins_stage):
                    smem.v_free.finish_acquire(state, free)
                place = v_writer + state.stage * STAGE_BYTES + part.v_box % STAGE_BOXES * BOX_BYTES
                words = packed(scores.fragments[i % 2])
                for step in cutlass.range_constexpr(STEPS_PER_BOX):
                    store_groups(place, 0, step, [words[4 * step + j] for j in range(4)])
        for behind in (1, 0):
            warpgroup.wait_group(behind)
            self.fold_behind(scores, last - behind, factors)

    def begins_group(self, i: int) -> bool:
        """Return whether a part begins a group of columns."""
        return i == 0 or self.parts[i].group != self.parts[i - 1].group

    def sums_of(self, i: int) -> int:
        """Return the accumulators of a part: those of two groups by turns."""
        return sum(self.begins_group(j) for j in range(1, i + 1)) % 2

    def fold_behind(self, scores: FewHeadsScores, i: int, factors: list[list[Float32]]) -> None:
        """Fold the sums of a group if a part, whose products are done, ends it."""
        if i + 1 == len(self.parts) or self.begins_group(i + 1):
            group = self.parts[i].group
            scores.fold(self.sums_of(i), None if group is None else factors[group], self.parts[i].group == self.parts[0].group)

    @cute.jit
    def load_first_tile(self, keys: FewHeadsKeys, bytes_of_keys: tuple, thread: FewHeadsThread, done: Int32, group: Int32):
        """Start the loads of the first own tile of a work tile; in the CTA's first one, those of group 1 behind those of group 0."""
        raw, scales = bytes_of_keys
        if done == 0 and group == 1:
            cute.arch.barrier(barrier_id=STAGGER_BARRIER, number_of_threads=CONVERTERS * WARPGROUP)
        self.load_scales(keys, scales)
        for part, words in zip(self.parts, raw, strict=True):
            self.load_part(part, keys, words, thread)
        if done == 0 and group == 0:
            # half a period apart, the loads of one group go on while the other one has its own on their way
            cute.arch.barrier_arrive(barrier_id=STAGGER_BARRIER, number_of_threads=CONVERTERS * WARPGROUP)

    def load_scales(self, keys: Any, scales: list[cute.Tensor]) -> None:
        """Start the loads of the scales of a tile: none, where the cache has one for all."""

    def load_part(self, part: FewHeadsPart, keys: FewHeadsKeys, words: list[cute.Tensor], thread: FewHeadsThread) -> None:
        """Start the loads of a part."""
        for key in range(KEYS):
            address = keys.rows[key] + part.source
            if not part.quantised:
                address = address + thread.lane % 4 * CHUNK  # 32 bytes a lane
            for first in range(0, part.words, CHUNK_WORDS):
                load_if(keys.present[key], part_of(words[key], first, CHUNK_WORDS), address + 4 * first)

    @cute.jit
    def clear_absent(self, words: list[cute.Tensor], present: tuple[Int32, ...], whole: Boolean):
        """Zero the bytes of absent keys: the registers still have those of another key."""
        if not whole:
            for key in cutlass.range_constexpr(KEYS):
                for i in cutlass.range_constexpr(cute.size(words[key])):
                    words[key][i] = words[key][i] & -present[key]

    def convert(self, part: FewHeadsPart, words: list[cute.Tensor], fragment: cute.Tensor, factors: Any) -> None:
        """Convert a part to fragments of A: of each step of 16 columns two pairs of both keys."""
        for key in range(KEYS):
            pairs = widen(words[key], self.dtype)
            for pair in range(2 * STEPS_PER_BOX):
                fragment[2 * pair + key] = pairs[pair]
