"""cache_insert: keys normalised, rotated and written to a paged cache, and queries rotated in place, in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..runtime.current import device_for
from ..spec.cache_format import CacheFormat
from ..spec.cache_insert import (
    MAX_QUERIES,
    CacheInsertArguments,
    config_of,
    grid,
    groups,
    key_blocks,
    key_types,
    normalised_columns,
    rotates,
)
from ..spec.mla import D_ROPE, MAX_HEADS
from . import cache_write
from .arguments import check_eps, check_no_grad
from .cache_codec import scaled
from .cache_torch import write_rows
from .launch_plan import LaunchPlan
from .norm_rope import angles_at, rms_norm, rotated
from .overlap import check_no_overlap
from .paged_cache import GATHER_ALIGNMENT, CacheRows, dtype_of
from .rotation_tables import check_integers, check_table
from .strides import check_writable
from .tensor_spec import (
    DTYPE_NAMES,
    TensorSpec,
    check_address,
    check_contiguous,
    check_device,
    check_dtype,
    check_last_contiguous,
    check_shape,
    operand_spec,
    optional_spec,
)


class Operands(NamedTuple):
    """The tensors that a call reads, q_pe besides those of cache_write."""

    norm_weight: torch.Tensor
    cos_sin: torch.Tensor | None
    positions: torch.Tensor | None


class Rotated(NamedTuple):
    """The tensors that a call writes besides the cache. q_pe is read too."""

    q_pe: torch.Tensor | None
    keys: torch.Tensor | None


class CallSpec(NamedTuple):
    """Everything that decides on a launch, but for values and addresses. write: the part that is a call of cache_write."""

    write: cache_write.CallSpec
    norm_weight: TensorSpec
    cos_sin: TensorSpec | None
    positions: TensorSpec | None
    q_pe: TensorSpec | None
    keys: TensorSpec | None


@dataclass(frozen=True)
class CacheInsertPlan(LaunchPlan):
    """The launch of a call. rows: layout of the cache. tokens: number of keys."""

    rows: CacheRows
    tokens: int


def run(
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
    """Insert keys, with the arguments of api.kv_cache.insert_kv_cache."""
    eps = check_eps(eps)
    writes = cache_write.Operands(kv_c, k_pe, slot_mapping, descale_k)
    operands, results = Operands(norm_weight, cos_sin, positions), Rotated(q_pe, keys)
    call = check(writes, operands, results, k_cache, power_of_two, kv_format)
    launch_plan = plan(call)
    written = {"k_cache": k_cache, **results._asdict()}
    if call.write.kernels:
        check_address("k_cache", k_cache.data_ptr(), GATHER_ALIGNMENT)
        if cos_sin is not None:
            check_address("cos_sin", cos_sin.data_ptr(), GATHER_ALIGNMENT)
        check_no_overlap(written, {**writes._asdict(), **operands._asdict()})
    if launch_plan.tokens == 0:
        return
    if call.write.kernels:
        device = device_for(k_cache.device)
        args = CacheInsertArguments(**writes._asdict(), **operands._asdict(), **written, epsilon=eps, **launch_plan.scalars)
        device.launch(device.kernel("cache_insert", launch_plan.kernel), launch_plan.grid, args, pdl=True)
        return
    made = new_keys(launch_plan.rows.format, kv_c, k_pe, operands, eps)
    if q_pe is not None and cos_sin is not None:
        q_pe.copy_(rotated(q_pe, angles_at(cos_sin, positions, len(q_pe))))
    if keys is not None:
        keys.copy_(made)
    write_rows(launch_plan.rows, k_cache, scaled(launch_plan.rows.format, made, descale_k), slot_mapping, power_of_two)


def new_keys(cache: CacheFormat, kv_c: torch.Tensor, k_pe: torch.Tensor | None, operands: Operands, eps: float) -> torch.Tensor:
    """Return keys [tokens, columns], normalised and rotated, in their dtype: the parts of the op before the cache is written."""
    columns = normalised_columns(cache)
    whole = kv_c if k_pe is None else torch.cat((kv_c, k_pe), dim=1)
    made = torch.cat((rms_norm(whole[:, :columns], operands.norm_weight, eps), whole[:, columns:]), dim=1)
    if operands.cos_sin is not None:
        made[:, -D_ROPE:] = rotated(made[:, -D_ROPE:], angles_at(operands.cos_sin, operands.positions, len(made)))
    return made


def check(
    writes: cache_write.Operands, operands: Operands, results: Rotated, k_cache: torch.Tensor, power_of_two: bool, kv_format: Any
) -> CallSpec:
    """Check each argument by itself. ValueError unless it is supported."""
    write = cache_write.check(writes, k_cache, power_of_two, kv_format)
    check_no_grad(**operands._asdict(), **results._asdict())
    return CallSpec(
        write=write,
        norm_weight=operand_spec("norm_weight", operands.norm_weight),
        cos_sin=optional_spec("cos_sin", operands.cos_sin),
        positions=optional_spec("positions", operands.positions),
        q_pe=optional_spec("q_pe", results.q_pe),
        keys=optional_spec("keys", results.keys),
    )


@lru_cache(maxsize=4096)
def plan(call: CallSpec) -> CacheInsertPlan:
    """Return the launch of a call. ValueError unless its tensors fit together."""
    write = cache_write.plan(call.write)
    cache, tokens, keys = write.rows.format, write.tokens, call.write.kv_c
    check_dtype(
        f"kv_c with a {cache.name} cache", keys, *map(dtype_of, key_types(cache)), *(() if call.write.kernels else (torch.float32,))
    )
    check_shape("norm_weight", call.norm_weight, (normalised_columns(cache),), f" with a {cache.name} cache")
    check_dtype("norm_weight", call.norm_weight, keys.dtype)
    check_contiguous("norm_weight", call.norm_weight)
    check_device("norm_weight", call.norm_weight, keys.device, "kv_c")
    table_scalars = _check_rotation(call, cache, tokens)
    heads = _check_queries(call, cache, tokens)
    if call.keys is not None:
        check_shape("keys", call.keys, (tokens, cache.d_qk), f" with a {cache.name} cache and this slot_mapping")
        _check_result("keys", call.keys, keys)
    return CacheInsertPlan(
        kernel=config_of(cache, DTYPE_NAMES[keys.dtype]).name,
        grid=grid(tokens, heads),
        scalars={
            **write.scalars,
            **table_scalars,
            "q_pe_stride_token": 0 if call.q_pe is None else call.q_pe.stride[0],
            "q_pe_stride_head": 0 if call.q_pe is None else call.q_pe.stride[1],
            "keys_stride_token": 0 if call.keys is None else call.keys.stride[0],
            "heads": heads,
            "groups": max(groups(heads), 1),
            "key_blocks": key_blocks(tokens),
        },
        rows=write.rows,
        tokens=tokens,
    )


def _check_rotation(call: CallSpec, cache: CacheFormat, tokens: int) -> dict[str, int]:
    """Return the scalars of cos_sin and positions. ValueError unless they fit the format."""
    table, positions, device = call.cos_sin, call.positions, call.write.kv_c.device
    if not rotates(cache):
        for name, spec in (("cos_sin", table), ("positions", positions)):
            if spec is not None:
                raise ValueError(f"{name} is given with a {cache.name} cache; supported: None, since its keys have no rotary columns")
        return dict.fromkeys(("position_stride_token", "cos_sin_stride_position", "table_rows", "wide_positions"), 0)
    if table is None:
        raise ValueError(f"cos_sin is None with a {cache.name} cache; supported: a torch tensor")
    check_table("cos_sin", table, device, "kv_c")
    if positions is not None:
        check_integers("positions", positions, tokens, device, "kv_c")
    return {
        "position_stride_token": 0 if positions is None else positions.stride[0],
        "cos_sin_stride_position": table.stride[0],
        "table_rows": table.shape[0],
        "wide_positions": int(positions is not None and positions.dtype == torch.int64),
    }


def _check_queries(call: CallSpec, cache: CacheFormat, tokens: int) -> int:
    """Return the heads of q_pe, 0 without it. ValueError unless it fits the keys."""
    q_pe = call.q_pe
    if q_pe is None:
        return 0
    if not rotates(cache):
        raise ValueError(f"q_pe is given with a {cache.name} cache; supported: None, since its keys have no rotary columns")
    check_shape("q_pe", q_pe, (tokens, "heads", D_ROPE), " with this slot_mapping")
    heads = q_pe.shape[1]
    if not 1 <= heads <= MAX_HEADS or tokens * heads > MAX_QUERIES:
        raise ValueError(f"q_pe has shape {list(q_pe.shape)}; supported: 1 to {MAX_HEADS} heads, to {MAX_QUERIES} rows in all")
    _check_result("q_pe", q_pe, call.write.kv_c)
    return heads


def _check_result(name: str, spec: TensorSpec, keys: TensorSpec) -> None:
    """Raise ValueError unless a written tensor has the keys' dtype and device, distinct elements and contiguous rows."""
    check_dtype(name, spec, keys.dtype)
    check_last_contiguous(name, spec)
    check_writable(name, spec)
    check_device(name, spec, keys.device, "kv_c")
