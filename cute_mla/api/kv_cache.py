"""Keys to and from paged caches."""

from __future__ import annotations

import torch

from ..tracing import caches
from ..tracing.public import public


@public(caches.WRITE, tensor="k_cache")
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

    kv_c             latent columns, bf16, or fp16 for a cache of fp16: [tokens, 512], for a cache of 584 bytes a token [tokens, 448], of
                     320 columns [tokens, 256], of 1,088 [tokens, 1024]; for 528 bytes a token all columns of a key, [tokens, 512]
    k_pe             rotary columns [tokens, 64], of the same dtype; None for a cache of 528 bytes a token, or of 512 columns. Of both the
                     last dimension is contiguous, the other stride free
    k_cache          one of, all strides but the last any positive multiples of 16 bytes:
                     bf16 or fp16 [pages, page size, 1, 576, 512, 320 or 1088], of the keys' dtype, which are copied;
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


@public(caches.INSERT, tensor="k_cache")
def insert_kv_cache(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor | None,
    q_pe: torch.Tensor | None,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    norm_weight: torch.Tensor,
    cos_sin: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    *,
    keys: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
    power_of_two: bool = False,
    kv_format: str | None = None,
    eps: float = 1e-6,
) -> None:
    """Normalise, rotate, quantise and write the keys of new tokens to a paged cache, and rotate the tokens' queries, in one launch.

    kv_c, k_pe       as in write_kv_cache, before norm and rotation
    q_pe             rotary columns of queries, of the same dtype, [tokens, heads, 64], 1 to 128 heads; last dimension contiguous, other
                     strides free. Rotated in place. None: there are none
    k_cache, slot_mapping
                     as in write_kv_cache
    norm_weight      of RMSNorm, of the keys' dtype, contiguous: [512], of 320 columns [256], of 1,088 [1024]. In "fp8_584", "v41" and
                     "v41_paged" the norm is over all 512 columns, rotary ones included; in other formats over those of kv_c
    cos_sin          fp32 [positions, 64]: the cosines of 32 pairs of columns, then their sines; rows multiples of 16 bytes apart. A pair is
                     rotary columns 2i and 2i + 1. Rotary columns are k_pe, in "v41" and "v41_paged" the last 64 of kv_c. None for
                     "latent_512" and "nope_528", whose keys have none, as positions and q_pe
    positions        int64 or int32 [tokens]: row of cos_sin of each token; None: row t for token t. At a position outside cos_sin the
                     rotary columns are NaN
    keys             tensor for the normalised and rotated keys, of their dtype, [tokens, columns of a key], before they are quantised; last
                     dimension contiguous, other stride free. None: they are not kept
    descale_k, power_of_two, kv_format
                     as in write_kv_cache
    eps              added to the mean of squares

    Bits are those of the parts one after the other: RMSNorm in fp32, rounded to the keys' dtype; rotation in fp32, rounded to it; then
    write_kv_cache. Each operation of norm and rotation is rounded by itself, and the sum of squares adds neighbours, then neighbouring
    sums, and so on (torch's order is another one). A token whose slot is outside the cache is not written to the cache; its queries are
    rotated, and its key is kept.

    cos_sin and k_cache start at multiples of 16 bytes; q_pe, keys and k_cache share memory with nothing else. Allocates
    nothing, runs on the current stream, does not synchronise or read slots on the host, and can be captured in a CUDA graph. CPU tensors
    run on the simulated device inside cute_mla.simulate(). Where there are no kernels, plain torch does the same, which does allocate;
    there cache, keys and queries may be fp32 too.

    Raises ValueError on bad arguments, ArtifactError if the built kernels cannot be used, DeviceError if driver or device refuse,
    SimulationError if the simulated device finds fault with a kernel.
    """


@public(caches.GATHER, tensor="k_cache")
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
    dtype            dtype of the result: that of a cache of 16-bit columns, bf16 for other caches
    out              tensor for the result; last dimension contiguous, other stride free
    kv_format        as in write_kv_cache

    Returns out: [rows, 576], for a cache of 584 or 528 bytes a token, or of 512 columns, [rows, 512]; of 320 or 1,088, as many.
    A column times its scale is rounded once. A key that lies in no page (a page number outside the cache, a position beyond the block
    table) gives a row of zeros; the simulated device reports such a page number.

    With out given, nothing is allocated. Runs on the current stream, does not synchronise or read lengths on the host, and can be captured
    in a CUDA graph. CPU tensors run on the simulated device inside cute_mla.simulate(). Where there are no kernels (other CPU tensors,
    GPUs of other architectures), plain torch does the same, which does allocate; there a cache may be fp32 too.

    Raises ValueError on bad arguments, ArtifactError if the built kernels cannot be used, DeviceError if driver or device refuse,
    SimulationError if the simulated device finds fault with a kernel.
    """
