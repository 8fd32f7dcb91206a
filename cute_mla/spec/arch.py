"""The GPU architectures that kernels are built for, and the limits that a shipped kernel must respect."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arch:
    """One target architecture.

    name: the name used everywhere in this project ("sm90").
    gpu_arch: the name that the compiler takes ("sm_90a").
    compute_capability: what the driver reports for a device that can run the cubins.
    smem_per_block: bytes of dynamic shared memory one thread block may opt in to.
    registers_per_block: 32-bit registers of one streaming multiprocessor, all usable by one block.
    sm_count: streaming multiprocessors of the usual board (H200, B200); the default of the simulated device.
    """

    name: str
    gpu_arch: str
    compute_capability: tuple[int, int]
    smem_per_block: int
    registers_per_block: int
    sm_count: int


SM90 = Arch(
    name="sm90",
    gpu_arch="sm_90a",
    compute_capability=(9, 0),
    smem_per_block=232_448,
    registers_per_block=65_536,
    sm_count=132,
)

ARCHS: dict[str, Arch] = {SM90.name: SM90}
