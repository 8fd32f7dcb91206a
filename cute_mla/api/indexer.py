"""topk_indices: the positions of the greatest logits of each query token."""

from __future__ import annotations

import torch

from ..tracing import indexer
from ..tracing.public import public


@public(indexer.TOPK, tensor="logits")
def topk_indices(logits: torch.Tensor, lengths: torch.Tensor, topk: int, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the positions of the topk greatest logits of each row, in ascending order of position.

    logits           fp32 [rows, n]; last dimension contiguous, any stride between rows
    lengths          int32 [rows], contiguous: row r has the numbers logits[r, : lengths[r]], none if that is negative and n if it is
                     more. Numbers behind may be anything
    topk             positions of a row, 0 to 2^30; more than n is allowed
    out              int32 [rows, topk] for the result; last dimension contiguous, shares memory with nothing else

    Returns int32 [rows, topk]: the positions chosen, the lowest first, and -1 behind the last, which are topk - lengths[r] entries if
    that is positive. Of two numbers the greater is chosen, of equal ones that of the lower position; -0 equals +0, and NaN, of either
    sign, is less than -inf. So a call is a function of its arguments: the same rows give the same positions in the same order, whatever
    other rows stand beside them.

    With out given, nothing is allocated; no workspace is needed. Runs on the current stream, does not synchronise, and can be captured
    in a CUDA graph. CPU tensors run on the simulated device inside cute_mla.simulate().

    Raises ValueError on bad arguments, ArtifactError if the built kernels cannot be used, DeviceError if driver or device refuse,
    SimulationError if the simulated device finds fault with a kernel.
    """
