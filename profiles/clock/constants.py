"""Constants of the clock, from the tables [clock.*] of definitions/machines.toml: each with a nominal value, a range and a source.

A value of a table [measured.*] replaces that of its GPU, and has no range.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from cute_mla.spec.arch import ARCHS

FILE = Path(__file__).resolve().parents[1] / "definitions" / "machines.toml"
NOMINAL, FAST, SLOW = "value", "fast", "slow"


@dataclass(frozen=True)
class Constants:
    """Timing of one GPU. *_clocks: clocks of the SM that a unit is held. *_latency: clocks from issue, or arrival, to the result.

    The meaning of each constant stands with its source in the file.
    """

    gpu: str
    arch: str
    sm_count: int
    # issue
    alu_clocks: int
    fma_clocks: int
    multiply_clocks: int
    convert_clocks: int
    mufu_clocks: int
    uniform_clocks: int
    memory_issue_clocks: int
    branch_clocks: int
    operand_read_clocks: int
    mufu_latency: int
    shuffle_latency: int
    special_latency: int
    constant_latency: int
    fence_clocks: int
    # shared memory
    shared_latency: int
    shared_bytes: int
    store_read_clocks: int
    memory_queue_clocks: int
    port_slack_clocks: int
    # tensor core
    product_flops: int
    product_tail: int
    product_tail_registers: int
    product_depth: int
    product_depth_registers: int
    tensor_bytes: int
    tensor_latency: int
    commit_latency: int
    # barriers
    arrive_latency: int
    phase_latency: int
    barrier_latency: int
    remote_latency: int
    remote_bytes: float
    cluster_latency: int
    # copies and memory
    copy_issue_clocks: int
    gather_issue_clocks: int
    copy_l2_latency: int
    copy_hbm_latency: int
    multicast_latency: int
    l1_latency: int
    l2_latency: int
    hbm_latency: int
    l1_bytes: int
    l2_bytes: float
    hbm_bytes: float
    # the grid and the clock
    boost_ghz: float
    middle_ghz: float
    loaded_ghz: float
    boost_use: float
    middle_use: float
    loaded_use: float
    l2_mbytes: float
    launch_us: float
    dependent_us: float
    cta_start_clocks: int


@cache
def _document() -> dict[str, Any]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def gpus() -> tuple[str, ...]:
    """Return the GPUs that the clock knows."""
    return tuple(name for name in _document()["clock"] if name not in ("common", *ARCHS))


def gpu_of_device(device: str) -> str | None:
    """Return the GPU whose name is part of a device's ("NVIDIA H200"); None if the clock has none."""
    return next((gpu for gpu in gpus() if gpu in device), None)


def constants(gpu: str, end: str = NOMINAL) -> Constants:
    """Return the constants of a GPU: nominal, or every one at its fast or its slow end. ValueError for an unknown GPU."""
    entries = _entries(gpu)
    plain = {"gpu": gpu, "arch": entries["arch"], "sm_count": entries["sm_count"]}
    names = [field.name for field in fields(Constants) if field.name not in plain]
    wrong = set(names) ^ (entries.keys() - set(plain))
    if wrong:
        raise ValueError(f"clock of {gpu}: {', '.join(sorted(wrong))} missing or unknown; constants: {', '.join(names)}")
    return Constants(**plain, **{name: _value(gpu, name, entries[name], end) for name in names})


def sources(gpu: str) -> dict[str, str]:
    """Return the origin of each constant of a GPU."""
    return {name: entry["source"] for name, entry in _entries(gpu).items() if isinstance(entry, dict)}


def _entries(gpu: str) -> dict[str, Any]:
    """Return the tables of a GPU, the later ones first: of both architectures, of its own, of the GPU, and what was measured."""
    document = _document()
    clock = document["clock"]
    if gpu not in gpus():
        raise ValueError(f"the clock has no GPU {gpu!r}; supported: {', '.join(gpus())}")
    own = clock[gpu]
    return {**clock["common"], **clock[own["arch"]], **own, **document.get("measured", {}).get(gpu, {})}


def _value(gpu: str, name: str, entry: Mapping[str, Any], end: str) -> Any:
    if not entry.get("source"):
        raise ValueError(f"clock of {gpu}: {name} has no source")
    if NOMINAL not in entry or entry.keys() - {NOMINAL, FAST, SLOW, "source"}:
        given = ", ".join(sorted(entry))
        raise ValueError(f"clock of {gpu}: {name} has {given}; supported: value, optionally with fast or slow, and source")
    return entry.get(end, entry[NOMINAL])
