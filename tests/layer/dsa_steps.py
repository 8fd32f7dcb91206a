"""Sequences that pass through a layer with sparse attention in steps, over caches that are NaN wherever nothing was written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cute_mla.layer import ChosenKeys, Indexer, IndexerWeights, MlaAttention, MlaBatch, MlaConfig, MlaWeights, Shard
from tests.layer.dsa_models import indexer_checkpoint, short_topk, sparse
from tests.layer.mla_models import PREFIX
from tests.layer.mla_steps import Sequences


@dataclass(frozen=True)
class SparseSequences:
    """Sequences, and the cache of the indexer's keys."""

    own: Sequences
    index_cache: Tensor

    @staticmethod
    def drawn(
        config: dict[str, Any], lengths: Sequence[int], dtype: torch.dtype = torch.float32, cache: str = "latent", **sizes: int
    ) -> SparseSequences:
        """Draw sequences of these lengths for a reduced configuration. cache: "latent", or "fp8_656"."""
        own = Sequences.drawn(short_topk(config, **sizes), lengths, dtype)
        own = replace(own, weights=indexer_checkpoint(own.config, dtype))
        if cache == "fp8_656":
            own = replace(own, k_cache=torch.full((*own.k_cache.shape[:3], 656), 0xFF, dtype=torch.uint8))
        return SparseSequences(own, torch.full((*own.k_cache.shape[:3], 132), 0xFF, dtype=torch.uint8))

    @property
    def sizes(self) -> MlaConfig:
        """Return the layer's configuration."""
        return MlaConfig.from_hugging_face(self.own.config)

    def layer(self, *, indexed: bool = True, shard: Shard | None = None, **options: Any) -> MlaAttention:
        """Return the layer under test. indexed: whether it has an indexer of its own."""
        config = self.sizes
        weights = MlaWeights.from_tensors(self.own.weights, config, shard=shard, prefix=PREFIX)
        indexer = Indexer(config, IndexerWeights.from_tensors(self.own.weights, config, prefix=PREFIX)) if indexed else None
        return MlaAttention(config, weights, indexer, **options)

    def until(self, ends: Sequence[int]) -> SparseSequences:
        """Return the sequences cut at these ends, over the same caches."""
        return replace(self, own=replace(self.own, hidden=tuple(states[:end] for states, end in zip(self.own.hidden, ends, strict=True))))

    def step(self, contexts: Sequence[int], decodes: int, layer: MlaAttention | None = None, **options: Any) -> tuple[Tensor, MlaBatch]:
        """Return the output of everything behind the contexts, packed, and its batch."""
        batch = self.own.plan(contexts, decodes, **options)
        hidden = torch.cat(self.own.new_tokens(contexts))
        layer = self.layer() if layer is None else layer
        index_cache = None if layer.indexer is None else self.index_cache
        return layer(hidden, self.own.k_cache, batch, index_cache=index_cache), batch

    def positions(self, batch: MlaBatch) -> list[Tensor]:
        """Return the positions that each new token attends to, in the order of the batch."""
        found: list[Tensor] = []
        page_size, table = self.own.k_cache.shape[1], self.own.block_table
        if batch.decode is not None:
            assert batch.selection.decode is not None
            for request, tokens in enumerate(_valid(batch.selection.decode)):
                place = {int(page): column for column, page in enumerate(table[request].tolist())}
                found += [
                    torch.tensor([place[s // page_size] * page_size + s % page_size for s in own.tolist()], dtype=torch.int64)
                    for own in tokens
                ]
        if batch.prefill is not None:
            assert batch.selection.prefill is not None
            tokens = [own for (own,) in _valid(batch.selection.prefill)]
            found += [own.long() - first for own, first in zip(tokens, batch.prefill.rows().first, strict=True)]
        return found

    def expected(self, contexts: Sequence[int]) -> Tensor:
        """Return the step's output by the reference."""
        return self.own.expected(contexts, sparse)


def _valid(keys: ChosenKeys) -> list[list[Tensor]]:
    """Return the indices of each token of each request, without -1 and within the count."""
    assert keys.indices.dtype == keys.counts.dtype == torch.int32
    return [[own[:count][own[:count] >= 0] for own in tokens] for tokens, count in zip(keys.indices, keys.counts.tolist(), strict=True)]
