"""Predicted gains of changes to the kernels, written down before the changes are made.

python -m cute_mla.profiles.model.what_if [GPU]      prints the table of NOTES.md (default: H200)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...spec.mla import D_QK, D_V, ELEMENT_BYTES
from ...spec.split_plan import TILE_KEYS
from ..rows import OPS, Case, load
from .prediction import Launch
from .report import between, golden_counts, launch_on, predictions
from .tile_costs import block_of

FEW_HEADS = 16  # columns of a product with swapped operands: keys as rows, heads as columns


@dataclass(frozen=True)
class Change:
    """One candidate. rows: names of the cases to predict. apply: turns today's launch into the changed one."""

    name: str
    rows: tuple[str, ...]
    apply: Callable[[Launch], Launch]


@dataclass(frozen=True)
class Gain:
    """A change on one row: microseconds before and microseconds saved, each with the constants at their best and at their worst."""

    change: str
    row: str
    before_us: tuple[float, float]
    saved_us: tuple[float, float]


def gains(gpu: str) -> list[Gain]:
    """Return the gain of every change on each of its rows, in the order of CHANGES."""
    cases = {case.name: case for op in OPS for case in load(op)}
    return [_gain(change, cases[row], gpu) for change in CHANGES for row in change.rows]


def _gain(change: Change, case: Case, gpu: str) -> Gain:
    launch = launch_on(case, gpu)
    assert isinstance(launch, Launch), f"{case.name} is no launch over keys"
    before, after = (tuple(found.us for found in predictions(made, gpu)) for made in (launch, change.apply(launch)))
    saved = (round(before[0] - after[0], 6) + 0.0, round(before[1] - after[1], 6) + 0.0)  # no -0.0
    return Gain(change.name, case.name, (before[0], before[1]), saved)


# ---------------------------------------------------------------- fixed costs


def _fixed_halved(launch: Launch) -> Launch:
    return replace(launch, counts={name: replace(role, fixed=role.fixed / 2) for name, role in launch.counts.items()})


def _slope_at_goal(launch: Launch) -> Launch:
    """Execute 0.8 of the instructions of a block."""
    counts = {
        name: replace(role, slope={what: 0.8 * number for what, number in role.slope.items()}) for name, role in launch.counts.items()
    }
    return replace(launch, counts=counts)


def _no_combine(launch: Launch) -> Launch:
    """Bound the gain of merging inside the decode kernel: the merge costs nothing."""
    return replace(launch, combine=None)


# ---------------------------------------------------------------- blocks


def _block(launch: Launch, **changes: Any) -> Launch:
    return replace(launch, block=replace(launch.block, **changes))


def _less_port(what: str, share: float) -> Callable[[Launch], Launch]:
    """Reduce a term of the shared-memory port to a share of its bytes."""

    def apply(launch: Launch) -> Launch:
        if what not in launch.block.smem:
            raise ValueError(f"{launch.kernel} has no {what!r} among {', '.join(launch.block.smem)}")
        return _block(launch, smem={**launch.block.smem, what: launch.block.smem[what] * share})

    return apply


def _alone(launch: Launch) -> Launch:
    """Run every CTA by itself, with the variant that exists for an odd number of CTAs."""
    config = {**launch.config, "cluster": 1}
    name = launch.kernel.replace("cluster2", "cluster1")
    return replace(launch, kernel=name, config=config, block=block_of(launch.op, launch.arch, config), counts=golden_counts()[name])


def _swapped(launch: Launch) -> Launch:
    """Swap the operands of both products, S^T = K Q^T and O^T = V^T P^T in steps of 64 x 16 x 16: keys as rows, heads as columns."""
    steps = {"S": TILE_KEYS // 64 * D_QK // 16, "P V": D_V // 64 * TILE_KEYS // 16}
    flops = {name: 2.0 * 64 * FEW_HEADS * 16 * count * 1360 / 544 for name, count in steps.items()}  # 1,360 clocks: 2.5 times a step's FLOP
    operands = sum(steps.values()) * (64 * 16 + FEW_HEADS * 16) * ELEMENT_BYTES
    unchanged = {name: number for name, number in launch.block.smem.items() if name in ("TMA", "stores", "copies", "converted rows")}
    smem = {**unchanged, "swapped operands": operands, "P": FEW_HEADS * TILE_KEYS * ELEMENT_BYTES}
    return _block(launch, flops=flops, smem=smem, path=(), fill=launch.block.fill)


def _half_l2(launch: Launch) -> Launch:
    return _block(launch, l2_bytes=launch.block.l2_bytes / 2)


_SHORT = ("D5.fixed", "D12.h16", "D12.h128", "D13.mixed")


def _port_term(launch: Launch, prefix: str) -> str:
    return next(name for name in launch.block.smem if name.startswith(prefix))


def _q_tile(launch: Launch) -> Launch:
    """Keep one more column tile of Q in registers: four steps of S read 2,048 bytes less."""
    name = _port_term(launch, "S: Q")
    return _block(launch, smem={**launch.block.smem, name: launch.block.smem[name] - 4 * 2048})


def _one_p(launch: Launch) -> Launch:
    """Read P once for the 256 columns of an output warpgroup."""
    name = _port_term(launch, "P V: P")
    return _block(launch, smem={**launch.block.smem, name: launch.block.smem[name] / 2})


CHANGES: tuple[Change, ...] = (
    Change("fixed instructions halved", (*_SHORT, "D1.fixed", "S2.b2s2", "S1.topk2048"), _fixed_halved),
    Change("combine for nothing: merged in the decode kernel, at most", (*_SHORT, "D1.fixed", "D10.h16s1", "S2.b2s2"), _no_combine),
    Change("0.8 of the instructions of a block", ("D1.fixed", "S1.topk2048", "S3.h16", "P1.8k", "F1.s1"), _slope_at_goal),
    Change("one more column tile of Q in registers", ("D1.fixed", "S1.topk2048", "S3.h64", "P1.8k", "F2.h16"), _q_tile),
    Change("P read once for 256 columns", ("D1.fixed", "S1.topk2048", "P1.8k", "F2.h128"), _one_p),
    Change("no pairs: every CTA converts or gathers all", ("S1.topk2048", "S2.b128", "P1.8k"), _alone),
    Change("keys as rows, for at most 16 heads", ("S3.h16", "D8.s1", "F2.h16"), _swapped),
    Change("pairs that multicast keys: half the L2 reads", ("M1.2k", "M1.8k", "M1.16x1k", "P2.h64"), _half_l2),
    Change("V transposed for nothing", ("F1.s1", "F3.h16"), _less_port("transposition", 0.0)),
    Change("a second tensor map for the RoPE columns", ("F1.s1", "F3.h16"), _less_port("TMA, a box of 64 columns of zeros included", 0.9)),
)  # fmt: skip


def markdown(gpu: str) -> str:
    """Return the table of NOTES.md."""
    lines = ["| change | row | predicted now, us | less, us | of it, % |", "|---|---|---|---|---|"]
    for gain in gains(gpu):
        shares = sorted(100 * saved / before for saved, before in zip(gain.saved_us, gain.before_us, strict=True))
        lines.append(
            f"| {gain.change} | {gain.row} | {between(*gain.before_us)} | {between(*sorted(gain.saved_us))} | {between(*shares)} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    """Print the table of one GPU."""
    print(markdown(arguments[0] if arguments else "H200"))


if __name__ == "__main__":
    main(sys.argv[1:])
