"""Counts of executed warp instructions, by what they do and by the role of the warp.

An instruction counts once for every warp that executes it with any of its lanes; one that waits counts once, however long. It is
the PTX that is counted: ptxas drops moves, fuses products with sums and adds addresses, so compare PTX with PTX.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from functools import cache

from ..codegen.control_flow import Block
from ..state.names import Names

NO_ROLE = "(no role)"

Counts = dict[str, Counter[str]]  # by role, then by class

# The first pattern that matches the start of an opcode gives its class.
_CLASSES = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("matrix product", r"wgmma\.mma|tcgen05\.mma|mma\."),
        ("matrix fence", r"wgmma\.|tcgen05\.(fence|wait|commit)"),
        ("tensor memory", r"tcgen05\."),
        ("bulk copy", r"cp\.async\.bulk|cp\.reduce|prefetch"),
        ("copy", r"cp\.async"),
        ("barrier", r"mbarrier\.|bar\.|barrier\.|griddepcontrol|fence|membar"),
        ("shared memory", r"(ld|st|atom|red)\.shared|ldmatrix|stmatrix|mapa"),
        ("global memory", r"(ld|st|atom|red|ldu)\."),
        ("ex2", r"ex2|lg2|rcp|sqrt|rsqrt|tanh"),
        ("packed f32", r"(fma|mul|add|sub)(\.\w+)*\.f32x2$"),
        ("f32 fma", r"fma\."),
        ("f32 mul", r"mul(\.\w+)*\.(f32|f16x2|bf16x2|f16|bf16)$"),
        ("f32 add", r"(add|sub|neg|abs)(\.\w+)*\.(f32|f16x2|bf16x2|f16|bf16)$"),
        ("max", r"(max|min)(\.\w+)*\.(f32|f16x2|bf16x2|f16|bf16)$"),
        ("cvt to f32", r"cvt\.f32\.b?f16$"),  # in SASS an addition or a shift
        ("cvt", r"cvt\.r"),  # to floating point, which names its rounding; others change the width of integers
        ("permute", r"prmt"),
        ("mov", r"mov"),
        ("setp", r"setp|selp|set\."),
        ("between lanes", r"shfl|vote|redux|elect|match|activemask"),
        ("branch", r"bra|ret|exit|trap|brx|call|setmaxnreg"),
        (
            "integer",
            r"(cvt|add|sub|mul|mad|div|rem|and|or|xor|not|shl|shr|shf|lop3|min|max|abs|neg|popc|clz|bf[ei]|bfind|cvta|bmsk|szext)\b",
        ),
    )
)


@cache
def class_of(opcode: str) -> str:
    """Return the class of an opcode, "other" for none."""
    return next((name for name, pattern in _CLASSES if pattern.match(opcode)), "other")


class Executed:
    """Counts of executed blocks. instructions: warp instructions so far."""

    def __init__(self, blocks: Sequence[Block] = (), names: Names | None = None) -> None:
        self.blocks = blocks
        self.names = names
        self.instructions = 0
        self._times: list[dict[tuple[int, ...], int]] = [{} for _ in blocks]

    def add(self, block: Block, warps: tuple[int, ...]) -> int:
        """Count a block that warps have run together. Return the warp instructions that were executed."""
        work = len(block.instructions) * len(warps)
        self.instructions += work
        times = self._times[block.index]
        times[warps] = times.get(warps, 0) + 1
        return work

    @property
    def times(self) -> dict[tuple[int, tuple[int, ...]], int]:
        """Return how often warps have run a block together, by (block, warps)."""
        return {(index, warps): number for index, times in enumerate(self._times) for warps, number in times.items()}

    def by_role(self) -> Counts:
        """Return warp instructions of all CTAs together, by role, then by class."""
        counts: Counts = {}
        for (index, warps), times in self.times.items():
            classes = Counter(class_of(item.instruction.opcode) for item in self.blocks[index].instructions)
            for warp in warps:
                role = (self.names.role(warp) if self.names is not None else None) or NO_ROLE
                total = counts.setdefault(role, Counter())
                for name, number in classes.items():
                    total[name] += times * number
        return counts
