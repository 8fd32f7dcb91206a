"""Bugs in sparse prefill for Hopper.

dense_decode_sm90.py and sparse_decode_sm90.py break what the kernel shares with decode.
"""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM90
from cute_mla.testing.operations.sparse_prefill.case import SparsePrefillCase
from tests.mutation.planted import patterns as ptx
from tests.mutation.planting import Suite, alone, each_in, planted, together

# One CTA walks tokens of none, one and many tiles, some of which have no valid index: in front, in the middle, all.
ALONE = SparsePrefillCase(
    s_q=6, h_q=9, s_kv=250, topk=250, lengths=(130, 200, 200, 70, 250, 0), indices="mixed", sinks="drawn", sm_count=1, indexer_topk=100,
)  # fmt: skip
PAIR = replace(ALONE, s_q=3, lengths=(130, 200, 70), h_q=128, sm_count=2)  # each CTA gathers half of the keys of two stages for both
NO_KEYS = replace(ALONE, s_q=4, lengths=(200, 130, 250, 70), indices="none")  # no token waits for the Q that stays in shared memory
EVEN = replace(ALONE, q_layout="even")  # rows of q begin at multiples of 4 bytes
SPARSE = SparsePrefillCase(s_q=2, h_q=3, s_kv=3, topk=330, sm_count=1)  # most tiles with keys have one

# The first waits in the order of the PTX. None: found only by a rare schedule, or implied by another one.
LANDED = (None, *(f"landed[{stage}]" for stage in range(6)))  # of deliver: behind valid_ready; RoPE columns twice
INDICES = ("rope_free of indices", "queries_free of the first phase", "queries_free of the second phase")
SCORE = ("queries_landed of the first token", None, None, None, "queries_landed of the second phase", None, None, None)
WAITS = ("valid_ready of copy", None, None, None, "kv_free", None, None, *LANDED, *INDICES, *SCORE)
WITHOUT_KEYS = len(WAITS)  # the wait for the second phase of a token without a valid index
AHEAD = WITHOUT_KEYS + 2  # for Q of the next token
FENCES = 5  # of deliver: four stages, RoPE columns
OF_DELIVER = FENCES + 1  # arrivals: of a tile without keys the RoPE columns' come last
OF_INDICES = 1

SUITE = Suite(
    SM90,
    {"alone": ALONE, "pair": PAIR, "sparse": SPARSE, "no keys": NO_KEYS, "even": EVEN},
    (
        *(planted(f"missing wait: {name}", ALONE, ptx.WAITS, ptx.NO_WAIT, alone(index)) for index, name in enumerate(WAITS) if name),
        planted("missing wait: queries_landed of the second phase without keys", NO_KEYS, ptx.WAITS, ptx.NO_WAIT, alone(WITHOUT_KEYS)),
        planted("missing wait: queries_landed of the next token", ALONE, ptx.WAITS, ptx.NO_WAIT, alone(AHEAD)),
        planted("missing copies of 4 bytes", EVEN, r"cp\.async\.ca\.[^;]*;", "", together),
        planted("missing release of Q", ALONE, ptx.ARRIVALS, "", each_in(OF_DELIVER + OF_INDICES, OF_DELIVER + OF_INDICES + 1)),
        planted("copies without a signal", ALONE, r"cp\.async\.mbarrier\.arrive[^;]*;"),
        planted("missing arrival", ALONE, ptx.ARRIVALS, "", each_in(0, OF_DELIVER + OF_INDICES)),
        planted("missing proxy fence of deliver", ALONE, ptx.PROXY_FENCES, "", alone(0, FENCES - 1)),
        planted("missing proxy fence of Q", ALONE, ptx.PROXY_FENCES, "", alone(FENCES)),
        planted("missing proxy fence of deliver in a pair", PAIR, ptx.PROXY_FENCES, "", alone(0, FENCES - 1)),
        planted("missing copy to the peer", PAIR, ptx.PEER_COPIES, "", alone(0, -1)),
        planted("wrong number of bytes", PAIR, ptx.EXPECTED_BYTES, r"\g<1>512;", alone(0)),
        planted("absent keys read", ALONE, r"selp\.b32 (\s*%r\d+), 0, 16, %p\d+;", r"mov.b32 \1, 16;", alone(0, -1)),
        planted("every key taken for present", ALONE, ptx.BALLOTS, r"mov.b32 \1, -1;"),
        planted("every key taken for absent", SPARSE, ptx.BALLOTS, r"mov.b32 \1, 0;"),
        planted("lse_indexer counts a key too many", ALONE, r"(mov\.b64 \s*%rd\d+), -1;", r"\1, -2;", count=1),
        planted("logarithms in base 2", ALONE, ptx.LN_2, ptx.ONE),
        planted("sink in base 2", ALONE, ptx.LOG2_E, ptx.ONE, together),
        planted("maximum of the last tile only", ALONE, ptx.RUNNING_MAXIMUM, r"mov.f32 \1, \2;", together),
    ),
)
