"""New keys into a paged cache: what a call of given shapes needs (planned once, kept), and the call itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from ..runtime.device import device_for, has_kernels
from ..spec import cache_write
from ..spec.cache_format import FP8_584, FP8_656, LATENT
from ..spec.cache_rows import FP8_576, config_of, latent_columns
from ..spec.mla import D_ROPE
from ..tensors import (
    DTYPE_NAMES,
    TensorSpec,
    check_address,
    check_apart,
    check_device,
    check_dtype,
    check_flag,
    check_last_contiguous,
    check_shape,
    check_writable,
    optional_spec,
    refuse_gradients,
    spec_of,
)
from ..tracing import is_traced
from .gathered import GATHER_ALIGNMENT, MOST_SLOTS, WIDE
from .rows import CacheRows, cache_rows, check_cache_scale
from .torch_path import write_rows


class WriteCall(NamedTuple):
    """Everything about a call but values and addresses. kernels: whether there are any for these tensors."""

    kv_c: TensorSpec
    k_pe: TensorSpec
    k_cache: TensorSpec
    slot_mapping: TensorSpec
    descale_k: TensorSpec | None
    power_of_two: bool
    kernels: bool


@dataclass(frozen=True)
class WritePlan:
    """What a call needs: the cache's layout, variant and grid, scalar arguments in the order of the kernel's parameters."""

    rows: CacheRows
    tokens: int
    kernel: str
    grid: tuple[int, int, int]
    scalars: tuple[int, ...]


def write_kv_cache(
    kv_c: torch.Tensor,
    k_pe: torch.Tensor,
    k_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    descale_k: torch.Tensor | None = None,
    power_of_two: bool = False,
) -> None:
    """Writes the keys of new tokens to their slots in a paged cache, quantised where the cache is.

    kv_c             latent columns, bf16 or fp16 [tokens, 512], for a cache of 584 bytes a token [tokens, 448]
    k_pe             rotary columns [tokens, 64], of the same dtype. Of both the last dimension is contiguous, the other stride free
    k_cache          one of, all strides but the last free multiples of 16 bytes:
                     bf16 or fp16 [pages, page size, 1, 576], of the keys' dtype, which are copied;
                     float8_e4m3fn [pages, page size, 1, 576]: keys divided by descale_k;
                     uint8, int8 or float8_e4m3fn [pages, page size, 1, 656 or 584], as quantise_cache makes it, byte for byte
    slot_mapping     int64 or int32 [tokens]: page * page size + row. A token whose slot is not in [0, pages * page size), such as -1,
                     is skipped; of the others no two may be the same
    descale_k        fp32, one element on the device, for 576 bytes a token; default 1. A column is divided by it, rounded to the nearest
                     e4m3 and limited to +-448; NaN stays NaN
    power_of_two     for 656 bytes a token: scales are powers of two (FlashMLA's quantiser), and not just amax / 448. Those of 584 bytes
                     a token always are

    Allocates nothing, runs on the current stream, does not synchronise or read slots on the host, and can be captured in a CUDA graph.
    CPU tensors run on the simulated device inside cute_mla.simulate(). Where there are no kernels (other CPU tensors, GPUs of other
    architectures), plain torch does the same, which does allocate; there a cache and its keys may be fp32 too.

    Raises ValueError on bad arguments, ArtifactError if the built kernels cannot be used, DeviceError if driver or device refuse,
    SimulationError if the simulated device finds fault with a kernel.
    """
    if is_traced(k_cache):
        from .. import torch_ops

        torch_ops.write_kv_cache(kv_c, k_pe, k_cache, slot_mapping, descale_k=descale_k, power_of_two=power_of_two)
        return
    check_flag("power_of_two", power_of_two)
    refuse_gradients(kv_c=kv_c, k_pe=k_pe, k_cache=k_cache, descale_k=descale_k)
    specs = (spec_of("kv_c", kv_c), spec_of("k_pe", k_pe), spec_of("k_cache", k_cache), spec_of("slot_mapping", slot_mapping))
    kernels = has_kernels(k_cache.device)
    plan = plan_write(WriteCall(*specs, optional_spec("descale_k", descale_k), bool(power_of_two), kernels))
    if kernels:
        check_address("k_cache", k_cache.data_ptr(), GATHER_ALIGNMENT)
        check_apart({"k_cache": k_cache}, {"kv_c": kv_c, "k_pe": k_pe, "slot_mapping": slot_mapping, "descale_k": descale_k})
    if plan.tokens == 0:
        return
    if not kernels:
        keys = torch.cat((kv_c, k_pe), dim=1)
        if plan.rows.format is FP8_576:
            keys = keys.float() if descale_k is None else keys.float() / descale_k
        write_rows(plan.rows, k_cache, keys, slot_mapping, power_of_two)
        return
    device = device_for(k_cache.device)
    memory = (kv_c, k_pe, slot_mapping, descale_k, k_cache)
    device.launch(device.kernel("cache_write", plan.kernel), plan.grid, (*memory, *plan.scalars), pdl=True)


@lru_cache(maxsize=4096)
def plan_write(call: WriteCall) -> WritePlan:
    """Checks a call and works out what it needs. ValueError on anything not supported."""
    more = () if call.kernels else (torch.float32,)
    rows = cache_rows("k_cache", call.k_cache, *more)
    cache, device = rows.format, call.k_cache.device
    check_writable("k_cache", call.k_cache)
    check_shape("slot_mapping", call.slot_mapping, ("tokens",))
    check_dtype("slot_mapping", call.slot_mapping, torch.int64, torch.int32)
    (tokens,) = call.slot_mapping.shape
    if tokens > MOST_SLOTS:
        raise ValueError(f"slot_mapping has shape {list(call.slot_mapping.shape)}; supported: to {MOST_SLOTS} tokens")
    dtypes = (call.k_cache.dtype,) if cache is LATENT else (*WIDE, *more)
    for name, spec, width in (("kv_c", call.kv_c, latent_columns(cache)), ("k_pe", call.k_pe, D_ROPE)):
        check_shape(name, spec, (tokens, width), f" with a {cache.name} cache and this slot_mapping")
        check_dtype(name, spec, *dtypes)
        check_last_contiguous(name, spec)
        check_device(name, spec, device, "k_cache")
    check_dtype("k_pe", call.k_pe, call.kv_c.dtype)
    check_device("slot_mapping", call.slot_mapping, device, "k_cache")
    check_cache_scale(call.descale_k, cache, device)
    if call.power_of_two and cache not in (FP8_656, FP8_584):
        raise ValueError(f"power_of_two is True with a {cache.name} cache; supported: with {FP8_656.name} and {FP8_584.name}")
    return WritePlan(
        rows=rows,
        tokens=tokens,
        kernel=config_of(cache, DTYPE_NAMES[call.kv_c.dtype]).name,
        grid=cache_write.grid(tokens),
        scalars=(
            *(spec.stride[0] for spec in (call.kv_c, call.k_pe, call.slot_mapping)),
            rows.page_stride,
            rows.row_stride,
            tokens,
            rows.pages * rows.page_size,
            rows.page_size,
            int(call.slot_mapping.dtype == torch.int64),
            int(call.power_of_two),
        ),
    )
