"""Ops of decode: plans, and attention over paged caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops import decode, split_plan
from ..ops.limits import value_columns
from ..ops.split_plan import MlaSchedule, ScheduleKey
from ..runtime.current import device_for
from ..spec.split_plan import PLAN_COLUMNS
from .register import Function, TorchOp, ops

_PLAN = "(Tensor tile_scheduler_metadata, Tensor num_splits)"


def _results(q: Tensor, cu_seqlens_q: Tensor | None, **others: Any) -> tuple[Tensor, Tensor]:
    """Allocate out and lse of decode."""
    shape = "[batch, s_q, h_q, columns]" if cu_seqlens_q is None else "[total_q, h_q, columns]"
    if q.dim() != (4 if cu_seqlens_q is None else 3):
        raise ValueError(f"q has shape {list(q.shape)}; supported: {shape}")
    *tokens, h_q, d_qk = q.shape
    dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    out = q.new_empty((*tokens, h_q, value_columns(d_qk)), dtype=dtype)
    return out, q.new_empty((*tokens[:1], h_q, *tokens[1:]), dtype=torch.float32)


def _with_plan(call: Function, arguments: dict[str, Any]) -> Any:
    """Call the op with a plan's two tensors. Those of a schedule object are made at its first use."""
    metadata, num_splits = arguments["tile_scheduler_metadata"], arguments["num_splits"]
    if isinstance(metadata, MlaSchedule) and num_splits is None:
        metadata, num_splits = _planned_by(metadata, **arguments)
    elif not isinstance(metadata, Tensor) or num_splits is None:
        split_plan.plan_specs(metadata, num_splits)  # raises ValueError
    return call(**{**arguments, "tile_scheduler_metadata": metadata, "num_splits": num_splits})


def _planned_by(schedule: MlaSchedule, **arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the plan of a schedule object; make it at its first use. The op compares shapes with it when it runs."""
    if schedule.plan is not None:
        return schedule.plan
    q, k_cache, indices, extra = (arguments[name] for name in ("q", "k_cache", "indices", "extra_indices_in_kvcache"))
    offsets, max_seqlen_q = arguments["cu_seqlens_q"], arguments["max_seqlen_q"]
    if (offsets is None) != (max_seqlen_q is None) or q.dim() != (4 if offsets is None else 3):
        raise ValueError(f"q has shape {list(q.shape)}; supported: 4 dimensions, or 3 with cu_seqlens_q and max_seqlen_q")
    *tokens, h_q, _ = q.shape
    batch, s_q = tokens if offsets is None else (offsets.shape[0] - 1, max_seqlen_q)
    total_q = None if offsets is None else tokens[0]
    page_size, h_kv = k_cache.shape[1:3]
    table_rows = 0
    if indices is None:
        topk = extra_topk = None
        per_head = (s_q * (h_q // h_kv), h_kv, h_q)
        given = {"cu_seqlens_q": offsets, "total_q": total_q} | {name: arguments[name] for name in ("window", "window_sink", "head_dim_v")}
        plan = ops.get_mla_metadata(arguments["cache_seqlens"], *per_head, **given, is_fp8_q=q.dtype == torch.float8_e4m3fn)
        if total_q is not None:
            table_rows = split_plan.ragged_queries(batch, total_q, s_q, h_q // h_kv).table_rows
    else:
        topk, extra_topk = indices.shape[-1], 0 if extra is None else extra.shape[-1]
        lengths = (arguments["topk_length"], extra, arguments["extra_topk_length"])
        plan = ops.plan_sparse_decode(indices, h_q, *lengths, offsets)
    parts = plan[0].shape[0] - table_rows
    shapes = (batch, s_q, h_q, h_kv, page_size, parts, q.device, topk, extra_topk, total_q)
    schedule.key = ScheduleKey(*shapes, arguments["window"], arguments["window_sink"])
    schedule.plan = plan
    return plan


def _new_plan(cache_seqlens: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
    """Allocate the result of get_mla_metadata."""
    options = split_plan.Options(*(arguments[name] for name in split_plan.Options._fields))
    return _plan_tensors(options.call(cache_seqlens.shape[0]), cache_seqlens)


def _new_sparse_plan(indices: Tensor, num_heads_q: int, **others: Any) -> tuple[Tensor, Tensor]:
    s_q = indices.shape[1] if indices.dim() == 3 else 1
    return _plan_tensors(split_plan.CallSpec(indices.shape[0], num_heads_q, max(s_q, 1), indices.shape[-1], 0, sparse=True), indices)


def _plan_tensors(call: split_plan.CallSpec, like: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate a plan's two tensors."""
    device = device_for(like.device)
    rows = call.num_parts(device.arch, device.sm_count) + (call.ragged.table_rows if call.ragged else 0)
    return like.new_empty((rows, PLAN_COLUMNS)), like.new_empty((call.batch + 1,))


WITH_KVCACHE = TorchOp(
    decode.BODY,
    _results,
    ("out", "lse", "workspace?"),
    spelled={
        "head_dim_v": "int head_dim_v",
        "tile_scheduler_metadata": "Tensor tile_scheduler_metadata",
        "num_splits": "Tensor num_splits",
    },
    traced=_with_plan,
)
METADATA = TorchOp(
    split_plan.run,
    _new_plan,
    spelled={"num_heads_k": "int num_heads_k", "num_heads_q": "int? num_heads_q=None"},
    returned=_PLAN,
)
TorchOp(split_plan.run_sparse, _new_sparse_plan, returned=_PLAN).register(split_plan.run_sparse, "plan_sparse_decode")
