"""The operation sparse_decode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .... import reference
from ....api import flash_mla_with_kvcache, get_mla_metadata, workspace_size
from ....cache import dequantise_cache
from ....ops.paged_cache import columns_of
from ....reference import IndexedCache
from ....spec.arch import Arch
from ....spec.cache_format import FORMATS
from ...bounds import attention_bounds
from ...cases.paged_cache import named_format
from ...cases.tensors import decode_outputs, token_offsets
from ...compare import SPARSE_DECODE_OUT, Tolerance
from ..decode import decode_operands, packed, plan_arguments, token_ranges
from ..operation import Operation, Plan, Result, operands_of, scale_argument
from ..requests import CUT, Call, Picks, at, own_rows, relocated, widened
from .case import SparseDecodeCase, SparseDecodeTensors, make_sparse_decode_tensors
from .suites import OP_SUITES

_ROWS = {"bf16": (6e-3, 5e-6), "fp16": (7e-4, 8e-8)}  # 3.3e-3, 3.2e-6; 3.2e-4, 3.9e-8


_EXACT_KEYS = "exact_keys"  # scale times value is not rounded: P times scale is, within the bounds of P
_BY_COLUMNS = {columns_of(layout): layout.name for layout in FORMATS.values()}  # where these tell a format


def _operands(case: SparseDecodeCase, tensors: SparseDecodeTensors) -> dict[str, Any]:
    return {
        **decode_operands(case, tensors),
        **operands_of(tensors, "indices", "attn_sink", "extra_k_cache", "topk_length", "extra_topk_length"),
        "extra_indices_in_kvcache": tensors.extra_indices,
        "kv_format": named_format(case.format),
        "extra_kv_format": None if case.extra is None else named_format(case.extra_format),
    }


def _arguments(case: SparseDecodeCase, tensors: SparseDecodeTensors, workspace: Tensor | None) -> dict[str, Any]:
    return {
        **_operands(case, tensors),
        **plan_arguments(case, tensors, workspace, lambda: _plan(case, tensors.cu_seqlens_q, tensors.q.device)),
        "block_table": None,
        "cache_seqlens": None,
        "is_fp8_kvcache": case.format.quantised > 0,
        "few_heads": case.few_heads,
    }


def _plan(case: SparseDecodeCase, offsets: Tensor | None, device: torch.device) -> Plan:
    requests = case.batch if case.tokens is None else len(case.tokens)
    lengths = torch.zeros(requests, dtype=torch.int32, device=device)  # a sparse plan depends on their number only
    topk = max(_topk(case) // 2, 1) if case.metadata == "stale" else _topk(case)
    s_q = case.max_seqlen_q or case.s_q
    return get_mla_metadata(
        lengths, s_q * case.h_q, 1, case.h_q, case.format.quantised > 0, topk, cu_seqlens_q=offsets, total_q=case.total_q
    )


def _topk(case: SparseDecodeCase) -> int:
    return sum(pool.topk for pool in case.pools)


def _workspace_bytes(case: SparseDecodeCase, tensors: SparseDecodeTensors) -> int:
    return workspace_size(
        case.op,
        batch=case.batch if case.tokens is None else len(case.tokens),
        s_q=case.max_seqlen_q or case.s_q,
        total_q=case.total_q,
        h_q=case.h_q,
        batch_invariant=case.batch_invariant,
        topk=_topk(case),
        device=tensors.q.device,
    )


def _expected(arguments: Mapping[str, Any]) -> Result:
    """Attend to the keys of one cache or two; of packed query tokens, each is a request of its own."""
    ragged = arguments.get("cu_seqlens_q") is not None
    tokens = slice(len(token_ranges(arguments)) if ragged else None)
    caches = [_selected(arguments, tokens, "k_cache", "indices", "topk_length", "kv_format")]
    if arguments.get("extra_k_cache") is not None:
        names = ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length", "extra_kv_format")
        caches.append(_selected(arguments, tokens, *names))
    q = arguments["q"][tokens, None] if ragged else arguments["q"]
    sinks = arguments.get("attn_sink")
    out, lse = reference.sparse_decode(q, caches, scale_argument(arguments), sinks, arguments["empty_lse"])
    return packed(arguments, [(tokens, (out[None, :, 0], lse[None, :, :, 0].mT))]) if ragged else (out, lse)


def _selected(arguments: Mapping[str, Any], tokens: slice, *names: str) -> IndexedCache:
    """Return the pages of a cache that indices name, and the indices into these, [tokens, 1, topk] where query tokens are packed.

    names: of cache, indices, length and format. Keys are scale times value, rounded once, as the contract of most kernels has it.
    """
    cache, indices, length, named = (arguments.get(name) for name in names)
    assert cache is not None
    assert indices is not None
    rows, indices = cache.shape[1], indices[tokens]
    valid = (indices >= 0) & (indices < len(cache) * rows)
    pages, place = torch.unique(indices[valid].long() // max(rows, 1), return_inverse=True)
    own = torch.full_like(indices, -1)
    own[valid] = (place * rows + indices[valid].long() % max(rows, 1)).to(own)
    used = cache[pages] if len(pages) else cache[:1]
    slots = dequantise_cache(used, named or _BY_COLUMNS[cache.shape[3]])
    if not arguments.get(_EXACT_KEYS):
        slots = slots.to(arguments["q"].dtype)
    slots = slots.float().flatten(0, 2)
    packed_tokens = arguments.get("cu_seqlens_q") is not None
    return IndexedCache(slots, own[:, None] if packed_tokens else own, None if length is None else length[tokens])


def _form(case: SparseDecodeCase, arch: Arch) -> Mapping[str, Any]:
    return {_EXACT_KEYS: case.problem(arch).config.few_heads}


def _bounds(case: SparseDecodeCase) -> Mapping[str, Tolerance]:
    return attention_bounds(SPARSE_DECODE_OUT, _ROWS[case.dtype], "lse")


def _taken(case: SparseDecodeCase, tensors: SparseDecodeTensors, picks: Picks, moved: bool) -> Call:
    """Take requests of a call, of packed query tokens the tokens, each a request of its own."""
    picked = list(picks)
    pools = [
        pool._replace(lengths=None if lengths is None else tuple(lengths[pick] for pick in picked))
        for pool, lengths in zip(case.pools, case.topk_lengths, strict=True)
    ]
    taken = replace(
        case,
        batch=len(picked),
        main=pools[0],
        extra=pools[1] if len(pools) > 1 else None,
        tokens=None if case.tokens is None else (1,) * len(picked),
    )
    names = ("indices", "topk_length", "extra_indices", "extra_topk_length")
    own: dict[str, Any] = {name: None if (tensor := getattr(tensors, name)) is None else tensor[picked] for name in names}
    offsets, buffers = token_offsets(taken, tensors.q.device), decode_outputs(taken, tensors.q.device)
    operands = replace(tensors, q=at(tensors.q, picked), cu_seqlens_q=offsets, output_buffers=buffers, **own)
    if not moved:
        return taken, operands
    for prefix, spare in (("", CUT), ("extra_", 3)):
        cache, indices = getattr(operands, f"{prefix}k_cache"), getattr(operands, f"{prefix}indices")
        if cache is not None:
            cache, indices = relocated(cache, indices, cache.shape[1])
            placed: dict[str, Any] = {f"{prefix}k_cache": cache, f"{prefix}indices": widened(indices, spare, 0)}
            operands = replace(operands, **placed)
    return replace(taken, metadata="tensors"), operands


SPARSE_DECODE = Operation(
    SparseDecodeCase,
    OP_SUITES,
    make_sparse_decode_tensors,
    flash_mla_with_kvcache,
    _arguments,
    _expected,
    operands=_operands,
    form=_form,
    workspace_bytes=_workspace_bytes,
    bounds=_bounds,
    taken=_taken,
    of=own_rows,
    requests=lambda case: case.batch,
    plan=lambda case, tensors: _plan(case, tensors.cu_seqlens_q, tensors.q.device),
)
