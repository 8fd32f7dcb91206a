"""Right calls of every public function on a device: the arguments of a case, of which a test changes some."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cute_mla.spec.dense_decode import FP8
from cute_mla.testing.cases.base import BaseCase, DecodeCase
from cute_mla.testing.operations import operation
from cute_mla.testing.operations.cache_gather.case import CacheGatherCase
from cute_mla.testing.operations.cache_insert.case import CacheInsertCase
from cute_mla.testing.operations.cache_write.case import CacheWriteCase
from cute_mla.testing.operations.dense_decode.case import DenseDecodeCase
from cute_mla.testing.operations.dense_prefill.case import DensePrefillCase
from cute_mla.testing.operations.dense_prefill_backward.case import DensePrefillBackwardCase
from cute_mla.testing.operations.head_sums.case import HeadSumsCase
from cute_mla.testing.operations.index_write.case import IndexWriteCase
from cute_mla.testing.operations.indexer_backward.case import IndexerBackwardCase
from cute_mla.testing.operations.indexer_topk.case import IndexerTopkCase
from cute_mla.testing.operations.merge_states.case import MergeStatesCase
from cute_mla.testing.operations.mqa_logits.case import MqaLogitsCase
from cute_mla.testing.operations.operation import Plan
from cute_mla.testing.operations.sparse_decode.case import Pool, SparseDecodeCase
from cute_mla.testing.operations.sparse_prefill.case import SparsePrefillCase
from cute_mla.testing.operations.sparse_prefill_backward.case import SparsePrefillBackwardCase
from cute_mla.testing.operations.topk_indices.case import TopkIndicesCase

_VARLEN: dict[str, Any] = {"lengths": ((290, 400), (10, 100)), "h_kv": 2, "group": 4, "ends": "clipped"}
_PAGED: dict[str, Any] = {"heads": 8, "requests": 2, "tokens": 1, "keys": 48, "page_size": 16}
_CACHED: dict[str, Any] = {"cache": "fp8_576", "pages": 3, "page_size": 16, "scale_of_cache": 0.5}
CASES: dict[str, BaseCase] = {
    "dense": DenseDecodeCase(batch=2, h_q=64),
    "dense_fp8": DenseDecodeCase(batch=2, h_q=64, operands=FP8),
    "sparse": SparseDecodeCase(batch=2, h_q=64, main=Pool(128, 128)),
    "sparse_prefill": SparsePrefillCase(s_q=5, h_q=64, s_kv=100, softmax_scale=0.25),
    "sparse_backward": SparsePrefillBackwardCase(s_q=5, h_q=64, s_kv=100),
    "head_sums": HeadSumsCase(s_q=5, h_q=64, s_kv=100),
    "scores": HeadSumsCase(s_q=5, h_q=64, d_qk=128, s_kv=100),
    "indexer_backward": IndexerBackwardCase(s_q=5, h_q=64, s_kv=100),
    "dense_prefill": DensePrefillCase(**_VARLEN),
    "backward": DensePrefillBackwardCase(**_VARLEN),
    "merge": MergeStatesCase(states=4, tokens=3, h_q=2, head_dim=128, form="stacked"),
    "topk": TopkIndicesCase(rows=3, columns=40, topk=5),
    "row_logits": MqaLogitsCase(heads=8, tokens=3, keys=40),
    "paged_logits": MqaLogitsCase(**_PAGED),
    "indexer_topk": IndexerTopkCase(topk=5, slots=True, **_PAGED),
    "indexer_topk_prefill": IndexerTopkCase(heads=8, tokens=3, keys=40, topk=5),
    "index_write": IndexWriteCase(tokens=2, page_size=16),
    "index_queries": IndexWriteCase(rows="queries", tokens=2, heads=3),
    "write": CacheWriteCase(tokens=2, **_CACHED),
    "insert": CacheInsertCase(tokens=2, kept="packed", **_CACHED),
    "gather": CacheGatherCase(lengths=(1, 3), starts=(0, 1), **_CACHED),
}
# What gives a call all tensors that it may have, beside results, workspace and plan: fields of the case, and arguments that no case gives.
_EVERY: dict[str, dict[str, Any]] = {
    "sparse": {"main": Pool(64, 64, 64, "drawn"), "extra": Pool(32, 32, 16, "drawn"), "sinks": "drawn"},
    "head_sums": {"lengths": "drawn", "sinks": "drawn"},
    "scores": {"lengths": "drawn"},
    "sparse_prefill": {"lengths": "drawn", "sinks": "drawn", "indexer_topk": 3},
}
_MORE: dict[str, dict[str, Any]] = {"paged_logits": {"metadata": torch.zeros(9, 2, dtype=torch.int32)}}


class RightCall(dict[str, Any]):
    """The arguments of a case by name, for the public function. tensors: operands in place of those that the case makes."""

    def __init__(self, case: BaseCase, tensors: Any = None) -> None:
        record = operation(case)
        self.case, self.tensors = case, record.make_tensors(case, "cpu") if tensors is None else tensors
        nbytes = record.workspace_bytes(case, self.tensors) if self.tensors.output_buffers else None
        super().__init__(record.arguments(case, self.tensors, None if nbytes is None else torch.zeros(nbytes, dtype=torch.uint8)))

    @property
    def function(self) -> Callable[..., Any]:
        """Return the public function."""
        return operation(self.case).function

    def run(self, **changes: Any) -> Any:
        """Make the call, some of its arguments changed."""
        return self.function(**{**self, **changes})

    def plan(self) -> Plan:
        """Return a plan made beforehand, of a decode call."""
        make = operation(self.case).plan
        assert make is not None
        return make(self.case, self.tensors)


def call_of(case: BaseCase | str, **fields: Any) -> RightCall:
    """Return the call of a case, or of the right one with this name; fields: of the case that differ."""
    return RightCall(replace(CASES[case] if isinstance(case, str) else case, **fields))


def changed(case: BaseCase | str, **changes: Callable[[Any], Any]) -> RightCall:
    """Return the call of a case, or of the right one with this name, with these functions applied to its arguments."""
    call = call_of(case)
    call.update({name: change(call[name]) for name, change in changes.items()})
    return call


def sparse_call(topk: int = 128, extra_topk: int | None = None, page_size: int = 64, **fields: Any) -> RightCall:
    """Return a sparse decode call of so many indices. extra_topk: None for one cache."""
    extra = None if extra_topk is None else Pool(64, extra_topk, 2)
    return call_of("sparse", **{"main": Pool(128, topk, page_size), "extra": extra, **fields})


def with_own_memory(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments whose tensors have storages of their own."""
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in arguments.items()}


def given_call(name: str, **fields: Any) -> RightCall:
    """Return a right call with all tensors given, each with a storage of its own; fields: of the case that differ."""
    plan = {"metadata": "tensors"} if isinstance(CASES[name], DecodeCase) else {}
    call = call_of(name, **{**plan, "outputs": "given", **_EVERY.get(name, {}), **fields})
    call.update(with_own_memory({**call, **_MORE.get(name, {})}))
    return call


DECODE_CALLS: dict[str, Callable[[], RightCall]] = {
    "dense": partial(given_call, "dense"),
    "dense_fp8": partial(given_call, "dense_fp8"),
    "sparse": partial(given_call, "sparse", extra=None),
    "sparse_extra": partial(given_call, "sparse"),
}


def planned(plan: Any) -> dict[str, Any]:
    """Return the arguments that pass a plan."""
    return dict(zip(("tile_scheduler_metadata", "num_splits"), plan, strict=True))
