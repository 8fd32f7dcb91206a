"""Roofline bounds: the greater of a problem's arithmetic over a GPU's matrix rate and its bytes over the memory bandwidth.

Nothing here is a measurement of this project's kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cute_mla.spec.arch import Arch


@dataclass(frozen=True)
class Gpu:
    """A GPU with the two rates that bound a kernel.

    arch: architecture of its kernels. tflops: dense bf16 matrix rate in TFLOP/s. tbytes: device memory bandwidth in TB/s.
    source: origin of the two rates.
    """

    name: str
    arch: str
    tflops: float
    tbytes: float
    source: str

    @property
    def ridge(self) -> float:
        """FLOP per byte above which arithmetic binds."""
        return self.tflops / self.tbytes


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("H200", "sm90", 790.0, 4.3, "measured bf16 matmul and device copy (datasheet 989 and 4.8)"),
        Gpu("H100", "sm90", 790.0, 3.0, "assumed: H200's matmul rate, 3.0 of the datasheet's 3.35 TB/s"),
        Gpu("H800", "sm90", 865.0, 3.0, "published: peak at the throttled 1600 MHz, 3.0 TB/s achieved of 3.35"),
        Gpu("B200", "sm100", 2250.0, 8.0, "datasheet: nothing achieved is known to us"),
        Gpu("B300", "sm100", 2250.0, 8.0, "taken as a B200: its dense bf16 rate and its bandwidth are given as the same"),
        Gpu("RTX PRO 6000", "sm120", 503.8, 1.792, "datasheet: nothing achieved by us; others reach 96 % of the bandwidth"),
        Gpu("RTX 5090", "sm120", 209.5, 1.792, "datasheet, fp32 sums at half of the rate: nothing achieved is known to us"),
        Gpu("GB10", "sm120", 119.0, 0.273, "published for DGX Spark: nothing achieved by us"),
    )
}


def gpus_of(archs: Sequence[Arch]) -> list[Gpu]:
    """Return the GPUs that run the kernels of these architectures, in the order of GPUS."""
    names = {arch.name for arch in archs}
    return [gpu for gpu in GPUS.values() if gpu.arch in names]


@dataclass(frozen=True)
class Work:
    """Least work of a problem: useful flops and compulsory bytes of device memory. rate: matrix rate of its products over that of bf16."""

    flops: float
    bytes: float
    rate: float = 1.0

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.bytes


@dataclass(frozen=True)
class Roof:
    """Bound of one problem on one GPU: both terms in microseconds, and the name of the binding one."""

    compute_us: float
    memory_us: float

    @property
    def us(self) -> float:
        """The least time in microseconds."""
        return max(self.compute_us, self.memory_us)

    @property
    def bound(self) -> str:
        """`compute` or `memory`."""
        return "compute" if self.compute_us > self.memory_us else "memory"


def roof(work: Work, gpu: Gpu) -> Roof:
    """Return the roofline bound of `work` on `gpu`."""
    return Roof(compute_us=work.flops / (gpu.tflops * work.rate * 1e6), memory_us=work.bytes / (gpu.tbytes * 1e6))
