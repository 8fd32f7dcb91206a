"""The operation sparse_prefill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from .... import reference
from ....api import flash_mla_sparse_fwd, workspace_size
from ....spec.mla import D_V
from ...bounds import attention_bounds
from ...compare import SPARSE_PREFILL_OUT, Tolerance
from ..operation import Operation, Result, empty_lse, operands_of, outputs_of
from ..requests import Call, Picks, at, own_rows, relocated, widened
from .case import SparsePrefillCase, SparsePrefillTensors, make_sparse_prefill_tensors
from .suites import OP_SUITES

_ROWS = {"bf16": (7e-3, 4e-6), "fp16": (8e-4, 8e-8)}  # 4.0e-3 with a scale of 64, 2.6e-6; 3.9e-4, 3.3e-8


def _arguments(case: SparsePrefillCase, tensors: SparsePrefillTensors, workspace: Tensor | None) -> dict[str, Any]:
    return {
        **operands_of(tensors, "q", "kv", "indices", "attn_sink", "topk_length", "kv_offsets"),
        **outputs_of(tensors, "out", "lse", "max_logits", "lse_indexer"),
        "sm_scale": case.scale,
        "d_v": D_V,
        "indexer_topk": case.indexer_topk,
        "empty_lse": empty_lse(case),
    }


def _workspace_bytes(case: SparsePrefillCase, tensors: SparsePrefillTensors) -> int:
    return workspace_size(case.op, batch=case.batch, s_q=case.s_q, h_q=case.h_q, device=tensors.q.device)


def _expected(arguments: Mapping[str, Any]) -> Result:
    names = ("attn_sink", "topk_length", "kv_offsets", "empty_lse")
    operands = (*(arguments[name] for name in ("q", "kv", "indices")), float(arguments["sm_scale"]), *(arguments[name] for name in names))
    found = reference.sparse_prefill(*operands)
    first = int(arguments["indexer_topk"])
    return (*found, reference.lse_indexer(first, *operands)) if first else found


def _bounds(case: SparsePrefillCase) -> Mapping[str, Tolerance]:
    indexer = ("lse_indexer",) if case.indexer_topk else ()
    return attention_bounds(SPARSE_PREFILL_OUT, _ROWS[case.dtype], "max_logits", "lse", *indexer)


def _taken(case: SparsePrefillCase, tensors: SparsePrefillTensors, picks: Picks, moved: bool) -> Call:
    """Take query tokens of a request. moved: as two requests over the same rows, which lie in another order."""
    picked = list(picks)
    taken = replace(case, s_q=len(picked), lengths=None)  # the tensors have them
    length = None if tensors.topk_length is None else tensors.topk_length[picked]
    operands = replace(tensors, q=at(tensors.q, picked), indices=tensors.indices[picked], topk_length=length, output_buffers={})
    if not moved:
        return taken, operands
    kv, indices = relocated(operands.kv, operands.indices)
    q, indices = operands.q.unflatten(0, (2, -1)), widened(indices, 70, 0).unflatten(0, (2, -1))
    length = None if length is None else length.unflatten(0, (2, -1))
    return taken, replace(operands, q=q, kv=kv.expand(2, *kv.shape), indices=indices, topk_length=length)


def _of(case: SparsePrefillCase, tensors: SparsePrefillTensors, results: Result, place: int) -> Result:
    batched = tensors.q.dim() == 4
    return own_rows(case, tensors, tuple(result.flatten(0, 1) if batched else result for result in results), place)


SPARSE_PREFILL = Operation(
    SparsePrefillCase,
    OP_SUITES,
    make_sparse_prefill_tensors,
    flash_mla_sparse_fwd,
    _arguments,
    _expected,
    workspace_bytes=_workspace_bytes,
    bounds=_bounds,
    taken=_taken,
    of=_of,
    requests=lambda case: case.s_q,
)
