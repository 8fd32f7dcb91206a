"""Bits of a GPU's results beside those of the simulated device with as many SMs, for the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from ..spec.arch import ARCHS
from .cases.base import BaseCase
from .cases.far import FAR_DIMENSIONS
from .operations import operation
from .processes import Loss, Work, prepared
from .runner import GPU_WORK, SIMULATED_WORK, Job, brief, deal, kernel_of, run_once, start_on_gpu, start_worker, touch_gpu

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Bits:
    """Comparison of one result of a case, as `verify --against sim --json` writes it.

    status: "equal" or "different" bits, or "hung", "faulted", "died", "failed" or "skipped" for a case without a comparison, whose `result`
    is empty. differing: elements with other bits. ulps: the greatest distance in units in the last place, of integers the difference; a NaN
    lies beyond infinity. where: the index of that element; gpu, sim: its values as text.
    """

    op: str
    arch: str
    case: str
    kernel: str
    sm_count: int
    status: str
    reason: str = ""
    result: str = ""
    elements: int = 0
    differing: int = 0
    ulps: int = 0
    where: tuple[int, ...] = ()
    gpu: str = ""
    sim: str = ""


def compare_with_sim(jobs: Sequence[Job], gpu: Work, on_start: Callable[[BaseCase], None]) -> Generator[tuple[int, list[Bits]], None, None]:
    """Run jobs for a GPU there, then on the simulated device; yield the index and the comparisons of each as it ends.

    gpu: what processes do on the GPU, such as ON_GPU.
    """
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    chosen: list[int] = []
    for index, (case, _, _) in enumerate(jobs):
        if why := "its operands span gigabytes" if _is_far(case) else "" if case.results_defined else "its results are undefined":
            yield index, [_not_compared(jobs[index], sm_count, Loss("skipped", why))]
        else:
            chosen.append(index)
    results: dict[int, bytes] = {}
    for position, answer in deal([jobs[index] for index in chosen], gpu, on_start):
        if isinstance(answer, Loss):
            yield chosen[position], [_not_compared(jobs[chosen[position]], sm_count, answer)]
        else:
            results[chosen[position]] = answer
    order = list(results)
    simulated = [(replace(case, sm_count=sm_count), replace(target, kind="sim"), why) for case, target, why in map(jobs.__getitem__, order)]
    for position, answer in deal(simulated, ON_SIM, on_start):
        job, index = jobs[order[position]], order[position]
        if isinstance(answer, Loss):
            loss = replace(answer, reason=f"on the simulated device: {answer.reason}")
            yield index, [_not_compared(job, sm_count, loss)]
        else:
            pairs = zip(operation(job[0]).bounds(job[0]), _loaded(results.pop(index)), _loaded(answer), strict=True)
            yield index, [replace(compare_bits(x, y, _identity(job, sm_count)), result=name) for name, x, y in pairs]


def compare_bits(gpu: Tensor, sim: Tensor, identity: dict[str, Any]) -> Bits:
    """Compare two results of equal shape and dtype. Two NaN have no distance."""
    first, second = _ordered(gpu).flatten(), _ordered(sim).flatten()
    distances = (first - second).abs()
    if gpu.is_floating_point():
        distances[(gpu.float().isnan() & sim.float().isnan()).flatten()] = 0
    differing = int((_integers(gpu) != _integers(sim)).sum())
    if not differing:
        return Bits(**identity, status="equal", elements=gpu.numel())
    worst = int(distances.argmax())
    where = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), gpu.shape))
    return Bits(
        **identity,
        status="different",
        elements=gpu.numel(),
        differing=differing,
        ulps=int(distances[worst]),
        where=where,
        gpu=str(gpu[where].item()),
        sim=str(sim[where].item()),
    )


def _integers(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_SIGNED[tensor.element_size()]) if tensor.is_floating_point() else tensor


def _ordered(tensor: Tensor) -> Tensor:
    """Return int64 that rise by one from a number to the next one of its dtype; 0 for both zeros."""
    bits = _integers(tensor).long()
    if not tensor.is_floating_point():
        return bits
    return torch.where(bits < 0, -(1 << 8 * tensor.element_size() - 1) - bits, bits)


def results_of(job: Job) -> tuple[bytes | Loss, bool]:
    """Run a case once, with operands made on the CPU; return its saved results, and whether the process can go on."""
    case, target, _ = job
    on_gpu = target.kind == "cuda"
    answer: bytes | Loss
    try:
        tensors = operation(case).make_tensors(case, "cpu")
        if on_gpu:
            tensors = _loaded(_saved(tensors), "cuda")
        outcome = run_once(case, target, tensors, None if on_gpu else target.schedules[0])
        answer = _saved([result.cpu() for result in outcome.results])
    except Exception as error:
        answer = Loss("failed", brief(error))
    if on_gpu:
        try:
            touch_gpu()
        except Exception as error:
            return Loss("faulted", brief(error)), False
    return answer, True


ON_GPU = replace(GPU_WORK, make=partial(prepared, start_on_gpu, results_of))
ON_SIM = replace(SIMULATED_WORK, make=partial(prepared, start_worker, results_of))


def _saved(value: object) -> bytes:
    """Return an object with its tensors, whose strides and shared storages stay."""
    file = BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _loaded(data: bytes, device: str = "cpu") -> Any:
    return torch.load(BytesIO(data), map_location=device, weights_only=False)


def _is_far(case: BaseCase) -> bool:
    return any(getattr(case, field.name) in FAR_DIMENSIONS for field in fields(case))


def _identity(job: Job, sm_count: int) -> dict[str, Any]:
    case, target, _ = job
    return {"op": case.op, "arch": target.arch, "case": case.id, "kernel": kernel_of(case, ARCHS[target.arch]), "sm_count": sm_count}


def _not_compared(job: Job, sm_count: int, loss: Loss) -> Bits:
    return Bits(**_identity(job, sm_count), status=loss.status, reason=loss.reason)
