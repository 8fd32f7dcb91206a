"""The operation mqa_logits: fp8_mqa_logits and fp8_paged_mqa_logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ... import reference
from ...indexer import fp8_mqa_logits, fp8_paged_mqa_logits
from ..cases.mqa_logits import MqaLogitsCase, MqaLogitsTensors, make_mqa_logits_tensors
from ..compare import ErrorLimit
from .operation import Operation, Result, output_argument

# A step of the tensor cores sums 32 products and what there is so far. Hopper keeps 13 bits behind the leading one of the greatest.
_KEPT_BITS = 13
_SUMMANDS = 4 * 33  # of 128 columns
_DEVIATIONS = 8  # of the error of a sum of so many errors


def _arguments(case: MqaLogitsCase, tensors: MqaLogitsTensors, workspace: Tensor | None) -> dict[str, Any]:
    shared = {"q": tensors.q, "weights": tensors.weights, "clean_logits": case.clean, "out": output_argument(tensors, "out")}
    if case.page_size is None:
        return {**shared, "kv": (tensors.keys, tensors.scales), "ks": tensors.ks, "ke": tensors.ke, "max_seqlen_k": case.columns or 0}
    return {
        **shared,
        "cache": tensors.keys,
        "context_lens": tensors.ke,
        "block_table": tensors.block_table,
        "metadata": None,
        "max_context_len": case.shape[1],
    }


def _call(**arguments: Any) -> Tensor:
    return fp8_paged_mqa_logits(**arguments) if "cache" in arguments else fp8_mqa_logits(**arguments)


def expected_logits(**arguments: Any) -> Tensor:
    """Compute the logits of a call with these arguments; those that it does not write are NaN."""
    given = {name: value for name, value in arguments.items() if name not in ("metadata", "out")}
    return reference.fp8_paged_mqa_logits(**given) if "cache" in given else reference.fp8_mqa_logits(**given)


def _reference(case: MqaLogitsCase, tensors: MqaLogitsTensors) -> Result:
    return (expected_logits(**_arguments(case, tensors, None)),)


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


MQA_LOGITS = Operation(make_mqa_logits_tensors, _call, _arguments, _reference, results_of=_results_of, limits=_limits)
