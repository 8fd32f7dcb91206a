"""Bugs in sparse decode for Blackwell with up to 64 heads.

sparse_decode_sm100.py and sparse_decode_sm100_528.py break what the kernels share with those for more heads: masks, scales, conversions.
"""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM100
from cute_mla.testing.operations.sparse_decode.case import Pool, SparseDecodeCase
from tests.mutation.planted import patterns as ptx
from tests.mutation.planting import Suite, alone, one_by_one, planted, together

# One CTA; tiles enough to go round the ring, indices of every kind, lengths that end inside a tile.
WALK = SparseDecodeCase(batch=2, h_q=57, main=Pool(400, 390, 61, lengths=(390, 70)), indices="mixed", sinks="drawn", sm_count=1)
RISING = replace(WALK, batch=1, main=Pool(400, 390), values="rising", indices="valid")  # O is rescaled for every tile but the first
V584 = replace(WALK, cache="fp8_584")  # its last box is copied
FP4 = replace(WALK, cache="v41", extra_cache="v41_fp4", main=Pool(100, 90, 61), extra=Pool(400, 300, 16, (300, 35)))

# In the order of the PTX: a barrier, and a case that notices that nobody waits for it. None: nothing changes. The gather role writes the
# bits of a tile before it signals left_ready, and scores_ready follows that. A CTA without a peer waits for its score role before it ends.
WAITS = (
    ("scores_ready", WALK),
    ("seen_ready", None),
    ("stats_free", WALK),
    ("alpha_ready", WALK),
    ("kv_free before O is scaled", RISING),
    ("kv_free before O is read", WALK),
    ("stats_ready", WALK),
    ("left_free", WALK),
    ("kv_free", WALK),
    ("query_ready", WALK),
    ("left_ready", WALK),
    ("scores_free", WALK),
    ("kv_ready", WALK),
    ("probs_ready", WALK),
    ("output_ready", WALK),
    ("scores_free before the CTA ends", None),
)
LOWER_SCORES = r"(add\.s32 \s*%r\d+, %r\d+), 1049024;"  # the address of S in the lanes 16..31
SECOND_RUN = r"(st\.global\.v8\.b32 \s*\[%rd\d+)\+512\]"  # of the 128 columns of a lane's second run in out

SUITE = Suite(
    SM100,
    {"walk": WALK, "rising": RISING, "584": V584, "fp4": FP4},
    (
        *one_by_one("missing wait: ", WAITS, ptx.WAITS, ptx.NO_WAIT),
        planted("missing arrival", WALK, ptx.ARRIVALS),
        planted("missing commit", WALK, ptx.COMMITS),
        planted("missing proxy fences", WALK, ptx.PROXY_FENCES),
        planted("halves of a tile still under way", WALK, ptx.COPY_WAITS_BUT_ONE, "cp.async.wait_group 2;"),
        planted("584: halves of a tile still under way", V584, ptx.COPY_WAITS_BUT_ONE, "cp.async.wait_group 2;"),
        planted("fp4: second cache read as the first", FP4, ptx.BALLOTS, r"mov.b32 \1, 0;", alone(0, 1), count=3),
        planted("scores of the first half of the columns twice", WALK, LOWER_SCORES, r"\1, 448;", together),
        planted("a run of out 32 bytes too far", WALK, SECOND_RUN, r"\1+544]", alone(0)),
    ),
)
