"""Host time of a decode call: Python and the driver bindings, on a stub driver that does nothing.

    python -m cute_mla.profiles.host_cost [FILE]        also writes FILE as JSON

Runs from a checkout with built kernels; needs cuda-python and a C compiler, but no GPU. A call is flash_mla_with_kvcache with out,
lse and workspace given: two launches, decode and combine. Its shape was called before; its tensors differ from call to call, as those
of a model's layers do. The minimum over many short runs counts, because other load on the machine only adds time.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from cute_mla.api import flash_mla_with_kvcache, get_mla_metadata, workspace_size
from cute_mla.runtime import cuda_device, cuda_launches
from cute_mla.runtime.call_cache import CallCache
from cute_mla.runtime.current import cpu_tensors_on
from cute_mla.spec.cache_format import FP8_656
from cute_mla.spec.mla import D_QK, D_V

GOAL_US = 6.0
_LAYERS = 8
_HEADS, _PAGE, _PAGES = 128, 64, 64
_CALLS, _RUNS = 16, 2000  # calls of a run, and runs: short ones, so that some run undisturbed
_STREAM = 0x5757
_LIBRARY = "libcuda.so.1"


def measure(device: cuda_device.CudaDevice) -> dict[str, float]:
    """Return the microseconds of a call by kind, with figures to compare them with.

    call_us: dense, with a plan. schedule_us: dense, with a schedule object. sparse_us: sparse, over a 656-byte cache.
    turns_us: dense, alternating between two batch sizes. first_us: dense, of a shape that was not called before.
    driver_us: share of the driver bindings in each call: the current context and two launches.
    python_us: fixed Python work, which compares machines. goal_us: GOAL_US.
    """
    batch = 128
    with cpu_tensors_on(device):
        layers = {
            "call_us": [_dense(batch) for _ in range(_LAYERS)],
            "schedule_us": [_dense(batch, get_mla_metadata()) for _ in range(_LAYERS)],
            "sparse_us": [_sparse(batch) for _ in range(_LAYERS)],
            "turns_us": [_dense(batch - i % 2) for i in range(_LAYERS)],
        }
        figures = {name: _least_us(partial(_run_all, calls), _CALLS // _LAYERS) / _LAYERS for name, calls in layers.items()}
        figures["driver_us"] = _least_us(device.call_cache.calls()[0].launches.again())
        figures["first_us"] = _least_us(partial(_run_anew, device, _dense(batch)), 1)
    return {**figures, "python_us": _least_us(_fixed_work), "goal_us": GOAL_US}


def _run_all(calls: Sequence[Callable[[], Any]]) -> None:
    for call in calls:
        call()


def _run_anew(device: cuda_device.CudaDevice, call: Callable[[], Any]) -> None:
    device.call_cache = CallCache()
    call()


def _dense(batch: int, planned: tuple[Any, Any] | None = None) -> Callable[[], Any]:
    """Return a dense call that shares no tensor with other calls."""
    q, out, lse, workspace = _queries_and_results("dense_decode", batch)
    cache = torch.zeros(_PAGES, _PAGE, 1, D_QK, dtype=torch.bfloat16)
    table, lengths = torch.zeros(batch, _PAGES, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
    plan, splits = get_mla_metadata(lengths, _HEADS, 1, _HEADS) if planned is None else planned
    return lambda: flash_mla_with_kvcache(q, cache, table, lengths, D_V, plan, splits, out=out, lse=lse, workspace=workspace)


def _sparse(batch: int) -> Callable[[], Any]:
    """Return a sparse call that shares no tensor with other calls."""
    topk = 2048
    q, out, lse, workspace = _queries_and_results("sparse_decode", batch)
    cache = torch.zeros(_PAGES, _PAGE, 1, FP8_656.page_bytes(1), dtype=torch.uint8)
    indices = torch.zeros(batch, 1, topk, dtype=torch.int32)
    plan, splits = get_mla_metadata(torch.zeros(batch, dtype=torch.int32), _HEADS, 1, _HEADS, topk=topk)
    return lambda: flash_mla_with_kvcache(
        q, cache, None, None, D_V, plan, splits, is_fp8_kvcache=True, indices=indices, out=out, lse=lse, workspace=workspace
    )


def _queries_and_results(op: str, batch: int) -> tuple[torch.Tensor, ...]:
    q = torch.zeros(batch, 1, _HEADS, D_QK, dtype=torch.bfloat16)
    workspace = torch.empty(workspace_size(op, batch=batch, s_q=1, h_q=_HEADS, device="cpu"), dtype=torch.uint8)
    return q, q.new_empty(batch, 1, _HEADS, D_V), torch.empty(batch, _HEADS, 1), workspace


def _least_us(work: Callable[[], Any], number: int = _CALLS) -> float:
    work()
    return min(timeit.repeat(work, number=number, repeat=_RUNS)) / number * 1e6


def _fixed_work() -> int:
    """Run some fixed Python work, which compares machines."""
    total = 0
    for i in range(100):
        total += i * i
    return total


def build_stub_driver(folder: Path) -> None:
    """Compile stub_driver.c to libcuda.so.1. CalledProcessError if the compiler fails, FileNotFoundError without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError("no C compiler (cc) to build the stub driver")
    source = Path(__file__).with_name("stub_driver.c")
    command = [compiler, "-shared", "-fPIC", "-O1", f"-Wl,-soname,{_LIBRARY}", "-o", str(folder / _LIBRARY), str(source)]
    subprocess.run(command, capture_output=True, text=True, check=True)


def measure_on_stub(folder: str) -> None:
    """Measure on the stub driver in a folder, and print the figures. Needs its own process: the bindings load a driver only once."""
    cuda_launches.current_stream = lambda index: _STREAM
    ctypes.CDLL(str(Path(folder) / _LIBRARY), ctypes.RTLD_GLOBAL)  # the bindings find it by its name
    print(json.dumps(measure(cuda_device.CudaDevice(0))))


def main(file: Path | None = None) -> None:
    """Measure in a subprocess on a freshly built stub driver; print the figures, and write them to `file` as JSON if given."""
    with tempfile.TemporaryDirectory() as folder:
        build_stub_driver(Path(folder))
        program = f"from cute_mla.profiles.host_cost import measure_on_stub; measure_on_stub({folder!r})"
        answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    if file is not None:
        file.write_text(answer)
    for name, value in json.loads(answer).items():
        print(f"{name:12}{value:8.2f}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
