"""Dense prefill with sinks and their gradients: the backward kernels take an output and an lse that include the sink."""

from __future__ import annotations

from typing import Any

import torch

from ..api import flash_attn_varlen_backward, flash_attn_varlen_func
from .path import Packed


class SinkAttention(torch.autograd.Function):
    """Causal attention of packed sequences to themselves and to a sink of each head, a key of score `sink` and value 0.

    With P the softmax over keys and sink, dS = P * (dout v - dout out) for keys, as without a sink, and d sink = -P_sink * (dout out).
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, ends: Packed, scale: float
    ) -> torch.Tensor:
        """Return out [tokens, heads, columns of v]. sinks: fp32 [heads]."""
        out, lse = flash_attn_varlen_func(q, k, v, *_lengths(ends), softmax_scale=scale, causal=True)
        out, lse = (out * torch.sigmoid(lse - sinks).unsqueeze(-1)).to(out.dtype), torch.logaddexp(lse, sinks)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.ends, ctx.scale = ends, scale
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of q, k, v and sinks."""
        q, k, v, sinks, out, lse = ctx.saved_tensors
        gradients = flash_attn_varlen_backward(
            *(dout.contiguous(), q, k, v, out, lse, *_lengths(ctx.ends)), softmax_scale=ctx.scale, causal=True
        )
        share = torch.exp(sinks - lse)  # of the sink; 0 for a row without keys, whose lse is inf
        return *gradients, -(share * (dout.float() * out.float()).sum(-1)).sum(0), None, None


def _lengths(ends: Packed) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    return ends.cu_seqlens, ends.cu_seqlens, ends.max_seqlen, ends.max_seqlen
