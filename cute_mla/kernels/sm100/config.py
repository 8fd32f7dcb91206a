"""The page of constants of the SM100 decode kernels: tile geometry, shared and tensor memory, barriers, roles.

A box is 64 keys x 128 bytes and an MMA contracts 32 bytes, whatever the elements are. What depends on their size is a Geometry.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, cute

from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_LATENT, D_ROPE
from ...spec.split_plan import TILE_KEYS
from ..primitives.pipeline import Ring

PAIR = 2  # CTAs that share one matrix product
PAIR_ROWS = PAIR * TILE_ROWS
CTA_COLUMNS = D_LATENT // PAIR  # latent columns whose keys and values a CTA holds
CTA_ROPE = D_ROPE // PAIR  # RoPE columns whose keys a CTA holds

ROW_BYTES = 128  # of a key, or of a row of P, in a box: one period of the swizzle
BOX_BYTES = TILE_KEYS * ROW_BYTES
STEP_BYTES = 32  # that one MMA contracts, of a row of A and B
STEPS_PER_BOX = ROW_BYTES // STEP_BYTES
WORD_BYTES = 4  # of a column of tensor memory
STEP_COLUMNS = STEP_BYTES // WORD_BYTES
OUTPUT_CHUNKS = 2  # an MMA has at most 256 columns, 128 of each CTA
CHUNK_COLUMNS = CTA_COLUMNS // OUTPUT_CHUNKS

# tensor memory, in 32-bit columns of 128 lanes. Lanes 0..63 and 64..127 are the same 64 query rows:
# O and S of the columns that the even and the odd CTA hold, Q of the columns that each of them multiplies
OUTPUT_COLUMN = 0
QUERY_COLUMN = OUTPUT_COLUMN + CTA_COLUMNS
SUM_COLUMN = QUERY_COLUMN + 96  # sums of rounded P, behind 8-bit Q
TMEM_COLUMNS = 512  # what is allocated: a power of two
SCORE_COLUMN = TMEM_COLUMNS - TILE_KEYS

GROUP_WARPS = 4
GROUP = 32 * GROUP_WARPS
SCORE_WARP = 0
SCORE_BARRIER = 1  # and 2: bar.sync ids of the two pairs of a group of score warps; 0 is the CTA's

SUM_COLUMNS = 16  # of each CTA, equal: the least that a product of a pair has
ONES_BYTES = SUM_COLUMNS * ROW_BYTES
ONES_WORD = 0x38383838  # four times 1 in e4m3

VECTOR = 4  # 32-bit words of a 16-byte access
HALF_KEYS = TILE_KEYS // 2  # keys of a tile whose probabilities one score thread computes
EXCHANGE_WORDS = PAIR * TILE_ROWS * HALF_KEYS
REFERENCE_WORDS = 2 * TILE_ROWS

TILE_ALIGNMENT = 1024  # the period of the 128-byte swizzle


@dataclass(frozen=True)
class Geometry:
    """What depends on the size of an element of Q, K, V and P.

    element_bytes: 2 (bf16, fp16) or 1 (e4m3). kv_slots: of the ring of key tiles. score_groups: groups of score warps, which take
    tiles in turn; so many scores are in tensor memory, and S is so many tiles ahead of P V.
    """

    element_bytes: int
    kv_slots: int
    score_groups: int

    @staticmethod
    def of(dtype: type[cutlass.Numeric]) -> Geometry:
        """That of an element type."""
        return EIGHT_BIT if dtype.width == 8 else SIXTEEN_BIT

    @property
    def sums_probs(self) -> bool:
        """Whether P is rounded so coarsely that O is divided by the sum of what was multiplied, which the tensor cores add up:
        P times a column of ones."""
        return self.element_bytes == 1

    @property
    def parities(self) -> int:
        """Tiles that may be in flight between two roles."""
        return self.score_groups + 1

    @property
    def output_warp(self) -> int:
        """First warp of the output role."""
        return SCORE_WARP + self.score_groups * GROUP_WARPS

    @property
    def load_warp(self) -> int:
        """The first warp behind the groups of score and output."""
        return self.output_warp + GROUP_WARPS

    @property
    def box_columns(self) -> int:
        """Columns of a box."""
        return ROW_BYTES // self.element_bytes

    @property
    def word_elements(self) -> int:
        """Elements of a 32-bit word, or column of tensor memory."""
        return WORD_BYTES // self.element_bytes

    @property
    def latent_boxes(self) -> int:
        """Boxes of the latent columns of a CTA and tile."""
        return CTA_COLUMNS // self.box_columns

    @property
    def slot_boxes(self) -> int:
        """Boxes of a slot: one more, of RoPE columns, overwritten by P."""
        return self.latent_boxes + 1

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return self.slot_boxes * BOX_BYTES

    @property
    def probs_offset(self) -> int:
        """First byte of the last box of a slot."""
        return self.latent_boxes * BOX_BYTES

    @property
    def query_rope_column(self) -> int:
        """Where the RoPE columns of Q begin in tensor memory."""
        return QUERY_COLUMN + CTA_COLUMNS // self.word_elements

    @property
    def latent_steps(self) -> int:
        """MMAs of S over the latent columns."""
        return CTA_COLUMNS * self.element_bytes // STEP_BYTES

    @property
    def rope_steps(self) -> int:
        """MMAs of S over the RoPE columns."""
        return CTA_ROPE * self.element_bytes // STEP_BYTES

    @property
    def step_keys(self) -> int:
        """Keys that one MMA of P V contracts."""
        return STEP_BYTES // self.element_bytes

    @property
    def key_steps(self) -> int:
        """MMAs of P V over the keys of a tile."""
        return TILE_KEYS // self.step_keys

    def products_per_tile(self, has_rope: bool) -> int:
        """Matrix products of one tile."""
        scores = self.latent_steps + (self.rope_steps if has_rope else 0)
        return scores + (OUTPUT_CHUNKS + (1 if self.sums_probs else 0)) * self.key_steps

    @property
    def kv_bytes(self) -> int:
        """Bytes of the ring."""
        return self.kv_slots * self.slot_bytes

    @property
    def shared_words(self) -> int:
        """fp32 numbers by which groups of score warps tell each other of their rows: references, and shares of the row sum."""
        return self.score_groups * (REFERENCE_WORDS + GROUP) if self.score_groups > 1 else 0

    @property
    def ones_bytes(self) -> int:
        """Bytes of the ones that P is multiplied with."""
        return ONES_BYTES if self.sums_probs else 0

    @property
    def barriers(self) -> tuple[tuple[str, int], ...]:
        """(name, slots): one array of mbarriers, in this order, behind the tiles."""
        return (
            ("kv_ready", self.kv_slots),
            ("kv_free", self.kv_slots),
            ("query_ready", 1),
            ("scores_ready", self.score_groups),
            ("scores_free", self.score_groups),
            ("alpha_ready", self.parities),
            ("probs_ready", self.parities),
            ("output_ready", self.parities),
            ("stats_ready", 1),
            ("stats_free", 1),
            *((("reference_ready", self.score_groups),) if self.score_groups > 1 else ()),
        )

    @property
    def barrier_offset(self) -> int:
        """First byte of the mbarriers."""
        words = self.score_groups * (EXCHANGE_WORDS + GROUP) + self.parities * TILE_ROWS + TILE_ROWS + self.shared_words
        return self.kv_bytes + self.ones_bytes + 4 * words

    @property
    def smem_used(self) -> int:
        """Bytes of shared memory, with the cell behind the mbarriers that holds the address of tensor memory."""
        return self.barrier_offset + 8 * sum(slots for _, slots in self.barriers) + 4


SIXTEEN_BIT = Geometry(element_bytes=2, kv_slots=5, score_groups=1)
EIGHT_BIT = Geometry(element_bytes=1, kv_slots=7, score_groups=2)


@dataclass(frozen=True)
class Tiles:
    """Shared memory."""

    geometry: Geometry
    sKv: cute.Pointer  # bytes of slots of boxes of 64 keys x 128 bytes: 256 latent columns, then RoPE columns, later P
    sOnes: cute.Pointer | None  # e4m3 (16 rows, 128): ones, where P is summed up
    sExchange: cute.Pointer  # fp32 (groups, 2 halves, 8 vectors, 64 rows, 4 keys): partial scores for the other half of the threads
    sRowValue: cute.Pointer  # fp32 (groups, 2 halves, 64 rows): row maxima and sums for the other half of the threads
    sAlpha: cute.Pointer  # fp32 (tiles in flight, 64 rows): rescale factors
    sInverse: cute.Pointer  # fp32 (64 rows): 1 / row sum, 0 for a row that attends to nothing
    sReference: cute.Pointer | None  # fp32 (groups, 2, 64 rows): reference of a group's last tile, greatest so far; log2 units
    sShares: cute.Pointer | None  # fp32 (groups, 2 halves, 64 rows): shares of the row sum
    tmem_cell: cute.Pointer  # int32: address of the tensor memory

    def slot(self, index: Int32) -> cute.Pointer:
        """First byte of a slot."""
        return self.sKv + index * self.geometry.slot_bytes


@dataclass(frozen=True)
class Pipes:
    """The barriers of the table above."""

    kv_ready: Ring
    kv_free: Ring
    query_ready: Ring
    scores_ready: Ring
    scores_free: Ring
    alpha_ready: Ring
    probs_ready: Ring
    output_ready: Ring
    stats_ready: Ring
    stats_free: Ring
