"""Bugs in sparse prefill for RTX boards: the kernel for up to 16 heads, and that for more, with keys on M."""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM120
from cute_mla.testing.operations.sparse_prefill.case import SparsePrefillCase
from tests.mutation.planted import patterns as ptx
from tests.mutation.planting import Planted, Suite, each, planted, together

# One CTA walks tokens of none, one and many stages, some of which have no valid index: in front, in the middle, all.
FEW = SparsePrefillCase(
    s_q=6, h_q=9, s_kv=250, topk=250, lengths=(130, 200, 200, 70, 250, 0), indices="mixed", sinks="drawn", sm_count=1, indexer_topk=100,
)  # fmt: skip
MANY = replace(FEW, s_q=3, lengths=(130, 200, 70), h_q=70, sm_count=2)  # two CTAs, of the second one pairs have no row
FEW_RISING = SparsePrefillCase(s_q=2, h_q=9, s_kv=192, topk=192, values="rising", sm_count=1, indexer_topk=100)  # the references move
MANY_RISING = replace(FEW_RISING, h_q=30)
FEW_SPARSE = SparsePrefillCase(s_q=2, h_q=3, s_kv=3, topk=330, sm_count=1)  # most stages with keys have one
MANY_SPARSE = replace(FEW_SPARSE, h_q=17)

SYNCS = r"bar\.sync \s*1, 128;"  # behind Q, behind the maxima before the bound, behind all maxima, behind P, behind the sums
PAIR_SYNCS = r"bar\.sync \s*%r\d+, 64;"  # behind P, behind the weights
LANDED = r"cp\.async\.mbarrier\.arrive[^;]*;"
SOURCES = r"selp\.b32 (\s*%r\d+), 0, 16, %p\d+;"
MASKS = r"selp\.f32 (\s*%r\d+), 0fFF800000, (%r\d+), %p\d+;"
FACTORS = r"selp\.f32 (\s*%r\d+), %r\d+, 0f3F800000, %p\d+;"
MAXIMA = r"(mul\.rn\.f32 \s*(%r\d+), [^;]*;[^;]*?)max\.f32 (\s*%r\d+), %r\d+, \2;"  # of a row, over stages
BEFORE_BOUND = r"setp\.gt\.s32 (\s*%p\d+), (%r\d+), 0;(?=\s*selp\.f32)"  # the first of a thread's keys


def bugs_of(
    case: SparsePrefillCase, rising: SparsePrefillCase, sparse: SparsePrefillCase, syncs: str, count: int, name: str
) -> tuple[Planted, ...]:
    """Return the bugs of one of the kernels."""
    return (
        planted(f"{name}: missing arrival", case, ptx.ARRIVALS, "", each),
        planted(f"{name}: missing wait for keys or for their place", case, ptx.WAITS, ptx.NO_WAIT, each),
        planted(f"{name}: missing barrier", case, syncs, "", each, count=count),
        planted(f"{name}: copies without a signal", case, LANDED),
        planted(f"{name}: absent keys read", case, SOURCES, r"mov.b32 \1, 16;", together),
        planted(f"{name}: mask without effect", case, MASKS, r"mov.f32 \1, \2;", together),
        planted(f"{name}: every key taken for present", case, ptx.BALLOTS, r"mov.b32 \1, -1;"),
        planted(f"{name}: every key taken for absent", sparse, ptx.BALLOTS, r"mov.b32 \1, 0;"),
        planted(f"{name}: lse_indexer counts a key too many", case, BEFORE_BOUND, r"setp.ge.s32 \1, \2, 0;", together),
        planted(f"{name}: logarithms in base 2", case, ptx.LN_2, ptx.ONE),
        planted(f"{name}: sink in base 2", case, ptx.LOG2_E, ptx.ONE, together),
        planted(f"{name}: maximum of the last stage only", case, MAXIMA, r"\1mov.f32 \3, \2;", together),
        planted(f"{name}: no rescale", rising, FACTORS, r"mov.f32 \1, 0f3F800000;", together),
        planted(f"{name}: rows of another key", case, ptx.SHUFFLES, ptx.LANE_0, together),
    )


SUITE = Suite(
    SM120,
    {
        "few": FEW,
        "many": MANY,
        "few, rising": FEW_RISING,
        "many, rising": MANY_RISING,
        "few, sparse": FEW_SPARSE,
        "many, sparse": MANY_SPARSE,
    },
    (
        *bugs_of(FEW, FEW_RISING, FEW_SPARSE, SYNCS, 5, "few"),
        *bugs_of(MANY, MANY_RISING, MANY_SPARSE, PAIR_SYNCS, 2, "many"),
        planted("many: Q behind the first 480 columns is lost", MANY, r"st\.shared\.v4\.b32 \s*\[[^]]*\], \{[^}]*\};", "", together),
    ),
)
