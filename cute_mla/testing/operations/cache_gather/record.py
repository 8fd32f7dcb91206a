"""The operation cache_gather."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ....cache import dequantise_cache, gather_kv_cache
from ....ops.paged_cache import cache_rows
from ....ops.tensor_spec import spec_of
from ....spec.cache_rows import FP8_576
from ...cases.base import DTYPES
from ..operation import Operation, Result, operands_of, outputs_of
from ..requests import Call, Picks, relocated, widened
from .case import UNUSED_PAGE, CacheGatherCase, CacheGatherTensors, make_cache_gather_tensors
from .suites import OP_SUITES


def _arguments(case: CacheGatherCase, tensors: CacheGatherTensors, workspace: Tensor | None) -> dict[str, Any]:
    return {
        **operands_of(tensors, "k_cache", "block_table", "cu_seqlens", "starts", "descale_k"),
        **outputs_of(tensors, "out"),
        "rows": case.keys + case.rest,
        "dtype": DTYPES[case.dtype] if case.format.quantised else None,
        "kv_format": case.kv_format,
    }


def _expected(arguments: Mapping[str, Any]) -> Result:
    """Gather key by key as far as there are rows; rows behind the last key stay NaN."""
    cache, dtype = arguments["k_cache"], arguments["dtype"]
    layout = cache_rows("k_cache", spec_of("k_cache", cache), arguments["kv_format"]).format
    if layout is FP8_576:
        keys = cache.float() * (1.0 if arguments["descale_k"] is None else arguments["descale_k"])
    else:
        keys = dequantise_cache(cache, layout.name) if layout.quantised else cache.float()
    if dtype is None and layout.quantised:
        dtype = torch.bfloat16 if arguments["out"] is None else arguments["out"].dtype
    out = torch.full((int(arguments["rows"]), layout.d_qk), math.nan)
    table, ends = arguments["block_table"].tolist(), arguments["cu_seqlens"].tolist()
    firsts = [0] * len(table) if arguments["starts"] is None else arguments["starts"].tolist()
    for pages, first, row, end in zip(table, firsts, ends, ends[1:], strict=False):
        for place in range(row, min(end, len(out))):
            column, slot = divmod(first + place - row, cache.shape[1])
            page = pages[column] if first >= 0 and column < len(pages) else -1
            out[place] = keys[page, slot, 0] if 0 <= page < len(cache) else 0.0
    return (out.to(cache.device, dtype or cache.dtype),)


def _taken(case: CacheGatherCase, tensors: CacheGatherTensors, picks: Picks, moved: bool) -> Call:
    picked = list(picks)
    lengths, firsts = (tuple(own[pick] for pick in picked) for own in (case.lengths, case.firsts))
    cache, table = tensors.k_cache, tensors.block_table[picked]
    if moved:
        cache, table = relocated(cache, table)
        table = widened(table, 3, UNUSED_PAGE)
    offsets = torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32, device=cache.device)
    starts = None if tensors.starts is None else tensors.starts[picked]
    operands = replace(tensors, k_cache=cache, block_table=table, cu_seqlens=offsets, starts=starts, output_buffers={})
    return replace(case, lengths=lengths, starts=firsts), operands


def _of(case: CacheGatherCase, tensors: CacheGatherTensors, results: Result, place: int) -> Result:
    first, end = tensors.cu_seqlens[place : place + 2].tolist()
    return (results[0][first:end],)


CACHE_GATHER = Operation(
    CacheGatherCase,
    OP_SUITES,
    make_cache_gather_tensors,
    gather_kv_cache,
    _arguments,
    _expected,
    taken=_taken,
    of=_of,
    requests=lambda case: len(case.lengths),
)
