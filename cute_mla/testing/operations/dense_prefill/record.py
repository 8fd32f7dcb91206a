"""The operation dense_prefill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .... import reference
from ....api import flash_attn_varlen_func, workspace_size
from ...bounds import attention_bounds
from ...compare import DENSE_PREFILL_OUT, Tolerance
from ..operation import Operation, Result, Sample, empty_lse, operands_of, outputs_of, scale_argument
from ..requests import FRONT, Call, Picks, at, rows_of
from .case import DensePrefillCase, DensePrefillTensors, make_dense_prefill_tensors
from .low_precision import error_limits
from .suites import OP_SUITES

_ROWS = {"bf16": (7e-3, 4e-6), "fp16": (8e-4, 8e-8)}  # rows of 128 columns vary more: 3.5e-3, 2.5e-6; 4.0e-4, 3.7e-8
_PART_TOKENS = (0, 1, 127, 128)  # of a sequence that are compared in a large call, from its start and from its end


def _arguments(case: DensePrefillCase, tensors: DensePrefillTensors, workspace: Tensor | None) -> dict[str, Any]:
    return {
        **sequence_arguments(case, tensors),
        **outputs_of(tensors, "out", "lse"),
        "empty_lse": empty_lse(case),
        **({} if tensors.key_mask is None else {"key_mask": tensors.key_mask}),
    }


def sequence_arguments(case: DensePrefillCase, tensors: DensePrefillTensors) -> dict[str, Any]:
    """Return the arguments that the forward pass and the backward pass share."""
    return {
        **operands_of(tensors, "q", "k", "v"),
        "cu_seqlens_qo": tensors.cu_seqlens_q,
        "cu_seqlens_kv": tensors.cu_seqlens_k,
        "max_seqlen_qo": case.max_seqlen_q,
        "max_seqlen_kv": case.max_seqlen_k,
        "softmax_scale": case.softmax_scale,
        "causal": case.causal,
    }


def _workspace_bytes(case: DensePrefillCase, tensors: DensePrefillTensors) -> int:
    return workspace_size(case.op, batch=len(case.lengths), s_q=case.max_seqlen_q, h_q=case.h_q, h_kv=case.h_kv, device=tensors.q.device)


def _expected(arguments: Mapping[str, Any]) -> Result:
    q, k, v, *ends = (arguments[name] for name in ("q", "k", "v", "cu_seqlens_qo", "cu_seqlens_kv"))
    operands = (arguments.get("key_mask"), scale_argument(arguments), bool(arguments["causal"]), arguments["empty_lse"])
    return reference.masked_prefill(q, k, v, (ends[0], ends[1]), *operands)


def _bounds(case: DensePrefillCase) -> Mapping[str, Tolerance]:
    return attention_bounds(DENSE_PREFILL_OUT, _ROWS[case.dtype], "lse")


def taken_inputs(case: DensePrefillCase, tensors: Any, picks: Picks, moved: bool) -> tuple[DensePrefillCase, dict[str, Any]]:
    """Take sequences of a call: case, and q, k, v, ends and mask by name. moved: unused rows in front, and room for longer sequences."""
    lengths = tuple(case.lengths[pick] for pick in picks)
    queries = rows_of(case.q_starts, [s_q for s_q, _ in case.lengths], picks)
    keys = rows_of(case.k_starts, [s_k for _, s_k in case.lengths], picks)
    in_front = [0] * FRONT if moved else []  # rows of nobody, which are NaN
    taken, device = replace(case, lengths=case.lengths if moved else lengths), tensors.q.device
    starts = [[*accumulate(own, initial=first)] for own, first in zip(zip(*lengths, strict=True), (0, len(in_front)), strict=True)]
    ends_q, ends_k = (torch.tensor(start, dtype=torch.int32, device=device) for start in starts)
    k, v = (tensor[[*in_front, *keys]] for tensor in (tensors.k, tensors.v))
    mask = getattr(tensors, "key_mask", None)
    own = {} if mask is None else {"key_mask": mask[queries]}
    return taken, {"q": at(tensors.q, queries), "k": k, "v": v, "cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k, **own}


def _taken(case: DensePrefillCase, tensors: DensePrefillTensors, picks: Picks, moved: bool) -> Call:
    taken, operands = taken_inputs(case, tensors, picks, moved)
    return taken, DensePrefillTensors(**operands)


def _of(case: DensePrefillCase, tensors: DensePrefillTensors, results: Result, place: int) -> Result:
    first, end = tensors.cu_seqlens_q[place : place + 2].tolist()
    return tuple(result[first:end] for result in results)


def _part(case: DensePrefillCase, tensors: DensePrefillTensors, request: int) -> Sample:
    """Compute some query tokens of a sequence, from its start, middle and end."""
    s_q, s_k = case.lengths[request]
    candidates = (*_PART_TOKENS, s_q // 2, *(s_q - 1 - token for token in _PART_TOKENS))
    tokens = torch.tensor(sorted({token for token in candidates if 0 <= token < s_q}), dtype=torch.int64, device=tensors.q.device)
    rows, keys = (slice(starts[request], starts[request + 1]) for starts in (case.q_starts, case.k_starts))
    q = tensors.q[rows][tokens].transpose(0, 1)
    k, v = (tensor[keys].transpose(0, 1).repeat_interleave(case.group, dim=0) for tensor in (tensors.k, tensors.v))
    visible = torch.arange(s_k, device=q.device) <= (tokens[:, None] + s_k - s_q if case.causal else s_k)
    if tensors.key_mask is not None:
        visible = visible & reference.mask_keys(tensors.key_mask[rows][tokens], s_k)
    out, lse = reference.attention(q, k, v, case.scale, visible, empty_lse(case))
    return (out.transpose(0, 1), lse.T), lambda results: tuple(result[rows][tokens] for result in results)


DENSE_PREFILL = Operation(
    DensePrefillCase,
    OP_SUITES,
    make_dense_prefill_tensors,
    flash_attn_varlen_func,
    _arguments,
    _expected,
    workspace_bytes=_workspace_bytes,
    limits=error_limits,
    bounds=_bounds,
    taken=_taken,
    of=_of,
    requests=lambda case: len(case.lengths),
    part=_part,
)
