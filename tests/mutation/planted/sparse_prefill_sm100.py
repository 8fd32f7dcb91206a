"""Bugs in sparse prefill for Blackwell.

dense_decode_sm100.py and sparse_decode_sm100.py break what the kernel shares with decode.
"""

from __future__ import annotations

from cute_mla.spec.arch import SM100
from cute_mla.testing.cases.sparse_prefill import SparsePrefillCase
from tests.mutation.planted import patterns as ptx
from tests.mutation.planting import Suite, alone, each_in, last_before_last, next_after_last, planted, together, together_in

# One pair of CTAs walks tokens of none, one and many tiles, some of which have no valid index: in front, in the middle, all.
WALK = SparsePrefillCase(s_q=6, h_q=9, s_kv=250, topk=250, lengths=(130, 200, 200, 70, 250, 0), indices="mixed", sinks="drawn", sm_count=2)
SPARSE = SparsePrefillCase(s_q=2, h_q=3, s_kv=3, topk=330, sm_count=2)  # most tiles with keys have one

# In the order of the PTX: a barrier, and whether the wait is this kernel's own or stands where the others have none.
WAITS = (
    ("seen_ready of score", True),
    ("scores_ready of the lower keys", False),
    ("scores_ready of the upper keys", False),
    ("scores_ready of the lower keys of a tile without keys", True),
    ("scores_ready of the upper keys of a tile without keys", True),
    ("stats_free", False),
    ("seen_ready of output", True),
    ("alpha_ready", False),
    ("kv_free before O is scaled", False),
    ("alpha_ready of a tile without keys", True),
    ("kv_free before O is stored", False),
    ("stats_ready", False),
    ("kv_free", False),
    ("kv_free before the CTA ends", False),
    ("query_ready", True),
    ("kv_ready", True),
    ("scores_free of the lower keys", False),
    ("scores_free of the upper keys", False),
    ("probs_ready", False),
    ("output_ready", False),
    ("scores_free of the lower keys before the CTA ends", False),
    ("scores_free of the upper keys before the CTA ends", False),
)
BOTH_WORDS = r"(ld\.shared\.v2\.b32\s+\{(%r\d+), %r\d+\}, [^;]*;\s*)or\.b32 (\s*%r\d+), [^;]*;"
EITHER_WORD = r"(ld\.shared\.v2\.b32\s+\{%r\d+, %r\d+\}, [^;]*;\s*)or\.b32 (\s*%r\d+), [^;]*;"
FIRST_PRODUCTS = r"(tcgen05\.mma[^;]*collector::a::(?:fill|lastuse) [^;]*, %r\d+), %p\d+;"
FENCES_BEFORE = r"tcgen05\.fence::before[^;]*;"
FENCES_AFTER = r"tcgen05\.fence::after[^;]*;"

SUITE = Suite(
    SM100,
    {"walk": WALK, "sparse": SPARSE},
    (
        *(
            planted(f"missing wait: {name}", WALK, ptx.WAITS, ptx.NO_WAIT, alone(index), count=len(WAITS))
            for index, (name, own) in enumerate(WAITS)
            if own
        ),
        planted("missing arrival", WALK, r"mbarrier\.arrive\.shared(?:::cluster)?\.b64 [^;]*;"),
        planted("tile taken for empty by the gather role", SPARSE, ptx.BALLOTS, r"mov.b32 \1, 0;", each_in(0, 2)),
        planted("tile taken for empty by score, output or mma", SPARSE, BOTH_WORDS, r"\1mov.b32 \3, \2;", count=3),
        # By output and mma. The score role masks all keys of such a tile.
        planted("tile without keys taken for a full one", WALK, EITHER_WORD, r"\1mov.b32 \2, 1;", each_in(1)),
        planted("products added to another token", WALK, FIRST_PRODUCTS, r"\1, 1;", together_in(0, 2)),
        planted("missing wait for stores of Q", WALK, ptx.STORE_WAITS, "", alone(0, 2), count=3),
        planted("missing fence behind prefetched Q", WALK, FENCES_BEFORE, "", next_after_last(ptx.STORE_WAITS)),
        planted("missing fence in front of prefetched Q", WALK, FENCES_AFTER, "", last_before_last(ptx.STORE_WAITS)),
        planted("logarithms in base 2", WALK, ptx.LN_2, ptx.ONE),
        planted("maximum of the last tile only", WALK, ptx.RUNNING_MAXIMUM, r"mov.f32 \1, \2;", together),
    ),
)
