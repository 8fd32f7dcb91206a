"""Kernels whose sources have changed since they were built: they are found without the tools that built them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cute_mla.aot_build import fingerprint as fingerprint_module
from cute_mla.aot_build import staleness
from cute_mla.aot_build.fingerprint import fingerprint
from cute_mla.aot_build.staleness import changed_kernels
from cute_mla.aot_build.variants import closed_variants
from cute_mla.manifest import Manifest
from cute_mla.spec.arch import SM90, SM100
from tests.support.kernel_entries import kernel_entry

BUILT_BY = {"nvidia-cutlass-dsl": "1.2.3", "nvidia-cuda-nvdisasm": "4.5.6", "ptxas": "7.8.9", "reassembly": "equal"}


@pytest.fixture
def manifest() -> Manifest:
    """Return a manifest of the split plan of both architectures, built from this tree's sources by other tools."""
    entries = {}
    for arch in (SM90, SM100):
        (variant,) = closed_variants(arch, ["split_plan"])
        tools = {package: BUILT_BY.get(package, "absent") for package in staleness.tool_versions()}
        print_ = fingerprint(variant, tools=tools)
        entries[variant.name] = kernel_entry("split_plan", arch.name, "i32", fingerprint=print_, tools=BUILT_BY)
    return Manifest(entries)


def test_other_tools_do_not_count(manifest: Manifest) -> None:
    assert changed_kernels(manifest, ["sm90", "sm100"]) == []


def test_other_sources_count(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint_module, "compile_options", lambda arch: "--opt-level 0")
    assert changed_kernels(manifest, ["sm90"]) == ["split_plan_sm90_i32"]
    assert changed_kernels(manifest, ["sm90", "sm100"]) == ["split_plan_sm100_i32", "split_plan_sm90_i32"]


def test_a_kernel_that_the_list_lacks_counts(manifest: Manifest) -> None:
    entry = replace(manifest.kernels["split_plan_sm90_i32"], name="split_plan_sm90_i64")
    assert changed_kernels(Manifest({**manifest.kernels, entry.name: entry}), ["sm90"]) == [entry.name]
    assert changed_kernels(Manifest({**manifest.kernels, entry.name: entry}), ["sm100"]) == []
