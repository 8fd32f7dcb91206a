"""Bugs in sparse prefill for Blackwell with more than 64 heads.

dense_decode_sm100.py and sparse_decode_sm100.py break what the kernel shares with decode.
"""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM100
from cute_mla.testing.operations.sparse_prefill.case import SparsePrefillCase
from tests.mutation.planted import patterns as ptx
from tests.mutation.planting import Suite, alone, each_in, one_by_one, planted, together, together_in

# One pair of CTAs walks tokens of none, one and many tiles, some of which have no valid index: in front, in the middle, all.
# lse_indexer ends in the second tile.
WALK = SparsePrefillCase(
    s_q=6, h_q=73, s_kv=250, topk=250, lengths=(130, 200, 200, 70, 250, 0), indices="mixed", sinks="drawn", sm_count=2, indexer_topk=100,
)  # fmt: skip
RISING = replace(WALK, values="rising", indices="valid", s_kv=256, topk=256, lengths=None)  # O is rescaled for every tile but the first
SPARSE = SparsePrefillCase(s_q=2, h_q=67, s_kv=3, topk=330, sm_count=2)  # most tiles with keys have one

# In the order of the PTX: a barrier, and a case that notices that nobody waits for it. None: other kernels break the wait, or nothing
# changes: the gather role writes the bits of a tile before it signals the tile two before, so that the output role has to wait for those of
# the walk's first tile only; the output role takes no factor of a token's first tile; and the score role signals stats_ready behind
# alpha_ready of a token's last tile.
_SCORE_WAITS = ("scores_ready of the lower keys", "scores_ready of the upper keys", "lower, without keys", "upper, without keys")
WAITS = (
    ("seen_ready of score", WALK),
    ("scores_ready of the lower keys", None),
    ("scores_ready of the upper keys", None),
    ("scores_ready of the lower keys of a tile without keys", WALK),
    ("scores_ready of the upper keys of a tile without keys", WALK),
    ("seen_ready of the tile that lse_indexer ends in", None),  # waited for twice
    *((f"{name} of that tile or of the tiles behind", None) for name in ("seen_ready", *_SCORE_WAITS) * 2),
    ("stats_free", None),
    ("seen_ready of the walk's first tile", WALK),
    ("alpha_ready of the walk's first tile", None),
    ("seen_ready of output", None),
    ("alpha_ready", None),
    ("kv_free before O is scaled", None),
    ("alpha_ready of a tile without keys", WALK),
    ("the last scores_ready of a token, before its Q is replaced", WALK),
    ("seen_ready of a token's last tile", None),
    ("alpha_ready of a token's last tile", WALK),
    ("kv_free before O is scaled for a token's last tile", RISING),
    ("alpha_ready of a token's last tile, which has no keys", None),
    ("stats_ready", None),
    ("kv_free before O is read", None),
    ("seen_ready of the next token's first tile", None),
    ("alpha_ready of the next token's first tile", None),
    ("kv_free", None),
    ("kv_free before the CTA ends", None),
    ("query_ready", WALK),
    ("kv_ready", WALK),
    ("scores_free of the lower keys", None),
    ("scores_free of the upper keys", None),
    ("probs_ready", None),
    ("output_ready", None),
    ("scores_free of the lower keys before the CTA ends", None),
    ("scores_free of the upper keys before the CTA ends", None),
)
BOTH_WORDS = r"(ld\.shared\.v2\.b32\s+\{(%r\d+), %r\d+\}, [^;]*;\s*)or\.b32 (\s*%r\d+), [^;]*;"
EITHER_WORD = r"(ld\.shared\.v2\.b32\s+\{%r\d+, %r\d+\}, [^;]*;\s*)or\.b32 (\s*%r\d+), [^;]*;"
FIRST_PRODUCTS = r"(tcgen05\.mma[^;]*collector::a::(?:fill|lastuse) [^;]*, %r\d+), %p\d+;"
TILES_BEFORE = r"(selp\.b32\s+%r\d+, -1, 0, %p\d+;\s*shr\.s32\s+%r\d+, %r\d+), 6;"  # of the bound of lse_indexer
FENCES_BEFORE = r"tcgen05\.fence::before[^;]*;"
FENCES_AFTER = r"tcgen05\.fence::after[^;]*;"

SUITE = Suite(
    SM100,
    {"walk": WALK, "sparse": SPARSE, "rising": RISING},
    (
        *one_by_one("missing wait: ", WAITS, ptx.WAITS, ptx.NO_WAIT),
        planted("missing wait for stores of O of a token's last tile", RISING, ptx.STORE_WAITS, "", alone(3), count=4),
        planted("missing arrival", WALK, r"mbarrier\.arrive\.shared(?:::cluster)?\.b64 [^;]*;"),
        planted("tile taken for empty by the gather role", SPARSE, ptx.BALLOTS, r"mov.b32 \1, 0;", each_in(0, 2)),
        # For the output role the bits decide only whether O is rescaled, which SPARSE never needs.
        planted("tile taken for empty by score or mma", SPARSE, BOTH_WORDS, r"\1mov.b32 \3, \2;", alone(0, 8), count=9),
        # By output and mma. The score role masks all keys of such a tile; O of the first tile is overwritten, the last needs no rescale.
        planted("tile without keys taken for a full one", WALK, EITHER_WORD, r"\1mov.b32 \2, 1;", alone(5, 8), count=9),
        planted("products added to another token", WALK, FIRST_PRODUCTS, r"\1, 1;", together_in(0, 2)),
        planted("missing wait for stores of Q", WALK, ptx.STORE_WAITS, "", alone(0, 2), count=4),
        planted("missing fence behind prefetched Q", WALK, FENCES_BEFORE, "", alone(9), count=13),
        planted("missing fence behind O that is read", WALK, FENCES_BEFORE, "", alone(11), count=13),
        planted("missing fence in front of prefetched Q", WALK, FENCES_AFTER, "", alone(8), count=15),
        planted("logarithms in base 2", WALK, ptx.LN_2, ptx.ONE),
        planted("lse_indexer ends in another tile", WALK, TILES_BEFORE, r"\1, 7;", count=1),
        planted("maximum of the last tile only", WALK, ptx.RUNNING_MAXIMUM, r"mov.f32 \1, \2;", together),
    ),
)
