"""GPU architectures that kernels are built for, and the limits that a shipped kernel must respect."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arch:
    """One target architecture.

    name: the name used everywhere in this project ("sm90").
    gpu_arch: the name that the compiler takes ("sm_90a").
    compute_capabilities: what the driver may report for a device that can run the cubins.
    smem_per_block: bytes of dynamic shared memory one thread block may opt in to.
    registers_per_block: 32-bit registers of one streaming multiprocessor, all usable by one block.
    sm_count: streaming multiprocessors of the usual board (H200, B200, RTX PRO 6000); the default of the simulated device.
    tmem_columns: columns of 128 lanes of tensor memory of one streaming multiprocessor, 0 without tensor memory.
    packed_floats: whether instructions on pairs of fp32 numbers stay one in the machine code; else ptxas makes two.
    proof: verification status of the kernels, in one sentence.
    """

    name: str
    gpu_arch: str
    compute_capabilities: tuple[tuple[int, int], ...]
    smem_per_block: int
    registers_per_block: int
    sm_count: int
    tmem_columns: int
    proof: str
    packed_floats: bool = True

    def __hash__(self) -> int:
        """Hash the name only; runs once per call."""
        return hash(self.name)

    @property
    def capabilities_text(self) -> str:
        """The compute capabilities as text, such as "10.0 or 10.3"."""
        return " or ".join(f"{major}.{minor}" for major, minor in self.compute_capabilities)


_SIMULATED = (
    "in its stead the PTX behind each cubin runs on the simulated device, where misuse of barriers, memory and tensor cores is a "
    "finding, and agrees with an fp64 reference"
)

SM90 = Arch(
    name="sm90",
    gpu_arch="sm_90a",
    compute_capabilities=((9, 0),),
    smem_per_block=232_448,
    registers_per_block=65_536,
    sm_count=132,
    tmem_columns=0,
    proof=f"the kernels for sm90 have not run on hardware; {_SIMULATED}",
)

SM100 = Arch(
    name="sm100",
    gpu_arch="sm_100f",  # a family target: one cubin for B200 and B300
    compute_capabilities=((10, 0), (10, 3)),
    smem_per_block=232_448,
    registers_per_block=65_536,
    sm_count=148,
    tmem_columns=512,
    proof=f"the kernels for sm100 have not run on hardware; {_SIMULATED}",
)

SM120 = Arch(
    name="sm120",
    gpu_arch="sm_120f",  # a family target: one cubin for RTX 5090 and RTX PRO 6000 (12.0) and for DGX Spark (12.1)
    compute_capabilities=((12, 0), (12, 1)),
    smem_per_block=101_376,
    registers_per_block=65_536,
    sm_count=188,
    tmem_columns=0,
    proof=f"the kernels for sm120 have not run on hardware; {_SIMULATED}",
    packed_floats=False,
)

ARCHS: dict[str, Arch] = {arch.name: arch for arch in (SM90, SM100, SM120)}


# Other names of architectures, whose devices run the cubins of a family.
ALIASES: dict[str, str] = {"sm103": SM100.name, "sm121": SM120.name}


def arch_for(capability: tuple[int, int]) -> Arch | None:
    """Return the architecture whose cubins a device of this compute capability runs, or None if there is none."""
    return next((arch for arch in ARCHS.values() if capability in arch.compute_capabilities), None)
