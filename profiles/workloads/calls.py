"""Calls of benchmark rows: for each op the suites' case of a row's size, and operands drawn on the device.

The suites draw operands that catch mistakes, request by request. These are drawn whole, as a model has them, and nothing in them is NaN but
the results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from cute_mla.api import flash_attn_varlen_func, flash_mla_sparse_fwd
from cute_mla.cache import quantise_cache
from cute_mla.spec.cache_insert import normalised_columns, rotates
from cute_mla.spec.cache_rows import latent_columns
from cute_mla.spec.mla import D_ROPE, D_V, ceil_div
from cute_mla.spec.mqa_logits import COLUMNS
from cute_mla.testing.cases.base import DTYPES
from cute_mla.testing.cases.paged_cache import allocate_cache
from cute_mla.testing.cases.tensors import OutputBuffer, nan_tensor, token_offsets
from cute_mla.testing.operations.cache_insert.case import CacheInsertCase, CacheInsertTensors
from cute_mla.testing.operations.cache_write.case import CacheWriteCase, CacheWriteTensors
from cute_mla.testing.operations.dense_decode.case import UNUSED_TABLE_ENTRY, DenseDecodeCase, DenseDecodeTensors, descale_tensor
from cute_mla.testing.operations.dense_prefill.case import DensePrefillCase, DensePrefillTensors
from cute_mla.testing.operations.dense_prefill_backward.case import DensePrefillBackwardCase, DensePrefillBackwardTensors
from cute_mla.testing.operations.index_write.case import IndexWriteCase, IndexWriteTensors, allocate_index_cache
from cute_mla.testing.operations.indexer_topk.case import IndexerTopkCase
from cute_mla.testing.operations.merge_states.case import MergeStatesCase, MergeStatesTensors
from cute_mla.testing.operations.mqa_logits.case import MqaLogitsTensors
from cute_mla.testing.operations.sparse_decode.case import Pool, SparseDecodeCase, SparseDecodeTensors
from cute_mla.testing.operations.sparse_prefill.case import SparsePrefillCase, SparsePrefillTensors
from cute_mla.testing.operations.sparse_prefill_backward.case import SparsePrefillBackwardCase, SparsePrefillBackwardTensors
from cute_mla.testing.operations.topk_indices.case import TopkIndicesCase, TopkIndicesTensors

from ..rows import Case
from ..shapes import (
    CacheInsertShape,
    CacheWriteShape,
    DecodeShape,
    DensePrefillBackwardShape,
    DensePrefillShape,
    IndexerShape,
    IndexWriteShape,
    MergeShape,
    SparseDecodeShape,
    SparsePrefillBackwardShape,
    SparsePrefillShape,
    TopkShape,
)
from .operands import angle_table, exact_index_cache, exact_numbers, exact_scales, page_order, random_slots, selections, shown_keys, values

_PAGES_AT_A_TIME = 4096  # pages quantised at a time, which takes several times the memory of the result
_CODES = torch.float8_e4m3fn


@dataclass(frozen=True)
class RowCall:
    """A row's call. case_of(row): the suites' case of its size. draw(case, shape, generator): one set of operands, results included."""

    case_of: Callable[[Case, Any], Any]
    draw: Callable[[Any, Any, torch.Generator], Any]


def _given(**results: Tensor) -> dict[str, OutputBuffer]:
    return {name: OutputBuffer(tensor, tensor) for name, tensor in results.items()}


def _decode_results(case: Any, tokens: tuple[int, ...], device: torch.device) -> dict[str, OutputBuffer]:
    out = nan_tensor((*tokens, case.h_q, case.d_v), DTYPES[case.dtype], device)
    return _given(out=out, lse=nan_tensor((tokens[0], case.h_q, *tokens[1:]), torch.float32, device))


# ---------------------------------------------------------------- decode


def _dense_decode_case(row: Case, shape: DecodeShape) -> DenseDecodeCase:
    return DenseDecodeCase(
        row.dtype,
        batch=shape.batch,
        s_q=shape.s_q,
        h_q=shape.h_q,
        h_kv=shape.h_kv,
        page_size=shape.page_size,
        lengths=shape.lengths,
        tokens=shape.tokens or None,
        causal=shape.s_q > 1,
        window=shape.window or None,
        d_qk=shape.d_qk,
        operands=shape.operands,
        metadata="tensors",
    )


def _dense_decode(case: DenseDecodeCase, shape: DecodeShape, draw: torch.Generator) -> DenseDecodeTensors:
    """Draw pages in random order; entries of the table beyond a request's length must never be read."""
    device, dtype, scales = draw.device, DTYPES[case.dtype], case.descales
    pool = max(sum(case.pages), 1)
    order = page_order(torch.device("cpu"), pool, draw.initial_seed()).tolist()
    table = torch.full((case.batch, max([*case.pages, 1])), UNUSED_TABLE_ENTRY, dtype=torch.int32)
    for request, (first, count) in enumerate(zip(accumulate(case.pages, initial=0), case.pages, strict=False)):
        table[request, :count] = torch.tensor(order[first : first + count], dtype=torch.int32)

    def scaled(scale: float | None, *size: int) -> Tensor:
        drawn = values(draw, dtype, *size)
        return drawn if scale is None else drawn.div_(scale).to(_CODES)

    tokens = (case.batch, case.s_q) if case.tokens is None else (case.used_tokens,)
    return DenseDecodeTensors(
        q=scaled(scales[0], *tokens, case.h_q, case.d_qk),
        k_cache=scaled(scales[1], pool, case.page_size, case.h_kv, case.d_qk),
        block_table=table.to(device),
        cache_seqlens=torch.tensor(case.given_lengths, dtype=torch.int32, device=device),
        descale_q=descale_tensor(scales[0], device),
        descale_k=descale_tensor(scales[1], device),
        cu_seqlens_q=token_offsets(case, device),
        output_buffers=_decode_results(case, tokens, device),
    )


def _sparse_decode_case(row: Case, shape: SparseDecodeShape) -> SparseDecodeCase:
    """Return the case; of packed query tokens each is a request of its own there, though tokens of a request share its keys here."""
    packed = bool(shape.tokens)
    return SparseDecodeCase(
        row.dtype,
        cache=shape.cache,
        extra_cache=shape.extra or "",
        batch=sum(shape.tokens) if packed else shape.batch,
        s_q=1 if packed else shape.s_q,
        h_q=shape.h_q,
        main=Pool(shape.context, shape.topk, shape.page_size),
        extra=Pool(shape.context, shape.extra_topk, shape.page_size) if shape.extra else None,
        tokens=shape.tokens or None,
        metadata="tensors",
    )


def _sparse_decode(case: SparseDecodeCase, shape: SparseDecodeShape, draw: torch.Generator) -> SparseDecodeTensors:
    """Draw keys on pages in random order, of which a token selects distinct ones of its request."""
    device, dtype, each = draw.device, DTYPES[case.dtype], ceil_div(shape.context, shape.page_size)
    pages = page_order(device, shape.batch * each, draw.initial_seed()).view(shape.batch, each)
    pages_of = pages.repeat_interleave(torch.tensor(shape.query_tokens, device=device), 0)  # of each query token
    tokens = (case.batch, case.s_q) if case.tokens is None else (case.batch,)
    indices, caches = [], []
    for pool in case.pools:
        chosen = selections(draw, len(pages_of), pool.topk, pool.s_k)
        page, row = chosen // pool.page_size, chosen % pool.page_size
        indices.append((pages_of.gather(1, page.long()) * pool.page_size + row).view(*tokens, pool.topk))
    q = values(draw, dtype, *tokens, case.h_q, case.d_qk)
    size = (shape.page_size, 1, case.d_qk)
    for layout in (case.format, case.extra_format)[: len(case.pools)]:
        if not layout.quantised:
            caches.append(values(draw, dtype, pages.numel(), *size))
            continue
        starts = range(0, pages.numel(), _PAGES_AT_A_TIME)
        counts = [min(_PAGES_AT_A_TIME, pages.numel() - first) for first in starts]
        caches.append(torch.cat([quantise_cache(values(draw, dtype, count, *size), layout.name) for count in counts]))
    return SparseDecodeTensors(
        q=q,
        k_cache=caches[0],
        indices=indices[0],
        extra_k_cache=caches[1] if case.extra else None,
        extra_indices=indices[1] if case.extra else None,
        cu_seqlens_q=token_offsets(case, device),
        output_buffers=_decode_results(case, tokens, device),
    )


# ---------------------------------------------------------------- prefill


def _sparse_prefill_case(row: Case, shape: SparsePrefillShape, kind: type[SparsePrefillCase] = SparsePrefillCase) -> Any:
    return kind(row.dtype, s_q=shape.s_q, h_q=shape.h_q, d_qk=shape.d_qk, s_kv=shape.s_kv, topk=shape.topk)


def _sparse_prefill(case: SparsePrefillCase, shape: SparsePrefillShape, draw: torch.Generator) -> SparsePrefillTensors:
    rows, dtype, device = (case.s_q, case.h_q), DTYPES[case.dtype], draw.device
    return SparsePrefillTensors(
        q=values(draw, dtype, *rows, case.d_qk),
        kv=values(draw, dtype, case.s_kv, 1, case.d_qk),
        indices=selections(draw, case.s_q, case.topk, case.s_kv).unsqueeze(1),
        output_buffers=_given(
            out=nan_tensor((*rows, D_V), dtype, device),
            **{name: nan_tensor(rows, torch.float32, device) for name in ("max_logits", "lse")},
        ),
    )


def _sparse_prefill_backward(
    case: SparsePrefillBackwardCase, shape: SparsePrefillBackwardShape, draw: torch.Generator
) -> SparsePrefillBackwardTensors:
    """Draw operands; out and lse are those of a forward call."""
    forward = _sparse_prefill(case, shape, draw)
    q, kv = forward.q, forward.kv
    dout = values(draw, q.dtype, case.s_q, case.h_q, D_V) * 10
    out, _, lse = flash_mla_sparse_fwd(q, kv, forward.indices, case.scale)
    shapes = {"dq": (q.shape, q.dtype), "dkv": (kv.shape, q.dtype), "d_sink": ((case.h_q,), torch.float32)}
    results = _given(**{name: nan_tensor(tuple(size), dtype, q.device) for name, (size, dtype) in shapes.items()})
    return SparsePrefillBackwardTensors(q=q, kv=kv, indices=forward.indices, dout=dout, out=out, lse=lse, output_buffers=results)


def _dense_prefill_case(row: Case, shape: DensePrefillShape, kind: type[DensePrefillCase] = DensePrefillCase) -> Any:
    return kind(
        row.dtype,
        d_qk=shape.d_qk,
        lengths=tuple((length, length + shape.cached) for length in shape.lengths),
        h_kv=shape.h_kv,
        group=shape.h_q // shape.h_kv,
        causal=shape.causal,
        ends="clipped",  # no rows of no sequence
        mask="random" if shape.shown else None,
    )


def _prefill_inputs(case: DensePrefillCase, draw: torch.Generator) -> dict[str, Any]:
    dtype, device = DTYPES[case.dtype], draw.device
    return {
        "q": values(draw, dtype, case.total_q, case.h_q, case.d_qk),
        "k": values(draw, dtype, case.total_k, case.h_kv, case.d_qk),
        "v": values(draw, dtype, case.total_k, case.h_kv, case.d_v),
        "cu_seqlens_q": torch.tensor(case.q_starts, dtype=torch.int32, device=device),
        "cu_seqlens_k": torch.tensor(case.k_starts, dtype=torch.int32, device=device),
    }


def _dense_prefill(case: DensePrefillCase, shape: DensePrefillShape, draw: torch.Generator) -> DensePrefillTensors:
    inputs, device, mask = _prefill_inputs(case, draw), draw.device, None
    if shape.shown:
        seen = torch.tensor([keys for length in shape.lengths for keys in shape.seen(length)], dtype=torch.int64, device=device)
        mask = shown_keys(draw, seen, case.max_seqlen_k, shape.shown)
    out = nan_tensor((case.total_q, case.h_q, case.d_v), DTYPES[case.dtype], device)
    results = _given(out=out, lse=nan_tensor((case.total_q, case.h_q), torch.float32, device))
    return DensePrefillTensors(**inputs, key_mask=mask, output_buffers=results)


def _dense_prefill_backward(
    case: DensePrefillBackwardCase, shape: DensePrefillBackwardShape, draw: torch.Generator
) -> DensePrefillBackwardTensors:
    """Draw operands; out and lse are those of a forward call."""
    inputs = _prefill_inputs(case, draw)
    q, k, v, ends_q, ends_k = inputs.values()
    dout = values(draw, q.dtype, case.total_q, case.h_q, case.d_v) * 10
    out, lse = flash_attn_varlen_func(q, k, v, ends_q, ends_k, case.max_seqlen_q, case.max_seqlen_k, causal=case.causal)
    shapes = {"dq": q.shape, "dk": k.shape, "dv": v.shape}
    results = _given(**{name: nan_tensor(tuple(shape), q.dtype, q.device) for name, shape in shapes.items()})
    return DensePrefillBackwardTensors(**inputs, dout=dout, out=out, lse=lse, output_buffers=results)


def _merge_states(case: MergeStatesCase, shape: MergeShape, draw: torch.Generator) -> MergeStatesTensors:
    device, dtype = draw.device, DTYPES[case.dtype]
    return MergeStatesTensors(
        outs=values(draw, dtype, case.states, *case.rows_shape, case.head_dim),
        lses=torch.empty((case.states, *case.rows_shape), device=device).normal_(7.0, 1.0, generator=draw),
        output_buffers=_given(
            out=nan_tensor((*case.rows_shape, case.head_dim), dtype, device), lse=nan_tensor(case.rows_shape, torch.float32, device)
        ),
    )


# ---------------------------------------------------------------- writers


def _cache_case(kind: type[Any], row: Case, shape: CacheWriteShape | CacheInsertShape, **fields: Any) -> Any:
    pages = ceil_div(shape.tokens, shape.page_size)
    return kind(row.dtype, cache=shape.cache, page_size=shape.page_size, pages=pages, tokens=shape.tokens, **fields)


def _written(case: CacheWriteCase, draw: torch.Generator) -> dict[str, Any]:
    """Draw keys, and slots in random order in a cache just large enough for the tokens."""
    columns = latent_columns(case.format)
    keys = values(draw, DTYPES[case.dtype], case.tokens, case.format.d_qk)
    return {
        "kv_c": keys[:, :columns],
        "k_pe": keys[:, columns:] if columns < case.format.d_qk else None,
        "k_cache": allocate_cache(case, draw.device),
        "slot_mapping": random_slots(draw, case.tokens, case.page_size),
        "descale_k": None,
    }


def _cache_insert(case: CacheInsertCase, shape: CacheInsertShape, draw: torch.Generator) -> CacheInsertTensors:
    """Draw keys and queries at positions in random order."""
    dtype, rotated = DTYPES[case.dtype], rotates(case.format)
    return CacheInsertTensors(
        **_written(case, draw),
        q_pe=values(draw, dtype, case.tokens, case.heads, D_ROPE) if rotated and case.heads else None,
        norm_weight=1 + values(draw, dtype, normalised_columns(case.format)),
        cos_sin=angle_table(draw, case.tokens) if rotated else None,
        positions=torch.randperm(case.tokens, generator=draw, device=draw.device) if rotated else None,
    )


def _index_write_case(row: Case, shape: IndexWriteShape) -> IndexWriteCase:
    return IndexWriteCase(
        rows="queries" if shape.h_q else "keys",
        tokens=shape.tokens,
        heads=shape.h_q or 1,
        page_size=shape.page_size,
        pages=ceil_div(shape.tokens, shape.page_size),
        table_rows=shape.tokens,
    )


def _index_write(case: IndexWriteCase, shape: IndexWriteShape, draw: torch.Generator) -> IndexWriteTensors:
    """Draw rows at positions in random order; of keys also slots in random order."""
    device, tokens, heads = draw.device, case.tokens, (case.heads,) if case.rows == "queries" else ()
    rows = values(draw, torch.bfloat16, tokens, *heads, COLUMNS)
    table, positions = angle_table(draw, tokens), torch.randperm(tokens, generator=draw, device=device)
    if heads:
        weights = values(draw, torch.float32, tokens, *heads)
        out = torch.full((*rows.shape,), 0xFF, dtype=torch.uint8, device=device).view(_CODES)
        results = _given(out=out, out_weights=nan_tensor((tokens, *heads), torch.float32, device))
        return IndexWriteTensors(rows, table, positions, weights=weights, output_buffers=results)
    return IndexWriteTensors(
        rows,
        table,
        positions,
        slot_mapping=random_slots(draw, tokens, case.page_size),
        norm_weight=1 + values(draw, torch.float32, COLUMNS),
        norm_bias=values(draw, torch.float32, COLUMNS),
        index_cache=allocate_index_cache(case, device),
    )


# ---------------------------------------------------------------- selections


def _topk_indices(case: TopkIndicesCase, shape: TopkShape, draw: torch.Generator) -> TopkIndicesTensors:
    """Draw rows that all have their full length."""
    return TopkIndicesTensors(
        logits=torch.empty((case.rows, case.columns), device=draw.device).normal_(generator=draw),
        lengths=torch.full((case.rows,), case.columns, dtype=torch.int32, device=draw.device),
        output_buffers=_given(out=torch.zeros(case.rows, case.topk, dtype=torch.int32, device=draw.device)),
    )


def _indexer_topk_case(row: Case, shape: IndexerShape) -> IndexerTopkCase:
    requests, tokens, page_size = (shape.tokens, 1, shape.page_size) if shape.paged else (1, shape.tokens, None)
    return IndexerTopkCase(heads=shape.h_q, requests=requests, tokens=tokens, keys=shape.context, page_size=page_size, topk=shape.topk)


def _indexer_topk(case: IndexerTopkCase, shape: IndexerShape, draw: torch.Generator) -> MqaLogitsTensors:
    """Draw numbers of which fp32 holds every sum, whatever its order, so that positions are exactly those of the reference.

    Numbers are spread as normal ones are, and half of the keys have twice the scale of the others. All tokens see all keys.
    """
    device, steps = draw.device, 32  # steps of a weight of 1
    weights = torch.randint(-steps, steps + 1, (shape.tokens, case.heads), generator=draw, device=device) / steps
    q = exact_numbers(draw, shape.tokens, case.heads)
    ends = torch.full((shape.tokens,), case.keys, dtype=torch.int32, device=device)
    results = _given(out=torch.zeros(shape.tokens, case.topk, dtype=torch.int32, device=device))
    if case.page_size is None:
        keys, scales = exact_numbers(draw, case.keys), exact_scales(draw, case.keys)
        return MqaLogitsTensors(q, keys, scales, weights, torch.zeros_like(ends), ends, None, results)
    each = ceil_div(case.keys, case.page_size)
    table = page_order(device, shape.tokens * each, draw.initial_seed()).view(shape.tokens, each)
    cache = exact_index_cache(draw, table.numel(), case.page_size)
    return MqaLogitsTensors(q.unsqueeze(1), cache, None, weights, None, ends, table, results)


CALLS: dict[str, RowCall] = {
    "dense_decode": RowCall(_dense_decode_case, _dense_decode),
    "sparse_decode": RowCall(_sparse_decode_case, _sparse_decode),
    "sparse_prefill": RowCall(_sparse_prefill_case, _sparse_prefill),
    "sparse_prefill_backward": RowCall(
        lambda row, shape: _sparse_prefill_case(row, shape, SparsePrefillBackwardCase), _sparse_prefill_backward
    ),
    "dense_prefill": RowCall(_dense_prefill_case, _dense_prefill),
    "dense_prefill_backward": RowCall(
        lambda row, shape: _dense_prefill_case(row, shape, DensePrefillBackwardCase), _dense_prefill_backward
    ),
    "merge_states": RowCall(
        lambda row, shape: MergeStatesCase(
            row.dtype, states=shape.states, tokens=shape.tokens, h_q=shape.h_q, head_dim=shape.head_dim, form="stacked"
        ),
        _merge_states,
    ),
    "cache_write": RowCall(
        lambda row, shape: _cache_case(CacheWriteCase, row, shape), lambda case, shape, draw: CacheWriteTensors(**_written(case, draw))
    ),
    "cache_insert": RowCall(
        lambda row, shape: _cache_case(CacheInsertCase, row, shape, heads=shape.h_q, table_rows=shape.tokens), _cache_insert
    ),
    "index_write": RowCall(_index_write_case, _index_write),
    "topk_indices": RowCall(lambda row, shape: TopkIndicesCase(rows=shape.rows, columns=shape.columns, topk=shape.topk), _topk_indices),
    "indexer_topk": RowCall(_indexer_topk_case, _indexer_topk),
}
