"""workspace_size: the bytes of workspace that a call needs."""

from __future__ import annotations

from typing import Any

import torch

from ..ops import indexer_topk
from ..ops.arguments import check_columns, check_flag, check_integer, is_integer, short_repr
from ..ops.decode_plan import accumulator_bytes
from ..ops.limits import BACKWARD_OPS, MAX_QUERY_TOKENS, OPS, check_op, heads_error
from ..ops.split_plan import ragged_queries
from ..runtime.current import default_device, device_for
from ..spec import dense_decode, sparse_decode
from ..spec.dense_decode import FP8, LATENT
from ..spec.dense_prefill import MAX_TOKENS
from ..spec.dense_prefill_dq import BackwardWorkspace
from ..spec.mla import D_V, DENSE_VALUE_COLUMNS
from ..spec.split_plan import RaggedQueries, accumulator_rows, invariant_splits

_INDEXER_TOPK = "indexer_topk"


def workspace_size(
    op: str,
    *,
    batch: int,
    s_q: int,
    h_q: int,
    h_kv: int = 1,
    batch_invariant: bool = False,
    max_cache_seqlen: int | None = None,
    topk: int | None = None,
    total_q: int | None = None,
    head_dim_v: int = D_V,
    is_fp8_q: bool = False,
    device: torch.device | str | int | None = None,
) -> int:
    """Return the bytes of workspace that a call needs. They depend on its shapes and the device, never on lengths.

    Sparse decode without topk_length and cu_seqlens_q uses none where it keeps every request whole: there the bytes are an upper bound.

    op: "dense_decode", "sparse_decode", "dense_prefill_backward" or "indexer_topk"; "dense_prefill" and "sparse_prefill" need none.
    batch, s_q, h_q, h_kv: as in the call; in prefill s_q is max_seqlen_qo, in decode with cu_seqlens_q max_seqlen_q. In
    indexer_topk_prefill batch is 1 and s_q its tokens.
    batch_invariant: as in the call; then max_cache_seqlen, block_table.shape[1] * page size, is needed too in dense decode. It always is in
    indexer_topk; in indexer_topk_prefill it is max_seqlen_k, by default the keys of kv.
    topk: in sparse decode, indices of a token in both caches together, indices.shape[2] + extra_indices_in_kvcache.shape[2];
    needed with batch_invariant. In indexer_topk as in the call, always needed: at most 40 MB for up to 131,072 keys, 64 MB
    for more.
    total_q: in decode with cu_seqlens_q, q.shape[0]. In dense_prefill_backward, where it is needed, q.shape[0]; then the workspace has 8
    bytes a query row and head.
    head_dim_v: as in the call, in dense decode. is_fp8_q: whether q is e4m3, in dense decode.
    device: where the call runs; "cpu" inside cute_mla.simulate(). Default: the simulated device inside cute_mla.simulate(), else the
    current CUDA device.

    Raises ValueError on bad arguments, ArtifactError and DeviceError if the device cannot be used, DeviceError also without a GPU.
    """
    check_op(op, (*OPS, *BACKWARD_OPS, _INDEXER_TOPK))
    batch_invariant, is_fp8_q = check_flag("batch_invariant", batch_invariant), check_flag("is_fp8_q", is_fp8_q)
    head_dim_v = check_columns("head_dim_v", head_dim_v, *(DENSE_VALUE_COLUMNS if op == "dense_decode" else (D_V,)))
    batch, s_q = check_integer("batch", batch, 0), check_integer("s_q", s_q, 0)
    error = heads_error(h_q, h_kv, op)
    if error is not None:
        raise ValueError(error)
    h_q, h_kv = check_integer("h_q", h_q, 1), check_integer("h_kv", h_kv, 1)
    max_keys = _max_keys(op, batch_invariant, max_cache_seqlen, topk)
    decodes = op in ("dense_decode", "sparse_decode")
    backward_bytes = _backward_bytes(op, h_q, None if decodes else total_q)
    found = device_for(_torch_device(device))
    if op == _INDEXER_TOPK:
        return indexer_topk.divide(batch, s_q, max_keys, check_integer("topk", topk, 0), found.sm_count).nbytes
    if op in BACKWARD_OPS:
        return backward_bytes
    if s_q == 0 or op in ("dense_prefill", "sparse_prefill"):
        return 0
    if total_q is not None:
        ragged = _ragged_queries(op, batch, s_q, h_q // h_kv, total_q)
        batch, s_q = ragged.units, max(ragged.unit_tokens, 1)
    if batch == 0:
        return 0
    if op == "sparse_decode":
        parts = sparse_decode.num_parts(found.arch, h_q, s_q, found.sm_count)
    else:
        rows = s_q * (h_q // h_kv)
        few = is_fp8_q or (head_dim_v == D_V and dense_decode.few_rows(found.arch, LATENT, rows) > 0)
        operands = FP8 if few and not batch_invariant else LATENT
        parts = dense_decode.num_parts(found.arch, rows, h_kv, found.sm_count, operands, head_dim_v)
    max_splits = invariant_splits(max_keys) if batch_invariant else 0
    return sum(accumulator_bytes(accumulator_rows(batch, parts, max_splits), s_q, h_q, head_dim_v))


def _ragged_queries(op: str, batch: int, max_seqlen_q: int, heads_per_kv: int, total_q: int) -> RaggedQueries:
    """Return the query tokens of a decode call with cu_seqlens_q."""
    total_q = check_integer("total_q", total_q, 0, MAX_QUERY_TOKENS)
    if op == "dense_decode":
        return ragged_queries(batch, total_q, max_seqlen_q, heads_per_kv)
    return RaggedQueries(batch, total_q, max_seqlen_q)


def _torch_device(device: Any) -> torch.device:
    """Return the torch device. ValueError unless torch has such a device."""
    if device is None:
        return default_device()
    try:
        return torch.device("cuda", device) if is_integer(device) else torch.device(device)
    except (RuntimeError, TypeError, ValueError, OverflowError):
        message = f"device is {short_repr(device)}; supported: a CUDA device, and cpu inside `with cute_mla.simulate(arch):`"
        raise ValueError(message) from None


def _backward_bytes(op: str, h_q: int, total_q: int | None) -> int:
    """Return the bytes of a backward pass, 0 for other ops. ValueError if total_q is missing, or is given without need."""
    if op in BACKWARD_OPS:
        return BackwardWorkspace(check_integer("total_q", total_q, 0, MAX_TOKENS), h_q).nbytes
    if total_q is not None:
        raise ValueError(f"total_q is {short_repr(total_q)}; supported with {op}: None")
    return 0


def _max_keys(op: str, batch_invariant: bool, max_cache_seqlen: int | None, topk: int | None) -> int:
    """Return the bound on a request's keys, 0 where none is needed. ValueError if a needed bound is missing, or given without need."""
    if op == _INDEXER_TOPK:
        return check_integer("max_cache_seqlen", max_cache_seqlen, 0)
    dense = op == "dense_decode"
    if op in ("dense_decode", "dense_prefill", *BACKWARD_OPS) and topk is not None:
        raise ValueError(f"topk is {short_repr(topk)}; supported with {op}: None")
    if not dense and max_cache_seqlen is not None:
        raise ValueError(f"max_cache_seqlen is {short_repr(max_cache_seqlen)}; supported with {op}: None")
    if dense and batch_invariant != (max_cache_seqlen is not None):
        raise ValueError(
            f"batch_invariant is {batch_invariant} and max_cache_seqlen {short_repr(max_cache_seqlen)}; supported: "
            "max_cache_seqlen (block_table.shape[1] * page size) with batch_invariant=True, and neither"
        )
    if op == "sparse_decode" and batch_invariant and topk is None:
        raise ValueError("batch_invariant is True and topk None; supported: topk (of both caches together) with batch_invariant=True")
    name, keys = ("max_cache_seqlen", max_cache_seqlen) if dense else ("topk", topk)
    return 0 if keys is None else check_integer(name, keys, 0)
