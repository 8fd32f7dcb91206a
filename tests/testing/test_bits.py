"""Bits of a GPU beside those of the simulated device. The GPU is a stand-in here: the simulated device, with a fault."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cute_mla.testing import bits
from cute_mla.testing.bits import Bits, compare_bits, compare_with_sim
from cute_mla.testing.operations import operation
from cute_mla.testing.operations.dense_decode.case import DenseDecodeCase
from cute_mla.testing.processes import Loss, Work, prepared
from cute_mla.testing.runner import Job, Target, start_worker

IDENTITY: dict[str, Any] = {"op": "an_op", "arch": "sm90", "case": "c", "kernel": "k", "sm_count": 3}
CASE = DenseDecodeCase(s_k=300, h_q=4, sm_count=1)  # keys that four SMs split
TARGET = Target("sm90", "cuda")
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("dtype", "gpu", "sim", "differing", "ulps", "where"),
    [
        (torch.bfloat16, [[1, 2], [3, 4]], [[1, 2], [3, 4]], 0, 0, ()),
        (torch.bfloat16, [[1, 2], [3, 1]], [[1, 2], [3, 1 + 2**-7]], 1, 1, (1, 1)),
        (torch.bfloat16, [[1, 2], [3, 1]], [[1 - 2**-7, 2], [3, 1]], 1, 2, (0, 0)),
        (torch.float16, [[1, 2.0**-24]], [[1 + 2**-10, -(2.0**-24)]], 2, 2, (0, 1)),
        (torch.float32, [[1, 1]], [[1 + 3 * 2**-23, 1]], 1, 3, (0, 0)),
        (torch.float32, [[0.0, -1]], [[-0.0, -1 - 2**-22]], 2, 2, (0, 1)),
        (torch.float32, [[NAN, INF]], [[NAN, NAN]], 1, 1 << 22, (0, 1)),
        (torch.float32, [[NAN, 1]], [[-NAN, 1]], 1, 0, (0, 0)),
        (torch.float8_e4m3fn, [[1, 2]], [[1, 2.25]], 1, 1, (0, 1)),
        (torch.int32, [[7, -1]], [[5, -1]], 1, 2, (0, 0)),
        (torch.float32, [[]], [[]], 0, 0, ()),
    ],
)
def test_distances_are_in_units_in_the_last_place(
    dtype: torch.dtype, gpu: list[list[float]], sim: list[list[float]], differing: int, ulps: int, where: tuple[int, ...]
) -> None:
    found = compare_bits(torch.tensor(gpu).to(dtype), torch.tensor(sim).to(dtype), IDENTITY)
    assert (found.status, found.differing, found.ulps, found.where) == ("different" if differing else "equal", differing, ulps, where)
    assert found.elements == sum(map(len, gpu))


def test_operands_reach_the_gpu_with_their_strides_and_storages() -> None:
    tensors = operation(CASE).make_tensors(replace(CASE, outputs="strided", q_layout="sliced"), "cpu")
    loaded = bits._loaded(bits._saved(tensors))
    assert loaded.q.stride() == tensors.q.stride() != loaded.q.contiguous().stride()
    out = loaded.output_buffers["out"]
    assert out.tensor.stride() == tensors.output_buffers["out"].tensor.stride()
    assert out.tensor.untyped_storage().data_ptr() == out.storage.untyped_storage().data_ptr()


def answer_with_a_fault(job: Job) -> tuple[bytes | Loss, bool]:
    """Take the place of a GPU of four SMs: change an element, or fail on fp16."""
    case, target, reduced = job
    if case.dtype == "fp16":
        return Loss("faulted", "illegal"), False
    answer, fit = bits.results_of((replace(case, sm_count=4), replace(target, kind="sim"), reduced))
    assert isinstance(answer, bytes), answer
    out, lse = bits._loaded(answer)
    lse[0, 3, 0] = torch.nextafter(lse[0, 3, 0], torch.tensor(INF))
    return bits._saved([out, lse]), fit


def test_each_result_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: SimpleNamespace(multi_processor_count=4))
    far = replace(CASE, outputs="far_requests", batch=2)
    jobs: list[Job] = [(case, TARGET, "") for case in (CASE, replace(CASE, dtype="fp16"), far)]
    found = dict(compare_with_sim(jobs, Work(partial(prepared, start_worker, answer_with_a_fault)), lambda case: None))
    out, lse = found[0]
    kernel = "dense_decode_sm90_bf16_cluster1"
    assert out == Bits("dense_decode", "sm90", CASE.id, kernel, 4, "equal", result="out", elements=4 * 512)
    assert (lse.result, lse.status, lse.elements, lse.differing, lse.ulps, lse.where) == ("lse", "different", 4, 1, 1, (0, 3, 0))
    assert [(one.status, one.reason, one.result) for one in found[1]] == [("faulted", "illegal", "")]
    assert [(one.status, one.reason) for one in found[2]] == [("skipped", "its operands span gigabytes")]


def test_an_error_that_stays_on_the_gpu_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def stay() -> None:
        raise RuntimeError("an illegal address\nand more")

    monkeypatch.setattr(bits, "touch_gpu", stay)
    assert bits.results_of((CASE, TARGET, "")) == (Loss("faulted", "RuntimeError: an illegal address"), False)
    monkeypatch.setattr(bits, "touch_gpu", lambda: None)
    monkeypatch.setattr(bits, "_loaded", lambda *_: stay())
    assert bits.results_of((CASE, TARGET, "")) == (Loss("failed", "RuntimeError: an illegal address"), True)
