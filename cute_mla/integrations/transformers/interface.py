"""The value "cute_mla" of attn_implementation: transformers expands keys and values, and dense prefill attends to them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from ...layer.path import Packed, PrefillOptions, attention_path, warn_reference

EXPANDED = "cute_mla"
LATENT = "cute_mla_latent"  # of models whose attention modules patch() has replaced
_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "indices")  # options of attention that change its result


def register() -> None:
    """Make attn_implementation="cute_mla" known to transformers. A second call does nothing."""
    AttentionInterface.register(EXPANDED, attend)
    AttentionInterface.register(LATENT, attend)
    AttentionMaskInterface.register(EXPANDED, expanded_mask)
    AttentionMaskInterface.register(LATENT, padding_mask)


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
    tokens], False for padding; None without padding. With one, its sums are read by the host, once a layer.

    Returns [batch, new tokens, heads, columns of value], 0 for padding, and None for the attention weights. Columns, dtypes and gradients
    are those of flash_attn_varlen_func where kernels run, any in torch elsewhere. Raises ValueError for dropout, windows, softcaps, sinks
    and indices, for masks of other shapes, and the errors of flash_attn_varlen_func.
    """
    if dropout:
        raise ValueError(f"dropout is {dropout}; supported: 0")
    given = [name for name in _UNSUPPORTED if options.get(name) is not None]
    if given:
        raise ValueError(f"{', '.join(given)} is given; supported: full attention without {', '.join(_UNSUPPORTED)}")
    path = attention_path(query.device)
    if path.name == "reference":
        warn_reference(query.device)
    tokens, keys = query.shape[2], key.shape[2]
    if attention_mask is not None and attention_mask.shape != (query.shape[0], keys):
        raise ValueError(f"attention_mask has shape {list(attention_mask.shape)}; supported: {[query.shape[0], keys]}")
    own, queries = _rows(None if attention_mask is None else attention_mask[:, keys - tokens :], query)
    others, packed = _rows(attention_mask, key)
    q, k, v = (states.transpose(1, 2).flatten(0, 1) for states in (query, key, value))
    if own is not None:
        q = q[own]
    if others is not None:
        k, v = k[others], v[others]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    causal = bool(options.get("is_causal", getattr(module, "is_causal", True)))
    out, _ = path.varlen(q, (k, v), (queries, packed), PrefillOptions(scale, causal))
    if own is not None:
        out = out.new_zeros(query.shape[0] * tokens, *out.shape[1:]).index_copy(0, own, out)
    return out.unflatten(0, (query.shape[0], tokens)), None


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


def expanded_mask(*, config: Any = None, **options: Any) -> torch.Tensor | None:
    """Return padding_mask for a model that expands its keys. ValueError if an indexer chooses them: transformers needs its mask then."""
    if getattr(config, "index_topk", None):
        raise ValueError(
            f"attn_implementation is {EXPANDED!r} and the model has an indexer; supported: cute_mla.integrations.transformers.patch"
        )
    return padding_mask(**options)
