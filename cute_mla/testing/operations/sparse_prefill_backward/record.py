"""The operation sparse_prefill_backward."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .... import reference
from ....api import flash_mla_sparse_bwd
from ....reference.latent import named_rows, rows_of_request
from ....spec.mla import D_V
from ...compare import NO_BOUND, ErrorLimit, Tolerance
from ..dense_prefill.low_precision import limits_of, product
from ..operation import Operation, Result, Sample, operands_of, outputs_of
from ..requests import FRONT, Call, Picks, widened
from ..sparse_prefill.case import SparsePrefillCase, SparsePrefillTensors
from .case import SparsePrefillBackwardCase, SparsePrefillBackwardTensors, make_sparse_prefill_backward_tensors
from .suites import OP_SUITES

_SAVED = ("out", "lse", "dout", "dlse")
_GRADIENTS = ("dq", "dkv", "d_sink")
_DQ_COSINE, _DKV_COSINE = 2e-5, 1e-5  # 1.2e-5, 4.7e-6
_CANCELLING_KEYS = 4  # a sole key has P = 1 and dP = delta: the true dq is 0, and what remains is the rounding of out


def _arguments(case: SparsePrefillBackwardCase, tensors: SparsePrefillBackwardTensors, workspace: Tensor | None) -> dict[str, Any]:
    gradients = outputs_of(tensors, *_GRADIENTS)
    if tensors.addend is not None:
        gradients["dkv"] = tensors.addend.clone()
    return {
        **operands_of(tensors, "q", "kv", "indices", *_SAVED, "attn_sink", "topk_length", "kv_offsets"),
        **gradients,
        "sm_scale": case.scale,
        "dkv_accumulate": tensors.addend is not None,
        **({"max_workspace": 0} if case.chunked else {}),
    }


def _expected(arguments: Mapping[str, Any]) -> Result:
    operands = (arguments["q"], arguments["kv"], arguments["indices"])
    rest = (arguments[name] for name in ("lse", "sm_scale", "attn_sink", "topk_length", "kv_offsets", "dlse"))
    dq, dkv, d_sink = reference.sparse_prefill_backward(arguments["dout"], operands, *rest)
    return dq, dkv + arguments["dkv"] if arguments["dkv_accumulate"] else dkv, d_sink


def _limits(case: SparsePrefillBackwardCase, tensors: SparsePrefillBackwardTensors, expected: Result) -> dict[str, ErrorLimit]:
    """Return limits of the errors: twice those of torch that rounds every matrix. What is added to dkv is exact."""
    coarse = low_precision_gradients(case, tensors)
    return limits_of(_GRADIENTS, coarse, expected)


class Statistics(NamedTuple):
    """Numbers of rows, fp64 [.., h_q]: lse with the sink, inf where P is 0; delta less the share of dlse; what a row adds to d_sink."""

    with_sink: Tensor
    delta: Tensor
    sink_term: Tensor


def statistics_of(tensors: SparsePrefillBackwardTensors, rows: Any) -> Statistics:
    """Compute the statistics of rows, an index of query tokens, from out as it is stored."""
    out, dout, lse = (getattr(tensors, name)[rows].double() for name in ("out", "dout", "lse"))
    sinks = torch.full_like(lse, -math.inf) if tensors.attn_sink is None else tensors.attn_sink.double().expand_as(lse)
    with_sink, dead = torch.logaddexp(lse, sinks), lse.isinf() | (sinks == math.inf)
    delta = (out * dout).sum(dim=-1)
    term = -(sinks - with_sink).exp() * delta
    if tensors.dlse is not None:
        delta = delta - tensors.dlse[rows] * (with_sink - lse).exp()
    return Statistics(with_sink.masked_fill(dead, math.inf), delta.masked_fill(dead, 0.0), term.masked_fill(dead, 0.0))


def low_precision_gradients(case: SparsePrefillBackwardCase, tensors: SparsePrefillBackwardTensors) -> Result:
    """Compute dq, dkv and d_sink from out, rounding every matrix to the element type, and the rows that are added up to dkv.

    P is rounded after a division by the scale, by which sums are multiplied: that of a sole key is 1, and has no error else.
    """
    dq, dkv = torch.zeros_like(tensors.q), torch.zeros(tensors.kv.shape, dtype=torch.float64, device=tensors.kv.device)
    d_sink = torch.zeros(case.h_q, dtype=torch.float64, device=dq.device)
    for token in itertools.product(*map(range, tensors.q.shape[:-2])):
        rows, of_request = (rows_of_request(tensor, tensors.kv_offsets, token[:-1]).squeeze(1) for tensor in (tensors.kv, dkv))
        length = None if tensors.topk_length is None else tensors.topk_length[token]
        named = named_rows(torch.arange(len(rows), device=dq.device), tensors.indices[token].squeeze(0), length).long()
        keys, q, dout, found = rows[named], tensors.q[token], tensors.dout[token], statistics_of(tensors, token)
        d_sink += found.sink_term
        probs = (product(q, keys.mT).double() * case.scale - found.with_sink[:, None]).exp()
        weights = (probs / case.scale).to(q.dtype).double()
        dscores = (weights * case.scale * (product(dout, keys[:, :D_V].mT) - found.delta[:, None])).to(q.dtype)
        dq[token] = product(dscores, keys) * case.scale
        added = dscores.double().mT @ q.double()
        added[:, :D_V] += weights.mT @ dout.double()
        of_request.index_add_(0, named, added.to(q.dtype).double() * case.scale)
    if tensors.addend is not None:
        dkv += tensors.addend
    return dq, dkv.to(dq.dtype) if case.dkv == "bf16" else dkv, d_sink


def _bounds(case: SparsePrefillBackwardCase) -> Mapping[str, Tolerance]:
    """Return bounds of the cosines. Elements and rows have none, since terms may cancel; the limits hold for every case."""
    cancels = case.values != "normal" or case.topk < _CANCELLING_KEYS
    dq = NO_BOUND if cancels else replace(NO_BOUND, cos_tol=_DQ_COSINE)
    return {"dq": dq, "dkv": replace(NO_BOUND, cos_tol=_DKV_COSINE), "d_sink": NO_BOUND}


def _taken(case: SparsePrefillBackwardCase, tensors: SparsePrefillBackwardTensors, picks: Picks, moved: bool) -> Call:
    """Take requests of a call. moved: with the rows of all packed, behind others, and more indices than any token uses."""
    own = packed_requests(case, tensors, ("q", *_SAVED), picks, moved)
    taken = replace(case, batch=len(picks), form="batched", lengths=None, dkv="bf16")
    return taken, replace(tensors, addend=None, output_buffers={}, **own)


def packed_requests(
    case: SparsePrefillCase, tensors: SparsePrefillTensors, names: Sequence[str], picks: Picks, moved: bool
) -> dict[str, Any]:
    """Return operands of requests of a call, by name: those named, indices and lengths, kv and its offsets. moved: as in _taken."""
    picked = list(picks)
    single = case.form == "single"
    named = operands_of(tensors, *names, "indices", "topk_length")
    own: dict[str, Any] = {name: None if tensor is None else (tensor[None] if single else tensor)[picked] for name, tensor in named.items()}
    ranges = [case.row_ranges[pick] for pick in picked]
    kv = tensors.kv.reshape(-1, *tensors.kv.shape[-2:])
    rows = [kv[first : first + count] for first, count in ranges]
    packed = moved or tensors.kv_offsets is not None
    offsets = torch.tensor([*accumulate((len(each) for each in rows), initial=FRONT)], dtype=torch.int32, device=kv.device)
    front = kv.new_full((FRONT, *kv.shape[1:]), math.nan)
    if moved:
        own["indices"] = widened(own["indices"], 70, -1)
    return {**own, "kv": torch.cat([front, *rows]) if packed else torch.stack(rows), "kv_offsets": offsets if packed else None}


def _of(case: SparsePrefillBackwardCase, tensors: SparsePrefillBackwardTensors, results: Result, place: int) -> Result:
    """Return dq and dkv of a request; d_sink is a sum over all."""
    dq, dkv, _ = results
    return of_request(tensors, (dq,), dkv, place)


def of_request(tensors: SparsePrefillTensors, of_tokens: Result, of_keys: Tensor, place: int) -> Result:
    """Return the gradients of a request: those of its tokens, and those of its rows of kv."""
    if tensors.q.dim() == 3:
        return *(result[None] for result in of_tokens), of_keys
    rows = tuple(result[place : place + 1] for result in of_tokens)
    if tensors.kv_offsets is None:
        return *rows, of_keys[place]
    first, end = tensors.kv_offsets.clamp(0, len(of_keys))[place : place + 2].tolist()
    return *rows, of_keys[first:end]


def _part(case: SparsePrefillBackwardCase, tensors: SparsePrefillBackwardTensors, request: int) -> Sample:
    """Compute dq of a request's first and last token, dkv of the rows that their first indices name, and d_sink.

    dkv and d_sink are those of out as it is stored.
    """
    taken, own = _taken(case, tensors, [request], False)
    ends = sorted({0, case.s_q - 1})
    dq = torch.cat([_expected(_arguments(taken, _of_token(own, place), None))[0][0] for place in ends])
    rows = own.kv[0] if own.kv_offsets is None else own.kv[FRONT:]
    keys = own.indices[0, ends, 0, 0].clamp(0, len(rows) - 1).long()
    dkv = torch.stack([_of_key(taken, own, rows, int(key)) for key in keys])
    d_sink = sum(statistics_of(own, (0, token)).sink_term for token in range(case.s_q))

    def part(results: Result) -> Result:
        of_q, of_kv = _of(case, tensors, results, request)
        return of_q[0, ends], of_kv[keys], results[2]

    return (dq, dkv, torch.as_tensor(d_sink).float()), part


def _of_key(case: SparsePrefillBackwardCase, tensors: SparsePrefillBackwardTensors, rows: Tensor, number: int) -> Tensor:
    """Compute dkv of a row of one request, fp32 [1, d_qk], over the tokens whose indices name it."""
    indices = tensors.indices[0, :, 0]
    most = indices.shape[-1] if tensors.topk_length is None else tensors.topk_length[0, :, None]
    times = ((indices == number) & (torch.arange(indices.shape[-1], device=indices.device) < most)).sum(dim=-1)
    tokens, key = times.nonzero()[:, 0], rows[number, 0].double()
    q, dout, found = tensors.q[0, tokens].double(), tensors.dout[0, tokens].double(), statistics_of(tensors, (0, tokens))
    probs = (q @ key * case.scale - found.with_sink).exp() * times[tokens, None]
    dscores = probs * (dout @ key[:D_V] - found.delta) * case.scale
    gradient = torch.einsum("th,thd->d", dscores, q)
    gradient[:D_V] += torch.einsum("th,thd->d", probs, dout)
    return gradient.float()[None]


def _of_token(tensors: SparsePrefillBackwardTensors, token: int) -> SparsePrefillBackwardTensors:
    """Return the operands of a token of one request."""
    names = ("q", "indices", "topk_length", *_SAVED)
    own: dict[str, Any] = {
        name: None if tensor is None else tensor[:, token : token + 1] for name, tensor in operands_of(tensors, *names).items()
    }
    return replace(tensors, **own)


SPARSE_PREFILL_BACKWARD = Operation(
    SparsePrefillBackwardCase,
    OP_SUITES,
    make_sparse_prefill_backward_tensors,
    flash_mla_sparse_bwd,
    _arguments,
    _expected,
    limits=_limits,
    bounds=_bounds,
    taken=_taken,
    of=_of,
    requests=lambda case: case.batch,
    part=_part,
)
