"""Keys of the indexer into an index cache, and its queries prepared likewise."""

from __future__ import annotations

import torch

from ..spec.index_write import Rope, ScaleFormat
from ..tracing import indexer
from ..tracing.public import public


@public(indexer.WRITE, tensor="k")
def write_index_cache(
    k: torch.Tensor,
    index_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    rope: Rope,
    hadamard: bool = False,
    scale_format: ScaleFormat = "fp32",
    eps: float = 1e-6,
) -> None:
    """Normalise, rotate and quantise the indexer's keys of new tokens, and write them to their slots in an index cache, in one launch.

    k                what wk gives, bf16 [tokens, 128]; last dimension contiguous, other stride free
    index_cache      uint8 [pages, page size, 1, 132], as fp8_paged_mqa_logits reads it: in each page the values of its keys, e4m3
                     [page size, 128], then 4 bytes of scale for each. Page size 16, 32, 64 or 128; pages contiguous, any multiple of 16
                     bytes apart
    slot_mapping     int64 or int32 [tokens]: page * page size + row. A token whose slot is not in [0, pages * page size), such as -1,
                     is skipped; of the others no two may be the same
    norm_weight, norm_bias
                     of LayerNorm, fp32 [128]
    cos_sin          fp32 [positions, 64]: the cosines of 32 pairs of columns, then their sines; rows multiples of 16 bytes apart
    positions        int64 or int32 [tokens]: row of cos_sin of each token; None: row t for token t. A position outside cos_sin makes the
                     key NaN
    rope             pairs of the first 64 columns: "half_split", columns i and i + 32 (DeepSeek-V3.2), or "interleaved", columns 2i and
                     2i + 1 (GLM-5)
    hadamard         True: all columns are multiplied with Hadamard's matrix in natural order, times 128^-1/2, behind the rotation
    scale_format     "fp32", which the logits of this library read, or "ue8m0": four equal exponents
    eps              added to the variance

    The bytes of a cache tell neither its pairs, nor whether it was transformed, nor (by shape and dtype) what its scales are. Queries must
    be prepared with the same `rope` and `hadamard`.

    All of it is fp32, and each operation is rounded by itself; nothing is rounded to bf16 in between. Sums over columns add neighbours,
    then neighbouring sums, and so on. A key's scale is the least power of two that is not below max(amax, 1e-4) / 448; values are divided
    by it, rounded to the nearest e4m3 and limited to +-448. A key with a NaN or an infinity becomes NaN, scale and values. A key's bytes
    depend on that key alone.

    Allocates nothing, runs on the current stream, does not synchronise or read slots on the host, and can be captured in a CUDA graph.
    cos_sin, norm_weight, norm_bias and index_cache start at multiples of 16 bytes. CPU tensors run on the simulated device inside
    cute_mla.simulate(). Where there are no kernels, plain torch does the same bit for bit, which does allocate; there k may be fp32 too.

    Raises ValueError on bad arguments, ArtifactError if the built kernels cannot be used, DeviceError if driver or device refuse,
    SimulationError if the simulated device finds fault with a kernel.
    """


@public(indexer.QUERIES)
def prepare_index_queries(
    q: torch.Tensor,
    weights: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    rope: Rope,
    hadamard: bool = False,
    out: torch.Tensor | None = None,
    out_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate and quantise the indexer's queries, and scale the weights of their heads, in one launch.

    q                what wq_b gives, bf16 [tokens, heads, 128], 1 to 64 heads; last dimension contiguous, other strides free
    weights          what weights_proj gives, fp32 or bf16 [tokens, heads]; last dimension contiguous
    cos_sin, positions
                     as in write_index_cache
    rope, hadamard   likewise, and the same as the keys have
    out              float8_e4m3fn [tokens, heads, 128]; last dimension contiguous, other strides multiples of 16 bytes
    out_weights      fp32 [tokens, heads]; last dimension contiguous. Both share memory with nothing else

    Returns (out, out_weights), as the functions of logits take them. Each query has one scale, as keys have in write_index_cache, and is
    not normalised. The new weight of a head is weights * f * scale in this order, with f = heads^-1/2 * 128^-1/2 in fp32; each product is
    rounded by itself. A query with a NaN or an infinity, or at a position outside cos_sin, becomes NaN, and so does its weight.

    With out and out_weights given, nothing is allocated. Runs on the current stream, does not synchronise, and can be captured in a CUDA
    graph. cos_sin and out start at multiples of 16 bytes. CPU tensors run on the simulated device inside cute_mla.simulate(). Where there
    are no kernels, plain torch does the same bit for bit; there q may be fp32 too.

    Raises ValueError on bad arguments, ArtifactError if the built kernels cannot be used, DeviceError if driver or device refuse,
    SimulationError if the simulated device finds fault with a kernel.
    """
