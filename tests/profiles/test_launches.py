"""From a row to its launch: products of a block by hand, the work of the longest CTA, and what follows in the call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from cute_mla.profiles.clock.constants import constants, gpus
from cute_mla.profiles.launches.launch import Combine, Launch, NoLaunchError
from cute_mla.profiles.launches.of_rows import launch_on
from cute_mla.profiles.launches.products import block_flops
from cute_mla.profiles.predictions import kernels_of
from cute_mla.profiles.roofline import GPUS
from cute_mla.profiles.rows import Case, every_case
from cute_mla.profiles.shapes import DecodeShape
from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.spec.arch import ARCHS, SM90, SM100, SM120, Arch
from cute_mla.spec.dense_decode import key_columns
from cute_mla.spec.kernel_ops import ARCHS_OF

CASES = every_case()


def case_named(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


# clocks of the tensor cores: those that the kernels' READMEs argue with
CLOCKS = [
    ("dense_decode", SM90.name, {"operands": "latent", "cluster": 2, "d_qk": 576}, 2176),
    ("dense_decode", SM90.name, {"operands": "latent", "cluster": 2, "d_qk": 512}, 2048),
    ("dense_decode", SM90.name, {"operands": "latent", "cluster": 2, "d_qk": 320}, 1152),
    ("dense_decode", SM100.name, {"operands": "latent", "cluster": 2, "d_qk": 512}, 1024),
    ("dense_decode", SM100.name, {"operands": "latent", "cluster": 2, "d_qk": 320}, 576),
    ("dense_decode", SM90.name, {"operands": "fp8", "cluster": 1}, 1104),
    ("dense_decode", SM90.name, {"operands": "fp8_cache", "cluster": 1}, 2176),
    ("dense_decode", SM100.name, {"operands": "latent", "cluster": 2, "d_qk": 576}, 1088),
    ("dense_decode", SM100.name, {"operands": "fp8", "cluster": 2}, 560),
    ("dense_decode", SM100.name, {"operands": "fp8_cache", "cluster": 2}, 1088),
    ("dense_decode", SM120.name, {"operands": "fp8_cache", "cluster": 1}, 2176),
    ("dense_decode", SM120.name, {"operands": "fp8", "cluster": 1, "rows64": True}, 8704),
    ("sparse_decode", SM120.name, {"cache": "fp8_656", "cluster": 1}, 2176),
    ("sparse_decode", SM120.name, {"cache": "fp8_584", "cluster": 1}, 2048),
    ("sparse_decode", SM90.name, {"cache": "fp8_656", "cluster": 1}, 2176),
    ("sparse_decode", SM90.name, {"cache": "latent", "cluster": 2}, 2176),
    ("sparse_decode", SM90.name, {"cache": "fp8_656", "cluster": 2}, 2176),
    ("sparse_decode", SM90.name, {"cache": "fp8_584", "cluster": 2}, 2048),
    ("sparse_decode", SM100.name, {"cache": "latent", "cluster": 2}, 1088),
    ("sparse_decode", SM100.name, {"cache": "fp8_584", "cluster": 2}, 1024),
    ("sparse_prefill", SM90.name, {"d_qk": 576, "cluster": 1}, 2176),
    ("sparse_prefill", SM90.name, {"d_qk": 576, "cluster": 2}, 2176),
    ("sparse_prefill", SM90.name, {"d_qk": 512, "cluster": 2}, 2048),
    ("sparse_prefill", SM100.name, {"d_qk": 576, "cluster": 2}, 1088),
    ("dense_prefill", SM90.name, {"d_qk": 192}, 2560),
    ("dense_prefill", SM90.name, {"d_qk": 128}, 2048),
    ("dense_prefill", SM90.name, {"d_qk": 256}, 2560),
    ("dense_prefill", SM100.name, {"d_qk": 192}, 2560),
    ("dense_prefill", SM100.name, {"d_qk": 256, "cluster": 2}, 2048),
    ("dense_prefill_dq", SM90.name, {"d_qk": 192}, 3072),
    ("dense_prefill_dq", SM90.name, {"d_qk": 128}, 3072),
    ("dense_prefill_dkdv", SM90.name, {"d_qk": 192}, 2560),
    ("dense_prefill_dkdv", SM90.name, {"d_qk": 128}, 2048),
    ("dense_prefill_dq", SM90.name, {"d_qk": 256}, 3072),
    ("dense_prefill_dkdv", SM90.name, {"d_qk": 256}, 2048),
    ("dense_prefill_dq", SM100.name, {"d_qk": 192}, 2048),
    ("dense_prefill_dq", SM100.name, {"d_qk": 128}, 1536),
    ("dense_prefill_dkdv", SM100.name, {"d_qk": 192}, 1920),
    ("dense_prefill_dkdv", SM100.name, {"d_qk": 128}, 2048),
    ("dense_prefill_dq", SM100.name, {"d_qk": 256}, 1536),
    ("dense_prefill_dkdv", SM100.name, {"d_qk": 256}, 2560),
]


@pytest.mark.parametrize(("op", "arch", "config", "clocks"), CLOCKS)
def test_products_of_a_block(op: str, arch: str, config: Mapping[str, Any], clocks: int) -> None:
    rate = next(constants(gpu).product_flops for gpu in gpus() if constants(gpu).arch == arch)
    assert sum(block_flops(op, arch, config).values()) / rate == clocks


def test_an_op_without_keys_has_no_block() -> None:
    with pytest.raises(ValueError, match="op is 'combine'; blocks of keys have dense_decode, sparse_decode"):
        block_flops("combine", SM90.name, {})


def is_served(case: Case, arch: Arch) -> bool:
    """Return whether an architecture has the kernels of a row."""
    shape = case.shape
    if isinstance(shape, DecodeShape):
        return shape.d_qk in key_columns(arch)
    return arch in ARCHS_OF.get(case.op, ARCHS.values())


@pytest.mark.parametrize("gpu", GPUS)
def test_every_row_launches_built_kernels(gpu: str) -> None:
    built, arch = load_artifacts().manifest.kernels, ARCHS[GPUS[gpu].arch]
    for case in CASES:
        if not is_served(case, arch):
            with pytest.raises(NoLaunchError, match=f"{arch.name}$"):
                launch_on(case, gpu)
            continue
        assert set(kernels_of(case, gpu)) <= built.keys(), case.name
        launch = launch_on(case, gpu)
        assert launch.ctas > 0, case.name
        assert launch.bytes > 0 or "len0" in case.name, case.name


@pytest.mark.parametrize(("name", "row_tiles", "key_tiles"), [("M2.8k_full", 56 * 64, 56 * 86), ("M2.8k", 1807, 2439)])
def test_the_longest_ctas_of_the_backward_pass(name: str, row_tiles: int, key_tiles: int) -> None:
    """8,192 items on 148 SMs, each over 64 tiles of 128 keys, then over 86 tiles of 96 rows; on average 1,799 and 2,417 if causal."""
    launch = launch_on(case_named(name), "B200")
    assert isinstance(launch, Launch)
    assert launch.after is not None
    assert [max(work.blocks for work in each.cta_work) for each in (launch, launch.after)] == [row_tiles, key_tiles]


@pytest.mark.parametrize(
    ("name", "gpu", "rows"), [("D12.h16", "H200", 16), ("D8.s4", "H200", 64), ("D1.fixed", "H200", 128), ("S3.h8", "B200", 8)]
)
def test_query_rows_of_a_cluster(name: str, gpu: str, rows: int) -> None:
    launch = launch_on(case_named(name), gpu)
    assert isinstance(launch, Launch)
    assert launch.rows == rows


def test_combine_of_a_small_call_takes_a_row_apart() -> None:
    combine = launch_on(case_named("C1.many"), "H200")
    assert isinstance(combine, Combine)
    assert (combine.ctas, combine.heads, combine.columns, combine.splits) == (16 * 8, 1, 8, 64)
    behind = launch_on(case_named("D12.h16"), "H200")
    assert isinstance(behind, Launch)
    assert behind.combine is not None
    assert behind.combine.ctas == 16 * 8


def test_combine_passes_over_what_is_not_cut() -> None:
    """D1: 128 requests, none cut, on 16 CTAs along them. C1.two: all of 128 cut in two."""
    behind = launch_on(case_named("D1.fixed"), "H200")
    assert isinstance(behind, Launch)
    assert behind.combine == Combine(16 * 16, 2, 0.0, heads=8)
    alone = launch_on(case_named("C1.two"), "H200")
    assert isinstance(alone, Combine)
    assert (alone.ctas, alone.heads, alone.merges, alone.splits) == (16 * 16, 8, 8, 2)
