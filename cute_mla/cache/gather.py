"""Keys out of a paged cache: what a call of given shapes needs (planned once, kept), and the call itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from ..runtime.device import device_for, has_kernels
from ..spec import cache_gather
from ..spec.cache_format import LATENT
from ..spec.cache_rows import config_of
from ..tensors import (
    DTYPE_NAMES,
    TensorSpec,
    check_address,
    check_apart,
    check_counts,
    check_device,
    check_dtype,
    check_integer,
    check_last_contiguous,
    check_shape,
    optional_spec,
    output_strides,
    refuse_gradients,
    shown,
    spec_of,
)
from ..tracing import is_traced
from .gathered import GATHER_ALIGNMENT, WIDE
from .rows import CacheRows, cache_rows, check_cache_scale
from .torch_path import gather_rows

MOST_ROWS = (1 << 31) - 1  # of out: they are counted in 32 bits


class GatherCall(NamedTuple):
    """Everything about a call but values and addresses. kernels: whether there are any for these tensors."""

    k_cache: TensorSpec
    block_table: TensorSpec
    cu_seqlens: TensorSpec
    rows: int
    starts: TensorSpec | None
    descale_k: TensorSpec | None
    dtype: torch.dtype | None
    out: TensorSpec | None
    kernels: bool


@dataclass(frozen=True)
class GatherPlan:
    """What a call needs: the cache's layout, variant and grid, its result, scalar arguments in the order of the kernel's parameters."""

    cache: CacheRows
    shape: tuple[int, int]
    dtype: torch.dtype
    kernel: str
    grid: tuple[int, int, int]
    scalars: tuple[int, ...]


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
) -> torch.Tensor:
    """Keys of several requests out of a paged cache, one behind the other, dequantised where the cache is quantised.

    k_cache          as write_kv_cache takes it
    block_table      int32 [batch, pages per request]; last dimension contiguous. An entry that no key asks for is not read
    cu_seqlens       int32 [batch + 1], on the device, contiguous, not falling: row of the result at which each request's keys begin, and
                     the end of the last one's
    rows             rows of the result; those from cu_seqlens[-1] on are left as they are
    starts           int32 [batch], on the device, contiguous: position in its request of the first key that is wanted; default 0
    descale_k        as in write_kv_cache
    dtype            of the result, bf16 or fp16; default and only choice for a cache of 16-bit columns: its own; else bf16
    out              for the result; last dimension contiguous, other stride free

    Returns out: [rows, 576], for a cache of 584 bytes a token [rows, 512]. A column times its scale is rounded once. A key that lies in no
    page (a page number outside the cache, a position beyond the block table) is a row of zeros.

    With out given, nothing is allocated. Runs on the current stream, does not synchronise or read lengths on the host, and can be captured
    in a CUDA graph. CPU tensors run on the simulated device inside cute_mla.simulate(). Where there are no kernels (other CPU tensors,
    GPUs of other architectures), plain torch does the same, which does allocate; there a cache may be fp32 too.

    Raises ValueError on bad arguments, ArtifactError if the built kernels cannot be used, DeviceError if driver or device refuse,
    SimulationError if the simulated device finds fault with a kernel.
    """
    if is_traced(k_cache):
        from .. import torch_ops

        return torch_ops.gather_kv_cache(k_cache, block_table, cu_seqlens, rows, starts=starts, descale_k=descale_k, dtype=dtype, out=out)
    check_integer("rows", rows, 0, MOST_ROWS)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype is {shown(dtype)}; supported: None and a torch dtype")
    refuse_gradients(k_cache=k_cache, descale_k=descale_k, out=out)
    kernels = has_kernels(spec_of("k_cache", k_cache).device)
    call = GatherCall(
        k_cache=spec_of("k_cache", k_cache),
        block_table=spec_of("block_table", block_table),
        cu_seqlens=spec_of("cu_seqlens", cu_seqlens),
        rows=rows,
        starts=optional_spec("starts", starts),
        descale_k=optional_spec("descale_k", descale_k),
        dtype=dtype,
        out=optional_spec("out", out),
        kernels=kernels,
    )
    plan = plan_gather(call)
    if kernels:
        check_address("k_cache", k_cache.data_ptr(), GATHER_ALIGNMENT)
        operands = {"k_cache": k_cache, "block_table": block_table, "cu_seqlens": cu_seqlens, "starts": starts, "descale_k": descale_k}
        check_apart({"out": out}, operands)
    allocated = out is None
    if out is None:
        out = k_cache.new_empty(plan.shape, dtype=plan.dtype)
    if not kernels:
        if rows and block_table.shape[0]:
            _gather_by_torch(plan.cache, k_cache, (block_table, cu_seqlens, starts), descale_k, out)
        return out
    device = device_for(k_cache.device)
    if allocated:
        device.undefined(out)
    if rows and block_table.shape[0]:
        memory = (k_cache, block_table, cu_seqlens, starts, descale_k, out)
        device.launch(device.kernel("cache_gather", plan.kernel), plan.grid, (*memory, *plan.scalars), pdl=True)
    return out


def _gather_by_torch(
    cache: CacheRows,
    k_cache: torch.Tensor,
    wanted: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    descale_k: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Fills out. wanted: block table, cu_seqlens and starts."""
    table, cu_seqlens, starts = wanted
    if table.shape[1] == 0:
        table = table.new_full((table.shape[0], 1), -1)  # requests without pages: one entry that names none
    place = torch.arange(out.shape[0], device=out.device)
    request = torch.searchsorted(cu_seqlens[1:].long(), place, right=True)  # of those that end at or before a row, the number
    exists = request < table.shape[0]
    request = request.clamp(max=table.shape[0] - 1)
    position = place - cu_seqlens[request]
    inside = position >= 0
    if starts is not None:
        inside &= starts[request] >= 0
        position = position + starts[request]
    column = position // cache.page_size
    inside &= column < table.shape[1]
    page = table[request, column.clamp(0, table.shape[1] - 1)].long()
    inside &= (page >= 0) & (page < cache.pages)
    slots = torch.where(inside, page * cache.page_size + position % cache.page_size, 0)
    keys = torch.where(inside[:, None], gather_rows(cache, k_cache, slots, descale_k), 0.0)
    out.copy_(torch.where(exists[:, None], keys.to(out.dtype), out))


@lru_cache(maxsize=4096)
def plan_gather(call: GatherCall) -> GatherPlan:
    """Checks a call and works out what it needs. ValueError on anything not supported."""
    more = () if call.kernels else (torch.float32,)
    cache = cache_rows("k_cache", call.k_cache, *more)
    table, device = call.block_table, call.k_cache.device
    check_shape("block_table", table, ("batch", "pages per request"))
    check_dtype("block_table", table, torch.int32)
    check_last_contiguous("block_table", table)
    check_device("block_table", table, device, "k_cache")
    check_counts("cu_seqlens", call.cu_seqlens, (table.shape[0] + 1,), call.k_cache)
    if call.starts is not None:
        check_counts("starts", call.starts, (table.shape[0],), call.k_cache)
    check_cache_scale(call.descale_k, cache.format, device)
    dtype = _dtype(call, cache, more)
    shape = (call.rows, cache.format.d_qk)
    strides = output_strides("out", call.out, shape, dtype, call.k_cache)
    if call.out is not None:
        check_last_contiguous("out", call.out)
    return GatherPlan(
        cache=cache,
        shape=shape,
        dtype=dtype,
        kernel=config_of(cache.format, DTYPE_NAMES[dtype]).name,
        grid=cache_gather.grid(call.rows),
        scalars=(
            cache.page_stride,
            cache.row_stride,
            table.stride[0],
            strides[0],
            call.rows,
            table.shape[0],
            cache.pages,
            cache.page_size,
            table.shape[1],
        ),
    )


def _dtype(call: GatherCall, cache: CacheRows, more: tuple[torch.dtype, ...]) -> torch.dtype:
    """Of the result. ValueError for one that it cannot have."""
    given = call.dtype if call.dtype is not None or call.out is None else call.out.dtype
    own = call.k_cache.dtype if cache.format is LATENT else torch.bfloat16
    supported = (own,) if cache.format is LATENT else (*WIDE, *more)
    if given is not None and given not in supported:
        raise ValueError(
            f"dtype is {given} with a {cache.format.name} cache of {call.k_cache.dtype}; supported: {', '.join(map(str, supported))}"
        )
    return own if given is None else given
