"""Sequences that pass through a layer in steps, over a paged cache that is NaN wherever nothing was written."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_mla.layer import MlaAttention, MlaBatch, MlaConfig, MlaWeights, plan_batch
from tests.layer.mla_models import PREFIX, checkpoint, naive, project, reduced

Reference = Callable[[Tensor, dict[str, Tensor], dict[str, Any]], Tensor]

# The largest error that roundings of a dtype may make, against the largest output: of inputs, keys, queries, weights of the softmax, ...
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@dataclass(frozen=True)
class Sequences:
    """A layer, some sequences of hidden states, and a cache with room for them all; page 0 is nobody's."""

    config: dict[str, Any]
    weights: dict[str, Tensor]
    hidden: tuple[Tensor, ...]
    k_cache: Tensor
    block_table: Tensor

    @staticmethod
    def drawn(config: dict[str, Any], lengths: Sequence[int], dtype: torch.dtype = torch.float32, page_size: int = 64) -> Sequences:
        """Draw sequences of these lengths for a reduced configuration."""
        config, draw = reduced(config), torch.Generator().manual_seed(sum(lengths))
        pages = [math.ceil(length / page_size) for length in lengths]
        order = (torch.randperm(sum(pages), generator=draw) + 1).to(torch.int32)
        block_table = torch.full((len(lengths), max(pages, default=0)), 2_000_000_000, dtype=torch.int32)
        for request, own in enumerate(order.split(pages)):
            block_table[request, : len(own)] = own
        return Sequences(
            config=config,
            weights=checkpoint(config, dtype),
            hidden=tuple(torch.randn(length, config["hidden_size"], generator=draw).to(dtype) for length in lengths),
            k_cache=torch.full((sum(pages) + 1, page_size, 1, config["kv_lora_rank"] + config["qk_rope_head_dim"]), math.nan, dtype=dtype),
            block_table=block_table,
        )

    def layer(self) -> MlaAttention:
        """Return the layer under test."""
        config = MlaConfig.from_hugging_face(self.config)
        return MlaAttention(config, MlaWeights.from_tensors(self.weights, config, prefix=PREFIX))

    def with_context(self, contexts: Sequence[int]) -> Sequences:
        """Put so many keys of each sequence into the cache, as the reference makes them."""
        for request, context in enumerate(contexts):
            keys = project(self.hidden[request][:context], self.weights, self.config)
            positions = torch.arange(context)
            pages = self.block_table[request][positions // self.k_cache.shape[1]]
            rows = torch.cat((keys.latent, keys.rotary), dim=1).to(self.k_cache.dtype)
            self.k_cache[pages, positions % self.k_cache.shape[1], 0] = rows
        return self

    def new_tokens(self, contexts: Sequence[int]) -> list[Tensor]:
        """Return hidden states behind the first so many of each sequence."""
        return [states[context:] for states, context in zip(self.hidden, contexts, strict=True)]

    def plan(self, contexts: Sequence[int], decodes: int, **options: Any) -> MlaBatch:
        """Return the step that computes everything behind the contexts."""
        lengths = [len(new) for new in self.new_tokens(contexts)]
        return plan_batch(lengths, contexts, self.block_table, self.k_cache.shape[1], decodes=decodes, **options)

    def step(self, contexts: Sequence[int], decodes: int, **options: Any) -> Tensor:
        """Return the step's output, packed."""
        return self.layer()(torch.cat(self.new_tokens(contexts)), self.k_cache, self.plan(contexts, decodes, **options))

    def expected(self, contexts: Sequence[int], reference: Reference = naive) -> Tensor:
        """Return the step's output by a reference."""
        whole = [reference(states, self.weights, self.config) for states in self.hidden]
        return torch.cat([out[context:] for out, context in zip(whole, contexts, strict=True)])

    def expect(self, out: Tensor, expected: Tensor) -> None:
        """Assert that an output agrees with the reference's, as well as its dtype allows, and that nobody wrote to page 0."""
        assert self.k_cache[0].isnan().all()
        assert out.dtype == self.k_cache.dtype
        assert out.shape == expected.shape
        if len(out):
            assert (out.float() - expected).abs().max() <= TOLERANCE[out.dtype] * expected.abs().max()
