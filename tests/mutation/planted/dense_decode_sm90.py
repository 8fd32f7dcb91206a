"""Bugs in dense decode for Hopper."""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM90
from cute_mla.testing.operations.dense_decode.case import DenseDecodeCase
from tests.mutation.planted import patterns as ptx
from tests.mutation.planting import Planted, Suite, planted, together, together_in

# One CTA walks three requests: enough tiles to go round every ring of buffers, keys past the end, masked rows.
WALK = DenseDecodeCase(batch=3, s_q=2, lengths=(500, 70, 300), h_q=9, causal=True, sm_count=1)
PAIR = replace(WALK, h_q=64)  # two row tiles, a cluster of two CTAs
BROKEN = replace(WALK, lengths=(64, 180, 640), broken=True)  # first and later pages of requests are below 0
SHORT = replace(WALK, batch=8, lengths=(60,) * 8)  # so short that a role may be several requests ahead of another


# Keys without rotary columns: kv_free 4; kv_ready 4, stats_free; probs_ready, right_turn, stats_ready.
NOPE = replace(WALK, d_qk=512)
NOPE_PAIR = replace(PAIR, d_qk=512)
NOPE_SHORT = replace(SHORT, d_qk=512)
NOPE_WAITS = 12
NARROW, NARROW_PAIR = replace(WALK, d_qk=320), replace(PAIR, d_qk=320)  # 256 + 64 columns: two stages a tile, no turns


# 1,024 + 64 columns: kv_free 4 and for the end; kv_ready 4, rope_ready, peer's P, partial_ready, stats_free and for the end; probs_ready,
# right_turn, stats_ready.
WIDE, WIDE_SHORT = replace(WALK, d_qk=1088), replace(SHORT, d_qk=1088)
WIDE_WAITS = 17


def missing_wide_waits(name: str, case: DenseDecodeCase, first: int, count: int) -> Planted:
    """Delete some of these waits."""
    return planted(f"1,024 + 64: missing waits: {name}", case, ptx.WAITS, ptx.NO_WAIT, together_in(first, first + count), count=WIDE_WAITS)


def missing_waits(name: str, case: DenseDecodeCase, first: int, count: int) -> Planted:
    """Delete some of the 13 waits: kv_free 4; kv_ready 4, rope_ready, stats_free; probs_ready, right_turn, stats_ready."""
    return planted(f"missing waits: {name}", case, ptx.WAITS, ptx.NO_WAIT, together_in(first, first + count), count=13)


SUITE = Suite(
    SM90,
    {
        "alone": WALK,
        "cluster": PAIR,
        "short": SHORT,
        "broken": BROKEN,
        "NoPE": NOPE,
        "NoPE in a cluster": NOPE_PAIR,
        "NoPE, short": NOPE_SHORT,
        "256 + 64": NARROW,
        "256 + 64 in a cluster": NARROW_PAIR,
        "1,024 + 64": WIDE,
        "1,024 + 64, short": WIDE_SHORT,
    },
    (
        planted("missing arrival", WALK, ptx.CLUSTER_ARRIVALS),
        planted("missing arrival in a cluster", PAIR, ptx.CLUSTER_ARRIVALS),
        missing_waits("kv_free", WALK, 0, 4),
        missing_waits("kv_ready and rope_ready", WALK, 4, 5),
        missing_waits("stats_free", SHORT, 9, 1),
        missing_waits("probs_ready", WALK, 10, 1),
        missing_waits("stats_ready", SHORT, 12, 1),
        planted("missing place of a row", WALK, r"st\.shared\.b64 \s*\[[^]]*\], %rd\d+;", count=2),
        planted("missing copy", WALK, ptx.TENSOR_COPIES),
        planted("missing copy in a cluster", PAIR, ptx.TENSOR_COPIES),
        planted("wrong number of bytes", WALK, r"(mbarrier\.arrive\.expect_tx[^;]*, )%r\d+;", r"\g<1>4096;"),
        planted("wrong number of arrivals", WALK, r"(mbarrier\.init\.shared\.b64 [^;]*, )%r\d+;", r"\g<1>3;", together),
        planted("missing wait for products", WALK, ptx.WGMMA_WAITS),
        planted("first page for a page below 0", BROKEN, ptx.PAGES, ptx.FIRST_PAGE, count=2),  # the first tile's, and those of the others
        planted("mask without effect", WALK, r"selp\.f32 (\s*%r\d+, (%r\d+)), 0fFF800000", r"selp.f32 \1, \2", together),
        planted("unused rows not cleared", WALK, ptx.ZERO_STORES),
        planted("lse in base 2", WALK, ptx.LN_2, ptx.ONE),
        planted("missing proxy fences", WALK, ptx.PROXY_FENCES, "", together),
        planted("NoPE: missing wait for kv_free", NOPE, ptx.WAITS, ptx.NO_WAIT, together_in(0, 4), count=NOPE_WAITS),
        planted("NoPE: missing wait for kv_ready", NOPE, ptx.WAITS, ptx.NO_WAIT, together_in(4, 8), count=NOPE_WAITS),
        planted("NoPE: missing wait for stats_free", NOPE_SHORT, ptx.WAITS, ptx.NO_WAIT, together_in(8, 9), count=NOPE_WAITS),
        planted("NoPE: missing wait for probs_ready", NOPE, ptx.WAITS, ptx.NO_WAIT, together_in(9, 10), count=NOPE_WAITS),
        planted("NoPE: missing wait for stats_ready", NOPE_SHORT, ptx.WAITS, ptx.NO_WAIT, together_in(11, 12), count=NOPE_WAITS),
        planted("NoPE: missing arrival in a cluster", NOPE_PAIR, ptx.CLUSTER_ARRIVALS),
        planted("NoPE: missing copy in a cluster", NOPE_PAIR, ptx.TENSOR_COPIES),
        planted("256 + 64: missing arrival in a cluster", NARROW_PAIR, ptx.CLUSTER_ARRIVALS),
        planted("256 + 64: missing copy in a cluster", NARROW_PAIR, ptx.TENSOR_COPIES),
        planted("256 + 64: missing proxy fences", NARROW, ptx.PROXY_FENCES, "", together),
        planted("NoPE: missing proxy fences", NOPE, ptx.PROXY_FENCES, "", together),
        missing_wide_waits("kv_free", WIDE, 0, 4),
        missing_wide_waits("kv_ready and rope_ready", WIDE, 5, 5),
        missing_wide_waits("peer's P, before its part is overwritten", WIDE, 10, 1),
        missing_wide_waits("partial_ready", WIDE, 11, 1),
        missing_wide_waits("stats_free", WIDE_SHORT, 12, 1),
        missing_wide_waits("probs_ready", WIDE, 14, 1),
        missing_wide_waits("stats_ready", WIDE_SHORT, 16, 1),
        planted("1,024 + 64: missing arrival", WIDE, ptx.CLUSTER_ARRIVALS),
        planted("1,024 + 64: missing store to the peer", WIDE, r"st\.async[^;]*;"),
        planted("1,024 + 64: missing copy to the peer", WIDE, ptx.PEER_COPIES),
        planted("1,024 + 64: missing proxy fences", WIDE, ptx.PROXY_FENCES, "", together),
        planted("missing named barriers", WALK, r"bar\.sync\s+(1|%r\d+), 128;", "", together),
    ),
)
