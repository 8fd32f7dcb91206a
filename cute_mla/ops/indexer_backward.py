"""indexer_backward: by chunks of tokens, gradients of an indexer's queries and weights, rows for its keys, their lists and sums."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from ..runtime.current import device_for
from ..runtime.device import Device
from ..spec.head_sums import INDEX_COLUMNS
from ..spec.indexer_backward import IndexerBackwardArguments, closed_variants
from ..spec.mla import ELEMENT_BYTES
from .arguments import NO_DOUBLE_BACKWARD, check_flag, check_integer, check_no_grad
from .chosen_keys import INDEXER, Launched, Operands, OperandSpecs
from .key_lists import DEFAULT_WORKSPACE, Entries, KeyPlan, RowSums, check_accumulated, planned_tokens
from .launch_plan import LaunchPlan
from .overlap import check_no_overlap
from .strides import output_strides
from .tensor_spec import TensorSpec, check_contiguous, check_device, check_dtype, check_shape, operand_spec, optional_spec


class Results(NamedTuple):
    """The tensors that a call writes, if the caller gives them."""

    dq: torch.Tensor | None
    dk: torch.Tensor | None
    dweights: torch.Tensor | None


class Limits(NamedTuple):
    """The arguments that are not operands."""

    dk_accumulate: bool
    max_workspace: int
    key_plan: KeyPlan | None


class CallSpec(NamedTuple):
    """Everything that decides on the launches, but for values and addresses."""

    operands: OperandSpecs
    dscores: TensorSpec
    dq: TensorSpec | None
    dk: TensorSpec | None
    dweights: TensorSpec | None
    key_plan: tuple[TensorSpec, ...] | None
    accumulate: bool
    max_workspace: int


@dataclass(frozen=True)
class IndexerBackwardPlan(LaunchPlan):
    """The launches of a call. grid: of a whole chunk. chunk_tokens: that a launch takes."""

    chunk_tokens: int


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    dscores: torch.Tensor,
    topk_length: torch.Tensor | None = None,
    *,
    kv_offsets: torch.Tensor | None = None,
    key_plan: tuple[torch.Tensor, torch.Tensor] | None = None,
    dk_accumulate: bool = False,
    max_workspace: int = DEFAULT_WORKSPACE,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dweights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of an indexer's scores, with the arguments of indexer.indexer_backward."""
    operands = Operands(q, k, weights, indices, topk_length, None, kv_offsets)
    given, limits = Results(dq, dk, dweights), Limits(dk_accumulate, max_workspace, KeyPlan.given(key_plan))
    call = check(operands, dscores, given, limits)
    launch_plan = plan(call)
    check_no_overlap(given._asdict(), {**operands.named(INDEXER), "dscores": dscores})
    device, launched = device_for(q.device, "indexer_backward"), Launched.create(operands, INDEXER, limits.key_plan)
    results = (
        q.new_empty(q.shape) if dq is None else dq,
        k.new_empty(k.shape) if dk is None else dk,
        weights.new_empty(weights.shape) if dweights is None else dweights,
    )
    device.mark_uninitialized(results[0], results[2], *(() if call.accumulate else (results[1],)))
    _launch(device, launched, dscores.contiguous(), results, launch_plan, call.accumulate)
    return results


def check(operands: Operands, dscores: torch.Tensor, results: Results, limits: Limits) -> CallSpec:
    """Check each argument by itself. ValueError unless it is supported."""
    check_no_grad(NO_DOUBLE_BACKWARD, **operands.named(INDEXER), dscores=dscores, **results._asdict())
    accumulate = check_flag("dk_accumulate", limits.dk_accumulate)
    return CallSpec(
        operands=operands.specs(INDEXER),
        dscores=operand_spec("dscores", dscores),
        **{name: optional_spec(name, tensor) for name, tensor in results._asdict().items()},
        key_plan=None if limits.key_plan is None else limits.key_plan.specs(),
        accumulate=accumulate,
        max_workspace=check_integer("max_workspace", limits.max_workspace, 0),
    )


@lru_cache(maxsize=4096)
def plan(call: CallSpec) -> IndexerBackwardPlan:
    """Return the launches of a call. ValueError unless its tensors fit together."""
    operands, q = call.operands, call.operands.q
    operands.check(INDEXER)
    check_shape("dscores", call.dscores, (*operands.leading, operands.topk))
    check_dtype("dscores", call.dscores, torch.float32)
    check_device("dscores", call.dscores, q.device)
    for name, given, shape, dtype in (("dq", call.dq, q.shape, q.dtype), ("dweights", call.dweights, q.shape[:-1], torch.float32)):
        if given is not None:
            output_strides(name, given, tuple(shape), dtype, q)
            check_contiguous(name, given)
    check_accumulated("dk", call.dk, operands.keys, call.accumulate)
    entries = Entries(operands.tokens, operands.topk, math.prod(operands.keys.shape[:-1]))
    if call.key_plan is None:
        chunk = entries.chunk_tokens(operands.topk * INDEX_COLUMNS * ELEMENT_BYTES, INDEX_COLUMNS, call.max_workspace)
    else:
        chunk = planned_tokens(call.key_plan, entries, q.device)
    (config,) = closed_variants()
    return IndexerBackwardPlan(config.name, (chunk, 1, 1), {}, chunk)


def _launch(
    device: Device,
    launched: Launched,
    dscores: torch.Tensor,
    results: tuple[torch.Tensor, ...],
    launch_plan: IndexerBackwardPlan,
    accumulate: bool,
) -> None:
    """Launch everything."""
    dq, dk, dweights = results
    indexed = launched.indexed
    if not indexed.tokens or not indexed.topk or not indexed.keys:
        for tensor in (dq, dweights) if accumulate else results:
            tensor.zero_()
        return
    sums = dscores.new_empty(indexed.keys, INDEX_COLUMNS) if indexed.tokens > launch_plan.chunk_tokens else None
    total = RowSums(dk.view(-1, INDEX_COLUMNS), sums, 1.0, accumulate)
    for number, (first, tokens) in enumerate(indexed.chunks(launch_plan.chunk_tokens)):
        rows = dq.new_empty(tokens * indexed.topk, INDEX_COLUMNS)
        device.mark_uninitialized(rows)
        args = IndexerBackwardArguments(
            **launched.arguments(), dscores=dscores, dq=dq, dweights=dweights, rows=rows, first_token=first, tokens=tokens
        )
        device.launch(device.kernel("indexer_backward", launch_plan.kernel), (tokens, 1, 1), args, pdl=True)
        lists = indexed.chunk_lists(device, number, (first, tokens))
        total.add(device, lists, rows, number == 0, first + tokens == indexed.tokens)
        del rows
