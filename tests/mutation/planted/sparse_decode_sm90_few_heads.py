"""Bugs in sparse decode for Hopper with keys on M."""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM90
from cute_mla.testing.operations.sparse_decode.case import Pool, SparseDecodeCase
from tests.mutation.planted import patterns as ptx
from tests.mutation.planting import Suite, alone, each, planted, together

# One CTA; work tiles of odd and of even numbers of tiles, indices of every kind, lengths that end inside a tile.
POOL = Pool(400, 390, 61, lengths=(390, 70, 130, 3))
CASE = SparseDecodeCase(batch=4, h_q=9, main=POOL, indices="mixed", sinks="drawn", sm_count=1)
RISING = replace(CASE, batch=1, main=Pool(400, 390), values="rising", indices="valid")  # the references move
V41 = replace(CASE, cache="v41")
MASKS = r"selp\.f32 (\s*%r\d+), (?:(%r\d+), 0fFF800000|0fFF800000, (%r\d+)),"
BF16_PRODUCTS = r"mul\.rn\.bf16x2 ([^,]*), ([^,]*), [^;]*;"

SUITE = Suite(
    SM90,
    {"656": CASE, "rising": RISING, "v41": V41},
    (
        planted("missing arrival", CASE, ptx.ARRIVALS, "", each),
        planted("missing proxy fences", CASE, ptx.PROXY_FENCES, "", each),
        planted("missing wait for products", CASE, ptx.WGMMA_WAITS, "", alone(-1)),
        planted("mask without effect", CASE, MASKS, r"selp.f32 \1, \2\3, \2\3,", together),
        planted("sink in base 2", CASE, ptx.LOG2_E, ptx.ONE, together),
        planted("no rescale", RISING, r"ex2\.approx\.ftz\.f32 ([^,]*), [^;]*;", r"mov.f32 \1, 0f3F800000;", together),
        planted("v41: no scale", V41, BF16_PRODUCTS, r"mov.b32 \1, \2;", together),
    ),
)
