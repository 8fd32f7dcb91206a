"""The operation cache_write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...cache import write_kv_cache
from ...ops.cache_torch import write_rows
from ...ops.paged_cache import cache_rows
from ...ops.tensor_spec import spec_of
from ...spec.cache_rows import FP8_576
from ..cases.cache_write import CacheWriteCase, CacheWriteTensors, make_cache_write_tensors
from ..cases.paged_cache import cache_bytes, copy_cache
from .operation import Operation, Result


def _arguments(case: CacheWriteCase, tensors: CacheWriteTensors, workspace: Tensor | None) -> dict[str, Any]:
    return {
        "kv_c": tensors.kv_c,
        "k_pe": tensors.k_pe,
        "k_cache": copy_cache(case, tensors.k_cache),
        "slot_mapping": tensors.slot_mapping,
        "descale_k": tensors.descale_k,
        "power_of_two": case.power_of_two,
        "kv_format": case.kv_format,
    }


def _results_of(case: CacheWriteCase, arguments: Mapping[str, Any], returned: Any) -> Result:
    """Return the bytes of the cache that the call has written."""
    return (cache_bytes(case, arguments["k_cache"]),)


def _reference(case: CacheWriteCase, tensors: CacheWriteTensors) -> Result:
    cache = copy_cache(case, tensors.k_cache)
    keys = tensors.kv_c if tensors.k_pe is None else torch.cat((tensors.kv_c, tensors.k_pe), dim=1)
    if case.format is FP8_576 and tensors.descale_k is not None:
        keys = keys.float() / tensors.descale_k
    if case.tokens:
        write_rows(cache_rows("k_cache", spec_of("k_cache", cache), case.kv_format), cache, keys, tensors.slot_mapping, case.power_of_two)
    return (cache_bytes(case, cache),)


CACHE_WRITE = Operation(make_cache_write_tensors, write_kv_cache, _arguments, _reference, results_of=_results_of)
