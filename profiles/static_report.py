"""What a built kernel asks of the machine, from the manifest alone: registers, shared memory, occupancy, instruction mix."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..manifest import KernelEntry, Manifest
from ..spec.arch import ARCHS

# Classes of SASS mnemonics, by what they occupy; the first that matches the whole mnemonic counts.
_CLASSES = (
    ("tensor", re.compile(r"[HQIBD]G?MMA|UTC[HQIO]MMA")),
    ("tma", re.compile(r"UTMA\w+|UBLK\w+")),
    (
        "sync",
        re.compile(r"SYNCS|BAR|WARPGROUP|WARPSYNC|FENCE|MEMBAR|\w*ERRBAR|UCGABAR_\w+|ACQBULK|PREEXIT|DEPBAR|USETMAXREG|UTCBAR|UTCATOMSWS"),
    ),
    ("mufu", re.compile(r"MUFU")),
    ("convert", re.compile(r"[FI]2\w+")),
    ("float", re.compile(r"F[A-Z]\w+|H(ADD|MUL|FMA|SET|MNMX)\w*")),
    ("memory", re.compile(r"LDTM|STTM|UTCCP|LD[GS]\w*|LDL|ST[GS]\w*|STL|LD|ST|RED\w*|ATOM\w*|CCTL")),
    ("shuffle", re.compile(r"SHFL|VOTE\w*|ELECT|REDUX|MATCH")),
    ("integer", re.compile(r"U?(I(ADD|MAD|SETP|ABS|MNMX)|LOP|LEA|SHF|SEL|PRMT|POPC|FLO|PLOP|BREV)\w*|VI\w+|LEA|ULEA")),
    ("control", re.compile(r"BRA\w*|BRX\w*|BSSY|BSYNC|CALL|RET|EXIT|NANOSLEEP|NOP|YIELD|BREAK|BMOV")),
)
MIX_CLASSES = (*(name for name, _ in _CLASSES), "other")


@dataclass(frozen=True)
class KernelReport:
    """One kernel's static figures.

    threads: of a CTA. registers: per thread at launch (roles that reallocate theirs start from it).
    register_share, smem_share: of what one streaming multiprocessor, or one CTA, may have; above 1 cannot launch.
    stack_bytes: local memory per thread; anything but 0 means spills. instructions: static SASS counts, largest first.
    mix: the same summed by MIX_CLASSES; "other" is mostly moves between register files and constant loads.
    """

    name: str
    op: str
    arch: str
    threads: int
    cluster: int
    registers: int
    register_share: float
    stack_bytes: int
    smem_bytes: int
    smem_share: float
    roles: tuple[str, ...]
    instructions: dict[str, int]
    mix: dict[str, int]


def kernel_report(entry: KernelEntry) -> KernelReport:
    """The static figures of one manifest entry."""
    arch = ARCHS[entry.arch]
    threads = _product(entry.block)
    return KernelReport(
        name=entry.name,
        op=entry.op,
        arch=entry.arch,
        threads=threads,
        cluster=_product(entry.cluster),
        registers=entry.registers,
        register_share=entry.registers * threads / arch.registers_per_block,
        stack_bytes=entry.stack_bytes,
        smem_bytes=entry.smem_bytes,
        smem_share=entry.smem_bytes / arch.smem_per_block,
        roles=tuple(f"{role.name} ({role.warps} warps)" for role in entry.roles),
        instructions=dict(sorted(entry.instructions.items(), key=lambda item: (-item[1], item[0]))),
        mix=instruction_mix(entry.instructions),
    )


def instruction_mix(instructions: Mapping[str, int]) -> dict[str, int]:
    """SASS counts by class, every class present."""
    mix = dict.fromkeys(MIX_CLASSES, 0)
    for mnemonic, count in instructions.items():
        mix[next((name for name, pattern in _CLASSES if pattern.fullmatch(mnemonic)), "other")] += count
    return mix


def _product(extents: tuple[int, int, int]) -> int:
    return extents[0] * extents[1] * extents[2]


def static_report(manifest: Manifest, arch: str, ops: Iterable[str]) -> list[KernelReport]:
    """The figures of every kernel of an architecture that belongs to one of `ops`, by name."""
    wanted = set(ops)
    return [kernel_report(entry) for _, entry in sorted(manifest.kernels.items()) if entry.arch == arch and entry.op in wanted]
