"""Ops of the indexer: its keys and queries, their logits, and the choice of keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops import head_sums, index_write, indexer_backward, indexer_topk, mqa_logits, topk_indices
from ..ops.arguments import NO_DOUBLE_BACKWARD, NO_GIVEN_RESULTS
from .prefill import KEY_PLAN
from .register import Function, Gradient, TorchOp, ops

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


def _new_sums(q: Tensor, indices: Tensor, **others: Any) -> Tensor:
    """Allocate the result of attention_head_sums or indexer_scores."""
    return q.new_empty((*q.shape[:-2], indices.shape[-1]), dtype=torch.float32)


def _run_scores(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    indices: Tensor,
    topk_length: Tensor | None = None,
    kv_offsets: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Compute indexer_scores, all of whose tensors may be given by position."""
    return head_sums.run_scores(q, k, weights, indices, topk_length, kv_offsets=kv_offsets, **options)


def _score_gradients(q: Tensor, k: Tensor, weights: Tensor, **others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate dq, dk and dweights of indexer_scores."""
    return q.new_empty(q.shape), k.new_empty(k.shape), weights.new_empty(weights.shape)


def _save_scores(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep what the backward pass of indexer_scores reads: all operands."""
    ctx.inputs = len(inputs)
    ctx.save_for_backward(*inputs, *(None,) * (len(ops.indexer_scores.default._schema.arguments) - len(inputs)))


def _scores_backward(ctx: Any, dscores: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k and weights, and None for the other arguments."""
    q, k, weights, indices, topk_length, kv_offsets = ctx.saved_tensors
    made = ops.indexer_backward(q, k, weights, indices, dscores, topk_length, kv_offsets=kv_offsets)
    return *made, *(None,) * (ctx.inputs - len(made))


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
HEAD_SUMS = TorchOp(head_sums.run_probs, _new_sums, ("out",))
SCORES = TorchOp(
    head_sums.run_scores,
    _new_sums,
    ("out",),
    # torch differentiates ops all of whose tensors may be given by position
    {"topk_length": "Tensor? topk_length=None, Tensor? kv_offsets=None", "kv_offsets": ""},
    gradients=(Gradient(_scores_backward, _save_scores), NO_GIVEN_RESULTS),
    body=_run_scores,
)
BACKWARD = TorchOp(
    indexer_backward.run,
    _score_gradients,
    ("dq", "dk", "dweights"),
    KEY_PLAN,
    gradients=(NO_DOUBLE_BACKWARD, NO_DOUBLE_BACKWARD),
)
