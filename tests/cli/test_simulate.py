"""`cute-mla simulate`: kernels that are written here, right ones and broken ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cute_mla.aot_build.tools import assemble
from cute_mla.cli import commands
from cute_mla.runtime.artifacts import load_artifacts
from tests.simulator.small_kernels import Kernel

# Each thread doubles its number through shared memory, and reads the one of a thread in the other warp.
EXCHANGE = """
ld.global.u32 %r1, [%rd2];
shl.b32 %r1, %r1, 1;
mov.u32 %r2, smem;
shl.b32 %r3, %r0, 2;
add.u32 %r4, %r2, %r3;
st.shared.u32 [%r4], %r1;
bar.sync 0;
xor.b32 %r3, %r3, 128;
add.u32 %r4, %r2, %r3;
ld.shared.u32 %r1, [%r4];
st.global.u32 [%rd2], %r1;
"""
THREADS = 64
KERNEL = Kernel(EXCHANGE, THREADS, 4 * THREADS)
BEFORE = [*range(THREADS)]
AFTER = [2 * (thread ^ 32) for thread in range(THREADS)]
LAUNCH: dict[str, Any] = {
    "grid": [1, 1, 1],
    "block": [THREADS, 1, 1],
    "smem_bytes": 4 * THREADS,
    "buffers": {"x": {"int32": BEFORE}},
    "parameters": [{"buffer": "x"}],
    "expected": {"x": {"int32": AFTER, "dtype": "int32"}},
}


def simulate(folder: Path, body: str = EXCHANGE, *options: str, code: bytes | None = None, **changes: Any) -> Result:
    """Write a kernel and its launch file, and run the command."""
    path = folder / "kernel.ptx"
    path.write_bytes(Kernel(body, THREADS, 4 * THREADS).text([0]).encode() if code is None else code)
    (folder / "launch.json").write_text(json.dumps(LAUNCH | changes))
    return CliRunner().invoke(commands, ["simulate", str(path), "--launch", str(folder / "launch.json"), *options])


def test_a_right_kernel_passes_under_every_schedule(tmp_path: Path) -> None:
    result = simulate(tmp_path, EXCHANGE, "--json", str(tmp_path / "found.json"))
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "found.json").read_text())
    assert [*document] == ["round_robin", "lazy", "random", "adversarial"]
    assert all(not run["findings"] and not run["differences"] and run["instructions"] > 20 for run in document.values())


def test_a_missing_barrier_is_found(tmp_path: Path) -> None:
    result = simulate(tmp_path, EXCHANGE.replace("bar.sync 0;", ""), "--schedule", "round_robin")
    assert result.exit_code == 1
    assert "race" in result.output
    assert "a load reads shared memory at 0x480 that warp 1 writes" in result.output


def test_a_wrong_result_is_named(tmp_path: Path) -> None:
    result = simulate(tmp_path, EXCHANGE.replace("shl.b32 %r1, %r1, 1", "shl.b32 %r1, %r1, 2"), "--schedule", "lazy")
    assert result.exit_code == 1
    assert "lazy: x: 63 of 64 elements differ, first [0]: 128, expected 64" in result.output


def test_a_tolerance_is_of_its_dtype(tmp_path: Path) -> None:
    near = {"x": {"int32": [number + 1 for number in AFTER], "dtype": "int32", "tolerance": 1}}
    assert simulate(tmp_path, EXCHANGE, "--schedule", "lazy", expected=near).exit_code == 0
    near["x"]["tolerance"] = 0.5
    assert simulate(tmp_path, EXCHANGE, "--schedule", "lazy", expected=near).exit_code == 1


def test_a_buffer_that_nobody_wrote_is_found(tmp_path: Path) -> None:
    undefined = {"x": {"bytes": 4 * THREADS, "fill": "undefined"}}
    result = simulate(tmp_path, EXCHANGE, "--schedule", "lazy", buffers=undefined, expected={})
    assert result.exit_code == 1
    assert "poison" in result.output


def test_a_kernel_that_does_not_end_is_ended(tmp_path: Path) -> None:
    for schedule in ("round_robin", "random", "adversarial"):
        result = simulate(tmp_path, "again:\nbra again;", "--schedule", schedule, "--most-instructions", "5000", expected={})
        assert result.exit_code == 1
        assert "the launch has not ended after 5,000 warp instructions" in result.output


def test_a_cubin_runs_by_its_machine_code(tmp_path: Path) -> None:
    artifacts = load_artifacts()
    entry = artifacts.manifest.kernels["split_plan_sm90_i32"]
    result = simulate(tmp_path, code=artifacts.cubin(entry))
    assert result.exit_code == 1
    assert f"1 arguments given, {entry.entry} takes {len(entry.params)}" in result.output


def test_a_kernel_of_a_cubin_with_several(tmp_path: Path) -> None:
    text = KERNEL.text([0])
    other = text[text.index(".visible") :].replace(".entry k(", ".entry other(").replace("shl.b32 %r1, %r1, 1", "shl.b32 %r1, %r1, 2")
    cubin = assemble(text + other, "sm_90a")
    if cubin is None:
        pytest.skip("ptxas is not installed")
    assert simulate(tmp_path, code=cubin, kernel="k").exit_code == 0
    result = simulate(tmp_path, code=cubin, kernel="other")
    assert result.exit_code == 1
    assert "first [0]: 128, expected 64" in result.output
    assert re.search(r"holds 2 kernels \['(k', 'other|other', 'k)'\], expected one\n", simulate(tmp_path, code=cubin).output)
    assert "expected one, third" in simulate(tmp_path, code=cubin, kernel="third").output


def test_a_timeline_of_a_cubin(tmp_path: Path) -> None:
    out = tmp_path / "timeline.json"
    assert "kernel.ptx is not a cubin" in simulate(tmp_path, EXCHANGE, "--timeline", str(out)).output
    cubin = assemble(KERNEL.text([0]), "sm_90a")
    if cubin is None:
        pytest.skip("ptxas is not installed")
    for roles, warps in (([], [0, 1]), ([["double", 0, 2]], [0])):
        result = simulate(tmp_path, EXCHANGE, "--schedule", "lazy", "--timeline", str(out), code=cubin, roles=roles)
        assert result.exit_code == 0, result.output
        clocks = int(re.search(r"([\d,]+) clocks on an H200, predicted", result.output)[1].replace(",", ""))  # type: ignore[index]
        events = json.loads(out.read_text())["traceEvents"]
        tracks = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
        assert tracks == [f"{'double' if roles else 'warps'}, warp {warp}" for warp in warps] + ["shared-memory port"]
        slices = [event for event in events if event["ph"] == "X"]
        assert clocks - 5 <= max(event["ts"] + event["dur"] for event in slices) <= clocks + 5
        waits = {event["args"]["cause"] for event in slices if event["cat"] == "wait"}
        assert {"LDG", "barrier"} <= waits  # the number, and the other warp


def test_a_launch_that_waits_for_ever_has_no_timeline(tmp_path: Path) -> None:
    cubin = assemble(KERNEL.text([0]).replace("bar.sync 0;", "bar.sync 0, 96;"), "sm_90a")
    if cubin is None:
        pytest.skip("ptxas is not installed")
    result = simulate(tmp_path, EXCHANGE, "--schedule", "lazy", "--timeline", str(tmp_path / "timeline.json"), code=cubin)
    assert result.exit_code == 1
    assert re.search(
        r"--timeline: launch cannot be timed: the clock stands still: CTA 0 warp 0 is at 0x\w+ BAR.*; deadlock: ", result.output
    )
    assert not (tmp_path / "timeline.json").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"code": b"\x00\xff no code"}, "neither a cubin"),
        ({"code": b"\x7fELF and no more"}, "appears truncated"),
        ({"body": "tcgen06.mma %r1;\nwgmmb.x %r2;"}, r"tcgen06\.mma(.|\n)*wgmmb\.x"),
        ({"block": [32, 1, 1]}, "the entry requires"),
        ({"kernel": "other"}, "entry 'other': the module has k"),
        ({"expected": {"y": {"dtype": "int32", "int32": [1]}}}, "no buffer is named 'y'; buffers: x"),
        ({"expected": {"x": {"dtype": "int8", "int32": [1]}}}, "dtype 'int8'; supported: bf16, fp16, float32, int32, uint8"),
        ({"expected": {"x": {"dtype": "int32", "int32": [0] * 65}}}, "are 260 bytes; supported: whole elements, 1 to the 256 bytes"),
    ],
)
def test_bad_input_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    result = simulate(tmp_path, **changes)
    assert result.exit_code == 1
    assert re.search(message, result.output), result.output
