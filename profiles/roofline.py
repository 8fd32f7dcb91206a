"""The least time a problem can take: its arithmetic over a GPU's matrix rate, its bytes over the memory bandwidth.

Nothing here is a measurement of this project's kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..spec.arch import Arch


@dataclass(frozen=True)
class Gpu:
    """The two rates that bound a kernel.

    name: as in the tables. arch: whose kernels it runs. tflops: dense bf16 matrix rate in TFLOP/s. tbytes: device memory in TB/s.
    source: where the two come from.
    """

    name: str
    arch: str
    tflops: float
    tbytes: float
    source: str

    @property
    def ridge(self) -> float:
        """FLOP per byte above which arithmetic is the limit."""
        return self.tflops / self.tbytes


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("H200", "sm90", 790.0, 4.3, "measured bf16 matmul and device copy (datasheet 989 and 4.8)"),
        Gpu("H100", "sm90", 790.0, 3.0, "assumed: H200's matmul rate, 3.0 of the datasheet's 3.35 TB/s"),
        Gpu("H800", "sm90", 865.0, 3.0, "published: peak at the throttled 1600 MHz, 3.0 TB/s achieved of 3.35"),
        Gpu("B200", "sm100", 2250.0, 8.0, "datasheet: nothing achieved is known to us"),
    )
}


def gpus_of(archs: Sequence[Arch]) -> list[Gpu]:
    """The GPUs of the table that run the kernels of these architectures, in its order."""
    names = {arch.name for arch in archs}
    return [gpu for gpu in GPUS.values() if gpu.arch in names]


@dataclass(frozen=True)
class Work:
    """What a problem costs at least: flops (useful ones) and bytes of device memory. rate: of its products, in those of bf16."""

    flops: float
    bytes: float
    rate: float = 1.0

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.bytes


@dataclass(frozen=True)
class Roof:
    """The bound of one problem on one GPU, in microseconds: both terms, and the name of the one that binds."""

    compute_us: float
    memory_us: float

    @property
    def us(self) -> float:
        """The least time."""
        return max(self.compute_us, self.memory_us)

    @property
    def bound(self) -> str:
        """`compute` or `memory`."""
        return "compute" if self.compute_us > self.memory_us else "memory"


def roof(work: Work, gpu: Gpu) -> Roof:
    """The roofline bound of `work` on `gpu`."""
    return Roof(compute_us=work.flops / (gpu.tflops * work.rate * 1e6), memory_us=work.bytes / (gpu.tbytes * 1e6))
