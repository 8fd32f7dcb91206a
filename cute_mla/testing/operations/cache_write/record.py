"""The operation cache_write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ....cache import write_kv_cache
from ....ops.cache_torch import write_rows
from ....ops.paged_cache import cache_rows
from ....ops.tensor_spec import spec_of
from ....spec.cache_rows import FP8_576
from ...cases.paged_cache import allocate_cache, cache_bytes, copy_cache, key_bytes
from ..operation import Operation, Result, operands_of
from ..requests import Call, Picks, elsewhere
from .case import CacheWriteCase, CacheWriteTensors, make_cache_write_tensors
from .suites import OP_SUITES


def _arguments(case: CacheWriteCase, tensors: CacheWriteTensors, workspace: Tensor | None) -> dict[str, Any]:
    return {
        **operands_of(tensors, "kv_c", "k_pe", "slot_mapping", "descale_k"),
        "k_cache": copy_cache(case, tensors.k_cache),
        "power_of_two": case.power_of_two,
        "kv_format": case.kv_format,
    }


def _results_of(case: CacheWriteCase, arguments: Mapping[str, Any], returned: Any) -> Result:
    """Return the bytes of the cache that the call has written."""
    return (cache_bytes(case, arguments["k_cache"]),)


def _write(arguments: Mapping[str, Any]) -> Result:
    kv_c, k_pe = arguments["kv_c"], arguments["k_pe"]
    write_keys(arguments, kv_c if k_pe is None else torch.cat((kv_c, k_pe), dim=1))
    return ()


def write_keys(arguments: Mapping[str, Any], keys: Tensor) -> None:
    """Write keys [tokens, d_qk] to the cache that is among the arguments, in plain torch."""
    cache = arguments["k_cache"]
    rows = cache_rows("k_cache", spec_of("k_cache", cache), arguments["kv_format"])
    if rows.format is FP8_576 and arguments["descale_k"] is not None:
        keys = keys.float() / arguments["descale_k"]
    if len(keys):
        write_rows(rows, cache, keys, arguments["slot_mapping"], bool(arguments["power_of_two"]))


def _taken(case: CacheWriteCase, tensors: CacheWriteTensors, picks: Picks, moved: bool) -> Call:
    """Write the keys of these tokens to slots of their own. moved: in pages of another size, by a mapping of the other type."""
    taken, places = moved_slots(case, picks, moved)
    own: dict[str, Any] = {name: None if (keys := getattr(tensors, name)) is None else keys[list(picks)] for name in ("kv_c", "k_pe")}
    return taken, replace(tensors, **own, k_cache=allocate_cache(taken, tensors.kv_c.device), slot_mapping=places)


CacheCase = TypeVar("CacheCase", bound=CacheWriteCase)


def moved_slots(case: CacheCase, picks: Picks, moved: bool) -> tuple[CacheCase, Tensor]:
    """Return the case of these tokens, and slots of theirs. moved: in pages of half the size, by a mapping of the other type."""
    taken, places = replace(case, tokens=len(picks)), elsewhere(case.pages * case.page_size)[int(moved)][: len(picks)]
    if moved:
        return replace(taken, pages=2 * case.pages, page_size=case.page_size // 2), places.int()
    return taken, places


def _of(case: CacheWriteCase, tensors: CacheWriteTensors, results: Result, place: int) -> Result:
    return (key_bytes(case, results[0], int(tensors.slot_mapping[place])),)


CACHE_WRITE = Operation(
    CacheWriteCase,
    OP_SUITES,
    make_cache_write_tensors,
    write_kv_cache,
    _arguments,
    _write,
    results_of=_results_of,
    taken=_taken,
    of=_of,
    requests=lambda case: case.tokens,
    in_place=("k_cache",),
)
