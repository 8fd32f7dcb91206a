"""Bugs in sparse decode for Hopper. dense_decode_sm90.py breaks the roles that sparse and dense decode share."""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM90
from cute_mla.testing.operations.sparse_decode.case import Pool, SparseDecodeCase
from tests.mutation.planted import patterns as ptx
from tests.mutation.planting import Suite, planted, together

# One CTA, tiles enough to go round the rings, indices of every kind, lengths that end inside a tile.
ALONE = SparseDecodeCase(
    batch=2, h_q=9, main=Pool(400, 390, 61, lengths=(390, 70)), indices="mixed", sinks="drawn", few_heads=False, sm_count=1
)
PAIR = replace(ALONE, h_q=128, sm_count=2)  # each CTA converts half of the keys for both
MASKS = r"selp\.f32 (\s*%r\d+), (?:(%r\d+), 0fFF800000|0fFF800000, (%r\d+)),"

SUITE = Suite(
    SM90,
    {"alone": ALONE, "pair": PAIR},
    (
        planted("missing arrival", ALONE, ptx.CLUSTER_ARRIVALS),
        planted("missing arrival in a pair", PAIR, ptx.CLUSTER_ARRIVALS),
        planted("missing proxy fences", ALONE, ptx.PROXY_FENCES, "", together),
        planted("missing proxy fences in a pair", PAIR, ptx.PROXY_FENCES, "", together),
        planted("missing copy to the peer", PAIR, ptx.PEER_COPIES),
        planted("wrong number of bytes", PAIR, ptx.EXPECTED_BYTES, r"\g<1>512;"),
        planted("mask without effect", ALONE, MASKS, r"selp.f32 \1, \2\3, \2\3,", together),
        planted("sink in base 2", ALONE, ptx.LOG2_E, ptx.ONE, together),
    ),
)
