"""What sparse decode and sparse prefill have in common: checks of queries and of what says which keys they attend to."""

from __future__ import annotations

import torch

from .spec.mla import D_LATENT, D_QK
from .support import heads_problem
from .tensors import TensorSpec, check_contiguous, check_device, check_dtype, check_last_contiguous, check_shape


def check_queries(q: TensorSpec, *leading: tuple[str, ...]) -> None:
    """ValueError unless q is [*leading, h_q, 576 or 512], of supported heads and dtype. leading: of each supported rank."""
    ranks = [len(names) + 2 for names in leading]
    if len(q.shape) not in ranks or q.shape[-1] not in (D_QK, D_LATENT):
        shapes = " or ".join(f"[{', '.join(names)}, h_q, {D_QK} or {D_LATENT}]" for names in leading)
        raise ValueError(f"q has shape {list(q.shape)}; supported with indices: {shapes}")
    check_dtype("q", q, torch.bfloat16, torch.float16)
    check_last_contiguous("q", q)
    problem = heads_problem(q.shape[-2], 1)
    if problem is not None:
        raise ValueError(f"q has shape {list(q.shape)}: {problem}")


def check_indices(name: str, indices: TensorSpec, shape: tuple[int | str, ...], q: TensorSpec) -> None:
    """ValueError unless indices are int32 of this shape, contiguous along the last dimension, beside q."""
    check_shape(name, indices, shape)
    check_last_contiguous(name, indices)
    check_dtype(name, indices, torch.int32)
    check_device(name, indices, q.device)


def check_sink(attn_sink: TensorSpec | None, q: TensorSpec) -> None:
    """ValueError unless sinks, if there are any, are contiguous fp32, one for each head of q, beside q."""
    if attn_sink is not None:
        check_shape("attn_sink", attn_sink, (q.shape[-2],))
        check_dtype("attn_sink", attn_sink, torch.float32)
        check_contiguous("attn_sink", attn_sink)
        check_device("attn_sink", attn_sink, q.device)
