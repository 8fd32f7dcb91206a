"""A decode call that was checked is not checked again, and every other call is; tests/fuzz/test_refusals.py has the wrong ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import cute_mla
from cute_mla.ops import decode
from cute_mla.spec.arch import Arch
from cute_mla.spec.dense_decode import FP8_CACHE
from tests.support.recording_device import RecordingDevice
from tests.support.right_calls import DECODE_CALLS, RightCall, given_call, planned


@pytest.fixture
def device(arch: Arch) -> Iterator[RecordingDevice]:
    with RecordingDevice(arch, sm_count=8).active() as device:
        yield device


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return one entry for every call that was checked."""
    seen: list[Any] = []
    original = decode.prepare

    def counted(*args: Any) -> Any:
        seen.append(args)
        return original(*args)

    monkeypatch.setattr(decode, "prepare", counted)
    return seen


def bytes_from(offset: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return a contiguous tensor, so many bytes behind an address that is a multiple of 64."""
    size = torch.Size(shape).numel() * dtype.itemsize
    memory = torch.zeros(size + 128, dtype=torch.uint8)
    start = -memory.data_ptr() % 64 + offset
    return memory[start : start + size].view(dtype).view(shape)


def dense() -> RightCall:
    """Return a dense call with everything given."""
    return given_call("dense")


@pytest.mark.parametrize("kind", ["dense", "sparse"])
@pytest.mark.parametrize("missing", ["", "out", "lse", "workspace"])
def test_a_call_like_the_one_before_is_not_checked(device: RecordingDevice, checks: list[Any], kind: str, missing: str) -> None:
    absent = {missing: None} if missing else {}
    for _ in range(3):
        DECODE_CALLS[kind]().run(**absent)
    assert len(checks) == 1
    decodes = [launch for launch in device.launches if "decode" in launch.kernel]
    assert len(decodes) == 3
    assert len({launch.args["q"].data_ptr() for launch in decodes} | {id(launch.args["q"]) for launch in decodes}) > 1


def test_a_schedule_object_is_planned_once_for_calls_that_are_found_again(device: RecordingDevice, checks: list[Any]) -> None:
    schedule, _ = cute_mla.get_mla_metadata()
    device.launches.clear()
    for _ in range(3):
        dense().run(**planned((schedule, None)))
    assert len(checks) == 2, "a call that makes the plan, and one that has it"
    for _ in range(3):
        dense().run(**planned(cute_mla.get_mla_metadata()))
    assert len(checks) == 2, "another schedule object"
    decodes = [launch.args["plan"] for launch in device.launches if "dense_decode" in launch.kernel]
    assert [plan is schedule.tile_scheduler_metadata for plan in decodes] == [True] * 3 + [False] * 3
    assert len({plan.data_ptr() for plan in decodes}) == 4


@pytest.mark.parametrize(("name", "pages"), [("k_cache", 64), ("extra_k_cache", 16)])
def test_an_address_that_was_wrong_is_wrong_after_a_call_that_was_right(device: RecordingDevice, name: str, pages: int) -> None:
    refused_after_a_right_call(device, "sparse_extra", **{name: bytes_from(8, 4, pages, 1, 656, dtype=torch.uint8)})


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"causal": True}, {"causal": 1}),
        ({"softmax_scale": 1.0}, {"softmax_scale": True}),
        ({"batch_invariant": True}, {"batch_invariant": 1}),
    ],
)
def test_arguments_that_are_equal_and_of_another_type(device: RecordingDevice, good: dict[str, Any], bad: dict[str, Any]) -> None:
    for given in (bad, good, bad):
        if given is good:
            dense().run(workspace=None, **given)
            continue
        with pytest.raises(ValueError, match=f"^{next(iter(bad))} is "):
            dense().run(workspace=None, **given)


def refused_after_a_right_call(device: RecordingDevice, kind: str, **bad: Any) -> None:
    """Make calls that are right, and the same but for what is bad."""
    DECODE_CALLS[kind]().run()
    launched = len(device.launches)
    good = DECODE_CALLS[kind]()
    planned = len(device.launches)
    for _ in range(2):
        with pytest.raises(ValueError, match="supported"):
            good.run(**bad)
    assert len(device.launches) == planned > launched, "a refused call was launched"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", ["q", "cache_seqlens", "workspace"])
def test_a_nested_tensor_is_refused_after_a_call_that_was_right(device: RecordingDevice, name: str) -> None:
    refused_after_a_right_call(device, "dense", **{name: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(4)])})


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("out", torch.zeros(2, 1, 64, 576, dtype=torch.bfloat16)),
        ("lse", torch.zeros(2, 64, 1, dtype=torch.bfloat16)),
        ("workspace", bytes_from(0, 64, dtype=torch.uint8)),
    ],
    ids=["out", "lse", "workspace"],
)
def test_a_result_that_is_wrong_is_wrong_after_a_call_that_had_none(device: RecordingDevice, name: str, bad: torch.Tensor) -> None:
    dense().run(**{name: None})
    with pytest.raises(ValueError, match=f"^{name} has"):
        dense().run(**{name: bad})


def test_a_tensor_of_a_plan_without_the_other_is_no_schedule(device: RecordingDevice) -> None:
    for _ in range(2):
        dense().run(**planned(cute_mla.get_mla_metadata()))
    with pytest.raises(ValueError, match="tile_scheduler_metadata is Tensor, num_splits NoneType; supported"):
        dense().run(num_splits=None)


def test_a_schedule_of_other_shapes_is_refused_by_a_call_that_was_made_before(device: RecordingDevice) -> None:
    """The page size changes neither the plan's tensors nor anything else that a call compares, but the cache."""
    schedules = {page: cute_mla.get_mla_metadata()[0] for page in (64, 128)}
    calls = {page: given_call("dense", page_size=page, table_pages=4) for page in schedules}
    for _ in range(2):
        for page, schedule in schedules.items():
            calls[page].run(**planned((schedule, None)))
    plans = [schedule.tile_scheduler_metadata for schedule in schedules.values()]
    assert plans[0] is not None
    assert plans[1] is not None
    assert plans[0].shape == plans[1].shape
    for _ in range(2):
        with pytest.raises(ValueError, match="planned for other shapes: page_size 64 after 128"):
            calls[64].run(**planned((schedules[128], None)))


@pytest.mark.parametrize("name", ["topk_length", "attn_sink"])
def test_operands_that_look_alike_are_told_apart(device: RecordingDevice, name: str) -> None:
    """One fp32 [16] or int32 [2] more or less, or another one of the same look, is another call."""
    DECODE_CALLS["sparse"]().run()
    DECODE_CALLS["sparse"]().run(**{name: None})
    decode = next(launch for launch in reversed(device.launches) if "sparse_decode" in launch.kernel)
    assert decode.args[name] is None
    assert decode.args[({"topk_length", "attn_sink"} - {name}).pop()] is not None


EXTRA = ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(
    ("kind", "names", "parameter"),
    [
        ("sparse_extra", ("topk_length",), "topk_length"),
        ("sparse_extra", ("attn_sink",), "attn_sink"),
        ("sparse_extra", ("extra_topk_length",), "extra_topk_length"),
        ("sparse_extra", EXTRA, "extra_cache"),
        ("dense_fp8", ("descale_q",), "descale_q"),
        ("dense_fp8", ("descale_k",), "descale_k"),
    ],
)
def test_what_may_be_absent_is_part_of_a_call(
    device: RecordingDevice, kind: str, names: tuple[str, ...], parameter: str, first: bool
) -> None:
    for given in (first, not first, first):
        DECODE_CALLS[kind]().run(**({} if given else dict.fromkeys(names)))
        decode = next(launch for launch in reversed(device.launches) if "_decode" in launch.kernel)
        assert (decode.args[parameter] is not None) == given


def test_one_scale_is_not_taken_for_the_other(device: RecordingDevice) -> None:
    call = given_call("dense", operands=FP8_CACHE)
    call.run()
    with pytest.raises(ValueError, match="descale_q is given with"):
        call.run(descale_q=call["descale_k"], descale_k=None)


@pytest.mark.parametrize(("name", "shape"), [("q", (2, 1, 64, 576)), ("out", (2, 1, 64, 512))])
def test_another_alignment_is_refused_after_a_call(device: RecordingDevice, name: str, shape: tuple[int, ...]) -> None:
    for offset in (0, 2, 0, 2):
        if offset:
            with pytest.raises(ValueError, match=rf"{name} .*a multiple of 2 bytes; supported: multiples of .* by .clone\(\)"):
                dense().run(**{name: bytes_from(offset, *shape)})
        else:
            dense().run(**{name: bytes_from(offset, *shape)})


@pytest.mark.parametrize(
    ("option", "value", "parameter"),
    [("softmax_scale", 0.5, "scale_log2"), ("empty_lse", float("-inf"), "empty_lse"), ("causal", True, "mask"), ("window", 5, "reach")],
)
def test_options_are_part_of_a_call(device: RecordingDevice, option: str, value: Any, parameter: str) -> None:
    def launched(**options: Any) -> Any:
        given_call("dense", s_q=2, h_q=8).run(**options)
        return next(launch.args[parameter] for launch in reversed(device.launches) if "dense_decode" in launch.kernel)

    first = launched()
    assert launched(**{option: value}) != first
    assert launched() == first
