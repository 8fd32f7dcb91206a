"""Dense prefill, its gradients, and the merge of states."""

from __future__ import annotations

import math
from typing import Any

import torch

from .latent import attention, blocks, mask_keys, sequence_rows, visible_keys


def dense_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    empty_lse: float = math.inf,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute flash_attn_varlen_func, with its operands.

    Returns fp32 out [total_q, h_q, d_v] and lse [total_q, h_q], NaN in rows that belong to no sequence.
    """
    return masked_prefill(q, k, v, (cu_seqlens_q, cu_seqlens_k), None, softmax_scale, causal, empty_lse)


def masked_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: tuple[torch.Tensor, torch.Tensor],
    key_mask: torch.Tensor | None,
    softmax_scale: float | None = None,
    causal: bool = False,
    empty_lse: float = math.inf,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute flash_attn_varlen_func with key_mask; None: without one.

    cu_seqlens: of queries, and of keys. Returns what dense_prefill returns.
    """
    h_q, h_kv = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    out = torch.full((len(q), h_q, v.shape[-1]), math.nan, device=q.device)
    lse = torch.full((len(q), h_q), math.nan, device=q.device)
    for sequence in range(len(cu_seqlens[0]) - 1):
        rows, keys = sequence_rows(cu_seqlens[0], sequence, len(q)), sequence_rows(cu_seqlens[1], sequence, len(k))
        own_k, own_v = (tensor[keys].transpose(0, 1).repeat_interleave(h_q // h_kv, dim=0) for tensor in (k, v))
        own_q = q[rows].transpose(0, 1)
        visible = visible_keys(own_q.shape[1], own_k.shape[1], causal, q.device)
        if key_mask is not None:
            visible = visible & mask_keys(key_mask[rows], own_k.shape[1])
        row_out, row_lse = attention(own_q, own_k, own_v, scale, visible, empty_lse)
        out[rows], lse[rows] = row_out.transpose(0, 1), row_lse.transpose(0, 1)
    return out, lse


def dense_prefill_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens: tuple[torch.Tensor, torch.Tensor],
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute flash_attn_varlen_backward, with its operands, by torch's autograd. cu_seqlens: of queries, and of keys.

    Query rows whose lse is infinite have no gradient and add nothing to those of keys and values.
    Returns fp32 dq [total_q, h_q, d_qk], dk [total_k, h_kv, d_qk] and dv [total_k, h_kv, d_v], NaN in rows that belong to no sequence.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    dq, dk, dv = (torch.full(tensor.shape, math.nan, device=q.device) for tensor in (q, k, v))
    for sequence in range(len(cu_seqlens[0]) - 1):
        rows, keys = sequence_rows(cu_seqlens[0], sequence, len(q)), sequence_rows(cu_seqlens[1], sequence, len(k))
        own = (q[rows], k[keys], v[keys])
        visible = visible_keys(len(own[0]), len(own[1]), causal, q.device)
        live = ~lse[rows].isinf()
        dq[rows], dk[keys], dv[keys] = attention_gradients(dout[rows], own, scale, visible, live)
    return dq, dk, dv


def attention_gradients(
    dout: torch.Tensor,
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float,
    visible: torch.Tensor,
    live: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return fp32 gradients of one sequence's q [rows, h_q, d], k [keys, h_kv, d] and v [keys, h_kv, d_v], given that of its out.

    visible: bool [rows, keys]. live: bool [rows, h_q], the rows that take part and see a key.
    """
    h_kv = operands[1].shape[1]
    live = live & visible.any(dim=-1, keepdim=True)
    dout = torch.where(live.unsqueeze(-1), dout, 0.0)
    # [h_kv, group, rows, columns] of rows; [h_kv, 1, keys, columns] of keys
    given, *wide = (tensor.detach().double().unflatten(1, (h_kv, -1)).permute(1, 2, 0, 3) for tensor in (dout, *operands))
    gradients = [torch.zeros_like(tensor) for tensor in wide]
    for heads, rows in blocks(h_kv, len(visible), given.shape[1] * visible.shape[1]):
        places: tuple[Any, ...] = ((heads, slice(None), rows), heads, heads)
        leaves = [tensor[place].requires_grad_() for tensor, place in zip(wide, places, strict=True)]
        with torch.enable_grad():
            q, k, v = leaves
            # Rows that see no key keep all scores, since the softmax of none has no gradient. Their dout is 0.
            hidden = ~visible[rows] & visible[rows].any(dim=-1, keepdim=True)
            weights = ((q @ k.mT) * scale).masked_fill(hidden, -math.inf).softmax(dim=-1)
            out = weights @ v
        for gradient, place, part in zip(gradients, places, torch.autograd.grad(out, leaves, given[places[0]]), strict=True):
            gradient[place] += part
    return tuple(gradient.permute(2, 0, 1, 3).flatten(1, 2).float() for gradient in gradients)


def merge_states(outs: torch.Tensor, lses: torch.Tensor, empty_lse: float = math.inf) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over disjoint sets of keys into attention over their union.

    outs: [states, .., d]; lses: [states, ..], natural log. A state with an infinite lse has weight 0, whatever its out.
    Returns out fp32 [.., d] and lse fp32 [..].
    """
    lses = lses.double().masked_fill(lses.isinf(), -math.inf)
    lse = lses.logsumexp(dim=0)
    empty = lse == -math.inf
    weights = (lses - lse.masked_fill(empty, 0.0)).exp().unsqueeze(-1)
    out = torch.zeros(outs.shape[1:], dtype=torch.float64, device=outs.device)
    for state, weight in zip(outs, weights, strict=True):  # one at a time, since they may be large
        out = out + torch.where(weight == 0, 0.0, state * weight)
    return out.float(), lse.masked_fill(empty, empty_lse).float()
