"""A tensor without memory is refused by name in every function, in a first call and in a repeated one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import cute_mla
from cute_mla.cache import dequantise_cache, quantise_cache
from cute_mla.ops.overlap import check_no_overlap
from cute_mla.parallel import ContextShard
from tests.support.recording_device import RecordingDevice
from tests.support.right_calls import CASES, RightCall, given_call
from tests.support.zero_tensors import ints, zeros


class Wrapper(Tensor):
    """A wrapper subclass: a shape without a storage of its own."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{func} ran on a tensor without memory")


def wrapped(tensor: Tensor) -> Tensor:
    made: Tensor = Tensor._make_wrapper_subclass(Wrapper, tensor.shape, tensor.stride(), dtype=tensor.dtype)  # type: ignore[attr-defined]
    return made


def freed(tensor: Tensor) -> Tensor:
    """Return a tensor whose storage was freed."""
    tensor.untyped_storage().resize_(0)
    return tensor


def freed_view(tensor: Tensor) -> Tensor:
    """Return a view of a freed storage: its address is not null but its offset."""
    memory = torch.zeros(tensor.nbytes + 64, dtype=torch.uint8)
    view = memory[64:].view(tensor.dtype).view(tensor.shape)
    memory.untyped_storage().resize_(0)
    assert view.data_ptr() == 64
    return view


def shrunk(tensor: Tensor) -> Tensor:
    """Return a tensor whose storage ends before its last element."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(tensor.nbytes - 1)
    return tensor


def fake(tensor: Tensor) -> Tensor:
    """Return a tracer's stand-in."""
    return FakeTensorMode().from_tensor(tensor)


LOST: dict[str, Callable[[Tensor], Tensor]] = {
    "freed": freed,
    "freed view": freed_view,
    "shrunk": shrunk,
    "zero tensor": lambda tensor: torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype),
    "wrapper": wrapped,
    "fake": fake,
}
KEPT = [name for name in LOST if name != "shrunk"]  # a storage that was shrunk is noticed by the first call of its shapes


# The tensor that decides whether a call is traced.
_NOT_Q = {
    "merge": "outs",
    "topk": "logits",
    "index_write": "k",
    "write": "k_cache",
    "insert": "k_cache",
    "gather": "k_cache",
}
TRACED_BY = {call: _NOT_Q.get(call, "q") for call in CASES}


@pytest.fixture(autouse=True)
def device() -> Iterator[RecordingDevice]:
    with RecordingDevice(sm_count=8).active() as device:
        yield device


def tensors_of(call: str) -> list[str]:
    """Return the names of the tensors of a call."""
    with RecordingDevice(sm_count=8).active():
        return [name for name, value in given_call(call).items() if isinstance(value, Tensor)]


def refused(call: RightCall, name: str, lost: str) -> None:
    """Make a call with one tensor that has lost its memory."""
    call[name] = LOST[lost](call[name])
    with pytest.raises(
        ValueError, match=rf"^(?:{name}|{name}\[0\]) (?:has shape .* and .* storage|is a FakeTensor).*; supported: a tensor with"
    ):
        call.run()


PLACES = [(call, name) for call in CASES for name in tensors_of(call)]


@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize(("call", "name"), PLACES)
def test_refused_in_a_first_call(device: RecordingDevice, call: str, name: str, lost: str) -> None:
    if lost == "fake" and name == TRACED_BY[call]:
        pytest.skip("this stand-in makes the call a traced one, and torch refuses tensors with memory beside it")
    made = given_call(call)
    device.launches.clear()
    refused(made, name, lost)
    assert [launch for launch in device.launches if "split_plan" not in launch.kernel] == []


@pytest.mark.parametrize("lost", KEPT)
@pytest.mark.parametrize(("call", "name"), [place for place in PLACES if place[0] in ("dense", "dense_fp8", "sparse")])
def test_refused_in_a_repeated_call(device: RecordingDevice, call: str, name: str, lost: str) -> None:
    if lost == "fake" and name == TRACED_BY[call]:
        pytest.skip("this stand-in makes the call a traced one, and torch refuses tensors with memory beside it")
    for _ in range(2):
        given_call(call).run()
    refused(given_call(call), name, lost)
    given_call(call).run()


@pytest.mark.parametrize("lost", [lost for lost in LOST if lost != "fake"])  # which makes the call a traced one
def test_lengths_to_plan_for_are_refused(device: RecordingDevice, lost: str) -> None:
    with pytest.raises(ValueError, match=r"^cache_seqlens has shape .* and .* storage.*; supported: a tensor with"):
        cute_mla.get_mla_metadata(LOST[lost](ints(3)), 8, 1)
    assert [launch for launch in device.launches if "split_plan" not in launch.kernel] == []


@pytest.mark.parametrize("name", ["q", "k_cache", "block_table", "out", "lse", "workspace"])
def test_the_simulated_device_looks_at_the_storages_of_repeated_calls(name: str) -> None:
    with cute_mla.simulate("sm90", sm_count=2):
        call = given_call("dense")
        for _ in range(2):
            call.run()
        call[name] = shrunk(call[name])
        with pytest.raises(ValueError, match=f"^{name} has shape"):
            call.run()


@pytest.mark.parametrize("lost", [lost for lost in LOST if lost != "fake"])  # which these functions take: they may be traced
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("kv", lambda lose: quantise_cache(lose(zeros(1, 16, 1, 576)), "fp8_656")),
        ("out", lambda lose: quantise_cache(zeros(1, 16, 1, 576), "fp8_656", out=lose(zeros(1, 16, 1, 656, dtype=torch.uint8)))),
        ("cache", lambda lose: dequantise_cache(lose(zeros(1, 16, 1, 656, dtype=torch.uint8)), "fp8_656")),
        ("cache", lambda lose: dequantise_cache(lose(zeros(1, 16, 1, 576)), "latent")),
        ("lengths", lambda lose: ContextShard(0, 2).local_lengths(lose(ints(3)))),
        ("positions", lambda lose: ContextShard(0, 2).slots(lose(ints(3, 4)), ints(3, 2), 64)),
        ("block_table", lambda lose: ContextShard(0, 2).slots(ints(3, 4), lose(ints(3, 2)), 64)),
        ("positions", lambda lose: ContextShard(0, 2).local_indices(lose(ints(3, 1, 4)), ints(3, 2), 64)),
    ],
)
def test_refused_where_torch_computes(name: str, call: Callable[[Callable[[Tensor], Tensor]], Any], lost: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} has shape .* and .* storage"):
        call(LOST[lost])


def test_tensors_of_function_transforms_are_refused() -> None:
    """Their storages cannot be reached."""
    with pytest.raises(ValueError, match=r"^cache_seqlens has shape .* and no storage"):
        torch.func.vmap(lambda lengths: cute_mla.get_mla_metadata(lengths, 8, 1))(ints(2, 3))


def test_an_empty_tensor_needs_no_memory(device: RecordingDevice) -> None:
    for _ in range(2):
        given_call("dense").run(block_table=freed(ints(2, 0)))
    assert device.launches != []


def test_overlap_that_takes_too_long_to_decide_is_refused() -> None:
    """Rows of two tensors interleave in a way that numpy's search gives up on."""
    memory = torch.empty(22_000_000, dtype=torch.bfloat16)
    out = memory.as_strided((20, 40, 30, 8), (800_003, 18_377, 449, 9), 0)
    q = memory.as_strided((9, 20, 30, 8), (1_397_280, 438_560, 58_720, 9), 69)
    with pytest.raises(
        ValueError, match=r"^out and q interleave in memory, and whether they share bytes takes too long to decide; supported"
    ):
        check_no_overlap({"out": out}, {"q": q})
    check_no_overlap({"out": out}, {"q": torch.empty(3)})
