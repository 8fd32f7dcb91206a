"""Constants of the SM100 kernels over a latent: tile geometry, shared and tensor memory, barriers, roles.

A box is 64 keys x 128 bytes and an MMA contracts 32 bytes. ../dense_decode/sm100_fp8.py has the geometry of e4m3 operands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from cutlass import Boolean, Float32, Int32, Uint8, cute

from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_LATENT, D_ROPE, ELEMENT_BYTES
from ...spec.split_plan import TILE_KEYS
from ..primitives.pipeline import StageBarriers
from ..primitives.smem import SWIZZLE_PERIOD, Array, Barriers, Field, SmemLayout, fields_of

PAIR = 2  # CTAs that share one matrix product
PAIR_ROWS = PAIR * TILE_ROWS
CTA_COLUMNS = D_LATENT // PAIR  # latent columns whose keys and values a CTA holds, at most
CTA_ROPE = D_ROPE // PAIR  # RoPE columns whose keys a CTA holds

ROW_BYTES = 128  # of a key, or of a row of P, in a box: one period of the swizzle
BOX_BYTES = TILE_KEYS * ROW_BYTES
STEP_BYTES = 32  # that one MMA contracts, of a row of A and B
STEPS_PER_BOX = ROW_BYTES // STEP_BYTES
WORD_BYTES = 4  # of a column of tensor memory
STEP_COLUMNS = STEP_BYTES // WORD_BYTES
CHUNK_COLUMNS = 128  # of each CTA: an MMA has at most 256

# tensor memory, in 32-bit columns of 128 lanes. Lanes 0..63 and 64..127 are the same 64 query rows:
# O and S of the columns that the even and the odd CTA hold, Q of the columns that each of them multiplies
OUTPUT_COLUMN = 0
QUERY_COLUMN = OUTPUT_COLUMN + CTA_COLUMNS
SUM_COLUMN = QUERY_COLUMN + 144  # sums of rounded P, after Q: 288 columns of 16 bits or 576 of 8
TMEM_COLUMNS = 512  # what is allocated: a power of two
SCORE_COLUMN = TMEM_COLUMNS - TILE_KEYS

HALF_LANES = 16  # of a warp's: where D has 64 rows and one CTA, it takes every other 16 lanes

GROUP_WARPS = 4
GROUP = 32 * GROUP_WARPS
EVEN_CTA = 0  # of a pair: it issues the products of both
SCORE_BARRIER = 1  # and 2: bar.sync ids of the two pairs of a group of score warps; 0 is the CTA's

SUM_COLUMNS = 16  # of each CTA, equal: the minimum of a product of a pair

VECTOR = 4  # 32-bit words of a 16-byte access
HALF_KEYS = TILE_KEYS // 2  # keys of a tile whose probabilities one score thread computes
REFERENCE_WORDS = 2 * TILE_ROWS
SEEN_WORDS = TILE_KEYS // HALF_KEYS  # of 32 bits, a bit per key of a stage
ALL_SEEN = -1


@dataclass(frozen=True)
class LatentGeometrySm100:
    """Numbers that depend on the columns and on the groups of warps.

    kv_stages: key tiles of the pipeline. score_groups: groups of score warps, which take tiles in turn; so many scores are in tensor
    memory. score_parts: pieces of S, each of other keys, that are computed, handed over and released one by one. paired: whether two CTAs
    multiply together, half of the columns each; a CTA that works alone has both halves, half of Q in each 16 of 32 lanes, and quarters of O
    (heads64.py). parts_ahead: pieces of S of the tile after next that are computed before P V of a tile.

    element_bytes: of Q, K, V and P. sums_probs: whether O is divided by the sum of P as it was multiplied, because P is rounded coarsely:
    the tensor cores add that sum up, as P times a column of ones. exchange_words: that a group of score warps passes between its halves.
    """

    kv_stages: int
    score_groups: int
    score_parts: int
    latent: int = D_LATENT
    paired: bool = True
    parts_ahead: int = 0

    element_bytes = ELEMENT_BYTES
    sums_probs = False
    exchange_words = PAIR * TILE_ROWS * HALF_KEYS

    @staticmethod
    def of(latent: int) -> LatentGeometrySm100:
        """Return the geometry of so many latent columns, where keys come by TMA."""
        if latent != D_LATENT:
            return replace(SIXTEEN_BIT, kv_stages=7, score_groups=2, latent=latent)  # a softmax takes longer than the products of a tile
        return replace(SIXTEEN_BIT_PARTS, parts_ahead=1)

    # ---- roles ------------------------------------------------------------------------------------------------------

    @property
    def mma_cta(self) -> int | Int32 | None:
        """Return the CTA of a pair whose mma role waits for the others; None where each CTA has one of its own."""
        return EVEN_CTA if self.paired else None

    def multiplies(self) -> Boolean:
        """Return whether this CTA's mma role multiplies for its pair."""
        return cute.arch.block_idx_in_cluster() == EVEN_CTA

    @property
    def output_warp(self) -> int:
        """Return the first warp of the output role."""
        return self.score_groups * GROUP_WARPS

    @property
    def load_warp(self) -> int:
        """Return the first warp after the groups of score and output."""
        return self.output_warp + GROUP_WARPS

    @property
    def ahead(self) -> int:
        """Return how many tiles S is ahead of P V."""
        return self.score_groups

    @property
    def parities(self) -> int:
        """Return the tiles that may be in flight between two roles."""
        return self.ahead + 1

    # ---- a stage of keys and values ---------------------------------------------------------------------------------

    @property
    def row_latent(self) -> int:
        """Return the latent columns of a key."""
        return self.latent

    def first_column(self) -> int | Int32:
        """Return the first latent column of this pair."""
        return 0

    def rope_begin(self) -> int | Int32:
        """Return the first rotary column, counted from there."""
        return self.row_latent - self.first_column()

    @property
    def half_rope(self) -> int:
        """Return the rotary columns of one of the two halves."""
        return CTA_ROPE

    @property
    def cta_columns(self) -> int:
        """Return the latent columns of one of the two halves."""
        return self.latent // PAIR

    @property
    def latent_boxes(self) -> int:
        """Return the boxes of the latent columns of a half and tile."""
        return self.cta_columns * self.element_bytes // ROW_BYTES

    @property
    def halves(self) -> int:
        """Return the halves of the columns that a CTA holds."""
        return 1 if self.paired else PAIR

    @property
    def rope_box(self) -> int:
        """Return the number of the last box of a stage: of RoPE columns, overwritten by P."""
        return self.halves * self.latent_boxes

    @property
    def stage_bytes(self) -> int:
        """Return the bytes of a stage."""
        return (self.rope_box + 1) * BOX_BYTES

    # ---- products ---------------------------------------------------------------------------------------------------

    @property
    def word_elements(self) -> int:
        """Return elements of a 32-bit word, or column of tensor memory."""
        return WORD_BYTES // self.element_bytes

    @property
    def latent_steps(self) -> int:
        """Return MMAs of S over half of the latent columns."""
        return self.cta_columns * self.element_bytes // STEP_BYTES

    @property
    def rope_steps(self) -> int:
        """Return MMAs of S over half of the RoPE columns."""
        return self.half_rope * self.element_bytes // STEP_BYTES

    @property
    def step_keys(self) -> int:
        """Return the keys that one MMA of P V contracts."""
        return STEP_BYTES // self.element_bytes

    @property
    def key_steps(self) -> int:
        """Return MMAs of P V over the keys of a tile."""
        return TILE_KEYS // self.step_keys

    @property
    def output_chunks(self) -> int:
        """Return the products of P V over the same keys."""
        return self.cta_columns // CHUNK_COLUMNS

    def products_per_tile(self, has_rope: bool) -> int:
        """Return the matrix products of one tile."""
        scores = self.latent_steps + (self.rope_steps if has_rope else 0)
        return self.halves * self.score_parts * scores + self.output_chunks * self.key_steps

    @property
    def lane_columns(self) -> int:
        """Return the columns between those of O in the lanes 0..63 and those in the lanes 64..127, in the same column of tensor memory."""
        return self.cta_columns if self.paired else CHUNK_COLUMNS

    def output_place(self, column: int) -> int:
        """Return where a column of O in tensor memory belongs, counted from the lane's first: a CTA alone has every other chunk there."""
        return column if self.paired else column + column // CHUNK_COLUMNS * CHUNK_COLUMNS

    # ---- pieces of S ------------------------------------------------------------------------------------------------

    @property
    def run_keys(self) -> int:
        """Return the keys of a piece of S whose probabilities one score thread computes."""
        return HALF_KEYS // self.score_parts

    @property
    def part_keys(self) -> int:
        """Return the keys of a piece of S."""
        return TILE_KEYS // self.score_parts

    @property
    def scores(self) -> int:
        """Return the pieces of S that are in tensor memory."""
        return self.score_groups * self.score_parts + self.parts_ahead

    @property
    def groups_apart(self) -> int:
        """Return the columns of tensor memory from the scores of one group back to those of the other; 0 where they share a ring."""
        return TILE_KEYS if self.score_groups > 1 else 0

    def score_column(self, part: int, stage: Int32) -> int | Int32:
        """Return the first column of tensor memory of a piece of S. stage: of its use."""
        if self.parts_ahead == 0:
            return SCORE_COLUMN + part * self.part_keys
        return TMEM_COLUMNS - self.scores * self.part_keys + stage * self.part_keys

    # ---- shared memory ----------------------------------------------------------------------------------------------

    def smem(self, *added: Field) -> SmemLayout:
        """Return the layout of shared memory of a pair's CTA. added: fields of a kernel's own, after the shared ones."""
        groups, alternating = self.score_groups, self.score_groups > 1
        between_groups = (
            Array("sReference", Float32, groups * REFERENCE_WORDS),
            Array("sShares", Float32, groups * GROUP),
        )  # fmt: skip
        return SmemLayout((
            Array("sKv", Uint8, self.kv_stages * self.stage_bytes, SWIZZLE_PERIOD),
            *((Array("sOnes", Uint8, SUM_COLUMNS * ROW_BYTES),) if self.sums_probs else ()),
            Array("sExchange", Float32, groups * self.exchange_words),
            Array("sRowValue", Float32, groups * GROUP),
            Array("sAlpha", Float32, self.parities * TILE_ROWS),
            Array("sInverse", Float32, TILE_ROWS),
            *(between_groups if alternating else ()),
            *(Barriers(name, self.kv_stages) for name in ("kv_ready", "kv_free")),
            Barriers("query_ready", 1),
            *(Barriers(name, self.scores) for name in ("scores_ready", "scores_free")),
            *(Barriers(name, self.parities) for name in ("alpha_ready", "probs_ready", "output_ready")),
            *(Barriers(name, 1) for name in ("stats_ready", "stats_free")),
            *((Barriers("reference_ready", groups),) if alternating else ()),
            Array("tmem_cell", Int32, 1),
            *added,
        ))  # fmt: skip

    def seen_fields(self) -> tuple[Field, ...]:
        """Return the fields that say which keys of a stage count."""
        return Barriers("seen_ready", self.kv_stages), Array("sSeen", Int32, SEEN_WORDS * self.kv_stages)


SIXTEEN_BIT = LatentGeometrySm100(kv_stages=5, score_groups=1, score_parts=1)
SIXTEEN_BIT_PARTS = replace(SIXTEEN_BIT, score_parts=2)  # where the keys come as fast as S, P V and softmax take turns


@dataclass(frozen=True)
class LatentSmemSm100:
    """Shared memory, as LatentGeometrySm100.smem lays it out. dense_decode/sm100.py says who arrives where.

    None: what a variant does without.
    """

    geometry: LatentGeometrySm100
    sKv: cute.Pointer  # bytes of stages of boxes of 64 keys x 128 bytes: 256 latent columns, then RoPE columns, later P
    sOnes: cute.Pointer | None  # e4m3 (16 rows, 128): ones, where P is summed up
    sExchange: cute.Pointer  # (groups, 2 halves, vectors, 64 rows, 4 words): partial scores or P for the other half of the threads
    sRowValue: cute.Pointer  # fp32 (groups, 2 halves, 64 rows): row maxima and sums for the other half of the threads
    sAlpha: cute.Pointer  # fp32 (tiles in flight, 64 rows): rescale factors
    sInverse: cute.Pointer  # fp32 (64 rows): 1 / row sum, 0 for a row that attends to nothing
    sReference: cute.Pointer | None  # fp32 (groups, 2, 64 rows): reference of a group's last tile, maximum so far; log2 units
    sShares: cute.Pointer | None  # fp32 (groups, 2 halves, 64 rows): shares of the row sum
    sSeen: cute.Pointer | None  # int32 (stages, 2): a bit per key, whether it counts, of keys that indices name
    sWork: cute.Pointer | None  # int32 (records, 8): work tiles that a scout has published
    tmem_cell: cute.Pointer  # int32: address of the tensor memory
    kv_ready: StageBarriers
    kv_free: StageBarriers
    query_ready: StageBarriers
    scores_ready: StageBarriers
    scores_free: StageBarriers
    alpha_ready: StageBarriers
    probs_ready: StageBarriers
    output_ready: StageBarriers
    stats_ready: StageBarriers
    stats_free: StageBarriers
    reference_ready: StageBarriers | None  # of two groups of score warps
    seen_ready: StageBarriers | None
    left_ready: StageBarriers | None  # of a CTA that works alone: of columns 0..255. kv_ready and kv_free, of whole tiles, come later
    left_free: StageBarriers | None
    work_ready: StageBarriers | None  # where there is a scout
    work_free: StageBarriers | None
    pages_asked: StageBarriers | None

    @classmethod
    def create(cls, geometry: LatentGeometrySm100, memory: dict[str, Any]) -> Self:
        """Return the pointers and barriers that a layout has allocated."""
        return cls(**fields_of(cls, {**memory, "geometry": geometry}))

    def stage(self, index: Int32) -> cute.Pointer:
        """Return the first byte of a stage."""
        return self.sKv + index * self.geometry.stage_bytes

    def seen_words(self, tile: Int32) -> cute.Pointer:
        """Return the two words of bits of a tile's keys."""
        return self.sSeen + self.seen_ready.stage(tile) * SEEN_WORDS

    def has_keys(self, tile: Int32) -> Boolean:
        """Return whether a key of a tile counts. After seen_ready or kv_ready, until the tile's kv_free is signalled."""
        words = self.seen_words(tile)
        return cute.arch.make_warp_uniform(words.load() | (words + 1).load()) != 0


def thread_and_lanes(tmem: Int32) -> tuple[Int32, Int32]:
    """Return (number of this thread among the four warps of its role, tensor memory at the first of its warp's lanes)."""
    thread = cute.arch.thread_idx()[0] % GROUP
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % GROUP_WARPS
    return thread, tmem + (warp << 21)
