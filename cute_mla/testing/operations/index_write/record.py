"""The operation index_write: write_index_cache and prepare_index_queries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....indexer import prepare_index_queries, write_index_cache
from ....ops.index_torch import layer_norm, prepared, write_index_rows
from ....ops.index_write import factor_of
from ....ops.norm_rope import angles_at
from ....spec.mqa_logits import COLUMNS, SCALE_BYTES
from ...compare import EQUAL, Tolerance
from ..operation import Operation, Result, operands_of, outputs_of
from ..requests import Call, Picks, elsewhere, narrowed, own_rows
from .case import IndexWriteCase, IndexWriteTensors, allocate_index_cache, index_cache_bytes, make_index_write_tensors
from .suites import OP_SUITES

_EPS = 1e-6


def _arguments(case: IndexWriteCase, tensors: IndexWriteTensors, workspace: Tensor | None) -> dict[str, Any]:
    shared = {**operands_of(tensors, "cos_sin", "positions"), "rope": case.rope, "hadamard": case.hadamard}
    if case.rows == "queries":
        return {"q": tensors.rows, "weights": tensors.weights, **shared, **outputs_of(tensors, "out", "out_weights")}
    return {
        "k": tensors.rows,
        "index_cache": _copied(case, tensors),
        **operands_of(tensors, "slot_mapping", "norm_weight", "norm_bias"),
        **shared,
        "scale_format": case.scale_format,
        "eps": _EPS,
    }


def _copied(case: IndexWriteCase, tensors: IndexWriteTensors) -> Tensor:
    """Return a copy of the cache in the same layout."""
    copy = allocate_index_cache(case, tensors.rows.device)
    return copy.copy_(tensors.index_cache)


def _call(**arguments: Any) -> Any:
    return prepare_index_queries(**arguments) if "q" in arguments else write_index_cache(**arguments)


def _results_of(case: IndexWriteCase, arguments: Mapping[str, Any], returned: Any) -> Result:
    """Return what the call has written: the bytes of the cache, or queries and weights."""
    return tuple(returned) if case.rows == "queries" else (index_cache_bytes(case, arguments["index_cache"]),)


def _expected(arguments: Mapping[str, Any]) -> Result:
    rows = arguments["q" if "q" in arguments else "k"]
    form = (angles_at(arguments["cos_sin"], arguments["positions"], len(rows)), arguments["rope"], bool(arguments["hadamard"]))
    if "q" in arguments:
        rounded = prepared(rows, *form)
        return rounded.codes.view(torch.float8_e4m3fn), arguments["weights"].float() * factor_of(rows.shape[1]) * rounded.scales
    if len(rows):
        rounded = prepared(layer_norm(rows, arguments["norm_weight"], arguments["norm_bias"], float(arguments["eps"])), *form)
        write_index_rows(rounded, arguments["index_cache"], arguments["slot_mapping"], arguments["scale_format"] == "ue8m0")
    return ()


def _bounds(case: IndexWriteCase) -> Mapping[str, Tolerance]:
    return dict.fromkeys(("out", "out_weights") if case.rows == "queries" else ("out",), EQUAL)


def _taken(case: IndexWriteCase, tensors: IndexWriteTensors, picks: Picks, moved: bool) -> Call:
    """Take tokens of a call. moved: at slots elsewhere, in pages of half the size, by positions of the other type."""
    picked, taken = list(picks), replace(case, tokens=len(picks))
    positions = None if tensors.positions is None else tensors.positions[picked]
    if moved:
        positions = narrowed(positions)
    operands = replace(tensors, rows=tensors.rows[picked], positions=positions, output_buffers={})
    if case.rows == "queries":
        return taken, replace(operands, weights=tensors.weights[picked])
    if moved:
        taken = replace(taken, pages=2 * case.pages, page_size=case.page_size // 2)
    places = elsewhere(case.pages * case.page_size)[int(moved)][: len(picked)]
    cache = allocate_index_cache(taken, tensors.rows.device)
    return taken, replace(operands, slot_mapping=places, index_cache=cache)


def _of(case: IndexWriteCase, tensors: IndexWriteTensors, results: Result, place: int) -> Result:
    if case.rows == "queries":
        return own_rows(case, tensors, results, place)
    page, row = divmod(int(tensors.slot_mapping[place]), case.page_size)
    codes, scales = results[0].view(torch.uint8).view(case.pages, -1)[page].split((case.page_size * COLUMNS, case.page_size * SCALE_BYTES))
    return (torch.cat([codes.view(-1, COLUMNS)[row], scales.view(-1, SCALE_BYTES)[row]]),)


INDEX_WRITE = Operation(
    IndexWriteCase,
    OP_SUITES,
    make_index_write_tensors,
    _call,
    _arguments,
    _expected,
    results_of=_results_of,
    bounds=_bounds,
    taken=_taken,
    of=_of,
    requests=lambda case: case.tokens,
    in_place=("index_cache",),
)
