"""The operation dense_decode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from .... import reference
from ....api import flash_mla_with_kvcache, get_mla_metadata, workspace_size
from ....spec.dense_decode import FP8
from ...bounds import attention_bounds
from ...cases.base import LONGER_KEYS
from ...cases.tensors import decode_outputs, token_offsets
from ...compare import DENSE_DECODE_OUT, FP8_DENSE_OUT, Tolerance
from ..decode import decode_operands, decode_results, packed, plan_arguments, token_ranges
from ..operation import Operation, Plan, Result, operands_of, scale_argument
from ..requests import CUT, Call, Picks, at, relocated, rows_of, widened
from .case import UNUSED_TABLE_ENTRY, DenseDecodeCase, DenseDecodeTensors, make_dense_decode_tensors
from .suites import OP_SUITES

_ROWS = {"bf16": (6e-3, 4e-6), "fp16": (7e-4, 8e-8)}  # 3.0e-3, 2.8e-6; 3.2e-4, 3.9e-8
# P is rounded to e4m3: by up to 1 / 17 = 5.9e-2 in all keys that count for a row, where these have like scores and the reference that the
# exponentials refer to lags behind the maximum, as on SM100. 5.53e-2 with three such keys, 4.6e-4.
_FP8_ROWS = (6e-2, 7e-4)


def _operands(case: DenseDecodeCase, tensors: DenseDecodeTensors) -> dict[str, Any]:
    return {
        **decode_operands(case, tensors),
        **operands_of(tensors, "block_table", "cache_seqlens", "descale_q", "descale_k", "attn_sink", "tree_mask"),
        "causal": case.causal,
        "window": case.window,
        "window_sink": case.window_sink,
    }


def _arguments(case: DenseDecodeCase, tensors: DenseDecodeTensors, workspace: Tensor | None) -> dict[str, Any]:
    planned = tensors.cache_seqlens.roll(1) if case.metadata in ("stale", "longer") else tensors.cache_seqlens
    if case.metadata == "longer":
        planned[1] += LONGER_KEYS
    plan = plan_arguments(case, tensors, workspace, lambda: _plan(case, planned, tensors))
    return {**_operands(case, tensors), **plan, "few_heads": case.few_heads}


def _plan(case: DenseDecodeCase, lengths: Tensor, tensors: DenseDecodeTensors) -> Plan:
    rows = (case.max_seqlen_q or case.s_q) * case.h_q // case.h_kv
    window, window_sink = (None, 0) if case.metadata in ("stale", "longer") else (case.window, case.window_sink)
    return get_mla_metadata(
        lengths, rows, case.h_kv, case.h_q,
        cu_seqlens_q=tensors.cu_seqlens_q, total_q=case.total_q, window=window, window_sink=window_sink,
        is_fp8_q=case.plans_few_heads, head_dim_v=case.d_v,
    )  # fmt: skip


def _workspace_bytes(case: DenseDecodeCase, tensors: DenseDecodeTensors) -> int:
    return workspace_size(
        case.op,
        batch=case.batch,
        s_q=case.max_seqlen_q or case.s_q,
        total_q=case.total_q,
        h_q=case.h_q,
        h_kv=case.h_kv,
        batch_invariant=case.batch_invariant,
        max_cache_seqlen=case.pages_per_request * case.page_size if case.batch_invariant else None,
        head_dim_v=case.d_v,
        is_fp8_q=case.plans_few_heads,
        device=tensors.q.device,
    )


def _expected(arguments: Mapping[str, Any]) -> Result:
    """Attend with all query tokens, or request by request where they are packed."""
    if arguments.get("cu_seqlens_q") is None:
        return _attended(arguments)
    results = []
    for request, (first, end) in enumerate(token_ranges(arguments)):
        if first < end:
            own = {name: arguments[name][request : request + 1] for name in ("block_table", "cache_seqlens")}
            rows = {name: rows[None, first:end] for name in ("q", "tree_mask") if (rows := arguments.get(name)) is not None}
            results.append((slice(first, end), _attended({**arguments, **own, **rows})))
    return packed(arguments, results)


def _attended(arguments: Mapping[str, Any]) -> Result:
    """Attend with equally many query tokens of each request. Lengths are at least 0, at most what the block table has room for."""
    cache, table = arguments["k_cache"], arguments["block_table"]
    lengths = arguments["cache_seqlens"].clamp(0, min(table.shape[1] * cache.shape[1], (1 << 31) - 1) if len(cache) else 0)
    window = (arguments.get("window"), arguments.get("window_sink", 0))
    seen = reference.SeenKeys(bool(arguments["causal"]), arguments.get("tree_mask"), window)
    descales = (arguments.get("descale_q"), arguments.get("descale_k"))
    keys = (cache, table, lengths, scale_argument(arguments))
    out, lse = reference.dense_decode(arguments["q"], *keys, seen, arguments["empty_lse"], descales)
    sinks = arguments.get("attn_sink")
    return (out if sinks is None else reference.scale_by_sink(out, lse, sinks)), lse


def _bounds(case: DenseDecodeCase) -> Mapping[str, Tolerance]:
    fp8 = case.operands == FP8
    return attention_bounds(FP8_DENSE_OUT if fp8 else DENSE_DECODE_OUT, _FP8_ROWS if fp8 else _ROWS[case.dtype], "lse")


def _taken(case: DenseDecodeCase, tensors: DenseDecodeTensors, picks: Picks, moved: bool) -> Call:
    picked, tokens = list(picks), None if case.tokens is None else tuple(case.tokens[pick] for pick in picks)
    rows = picked if case.tokens is None else rows_of(case.offsets, case.tokens, picks)
    taken = replace(
        case, batch=len(picked), lengths=tuple(case.given_lengths[pick] for pick in picked), tokens=tokens, varlen=False, zero_lengths=False
    )
    operands = replace(
        tensors,
        q=at(tensors.q, rows),
        block_table=tensors.block_table[picked],
        cache_seqlens=tensors.cache_seqlens[picked],
        cu_seqlens_q=token_offsets(taken, tensors.q.device),
        tree_mask=None if tensors.tree_mask is None else tensors.tree_mask[rows],
        output_buffers=decode_outputs(taken, tensors.q.device),
    )
    if not moved:
        return taken, operands
    k_cache, table = relocated(operands.k_cache, operands.block_table)
    operands = replace(operands, k_cache=k_cache, block_table=widened(table, CUT // case.page_size, UNUSED_TABLE_ENTRY))
    return replace(taken, metadata="tensors"), operands


DENSE_DECODE = Operation(
    DenseDecodeCase,
    OP_SUITES,
    make_dense_decode_tensors,
    flash_mla_with_kvcache,
    _arguments,
    _expected,
    operands=_operands,
    workspace_bytes=_workspace_bytes,
    bounds=_bounds,
    taken=_taken,
    of=decode_results,
    requests=lambda case: case.batch,
    plan=lambda case, tensors: _plan(case, tensors.cache_seqlens, tensors),
)
