"""Static figures of built kernels, from the manifest alone: registers, shared memory, occupancy and instruction mix."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cute_mla.manifest import KernelEntry, Manifest
from cute_mla.spec.arch import ARCHS

# Classes of SASS mnemonics, by the unit that executes them; the first pattern that matches the whole mnemonic counts.
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
    ("shuffle", re.compile(r"SHFL|VOTE\w*|ELECT|REDUX|MATCH|MOVM")),
    ("integer", re.compile(r"U?(I(ADD|MAD|SETP|ABS|MNMX)|LOP|LEA|SHF|SEL|PRMT|POPC|FLO|PLOP|BREV)\w*|VI\w+|LEA|ULEA")),
    ("control", re.compile(r"BRA\w*|BRX\w*|BSSY|BSYNC|CALL|RET|EXIT|NANOSLEEP|NOP|YIELD|BREAK|BMOV")),
)
MIX_CLASSES = (*(name for name, _ in _CLASSES), "other")


@dataclass(frozen=True)
class StaticFigures:
    """Static figures of one kernel; the fields are those of the JSON document.

    threads: per CTA. registers: per thread at launch, before roles reallocate them.
    register_share: of the registers of one SM. smem_share: of the shared memory of one CTA. Above 1 the kernel cannot launch.
    stack_bytes: local memory per thread; anything but 0 means spills. instructions: static SASS counts, largest first.
    mix: the SASS counts summed by MIX_CLASSES; "other" is mostly moves between register files and constant loads.
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


def static_figures(entry: KernelEntry) -> StaticFigures:
    """Return the static figures of one manifest entry."""
    arch = ARCHS[entry.arch]
    threads = _product(entry.block)
    return StaticFigures(
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
    """Return the SASS counts by class; every class is present."""
    mix = dict.fromkeys(MIX_CLASSES, 0)
    for mnemonic, count in instructions.items():
        mix[next((name for name, pattern in _CLASSES if pattern.fullmatch(mnemonic)), "other")] += count
    return mix


def _product(extents: tuple[int, int, int]) -> int:
    return extents[0] * extents[1] * extents[2]


def static_report(manifest: Manifest, arch: str, ops: Iterable[str]) -> list[StaticFigures]:
    """Return the figures of every kernel of an architecture that belongs to one of `ops`, sorted by name."""
    chosen = set(ops)
    return [static_figures(entry) for _, entry in sorted(manifest.kernels.items()) if entry.arch == arch and entry.op in chosen]
