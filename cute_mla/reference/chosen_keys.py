"""Training of an indexer at the keys that query tokens have chosen: sums over the heads, scores and their gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch

from .latent import sequence_rows


def attention_head_sums(
    q: torch.Tensor,
    kv: torch.Tensor,
    lse: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    kv_offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute indexer.attention_head_sums, with its operands."""
    keys, sums = kv.squeeze(-2), torch.zeros(*q.shape[:-2], indices.shape[-1], device=q.device)
    flat = keys.reshape(-1, q.shape[-1])
    for token, slots, numbers in _named(q, keys, indices, topk_length, kv_offsets):
        whole = lse[token].double()
        if attn_sink is not None:
            whole = torch.logaddexp(whole, attn_sink.double())
        live = ~(lse[token].isinf() | (whole == math.inf))
        scores = q[token][live].double() @ flat[numbers].double().T * sm_scale
        sums[token][slots] = (scores - whole[live].unsqueeze(-1)).exp().sum(dim=0).float()
    return sums


def indexer_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    topk_length: torch.Tensor | None = None,
    kv_offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute indexer.indexer_scores, with its operands."""
    scores = torch.full((*q.shape[:-2], indices.shape[-1]), -math.inf, device=q.device)
    flat = k.reshape(-1, q.shape[-1])
    for token, slots, numbers in _named(q, k, indices, topk_length, kv_offsets):
        dots = q[token].double() @ flat[numbers].double().T
        scores[token][slots] = (weights[token].double() @ dots.relu()).float()
    return scores


def indexer_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    dscores: torch.Tensor,
    topk_length: torch.Tensor | None = None,
    kv_offsets: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of indexer_scores in fp64, by hand; return fp32 dq, dk and dweights, of the shapes of q, k and weights."""
    dq, dweights = torch.zeros(q.shape, device=q.device), torch.zeros(weights.shape, device=q.device)
    dk, flat = torch.zeros(k.shape, dtype=torch.float64, device=q.device), k.reshape(-1, q.shape[-1])
    for token, slots, numbers in _named(q, k, indices, topk_length, kv_offsets):
        rows, heads, own = flat[numbers].double(), q[token].double(), dscores[token][slots].double()
        dots = heads @ rows.T
        of_dots = torch.where(dots > 0, weights[token].double().unsqueeze(-1) * own, 0.0)
        dq[token], dweights[token] = (of_dots @ rows).float(), (dots.relu() @ own).float()
        dk.view(-1, q.shape[-1]).index_add_(0, numbers, of_dots.T @ heads)
    return dq, dk.float(), dweights


def _named(
    q: torch.Tensor, keys: torch.Tensor, indices: torch.Tensor, topk_length: torch.Tensor | None, kv_offsets: torch.Tensor | None
) -> Iterator[tuple[tuple[int, ...], torch.Tensor, torch.Tensor]]:
    """Yield each query token's place, its slots that name a key, and the numbers of these keys among those of all requests, int64.

    keys: [.., s_kv, columns].
    """
    s_kv = keys.shape[-2]
    for token in itertools.product(*map(range, q.shape[:-2])):
        rows = slice(0, s_kv) if kv_offsets is None else sequence_rows(kv_offsets, token[0], s_kv)
        first = rows.start if kv_offsets is not None or len(token) == 1 else token[0] * s_kv
        chosen = indices[token].squeeze(0).long()
        known = (chosen >= 0) & (chosen < rows.stop - rows.start)
        if topk_length is not None:
            known &= torch.arange(len(chosen), device=chosen.device) < topk_length[token]
        slots = known.nonzero()[:, 0]
        yield token, slots, first + chosen[slots]
