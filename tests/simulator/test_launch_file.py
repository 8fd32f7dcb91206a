"""Launch files, and kernels that are run by them."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cute_mla.simulator
from cute_mla.simulator.engine import launch_file as module
from cute_mla.simulator.engine.launch_file import LaunchFile, LaunchFileError, parse_launch, read_launch_file
from cute_mla.simulator.numerics.tma import decode_native_tensor_map

SMALL = {"grid": [1, 1, 1], "block": [32, 1, 1], "parameters": []}


def described(**changes: Any) -> LaunchFile:
    return parse_launch(SMALL | changes, Path(), "peer")


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
        ({"buffers": {"x": {"bytes": 2, "fill": "noise"}}}, "fill of buffer x is 'noise'; supported: zeros, ones, undefined, bf16"),
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
    with pytest.raises(LaunchFileError, match=message):
        described(**changes)


@pytest.mark.parametrize("text", ["", "[1]", '{"grid": [1, 1, 1]}', '{"grid": [1,1,1], "block": [32,1,1], "parameters": [{"hex": "xy"}]}'])
def test_a_file_that_is_no_description_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "launch.json"
    path.write_text(text)
    with pytest.raises(LaunchFileError, match=r"launch\.json: "):
        read_launch_file(path)
    with pytest.raises(LaunchFileError, match=r"none\.json: "):
        read_launch_file(tmp_path / "none.json")


def test_the_example_of_the_readme_is_a_description() -> None:
    text = (Path(cute_mla.simulator.__file__).parent / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    launch = parse_launch(json.loads(example), Path(), "example")
    assert (launch.name, launch.grid, [len(item) for item in launch.parameters]) == ("copy", (132, 1, 1), [8, 8, 4])
    known = set(re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE))
    listed = {name for cell in known for name in re.findall(r"`(\w+)`", cell)}
    assert listed >= module._KEYS
