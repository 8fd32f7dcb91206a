"""Bugs in dense decode for Blackwell with keys on M: e4m3 queries over an e4m3 cache, bf16 queries over a bf16 cache."""

from __future__ import annotations

from dataclasses import replace

from cute_mla.spec.arch import SM100
from cute_mla.spec.dense_decode import FP8, LATENT
from cute_mla.testing.operations.dense_decode.case import DenseDecodeCase
from tests.mutation.planted import patterns as ptx
from tests.mutation.planting import Planted, Suite, alone, each, each_but_around_dealloc, one_by_one, planted, together

# One CTA; work tiles of odd and of even numbers of tiles, more than there are stages, lengths that end inside a tile.
WALK = DenseDecodeCase(batch=4, s_q=3, lengths=(390, 70, 130, 3), h_q=3, causal=True, operands=FP8, sinks="drawn", sm_count=1)
RISING = replace(WALK, batch=1, lengths=(390,), values="rising")  # the references move
GAPS = replace(WALK, batch=6, tokens=(1, 0, 2, 3, 1, 1), lengths=(20, 5, 0, 70, 1, 64), s_q=1)  # work tiles without keys or of one tile
BROKEN = replace(WALK, broken=True)
WALK16, RISING16, GAPS16, BROKEN16 = (replace(case, operands=LATENT) for case in (WALK, RISING, GAPS, BROKEN))


def kind(case: DenseDecodeCase) -> str:
    """Return what the names of bugs begin with, by the operands of a case."""
    return "16 bits: " if case.operands == LATENT else ""


def waits(walk: DenseDecodeCase, rising: DenseDecodeCase, gaps: DenseDecodeCase, stages: int) -> list[Planted]:
    """Return missing waits, in the order of the PTX. None: the wait keeps a CTA alive for signals that nobody else waits for.

    stages: of a tile.
    """
    halves = ("",) if stages == 1 else (" of the first half", " of the second half")
    sites = (
        ("scores_ready", walk),
        ("stats_free", gaps),
        ("alpha_ready", walk),
        ("kv_free before O is scaled", rising),
        ("stats_ready", gaps),
        ("kv_free before O is stored", walk),
        *[(f"kv_free{of}", walk) for of in halves],
        ("kv_free before the CTA ends", None),
        ("query_free", walk),
        ("query_free before the CTA ends", None),
        ("query_free of the other Q before the CTA ends", None),
        ("query_ready", walk),
        ("scores_free", walk),
        *[(f"kv_ready{of}", walk) for of in halves],
        ("probs_ready", walk),
        ("output_ready", walk),
    )
    return one_by_one(f"{kind(walk)}missing wait: ", sites, ptx.WAITS, ptx.NO_WAIT)


def others(walk: DenseDecodeCase, rising: DenseDecodeCase, broken: DenseDecodeCase) -> tuple[Planted, ...]:
    """Return the bugs that are the same with both operands."""
    return (
        planted(f"{kind(walk)}missing arrival", walk, r"mbarrier\.arrive\.shared(?:::cluster)?\.b64 [^;]*;"),
        planted(f"{kind(walk)}missing barriers of a role", walk, r"bar\.sync\s+[13], 128;"),
        planted(f"{kind(walk)}missing copy", walk, ptx.TENSOR_COPIES),
        planted(f"{kind(walk)}missing wait for copies of Q", walk, ptx.COPY_WAITS, ""),
        planted(f"{kind(walk)}missing commit", walk, ptx.COMMITS, ""),
        planted(f"{kind(walk)}first page for a page below 0", broken, ptx.PAGES, ptx.FIRST_PAGE, together),
        planted(f"{kind(walk)}mask without effect", walk, r"selp\.f32 (\s*%r\d+), 0fFF800000, (%r\d+),", r"selp.f32 \1, \2, \2,", together),
        planted(f"{kind(walk)}unused rows not cleared", walk, ptx.ZERO_STORES, "", together),
        planted(f"{kind(walk)}sink in base 2", walk, ptx.LOG2_E, ptx.ONE, together),
        planted(f"{kind(walk)}missing fence before", walk, ptx.FENCES_BEFORE, "", each_but_around_dealloc, or_case=rising),
        planted(f"{kind(walk)}missing fence after", walk, ptx.FENCES_AFTER, "", each_but_around_dealloc, or_case=rising),
        planted(f"{kind(walk)}missing proxy fences", walk, ptx.PROXY_FENCES, "", each),
        planted(f"{kind(walk)}missing waits for loads", walk, ptx.LOAD_WAITS, "", together),
    )


SUITE = Suite(
    SM100,
    {
        "walk": WALK,
        "rising": RISING,
        "gaps": GAPS,
        "broken": BROKEN,
        "walk of 16 bits": WALK16,
        "rising of 16 bits": RISING16,
        "gaps of 16 bits": GAPS16,
        "broken of 16 bits": BROKEN16,
    },
    (
        *waits(WALK, RISING, GAPS, 1),
        *others(WALK, RISING, BROKEN),
        planted("missing wait for stores of ones", WALK, ptx.STORE_WAITS, "", alone(0), count=2),
        planted("missing wait for stores of O", RISING, ptx.STORE_WAITS, "", alone(1), count=2),
        # 18 products of S, then twice four of O and one of the sum.
        planted("missing product", WALK, ptx.PRODUCTS, "", alone(0, 15, 17, 18, 21, 22, 27), count=28),
        *waits(WALK16, RISING16, GAPS16, 2),
        *others(WALK16, RISING16, BROKEN16),
        planted("16 bits: missing wait for stores of O", RISING16, ptx.STORE_WAITS, "", alone(0), count=1),
        # 36 products of S, then for each half of the columns four times two of O.
        planted("16 bits: missing product", WALK16, ptx.PRODUCTS, "", alone(0, 15, 16, 31, 35, 36, 43, 44, 51), count=52),
    ),
)
