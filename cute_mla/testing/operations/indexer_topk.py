"""The operation indexer_topk: the public functions indexer_topk and indexer_topk_prefill."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ... import reference
from ...api import workspace_size
from ...indexer import indexer_topk, indexer_topk_prefill
from ..cases.indexer_topk import IndexerTopkCase, make_indexer_topk_tensors
from ..cases.mqa_logits import MqaLogitsTensors
from ..suites.indexer_topk import OP_SUITES
from .mqa_logits import logit_rows, taken_operands
from .operation import Operation, Result, output_argument
from .requests import Call, Picks


def _arguments(case: IndexerTopkCase, tensors: MqaLogitsTensors, workspace: Tensor | None) -> dict[str, Any]:
    shared = {"q": tensors.q, "weights": tensors.weights, "topk": case.topk, "workspace": workspace, "out": output_argument(tensors, "out")}
    if case.page_size is None:
        return {**shared, "kv": (tensors.keys, tensors.scales), "ks": tensors.ks, "ke": tensors.ke, "max_seqlen_k": case.columns}
    return {**shared, "index_cache": tensors.keys, "context_lens": tensors.ke, "block_table": tensors.block_table, "slots": case.slots}


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


def _taken(case: IndexerTopkCase, tensors: MqaLogitsTensors, picks: Picks, moved: bool) -> Call:
    count: dict[str, Any] = {"tokens" if case.page_size is None else "requests": len(picks)}
    return replace(case, **count), taken_operands(tensors, picks, moved)


INDEXER_TOPK = Operation(
    IndexerTopkCase,
    OP_SUITES,
    make_indexer_topk_tensors,
    _call,
    _arguments,
    _expected,
    workspace_bytes=_workspace_bytes,
    taken=_taken,
    of=logit_rows,
    requests=lambda case: case.tokens if case.page_size is None else case.requests,
)
