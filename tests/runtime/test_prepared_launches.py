"""A call that is found again tells the driver what one that is checked anew does, to the byte, and keeps no tensor alive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from cute_mla.api import flash_mla_with_kvcache, get_mla_metadata
from cute_mla.ops import decode
from cute_mla.runtime import cuda_launches, tensor_map
from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.runtime.cuda_device import CudaDevice
from cute_mla.runtime.current import cpu_tensors_on
from cute_mla.runtime.device import SingleLaunches
from cute_mla.runtime.launch import CallSteps
from cute_mla.spec.arch import Arch
from tests.runtime.fake_driver import FakeDriver, RecordedLaunch, installed
from tests.support.right_calls import DECODE_CALLS


class PlainDevice(CudaDevice):
    """Prepares nothing: every launch takes its arguments from the tensors, one by one, as launches of other functions do."""

    def prepare(self, call: CallSteps) -> SingleLaunches:  # type: ignore[override]
        """Keep what to launch."""
        return SingleLaunches(self, call)


@pytest.fixture
def fake(arch: Arch, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """Yield a driver for a GPU of the architecture."""
    params = {kernel.entry: kernel.params for kernel in load_artifacts().manifest.kernels.values()}
    fake = FakeDriver(params, capability=arch.compute_capabilities[0], sm_count=8)
    with installed(fake, monkeypatch):
        yield fake


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return one entry for every call that was checked."""
    seen: list[Any] = []
    original = decode.prepare

    def recorded(*args: Any) -> Any:
        seen.append(args)
        return original(*args)

    monkeypatch.setattr(decode, "prepare", recorded)
    return seen


def launched(fake: FakeDriver, device: CudaDevice, arguments: dict[str, Any]) -> list[RecordedLaunch]:
    """Return the launches of a call."""
    before = len(fake.launches)
    with cpu_tensors_on(device):
        flash_mla_with_kvcache(**arguments)
    return fake.launches[before:]


def made(kind: str) -> dict[str, Any]:
    """Return arguments, whose plan is made on a device of its own."""
    with cpu_tensors_on(CudaDevice(0)):
        return dict(DECODE_CALLS[kind]())


def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of equal shape, strides and dtype at another address."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


TENSORS = ("q", "k_cache", "tile_scheduler_metadata", "num_splits", "out", "lse", "workspace")
OWN = {
    "dense": ("block_table", "cache_seqlens"),
    "dense_fp8": ("block_table", "cache_seqlens", "descale_q", "descale_k"),
    "sparse": ("indices", "topk_length", "attn_sink"),
    "sparse_extra": ("indices", "topk_length", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"),
}


@pytest.mark.parametrize(("kind", "moved"), [(kind, name) for kind in DECODE_CALLS for name in (*TENSORS, *OWN[kind], "all", "none")])
def test_arguments_are_those_of_a_call_that_is_checked_anew(fake: FakeDriver, checks: list[Any], kind: str, moved: str) -> None:
    arguments = made(kind)
    tensors = [name for name, value in arguments.items() if isinstance(value, torch.Tensor)]
    kept = CudaDevice(0)
    first = launched(fake, kept, arguments)
    changed = {**arguments, **{name: elsewhere(arguments[name]) for name in tensors if moved in (name, "all")}}
    again = launched(fake, kept, changed)
    assert len(checks) == 1, "the call was not found again"
    assert again == launched(fake, CudaDevice(0), changed) == launched(fake, PlainDevice(0), changed)
    assert (again == first) == (moved == "none")
    assert launched(fake, kept, arguments) == first, "and back"
    described = {(encoded.address, encoded.box) for encoded in fake.maps}
    assert len(described) == len(fake.maps), "one tensor was described in two ways"


@pytest.mark.parametrize("kind", ["dense", "sparse_extra"])
def test_the_stream_is_that_of_the_call(fake: FakeDriver, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, device = made(kind), CudaDevice(0)
    for stream in (77, 78, 0, 77):
        monkeypatch.setattr(cuda_launches, "current_stream", lambda index, stream=stream: stream)
        assert {launch.stream for launch in launched(fake, device, arguments)} == {stream}


@pytest.mark.parametrize("kind", ["dense", "sparse_extra"])
def test_the_context_is_that_of_the_device(fake: FakeDriver, kind: str) -> None:
    arguments, device = made(kind), CudaDevice(0)
    for current in (0, 1, None, 0):
        fake.current_device = current
        fake.calls.clear()
        launches = len(launched(fake, device, arguments))
        names = [name for name, _ in fake.calls if name.startswith(("cuCtxP", "cuLaunch"))]
        around = [] if current == 0 else ["cuCtxPushCurrent"], [] if current == 0 else ["cuCtxPopCurrent"]
        assert names[-launches - 2 * len(around[0]) :] == [*around[0], *["cuLaunchKernelEx"] * launches, *around[1]]


def test_a_refused_launch_is_an_error_and_leaves_the_call_as_it_was(fake: FakeDriver) -> None:
    arguments, device = made("dense"), CudaDevice(0)
    first = launched(fake, device, arguments)
    fake.fail["cuLaunchKernelEx"] = 700
    with pytest.raises(RuntimeError, match="CUDA_ERROR_ILLEGAL_ADDRESS"):
        launched(fake, device, arguments)
    fake.fail.clear()
    assert launched(fake, device, arguments) == first


def test_one_memory_as_two_caches(fake: FakeDriver) -> None:
    """Pages of 64 and of 128 keys at one address: two calls, each with its own tensor map."""
    arguments, device = made("dense"), CudaDevice(0)
    cache = arguments["k_cache"]
    both = [{**arguments, "k_cache": cache}, {**arguments, "k_cache": cache[:6].view(3, 128, 1, 576)}]
    expected = [launched(fake, PlainDevice(0), each) for each in both]
    assert expected[0][0].arguments["kv_map"] != expected[1][0].arguments["kv_map"]
    for _ in range(2):
        assert [launched(fake, device, each) for each in both] == expected


def test_more_caches_than_maps_are_kept_for(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_map, "_MAX_MAPS", 2)
    arguments, device = made("dense"), CudaDevice(0)
    caches = [elsewhere(arguments["k_cache"]) for _ in range(3)]
    for cache in (*caches, *caches):
        changed = {**arguments, "k_cache": cache}
        assert launched(fake, device, changed) == launched(fake, PlainDevice(0), changed)
    (call,) = device.call_cache.calls()
    assert all(len(maps) <= 2 for maps in call.launches._maps)


@pytest.mark.parametrize("kind", DECODE_CALLS)
@pytest.mark.parametrize("planned", ["tensors", "schedule"])
def test_cached_calls_keep_no_tensor_alive(fake: FakeDriver, kind: str, planned: str) -> None:
    device = CudaDevice(0)
    arguments = made(kind)
    if planned == "schedule":
        arguments |= {"tile_scheduler_metadata": get_mla_metadata()[0], "num_splits": None}
    for missing in ({}, {"out": None, "lse": None, "workspace": None}, {}):
        launched(fake, device, {**arguments, **missing})
    held = [StorageWeakRef(value.untyped_storage()) for value in arguments.values() if isinstance(value, torch.Tensor)]
    if planned == "schedule":
        held += [StorageWeakRef(tensor.untyped_storage()) for tensor in arguments["tile_scheduler_metadata"].plan]
    assert len(device.call_cache.calls()) >= 2
    assert not any(storage.expired() for storage in held)
    del arguments
    assert all(storage.expired() for storage in held)
