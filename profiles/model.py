"""The analytic model of a launch: what every resource needs for a block of keys, which one binds, and what that makes of a launch.

    block   = the greatest of the resources' clocks and of the dependent stages
    part    = its blocks, and what separates its pieces
    kernel  = first loads + first scores and softmax + max(longest part, bytes / memory) + epilogue
    call    = launch + kernel + combine behind it

Pure functions of a `Launch` and a `Machine`; a prediction is made once with the machine at its best and once at its worst. It
ranks what could be changed. It is not a measurement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .machines import BEST, Machine
from .partition import Part
from .recorded_counts import Counts, RoleCounts
from .tile_costs import Block, Stage

LANES = 32
SCHEDULERS = 4
PACKED_LANES = 2 * LANES  # results of an instruction on pairs of fp32 numbers
MOVES = "mov"
PATH, MEMORY, FIXED = "path", "HBM", "fixed"


@dataclass(frozen=True)
class Combine:
    """What merges partial results: CTAs in all, how many of them fit on an SM, bytes of all and of the busiest CTA.

    cold: whether the bytes come from memory for certain; else the kernel before has put them into L2. loads: loads in a row of a CTA.
    """

    ctas: int
    ctas_per_sm: int
    bytes: float
    busiest_bytes: float
    cold: bool = False
    loads: int = 3


@dataclass(frozen=True)
class Launch:
    """A call of one kernel over keys, and of combine.

    op, arch, config: of the kernel, which is named `kernel`. row_ctas: CTAs that have other rows and the same keys. ctas: that
    run at the same time. bytes: of memory that have to be moved.
    """

    op: str
    arch: str
    config: Mapping[str, Any]
    kernel: str
    block: Block
    counts: Counts
    parts: tuple[Part, ...]
    row_ctas: int
    ctas: int
    bytes: float
    combine: Combine | None = None


@dataclass(frozen=True)
class Prediction:
    """us: of the call. clocks: of one block, by resource. terms: microseconds by what takes them; they add up to us.
    binds: what takes most of it: a resource, HBM, or what is fixed."""

    us: float
    clocks: Mapping[str, float]
    terms: Mapping[str, float]
    binds: str


# ---------------------------------------------------------------- a block


def block_clocks(block: Block, counts: Counts, machine: Machine, end: str, ctas: int, row_ctas: int) -> dict[str, float]:
    """Clocks of every resource for one block on one SM, while so many CTAs run."""
    from_l2 = min(machine.l2_sm_bytes_per_clock, machine.bytes_per_clock(machine.l2_tbytes, ctas))
    from_memory = machine.bytes_per_clock(machine.hbm_tbytes * machine.hbm_share, ctas)
    return {
        "MMA": sum(block.flops.values()) / machine.mma_flops_per_clock,
        "shared memory": sum(block.smem.values()) / machine.smem_bytes_per_clock,
        "L2": block.l2_bytes / from_l2,
        MEMORY: block.hbm_bytes / row_ctas / from_memory,
        "MUFU": block.units * LANES * _sum(counts, "ex2") / machine.mufu_per_clock,
        "FP32": block.units * _fp32_lanes(counts) / machine.fp32_per_clock,
        "integer": block.units * LANES * _sum(counts, "integer", "setp", "max", "permute") / machine.alu_per_clock,
        "conversion": block.units * LANES * _sum(counts, "cvt") / machine.convert_per_clock,
        "issue": block.units * max(issued(counts, block.lone)) * SCHEDULERS / machine.issue_per_clock,
        PATH: stages_clocks(block.path, machine, end),
    }


def _sum(counts: Counts, *classes: str) -> float:
    return sum(role.of(*classes) for role in counts.values())


def _fp32_lanes(counts: Counts) -> float:
    return LANES * _sum(counts, "f32 fma", "f32 mul", "f32 add", "cvt to f32") + PACKED_LANES * _sum(counts, "packed f32")


def issued(counts: Counts, lone: Iterable[str]) -> list[float]:
    """Warp instructions per 64 keys of 64 rows on each scheduler: warp w is on scheduler w % 4. lone: roles of which one warp works.

    Moves of the PTX are left out: without them it has as many instructions as the loops' SASS, within a few percent (dense decode on
    Hopper 1,101 against 1,123, sparse decode of fp8_656 1,975 against 1,996, both on the busiest scheduler).
    """
    schedulers = [0.0] * SCHEDULERS
    for name, role in counts.items():
        warps = _working(name, role, lone)
        each = (role.total - role.of(MOVES)) / len(warps)
        for warp in warps:
            schedulers[warp % SCHEDULERS] += each
    return schedulers


def _working(name: str, role: RoleCounts, lone: Iterable[str]) -> range:
    return range(role.first_warp, role.first_warp + (1 if name in lone else role.warps))


def stages_clocks(stages: Iterable[Stage], machine: Machine, end: str) -> float:
    """Stages one behind the other, each handed over at a barrier."""
    return sum((stage.best if end == BEST else stage.worst) + stage.barriers * machine.handover_clocks for stage in stages)


# ---------------------------------------------------------------- a launch


def epilogue_clocks(launch: Launch, machine: Machine) -> float:
    """The longest fixed part of a role, one instruction behind the other: mostly a piece's way out of the accumulators."""
    rows = launch.block.rows / 64  # fixed parts are counted per 64 rows
    chains = (role.fixed * rows / len(_working(name, role, launch.block.lone)) for name, role in launch.counts.items())
    return machine.chain_clocks * max(chains)


def prologue_clocks(launch: Launch, machine: Machine) -> float:
    """Until the first keys are there: dependent loads of plan, length and table or indices from L2, then keys from memory."""
    return launch.block.loads * machine.l2_latency_clocks + machine.hbm_latency_clocks + machine.tma_extra_clocks


def seam_clocks(launch: Launch, machine: Machine, end: str) -> float:
    """Between two pieces of a part."""
    if launch.block.seam:
        return sum(stage.best if end == BEST else stage.worst for stage in launch.block.seam)
    return (1 - machine.piece_overlap) * (stages_clocks(launch.block.fill, machine, end) + epilogue_clocks(launch, machine))


def combine_us(combine: Combine, machine: Machine) -> float:
    """CTAs by the wave, those with nothing to merge too; then the busiest one, or all bytes."""
    waves = -(-combine.ctas // (combine.ctas_per_sm * machine.sm_count))
    sharing = min(combine.ctas_per_sm, -(-combine.ctas // machine.sm_count))
    chain = combine.loads * machine.l2_latency_clocks + combine.busiest_bytes * sharing / machine.l2_sm_bytes_per_clock
    in_l2 = machine.results_in_l2 and not combine.cold
    rate = machine.l2_tbytes if in_l2 else machine.hbm_tbytes * machine.hbm_share
    empty = (waves - 1) * (machine.cta_start_clocks + machine.l2_latency_clocks)
    return max(machine.us(empty + chain), machine.us(machine.hbm_latency_clocks) + combine.bytes / (rate * 1e6))


def predict(launch: Launch, machine: Machine, end: str) -> Prediction:
    """Of a call, with the machine at one end."""
    clocks = block_clocks(launch.block, launch.counts, machine, end, launch.ctas, launch.row_ctas)
    local = {name: number for name, number in clocks.items() if name != MEMORY}
    each, seam = max(local.values()), seam_clocks(launch, machine, end)
    longest = max(launch.parts, key=lambda part: part.blocks * each + part.pieces * seam, default=Part(0, 0))
    blocks, seams = machine.us(longest.blocks * each), machine.us(max(longest.pieces - 1, 0) * seam)
    spilled = launch.combine.bytes * (1 - machine.results_in_l2) if launch.combine is not None else 0.0
    memory = (launch.bytes + spilled) / (machine.hbm_tbytes * machine.hbm_share * 1e6)
    terms = {
        "launch": machine.launch_us,
        "first loads": machine.us(prologue_clocks(launch, machine)),
        "first scores": machine.us(stages_clocks(launch.block.fill, machine, end)) if longest.blocks else 0.0,
        "blocks": blocks,
        "seams": seams,
        "memory beyond them": max(memory - blocks - seams, 0.0),
        "epilogue": machine.us(epilogue_clocks(launch, machine)),
        "combine": machine.overlap_gap_us + combine_us(launch.combine, machine) if launch.combine is not None else 0.0,
    }
    us = sum(terms.values())
    streamed = max(blocks + seams, memory)
    if streamed < us / 2:
        binds = FIXED
    else:
        binds = MEMORY if memory > blocks + seams else max(local, key=lambda name: local[name])
    return Prediction(us, clocks, terms, binds)


def predict_combine(combine: Combine, machine: Machine) -> Prediction:
    """Of a call of combine, or of another kernel that streams, alone."""
    terms = {"launch": machine.launch_us, "combine": combine_us(combine, machine)}
    us = sum(terms.values())
    return Prediction(us, {}, terms, FIXED if terms["launch"] > us / 2 else MEMORY)
