"""merge_states: attention over disjoint sets of keys, merged."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..tracing import states
from ..tracing.public import public


@public(states.MERGE, tensor="(outs[0] if isinstance(outs, list | tuple) and outs else outs)")
def merge_states(
    outs: torch.Tensor | Sequence[torch.Tensor],
    lses: torch.Tensor | Sequence[torch.Tensor],
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    empty_lse: float = math.inf,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention of the same queries over disjoint sets of keys, such as chunks of a long context.

    out = sum_s w_s outs[s] / sum_s w_s and lse = ln sum_s exp(lses[s]), with w_s = exp(lses[s]).

    outs             states: 1 to 8 tensors, or any number stacked in one whose first dimension counts them; each bf16 or fp16
                     [tokens, heads, 512, 128 or, in bf16, 256], with or without a batch in front, all with the same strides; last dimension
                     contiguous, other strides free
    lses             as many, likewise: fp32 [tokens, heads], natural log, any strides (decode gives [batch, heads, tokens]:
                     transpose it). A state with an infinite lse, of either sign, has weight 0, and its row of outs may be anything, NaN too
    out, lse         tensors for the results, shaped as a state; each may be one of the states, and shares memory with nothing else; its
                     elements are apart from each other
    empty_lse        lse of a row that is empty in all states, inf or -inf; its out is 0

    Returns (out, lse). With both given, nothing is allocated. Sums are in fp32, over the states in their order. Runs on the
    current stream, does not synchronise, and can be captured in a CUDA graph. CPU tensors run on the simulated device inside
    cute_mla.simulate().

    Raises ValueError on bad arguments, ArtifactError if the built kernels cannot be used, DeviceError if driver or device
    refuse, SimulationError if the simulated device finds fault with a kernel.
    """
