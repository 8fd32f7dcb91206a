"""The page of constants of the SM100 decode kernels: tile geometry, shared and tensor memory, barriers, roles."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Int32, cute

from ...spec.dense_decode import TILE_ROWS
from ...spec.mla import D_LATENT, D_ROPE
from ...spec.split_plan import TILE_KEYS
from .barriers import Ring
from .tiles import BOX_COLUMNS, ELEMENT_BYTES

PAIR = 2  # CTAs that share one matrix product
PAIR_ROWS = PAIR * TILE_ROWS
CTA_COLUMNS = D_LATENT // PAIR  # latent columns whose keys and values a CTA holds
CTA_ROPE = D_ROPE // PAIR  # RoPE columns whose keys a CTA holds

BOX_BYTES = TILE_KEYS * BOX_COLUMNS * ELEMENT_BYTES
LATENT_BOXES = CTA_COLUMNS // BOX_COLUMNS
SLOT_BOXES = LATENT_BOXES + 1  # and one of RoPE columns, overwritten by P
SLOT_BYTES = SLOT_BOXES * BOX_BYTES
PROBS_OFFSET = LATENT_BOXES * BOX_BYTES
KV_SLOTS = 5

K_STEP = 16  # contraction depth of one MMA
STEPS_PER_BOX = BOX_COLUMNS // K_STEP
LATENT_STEPS = CTA_COLUMNS // K_STEP
ROPE_STEPS = CTA_ROPE // K_STEP
KEY_STEPS = TILE_KEYS // K_STEP
OUTPUT_CHUNKS = 2  # an MMA has at most 256 columns, 128 of each CTA
CHUNK_COLUMNS = CTA_COLUMNS // OUTPUT_CHUNKS

# tensor memory, in 32-bit columns of 128 lanes. Lanes 0..63 and 64..127 are the same 64 query rows:
# O and S of the columns that the even and the odd CTA hold, Q of the columns that each of them multiplies
OUTPUT_COLUMN = 0
QUERY_COLUMN = OUTPUT_COLUMN + CTA_COLUMNS
QUERY_ROPE_COLUMN = QUERY_COLUMN + CTA_COLUMNS // 2  # two elements a column
TMEM_COLUMNS = 512  # what is allocated: a power of two
SCORE_COLUMN = TMEM_COLUMNS - TILE_KEYS
assert QUERY_ROPE_COLUMN + CTA_ROPE // 2 <= SCORE_COLUMN

GROUP_WARPS = 4
GROUP = 32 * GROUP_WARPS
SCORE_WARP = 0
OUTPUT_WARP = 4
LOAD_WARP = 8  # the first that is not in these groups
SCORE_BARRIER = 1  # and 2: bar.sync ids of the two pairs of score warps; 0 is the CTA's

PARITIES = 2  # tiles that may be in flight between two roles

# (name, slots): one array of mbarriers, in this order, behind the tiles
BARRIERS = (
    ("kv_ready", KV_SLOTS),
    ("kv_free", KV_SLOTS),
    ("query_ready", 1),
    ("scores_ready", 1),
    ("scores_free", 1),
    ("alpha_ready", PARITIES),
    ("probs_ready", PARITIES),
    ("output_ready", PARITIES),
    ("stats_ready", 1),
    ("stats_free", 1),
)

VECTOR = 4  # 32-bit words of a 16-byte access
HALF_KEYS = TILE_KEYS // 2  # keys of a tile whose probabilities one score thread computes
EXCHANGE_WORDS = PAIR * TILE_ROWS * HALF_KEYS

KV_BYTES = KV_SLOTS * SLOT_BYTES
BARRIER_OFFSET = KV_BYTES + 4 * (EXCHANGE_WORDS + GROUP + PARITIES * TILE_ROWS + TILE_ROWS)
SMEM_USED = BARRIER_OFFSET + 8 * sum(slots for _, slots in BARRIERS) + 4  # the cell with the address of tensor memory
TILE_ALIGNMENT = 1024  # the period of the 128-byte swizzle


@dataclass(frozen=True)
class Tiles:
    """Shared memory."""

    sKv: cute.Pointer  # bytes of 5 slots of 5 boxes of 64 keys x 128 bytes: 256 latent columns, then RoPE columns, later P
    sExchange: cute.Pointer  # fp32 (2 halves, 8 vectors, 64 rows, 4 keys): partial scores for the other half of the threads
    sRowValue: cute.Pointer  # fp32 (2 halves, 64 rows): row maxima and sums for the other half of the threads
    sAlpha: cute.Pointer  # fp32 (2 tiles, 64 rows): rescale factors
    sInverse: cute.Pointer  # fp32 (64 rows): 1 / row sum, 0 for a row that attends to nothing
    tmem_cell: cute.Pointer  # int32: address of the tensor memory

    def slot(self, index: Int32) -> cute.Pointer:
        """First byte of a slot."""
        return self.sKv + index * SLOT_BYTES


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


def products_per_tile(has_rope: bool) -> int:
    """Matrix products of one tile."""
    return LATENT_STEPS + (ROPE_STEPS if has_rope else 0) + OUTPUT_CHUNKS * KEY_STEPS
