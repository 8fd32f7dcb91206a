"""The operation indexer_backward."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from .... import reference
from ....indexer import indexer_backward
from ...compare import NO_BOUND, Tolerance
from ..head_sums.record import index_arguments
from ..operation import Operation, Result, outputs_of
from ..requests import Call, Picks, widened
from ..sparse_prefill_backward.record import of_request, packed_requests
from .case import IndexerBackwardCase, IndexerBackwardTensors, make_indexer_backward_tensors
from .suites import OP_SUITES

_DQ = replace(NO_BOUND, cos_tol=1e-5, row_tol=8e-3)  # gradients of products are rounded to bf16, and so are the results
_DK_COSINE = 2e-5  # these, and rows rounded once more
_DWEIGHTS = Tolerance(1e-4, 1e-5, 1e-10)  # fp32 throughout


def _arguments(case: IndexerBackwardCase, tensors: IndexerBackwardTensors, workspace: Tensor | None) -> dict[str, Any]:
    gradients = outputs_of(tensors, "dq", "dk", "dweights")
    if tensors.addend is not None:
        gradients["dk"] = tensors.addend.clone()
    return {
        **index_arguments(tensors),
        **gradients,
        "dscores": tensors.dscores,
        "dk_accumulate": tensors.addend is not None,
        **({"max_workspace": 0} if case.chunked else {}),
    }


def _expected(arguments: Mapping[str, Any]) -> Result:
    names = ("q", "k", "weights", "indices", "dscores", "topk_length", "kv_offsets")
    dq, dk, dweights = reference.indexer_backward(*(arguments[name] for name in names))
    return dq, dk + arguments["dk"] if arguments["dk_accumulate"] else dk, dweights


def _bounds(case: IndexerBackwardCase) -> Mapping[str, Tolerance]:
    return {"dq": _DQ, "dk": replace(NO_BOUND, cos_tol=_DK_COSINE), "dweights": _DWEIGHTS}


def _taken(case: IndexerBackwardCase, tensors: IndexerBackwardTensors, picks: Picks, moved: bool) -> Call:
    """Take requests of a call. moved: with the rows of all packed, behind others, and more indices than any token uses."""
    own = packed_requests(case, tensors, ("q", "terms", "dscores"), picks, moved)
    if moved:
        own["dscores"] = widened(own["dscores"], 70, math.nan)
    return replace(case, batch=len(picks), form="batched", lengths=None, dk="bf16"), replace(tensors, addend=None, output_buffers={}, **own)


def _of(case: IndexerBackwardCase, tensors: IndexerBackwardTensors, results: Result, place: int) -> Result:
    """Return the gradients of a request."""
    dq, dk, dweights = results
    return of_request(tensors, (dq, dweights), dk, place)


INDEXER_BACKWARD = Operation(
    IndexerBackwardCase,
    OP_SUITES,
    make_indexer_backward_tensors,
    indexer_backward,
    _arguments,
    _expected,
    bounds=_bounds,
    taken=_taken,
    of=_of,
    requests=lambda case: case.batch,
)
