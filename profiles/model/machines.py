"""GPUs of the analytic model, from definitions/machines.toml: each constant with its best and its worst known value."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from ...spec.arch import ARCHS

FILE = Path(__file__).resolve().parents[1] / "definitions" / "machines.toml"
BEST, WORST = "best", "worst"
ENDS = (BEST, WORST)


@dataclass(frozen=True)
class Machine:
    """One GPU with every constant at its best or its worst; the fields are the keys of the file.

    *_per_clock: per SM; FLOP of 16-bit products, bytes, results of lanes, or warp instructions (issue). *_clocks: latencies of one warp.
    l2_tbytes, hbm_tbytes: TB/s of the whole GPU. chain_clocks: from one instruction of a warp to its next. overlap_gap_us: from
    the end of a kernel to the start of its dependent. hbm_share, piece_overlap, results_in_l2: fractions, explained in the file.
    """

    name: str
    arch: str
    sm_count: int
    clock_ghz: float
    hbm_tbytes: float
    mma_flops_per_clock: float
    l2_latency_clocks: float
    hbm_latency_clocks: float
    l2_tbytes: float
    smem_bytes_per_clock: float
    issue_per_clock: float
    fp32_per_clock: float
    alu_per_clock: float
    mufu_per_clock: float
    convert_per_clock: float
    l2_sm_bytes_per_clock: float
    tma_extra_clocks: float
    handover_clocks: float
    chain_clocks: float
    launch_us: float
    overlap_gap_us: float
    cta_start_clocks: float
    hbm_share: float
    piece_overlap: float
    results_in_l2: float

    def us(self, clocks: float) -> float:
        """Convert SM clocks to microseconds."""
        return clocks / (1e3 * self.clock_ghz)

    def bytes_per_clock(self, tbytes: float, ctas: int) -> float:
        """Return the bytes per clock of each of `ctas` SMs that share a rate of the whole GPU, in TB/s."""
        return tbytes * 1e3 / self.clock_ghz / max(ctas, 1)


@dataclass(frozen=True)
class Bounds:
    """A GPU with every constant at its best and at its worst. sources: the origin of each constant."""

    best: Machine
    worst: Machine
    sources: Mapping[str, str]

    @property
    def ends(self) -> tuple[Machine, Machine]:
        """The two machines, best first."""
        return self.best, self.worst


def parse(text: str) -> dict[str, Bounds]:
    """Return the GPUs of one file by name.

    ValueError for a constant that is missing, unknown or without source, or whose best value is worse than its worst.
    """
    document = tomllib.loads(text)
    gpus = {name: table for name, table in document.items() if name not in ("common", "clock", "measured", *ARCHS)}
    return {name: _bounds(name, {**document["common"], **document[gpu["arch"]], **gpu}) for name, gpu in gpus.items()}


_PLAIN = ("name", "arch", "sm_count")
_LESS_IS_BETTER = ("_clocks", "_us")


def _bounds(name: str, table: Mapping[str, Any]) -> Bounds:
    constants = constant_names(name, Machine, _PLAIN, table)
    ends = {end: {constant: _value(name, constant, table[constant], end) for constant in constants} for end in ENDS}
    for constant in constants:
        best, worst = (ends[end][constant] for end in ENDS)
        if (best > worst) if constant.endswith(_LESS_IS_BETTER) else (best < worst):
            raise ValueError(f"{name}: {constant} is {best} at best and {worst} at worst, which is the wrong way round")
    machine = {end: Machine(name, table["arch"], table["sm_count"], **ends[end]) for end in ENDS}
    return Bounds(machine[BEST], machine[WORST], {constant: table[constant]["source"] for constant in constants})


def constant_names(owner: str, of: type[Any], plain: Collection[str], table: Mapping[str, Any]) -> list[str]:
    """Return the fields of a dataclass that a table must have entries for: all but plain ones. ValueError if it has others."""
    names = [field.name for field in fields(of) if field.name not in plain]
    wrong = set(names) ^ (table.keys() - set(plain))
    if wrong:
        raise ValueError(f"{owner}: {', '.join(sorted(wrong))} missing or unknown; constants: {', '.join(names)}")
    return names


def check_entry(owner: str, constant: str, entry: Mapping[str, Any], forms: Collection[set[str]], supported: str) -> None:
    """Check that an entry has a source, and otherwise the keys of one of the forms. ValueError with the text of what is supported."""
    if not entry.get("source"):
        raise ValueError(f"{owner}: {constant} has no source")
    if entry.keys() - {"source"} not in forms:
        raise ValueError(f"{owner}: {constant} has {', '.join(sorted(entry))}; supported: {supported}, and source")


def _value(name: str, constant: str, entry: Mapping[str, Any], end: str) -> float:
    check_entry(name, constant, entry, ({"value"}, set(ENDS)), "value, or best and worst")
    return float(entry["value"] if "value" in entry else entry[end])


@cache
def machines() -> dict[str, Bounds]:
    """Return all GPUs that the model knows, by name."""
    return parse(FILE.read_text(encoding="utf-8"))
