"""Analytic model of a call: the clocks of every resource per block of keys, the resource that binds, and the time of the launch.

    block   = max(clocks of each resource, clocks of the dependent stages)
    CTA     = its blocks + the seams between its pieces
    kernel  = first loads + first scores and softmax + max(longest CTA, bytes / memory bandwidth) + epilogue
    call    = launch + kernel + the combine after it

All functions are pure functions of a `Launch` and a `Machine`. A prediction is made twice: with every constant at its best and at its
worst. The model ranks possible changes; it is no measurement.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..kernel_stats.golden_counts import Counts, RoleCounts
from .machines import BEST, Machine
from .partition import CtaWork
from .tile_costs import Block, Stage

LANES = 32
SCHEDULERS = 4
PACKED_LANES = 2 * LANES  # results of one warp instruction on fp32 pairs
MOVES = "mov"
PATH, MEMORY, FIXED = "path", "HBM", "fixed"


@dataclass(frozen=True)
class Combine:
    """A combine launch, or another kernel that only streams.

    ctas: of the grid. ctas_per_sm: resident at a time. bytes: moved by all CTAs. busiest_bytes: moved by the busiest CTA.
    cold: the bytes come from memory; otherwise the kernel before may have left them in L2. loads: dependent loads of a CTA.
    lookups, merges: of the busiest CTA of combine: rounds that look up query tokens, and tokens that it merges. splits: of such a token.
    heads: rows of a query token that a CTA merges. columns: CTAs that share a row's columns.
    """

    ctas: int
    ctas_per_sm: int
    bytes: float
    busiest_bytes: float
    cold: bool = False
    loads: int = 3
    lookups: int = 1
    merges: int = 0
    splits: int = 0
    heads: int = 1
    columns: int = 1


@dataclass(frozen=True)
class Launch:
    """A launch of one kernel over keys, and what follows it in the call: a combine or another streaming kernel, or a launch over keys.

    kernel: name in the manifest; op, arch, config: its variant. cta_work: work of each group of CTAs that share keys.
    row_ctas: CTAs that share the same keys and have different query rows. ctas: CTAs that run at the same time.
    bytes: device memory traffic. rounds: how often the launch, and what follows it, is made in a call, one time after the other.
    """

    op: str
    arch: str
    config: Mapping[str, Any]
    kernel: str
    block: Block
    counts: Counts
    cta_work: tuple[CtaWork, ...]
    row_ctas: int
    ctas: int
    bytes: float
    combine: Combine | None = None
    after: Launch | None = None
    rounds: int = 1


@dataclass(frozen=True)
class Prediction:
    """Predicted time of a call.

    us: the whole call. clocks: one block, by resource. terms: microseconds by cause; they add up to us.
    binds: the cause of most of the time: a resource, HBM, or "fixed".
    """

    us: float
    clocks: Mapping[str, float]
    terms: Mapping[str, float]
    binds: str


# ---------------------------------------------------------------- a block


def block_clocks(block: Block, counts: Counts, machine: Machine, end: str, ctas: int, row_ctas: int) -> dict[str, float]:
    """Return the clocks of every resource for one block on one SM, while `ctas` CTAs run.

    end: BEST or WORST, which of the two figures of a stage counts. row_ctas: CTAs that share a block's bytes from memory.
    """
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
    """Return warp instructions per 64 keys of 64 rows on each scheduler; warp w is on scheduler w % 4.

    lone: roles in which a single warp works. PTX moves are left out: without them the PTX count matches the SASS of the loops within
    a few percent (busiest scheduler: dense decode on Hopper 1,101 against 1,123; sparse decode of fp8_656 1,975 against 1,996).
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
    """Return the clocks of dependent stages, with a handover at each of their barriers."""
    return sum((stage.best if end == BEST else stage.worst) + stage.barriers * machine.handover_clocks for stage in stages)


# ---------------------------------------------------------------- a launch


def epilogue_clocks(launch: Launch, machine: Machine) -> float:
    """Return the clocks of the longest fixed part of a role, as a dependent chain: mostly writing a piece's accumulators."""
    rows = launch.block.rows / 64  # fixed parts are counted per 64 rows
    chains = (role.fixed * rows / len(_working(name, role, launch.block.lone)) for name, role in launch.counts.items())
    return machine.chain_clocks * max(chains)


def prologue_clocks(launch: Launch, machine: Machine) -> float:
    """Return the clocks until the first keys arrive: dependent loads of plan, length and page table or indices from L2, then keys."""
    return launch.block.loads * machine.l2_latency_clocks + machine.hbm_latency_clocks + machine.tma_extra_clocks


def seam_clocks(launch: Launch, machine: Machine, end: str) -> float:
    """Return the clocks between two pieces of a CTA."""
    if launch.block.seam:
        return sum(stage.best if end == BEST else stage.worst for stage in launch.block.seam)
    return (1 - machine.piece_overlap) * (stages_clocks(launch.block.fill, machine, end) + epilogue_clocks(launch, machine))


def combine_us(combine: Combine, machine: Machine) -> float:
    """Return the microseconds of combine: earlier waves of CTAs, then the busiest CTA; at least the time of all bytes."""
    waves = -(-combine.ctas // (combine.ctas_per_sm * machine.sm_count))
    sharing = min(combine.ctas_per_sm, -(-combine.ctas // machine.sm_count))
    chain = combine.loads * machine.l2_latency_clocks + combine.busiest_bytes * sharing / machine.l2_sm_bytes_per_clock
    in_l2 = machine.results_in_l2 and not combine.cold
    rate = machine.l2_tbytes if in_l2 else machine.hbm_tbytes * machine.hbm_share
    empty = (waves - 1) * (machine.cta_start_clocks + machine.l2_latency_clocks)
    return max(machine.us(empty + chain), machine.us(machine.hbm_latency_clocks) + combine.bytes / (rate * 1e6))


def predict(launch: Launch, machine: Machine, end: str) -> Prediction:
    """Predict a call. end: BEST or WORST, which of the two figures of a stage counts; `machine` is of the same end."""
    if launch.after is None:
        return _predict_one(launch, machine, end)
    first, second = (_predict_one(each, machine, end) for each in (launch, launch.after))
    terms = {name: us + second.terms[name] for name, us in first.terms.items()}
    terms["launch"] = machine.launch_us + machine.overlap_gap_us
    longer = max(first, second, key=lambda prediction: prediction.us)
    return Prediction(sum(terms.values()), longer.clocks, terms, longer.binds)


def _predict_one(launch: Launch, machine: Machine, end: str) -> Prediction:
    clocks = block_clocks(launch.block, launch.counts, machine, end, launch.ctas, launch.row_ctas)
    local = {name: number for name, number in clocks.items() if name != MEMORY}
    each, seam = max(local.values()), seam_clocks(launch, machine, end)
    longest = max(launch.cta_work, key=lambda work: work.blocks * each + work.pieces * seam, default=CtaWork(0, 0))
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
    terms = {name: term * launch.rounds for name, term in terms.items()}
    terms["launch"] = machine.launch_us + (launch.rounds - 1) * machine.overlap_gap_us
    us = sum(terms.values())
    streamed = max(blocks + seams, memory) * launch.rounds
    if streamed < us / 2:
        binds = FIXED
    else:
        binds = MEMORY if memory > blocks + seams else max(local, key=lambda name: local[name])
    return Prediction(us, clocks, terms, binds)


def predict_combine(combine: Combine, machine: Machine) -> Prediction:
    """Predict a call of combine alone, or of another kernel that only streams."""
    terms = {"launch": machine.launch_us, "combine": combine_us(combine, machine)}
    us = sum(terms.values())
    return Prediction(us, {}, terms, FIXED if terms["launch"] > us / 2 else MEMORY)
