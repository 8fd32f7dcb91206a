"""Keys to and from paged caches."""

from __future__ import annotations

import torch

from .. import torch_ops
from ..ops import cache_gather, cache_write
from .tracing import is_traced


def write_kv_cache(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor | None,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    descale_k: torch.Tensor | None = None,
    power_of_two: bool = False,
    kv_format: str | None = None,
) -> None:
    """Write the keys of new tokens to their slots in a paged cache, quantised where the cache is.

    kv_c             latent columns, bf16 or fp16 [tokens, 512], for a cache of 584 bytes a token [tokens, 448], of 320 columns
                     [tokens, 256]; for 528 bytes a token bf16 [tokens, 512], all columns of a key
    k_pe             rotary columns [tokens, 64], of the same dtype; None for a cache of 528 bytes a token, or of 512 columns. Of both the
                     last dimension is contiguous, the other stride free
    k_cache          one of, all strides but the last free multiples of 16 bytes:
                     bf16 or fp16 [pages, page size, 1, 576, 512 or 320], of the keys' dtype, which are copied;
                     float8_e4m3fn [pages, page size, 1, 576]: keys divided by descale_k;
                     uint8, int8 or float8_e4m3fn [pages, page size, 1, 656, 584 or 528], as quantise_cache makes it, byte for byte
    slot_mapping     int64 or int32 [tokens]: page * page size + row. A token whose slot is not in [0, pages * page size), such as -1,
                     is skipped; of the others no two may be the same
    descale_k        fp32, one element on the device, for 576 bytes a token; default 1. A column is divided by it, rounded to the nearest
                     e4m3 and limited to +-448; NaN stays NaN
    power_of_two     for 656 bytes a token and "nope_528": scales are powers of two (FlashMLA's quantiser), and not just amax / 448. Those
                     of 584 bytes a token, "v41" and "v41_paged" always are
    kv_format        name of the cache's format (spec.cache_format); None where dtype and bytes a token decide. 528 bytes do not: they are
                     "v41", "v41_paged" or "nope_528"

    Allocates nothing, runs on the current stream, does not synchronise or read slots on the host, and can be captured in a CUDA graph.
    CPU tensors run on the simulated device inside cute_mla.simulate(). Where there are no kernels (other CPU tensors, GPUs of other
    architectures), plain torch does the same, which does allocate; there a cache and its keys may be fp32 too.

    Raises ValueError on bad arguments, ArtifactError if the built kernels cannot be used, DeviceError if driver or device refuse,
    SimulationError if the simulated device finds fault with a kernel.
    """
    if is_traced(k_cache):
        torch_ops.write_kv_cache(kv_c, k_pe, k_cache, slot_mapping, descale_k=descale_k, power_of_two=power_of_two, kv_format=kv_format)
    else:
        cache_write.run(kv_c, k_pe, k_cache, slot_mapping, descale_k=descale_k, power_of_two=power_of_two, kv_format=kv_format)


def gather_kv_cache(
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cu_seqlens: torch.Tensor,
    rows: int,
    *,
    starts: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    kv_format: str | None = None,
) -> torch.Tensor:
    """Gather keys of several requests out of a paged cache, one request behind the other; dequantise where the cache is quantised.

    k_cache          a cache that write_kv_cache takes
    block_table      int32 [batch, pages per request]; last dimension contiguous. An entry that no key needs is not read
    cu_seqlens       int32 [batch + 1], on the device, contiguous, not falling: row of the result at which each request's keys begin, and
                     the end of the last one's
    rows             rows of the result; rows from cu_seqlens[-1] on stay as they are
    starts           int32 [batch], on the device, contiguous: position in its request of the first key to gather; default 0
    descale_k        as in write_kv_cache
    dtype            dtype of the result, bf16 or fp16; a cache of 16-bit columns allows only its own, 528 bytes a token only bf16;
                     default bf16 for other caches
    out              tensor for the result; last dimension contiguous, other stride free
    kv_format        as in write_kv_cache

    Returns out: [rows, 576], for a cache of 584 or 528 bytes a token, or of 512 columns, [rows, 512]; of 320 columns, [rows, 320].
    A column times its scale is rounded once. A key that lies in no page (a page number outside the cache, a position beyond the block
    table) gives a row of zeros; the
    simulated device reports such a page number.

    With out given, nothing is allocated. Runs on the current stream, does not synchronise or read lengths on the host, and can be captured
    in a CUDA graph. CPU tensors run on the simulated device inside cute_mla.simulate(). Where there are no kernels (other CPU tensors,
    GPUs of other architectures), plain torch does the same, which does allocate; there a cache may be fp32 too.

    Raises ValueError on bad arguments, ArtifactError if the built kernels cannot be used, DeviceError if driver or device refuse,
    SimulationError if the simulated device finds fault with a kernel.
    """
    gather = torch_ops.gather_kv_cache if is_traced(k_cache) else cache_gather.run
    operands = (k_cache, block_table, cu_seqlens, rows)
    return gather(*operands, starts=starts, descale_k=descale_k, dtype=dtype, out=out, kv_format=kv_format)
