"""Bugs in dense decode for Hopper with e4m3 operands."""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM90
from cute_mla.spec.dense_decode import FP8
from cute_mla.testing.operations.dense_decode.case import DenseDecodeCase
from tests.mutation.planted import patterns as ptx
from tests.mutation.planting import Suite, in_case, one_by_one, planted, together

# One CTA walks three requests: enough tiles to go round every ring of buffers, keys past the end, masked rows.
WALK = DenseDecodeCase(batch=3, s_q=2, lengths=(500, 70, 300), h_q=9, causal=True, operands=FP8, sm_count=1)
PAIR = replace(WALK, h_q=64)  # two row tiles, a cluster of two CTAs
BROKEN = replace(WALK, lengths=(64, 180, 640), broken=True)  # first and later pages of requests are below 0
RISING = replace(WALK, values="rising")
SHORT = replace(WALK, batch=8, lengths=(60,) * 8)  # so short that a role may be several requests ahead of another

WAITS = (  # in the order of the PTX
    "keys_free",
    "kv_ready before the transpose",
    "values_ready before the stage is written again",
    "values_free",
    "kv_ready[0]",
    "kv_ready[1]",
    "kv_ready[2]",
    "kv_ready[3]",
    "rope_ready",
    "probs_free",
    "stats_free",
    "values_ready of the first chunk",
    "values_ready of the second chunk",
    "probs_ready",
    "stats_ready",
)
FENCES = ("V^T", "P", "ones")

SUITE = Suite(
    SM90,
    {"alone": WALK, "cluster": PAIR, "short": SHORT, "broken": BROKEN},
    (
        planted("missing arrival", WALK, ptx.CLUSTER_ARRIVALS),
        planted("missing arrival in a cluster", PAIR, ptx.CLUSTER_ARRIVALS),
        *one_by_one("missing wait: ", in_case(WALK, WAITS), ptx.WAITS, ptx.NO_WAIT),
        planted("missing copy", WALK, ptx.TENSOR_COPIES),
        planted("missing copy in a cluster", PAIR, ptx.TENSOR_COPIES),
        planted("wrong number of bytes", WALK, r"(mbarrier\.arrive\.expect_tx[^;]*, )%r\d+;", r"\g<1>4096;"),
        planted("wrong number of arrivals", WALK, r"(mbarrier\.init\.shared\.b64 [^;]*, )%r\d+;", r"\g<1>3;", together),
        planted("missing wait for products", WALK, ptx.WGMMA_WAITS),
        planted("first page for a page below 0", BROKEN, ptx.PAGES, ptx.FIRST_PAGE, count=2),  # the first tile's, and those of the others
        planted("mask without effect", WALK, r"selp\.f32 (\s*%r\d+, (%r\d+)), 0fFF800000", r"selp.f32 \1, \2", together),
        planted("values past the end kept", WALK, r"selp\.b32 (\s*%r\d+, (255|65280|16711680|-16777216)), 0,", r"selp.b32 \1, \2,"),
        planted("keys in another order than in P, even columns", WALK, "0x6420U", "0x6240U", together),
        planted("keys in another order than in P, odd columns", WALK, "0x7531U", "0x7351U", together),
        planted("columns exchanged", WALK, "0x6420U", "0x7531U", together),
        planted("rows of ones not written", WALK, r"st\.shared\.v4\.b32 \s*\[[^]]*\], \{943208504[^}]*\};"),
        planted("rows of twos for rows of ones", WALK, "943208504", "1077952576", together),
        planted("lse in base 2", WALK, ptx.LN_2, ptx.ONE),
        # The greatest of a tile at 2^12 for 2^8: saturated at 448, very different scores become alike.
        planted("probabilities beyond e4m3", RISING, "0fC1000000", "0fC1400000", together),
        *one_by_one("missing proxy fence: ", in_case(WALK, FENCES), ptx.PROXY_FENCES),
        planted("missing barrier after the ones", WALK, r"bar\.sync\s+%r\d+, 128;", "", together),
    ),
)
