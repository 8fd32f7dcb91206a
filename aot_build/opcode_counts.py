"""Sums over instruction counts, by opcode pattern or by mnemonic."""

from __future__ import annotations

import re
from collections import Counter


def count_matching(counts: Counter[str], *patterns: str) -> int:
    """Return the sum of the counts whose opcode begins with a match of one of the regular expressions."""
    compiled = [re.compile(pattern) for pattern in patterns]
    return sum(number for key, number in counts.items() if any(pattern.match(key) for pattern in compiled))


def by_mnemonic(sass: Counter[str]) -> dict[str, int]:
    """Return the counts summed over modifiers, in alphabetical order."""
    totals: Counter[str] = Counter()
    for opcode, number in sass.items():
        totals[opcode.split(".")[0]] += number
    return dict(sorted(totals.items()))
