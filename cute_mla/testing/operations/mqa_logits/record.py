"""The operation mqa_logits: fp8_mqa_logits and fp8_paged_mqa_logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .... import reference
from ....indexer import fp8_mqa_logits, fp8_paged_mqa_logits
from ...compare import EQUAL, NO_BOUND, ErrorLimit, Tolerance
from ..operation import Operation, Result, operands_of, outputs_of
from ..requests import Call, Picks, at, relocated
from .case import MqaLogitsCase, MqaLogitsTensors, make_mqa_logits_tensors
from .suites import OP_SUITES

_LOGITS_COS_DIFF = 5e-6  # DeepGEMM's; fp8 products summed with 13 bits have about 1e-7


# A step of the tensor cores sums 32 products and what there is so far. Hopper keeps 13 bits behind the leading one of the greatest.
_KEPT_BITS = 13
_SUMMANDS = 4 * 33  # of 128 columns
_DEVIATIONS = 8  # of the error of a sum of so many errors


def _arguments(case: MqaLogitsCase, tensors: MqaLogitsTensors, workspace: Tensor | None) -> dict[str, Any]:
    shared = {**operands_of(tensors, "q", "weights"), "clean_logits": case.clean, **outputs_of(tensors, "out")}
    if case.page_size is None:
        return {**shared, **row_keys(tensors), "max_seqlen_k": case.columns or 0}
    return {**shared, "cache": tensors.keys, **page_keys(tensors), "metadata": None, "max_context_len": case.shape[1]}


def row_keys(tensors: MqaLogitsTensors) -> dict[str, Any]:
    """Return the arguments for keys in a row."""
    return {"kv": (tensors.keys, tensors.scales), **operands_of(tensors, "ks", "ke")}


def page_keys(tensors: MqaLogitsTensors) -> dict[str, Any]:
    """Return the arguments for keys in an index cache, but for the cache."""
    return {"context_lens": tensors.ke, "block_table": tensors.block_table}


def _call(**arguments: Any) -> Tensor:
    return fp8_paged_mqa_logits(**arguments) if "cache" in arguments else fp8_mqa_logits(**arguments)


def expected_logits(**arguments: Any) -> Tensor:
    """Compute the logits of a call with these arguments; those that it does not write are NaN."""
    given = {name: value for name, value in arguments.items() if name not in ("metadata", "out")}
    return reference.fp8_paged_mqa_logits(**given) if "cache" in given else reference.fp8_mqa_logits(**given)


def _results_of(case: MqaLogitsCase, arguments: Mapping[str, Any], returned: Tensor) -> Result:
    """Return the logits, those that may be anything as NaN: unwritten ones of a new tensor, and those of keys that hold NaN."""
    if arguments["out"] is None and (case.values == "nan_keys" or not case.clean):
        return (returned.masked_fill(expected_logits(**arguments).isnan(), math.nan),)
    return (returned,)


def _limits(case: MqaLogitsCase, tensors: MqaLogitsTensors, expected: Result) -> dict[str, ErrorLimit]:
    """Return the limit of the error of a logit of normal values.

    Each summand of a dot product errs by at most 2^-13 of the greatest dot product, and errors of different summands are independent. The
    weights and the scale of the key multiply the error. fp32 sums over heads err by less than a thousandth of that.
    """
    if case.values != "normal" or not expected[0].numel():
        return {}
    if case.page_size is None:
        keys, scales = tensors.keys, tensors.scales
    else:
        assert tensors.block_table is not None
        inside = tensors.block_table.flatten().clamp(0, len(tensors.keys) - 1)
        keys, scales = reference.indexed_keys(tensors.keys, inside, inside.numel() * case.page_size)
    assert scales is not None
    known = ~(keys.float().isnan().any(-1) | scales.isnan())
    if not known.any():
        return {}
    greatest = (tensors.q.double().flatten(0, -2) @ keys[known].double().T).abs().max()
    spread = tensors.weights.norm(dim=1).max() * scales[known].abs().max()
    return {"out": ErrorLimit(_DEVIATIONS * math.sqrt(_SUMMANDS) * 2.0**-_KEPT_BITS * float(greatest * spread))}


def _bounds(case: MqaLogitsCase) -> Mapping[str, Tolerance]:
    return {"out": replace(NO_BOUND, cos_tol=_LOGITS_COS_DIFF) if case.values == "normal" else EQUAL}


def taken_requests(case: Any, tensors: MqaLogitsTensors, picks: Picks, moved: bool) -> Call:
    """Take requests of a call, or tokens without pages. moved: keys further apart, or pages elsewhere."""
    count: dict[str, Any] = {"tokens" if case.page_size is None else "requests": len(picks)}
    return replace(case, **count), _taken_operands(tensors, picks, moved)


def _taken_operands(tensors: MqaLogitsTensors, picks: Picks, moved: bool) -> MqaLogitsTensors:
    picked = list(picks)
    if tensors.block_table is None:
        assert tensors.ks is not None
        keys = tensors.keys
        if moved:
            wide = torch.cat([keys.view(torch.uint8), keys.view(torch.uint8)[:, :16]], dim=1)
            keys = wide[:, : keys.shape[1]].view(keys.dtype)
        rows: dict[str, Any] = {
            "q": at(tensors.q, picks),
            "weights": tensors.weights[picked],
            "ks": tensors.ks[picked],
            "ke": tensors.ke[picked],
        }
        return replace(tensors, **rows, keys=keys, output_buffers={})
    tokens = tensors.q.shape[1]
    rows = {
        "q": at(tensors.q, picks),
        "weights": tensors.weights.unflatten(0, (-1, tokens))[picked].flatten(0, 1),
        "ke": tensors.ke[picked],
    }
    keys, table = tensors.keys, tensors.block_table[picked]
    if moved:
        keys, table = relocated(keys, table)
    return replace(tensors, **rows, keys=keys, block_table=table, output_buffers={})


def logit_rows(case: Any, tensors: MqaLogitsTensors, results: Result, place: int) -> Result:
    """Return the rows of a request, or of a token without pages."""
    each = 1 if tensors.block_table is None else tensors.q.shape[1]
    return tuple(result[place * each : (place + 1) * each] for result in results)


def count_requests(case: Any) -> int:
    """Return how many requests a call has, or tokens without pages."""
    return int(case.tokens if case.page_size is None else case.requests)


MQA_LOGITS = Operation(
    MqaLogitsCase,
    OP_SUITES,
    make_mqa_logits_tensors,
    _call,
    _arguments,
    lambda arguments: (expected_logits(**arguments),),
    results_of=_results_of,
    limits=_limits,
    bounds=_bounds,
    taken=taken_requests,
    of=logit_rows,
    requests=count_requests,
)
