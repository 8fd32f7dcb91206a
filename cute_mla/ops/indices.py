"""Checks that sparse decode and sparse prefill share: queries, indices and attention sinks."""

from __future__ import annotations

import torch

from ..spec.mla import D_LATENT, D_QK
from .limits import heads_error
from .tensor_spec import TensorSpec, check_contiguous, check_device, check_dtype, check_last_contiguous, check_shape


def check_queries(q: TensorSpec, *leading: tuple[str, ...]) -> None:
    """Raise ValueError unless q is bf16 [*leading, h_q, 576 or 512] with a supported h_q.

    leading: names of the leading dimensions, for each supported rank.
    """
    ranks = [len(names) + 2 for names in leading]
    if len(q.shape) not in ranks or q.shape[-1] not in (D_QK, D_LATENT):
        shapes = " or ".join(f"[{', '.join(names)}, h_q, {D_QK} or {D_LATENT}]" for names in leading)
        raise ValueError(f"q has shape {list(q.shape)}; supported with indices: {shapes}")
    check_dtype("q", q, torch.bfloat16)
    check_last_contiguous("q", q)
    error = heads_error(q.shape[-2], 1)
    if error is not None:
        raise ValueError(f"q has shape {list(q.shape)}: {error}")


def check_indices(name: str, indices: TensorSpec, shape: tuple[int | str, ...], q: TensorSpec) -> None:
    """Raise ValueError unless indices are int32 of this shape on q's device, with a contiguous last dimension."""
    check_shape(name, indices, shape)
    check_last_contiguous(name, indices)
    check_dtype(name, indices, torch.int32)
    check_device(name, indices, q.device)


def check_sink(attn_sink: TensorSpec | None, q: TensorSpec) -> None:
    """Raise ValueError unless attn_sink is None or contiguous fp32 [h_q] on q's device."""
    if attn_sink is not None:
        check_shape("attn_sink", attn_sink, (q.shape[-2],))
        check_dtype("attn_sink", attn_sink, torch.float32)
        check_contiguous("attn_sink", attn_sink)
        check_device("attn_sink", attn_sink, q.device)
