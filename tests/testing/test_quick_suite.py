"""The quick suite: its rule, its size, and that the kernels that are built for it are those that it launches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cute_mla.manifest import Manifest
from cute_mla.runtime.artifacts import FOLDER_VARIABLE
from cute_mla.spec.arch import ARCHS, Arch
from cute_mla.spec.mla import LATENT_DIMS
from cute_mla.testing.cases.base import BaseCase
from cute_mla.testing.operations import operation
from cute_mla.testing.runner import Target, run_case
from cute_mla.testing.suites import OPS, suite, suite_kernels
from cute_mla.testing.suites.quick import BUDGET_TILES, kernels_of
from tests.support.recording_device import RecordingDevice

QUICK: list[BaseCase] = [entry.case for op in OPS for entry in suite("quick", op, simulated=True)]


def test_it_launches_a_kernel_of_every_op_that_ships(arch: Arch) -> None:
    names = {name for op in OPS for name in suite_kernels("quick", op, arch)}
    parts = {"dense_prefill_backward": ("dense_prefill_dq", "dense_prefill_dkdv"), "indexer_topk": ("topk_indices",)}
    shipped = [part for op in OPS for part in parts.get(op, (op,))]
    for op in (*shipped, "split_plan", "combine"):
        assert any(name.startswith(f"{op}_{arch.name}_") for name in names), op
    assert {case.dtype for case in QUICK} == {"bf16", "fp16", "fp32", "e4m3"}


@pytest.mark.parametrize("op", OPS)
def test_it_is_drawn_from_the_smoke_cases_within_the_budget(op: str) -> None:
    cases = [entry.case for entry in suite("quick", op, simulated=True)]
    smoke = [entry.case for entry in suite("smoke", op, simulated=True)]
    assert cases == [case for case in smoke if case in cases]
    assert 2 <= len(cases) < len(smoke)
    assert sum(case.tiles for case in cases) < BUDGET_TILES


@pytest.mark.parametrize("case", QUICK, ids=lambda case: f"{case.op}-{case.id}")
def test_the_kernels_are_those_that_the_call_launches(case: BaseCase, arch: Arch) -> None:
    op = operation(case)
    tensors = op.make_tensors(case, "cpu")
    with RecordingDevice(arch, case.sm_count or arch.sm_count).active() as device:
        op.call(case, tensors, torch.zeros(op.workspace_bytes(case, tensors), dtype=torch.uint8))
    assert {launch.kernel for launch in device.launches} == kernels_of(case, arch)


def test_cases_without_rows_need_no_kernel(arch: Arch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their kernels are not among those that `make quick` builds."""
    Manifest({}).save(tmp_path)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    cases = [case for case in QUICK if not kernels_of(case, arch)]
    assert {case.op for case in cases} == set(OPS)
    for case in cases:
        assert all(record.passed for record in run_case(case, Target(arch.name, "sim"))), case.id


@pytest.mark.parametrize("op", OPS)
def test_it_has_keys_of_every_number_of_columns(op: str) -> None:
    """Such as 256 + 64 in dense decode. Every case runs on both architectures."""
    columns = [{getattr(entry.case, "d_qk", None) for entry in suite(name, op, simulated=True)} for name in ("quick", "smoke")]
    assert columns[0] == columns[1]
    assert op != "dense_decode" or columns[0] == set(LATENT_DIMS)


def test_it_needs_few_of_the_kernels() -> None:
    names = {name for arch in ARCHS.values() for op in OPS for name in suite_kernels("quick", op, arch)}
    every = {name for arch in ARCHS.values() for op in OPS for name in suite_kernels("smoke", op, arch)}
    assert names < every
    assert len(names) <= len(every) * 2 // 3
