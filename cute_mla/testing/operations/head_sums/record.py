"""The operation head_sums: attention_head_sums and indexer_scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from .... import reference
from ....indexer import attention_head_sums, indexer_scores
from ...compare import NO_BOUND, ErrorLimit, Tolerance
from ..operation import Operation, Result, operands_of, outputs_of
from ..requests import Call, Picks
from ..sparse_prefill.record import SPARSE_PREFILL
from .case import ChosenKeysTensors, HeadSumsCase, make_head_sums_tensors
from .suites import OP_SUITES

_PROBS = Tolerance(1e-7, 1e-5, 1e-10)  # fp32 throughout; the error of a score is one of the exponent
_SCORES_COSINE = 1e-11
_SCORES_ERROR = 1e-6  # of the sum of all magnitudes


def index_arguments(tensors: ChosenKeysTensors) -> dict[str, Any]:
    """Return the arguments that the calls of an indexer share."""
    return {**operands_of(tensors, "q", "indices", "topk_length", "kv_offsets"), "k": tensors.kv.squeeze(-2), "weights": tensors.terms}


def _arguments(case: HeadSumsCase, tensors: ChosenKeysTensors, workspace: Tensor | None) -> dict[str, Any]:
    if case.kind == "scores":
        return {**index_arguments(tensors), **outputs_of(tensors, "out")}
    return {
        **operands_of(tensors, "q", "kv", "indices", "attn_sink", "topk_length", "kv_offsets"),
        **outputs_of(tensors, "out"),
        "lse": tensors.terms,
        "sm_scale": case.scale,
    }


def _call(**arguments: Any) -> Tensor:
    return indexer_scores(**arguments) if "k" in arguments else attention_head_sums(**arguments)


def _expected(arguments: Mapping[str, Any]) -> Result:
    given = {name: value for name, value in arguments.items() if name != "out"}
    return (reference.indexer_scores(**given) if "k" in given else reference.attention_head_sums(**given),)


def largest_score(arguments: Mapping[str, Any]) -> float:
    """Return the largest score of the magnitudes of q, k and weights, by which errors are measured."""
    names = ("q", "k", "weights")
    sizes = reference.indexer_scores(**{name: value.abs() if name in names else value for name, value in arguments.items()})
    return max(float(sizes.max()), 0.0) if sizes.numel() else 0.0


def _limits(case: HeadSumsCase, tensors: ChosenKeysTensors, expected: Result) -> dict[str, ErrorLimit]:
    return {"out": ErrorLimit(_SCORES_ERROR * largest_score(index_arguments(tensors)))} if case.kind == "scores" else {}


def _bounds(case: HeadSumsCase) -> Mapping[str, Tolerance]:
    return {"out": replace(NO_BOUND, cos_tol=_SCORES_COSINE) if case.kind == "scores" else _PROBS}


def _taken(case: HeadSumsCase, tensors: ChosenKeysTensors, picks: Picks, moved: bool) -> Call:
    """Take query tokens of a request, as of sparse prefill."""
    taken, operands = SPARSE_PREFILL.taken(case, tensors, picks, moved)
    terms = tensors.terms[list(picks)]
    return taken, replace(operands, terms=terms.unflatten(0, (2, -1)) if moved else terms)


def _of(case: HeadSumsCase, tensors: ChosenKeysTensors, results: Result, place: int) -> Result:
    """Return the sums of a token at the indices of the case; behind them are those of indices that moved ones have more."""
    return tuple(result[..., : case.topk] for result in SPARSE_PREFILL.of(case, tensors, results, place))


HEAD_SUMS = Operation(
    HeadSumsCase,
    OP_SUITES,
    make_head_sums_tensors,
    _call,
    _arguments,
    _expected,
    limits=_limits,
    bounds=_bounds,
    taken=_taken,
    of=_of,
    requests=lambda case: case.s_q,
)
