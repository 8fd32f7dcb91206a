"""The least time a problem can take: its arithmetic over a GPU's matrix rate, its bytes over the memory bandwidth.

Every input byte is counted as read once and every output byte as written once; nothing here is a measurement of this
project's kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..spec.arch import Arch
from ..spec.dense_decode import FP8, LATENT, TILE_ROWS, row_ctas
from ..spec.mla import D_QK, D_V, ELEMENT_BYTES, ceil_div

FLOPS_PER_PAIR = 2 * (D_QK + D_V)  # of one query row and one key: multiply-adds of q k^T and of p v
E4M3_BYTES = 1
FP8_RATE = 2.0  # of products of e4m3, in those of bf16
LSE_BYTES = 4
TABLE_ENTRY_BYTES = 4
ACCUMULATOR_BYTES = 4  # fp32


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


@dataclass(frozen=True)
class DecodeShape:
    """The shape of a dense-decode call, as far as its cost goes.

    lengths: keys of each request. s_q, h_q: query tokens and heads of a request. page_size: keys of a page. operands: as in
    DenseDecodeConfig.
    """

    lengths: tuple[int, ...]
    s_q: int
    h_q: int
    h_kv: int = 1
    page_size: int = 64
    operands: str = LATENT

    @property
    def batch(self) -> int:
        """Requests."""
        return len(self.lengths)

    @property
    def keys(self) -> int:
        """Keys of all requests."""
        return sum(self.lengths)


def dense_decode_work(shape: DecodeShape) -> Work:
    """Useful arithmetic and compulsory bytes of a dense decode: the cache rows, q, out, lse and the page table."""
    rows = shape.batch * shape.s_q * shape.h_q
    pages = sum(ceil_div(length, shape.page_size) for length in shape.lengths)
    q_bytes = D_QK * (E4M3_BYTES if shape.operands == FP8 else ELEMENT_BYTES)
    cache_row_bytes = D_QK * (ELEMENT_BYTES if shape.operands == LATENT else E4M3_BYTES)
    row_bytes = q_bytes + ELEMENT_BYTES * D_V + LSE_BYTES
    return Work(
        flops=float(FLOPS_PER_PAIR * shape.s_q * shape.h_q * shape.keys),
        bytes=float(cache_row_bytes * shape.h_kv * shape.keys + row_bytes * rows + TABLE_ENTRY_BYTES * pages),
        rate=FP8_RATE if shape.operands == FP8 else 1.0,
    )


def tile_padding(shape: DecodeShape, arch: Arch) -> float:
    """Arithmetic done over arithmetic useful: a CTA always computes 64 query rows, and on Blackwell CTAs come in pairs."""
    rows = shape.s_q * (shape.h_q // shape.h_kv)
    return row_ctas(arch, rows) * TILE_ROWS / rows


@dataclass(frozen=True)
class CombineShape:
    """The shape of a combine call: `splits` partial results for every one of batch * s_q * h_q rows."""

    batch: int
    s_q: int
    h_q: int
    splits: int


def combine_work(shape: CombineShape) -> Work:
    """Compulsory bytes of merging the splits: fp32 partial outputs and lse in, out (and lse) out.

    The arithmetic (one multiply-add per element read) is far below any limit, and is counted all the same.
    """
    rows = shape.batch * shape.s_q * shape.h_q
    partial = ACCUMULATOR_BYTES * (D_V + 1)
    return Work(
        flops=float(2 * rows * shape.splits * D_V),
        bytes=float(rows * (partial * shape.splits + ELEMENT_BYTES * D_V)),
    )
