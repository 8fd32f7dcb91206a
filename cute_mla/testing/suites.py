"""Suites: which cases run where, and what is said of those that do not.

smoke   per op 12 to 20 cases of at most 200 tiles each, in which every factor value, every line of the edge contract and, on
        every architecture, every variant occurs. The same cases for all architectures, on the simulated device and on a GPU.
full    FlashMLA's grid of the op in every type (dense prefill: a grid of our own), its corner cases, and the smoke cases. Whole on
        a GPU. On the simulated device: the grid whole where sequences are short and batches at most 6 (dense decode: in bf16), or
        tiles few (prefill); of the others a cover of every pair of factor values, with the batch, in sparse prefill the query
        tokens, in dense prefill the query heads of a KV head, cut to a budget of tiles; and a few long ones, whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import cache_suites, dense_prefill_suites, dense_suites, prefill_suites, sparse_suites
from .planned import Bearable, Planned

SUITES = ("smoke", "full")


@dataclass(frozen=True)
class _OfOp:
    """The suites of an op: the smoke cases, all cases of the full suite, and what the simulated device runs of these."""

    smoke: Sequence[Any]
    full: Callable[[], list[Any]]
    simulated: Bearable[Any]


_OF_OP = {
    "dense_decode": _OfOp(dense_suites.SMOKE, dense_suites.full_cases, dense_suites.SIMULATED),
    "sparse_decode": _OfOp(sparse_suites.SMOKE, sparse_suites.full_cases, sparse_suites.SIMULATED),
    "sparse_prefill": _OfOp(prefill_suites.SMOKE, prefill_suites.full_cases, prefill_suites.SIMULATED),
    "dense_prefill": _OfOp(dense_prefill_suites.SMOKE, dense_prefill_suites.full_cases, dense_prefill_suites.SIMULATED),
    "cache_write": _OfOp(cache_suites.WRITE_SMOKE, cache_suites.full_writes, cache_suites.SIMULATED),
    "cache_gather": _OfOp(cache_suites.GATHER_SMOKE, cache_suites.full_gathers, cache_suites.SIMULATED),
}
OPS = tuple(_OF_OP)


def suite(name: str, op: str, *, simulated: bool, seed: int = 0) -> list[Planned[Any]]:
    """The cases of a suite, all with this seed. ValueError for an unknown suite or op."""
    if name not in SUITES or op not in OPS:
        raise ValueError(f"suite is {name!r} and op {op!r}; supported: {', '.join(SUITES)} and {', '.join(OPS)}")
    suites = _OF_OP[op]
    if name == "smoke":
        planned = [Planned(case) for case in suites.smoke]
    elif simulated:
        planned = suites.simulated.plan(suites.full())
    else:
        planned = [Planned(case) for case in suites.full()]
    return [replace(item, case=replace(item.case, seed=seed)) for item in planned]
