"""Builds are reproducible, redo only what has changed, and never leave a folder in a state that was not built."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cute_mla.aot_build import build as build_module
from cute_mla.aot_build.build import BUILT, FAILED, REASSEMBLED, UP_TO_DATE, BuildReport, KernelReport, Progress, build_all, build_variants
from cute_mla.aot_build.tools import ToolError
from cute_mla.aot_build.variants import OPS, Variant, closed_variants
from cute_mla.manifest import MANIFEST_NAME, Manifest
from cute_mla.simulator.sass.disassembler import find_program
from cute_mla.spec.arch import ARCHS, Arch
from tests.aot_build.tma_copy import GOOD, NOT_RENAMED, SPILLING

ATTENTION = ("dense_decode", "sparse_decode", "dense_prefill", "sparse_prefill")


def files(folder: Path) -> dict[str, bytes]:
    """Return the artefacts, by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.fixture
def compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any compilation fails the test."""

    def refuse(variants: list[Variant], *_: object) -> list[KernelReport]:
        assert not variants, f"would compile {[variant.name for variant in variants]}"
        return []

    monkeypatch.setattr(build_module, "_build_in_processes", refuse)


@pytest.fixture
def compiles_instantly(report: BuildReport, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Let compilations copy the files built before; return the names of what was compiled."""
    compiled: list[str] = []

    def copy(variants: list[Variant], prints: dict[str, str], staging: Path, jobs: int) -> list[KernelReport]:
        assert jobs >= 1
        for variant in variants:
            compiled.append(variant.name)
            for ending in (".cubin", ".ptx"):
                (staging / (variant.name + ending)).write_bytes((report.folder / (variant.name + ending)).read_bytes())
        entry = report.kernels[0].entry
        assert entry is not None
        return [KernelReport(variant.name, BUILT, 0.0, replace(entry, fingerprint=prints[variant.name])) for variant in variants]

    monkeypatch.setattr(build_module, "_build_in_processes", copy)
    return lambda: compiled


def test_two_builds_are_byte_identical(report: BuildReport, tmp_path: Path) -> None:
    build_variants((GOOD,), 1, tmp_path)
    assert files(tmp_path).keys() == {f"{GOOD.name}.cubin", f"{GOOD.name}.ptx", MANIFEST_NAME}
    assert files(tmp_path) == files(report.folder)


def test_what_passes_is_built_and_recorded(report: BuildReport) -> None:
    good = report.kernels[0]
    assert (good.name, good.status) == (GOOD.name, BUILT)
    assert good.entry == Manifest.load(report.folder).kernels[GOOD.name]
    assert good.entry.instructions["UTMALDG"] == 1
    assert good.entry.tools[REASSEMBLED] == ("equal" if find_program("ptxas") else "not checked")


def test_a_kernel_that_fails_a_gate_does_not_ship_and_says_why(report: BuildReport) -> None:
    spilling, unnamed = report.kernels[1:]
    assert (spilling.status, spilling.entry) == (FAILED, None)
    assert f"{SPILLING.name}: gate stack: stack 528 bytes, limit: 0 bytes" in spilling.error
    assert f"{NOT_RENAMED.name}: gate entry_name: entry name kernel_cutlass_" in unnamed.error
    assert report.errors == (spilling.error, unnamed.error)
    assert Manifest.load(report.folder).kernels.keys() == {GOOD.name}


@pytest.mark.usefixtures("compiles_nothing")
def test_a_second_build_touches_nothing(folder: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.name != ".lock"}
    again = build_variants((GOOD,), None, folder)
    assert [kernel.status for kernel in again.kernels] == [UP_TO_DATE]
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.name != ".lock"} == before


@pytest.mark.parametrize("damage", ["cubin", "ptx", "manifest", "missing", "fingerprint"])
def test_what_is_damaged_or_of_other_sources_is_built_again(
    folder: Path, damage: str, compiles_instantly: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = files(folder)
    if damage == "fingerprint":
        monkeypatch.setattr(build_module, "fingerprint", lambda _: "0" * 64)
    elif damage == "missing":
        (folder / f"{GOOD.name}.cubin").unlink()
    else:
        (folder / {"manifest": MANIFEST_NAME}.get(damage, f"{GOOD.name}.{damage}")).write_bytes(b"damaged")
    again = build_variants((GOOD,), 1, folder)
    assert [kernel.status for kernel in again.kernels] == [BUILT]
    assert compiles_instantly() == [GOOD.name]
    after = files(folder)
    assert after[f"{GOOD.name}.cubin"] == before[f"{GOOD.name}.cubin"]
    assert (after == before) == (damage != "fingerprint")
    assert Manifest.load(folder).kernels[GOOD.name].fingerprint == again.kernels[0].entry.fingerprint  # type: ignore[union-attr]


def test_a_kernel_that_fails_now_leaves_no_older_one_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "fingerprint", lambda _: "0" * 64)
    monkeypatch.setattr(build_module, "_build_in_processes", lambda *_: [KernelReport(GOOD.name, FAILED, 0.0, error="why")])
    assert build_variants((GOOD,), 1, folder).errors == ("why",)
    assert files(folder).keys() == {MANIFEST_NAME}
    assert Manifest.load(folder).kernels == {}


@pytest.mark.parametrize("prune", [True, False])
def test_kernels_that_were_not_asked_for_stay_unless_the_list_is_complete(
    folder: Path, prune: bool, compiles_instantly: Callable[[], list[str]]
) -> None:
    build_variants((), 1, folder, prune_archs=("sm90",) if prune else ())
    assert (f"{GOOD.name}.cubin" in files(folder)) == (not prune)
    assert (GOOD.name in Manifest.load(folder).kernels) == (not prune)
    assert compiles_instantly() == []


@pytest.mark.usefixtures("compiles_nothing")
def test_what_a_killed_build_left_is_removed(folder: Path) -> None:
    (folder / ".build-dead").mkdir()
    (folder / ".build-dead" / "half.cubin").write_bytes(b"")
    build_variants((GOOD,), 1, folder)
    assert not list(folder.glob(".build-*"))


@pytest.mark.usefixtures("compiles_instantly")
def test_progress_has_what_is_compiled_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    seen: list[Any] = []
    progress = Progress(lambda variants, jobs: seen.append(([variant.name for variant in variants], jobs)), seen.append)
    build_variants((GOOD,), 1, folder, progress)
    assert seen == []  # up to date
    build_variants((GOOD,), 4, tmp_path / "other", progress)
    assert seen[0] == ([GOOD.name], 1)
    assert [(kernel.name, kernel.status) for kernel in seen[1:]] == [(GOOD.name, BUILT)]


def test_long_jobs_start_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def none_built(variants: Sequence[Variant], *_: object) -> Iterator[KernelReport]:
        order.extend(variant.op for variant in variants)
        yield from (KernelReport(variant.name, FAILED, 0.0, error="not here") for variant in variants)

    monkeypatch.setattr(build_module, "_build_in_processes", none_built)
    build_all(list(ARCHS), OPS, 2, tmp_path)
    assert len(order) == sum(len(closed_variants(arch)) for arch in ARCHS.values())
    assert order[0] in ("sparse_decode", "dense_decode", "sparse_prefill", "dense_prefill")
    assert order[-1] in ("split_plan", "combine", "merge_states", "cache_write", "cache_gather")


def test_a_source_that_raises_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    broken = replace(GOOD, op="broken", module="broken_kernel")
    (tmp_path / "broken_kernel.py").write_text("def build(config, arch):\n    raise KeyError('no such tile')\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        report = build_variants((broken, GOOD), 2, tmp_path / "out")
    assert [kernel.status for kernel in report.kernels] == [FAILED, BUILT]
    assert report.errors == ("broken_sm90_bf16: KeyError: 'no such tile'",)


def test_without_the_dsl_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "find_spec", lambda _: None)
    with pytest.raises(ToolError, match=r"pip install 'cute-mla\[build\]'"):
        build_variants((GOOD,), 1, tmp_path)


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown architecture 'sm70'; supported: sm90, sm100"):
        build_all(["sm70"], OPS, 1, tmp_path)
    with pytest.raises(ValueError, match="unknown op 'conv'; supported: dense_decode, sparse_decode, sparse_prefill, dense_prefill, "):
        build_all(["sm90"], ["conv"], 1, tmp_path)


def test_the_closed_list_names_each_kernel_once() -> None:
    names = [variant.name for arch in ARCHS.values() for variant in closed_variants(arch)]
    assert len(names) == len(set(names))


def test_the_closed_list_has_every_op_for_every_architecture(arch: Arch) -> None:
    assert {variant.op for variant in closed_variants(arch)} == set(OPS)
    assert {variant.op for variant in closed_variants(arch, ["combine"])} == {"combine"}
    assert {variant.arch for variant in closed_variants(arch)} == {arch}
    for op in ATTENTION:
        assert {variant.module for variant in closed_variants(arch, [op])} == {f"cute_mla.kernels.{op}.{arch.name}"}


@pytest.mark.parametrize("op", ATTENTION)
def test_what_attention_kernels_allocate_of_tensor_memory(op: str, arch: Arch) -> None:
    """The sources declare it, the gates hold it against the PTX, the manifest records it."""
    for variant in closed_variants(arch, [op]):
        source = variant.source()
        assert source.tmem_columns == arch.tmem_columns
        assert set(source.expected) & {"HGMMA", "QGMMA", "UTCHMMA", "UTCQMMA"}
