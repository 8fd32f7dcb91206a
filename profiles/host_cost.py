"""What a decode call costs on the host: Python and the driver's bindings, down to a driver that does nothing.

    python -m cute_mla.profiles.host_cost [FILE]        to FILE as JSON, too

From a checkout with built kernels; needs cuda-python and a C compiler, and no GPU. A call is flash_mla_with_kvcache with out,
lse, workspace and plan given, of a shape that was called before, on another cache each time, as the layers of a model have: two
launches, decode and combine. The least time of many short runs counts, because whatever else the machine does only adds to it.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from ..api import flash_mla_with_kvcache, get_mla_metadata, workspace_size
from ..runtime import cuda, cuda_launches
from ..runtime.device import cpu_tensors_on
from ..spec.mla import D_QK, D_V

GOAL_US = 6.0
_LAYERS = 8
_CALLS, _RUNS = 16, 2000  # calls of a run, and runs: short ones, so that some are left in peace
_STREAM = 0x5757
_LIBRARY = "libcuda.so.1"


def measure(device: cuda.CudaDevice) -> dict[str, Any]:
    """Microseconds of a call, and of parts of it: `launch_us` is the bindings' launch function, called twice in a call."""
    with cpu_tensors_on(device):
        calls = cycle(_calls())
        call_us = _least_us(lambda: next(calls)())
        (prepared,) = device.kept_calls.calls()
        driver_us = _least_us(prepared.launches.again())
    return {"call_us": call_us, "driver_us": driver_us, "python_us": _least_us(_fixed_work), "goal_us": GOAL_US}


def _calls() -> list[Callable[[], Any]]:
    """Calls of one shape, each on a cache of its own."""
    batch, heads, page, pages = 128, 128, 64, 64
    q = torch.zeros(batch, 1, heads, D_QK, dtype=torch.bfloat16)
    caches = [torch.zeros(pages, page, 1, D_QK, dtype=torch.bfloat16) for _ in range(_LAYERS)]
    table = torch.zeros(batch, pages, dtype=torch.int32)
    lengths = torch.zeros(batch, dtype=torch.int32)
    results: dict[str, Any] = {
        "out": q.new_empty(batch, 1, heads, D_V),
        "lse": torch.empty(batch, heads, 1),
        "workspace": torch.empty(workspace_size("dense_decode", batch=batch, s_q=1, h_q=heads, device="cpu"), dtype=torch.uint8),
    }
    plan = get_mla_metadata(lengths, heads, 1, heads)
    return [partial(flash_mla_with_kvcache, q, cache, table, lengths, D_V, *plan, **results) for cache in caches]


def _least_us(work: Callable[[], Any]) -> float:
    work()
    return min(timeit.repeat(work, number=_CALLS, repeat=_RUNS)) / _CALLS * 1e6


def _fixed_work() -> int:
    """Some Python, by which machines can be compared."""
    total = 0
    for i in range(100):
        total += i * i
    return total


def build_no_driver(folder: Path) -> None:
    """Compiles no_driver.c to libcuda.so.1. CalledProcessError if the compiler refuses, FileNotFoundError without one."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError("no C compiler (cc) to build a driver with that does nothing")
    source = Path(__file__).with_name("no_driver.c")
    command = [compiler, "-shared", "-fPIC", "-O1", f"-Wl,-soname,{_LIBRARY}", "-o", str(folder / _LIBRARY), str(source)]
    subprocess.run(command, capture_output=True, text=True, check=True)


def without_driver(folder: str) -> None:
    """Measures on the driver in a folder, and prints the figures. In a process of its own: the bindings load a driver once."""
    cuda_launches.current_stream = lambda index: _STREAM
    ctypes.CDLL(str(Path(folder) / _LIBRARY), ctypes.RTLD_GLOBAL)  # the bindings find it by its name
    print(json.dumps(measure(cuda.CudaDevice(0))))


def main(file: Path | None = None) -> None:
    """Times a decode call on the host, without a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        build_no_driver(Path(folder))
        program = f"from cute_mla.profiles.host_cost import without_driver; without_driver({folder!r})"
        answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    if file is not None:
        file.write_text(answer)
    for name, value in json.loads(answer).items():
        print(f"{name:12}{value:8.2f}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
