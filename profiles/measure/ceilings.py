"""Ceilings of the device, measured in the same run: matmul rate, copy bandwidth and L2 read bandwidth."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .timing import Call

MATMUL_EXTENT = 8192
COPY_BYTES = 1 << 30
L2_TURNS = 64  # reads of the same bytes in one launch


@dataclass(frozen=True)
class Ceilings:
    """Three calls with the work of each: a large matrix product, a large copy, and reads of an L2-resident tensor."""

    matmul: Call
    matmul_flops: float
    copy: Call
    copy_bytes: float
    l2_read: Call
    l2_read_bytes: float


def make_ceilings(device: torch.device, l2_bytes: int, extent: int = MATMUL_EXTENT, copy_bytes: int = COPY_BYTES) -> Ceilings:
    """Allocate the operands of the three ceilings on a device whose L2 cache has l2_bytes.

    matmul: cuBLAS, bf16, random operands (zeros run faster). copy: bytes count as read and written.
    l2_read: torch.sum over fp32 values that fill half of the L2 cache, L2_TURNS sums of the same values in one launch. Only the first
    turn reads device memory. The rate is a lower bound on L2 bandwidth: some reads may hit L1, and another kernel may read faster.
    """
    generator = torch.Generator(device=device).manual_seed(extent)
    left, right = (torch.randn(extent, extent, device=device, dtype=torch.bfloat16, generator=generator) / 10 for _ in range(2))
    product = torch.empty_like(left)
    source = torch.randint(0, 256, (copy_bytes,), device=device, dtype=torch.uint8, generator=generator)
    target = torch.empty_like(source)
    resident = torch.randn(l2_bytes // 2 // 4, device=device, generator=generator)
    turns, sums = resident.expand(L2_TURNS, -1), torch.empty(L2_TURNS, device=device)
    return Ceilings(
        matmul=lambda: torch.matmul(left, right, out=product),
        matmul_flops=2.0 * extent**3,
        copy=lambda: target.copy_(source),
        copy_bytes=2.0 * copy_bytes,
        l2_read=lambda: torch.sum(turns, dim=1, out=sums),
        l2_read_bytes=float(L2_TURNS * resident.nbytes),
    )
