"""The quick suite, drawn from the smoke cases by a rule: cases that add most features for their cost, within a budget an op.

A feature is a kernel, the columns of a key, or a value of a field that names a layout, a format, a mask or another option. The rule has no
list of cases, so that it follows the smoke suite. The kernels that a suite launches follow from its cases. `make quick` builds these alone,
so they include the kernels of README's snippets and of examples/ (tests/house/conftest.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

from ...manifest import kernel_name
from ...spec.arch import Arch
from ...spec.combine import CombineConfig
from ...spec.kernel_ops import ARCHS_OF
from ...spec.sparse_decode import SparseDecodeProblem
from ...spec.split_plan import SplitPlanConfig, accumulator_rows
from ..cases.base import BaseCase, Config
from ..cases.paged_cache import PagedCacheCase
from ..operations.dense_decode.case import DenseDecodeCase
from ..operations.dense_prefill_backward.case import DensePrefillBackwardCase
from ..operations.head_sums.case import HeadSumsCase
from ..operations.indexer_backward.case import IndexerBackwardCase
from ..operations.indexer_topk.case import IndexerTopkCase
from ..operations.sparse_decode.case import SparseDecodeCase
from ..operations.sparse_prefill_backward.case import SparsePrefillBackwardCase

BUDGET_TILES = 52  # an op and an architecture: all ops take some 50 s of a core, under two schedules
_KERNEL_TILES = 4  # cost of a kernel that no earlier case has launched: its PTX is translated first
_CASE_TILES = 1  # cost of a case besides its tiles

# What README's snippets and examples/ launch and no rule of cost would choose.
_FIRST_KERNELS = {
    "dense_decode_sm90_bf16_cluster1",
    "dense_decode_sm100_bf16_cluster2",
    "dense_decode_sm100_bf16_few_heads",
    *(
        f"{op}_{arch.name}_bf16_d192"
        for op in ("dense_prefill", "dense_prefill_dq", "dense_prefill_dkdv")
        for arch in ARCHS_OF["dense_prefill_backward"]
    ),
}

Feature = tuple[str, object]


def kernels_of(case: BaseCase, arch: Arch) -> set[str]:
    """Return the manifest names of the kernels that a case launches.

    Decode plans its splits, and combines their results if the plan could split a request. indexer_topk computes logits first.
    """
    if isinstance(case, DensePrefillBackwardCase):
        rows, keys = case.dq_problem(arch), case.problem(arch)
        both: tuple[tuple[str, int, Config], ...] = (
            ("dense_prefill_dq", rows.items, rows.config),
            ("dense_prefill_dkdv", keys.items, keys.config),
        )
        return {kernel_name(op, arch.name, config.name) for op, items, config in both if items}
    if isinstance(case, SparsePrefillBackwardCase | IndexerBackwardCase):
        return {kernel_name(op, arch.name, config.name) for op, config in case.kernels_on(arch)}
    if not _has_rows(case):
        return set()
    names = {kernel_name(case.kernel_op, arch.name, case.problem(arch).config.name)}
    if isinstance(case, IndexerTopkCase) and case.is_scored:
        names.add(kernel_name("mqa_logits", arch.name, case.logits.problem(arch).config.name))
    if isinstance(case, DenseDecodeCase | SparseDecodeCase):
        problem = case.problem(arch)
        names.add(kernel_name("split_plan", arch.name, SplitPlanConfig().name))
        parts = problem.num_parts(case.sm_count or arch.sm_count)
        if isinstance(case, SparseDecodeCase) and isinstance(problem, SparseDecodeProblem) and case.all_count:
            problem = replace(problem, counted_parts=parts)
        if accumulator_rows(problem.batch, parts, problem.max_splits):
            names.add(kernel_name("combine", arch.name, CombineConfig(case.dtype, case.d_v).name))
    return names


def _has_rows(case: BaseCase) -> bool:
    if isinstance(case, SparsePrefillBackwardCase | IndexerBackwardCase | HeadSumsCase):
        return case.has_scores
    return case.keys > 0 if isinstance(case, PagedCacheCase) else math.prod(case.q_shape[:3]) > 0


@cache
def quick_cases(smoke: Sequence[Any]) -> tuple[Any, ...]:
    """Return the quick cases of an op out of its smoke cases, in their order."""
    left = {case: set(_features(case)) for case in smoke}
    chosen: list[BaseCase] = []
    known: set[Feature] = set()
    cost = 0
    while True:
        costs = {case: _cost(case, known) for case in left if cost + _cost(case, known) <= BUDGET_TILES}
        best = max(costs, key=lambda case: (_comes_first(left[case] - known), len(left[case] - known) / costs[case]), default=None)
        if best is None or not left[best] - known:
            return tuple(case for case in smoke if case in chosen)
        chosen.append(best)
        cost += costs[best]
        known |= left.pop(best)


def _cost(case: BaseCase, known: Iterable[Feature]) -> int:
    """Return the cost of a case beside others with these features, in tiles."""
    new = [feature for feature in _kernels(case) if feature not in known]
    return case.tiles + _CASE_TILES + _KERNEL_TILES * len(new) // len(ARCHS_OF[case.op])


def _comes_first(new: Iterable[Feature]) -> int:
    """Return how many features that may not be left out are new: the first kernels, and numbers of columns, whose kernels are their own."""
    return sum(name == "d_qk" or value in _FIRST_KERNELS for name, value in new)


def _kernels(case: BaseCase) -> Iterator[Feature]:
    for arch in ARCHS_OF[case.op]:
        if case.runs_on(arch):
            yield from (("kernel", name) for name in kernels_of(case, arch))


def _features(case: BaseCase) -> Iterator[Feature]:
    """Yield the kernels of a case, its columns, the values of fields that name something, and whether other options are at their defaults.

    A call without rows shows only that such a call is taken.
    """
    if not _has_rows(case):
        yield "has rows", False
        return
    yield from _kernels(case)
    for field in fields(case):
        value = getattr(case, field.name)
        if isinstance(value, bool | str) or field.name == "d_qk":
            yield field.name, value
        elif field.name in case.tags:
            yield field.name, value != field.default
