"""Constants of the SM100 kernels over a latent: tile geometry, shared and tensor memory, barriers, roles.

A box is 64 keys x 128 bytes and an MMA contracts 32 bytes, whatever the elements are. What depends on their size is a Geometry.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import cutlass
from cutlass import Float32, Int32, Uint8, cute

from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_LATENT, D_ROPE
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
SUM_COLUMN = QUERY_COLUMN + 96  # sums of rounded P, behind 8-bit Q
TMEM_COLUMNS = 512  # what is allocated: a power of two
SCORE_COLUMN = TMEM_COLUMNS - TILE_KEYS

HALF_LANES = 16  # of a warp's: where D has 64 rows and one CTA, it takes every other 16 lanes

GROUP_WARPS = 4
GROUP = 32 * GROUP_WARPS
SCORE_WARP = 0
EVEN_CTA = 0  # of a pair: it issues the products of both
SCORE_BARRIER = 1  # and 2: bar.sync ids of the two pairs of a group of score warps; 0 is the CTA's

SUM_COLUMNS = 16  # of each CTA, equal: the least that a product of a pair has
ONES_BYTES = SUM_COLUMNS * ROW_BYTES
ONES_WORD = 0x38383838  # four times 1 in e4m3

VECTOR = 4  # 32-bit words of a 16-byte access
HALF_KEYS = TILE_KEYS // 2  # keys of a tile whose probabilities one score thread computes
EXCHANGE_WORDS = PAIR * TILE_ROWS * HALF_KEYS
REFERENCE_WORDS = 2 * TILE_ROWS


@dataclass(frozen=True)
class Geometry:
    """Numbers that depend on the size of an element of Q, K, V and P.

    element_bytes: 2 (bf16, fp16) or 1 (e4m3). kv_stages: key tiles of the pipeline. score_groups: groups of score warps, which take
    tiles in turn; so many scores are in tensor memory, and S is so many tiles ahead of P V. score_parts: pieces of S, each of other
    keys, that are computed, handed over and released one by one. paired: whether two CTAs multiply together, half of the columns each;
    a CTA that works alone has them all, half of Q in each 16 of 32 lanes, and quarters of O (sparse_prefill/sm100_heads64.py).
    """

    element_bytes: int
    kv_stages: int
    score_groups: int
    score_parts: int
    latent: int = D_LATENT
    paired: bool = True

    @staticmethod
    def of(dtype: type[cutlass.Numeric], latent: int = D_LATENT) -> Geometry:
        """Return the geometry of an element type and so many latent columns, where keys come by TMA."""
        if latent != D_LATENT:
            return replace(SIXTEEN_BIT, kv_stages=7, score_groups=2, latent=latent)  # a softmax takes longer than the products of a tile
        return EIGHT_BIT if dtype.width == 8 else SIXTEEN_BIT_PARTS

    @property
    def sums_probs(self) -> bool:
        """Return whether O is divided by the sum of P as it was multiplied, because P is rounded coarsely.

        The tensor cores add that sum up: P times a column of ones.
        """
        return self.element_bytes == 1

    @property
    def mma_cta(self) -> int | None:
        """Return the CTA of a pair whose mma role waits for the others; None where each CTA has one of its own."""
        return EVEN_CTA if self.paired else None

    def query_row(self, thread: Int32) -> Int32:
        """Return the row of Q in the lane of a thread of four warps."""
        return thread % TILE_ROWS if self.paired else thread // 32 * HALF_LANES + thread % HALF_LANES

    def query_half(self, thread: Int32) -> Int32:
        """Return which half of the columns of Q the lane of a thread has."""
        return thread // TILE_ROWS if self.paired else thread // HALF_LANES % 2

    @property
    def scores(self) -> int:
        """Return the pieces of S in tensor memory."""
        return self.score_groups * self.score_parts

    @property
    def parities(self) -> int:
        """Return the tiles that may be in flight between two roles."""
        return self.score_groups + 1

    @property
    def run_keys(self) -> int:
        """Return the keys of a piece of S whose probabilities one score thread computes."""
        return HALF_KEYS // self.score_parts

    @property
    def part_keys(self) -> int:
        """Return the keys of a piece of S."""
        return TILE_KEYS // self.score_parts

    @property
    def output_warp(self) -> int:
        """Return the first warp of the output role."""
        return SCORE_WARP + self.score_groups * GROUP_WARPS

    @property
    def load_warp(self) -> int:
        """Return the first warp behind the groups of score and output."""
        return self.output_warp + GROUP_WARPS

    @property
    def box_columns(self) -> int:
        """Return columns of a box."""
        return ROW_BYTES // self.element_bytes

    @property
    def word_elements(self) -> int:
        """Return elements of a 32-bit word, or column of tensor memory."""
        return WORD_BYTES // self.element_bytes

    @property
    def cta_columns(self) -> int:
        """Return the latent columns whose keys and values a CTA holds."""
        return self.latent // PAIR

    @property
    def output_chunks(self) -> int:
        """Return the products of P V over the same keys."""
        return self.cta_columns // CHUNK_COLUMNS

    @property
    def latent_boxes(self) -> int:
        """Return the boxes of the latent columns of a CTA and tile."""
        return self.cta_columns // self.box_columns

    @property
    def stage_boxes(self) -> int:
        """Return the boxes of a stage: one more, of RoPE columns, overwritten by P."""
        return self.latent_boxes + 1

    @property
    def stage_bytes(self) -> int:
        """Return the bytes of a stage."""
        return self.stage_boxes * BOX_BYTES

    def loaded_bytes(self, has_rope: bool) -> int:
        """Return the bytes of a stage that TMA fills: without RoPE columns the last box is for P alone."""
        return (self.stage_boxes if has_rope else self.latent_boxes) * BOX_BYTES

    @property
    def probs_offset(self) -> int:
        """Return the first byte of the last box of a stage."""
        return self.latent_boxes * BOX_BYTES

    @property
    def query_rope_column(self) -> int:
        """Return the column of tensor memory at which the RoPE columns of Q begin."""
        return QUERY_COLUMN + self.cta_columns // self.word_elements

    @property
    def latent_steps(self) -> int:
        """Return MMAs of S over the latent columns."""
        return self.cta_columns * self.element_bytes // STEP_BYTES

    @property
    def rope_steps(self) -> int:
        """Return MMAs of S over the RoPE columns."""
        return CTA_ROPE * self.element_bytes // STEP_BYTES

    @property
    def step_keys(self) -> int:
        """Return the keys that one MMA of P V contracts."""
        return STEP_BYTES // self.element_bytes

    @property
    def key_steps(self) -> int:
        """Return MMAs of P V over the keys of a tile."""
        return TILE_KEYS // self.step_keys

    def products_per_tile(self, has_rope: bool) -> int:
        """Return the matrix products of one tile."""
        scores = self.latent_steps + (self.rope_steps if has_rope else 0)
        return self.score_parts * scores + (self.output_chunks + (1 if self.sums_probs else 0)) * self.key_steps

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of all stages."""
        return self.kv_stages * self.stage_bytes

    def smem(self, *added: Field) -> SmemLayout:
        """Return the layout of shared memory. added: fields of a kernel's own, behind the shared ones."""
        groups = self.score_groups
        ones = (Array("sOnes", Uint8, ONES_BYTES),) if self.sums_probs else ()
        between_groups = (
            Array("sReference", Float32, groups * REFERENCE_WORDS),
            Array("sShares", Float32, groups * GROUP),
        )  # fmt: skip
        return SmemLayout((
            Array("sKv", Uint8, self.kv_bytes, SWIZZLE_PERIOD),
            *ones,
            Array("sExchange", Float32, groups * EXCHANGE_WORDS),
            Array("sRowValue", Float32, groups * GROUP),
            Array("sAlpha", Float32, self.parities * TILE_ROWS),
            Array("sInverse", Float32, TILE_ROWS),
            *(between_groups if groups > 1 else ()),
            Barriers("kv_ready", self.kv_stages),
            Barriers("kv_free", self.kv_stages),
            Barriers("query_ready", 1),
            Barriers("scores_ready", self.scores),
            Barriers("scores_free", self.scores),
            Barriers("alpha_ready", self.parities),
            Barriers("probs_ready", self.parities),
            Barriers("output_ready", self.parities),
            Barriers("stats_ready", 1),
            Barriers("stats_free", 1),
            *((Barriers("reference_ready", groups),) if groups > 1 else ()),
            Array("tmem_cell", Int32, 1),
            *added,
        ))  # fmt: skip


SIXTEEN_BIT = Geometry(element_bytes=2, kv_stages=5, score_groups=1, score_parts=1)
SIXTEEN_BIT_PARTS = replace(SIXTEEN_BIT, score_parts=2)  # where the keys come as fast as S, P V and softmax take turns
EIGHT_BIT = Geometry(element_bytes=1, kv_stages=7, score_groups=2, score_parts=1)


@dataclass(frozen=True)
class Tiles:
    """Shared memory."""

    geometry: Geometry
    sKv: cute.Pointer  # bytes of stages of boxes of 64 keys x 128 bytes: 256 latent columns, then RoPE columns, later P
    sOnes: cute.Pointer | None  # e4m3 (16 rows, 128): ones, where P is summed up
    sExchange: cute.Pointer  # fp32 (groups, 2 halves, 8 vectors, 64 rows, 4 keys): partial scores for the other half of the threads
    sRowValue: cute.Pointer  # fp32 (groups, 2 halves, 64 rows): row maxima and sums for the other half of the threads
    sAlpha: cute.Pointer  # fp32 (tiles in flight, 64 rows): rescale factors
    sInverse: cute.Pointer  # fp32 (64 rows): 1 / row sum, 0 for a row that attends to nothing
    sReference: cute.Pointer | None  # fp32 (groups, 2, 64 rows): reference of a group's last tile, greatest so far; log2 units
    sShares: cute.Pointer | None  # fp32 (groups, 2 halves, 64 rows): shares of the row sum
    tmem_cell: cute.Pointer  # int32: address of the tensor memory

    @classmethod
    def create(cls, geometry: Geometry, memory: dict) -> Tiles:
        """Return the tiles of the shared memory that Geometry.smem allocates."""
        return cls(**fields_of(cls, {**memory, "geometry": geometry}))

    def stage(self, index: Int32) -> cute.Pointer:
        """Return the first byte of a stage."""
        return self.sKv + index * self.geometry.stage_bytes


@dataclass(frozen=True)
class Pipes:
    """The barriers of Geometry.smem. dense_decode/sm100.py says who arrives where."""

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

    @classmethod
    def create(cls, memory: dict) -> Self:
        """Return the barriers of the shared memory that Geometry.smem allocates."""
        return cls(**fields_of(cls, memory))
