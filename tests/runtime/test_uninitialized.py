"""Memory that nobody has written yet stays known as such between launches, and only for as long as that is true."""

from __future__ import annotations

import numpy as np
import torch

from cute_mla.runtime.arguments import Span
from cute_mla.runtime.simulated_device import _regions
from cute_mla.runtime.uninitialized import UninitializedMemory
from cute_mla.simulator.state.memory import GlobalMemory
from cute_mla.spec.tensor_map import TensorMap
from tests.support.params import int32s, pointers, tensor_maps


def bounds(tensor: torch.Tensor) -> tuple[int, int]:
    """Return first address and end."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


def known(undefined: UninitializedMemory, start: int, stop: int, write: slice | None = None) -> list[int] | None:
    """Return which bytes one launch takes for initialised, or None if all are. The launch writes a slice of the memory."""
    memory = GlobalMemory()
    undefined.register(memory, "memory", start, stop)
    buffer = memory.find(start, stop)
    assert buffer is not None
    before = None if buffer.valid is None else buffer.valid.tolist()
    if write is not None:
        assert buffer.valid is not None
        buffer.valid[write] = 1
    undefined.update(memory, start, stop)
    return before


def test_what_a_launch_writes_is_known_to_the_next() -> None:
    undefined, tensor = UninitializedMemory(), torch.zeros(2)
    assert known(undefined, *bounds(tensor)) is None
    undefined.declare(tensor)
    assert tensor.isnan().all()
    assert known(undefined, *bounds(tensor), write=slice(2, 4)) == [0] * 8
    assert known(undefined, *bounds(tensor)) == [0, 0, 1, 1, 0, 0, 0, 0]
    undefined.declare(tensor)
    assert known(undefined, *bounds(tensor)) == [0] * 8


def test_a_part_of_a_tensor_and_memory_around_it() -> None:
    undefined, whole = UninitializedMemory(), torch.zeros(16, dtype=torch.uint8)
    tensor = whole[4:12]
    undefined.declare(tensor)
    start, _ = bounds(whole)
    assert known(undefined, start + 6, start + 10, write=slice(0, 1)) == [0] * 4
    assert known(undefined, start, start + 16) == [1] * 4 + [0, 0, 1, 0, 0, 0, 0, 0] + [1] * 4


def test_forgotten_when_torch_writes() -> None:
    undefined, tensor = UninitializedMemory(), torch.zeros(2)
    undefined.declare(tensor)
    tensor.zero_()
    assert known(undefined, *bounds(tensor)) is None


def test_forgotten_with_the_tensor() -> None:
    undefined, tensor = UninitializedMemory(), torch.zeros(2)
    undefined.declare(tensor)
    start, stop = bounds(tensor)
    kept = np.asarray(tensor)
    del tensor
    assert known(undefined, start, stop) is None
    assert kept.nbytes == 8


def test_integers_and_tensors_that_are_not_followed() -> None:
    undefined = UninitializedMemory()
    integers, strided = torch.zeros(2, dtype=torch.int32), torch.zeros(4)[::2]
    with torch.inference_mode():
        inference = torch.zeros(2)
        for tensor in (integers, strided, inference):
            undefined.declare(tensor)
    assert integers.tolist() == [-1, -1]
    assert strided.isnan().all()
    assert inference.isnan().all()
    assert known(undefined, *bounds(strided)) is None
    assert known(undefined, *bounds(inference)) is None
    assert known(undefined, *bounds(integers)) == [0] * 8


def test_regions_are_what_the_arguments_refer_to() -> None:
    workspace = torch.zeros(64, dtype=torch.uint8)
    storage = torch.zeros(4, 6)
    left, right = storage[:, :2], storage[:, 3:5]
    empty = torch.zeros(0)
    lone = torch.zeros(3, dtype=torch.int32)
    cache = TensorMap("bf16", 1 << 44, (64, 4), (256,), (64, 4))
    params = (*pointers("low", "high", "left", "right", "empty", "lone"), *int32s("n"), *tensor_maps("cache"))
    args = (Span(workspace, 0, 32), Span(workspace, 32, 16), left, right, empty, lone, 7, cache)
    found = {name: (start, stop) for name, start, stop in _regions(params, args)}
    base = storage.data_ptr()
    assert found == {
        "low": (workspace.data_ptr(), workspace.data_ptr() + 32),
        "high": (workspace.data_ptr() + 32, workspace.data_ptr() + 48),
        "left+right": (base, base + (3 * 6 + 5) * 4),
        "lone": (lone.data_ptr(), lone.data_ptr() + 12),
        "cache": (1 << 44, (1 << 44) + 3 * 256 + 128),
    }
