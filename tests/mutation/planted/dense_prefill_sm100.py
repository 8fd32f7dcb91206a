"""Bugs in dense prefill for Blackwell."""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM100
from cute_mla.testing.operations.dense_prefill.case import DensePrefillCase
from tests.mutation.planted import patterns as ptx
from tests.mutation.planting import Suite, alone, in_case, one_by_one, planted, together

# One CTA walks items of three tiles, two, one and none, with one Q tile or both; rows that see nothing, and a maximum that moves
# from tile to tile.
WALK = DensePrefillCase(
    lengths=((130, 129), (0, 40), (3, 65), (64, 257), (5, 0), (150, 100), (200, 30)), causal=True, values="falling", outputs="given",
    sm_count=1,
)  # fmt: skip
RISING = replace(WALK, dtype="fp16", values="rising")

# In the order of the PTX. None: stages that are released with others that are waited for; and the values that the softmax roles
# clear, which have landed long before under every schedule.
WAITS = (
    "item_ready of softmax", "scores_ready of softmax", None, None, "sums_free",
    "item_ready of output", "alpha_ready of tile 0", "alpha_ready of tile 1", "output_ready of tile 0", "sums_ready of tile 0",
    "output_ready of tile 1", "sums_ready of tile 1",
    "item_ready of mma", "kv_ready of values", "kv_ready of other values", "probs_ready of tile 0", "rest_ready of tile 0",
    "kv_ready of keys", "kv_ready of other keys", "query_ready of tile 0", "kv_ready of the last keys of tile 0", "probs_ready of tile 1",
    "rest_ready of tile 1", "query_ready of tile 1", "kv_ready of the last keys of tile 1",
    "item_free", None, "kv_free of keys", None, "query_free of tile 0", "query_free of tile 1", "kv_free of values", None, None,
)  # fmt: skip
# Each masks 32 of the 128 keys of a tile. The last 32 keys are masked twice: for the maximum, which fp16 tells and bf16 does not,
# and for the probabilities.
MASKS = r"(setp\.gt\.s32 \t%p\d+, %r\d+, 31;\s+)selp\.b32 \t(%r\d+), 0, %r\d+, %p\d+;"

CLEARING = r"st\.shared\.v4\.b32 .*\{0, 0, 0, 0\};"
# Heads of 256 columns, by pairs of CTAs. None: the waits at the end, behind which a CTA waits for the last P V anyway.
PAIR_WALK = replace(WALK, d_qk=256, sm_count=2)
PAIR_RISING = replace(PAIR_WALK, values="rising")
PAIR_WAITS = (
    "item_ready of softmax", "scores_ready", "sums_free", "item_ready of output", "alpha_ready", "output_ready of the tile before",
    "output_ready of the last tile", "sums_ready", "item_ready of mma", "query_ready", "kv_ready of keys", "kv_ready of values",
    "probs_ready", "rest_ready", "kv_ready of the last values", "probs_ready of the last tile", "rest_ready of the last tile",
    "item_free", "kv_free of keys", "query_free", "kv_free of values", "value_landed", "kv_free of the last values",
    "value_landed of the last values", None, None,
)  # fmt: skip

SUITE = Suite(
    SM100,
    {"walk": WALK, "pair walk": PAIR_WALK},
    (
        *one_by_one("missing wait: ", in_case(WALK, WAITS), ptx.WAITS, ptx.NO_WAIT),
        planted("missing arrival", WALK, ptx.ARRIVALS),
        planted("missing commit", WALK, ptx.COMMITS),
        # Stores of P, in two parts, and of O after it was rescaled.
        planted("missing wait for stores", WALK, ptx.STORE_WAITS),
        # P is 0 there, and 0 times NaN is NaN.
        planted("values past the end not cleared", WALK, r"st\.shared\.v4\.b32 .*\{0, 0, 0, 0\};", "", together),
        planted("missing proxy fence after clearing", WALK, ptx.PROXY_FENCES, "", count=1),
        planted("too few bytes", WALK, ptx.EXPECTED_BYTES, r"\g<1>512;", alone(0, 3, -1)),
        *(planted(f"no mask of word {word}", RISING, MASKS, r"\1mov.b32 \2, 0;", alone(word), count=5) for word in range(5)),
        planted("logarithms in base 2", WALK, ptx.LN_2, ptx.ONE, together),
        *one_by_one("pair: missing wait: ", in_case(PAIR_WALK, PAIR_WAITS), ptx.WAITS, ptx.NO_WAIT),
        planted("pair: missing arrival", PAIR_WALK, ptx.CLUSTER_ARRIVALS),
        planted("pair: missing commit", PAIR_WALK, ptx.COMMITS),
        planted("pair: missing wait for stores", PAIR_WALK, ptx.STORE_WAITS),
        planted("pair: values past the end not cleared", PAIR_WALK, CLEARING, "", together),
        planted("pair: missing proxy fence after clearing", PAIR_WALK, ptx.PROXY_FENCES, ""),
        planted("pair: too few bytes", PAIR_WALK, ptx.EXPECTED_BYTES, r"\g<1>512;"),
        *(planted(f"pair: no mask of word {word}", PAIR_RISING, MASKS, r"\1mov.b32 \2, 0;", alone(word), count=5) for word in range(5)),
    ),
)
