"""Ops of the indexer: its keys and queries, their logits, and the choice of keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops import index_write, indexer_topk, mqa_logits, topk_indices
from .register import Function, TorchOp

_IN_PARTS = {"kv": "Tensor keys, Tensor scales"}


def _with_parts(call: Function, arguments: dict[str, Any]) -> Any:
    """Call an op that takes kv as two tensors."""
    keys, scales = arguments.pop("kv")
    return call(keys=keys, scales=scales, **arguments)


def _of_parts(run: Function) -> Callable[..., Tensor]:
    """Return an eager body that takes kv as two tensors."""
    return lambda q, keys, scales, *args, **options: run(q, (keys, scales), *args, **options)


def _prepared(q: Tensor, weights: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
    """Allocate the results of prepare_index_queries."""
    return q.new_empty(q.shape, dtype=torch.float8_e4m3fn), weights.new_empty(weights.shape, dtype=torch.float32)


def _new_indices(logits: Tensor, lengths: Tensor, topk: int) -> Tensor:
    """Allocate the result of topk_indices."""
    return lengths.new_empty((logits.shape[0], topk))


def _chosen(q: Tensor, topk: int, **others: Any) -> Tensor:
    """Allocate the result of indexer_topk or indexer_topk_prefill."""
    tokens = q.shape[0] * q.shape[1] if q.dim() == 4 else q.shape[0]
    return q.new_empty((tokens, topk), dtype=torch.int32)


def _new_row_logits(keys: Tensor, weights: Tensor, max_seqlen_k: int = 0, **others: Any) -> Tensor:
    """Allocate the result of fp8_mqa_logits."""
    return _new_logits(weights, max_seqlen_k or keys.shape[0])


def _new_logits(weights: Tensor, max_context_len: int, **others: Any) -> Tensor:
    """Allocate the logits of the tokens that weights [tokens, heads] are of."""
    stride = (max_context_len + mqa_logits.ROW_ALIGNMENT - 1) // mqa_logits.ROW_ALIGNMENT * mqa_logits.ROW_ALIGNMENT
    return weights.new_empty((weights.shape[0], stride))[:, :max_context_len]


WRITE = TorchOp(index_write.run_keys, spelled={"index_cache": "Tensor(a!) index_cache"})
QUERIES = TorchOp(index_write.run_queries, _prepared, ("out", "out_weights"))
ROW_LOGITS = TorchOp(
    mqa_logits.run_rows, _new_row_logits, ("out",), spelled=_IN_PARTS, traced=_with_parts, body=_of_parts(mqa_logits.run_rows)
)
PAGED_LOGITS = TorchOp(mqa_logits.run_pages, _new_logits, ("out",))
PAGED_TOPK = TorchOp(indexer_topk.run_pages, _chosen, ("out", "workspace?"))
ROW_TOPK = TorchOp(
    indexer_topk.run_rows, _chosen, ("out", "workspace?"), spelled=_IN_PARTS, traced=_with_parts, body=_of_parts(indexer_topk.run_rows)
)
TOPK = TorchOp(topk_indices.run, _new_indices, ("out",))
