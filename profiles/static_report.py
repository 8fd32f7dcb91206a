"""What a built kernel asks of the machine, from the manifest alone: registers, shared memory, occupancy, instruction mix."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..manifest import KernelEntry, Manifest
from ..spec.arch import ARCHS

WARP = 32


@dataclass(frozen=True)
class KernelReport:
    """One kernel's static figures.

    threads: of a CTA. registers: per thread at launch (roles that reallocate theirs start from it).
    register_share, smem_share: of what one streaming multiprocessor, or one CTA, may have; above 1 cannot launch.
    stack_bytes: local memory per thread; anything but 0 means spills. instructions: static SASS counts, largest first.
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
    )


def _product(extents: tuple[int, int, int]) -> int:
    return extents[0] * extents[1] * extents[2]


def static_report(manifest: Manifest, arch: str, ops: Iterable[str]) -> list[KernelReport]:
    """The figures of every kernel of an architecture that belongs to one of `ops`, by name."""
    wanted = set(ops)
    return [kernel_report(entry) for _, entry in sorted(manifest.kernels.items()) if entry.arch == arch and entry.op in wanted]
