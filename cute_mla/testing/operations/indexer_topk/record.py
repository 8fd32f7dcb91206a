"""The operation indexer_topk: the public functions indexer_topk and indexer_topk_prefill."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .... import reference
from ....api import workspace_size
from ....indexer import indexer_topk, indexer_topk_prefill
from ..mqa_logits.case import MqaLogitsTensors
from ..mqa_logits.record import count_requests, logit_rows, page_keys, row_keys, taken_requests
from ..operation import Operation, Result, operands_of, outputs_of
from .case import IndexerTopkCase, make_indexer_topk_tensors
from .suites import OP_SUITES


def _arguments(case: IndexerTopkCase, tensors: MqaLogitsTensors, workspace: Tensor | None) -> dict[str, Any]:
    shared = {**operands_of(tensors, "q", "weights"), "topk": case.topk, "workspace": workspace, **outputs_of(tensors, "out")}
    if case.page_size is None:
        return {**shared, **row_keys(tensors), "max_seqlen_k": case.columns}
    return {**shared, "index_cache": tensors.keys, **page_keys(tensors), "slots": case.slots}


def _call(**arguments: Any) -> Tensor:
    return indexer_topk(**arguments) if "index_cache" in arguments else indexer_topk_prefill(**arguments)


def _expected(arguments: Mapping[str, Any]) -> Result:
    given = {name: value for name, value in arguments.items() if name not in ("workspace", "out")}
    return (reference.indexer_topk(**given) if "index_cache" in given else reference.indexer_topk_prefill(**given),)


def _workspace_bytes(case: IndexerTopkCase, tensors: MqaLogitsTensors) -> int:
    return workspace_size(
        case.op,
        batch=case.requests,
        s_q=case.tokens,
        h_q=case.heads,
        max_cache_seqlen=case.most_keys,
        topk=case.topk,
        device=tensors.q.device,
    )


INDEXER_TOPK = Operation(
    IndexerTopkCase,
    OP_SUITES,
    make_indexer_topk_tensors,
    _call,
    _arguments,
    _expected,
    workspace_bytes=_workspace_bytes,
    taken=taken_requests,
    of=logit_rows,
    requests=count_requests,
)
