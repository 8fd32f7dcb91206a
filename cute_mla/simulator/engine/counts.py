"""Counts of executed warp instructions, by what they do and by the role of the warp.

An instruction counts once for every warp that executes it with any of its lanes; one that waits counts once, however long. PTX and machine
code have classes of the same names, but ptxas drops moves, folds addresses and unrolls: compare PTX with PTX.
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
        ("mov", r"mov\b"),
        ("setp", r"setp|selp|set\."),
        ("between lanes", r"shfl|vote|redux|elect|match|movmatrix|activemask"),
        ("branch", r"bra|ret|exit|trap|brx|call|setmaxnreg"),
        (
            "integer",
            r"(cvt|add|sub|mul|mad|div|rem|and|or|xor|not|shl|shr|shf|lop3|min|max|abs|neg|popc|clz|brev|dp[24]a|bf[ei]|bfind|cvta|bmsk"
            r"|szext)\b",
        ),
    )
)


_MACHINE_CLASSES = tuple(
    (name, re.compile(pattern))
    for name, pattern in (
        ("matrix product", r"[A-Z]GMMA|UTC[A-Z]MMA|[HQ]MMA"),
        ("matrix fence", r"WARPGROUP|UTCBAR|FENCE\.VIEW\.ASYNC\.T"),
        ("tensor memory", r"LDTM|STTM|UTC|UVIRTCOUNT"),
        ("bulk copy", r"UTMA|UBLK|CCTL\.E\.PF"),
        ("copy", r"LDGSTS|LDGDEPBAR|DEPBAR|ARRIVES"),
        ("barrier", r"SYNCS|BAR\b|B2R|UCGABAR|ACQBULK|PREEXIT|FENCE|MEMBAR|ERRBAR|CGAERRBAR|CCTL|NANOSLEEP"),
        ("shared memory", r"LDSM?\b|STSM?\b|ATOMS|STAS"),
        ("global memory", r"LDG|STG|LD\.|ST\.|LD\b|ST\b|ATOM|RED\b"),
        ("constant memory", r"U?LDCU?"),
        ("ex2", r"MUFU"),
        ("packed f32", r"F(FMA|MUL|ADD)2"),
        ("mov", r"U?MOV\b|CS2U?R|S2U?R|IMAD\.(MOV|U32)|HFMA2(\.MMA)?$"),
        ("f32 fma", r"FH?FMA"),
        ("f32 mul", r"FMUL|HMUL2"),
        ("cvt to f32", r"HADD2\.F32"),
        ("f32 add", r"FH?ADD|HADD2"),
        ("max", r"FMNMX"),
        ("cvt", r"F2FP|F2I|I2F|I2FP|F2F"),
        ("permute", r"U?PRMT"),
        ("setp", r"U?ISETP|FSETP|HSETP?2|U?PLOP3|U?SEL|FSEL|U?P2U?R|R2P|FCHK"),
        ("between lanes", r"SHFL|VOTE|C?REDUX|ELECT|R2UR|MATCH|MOVM"),
        ("branch", r"BRA|EXIT|CALL|RET|BSSY|BSYNC|BREAK|WARPSYNC|YIELD|BPT|USETMAXREG"),
        ("no operation", r"NOP"),
        ("integer", r"U?(IADD|IDP|IMAD|LEA|LOP3|SHF|VIADD|VIMNMX|IABS|POPC|FLO|BREV|IMNMX|SGXT|BMSK|LOP)|VIADDMNMX"),
    )
)
_MACHINE_INSTRUCTION = re.compile(r"0x[0-9a-f]+ (?:@!?U?P[T\d] )?([A-Z][\w.]*)")


@cache
def class_of(opcode: str) -> str:
    """Return the class of an opcode of PTX or, in capitals, of machine code; "other" for none."""
    classes = _MACHINE_CLASSES if opcode[:1].isupper() else _CLASSES
    return next((name for name, pattern in classes if pattern.match(opcode)), "other")


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
        of_block = self._classes()
        for (index, warps), times in self.times.items():
            classes = of_block[index]
            for warp in warps:
                role = (self.names.role(warp) if self.names is not None else None) or NO_ROLE
                total = counts.setdefault(role, Counter())
                for name, number in classes.items():
                    total[name] += times * number
        return counts

    def _classes(self) -> list[Counter[str]]:
        """Return the classes of each block's instructions. A machine instruction in several parts counts where its first part stands."""
        found = []
        last: str | None = None
        for block in self.blocks:
            classes: Counter[str] = Counter()
            for item in block.instructions:
                source = item.instruction.source
                machine = _MACHINE_INSTRUCTION.match(source) if source is not None else None
                if machine is None:
                    classes[class_of(item.instruction.opcode)] += 1
                elif source != last:
                    classes[class_of(machine[1])] += 1
                    last = source
            found.append(classes)
        return found
