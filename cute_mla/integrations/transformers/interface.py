"""The value "cute_mla" of attn_implementation: transformers expands keys and values, and prefill attends to them.

Causal attention with padding is dense prefill of the tokens that are no padding. Other masks, such as those of the keys that an indexer
chooses and of windows, are masks of masked prefill for heads of 192 and 128 columns, and rows of sparse prefill where a key of 512 columns
is the value of all heads (DeepSeek-V4). Torch computes them for other heads, for other dtypes than bf16, and where gradients are needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, eager_mask, sliding_window_overlay

from ...api import flash_mla_sparse_fwd
from ...layer.key_masks import pack_flags
from ...layer.path import AttentionPath, Op, Packed, PrefillOptions, attention_path, warn_reference
from ...ops.arguments import needs_grad
from ...spec.dense_prefill import HEAD_DIMS as DENSE_HEAD_DIMS
from ...spec.masked_prefill import HEAD_DIMS as MASKED_HEAD_DIMS
from ...spec.masked_prefill import MASK_WORD_KEYS
from ...spec.mla import D_V

EXPANDED = "cute_mla"
LATENT = "cute_mla_latent"  # of models whose attention modules patch() has replaced
_WINDOW = sliding_window_overlay(1).__qualname__
_HIDES = -1e4  # what a mask adds to the score of a key that is hidden, or less; transformers adds the least value of a dtype
_SCORES_AT_ONCE = 1 << 28  # that torch computes, of some heads

_States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def register() -> None:
    """Make attn_implementation="cute_mla" known to transformers. A second call does nothing."""
    AttentionInterface.register(EXPANDED, attend)
    AttentionInterface.register(LATENT, attend)
    AttentionMaskInterface.register(EXPANDED, expanded_mask)
    AttentionMaskInterface.register(LATENT, latent_mask)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention as an attention function of transformers.

    query: [batch, heads, new tokens, columns]; key, value: [batch, KV heads, all tokens, columns]. attention_mask: bool [batch, all
    tokens], False for padding, None without padding; or [batch, 1, new tokens, all tokens], bool or added to the scores, 0 for keys that a
    token sees. Masks are read by the host, once a layer.

    Options: indices, int32 [batch, new tokens, any], the keys that an indexer chooses beside a mask of four dimensions, which hides some of
    them; negative ones are none. s_aux: fp32 [heads], sinks. sliding_window: beside a mask of four dimensions, which holds it.

    Returns [batch, new tokens, heads, columns of value], 0 for padding, and None for the attention weights. Columns, dtypes and gradients
    of causal attention are those of flash_attn_varlen_func where kernels run; torch computes any others. Raises ValueError for dropout,
    softcaps, windows and indices without their mask, for masks of other shapes or with a bias, and the errors of flash_attn_varlen_func.
    """
    if dropout:
        raise ValueError(f"dropout is {dropout}; supported: 0")
    if options.get("softcap") is not None:
        raise ValueError("softcap is given; supported: attention without one")
    ops = (Op("dense_prefill_backward"),) if needs_grad(query, key, value) else ()
    path = attention_path(query.device, ops)
    if path.name == "reference":
        warn_reference(query.device, ops)
    states, sink, keys = (query, key, value), options.get("s_aux"), key.shape[2]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    trained = sink is not None and needs_grad(*states, sink)  # the kernels have no gradients of lse
    by_dense = not trained and _dense_takes(path, query, value)
    if attention_mask is not None and attention_mask.dim() == 4:
        visible = _visible(attention_mask, (query.shape[0], 1, query.shape[2], keys), options.get("indices"))
        kept = _as_padding(visible)
        if not by_dense or kept is None:
            return _with_sink(*_masked(path, states, visible, scale), sink), None
        return _with_sink(*_packed(path, states, (None, kept), PrefillOptions(scale, True)), sink), None
    given = [name for name in ("sliding_window", "indices") if options.get(name) is not None]
    if given:
        raise ValueError(f"{', '.join(given)} is given without a mask of four dimensions; supported: that of the model's mask function")
    if attention_mask is not None and attention_mask.shape != (query.shape[0], keys):
        raise ValueError(f"attention_mask has shape {list(attention_mask.shape)}; supported: {[query.shape[0], keys]}")
    causal = bool(options.get("is_causal", getattr(module, "is_causal", True)))
    if not by_dense:
        return _with_sink(*_masked(path, states, _plain(query, keys, causal, attention_mask), scale), sink), None
    own = None if attention_mask is None else attention_mask[:, keys - query.shape[2] :]
    return _with_sink(*_packed(path, states, (own, attention_mask), PrefillOptions(scale, causal)), sink), None


def _visible(mask: torch.Tensor, shape: tuple[int, ...], indices: torch.Tensor | None) -> torch.Tensor:
    """Return which keys a token sees, bool [batch, new tokens, all tokens]: those of a mask of four dimensions that indices name.

    Raises ValueError for a mask of another shape than `shape`, and for one that adds more than 0 and what hides a key.
    """
    if mask.shape != shape:
        raise ValueError(f"attention_mask has shape {list(mask.shape)}; supported: {list(shape)}")
    visible = (mask if mask.dtype == torch.bool else mask == 0).squeeze(1)
    if mask.dtype != torch.bool and not (visible | (mask.squeeze(1) <= _HIDES)).all():
        raise ValueError(f"attention_mask adds other values to scores than 0 and {_HIDES:.0f} or less; supported: these, or bool")
    if indices is None:
        return visible
    keys = visible.shape[2]
    chosen = visible.new_zeros(*indices.shape[:2], keys + 1)  # the last column takes what names no key
    return visible & chosen.scatter_(2, torch.where(indices < 0, keys, indices).long(), True)[:, :, :keys]


def _plain(query: torch.Tensor, keys: int, causal: bool, mask: torch.Tensor | None) -> torch.Tensor:
    """Return which keys a token sees, as _visible: those that `mask` keeps, up to its own if causal; padding sees none."""
    tokens = query.shape[2]
    visible = torch.ones(query.shape[0], tokens, keys, dtype=torch.bool, device=query.device)
    if causal:
        visible = visible.tril(keys - tokens)
    return visible if mask is None else visible & mask.unsqueeze(1) & mask[:, keys - tokens :].unsqueeze(2)


def _as_padding(visible: torch.Tensor) -> torch.Tensor | None:
    """Return the keys that the last token sees, bool [batch, keys], if dense prefill over these is what `visible` says, else None.

    It is for one token, and for causal attention behind padding on the left.
    """
    tokens, keys = visible.shape[1:]
    if tokens == 1:
        return visible[:, 0]
    kept = visible[:, -1].byte().cummax(1).values.bool()
    return kept if torch.equal(visible, visible.new_ones(tokens, keys).tril(keys - tokens) & kept.unsqueeze(1)) else None


def _dense_takes(path: AttentionPath, query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether dense prefill takes these heads in this dtype."""
    return path.name == "reference" or (
        query.dtype in (torch.bfloat16, torch.float16) and DENSE_HEAD_DIMS.get(query.shape[-1]) == value.shape[-1]
    )


def _masked(path: AttentionPath, states: _States, visible: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the keys that `visible` shows: out [batch, new tokens, heads, columns] and lse [batch, new tokens, heads]."""
    query, key, value = states
    batch, tokens, keys = visible.shape
    kernels = path.name == "kernels" and query.dtype == torch.bfloat16 and not needs_grad(*states)
    shared = key.shape[1] == 1 and key.shape[-1] == D_V and key.data_ptr() == value.data_ptr()
    if not kernels or not (shared or (query.shape[-1] in MASKED_HEAD_DIMS and _dense_takes(path, query, value))):
        return _by_torch(states, visible, scale)
    q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in states)
    if shared:
        counts = visible.sum(2, dtype=torch.int32)
        rows = visible.byte().sort(dim=2, descending=True, stable=True).indices[:, :, : int(counts.max())]
        rows += keys * torch.arange(batch, device=rows.device).view(-1, 1, 1)
        out, _, lse = flash_mla_sparse_fwd(q, k, rows.flatten(0, 1).unsqueeze(1).int(), scale, topk_length=counts.flatten())
    else:
        words = pack_flags(torch.nn.functional.pad(visible.flatten(0, 1).byte(), (0, -keys % MASK_WORD_KEYS)))
        ends = _rows(None, query)[1], _rows(None, key)[1]
        out, lse = path.varlen(q, (k, v), ends, PrefillOptions(scale, False, words))
    return out.unflatten(0, (batch, tokens)), lse.unflatten(0, (batch, tokens))


def _by_torch(states: _States, visible: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute _masked in torch: softmax in fp32, of as many heads at once as _SCORES_AT_ONCE allows."""
    heads = states[0].shape[1]
    at_once = max(_SCORES_AT_ONCE // max(visible.numel(), 1), 1)
    by_head = (each.repeat_interleave(heads // each.shape[1], dim=1).split(at_once, dim=1) for each in states)
    outs, lses = [], []
    for q, k, v in zip(*by_head, strict=True):
        scores = (torch.matmul(q, k.transpose(2, 3)).float() * scale).masked_fill(~visible.unsqueeze(1), -torch.inf)
        lse = scores.logsumexp(3, keepdim=True)
        weights = (scores - lse.masked_fill(lse == -torch.inf, 0)).exp()
        outs.append(torch.matmul(weights.to(v.dtype), v))
        lses.append(lse.squeeze(3))
    return torch.cat(outs, dim=1).transpose(1, 2), torch.cat(lses, dim=1).transpose(1, 2)


def _with_sink(out: torch.Tensor, lse: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
    """Return attention to the keys and to sinks [heads], whose values are 0, from that to the keys alone."""
    return out if sink is None else (out * torch.sigmoid(lse - sink).unsqueeze(-1)).to(out.dtype)


def _packed(
    path: AttentionPath, states: _States, masks: tuple[torch.Tensor | None, torch.Tensor | None], options: PrefillOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend as _masked, of the tokens and to the keys that two masks keep: bool [batch, new tokens] and [batch, keys], None for all."""
    batch, tokens = states[0].shape[0], states[0].shape[2]
    own, queries = _rows(masks[0], states[0])
    others, keys = _rows(masks[1], states[1])
    q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in states)
    if own is not None:
        q = q[own]
    if others is not None:
        k, v = k[others], v[others]
    out, lse = path.varlen(q, (k, v), (queries, keys), options)
    if own is not None:
        out, lse = (each.new_zeros(batch * tokens, *each.shape[1:]).index_copy(0, own, each) for each in (out, lse))
    return out.unflatten(0, (batch, tokens)), lse.unflatten(0, (batch, tokens))


def _rows(mask: torch.Tensor | None, states: torch.Tensor) -> tuple[torch.Tensor | None, Packed]:
    """Return the rows of states [batch, heads, tokens, columns] that the mask [batch, tokens] keeps, None for all, and their lengths."""
    batch, tokens = states.shape[0], states.shape[2]
    if mask is None:
        return None, Packed(torch.arange(batch + 1, dtype=torch.int32, device=states.device) * tokens, tokens)
    lengths = mask.sum(1).tolist()
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return mask.flatten().nonzero().squeeze(1), Packed(ends.to(states.device), max(lengths, default=0))


def padding_mask(
    *, kv_length: int, mask_function: Callable[..., Any], attention_mask: torch.Tensor | None = None, **options: Any
) -> torch.Tensor | None:
    """Return the padding of causal attention as a mask function of transformers: bool [batch, kv_length], None without padding.

    Raises ValueError for other masks than the causal one: windows, packed sequences, and blocks without causality.
    """
    if mask_function is not causal_mask_function:
        raise ValueError("the model asks for a mask that is not plainly causal; supported: the causal mask, with padding")
    return None if attention_mask is None else attention_mask[:, -kv_length:]


def latent_mask(*, mask_function: Callable[..., Any], **options: Any) -> torch.Tensor | None:
    """Return padding_mask for patched layers, also of a causal mask with a window: such layers have it in their configuration."""
    held = inspect.getclosurevars(mask_function).nonlocals if inspect.isfunction(mask_function) else {}
    inner = held.get("mask_functions", ())
    windowed = [each for each in inner if getattr(each, "__qualname__", "") == _WINDOW]
    is_window = len(inner) == 2 and len(windowed) == 1 and causal_mask_function in inner
    return padding_mask(mask_function=causal_mask_function if is_window else mask_function, **options)


def expanded_mask(*, config: Any = None, mask_function: Callable[..., Any], **options: Any) -> torch.Tensor | None:
    """Return the mask of a model that expands its keys: padding_mask, or one of four dimensions where an indexer reads it or if not causal.

    The latter is added to scores: DeepSeek-V4 puts -inf behind it, in its dtype.
    """
    if getattr(config, "index_topk", None) is None and mask_function is causal_mask_function:
        return padding_mask(mask_function=mask_function, **options)
    return eager_mask(mask_function=mask_function, **options)
