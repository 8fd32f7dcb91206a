"""One decode step over a paged latent cache, on a Hopper or Blackwell GPU if there is one, else on the simulated device.

Run after `cute-mla build` (or `make build`):  python examples/dense_decode.py [sm90|sm100|sm120]
The argument is the architecture of the simulated device.
"""

from __future__ import annotations

import math
import sys
from contextlib import nullcontext

import torch

import cute_mla

GPUS = ((9, 0), (10, 0), (10, 3), (12, 0), (12, 1))  # compute capabilities that kernels are built for
PAGE_SIZE, HEAD_DIM, HEAD_DIM_V = 64, 576, 512  # 576 = 512 latent + 64 rotary columns


def paged_cache(lengths: list[int], device: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a cache for these requests [pages, 64, 1, 576] and its block table int32 [requests, pages per request]."""
    pages = [math.ceil(length / PAGE_SIZE) for length in lengths]
    k_cache = torch.randn(sum(pages), PAGE_SIZE, 1, HEAD_DIM).clamp_(-1, 1).to(dtype).to(device)
    free = torch.randperm(sum(pages), dtype=torch.int32).split(pages)  # pages may lie anywhere
    block_table = torch.nn.utils.rnn.pad_sequence(list(free), batch_first=True, padding_value=-1)  # padding is never read
    return k_cache, block_table.to(device)


def naive(q: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Compute the attention of each request in fp32 torch: [requests, heads, 512]."""
    outputs = []
    for request, length in enumerate(lengths):
        k = k_cache[block_table[request, : math.ceil(length / PAGE_SIZE)].long()].reshape(-1, HEAD_DIM)[:length].float()
        weights = torch.softmax(q[request, 0].float() @ k.T * HEAD_DIM**-0.5, dim=-1)
        outputs.append(weights @ k[:, :HEAD_DIM_V])
    return torch.stack(outputs)


def main(arch: str = "sm90") -> None:
    """Run one call that allocates nothing, and print its error against the naive version."""
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() in GPUS
    device = "cuda" if on_gpu else "cpu"
    lengths, heads = [200, 64, 1], 16
    k_cache, block_table = paged_cache(lengths, device, torch.bfloat16)
    cache_seqlens = torch.tensor(lengths, dtype=torch.int32, device=device)
    q = torch.randn(len(lengths), 1, heads, HEAD_DIM).clamp_(-1, 1).to(torch.bfloat16).to(device)

    # Eight SMs are enough for three requests and simulate faster than a whole GPU.
    with nullcontext() if on_gpu else cute_mla.simulate(arch, sm_count=8) as simulated:
        schedule, num_splits = cute_mla.get_mla_metadata(cache_seqlens, heads, 1, heads)
        workspace_bytes = cute_mla.workspace_size("dense_decode", batch=len(lengths), s_q=1, h_q=heads, device=device)
        out, lse = cute_mla.flash_mla_with_kvcache(
            q,
            k_cache,
            block_table,
            cache_seqlens,
            HEAD_DIM_V,
            schedule,
            num_splits,
            out=torch.empty(len(lengths), 1, heads, HEAD_DIM_V, dtype=q.dtype, device=device),
            lse=torch.empty(len(lengths), heads, 1, dtype=torch.float32, device=device),
            workspace=torch.empty(workspace_bytes, dtype=torch.uint8, device=device),
        )

    if simulated is not None:
        print(f"simulated {arch} with {simulated.sm_count} SMs: {simulated.instructions} warp instructions in {simulated.seconds:.1f} s")
    error = (out[:, 0].float() - naive(q, k_cache, block_table, lengths)).abs().max().item()
    print(f"out {list(out.shape)}, lse {list(lse.shape)}, largest error against fp32 torch {error:.1e}")
    if error > 0.01:
        raise SystemExit("the result is wrong")


if __name__ == "__main__":
    main(*sys.argv[1:])
