"""The tests of `make test` notice every broken number that the moved tests notice."""

from __future__ import annotations

import pytest

from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.spec.arch import ARCHS
from tests.cover import tiers
from tests.cover.breaking import noticing
from tests.mutation import numeric
from tests.mutation.sites import Mutation

SAMPLED = {  # kernels, and how many of their mutations are tried; the first two as in tests/mutation/test_numeric.py
    "cache_gather_sm90_b16_latent": 12,
    "cache_write_sm100_bf16_fp8_656": 12,
    "merge_states_sm100_bf16_d128": 6,
    "dense_prefill_sm90_bf16_d192": 6,
    "sparse_prefill_sm100_bf16_d576_cluster2": 4,
}
FOLDERS = {"cache_gather": "kv_cache", "cache_write": "kv_cache"}  # of the tests of an op, unless named like it


def drawn(kernel: str) -> list[Mutation]:
    """Return the mutations of a kernel that are tried."""
    found = numeric.find(load_artifacts().ptx(load_artifacts().manifest.kernels[kernel]))
    return numeric.drawn(kernel, found, SAMPLED[kernel], 0)


def kept_and_moved(kernel: str) -> tuple[list[str], list[str]]:
    """Return the arguments of pytest for the kept tests of a kernel's op and architecture, and its moved tests."""
    entry = load_artifacts().manifest.kernels[kernel]
    folder = f"tests/ops/{FOLDERS.get(entry.op, entry.op)}/"
    others = [arch for arch in ARCHS if arch != entry.arch]
    moved = [test for test in sorted(tiers.moved()) if test.startswith(folder) and not any(arch in test for arch in others)]
    return [folder, "-m", "not slow", "-k", " and ".join(f"not {arch}" for arch in others)], moved


@pytest.mark.slow
@pytest.mark.parametrize("kernel", SAMPLED)
def test_no_broken_number_is_noticed_by_moved_tests_alone(kernel: str) -> None:
    """If one is, add the test to the table "notices" of full_only.toml, and choose again."""
    kept, moved = kept_and_moved(kernel)
    if not moved:
        return
    mutations = drawn(kernel)
    first = noticing(kernel, mutations, kept)
    assert any(first)
    unnoticed = [mutation for mutation, test in zip(mutations, first, strict=True) if test is None]
    alone = noticing(kernel, unnoticed, moved) if unnoticed else []
    assert [(test, f"{kernel}:{item.kind}:{item.number}") for item, test in zip(unnoticed, alone, strict=False) if test] == []
