"""Launches of other kernels: their descriptions, and one of our cubins timed as if it were a peer's."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cute_mla.profiles.clock import peer_launch as module
from cute_mla.profiles.clock.constants import constants
from cute_mla.profiles.clock.peer import time_peer
from cute_mla.profiles.clock.peer_launch import PeerError, PeerLaunch, peer_launch, read_peer_launch
from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.simulator.numerics.tma import decode_native_tensor_map
from cute_mla.spec.abi import ParamKind
from cute_mla.spec.merge_states import PARAMS

KERNEL = "merge_states_sm90_bf16_d512"
ROWS, COLUMNS = 8, 512
SMALL = {"grid": [1, 1, 1], "block": [32, 1, 1], "parameters": []}


def described(**changes: Any) -> PeerLaunch:
    return peer_launch(SMALL | changes, Path(), "peer")


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


def test_parameters_are_the_bytes_that_a_launch_passes() -> None:
    launch = described(
        buffers={"x": {"bytes": 4096, "fill": "bf16"}, "n": {"int32": [7, -1]}},
        parameters=[
            {"buffer": "x", "offset": 16},
            {"int32": -3},
            [{"hex": "0102"}, {"zeros": 2}, {"float32": 0.5}, {"int64": 5}],
            {"tensor_map": {"buffer": "x", "dtype": "bf16", "dims": [64, 32], "strides": [128], "box": [64, 8], "swizzle": "128B"}},
        ],
    )
    place = launch.memory["x"].ctypes.data
    assert place % 256 == 0
    assert launch.parameters[0] == struct.pack("<Q", place + 16)
    assert launch.parameters[1] == struct.pack("<i", -3)
    assert launch.parameters[2] == b"\x01\x02\0\0" + struct.pack("<fq", 0.5, 5)
    tensor_map = decode_native_tensor_map(launch.parameters[3])
    assert (tensor_map.address, tensor_map.dims, tensor_map.box) == (place, (64, 32), (64, 8))
    assert launch.memory["n"].view(np.int32).tolist() == [7, -1]
    values = (launch.memory["x"].view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    assert 0.08 < float(values.std()) < 0.12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid": [1, 1]}, r"grid is \[1, 1\]; supported: three whole numbers"),
        ({"block": [0, 1, 1]}, "block is"),
        ({"smem_bytes": -1}, "smem_bytes is -1"),
        ({"warps": 4}, "the description has warps; supported: block"),
        ({"buffers": {"x": {"bytes": 2, "hex": "010203"}}}, "3 bytes of contents in 2 bytes"),
        ({"buffers": {"x": {"hex": "01", "int32": [1]}}}, "buffer x has hex and int32"),
        ({"buffers": {"x": {"bytes": 2, "fill": "noise"}}}, "fill of buffer x is 'noise'; supported: zeros, ones, bf16"),
        ({"parameters": [{"buffer": "y"}]}, "no buffer is named 'y'; buffers: none"),
        ({"parameters": [{"int8": 1}]}, "a parameter has int8; supported: buffer, tensor_map, hex"),
        ({"parameters": [7]}, "a parameter has 7"),
        (
            {"buffers": {"x": {"bytes": 64}}, "parameters": [{"buffer": "x", "offset": 64}]},
            "offset 64 lies beyond the 64 bytes of buffer x",
        ),
        (
            {"buffers": {"x": {"bytes": 64}}, "parameters": [{"tensor_map": {"buffer": "x", "dtype": "bf16", "dims": [1]}}]},
            "a tensor map: strides is missing",
        ),
    ],
)
def test_a_wrong_description_says_what_is_supported(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PeerError, match=message):
        described(**changes)


@pytest.mark.parametrize("text", ["", "[1]", '{"grid": [1, 1, 1]}', '{"grid": [1,1,1], "block": [32,1,1], "parameters": [{"hex": "xy"}]}'])
def test_a_file_that_is_no_description_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "launch.json"
    path.write_text(text)
    with pytest.raises(PeerError, match=r"launch\.json: "):
        read_peer_launch(path)
    with pytest.raises(PeerError, match=r"none\.json: "):
        read_peer_launch(tmp_path / "none.json")


def test_one_of_our_cubins_is_timed_as_a_peer(tmp_path: Path) -> None:
    paths = [tmp_path / f"merge{states}.json" for states in (1, 2)]
    for states, path in enumerate(paths, 1):
        path.write_text(json.dumps(merge_description(states)))
    artifacts = load_artifacts()
    cubin = artifacts.cubin(artifacts.manifest.kernels[KERNEL])
    found = time_peer(cubin, [read_peer_launch(path) for path in paths], constants("H200"))
    assert found["name"] == "merge"
    assert not found["findings"]
    one, two = found["clocks"]
    assert 1_000 < one < two < 10_000  # dependent round trips to memory, and little else
    assert found["block_clocks"] == two - one
    assert time_peer(cubin, [read_peer_launch(paths[0])], constants("H200"))["block_clocks"] is None
    assert [max(shares, key=shares.get) for shares in found["waits"].values()] == ["global loads"] * 2


def test_a_cubin_that_cannot_be_timed_is_refused() -> None:
    values = constants("H200")
    with pytest.raises(PeerError, match="peer: not a 64-bit ELF file"):
        time_peer(b"no cubin", [described()], values)
    artifacts = load_artifacts()
    blackwell = artifacts.cubin(artifacts.manifest.kernels[KERNEL.replace("sm90", "sm100")])
    with pytest.raises(PeerError, match="the cubin is of sm_100; a H200 runs sm_90"):
        time_peer(blackwell, [described()], values)
    with pytest.raises(PeerError, match="0 arguments given"):
        time_peer(artifacts.cubin(artifacts.manifest.kernels[KERNEL]), [described(block=[256, 1, 1])], values)


def test_the_example_of_the_readme_is_a_description() -> None:
    text = (Path(module.__file__).parent / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    launch = peer_launch(json.loads(example), Path(), "example")
    assert (launch.name, launch.grid, [len(item) for item in launch.parameters]) == ("copy", (132, 1, 1), [8, 8, 4])
    known = set(re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE))
    listed = {name for cell in known for name in re.findall(r"`(\w+)`", cell)}
    assert listed >= module._KEYS
