"""Right calls of every function on a device, every tensor given that a call can have: the calls of cases that give all results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import cute_mla
from cute_mla.spec.dense_decode import FP8
from cute_mla.testing.cases.base import BaseCase
from cute_mla.testing.cases.cache_gather import CacheGatherCase
from cute_mla.testing.cases.cache_insert import CacheInsertCase
from cute_mla.testing.cases.cache_write import CacheWriteCase
from cute_mla.testing.cases.dense_decode import DenseDecodeCase
from cute_mla.testing.cases.dense_prefill import DensePrefillCase
from cute_mla.testing.cases.dense_prefill_backward import DensePrefillBackwardCase
from cute_mla.testing.cases.index_write import IndexWriteCase
from cute_mla.testing.cases.indexer_topk import IndexerTopkCase
from cute_mla.testing.cases.merge_states import MergeStatesCase
from cute_mla.testing.cases.mqa_logits import MqaLogitsCase
from cute_mla.testing.cases.sparse_decode import Pool, SparseDecodeCase
from cute_mla.testing.cases.sparse_prefill import SparsePrefillCase
from cute_mla.testing.cases.topk_indices import TopkIndicesCase
from cute_mla.testing.operations import operation
from tests.support.zero_tensors import ints

_SPARSE: dict[str, Any] = {"main": Pool(64, 64, 64, "drawn"), "extra": Pool(32, 32, 16, "drawn"), "sinks": "drawn"}
_VARLEN: dict[str, Any] = {"lengths": ((3, 9),), "group": 2, "ends": "clipped", "outputs": "given"}
_PAGED: dict[str, Any] = {"heads": 8, "requests": 2, "tokens": 1, "keys": 48, "page_size": 16, "outputs": "given"}
_CACHED: dict[str, Any] = {"cache": "fp8_576", "pages": 3, "page_size": 16, "scale_of_cache": 0.5}
CASES: dict[str, BaseCase] = {
    "dense": DenseDecodeCase(batch=2, lengths=(70, 3), outputs="given", metadata="tensors"),
    "dense_fp8": DenseDecodeCase(batch=2, lengths=(70, 3), operands=FP8, outputs="given", metadata="tensors"),
    "sparse": SparseDecodeCase(batch=2, outputs="given", metadata="tensors", **_SPARSE),
    "sparse_prefill": SparsePrefillCase(s_q=3, h_q=2, s_kv=9, topk=5, lengths="drawn", sinks="drawn", indexer_topk=3, outputs="given"),
    "dense_prefill": DensePrefillCase(**_VARLEN),
    "backward": DensePrefillBackwardCase(**_VARLEN),
    "merge": MergeStatesCase(states=4, tokens=3, h_q=2, head_dim=128, form="stacked", outputs="given"),
    "topk": TopkIndicesCase(rows=3, columns=40, topk=5, outputs="given"),
    "row_logits": MqaLogitsCase(heads=8, tokens=3, keys=40, outputs="given"),
    "paged_logits": MqaLogitsCase(**_PAGED),
    "indexer_topk": IndexerTopkCase(topk=5, slots=True, **_PAGED),
    "index_write": IndexWriteCase(tokens=2, page_size=16),
    "index_queries": IndexWriteCase(rows="queries", tokens=2, heads=3, outputs="given"),
    "write": CacheWriteCase(tokens=2, **_CACHED),
    "insert": CacheInsertCase(tokens=2, kept="packed", **_CACHED),
    "gather": CacheGatherCase(lengths=(1, 3), starts=(0, 1), outputs="given", **_CACHED),
}
_MORE: dict[str, Callable[[], dict[str, Any]]] = {"paged_logits": lambda: {"metadata": ints(9, 2)}}  # which cases leave out


def _planning() -> dict[str, Any]:
    return {"cache_seqlens": ints(3), "num_q_tokens_per_head_k": 8, "num_heads_k": 1}


def _of(call: str) -> dict[str, Any]:
    """Return the arguments of the call of a case, each tensor with a storage of its own."""
    case, record = CASES[call], operation(CASES[call])
    tensors = record.make_tensors(case, "cpu")
    workspace = torch.zeros(record.workspace_bytes(case, tensors), dtype=torch.uint8) if tensors.output_buffers else None
    arguments = {**record.arguments(case, tensors, workspace), **_MORE.get(call, dict)()}
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in arguments.items()}


Make = Callable[[], dict[str, Any]]
CALLS: dict[str, tuple[Callable[..., Any], Make]] = {
    **{call: (operation(case).function, lambda call=call: _of(call)) for call, case in CASES.items()},  # type: ignore[misc]
    "plan": (cute_mla.get_mla_metadata, _planning),
}
