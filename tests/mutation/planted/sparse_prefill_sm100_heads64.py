"""Bugs in sparse prefill for Blackwell with up to 64 heads.

sparse_prefill_sm100.py breaks what the kernel shares with that for more heads.
"""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM100
from cute_mla.testing.operations.sparse_prefill.case import SparsePrefillCase
from tests.mutation.planted import patterns as ptx
from tests.mutation.planting import Suite, alone, each_in, one_by_one, planted, together

# One CTA walks tokens of none, one and many tiles, some of which have no valid index: in front, in the middle, all.
WALK = SparsePrefillCase(s_q=6, h_q=64, s_kv=250, topk=250, lengths=(130, 200, 0, 70, 250, 0), indices="mixed", sinks="drawn", sm_count=1)
RISING = replace(WALK, values="rising", indices="valid", s_kv=256, topk=256, lengths=None)  # O is rescaled for every tile but the first
INDEXER = replace(WALK, indexer_topk=100)  # lse_indexer ends within a tile
SPARSE = SparsePrefillCase(s_q=2, h_q=3, s_kv=3, topk=330, sm_count=1)  # most tiles with keys have one


# In the order of the PTX: a barrier, and a case that notices that nobody waits for it. None: nothing changes. The gather
# role writes the bits of a tile before it signals kv_ready of the tile before, which comes before alpha_ready of that tile. The output role
# takes no factor of the walk's first tile; the score role signals stats_ready behind alpha_ready of a token's last tile. And a CTA without
# a peer waits for its own score role before it ends.
WAITS = (
    ("seen_ready of score", WALK),
    ("scores_ready", WALK),
    ("scores_ready of a tile without keys", WALK),
    ("seen_ready of the tile that lse_indexer ends in", None),
    ("seen_ready of that tile again", None),
    ("scores_ready of that tile", INDEXER),
    ("scores_ready of that tile, which has no keys", INDEXER),
    ("seen_ready behind that tile", None),
    ("scores_ready behind that tile", INDEXER),
    ("scores_ready behind that tile, of a tile without keys", INDEXER),
    ("stats_free", WALK),
    ("seen_ready of the walk's first tile", WALK),
    ("alpha_ready of the walk's first tile", None),
    ("seen_ready of output", None),
    ("alpha_ready", WALK),
    ("kv_free before O is scaled", RISING),
    ("alpha_ready of a tile without keys", WALK),
    ("the last scores_ready of a token, before its Q is replaced", WALK),
    ("seen_ready of a token's last tile", None),
    ("alpha_ready of a token's last tile", WALK),
    ("kv_free before O is scaled for a token's last tile", RISING),
    ("alpha_ready of a token's last tile, which has no keys", None),
    ("stats_ready", WALK),
    ("left_free before the first half of O is read", WALK),
    ("kv_free before the second half is read", WALK),
    ("seen_ready of the next token's first tile", WALK),
    ("alpha_ready of the next token's first tile", WALK),
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
KEY_SHIFTS = r"shr\.s32 (\s*%r\d+), (%r\d+), %r\d+;(?=\s*(?:shr|and)\.)"  # of bits to a thread's first key
SECOND_RUN = r"(st\.global\.v8\.b32 \s*\[%rd\d+)\+512\]"  # of the 128 columns of a lane's second run in out
STATIONARY = r"(tcgen05\.mma)\.ws(\.cta_group::1\.kind::f16)\.collector::b0::discard( [^;]*;)"
WHOLE_TILES = r"(and\.b32 \s*%r\d+, %r\d+), -64;"  # of indexer_topk
SECOND_SHUFFLE = r"shfl\.sync\.bfly\.b32 (\s*%r\d+), (%r\d+), 2, 31, -1;"

SUITE = Suite(
    SM100,
    {"walk": WALK, "sparse": SPARSE, "rising": RISING, "indexer": INDEXER},
    (
        *one_by_one("missing wait: ", WAITS, ptx.WAITS, ptx.NO_WAIT),
        planted("missing arrival", INDEXER, r"mbarrier\.arrive\.shared(?:::cluster)?\.b64 [^;]*;"),
        planted("missing commit", INDEXER, ptx.COMMITS),
        planted("halves handed over before they have landed", WALK, ptx.COPY_WAITS_BUT_ONE, "cp.async.wait_group 2;"),
        planted("last half handed over before it has landed", WALK, ptx.COPY_WAITS, "cp.async.wait_group 1;"),
        planted("missing fence of what is handed over", INDEXER, ptx.PROXY_FENCES),
        planted("missing wait for stores of Q or O", RISING, ptx.STORE_WAITS),
        planted("tile taken for empty by the gather role", SPARSE, ptx.BALLOTS, r"mov.b32 \1, 0;", each_in(0, 2)),
        planted("maximum of half of the keys", RISING, SECOND_SHUFFLE, r"mov.b32 \1, \2;", together),
        planted("scores of the first half of the columns twice", WALK, LOWER_SCORES, r"\1, 448;", alone(0), count=2),
        planted("bits of another thread's keys", WALK, KEY_SHIFTS, r"mov.b32 \1, \2;", together),
        planted("a run of out 32 bytes too far", WALK, SECOND_RUN, r"\1+544]", count=1),
        planted("all keys of a tile in lse_indexer", INDEXER, WHOLE_TILES, r"\1, -128;", count=1),
        planted("P V as products of 64 rows in half of the lanes", WALK, STATIONARY, r"\1\2\3", together),
        planted("logarithms in base 2", INDEXER, ptx.LN_2, ptx.ONE),
    ),
)
