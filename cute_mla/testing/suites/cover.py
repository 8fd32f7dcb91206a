"""Covers of variants and features: for each variant of an op a few small cases that together have every feature of the op.

A feature is a value of a factor, such as a layout, a page size, or a set of lengths. Each case has one value of every factor. The values
are drawn so that a variant meets each of them, and all variants together as many pairs of values as possible.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import combinations
from math import log
from typing import Any, NamedTuple, TypeVar

from ...spec.mla import D_ROPE
from ..cases.base import BaseCase
from ..cases.tensors import OPPOSED_ROWS, STEEP, STEP

C = TypeVar("C", bound=BaseCase)
Choice = Mapping[str, Any]
Factors = Mapping[str, Sequence[Hashable]]


class Variant(NamedTuple):
    """A variant of an op: a name that determines draws, the fields that all its cases share, and the values of each factor.

    A factor with the name of a field holds values of that field; other factors set several fields at once.
    """

    name: str
    fields: Mapping[str, Any]
    factors: Factors


# Scale for values "normal", whose products have deviations of 0.11 to 0.24: scores then spread by 0.3 to 0.7 powers of two. With a model's
# scale every probability of a row would be nearly the same, and an exponential that errs by 10^-4 would leave no trace in lse.
SPREAD_SCALE = 2.0

# Scale for values "steps" with steps of STEP: weights grow by a little less than a factor of 2^16 from tile to tile. A kernel that rescales
# O for 2^8 and more has probabilities of 1 there; one that does so for 2^16 and more has probabilities that fp16 cannot hold.
STEPS_SCALE = 15.9998 * log(2) / (STEEP * D_ROPE * STEP)


def ramps(steps_scale: float = STEPS_SCALE) -> tuple[tuple[str, float | None], ...]:
    """Return kinds of values, each with the scale of the softmax that makes the most of it.

    Opposed scores span 44 powers of two, so that sums are rescaled by much less than 2^-8 once or twice, and not in the last tile. The
    greatest score of a tile of needles is 140 powers of two above the others: probabilities overflow in every type if it is not found.
    """
    return (("normal", SPREAD_SCALE), ("opposed", 0.03), ("steps", steps_scale), ("needles", 12.13), ("peaks", 0.1))


def lacks_far_rows(layouts: Sequence[str], h_q: int) -> bool:
    """Return whether heads lie far that are no second rows: those of a Hopper thread lie OPPOSED_ROWS behind its first."""
    return "far_heads" in layouts and h_q <= OPPOSED_ROWS


_CANDIDATES = 20  # draws of which the one with the most missing values, then the most new pairs, becomes a case
_ATTEMPTS = 2000  # rounds of candidates, none of them possible, after which values are taken to exclude each other
_IN_VAIN = 25  # such rounds after which fewer values are missing ones
# Probability that a draw takes a missing value where there is one: not 1, since values may exclude each other; less after rounds in vain.
_LACKING, _LACKING_IN_VAIN = 0.8, 0.3


def cover(variant: Variant, make: Callable[[Choice], C | None], seen: set[object], settle: Callable[[Choice], Choice] = dict) -> list[C]:
    """Return cases of one variant that together have every value of every factor.

    make(choice): the case with these fields and values by name, or None if they exclude each other.
    seen: pairs of values that earlier variants have; this variant's pairs are added. settle(choice): drawn values, with those in the place
    of others that they ask for. Raise ValueError if a value occurs in no case.
    """
    name, fields, factors = variant
    draw = random.Random(name)
    missing = {(factor, value) for factor, values in factors.items() for value in values}
    cases: list[C] = []
    vain = 0
    while missing:
        lacking = _LACKING_IN_VAIN if vain > _IN_VAIN else _LACKING
        made = (
            (choice, make({**fields, **choice})) for choice in (settle(_draw(factors, missing, draw, lacking)) for _ in range(_CANDIDATES))
        )
        possible = [(choice, case) for choice, case in made if case is not None and missing & set(choice.items())]
        vain = 0 if possible else vain + 1
        if vain == _ATTEMPTS:
            raise ValueError(f"no case of {name} has {sorted(map(str, missing))}")
        if not possible:
            continue
        most = max(len(missing & set(choice.items())) for choice, _ in possible)
        best = [item for item in possible if len(missing & set(item[0].items())) == most]
        choice, case = max(best, key=lambda item: len(_pairs(item[0]) - seen))
        missing -= set(choice.items())
        seen |= _pairs(choice)
        cases.append(case)
    return cases


def covers(variants: Sequence[Variant], make: Callable[[Choice], C | None]) -> Iterator[C]:
    """Yield cases with every feature of every variant."""
    seen: set[object] = set()
    for variant in variants:
        yield from cover(variant, make, seen)


def _draw(factors: Factors, missing: set[tuple[str, Hashable]], draw: random.Random, probability: float) -> dict[str, Hashable]:
    """Draw a value of each factor, with this probability one that is missing."""
    result = {}
    for factor, values in factors.items():
        lacking = [value for value in values if (factor, value) in missing]
        result[factor] = draw.choice(lacking if lacking and draw.random() < probability else values)
    return result


def _pairs(choice: Choice) -> set[object]:
    return set(combinations(sorted(choice.items(), key=lambda item: item[0]), 2))
