"""The whole way in small: the test kernel is built, recorded, loaded and launched on the simulated device, and its faults found."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cute_mla
from cute_mla.manifest import Manifest
from cute_mla.spec.tensor_map import TensorMap
from tests.aot_build.tma_copy import GOOD, TILE

ROWS = 5 * TILE
FIRST_ROW = 7
TILES = 3
SCHEDULES = ["round_robin", "lazy", "random", "adversarial"]


def copy(schedule: str = "round_robin", on_finding: str = "raise", rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Copy TILES tiles from FIRST_ROW on; return source, destination and findings."""
    src = torch.randn(rows, TILE, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    dst = torch.full((TILES * TILE, TILE), float("nan"), dtype=torch.bfloat16)
    described = TensorMap("bf16", src.data_ptr(), (TILE, rows), (2 * TILE,), (TILE, TILE))
    with cute_mla.simulate("sm90", schedule=schedule, on_finding=on_finding) as device:
        device.launch(device.kernel(GOOD.op, GOOD.config.name), (TILES, 1, 1), [described, dst, FIRST_ROW])
    return src, dst, [str(finding) for finding in device.findings]


@pytest.fixture
def artifacts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the built test kernel, where the runtime looks for it."""
    monkeypatch.setenv("CUTE_MLA_ARTIFACTS", str(folder))
    return folder


def plant(folder: Path, old: str, new: str) -> None:
    """Change the kernel's PTX, and the manifest with it."""
    manifest = Manifest.load(folder)
    entry = manifest.kernels[GOOD.name]
    text = (folder / entry.ptx).read_text()
    assert text.count(old) == 1
    (folder / entry.ptx).write_text(text.replace(old, new))
    changed = replace(entry, ptx_sha256=hashlib.sha256(text.replace(old, new).encode()).hexdigest())
    Manifest({GOOD.name: changed}).save(folder)


@pytest.mark.usefixtures("artifacts")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_copy_is_exact_under_every_schedule(schedule: str) -> None:
    src, dst, findings = copy(schedule)
    assert torch.equal(dst, src[FIRST_ROW : FIRST_ROW + TILES * TILE])
    assert findings == []


@pytest.mark.usefixtures("artifacts")
def test_rows_past_the_end_of_the_tensor_map_are_zero() -> None:
    rows = FIRST_ROW + 2 * TILE + 10
    src, dst, _ = copy(rows=rows)
    assert torch.equal(dst[: rows - FIRST_ROW], src[FIRST_ROW:])
    assert torch.equal(dst[rows - FIRST_ROW :], torch.zeros_like(dst[rows - FIRST_ROW :]))


def test_a_missed_wait_is_found(artifacts: Path) -> None:
    """The other parity is that of the phase before, which is over: the wait returns at once, and smem is read too early."""
    plant(artifacts, "], 0, 10000000;", "], 1, 10000000;")
    _, _, findings = copy("lazy", on_finding="collect")
    assert findings


def test_a_wait_for_bytes_that_never_come_is_a_deadlock_with_the_barriers_name(artifacts: Path) -> None:
    plant(artifacts, ", 8192;", ", 8320;")
    with pytest.raises(cute_mla.SimulationError, match="loaded") as failure:
        copy()
    assert "tma_copy_sm90_bf16 on grid (3, 1, 1)" in str(failure.value)


def test_a_write_past_the_destination_is_found(artifacts: Path) -> None:
    loaded = f"[{GOOD.name}_0_param_1];"
    register = re.search(rf"(%rd\d+), {re.escape(loaded)}", (artifacts / f"{GOOD.name}.ptx").read_text())
    assert register is not None
    plant(artifacts, loaded, f"{loaded} add.s64 {register[1]}, {register[1]}, 64;")
    _, _, findings = copy(on_finding="collect")
    assert any("dst" in finding for finding in findings), findings
