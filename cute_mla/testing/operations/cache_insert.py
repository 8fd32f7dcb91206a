"""The operation cache_insert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...cache import insert_kv_cache
from ...ops.cache_codec import scaled
from ...ops.cache_insert import Operands, new_keys
from ...ops.cache_torch import write_rows
from ...ops.norm_rope import angles_at, rotated
from ...ops.paged_cache import cache_rows
from ...ops.tensor_spec import spec_of
from ..cases.cache_insert import CacheInsertCase, CacheInsertTensors, make_cache_insert_tensors, place_keys, place_queries
from ..cases.paged_cache import cache_bytes, copy_cache
from .operation import Operation, Result


def _arguments(case: CacheInsertCase, tensors: CacheInsertTensors, workspace: Tensor | None) -> dict[str, Any]:
    device = tensors.kv_c.device
    names = ("kv_c", "k_pe", "slot_mapping", "norm_weight", "cos_sin", "positions", "descale_k")
    return {
        **{name: getattr(tensors, name) for name in names},
        "q_pe": None if tensors.q_pe is None else place_queries(case, tensors.q_pe, device),
        "k_cache": copy_cache(case, tensors.k_cache),
        "keys": place_keys(case, device),
        "power_of_two": case.power_of_two,
        "kv_format": case.kv_format,
        "eps": case.eps,
    }


def _results_of(case: CacheInsertCase, arguments: Mapping[str, Any], returned: Any) -> Result:
    """Return the bytes of the cache, of the queries and of the keys that the call has written."""
    return _result(case, arguments["k_cache"], arguments["q_pe"], arguments["keys"])


def _result(case: CacheInsertCase, k_cache: Tensor, q_pe: Tensor | None, keys: Tensor | None) -> Result:
    """Return one tensor of the bytes that a call writes."""
    written = [tensor.contiguous().view(torch.int16).flatten() for tensor in (q_pe, keys) if tensor is not None]
    return (torch.cat((cache_bytes(case, k_cache).flatten(), *written)),)


def _reference(case: CacheInsertCase, tensors: CacheInsertTensors) -> Result:
    cache, keys = copy_cache(case, tensors.k_cache), None
    operands = Operands(tensors.norm_weight, tensors.cos_sin, tensors.positions)
    made = new_keys(case.format, tensors.kv_c, tensors.k_pe, operands, case.eps)
    if case.tokens:
        rows = cache_rows("k_cache", spec_of("k_cache", cache), case.kv_format)
        write_rows(rows, cache, scaled(rows.format, made, tensors.descale_k), tensors.slot_mapping, case.power_of_two)
    if case.kept != "none":
        keys = made
    q_pe = tensors.q_pe
    if q_pe is not None and tensors.cos_sin is not None:
        q_pe = rotated(q_pe, angles_at(tensors.cos_sin, tensors.positions, case.tokens))
    return _result(case, cache, q_pe, keys)


CACHE_INSERT = Operation(make_cache_insert_tensors, insert_kv_cache, _arguments, _reference, results_of=_results_of)
