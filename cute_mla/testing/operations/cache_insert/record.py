"""The operation cache_insert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....cache import insert_kv_cache
from ....ops.cache_insert import Operands, new_keys
from ....ops.norm_rope import angles_at, rotated
from ....ops.paged_cache import cache_rows
from ....ops.tensor_spec import spec_of
from ....spec.cache_insert import rotates
from ...cases.paged_cache import allocate_cache, cache_bytes, copy_cache, key_bytes
from ...compare import EQUAL, Tolerance
from ..cache_write.record import moved_slots, write_keys
from ..operation import Operation, Result, operands_of
from ..requests import Call, Picks, narrowed
from .case import CacheInsertCase, CacheInsertTensors, make_cache_insert_tensors, place_keys, place_queries
from .suites import OP_SUITES


def _arguments(case: CacheInsertCase, tensors: CacheInsertTensors, workspace: Tensor | None) -> dict[str, Any]:
    device = tensors.kv_c.device
    return {
        **operands_of(tensors, "kv_c", "k_pe", "slot_mapping", "norm_weight", "cos_sin", "positions", "descale_k"),
        "q_pe": None if tensors.q_pe is None else place_queries(case, tensors.q_pe, device),
        "k_cache": copy_cache(case, tensors.k_cache),
        "keys": place_keys(case, device),
        "power_of_two": case.power_of_two,
        "kv_format": case.kv_format,
        "eps": case.eps,
    }


def _results_of(case: CacheInsertCase, arguments: Mapping[str, Any], returned: Any) -> Result:
    """Return the bytes of the cache, of the queries and of the keys that the call has written."""
    written = (tensor for name in ("q_pe", "keys") if (tensor := arguments[name]) is not None)
    return cache_bytes(case, arguments["k_cache"]), *(tensor.contiguous().view(torch.int16) for tensor in written)


def _insert(arguments: Mapping[str, Any]) -> Result:
    operands = Operands(*(arguments[name] for name in ("norm_weight", "cos_sin", "positions")))
    cache = cache_rows("k_cache", spec_of("k_cache", arguments["k_cache"]), arguments["kv_format"]).format
    made = new_keys(cache, arguments["kv_c"], arguments["k_pe"], operands, float(arguments["eps"]))
    write_keys(arguments, made)
    keys, q_pe = arguments["keys"], arguments["q_pe"]
    if keys is not None:
        keys.copy_(made)
    if q_pe is not None and operands.cos_sin is not None:
        q_pe.copy_(rotated(q_pe, angles_at(operands.cos_sin, operands.positions, len(q_pe))))
    return ()


def _bounds(case: CacheInsertCase) -> Mapping[str, Tolerance]:
    q_pe = ("q_pe",) if case.heads and rotates(case.format) else ()
    return dict.fromkeys(("out", *q_pe, *(("keys",) if case.kept != "none" else ())), EQUAL)


def _taken(case: CacheInsertCase, tensors: CacheInsertTensors, picks: Picks, moved: bool) -> Call:
    """Take tokens of a call, as cache_write takes them. moved: by positions of the other type."""
    taken, places = moved_slots(case, picks, moved)
    names = ("kv_c", "k_pe", "q_pe", "positions")
    own: dict[str, Any] = {name: None if (tensor := getattr(tensors, name)) is None else tensor[list(picks)] for name in names}
    if moved:
        own["positions"] = narrowed(own["positions"])
    return taken, replace(tensors, **own, k_cache=allocate_cache(taken, tensors.kv_c.device), slot_mapping=places)


def _of(case: CacheInsertCase, tensors: CacheInsertTensors, results: Result, place: int) -> Result:
    return key_bytes(case, results[0], int(tensors.slot_mapping[place])), *(result[place] for result in results[1:])


CACHE_INSERT = Operation(
    CacheInsertCase,
    OP_SUITES,
    make_cache_insert_tensors,
    insert_kv_cache,
    _arguments,
    _insert,
    results_of=_results_of,
    bounds=_bounds,
    taken=_taken,
    of=_of,
    requests=lambda case: case.tokens,
    in_place=("k_cache", "q_pe"),
)
