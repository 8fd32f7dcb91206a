"""Constants of the clock by the microbenchmarks of a GPU: from their JSON lines to a table [measured.*] of definitions/machines.toml."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from .clock.constants import Constants, gpu_of_device, gpus

DEVICE, ERROR = "device", "ERROR"  # lines that are no measurements
HEAD = "# [H] Measured by profiles/microbenchmarks; these replace the values above. Written by python -m cute_mla.profiles.results.\n"


@dataclass(frozen=True)
class Formula:
    """A constant as (measurement - minus - less) / over. less: clocks of the chain's other instructions."""

    measurement: str
    minus: str = ""
    over: str = ""
    less: int = 0

    def value(self, measured: Mapping[str, float]) -> float:
        """Return the constant. KeyError for a measurement that is missing."""
        rest = measured[self.measurement] - (measured[self.minus] if self.minus else 0) - self.less
        return rest / measured[self.over] if self.over else rest

    def __str__(self) -> str:
        minus = f" - {self.minus}" if self.minus else ""
        less = f" - {self.less}" if self.less else ""
        return f"{self.measurement}{minus}{less}" + (f" over {self.over}" if self.over else "")


_WAIT = "mbarrier_done"  # what the end of every wait adds

# Constants whose value is published ([P]) stay; those that no microbenchmark isolates stay assumed.
FORMULAS = {
    "convert_clocks": Formula("cvt_bf16x2_f32_rate"),
    "memory_issue_clocks": Formula("shfl_rate_1warp"),
    "branch_clocks": Formula("branch_taken"),
    "mufu_latency": Formula("ex2_latency"),
    "shuffle_latency": Formula("shfl_latency"),
    "special_latency": Formula("special_latency", less=5),
    "constant_latency": Formula("constant_latency", less=5),
    "fence_clocks": Formula("sts128_fence", minus="sts128"),
    "shared_latency": Formula("lds32_latency"),
    "product_tail": Formula("ss256_tail"),
    "product_tail_registers": Formula("rs256_tail"),
    "product_depth": Formula("ss256_depth"),
    "product_depth_registers": Formula("rs256_depth"),
    "phase_latency": Formula(_WAIT),
    "arrive_latency": Formula("mbarrier_hop", minus=_WAIT),
    "barrier_latency": Formula("bar_sync_128"),
    "remote_latency": Formula("remote_arrive_hop", minus=_WAIT),
    "remote_bytes": Formula("remote_bytes_both"),
    "cluster_latency": Formula("cluster_barrier_128"),
    "copy_issue_clocks": Formula("tensor_1k_cadence"),
    "copy_l2_latency": Formula("tensor_8k_l2", minus=_WAIT),
    "copy_hbm_latency": Formula("tensor_8k_hbm", minus=_WAIT),
    "multicast_latency": Formula("multicast_3", minus="multicast_0"),
    "l1_latency": Formula("chase_l1"),
    "l2_latency": Formula("chase_l2"),
    "hbm_latency": Formula("chase_hbm"),
    "hbm_bytes": Formula("hbm_16_gbytes", over="clock_60_ghz"),
    "boost_ghz": Formula("clock_60_ghz"),
    "middle_ghz": Formula("clock_76_ghz"),
    "loaded_ghz": Formula("clock_full_ghz"),
    "launch_us": Formula("graph_node"),
    "dependent_us": Formula("gap_dependent"),
    "cta_start_clocks": Formula("cta_turnover"),
}
_INTEGERS = {field.name for field in fields(Constants) if field.type == "int"}


@dataclass(frozen=True)
class Measured:
    """Constants of one GPU: value and source of each. refused: those whose formula gave no positive number."""

    gpu: str
    entries: dict[str, tuple[float, str]]
    refused: dict[str, float]


def measured_constants(lines: Iterable[str]) -> Measured:
    """Return the constants that the lines of one or more runs on the same GPU give; the last measurement of a name counts.

    ValueError without a line that names a GPU of the clock.
    """
    found = [json.loads(line) for line in lines if line.strip()]
    devices = [entry["detail"] for entry in found if entry["name"] == DEVICE]
    names = {gpu for device in devices if (gpu := gpu_of_device(device))}
    if len(names) != 1:
        raise ValueError(f"the lines are of {', '.join(devices) or 'no device'}; supported: one of {', '.join(gpus())}")
    date = devices[-1].rpartition("; ")[2]
    measured = {entry["name"]: entry["value"] for entry in found if entry["name"] not in (DEVICE, ERROR)}
    entries, refused = {}, {}
    for name, formula in FORMULAS.items():
        try:
            value = formula.value(measured)
        except KeyError:
            continue
        rounded = round(value) if name in _INTEGERS else float(f"{value:.4g}")
        if rounded > 0:
            entries[name] = rounded, f"[H] {date}, {formula}: {value:.4g}"
        else:
            refused[name] = value
    return Measured(names.pop(), entries, refused)


def with_measured(text: str, measured: Measured) -> str:
    """Return the text of machines.toml with these constants, beside those of other GPUs and earlier runs."""
    tables = tomllib.loads(text).get("measured", {})
    new = {name: {"value": value, "source": source} for name, (value, source) in measured.entries.items()}
    tables[measured.gpu] = {**tables.get(measured.gpu, {}), **new}
    lines = []
    for gpu, table in sorted(tables.items()):
        lines += [f'\n[measured."{gpu}"]\n' if " " in gpu else f"\n[measured.{gpu}]\n"]
        lines += [f'{name} = {{ value = {entry["value"]}, source = "{entry["source"]}" }}\n' for name, entry in sorted(table.items())]
    return text.partition("\n" + HEAD)[0] + "\n" + HEAD + "".join(lines)
