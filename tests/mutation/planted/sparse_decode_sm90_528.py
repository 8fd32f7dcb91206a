"""Bugs in sparse decode for Hopper over formats of 528 and 288 bytes a token: their scales, conversions, and addresses.

sparse_decode_sm90.py and dense_decode_sm90.py break what the kernels share with those for other formats.
"""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM90
from cute_mla.testing.operations.sparse_decode.case import Pool, SparseDecodeCase
from tests.mutation.planted import patterns as ptx
from tests.mutation.planting import Group, Suite, planted, together

# Tiles enough to go round the rings, indices of every kind, lengths that end inside a tile.
V41 = SparseDecodeCase(
    cache="v41_paged",
    batch=2,
    h_q=9,
    main=Pool(400, 390, 61, lengths=(390, 70)),
    values="spread",
    indices="mixed",
    few_heads=False,
    sm_count=1,
)
V41_PAIR = replace(V41, h_q=128, sm_count=2)
ROWS = replace(V41, cache="v41", main=Pool(100, 90, 61))
NOPE = replace(V41, cache="nope_528")
NOPE_PAIR = replace(V41_PAIR, cache="nope_528")
# Tiles of the first cache, of both, and of the second one, whose scales differ from 16 columns to the next
FP4 = replace(V41, extra_cache="v41_fp4", main=Pool(100, 90, 61), extra=Pool(400, 300, 16, (300, 35)), values="normal")
FP4_PAIR = replace(FP4, h_q=128, sm_count=2)

SAYS_PAGED = r"setp\.eq\.b64 (\s*%p\d+, %rd\d+), 512;"  # the stride of the rows
BF16_PRODUCTS = r"mul\.rn\.bf16x2 ([^,]*), ([^,]*), [^;]*;"
HALF_EXCHANGES = r"shfl\.sync\.bfly\.b32 (\s*%r\d+), (%r\d+), 16, 31, -1;"


def ballots_of_the_second_cache(text: str, sites: Group) -> list[Group]:
    """Break the ballots that ask which keys are of the second cache: each is in front of the one that asks which are present."""
    return [sites[::2]]


SUITE = Suite(
    SM90,
    {
        "v41": V41, "v41 in a pair": V41_PAIR, "v41 rows": ROWS, "nope": NOPE, "nope in a pair": NOPE_PAIR,
        "fp4": FP4, "fp4 in a pair": FP4_PAIR,
    },
    (
        planted("v41: missing proxy fences", V41, ptx.PROXY_FENCES, "", together),
        planted("v41: missing proxy fences in a pair", V41_PAIR, ptx.PROXY_FENCES, "", together),
        planted("v41: missing copy to the peer", V41_PAIR, ptx.PEER_COPIES),
        planted("v41: no scale", V41, BF16_PRODUCTS, r"mov.b32 \1, \2;", together),
        planted("v41: the first box's scale for both", V41, r"mov\.b32 (\s*%r\d+), 12850;", r"mov.b32 \1, 4112;", together),
        planted("v41: the first half's scale for a whole box", ROWS, r"and\.b32 (\s*%r\d+, %r\d+), 2;", r"and.b32 \1, 0;", together),
        planted("v41: scales of the other half", ROWS, r"and\.b32 (\s*%r\d+, %r\d+), 16711935;", r"and.b32 \1, 255;", together),
        planted("v41: paged scales sought behind the row", V41, SAYS_PAGED, r"setp.eq.b64 \1, 513;", together),
        planted("v41: scales of rows sought behind the page", ROWS, SAYS_PAGED, r"setp.ne.b64 \1, 512;", together),
        planted("nope: missing proxy fences", NOPE, ptx.PROXY_FENCES, "", together),
        planted("nope: missing arrival in a pair", NOPE_PAIR, ptx.CLUSTER_ARRIVALS),
        planted("nope: scales of the first lane", NOPE, ptx.SHUFFLES, ptx.LANE_0, together),
        planted("fp4: missing proxy fences in a pair", FP4_PAIR, ptx.PROXY_FENCES, "", together),
        planted("fp4: missing arrival", FP4, ptx.CLUSTER_ARRIVALS),
        planted("fp4: no signs", FP4, r"and\.b32 (\s*%r\d+, %r\d+), -2139062144;", r"and.b32 \1, 0;", together),
        planted("fp4: no mantissas", FP4, r"and\.b32 (\s*%r\d+, %r\d+), 471604252;", r"and.b32 \1, 404232216;", together),
        planted("fp4: columns out of order", FP4, r"mov\.b32 (\s*%r\d+), 20800;", r"mov.b32 \1, 29538;", together),
        planted("fp4: second cache read as the first", FP4, ptx.BALLOTS, r"mov.b32 \1, 0;", ballots_of_the_second_cache),
        planted("fp4: scales not exchanged", FP4, HALF_EXCHANGES, r"mov.b32 \1, \2;", together),
        planted("fp4: scales exchanged the wrong way", FP4, r"(selp\.b32 \s*%r\d+), 21520, 30258,", r"\1, 30258, 21520,", together),
        planted("fp4: scales of the neighbour", FP4, r"(selp\.b32 \s*%r\d+), 8224, 12593,", r"\1, 12593, 8224,", together),
        planted("fp4: scales too small", FP4, r"0f42800000", ptx.ONE, together),
        planted("fp4: no scale in a pair", FP4_PAIR, BF16_PRODUCTS, r"mov.b32 \1, \2;", together),
    ),
)  # fmt: skip
