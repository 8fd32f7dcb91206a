"""Instructions that kernels execute per tile of keys. Every kernel has a case, and products agree with the tile shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_mla.aot_build.variants import closed_variants
from cute_mla.manifest import KernelEntry
from cute_mla.profiles.kernel_stats.dynamic_counts import FEW, MANY, baseline_counts, case_of, dynamic_counts
from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.spec.arch import Arch
from cute_mla.spec.split_plan import TILE_KEYS

PREFILLS = ("sparse_prefill", "dense_prefill", "masked_prefill", "dense_prefill_dq", "dense_prefill_dkdv")
WITH_KEYS = ("dense_decode", "sparse_decode", *PREFILLS, "mqa_logits")


def entry(name: str) -> KernelEntry:
    """Return a built kernel."""
    return load_artifacts().manifest.kernels[name]


def test_every_kernel_over_keys_has_a_case_with_one_cta_or_pair(arch: Arch) -> None:
    kernels = [variant for variant in closed_variants(arch) if variant.op in WITH_KEYS]
    assert len(kernels) > 20
    for variant in kernels:
        make = case_of(entry(variant.name))
        assert make is not None, variant.name
        few, many = make(FEW * TILE_KEYS), make(MANY * TILE_KEYS)
        assert few.problem(arch).config == many.problem(arch).config == variant.config
        assert many.tiles == MANY // FEW * few.tiles


@pytest.mark.parametrize("op", ["combine_{}_bf16", "split_plan_{}_i32", "merge_states_{}_bf16_d512"])
def test_other_kernels_have_none(op: str, arch: Arch) -> None:
    assert dynamic_counts(entry(op.format(arch.name))) is None


# Of 64 keys x 64 rows. sm90: 36 and 2 x 8 products of 64 x 64 x 16 and 64 x 128 x 16, counted by each warp of a group.
# sm100: one thread issues those of a pair of CTAs: 2 x 18 for S, which has two parts of 32 keys, and 8 for P V. Where a CTA works alone,
# both S and P V have two halves of the columns.
PRODUCTS = [
    ("dense_decode_sm90_bf16_cluster1", {"score": 4 * 36, "output_left": 4 * 8, "output_right": 4 * 8}),
    ("sparse_decode_sm90_bf16_fp8_584_cluster2", {"score": 4 * 32, "output_left": 4 * 8, "output_right": 4 * 8}),
    ("sparse_prefill_sm100_bf16_d576_cluster2", {"mma": (2 * 18 + 8) / 2}),
    ("sparse_prefill_sm100_bf16_d576_cluster1", {"mma": 2 * 18 + 2 * 4}),
    ("sparse_decode_sm100_bf16_fp8_656_cluster1", {"mma": 2 * 18 + 2 * 4}),
]


CODES = [*((*kernel, "ptx") for kernel in PRODUCTS), (*PRODUCTS[0], "sass")]


@pytest.mark.parametrize(("name", "products", "code"), CODES)
def test_products_of_a_tile(name: str, products: dict[str, float], code: str) -> None:
    counts = dynamic_counts(entry(name), code)
    assert counts is not None
    assert counts.code == code
    assert counts.peer is None or code == "ptx"
    found = {role: classes["matrix product"] for role, classes in counts.slope.items() if "matrix product" in classes}
    assert found == products
    assert counts.slope_total == pytest.approx(sum(sum(classes.values()) for classes in counts.slope.values()))
    assert 0 < counts.fixed_total < 50_000


def test_flashmla_has_kernels_for_hopper_alone() -> None:
    kernel = entry("sparse_decode_sm90_bf16_fp8_656_cluster2")
    peer = baseline_counts(kernel)
    assert peer is not None
    assert (peer.slope, peer.fixed) == (6844, 5641)
    single = baseline_counts(entry("sparse_decode_sm90_bf16_fp8_656_cluster1"))
    assert single is not None
    assert single.slope == 9693
    assert baseline_counts(replace(kernel, arch="sm100")) is None
    assert baseline_counts(entry("sparse_decode_sm90_bf16_fp8_584_cluster2")) is None
