"""Launches of other kernels: their descriptions, and one of our cubins timed as if it were a peer's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cute_mla.profiles.clock.constants import constants
from cute_mla.profiles.clock.peer import time_peer
from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.simulator.engine.launch_file import LaunchFile, LaunchFileError, parse_launch, read_launch_file
from cute_mla.spec.abi import ParamKind
from cute_mla.spec.merge_states import PARAMS

KERNEL = "merge_states_sm90_bf16_d512"
ROWS, COLUMNS = 8, 512
SMALL = {"grid": [1, 1, 1], "block": [32, 1, 1], "parameters": []}


def described(**changes: Any) -> LaunchFile:
    return parse_launch(SMALL | changes, Path(), "peer")


def merge_description(states: int = 2) -> dict[str, Any]:
    """Return a launch of merge_states over one or two states of 8 rows, as a user would write it."""
    entry = load_artifacts().manifest.kernels[KERNEL]
    state = ROWS * COLUMNS * 2
    sizes = {"state_out_0": state, "state_out_1": state, "out": state, "state_lse_0": 4 * ROWS, "state_lse_1": 4 * ROWS, "lse": 4 * ROWS}
    buffers = {name: {"bytes": size, "fill": "bf16"} for name, size in sizes.items()}
    numbers = {"tokens": 1, "heads": ROWS, "states": states}
    numbers |= {f"{name}_stride_token": ROWS * COLUMNS for name in ("state_out", "out")}
    numbers |= {f"{name}_stride_head": COLUMNS for name in ("state_out", "out")}
    numbers |= {f"{name}_stride_{what}": step for name in ("state_lse", "lse") for what, step in (("token", ROWS), ("head", 1))}
    kinds = {ParamKind.FLOAT32: "float32", ParamKind.INT32: "int32", ParamKind.INT64: "int64"}
    parameters: list[dict[str, Any]] = []
    for param in PARAMS:
        if param.kind is ParamKind.POINTER:
            parameters.append({"buffer": param.name} if param.name in buffers else {"zeros": 8})
        else:
            parameters.append({kinds[param.kind]: numbers.get(param.name, 0)})
    return {
        "name": "merge", "blocks": states, "grid": [1, 1, 1], "block": list(entry.block), "smem_bytes": entry.smem_bytes,
        "buffers": buffers, "parameters": parameters,
    }  # fmt: skip


def test_one_of_our_cubins_is_timed_as_a_peer(tmp_path: Path) -> None:
    paths = [tmp_path / f"merge{states}.json" for states in (1, 2)]
    for states, path in enumerate(paths, 1):
        path.write_text(json.dumps(merge_description(states)))
    artifacts = load_artifacts()
    cubin = artifacts.cubin(artifacts.manifest.kernels[KERNEL])
    found = time_peer(cubin, [read_launch_file(path) for path in paths], constants("H200"))
    assert found["name"] == "merge"
    assert not found["findings"]
    one, two = found["clocks"]
    assert 1_000 < one < two < 10_000  # dependent round trips to memory, and little else
    assert found["block_clocks"] == two - one
    assert time_peer(cubin, [read_launch_file(paths[0])], constants("H200"))["block_clocks"] is None
    assert [max(shares, key=shares.get) for shares in found["waits"].values()] == ["global loads"] * 2


def test_a_cubin_that_cannot_be_timed_is_refused() -> None:
    values = constants("H200")
    with pytest.raises(LaunchFileError, match="peer: not a 64-bit ELF file"):
        time_peer(b"no cubin", [described()], values)
    artifacts = load_artifacts()
    blackwell = artifacts.cubin(artifacts.manifest.kernels[KERNEL.replace("sm90", "sm100")])
    with pytest.raises(LaunchFileError, match="the cubin is of sm_100; a H200 runs sm_90"):
        time_peer(blackwell, [described()], values)
    with pytest.raises(LaunchFileError, match="0 arguments given"):
        time_peer(artifacts.cubin(artifacts.manifest.kernels[KERNEL]), [described(block=[256, 1, 1])], values)
