"""The operation cache_gather."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ...cache import dequantise_cache, gather_kv_cache
from ...spec.cache_rows import FP8_576
from ..cases.base import DTYPES
from ..cases.cache_gather import UNUSED_PAGE, CacheGatherCase, CacheGatherTensors, make_cache_gather_tensors
from ..suites.cache_gather import OP_SUITES
from .operation import Operation, Result, output_argument
from .requests import Call, Picks, relocated, widened


def _arguments(case: CacheGatherCase, tensors: CacheGatherTensors, workspace: Tensor | None) -> dict[str, Any]:
    return {
        "k_cache": tensors.k_cache,
        "block_table": tensors.block_table,
        "cu_seqlens": tensors.cu_seqlens,
        "rows": case.keys + case.rest,
        "starts": tensors.starts,
        "descale_k": tensors.descale_k,
        "dtype": DTYPES[case.dtype] if case.format.quantised else None,
        "out": output_argument(tensors, "out"),
        "kv_format": case.kv_format,
    }


def _reference(case: CacheGatherCase, tensors: CacheGatherTensors) -> Result:
    """Gather key by key as far as there are rows; rows behind the last key stay NaN."""
    cache, out = tensors.k_cache, torch.full((case.keys + case.rest, case.format.d_qk), math.nan)
    if case.format is FP8_576:
        keys = cache.float() * (1.0 if tensors.descale_k is None else tensors.descale_k)
    elif not case.format.quantised:
        keys = cache.float()
    else:
        keys = dequantise_cache(cache, case.cache)
    table, row = tensors.block_table.tolist(), 0
    for request, (first, length) in enumerate(zip(case.firsts, case.lengths, strict=True)):
        for position in range(first, first + length):
            column = position // case.page_size
            page = table[request][column] if column < len(table[request]) else -1
            if row == len(out):
                break
            out[row] = keys[page, position % case.page_size, 0] if 0 <= page < case.pages else 0.0
            row += 1
    return (out.to(cache.device, DTYPES[case.dtype]),)


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
    _reference,
    taken=_taken,
    of=_of,
    requests=lambda case: len(case.lengths),
)
