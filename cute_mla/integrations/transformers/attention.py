"""Attention module of a patched model: transformers' arguments in, cute_mla.layer over a latent cache, transformers' results out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...layer import MlaAttention
from .latent_cache import latent_layer
from .step import Planner, StepInputs


@dataclass(frozen=True)
class Traits:
    """Properties of a class of attention modules.

    results: results of forward. keys: what the class computes whatever its configuration says, as keys of a configuration. local_mask:
    whether attention_mask is that of the new tokens alone.
    """

    results: int = 2
    local_mask: bool = False
    keys: Mapping[str, Any] = field(default_factory=dict)


class LatentAttention(torch.nn.Module):
    """Module in the place of an attention module of transformers, `replaced`.

    attention: the layer, with the weights. source: the layer in whose cache its keys are; they are its own unless the layer borrows
    latents. dropout: that of the attention weights in training; only 0 is computed. kind, hf_config: class
    and configuration of the replaced module; dtypes: of its weights; implementation: its attn_implementation.
    """

    def __init__(self, attention: MlaAttention, replaced: Any, traits: Traits, planner: Planner) -> None:
        super().__init__()
        self.attention = attention
        self.layer_idx: int = replaced.layer_idx
        borrows = attention.config.latents == "borrowed"
        self.source: int = replaced.config.kv_source_layers[self.layer_idx] if borrows else self.layer_idx
        self.dropout: float = replaced.attention_dropout
        self.results, self.local_mask = traits.results, traits.local_mask
        self.planner = planner
        self.dtypes = {name: weight.dtype for name, weight in replaced.state_dict().items()}
        self.kind, self.hf_config, self.implementation = type(replaced), replaced.config, replaced.config._attn_implementation
        self.train(replaced.training)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
        position_ids: torch.Tensor | None = None,
        **options: Any,
    ) -> tuple[torch.Tensor | None, ...]:
        """Compute attention of new tokens, and write their keys to the cache.

        hidden_states: [batch, new tokens, hidden size]. attention_mask: [batch, cached and new tokens], False for padding, or None; with a
        local_mask [batch, new tokens].
        cache: a DynamicCache, or None. position_ids: [batch or 1, new tokens]. Other options of transformers do not concern the result.

        Returns the output [batch, new tokens, hidden size], 0 for padding, and None for each further result of transformers' module.
        Raises ValueError for other caches and masks and for dropout, and the errors of MlaAttention.
        """
        if self.training and self.dropout:
            raise ValueError(f"attention_dropout is {self.dropout} in training; supported: 0")
        batch, tokens = hidden_states.shape[:2]
        inputs = StepInputs((batch, tokens), hidden_states.device, attention_mask, position_ids, self.local_mask)
        attention = self.attention
        cached = None if cache is None else latent_layer(cache, self.layer_idx)
        if cached is not None:
            columns = attention.config.key_columns if self.source == self.layer_idx else 0
            indexer = attention.config.indexer
            cached.reserve(batch, tokens, attention.kv_b, columns, 0 if attention.indexer is None or indexer is None else indexer.key_pool)
        step = self.planner.step(inputs, self.layer_idx, cached, attention.config)
        flat = hidden_states.flatten(0, 1)
        keys, index_keys = (None, None) if cached is None else (latent_layer(cache, self.source).keys, cached.index_cache)
        out = attention(flat if step.rows is None else flat[step.rows], keys, step.batch, index_cache=index_keys)
        if cached is not None:
            cached.append(tokens, step.new)
        if step.rows is not None:
            out = out.new_zeros(flat.shape).index_copy(0, step.rows, out)
        return out.view(hidden_states.shape), *[None] * (self.results - 1)
