"""Bugs in sparse decode for Blackwell over formats of 528 and 288 bytes a token: their scales, conversions, and addresses.

sparse_decode_sm100.py and dense_decode_sm100.py break what the kernels share with those for other formats.
"""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM100
from cute_mla.testing.operations.sparse_decode.case import Pool, SparseDecodeCase
from tests.mutation.planted import patterns as ptx
from tests.mutation.planting import Suite, alone, planted, together

# Tiles enough to go round the ring, indices of every kind, lengths that end inside a tile.
V41 = SparseDecodeCase(
    cache="v41_paged", batch=2, h_q=73, main=Pool(400, 390, 61, lengths=(390, 70)), values="spread", indices="mixed", sm_count=2
)
ROWS = replace(V41, cache="v41", main=Pool(100, 90, 61))
NOPE = replace(V41, cache="nope_528")
# Tiles of the first cache, of both, and of the second one, whose scales differ from 16 columns to the next
FP4 = replace(V41, extra_cache="v41_fp4", main=Pool(100, 90, 61), extra=Pool(400, 300, 16, (300, 35)), values="normal")

BF16_PRODUCTS = r"mul\.rn\.bf16x2 ([^,]*), ([^,]*), %r[^;]*;"
SCALE_BYTES = r"prmt\.b32 (%r\d+), (%r\d+), \2, %r\d+;"
SCALE_COPIES = r"cp\.async\.ca\.shared\.global [^;]*;"
PAGED_ROWS = r"setp\.eq\.b64 (\s*%p\d+, %rd\d+), 512;"
SCALES, ADDRESSES = 0, 8  # of the shuffles: eight passes with the scales of a tile, then with the addresses of its rows

SUITE = Suite(
    SM100,
    {"v41": V41, "v41 rows": ROWS, "nope": NOPE, "fp4": FP4},
    (
        planted("v41: missing proxy fences", V41, ptx.PROXY_FENCES, "", together),
        planted("v41: row or scales of another key", V41, ptx.SHUFFLES, ptx.LANE_0, alone(SCALES, ADDRESSES), count=32),
        planted("v41: no scale", V41, BF16_PRODUCTS, r"mov.b32 \1, \2;", together),
        planted("v41: the first group's scale for two boxes", V41, SCALE_BYTES, r"prmt.b32 \1, \2, \2, 0;", together),
        planted("v41: missing copy of scales", V41, SCALE_COPIES),
        planted("v41: copies of a tile still under way", V41, ptx.COPY_WAITS_BUT_ONE, "cp.async.wait_group 2;"),
        planted("v41: copies of the last tile still under way", V41, ptx.COPY_WAITS, "cp.async.wait_group 1;"),
        planted("v41: paged scales sought behind the row", V41, PAGED_ROWS, r"setp.eq.b64 \1, 513;", together),
        planted("v41: scales of rows sought behind the page", ROWS, PAGED_ROWS, r"setp.ne.b64 \1, 512;", together),
        planted("nope: missing proxy fences", NOPE, ptx.PROXY_FENCES, "", together),
        planted("nope: row or scales of another key", NOPE, ptx.SHUFFLES, ptx.LANE_0, alone(SCALES, ADDRESSES), count=32),
        planted("nope: missing copy of scales", NOPE, SCALE_COPIES),
        planted("fp4: missing proxy fences", FP4, ptx.PROXY_FENCES, "", together),
        planted("fp4: second cache read as the first", FP4, ptx.BALLOTS, r"mov.b32 \1, 0;", alone(0), count=2),
        planted("fp4: no signs", FP4, r"and\.b32 (\s*%r\d+, %r\d+), -2139062144;", r"and.b32 \1, 0;", together),
        planted("fp4: no mantissas", FP4, r"and\.b32 (\s*%r\d+, %r\d+), 471604252;", r"and.b32 \1, 404232216;", together),
        planted("fp4: columns out of order", FP4, r"mov\.b32 (\s*%r\d+), 20800;", r"mov.b32 \1, 29538;", together),
        planted("fp4: no scale", FP4, BF16_PRODUCTS, r"mov.b32 \1, \2;", together),
        planted("fp4: scales too small", FP4, r"mov\.b32 (\s*%r\d+), 1115701888;", r"mov.b32 \1, 1065369472;", together),
        planted("fp4: the first group's scale for a box", FP4, SCALE_BYTES, r"prmt.b32 \1, \2, \2, 0;", together),
        planted("fp4: missing copy of scales", FP4, SCALE_COPIES),
    ),
)
