"""cache_write: new keys into a paged cache, quantised where the cache is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..runtime.current import device_for, has_kernels
from ..spec.cache_format import CacheFormat
from ..spec.cache_rows import CACHED, config_of, key_types, latent_columns, rotary_columns
from ..spec.cache_write import CacheWriteArguments, grid
from .arguments import check_flag, check_no_grad
from .cache_codec import scaled
from .cache_torch import write_rows
from .launch_plan import LaunchPlan, named_strides
from .overlap import check_no_overlap
from .paged_cache import GATHER_ALIGNMENT, MAX_SLOTS, CacheRows, cache_rows, check_cache_scale, check_format_name, dtype_of
from .strides import check_writable
from .tensor_spec import (
    DTYPE_NAMES,
    TensorSpec,
    check_address,
    check_device,
    check_dtype,
    check_last_contiguous,
    check_shape,
    operand_spec,
    optional_spec,
)


class Operands(NamedTuple):
    """The tensors that a call reads."""

    kv_c: torch.Tensor
    k_pe: torch.Tensor | None
    slot_mapping: torch.Tensor
    descale_k: torch.Tensor | None


class CallSpec(NamedTuple):
    """Everything that decides on a launch, but for values and addresses. kernels: whether the device has kernels."""

    kv_c: TensorSpec
    k_pe: TensorSpec | None
    slot_mapping: TensorSpec
    descale_k: TensorSpec | None
    k_cache: TensorSpec
    power_of_two: bool
    kv_format: Any
    kernels: bool


@dataclass(frozen=True)
class CacheWritePlan(LaunchPlan):
    """The launch of a call. rows: layout of the cache. tokens: number of keys."""

    rows: CacheRows
    tokens: int


def run(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor | None,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    descale_k: torch.Tensor | None = None,
    power_of_two: bool = False,
    kv_format: str | None = None,
) -> None:
    """Write keys, with the arguments of api.kv_cache.write_kv_cache."""
    operands = Operands(kv_c, k_pe, slot_mapping, descale_k)
    call = check(operands, k_cache, power_of_two, kv_format)
    launch_plan = plan(call)
    if call.kernels:
        check_address("k_cache", k_cache.data_ptr(), GATHER_ALIGNMENT)
        check_no_overlap({"k_cache": k_cache}, operands._asdict())
    if launch_plan.tokens == 0:
        return
    if call.kernels:
        device = device_for(k_cache.device)
        args = CacheWriteArguments(**operands._asdict(), k_cache=k_cache, **launch_plan.scalars)
        device.launch(device.kernel("cache_write", launch_plan.kernel), launch_plan.grid, args, pdl=True)
        return
    keys = kv_c if k_pe is None else torch.cat((kv_c, k_pe), dim=1)
    write_rows(launch_plan.rows, k_cache, scaled(launch_plan.rows.format, keys, descale_k), slot_mapping, power_of_two)


def check(operands: Operands, k_cache: torch.Tensor, power_of_two: bool, kv_format: Any) -> CallSpec:
    """Check each argument by itself. ValueError unless it is supported."""
    power_of_two = check_flag("power_of_two", power_of_two)
    check_no_grad(**operands._asdict(), k_cache=k_cache)
    return CallSpec(
        kv_c=operand_spec("kv_c", operands.kv_c),
        k_pe=optional_spec("k_pe", operands.k_pe),
        slot_mapping=operand_spec("slot_mapping", operands.slot_mapping),
        descale_k=optional_spec("descale_k", operands.descale_k),
        k_cache=operand_spec("k_cache", k_cache),
        power_of_two=power_of_two,
        kv_format=check_format_name(kv_format, CACHED),
        kernels=has_kernels(k_cache.device, "cache_write"),
    )


@lru_cache(maxsize=4096)
def plan(call: CallSpec) -> CacheWritePlan:
    """Return the launch of a call. ValueError unless its tensors fit together."""
    more = () if call.kernels else (torch.float32,)
    rows = cache_rows("k_cache", call.k_cache, call.kv_format, *more)
    cache, device = rows.format, call.k_cache.device
    check_writable("k_cache", call.k_cache)
    check_shape("slot_mapping", call.slot_mapping, ("tokens",))
    check_dtype("slot_mapping", call.slot_mapping, torch.int64, torch.int32)
    (tokens,) = call.slot_mapping.shape
    if tokens > MAX_SLOTS:
        raise ValueError(f"slot_mapping has shape {list(call.slot_mapping.shape)}; supported: to {MAX_SLOTS} tokens")
    _check_keys(call, cache, tokens, more)
    check_device("slot_mapping", call.slot_mapping, device, "k_cache")
    check_cache_scale(call.descale_k, cache, device)
    if call.power_of_two and not cache.groups:
        grouped = ", ".join(known.name for known in CACHED.values() if known.groups)
        raise ValueError(f"power_of_two is True with a {cache.name} cache; supported: with {grouped}")
    return CacheWritePlan(
        kernel=config_of(cache, DTYPE_NAMES[call.kv_c.dtype]).name,
        grid=grid(tokens),
        scalars={
            "kv_c_stride_token": call.kv_c.stride[0],
            "k_pe_stride_token": 0 if call.k_pe is None else call.k_pe.stride[0],
            "slot_stride_token": call.slot_mapping.stride[0],
            **named_strides("cache", "page row", (rows.page_stride, rows.row_stride)),
            "tokens": tokens,
            "slots": rows.pages * rows.page_size,
            "page_size": rows.page_size,
            "wide_slots": int(call.slot_mapping.dtype == torch.int64),
            "power_of_two": int(call.power_of_two),
        },
        rows=rows,
        tokens=tokens,
    )


def _check_keys(call: CallSpec, cache: CacheFormat, tokens: int, more: tuple[torch.dtype, ...]) -> None:
    """Raise ValueError unless kv_c and k_pe hold the columns of so many keys for a cache of this format. more: dtypes besides."""
    if rotary_columns(cache) == 0 and call.k_pe is not None:
        raise ValueError(f"k_pe is given with a {cache.name} cache; supported: None, with kv_c of all {cache.d_qk} columns")
    dtypes = (*map(dtype_of, key_types(cache)), *more) if cache.quantised else (call.k_cache.dtype,)
    for name, spec, width in (("kv_c", call.kv_c, latent_columns(cache)), ("k_pe", call.k_pe, rotary_columns(cache))):
        if spec is None and not width:
            continue
        if spec is None:
            raise ValueError(f"{name} is None with a {cache.name} cache; supported: a torch tensor")
        check_shape(name, spec, (tokens, width), f" with a {cache.name} cache and this slot_mapping")
        check_dtype(name, spec, *dtypes)
        check_last_contiguous(name, spec)
        check_device(name, spec, call.k_cache.device, "k_cache")
    if call.k_pe is not None:
        check_dtype("k_pe", call.k_pe, call.kv_c.dtype)
