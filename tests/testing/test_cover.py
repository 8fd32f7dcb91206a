"""Every feature of an op occurs in a smoke case of every kernel variant that it applies to, on both architectures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cute_mla.spec import cache_rows, dense_decode, dense_prefill, sparse_decode, sparse_prefill
from cute_mla.spec.arch import Arch
from cute_mla.testing.cases.far import FAR_DIMENSIONS
from cute_mla.testing.cases.tensors import OUTSIDE
from cute_mla.testing.suites import suite
from cute_mla.testing.suites.cover import cover

Feature = Callable[[Any], bool]

VARIANTS: dict[str, Callable[[Arch], tuple[Any, ...]]] = {
    "dense_decode": dense_decode.closed_variants,
    "sparse_decode": sparse_decode.closed_variants,
    "sparse_prefill": sparse_prefill.closed_variants,
    "dense_prefill": dense_prefill.closed_variants,
    "cache_write": lambda arch: cache_rows.closed_variants(),
    "cache_gather": lambda arch: cache_rows.closed_variants(),
}
_SCORES: dict[str, Feature] = {
    "scores that rise to the middle, from either end": lambda case: case.values == "opposed" and case.softmax_scale == 0.03,
    "scores that rise or fall by a little less than a factor of 2^16": lambda case: case.values == "steps",
    "a tile's greatest score at every key": lambda case: case.values == "needles",
    "peaks": lambda case: case.values == "peaks",
    "lse -inf for an empty row": lambda case: case.empty_lse == float("-inf"),
    "q with far heads": lambda case: case.q_layout == "far_heads",
    "out with far heads": lambda case: case.outputs == "far_heads",
}
_SINKS: dict[str, Feature] = {
    "finite sinks": lambda case: case.sinks == "drawn",
    "infinite sinks": lambda case: case.sinks == "infinite",
    "invalid indices beside valid ones": lambda case: case.indices == "mixed",
    "no valid index": lambda case: case.indices == "none",
    "far rows of indices": lambda case: case.index_layout in FAR_DIMENSIONS,
}
FEATURES: dict[str, dict[str, Feature]] = {
    "dense_decode": {
        **_SCORES,
        **{f"pages of {size}": lambda case, size=size: case.page_size == size for size in (16, 32, 64, 128)},  # type: ignore[misc]
        "lengths beyond the block table, and negative ones": lambda case: case.table_pages is not None and min(case.given_lengths) < 0,
        "requests without keys": lambda case: 0 in case.key_lengths,
        "causal with several query tokens": lambda case: case.causal and case.s_q > 1,
        "a far block table": lambda case: case.far_table,
        "used entries outside the cache": lambda case: case.finding_kinds == {OUTSIDE},
        "far pages": lambda case: case.cache_layout == "far",
        "far rows": lambda case: case.cache_layout == "far_rows",
        "batch invariance": lambda case: case.batch_invariant,
        "batch invariance where the plan cuts": lambda case: case.batch_invariant and case.metadata == "longer" and len(case.pages) > 1,
        "a plan of other lengths": lambda case: case.metadata == "stale" and not case.batch_invariant,
        "rows that see every number of keys of a tile, the last of most weight": lambda case: case.values == "cliff",
        "q with far requests": lambda case: case.q_layout == "far_requests",
        "far results of a whole request": lambda case: case.outputs == "far_requests" and case.metadata != "stale",
    },
    "sparse_decode": {
        **_SCORES,
        **_SINKS,
        "far pages": lambda case: case.cache_layout == "far",
        "topk_length": lambda case: case.main.lengths is not None,
        "lengths beyond topk, and negative ones": lambda case: case.main.lengths == "edges",
        "a second cache": lambda case: case.extra is not None and case.indices != "none",
        "batch invariance": lambda case: case.batch_invariant,
    },
    "sparse_prefill": {
        **_SCORES,
        **_SINKS,
        "far rows": lambda case: case.kv_layout == "far",
        "topk_length": lambda case: case.lengths is not None,
        "offsets": lambda case: case.form == "ragged",
        "clipped offsets": lambda case: case.form == "clipped",
    },
    "dense_prefill": {
        **_SCORES,
        "groups of several KV heads": lambda case: case.group > 1 and case.h_kv > 1,
        "causal": lambda case: case.causal,
        "rows that see every number of keys of a tile, the last of most weight": lambda case: case.values == "cliff",
        "far rows behind a tile": lambda case: case.outputs == "far_tokens" and any(s_q > 128 for s_q, _ in case.lengths),
        "NaN neighbours": lambda case: case.neighbours == "nan",
        "clipped offsets": lambda case: case.ends == "clipped",
        "far keys": lambda case: case.kv_layout == "far_tokens",
        "sequences without keys": lambda case: any(s_q > 0 == s_k for s_q, s_k in case.lengths),
    },
    "cache_write": {
        "far pages": lambda case: case.cache_layout == "far",
        "far keys": lambda case: case.key_layout == "far",
        "far slots": lambda case: case.slot_type == "far",
        "values of every kind": lambda case: case.values == "nasty",
    },
    "cache_gather": {
        "far pages": lambda case: case.cache_layout == "far",
        "a far block table": lambda case: case.far_table,
        "far results": lambda case: case.outputs == "far_tokens",
        "starts": lambda case: case.starts is not None and any(case.starts),
        "used entries outside the cache": lambda case: case.finding_kinds == {OUTSIDE},
    },
}


@pytest.mark.parametrize("op", FEATURES)
def test_every_variant_meets_every_feature(op: str, arch: Arch) -> None:
    cases = [entry.case for entry in suite("smoke", op, simulated=True)]
    for config in VARIANTS[op](arch):
        own = [case for case in cases if case.problem(arch).config == config]
        missing = [name for name, has in FEATURES[op].items() if not any(map(has, own))]
        assert not missing, f"{config.name} on {arch.name}"


def test_values_that_exclude_each_other_are_an_error() -> None:
    with pytest.raises(ValueError, match="no case of x has"):
        cover("x", {"a": (1, 2)}, lambda choice: None, set())
