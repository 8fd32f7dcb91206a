"""Features of cases that a full suite must show with every kernel variant."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from cute_mla.spec.arch import ARCHS
from cute_mla.testing.cases.base import BaseCase
from cute_mla.testing.cases.sparse_decode import Pool


def variant_features(cases: Iterable[BaseCase]) -> set[tuple[str, str, object]]:
    """Return the variants that serve the cases, on every architecture, each with every value that a field of its cases has.

    Lengths of a pool are left out: the grids have drawn lengths in all pools of a case or in none.
    """
    found: set[tuple[str, str, object]] = set()
    for case in cases:
        values = {field.name: getattr(case, field.name) for field in fields(case)}
        values = {name: value._replace(lengths=None) if isinstance(value, Pool) else value for name, value in values.items()}
        configs = [f"{arch.name} {case.problem(arch).config.name}" for arch in ARCHS.values()]
        found |= {(config, name, value) for config in configs for name, value in values.items()}
    return found
