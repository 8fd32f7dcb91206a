"""What the device gives in the same run: calls whose rates are the ceilings that a row is set against."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .timing import Call

MATMUL_EXTENT = 8192
COPY_BYTES = 1 << 30
L2_TURNS = 64  # how often one launch reads the same bytes


@dataclass(frozen=True)
class Ceilings:
    """Calls, and the work of each: a large matrix product, a large copy, and reads of what stays in L2."""

    matmul: Call
    matmul_flops: float
    copy: Call
    copy_bytes: float
    l2_read: Call
    l2_read_bytes: float


def make_ceilings(device: torch.device, l2_bytes: int, extent: int = MATMUL_EXTENT, copy_bytes: int = COPY_BYTES) -> Ceilings:
    """cuBLAS bf16 on random operands (zeros run faster and prove nothing), and a device copy counted as read plus write.

    The third is torch's sum over fp32 values that fill half of l2_bytes, L2_TURNS sums of the same values in one launch. It is
    what this reduction reads, at most the first turn of it from device memory: a bound from below on what L2 can give, not
    a limit that no kernel could exceed. Part of it may be hits in L1, if a multiprocessor meets the same bytes again.
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
