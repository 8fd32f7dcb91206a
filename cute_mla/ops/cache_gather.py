"""cache_gather: keys of several requests out of a paged cache, one behind the other, dequantised where the cache is quantised."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..runtime.current import device_for, has_kernels
from ..spec.cache_gather import CacheGatherArguments, grid
from ..spec.cache_rows import CACHED, config_of, key_types
from .arguments import check_integer, check_no_grad, short_repr
from .cache_torch import gather_requests
from .launch_plan import LaunchPlan, named_strides
from .overlap import check_no_overlap
from .paged_cache import GATHER_ALIGNMENT, CacheRows, cache_rows, check_cache_scale, check_format_name, dtype_of
from .strides import output_strides
from .tensor_spec import (
    DTYPE_NAMES,
    TensorSpec,
    check_address,
    check_counts,
    check_device,
    check_dtype,
    check_last_contiguous,
    check_shape,
    operand_spec,
    optional_spec,
)

MAX_ROWS = (1 << 31) - 1  # rows of out, which are counted in 32 bits


class Operands(NamedTuple):
    """The tensors that a call reads."""

    k_cache: torch.Tensor
    block_table: torch.Tensor
    cu_seqlens: torch.Tensor
    starts: torch.Tensor | None
    descale_k: torch.Tensor | None


class Options(NamedTuple):
    """The arguments that are not tensors."""

    rows: int
    dtype: torch.dtype | None
    kv_format: str | None


class CallSpec(NamedTuple):
    """Everything that decides on a launch, but for values and addresses. kernels: whether the device has kernels."""

    k_cache: TensorSpec
    block_table: TensorSpec
    cu_seqlens: TensorSpec
    starts: TensorSpec | None
    descale_k: TensorSpec | None
    options: Options
    out: TensorSpec | None
    kernels: bool


@dataclass(frozen=True)
class CacheGatherPlan(LaunchPlan):
    """The launch of a call. cache: its layout. shape, dtype: of out. is_empty: whether no row is written."""

    cache: CacheRows
    shape: tuple[int, int]
    dtype: torch.dtype
    is_empty: bool


def run(
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
    """Gather keys, with the arguments of api.kv_cache.gather_kv_cache."""
    operands = Operands(k_cache, block_table, cu_seqlens, starts, descale_k)
    call = check(operands, Options(rows, dtype, kv_format), out)
    launch_plan = plan(call)
    if call.kernels:
        check_address("k_cache", k_cache.data_ptr(), GATHER_ALIGNMENT)
        check_no_overlap({"out": out}, operands._asdict())
    allocated = out is None
    if out is None:
        out = k_cache.new_empty(launch_plan.shape, dtype=launch_plan.dtype)
    if not call.kernels:
        if not launch_plan.is_empty:
            gather_requests(launch_plan.cache, *operands, out)
        return out
    device = device_for(k_cache.device)
    if allocated:
        device.mark_uninitialized(out)
    if not launch_plan.is_empty:
        args = CacheGatherArguments(**operands._asdict(), out=out, **launch_plan.scalars)
        device.launch(device.kernel("cache_gather", launch_plan.kernel), launch_plan.grid, args, pdl=True)
    return out


def check(operands: Operands, options: Options, out: Any) -> CallSpec:
    """Check each argument by itself. ValueError unless it is supported."""
    rows = check_integer("rows", options.rows, 0, MAX_ROWS)
    if options.dtype is not None and not isinstance(options.dtype, torch.dtype):
        raise ValueError(f"dtype is {short_repr(options.dtype)}; supported: None and a torch dtype")
    check_format_name(options.kv_format, CACHED)
    check_no_grad(k_cache=operands.k_cache, descale_k=operands.descale_k, out=out)
    k_cache = operand_spec("k_cache", operands.k_cache)
    return CallSpec(
        k_cache=k_cache,
        block_table=operand_spec("block_table", operands.block_table),
        cu_seqlens=operand_spec("cu_seqlens", operands.cu_seqlens),
        starts=optional_spec("starts", operands.starts),
        descale_k=optional_spec("descale_k", operands.descale_k),
        options=options._replace(rows=rows),
        out=optional_spec("out", out),
        kernels=has_kernels(k_cache.device, "cache_gather"),
    )


@lru_cache(maxsize=4096)
def plan(call: CallSpec) -> CacheGatherPlan:
    """Return the launch of a call. ValueError unless its tensors fit together."""
    more = () if call.kernels else (torch.float32,)
    cache = cache_rows("k_cache", call.k_cache, call.options.kv_format, *more)
    table, device, rows = call.block_table, call.k_cache.device, call.options.rows
    check_shape("block_table", table, ("batch", "pages per request"))
    check_dtype("block_table", table, torch.int32)
    check_last_contiguous("block_table", table)
    check_device("block_table", table, device, "k_cache")
    check_counts("cu_seqlens", call.cu_seqlens, (table.shape[0] + 1,), device, "k_cache")
    if call.starts is not None:
        check_counts("starts", call.starts, (table.shape[0],), device, "k_cache")
    check_cache_scale(call.descale_k, cache.format, device)
    dtype = _dtype(call, cache, more)
    shape = (rows, cache.format.d_qk)
    strides = output_strides("out", call.out, shape, dtype, call.k_cache)
    if call.out is not None:
        check_last_contiguous("out", call.out)
    return CacheGatherPlan(
        kernel=config_of(cache.format, DTYPE_NAMES[dtype]).name,
        grid=grid(rows),
        scalars={
            **named_strides("cache", "page row", (cache.page_stride, cache.row_stride)),
            "table_stride_batch": table.stride[0],
            "out_stride_row": strides[0],
            "rows": rows,
            "batch": table.shape[0],
            "pages": cache.pages,
            "page_size": cache.page_size,
            "table_pages": table.shape[1],
        },
        cache=cache,
        shape=shape,
        dtype=dtype,
        is_empty=rows == 0 or table.shape[0] == 0,
    )


def _dtype(call: CallSpec, cache: CacheRows, more: tuple[torch.dtype, ...]) -> torch.dtype:
    """Return the dtype of out. ValueError for a dtype that this cache does not give."""
    wanted = call.options.dtype
    given = wanted if wanted is not None or call.out is None else call.out.dtype
    own = torch.bfloat16 if cache.format.quantised else call.k_cache.dtype
    supported = (*map(dtype_of, key_types(cache.format)), *more) if cache.format.quantised else (own,)
    if given is not None and given not in supported:
        raise ValueError(
            f"dtype is {given} with a {cache.format.name} cache of {call.k_cache.dtype}; supported: {', '.join(map(str, supported))}"
        )
    return own if given is None else given
