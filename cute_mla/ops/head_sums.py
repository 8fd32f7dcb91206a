"""head_sums: probabilities of attention, or scores of an indexer, summed over the heads at the keys that tokens have chosen."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from ..runtime.current import device_for
from ..spec.head_sums import HeadSumsArguments, HeadSumsConfig, Kind
from ..spec.mla import LOG2E
from .arguments import check_no_grad, check_scale
from .chosen_keys import ATTENTION, INDEXER, Launched, Names, Operands, OperandSpecs
from .launch_plan import LaunchPlan
from .overlap import check_no_overlap
from .strides import output_strides
from .tensor_spec import DTYPE_NAMES, TensorSpec, check_contiguous, optional_spec

NAMES: dict[Kind, Names] = {"probs": ATTENTION, "scores": INDEXER}


class CallSpec(NamedTuple):
    """Everything that decides on a launch, but for values and addresses."""

    kind: Kind
    operands: OperandSpecs
    out: TensorSpec | None


@dataclass(frozen=True)
class HeadSumsPlan(LaunchPlan):
    """The launch of a call. shape: of the result."""

    shape: tuple[int, ...]


def run_probs(
    q: torch.Tensor,
    kv: torch.Tensor,
    lse: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    *,
    kv_offsets: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum probabilities, with the arguments of indexer.attention_head_sums."""
    scale = check_scale("sm_scale", sm_scale)
    return _run("probs", Operands(q, kv, lse, indices, topk_length, attn_sink, kv_offsets), scale * LOG2E, out)


def run_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None = None,
    *,
    kv_offsets: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute scores, with the arguments of indexer.indexer_scores."""
    return _run("scores", Operands(q, k, weights, indices, topk_length, None, kv_offsets), 1.0, out)


def _run(kind: Kind, operands: Operands, scale_log2: float, out: torch.Tensor | None) -> torch.Tensor:
    """Check, plan and launch a call."""
    call = check(kind, operands, out)
    launch_plan = plan(call)
    device = device_for(operands.q.device, "head_sums")
    names = NAMES[kind]
    check_no_overlap({"out": out}, operands.named(names))
    launched = Launched.create(operands, names)
    if out is None:
        out = operands.terms.new_empty(launch_plan.shape)
        device.mark_uninitialized(out)
    if out.numel():
        args = HeadSumsArguments(
            **launched.arguments(), attn_sink=operands.attn_sink, sums=out, scale_log2=scale_log2, tokens=call.operands.tokens
        )
        device.launch(device.kernel("head_sums", launch_plan.kernel), launch_plan.grid, args, pdl=True)
    return out


def check(kind: Kind, operands: Operands, out: torch.Tensor | None) -> CallSpec:
    """Check each tensor by itself. ValueError unless it is supported."""
    check_no_grad(**operands.named(NAMES[kind]), out=out)
    return CallSpec(kind, operands.specs(NAMES[kind]), optional_spec("out", out))


@lru_cache(maxsize=4096)
def plan(call: CallSpec) -> HeadSumsPlan:
    """Return the launch of a call. ValueError unless its tensors fit together."""
    operands = call.operands
    operands.check(NAMES[call.kind])
    shape = (*operands.leading, operands.topk)
    output_strides("out", call.out, shape, torch.float32, operands.q)
    if call.out is not None:
        check_contiguous("out", call.out)
    config = HeadSumsConfig(DTYPE_NAMES[operands.q.dtype], call.kind, operands.q.shape[-1])
    return HeadSumsPlan(config.name, (operands.tokens, 1, 1), {}, shape)
