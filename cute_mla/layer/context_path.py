"""Attention of a layer over keys that are distributed over ranks (context parallelism), by the kernels."""

from __future__ import annotations

import torch

from ..ops.split_plan import MlaSchedule
from ..parallel import ContextParallel, LocalIndices
from ..parallel.decode import ShardedRequests
from .batch import ContextChunk, DecodeRequests
from .index_keys import IndexRows, gather_index_rows
from .indexer import IndexQueries
from .path import Cache, DecodeOptions, KernelPath
from .selection import ChosenKeys


class ContextPath(KernelPath):
    """Attention on one rank. Decode attends to the keys of all ranks; prefill gathers cached keys from all ranks first."""

    def __init__(self, context: ContextParallel) -> None:
        self.context = context

    @property
    def world(self) -> int:
        """Return the number of ranks."""
        return self.context.shard.world

    def decode(self, q: torch.Tensor, cache: Cache, requests: DecodeRequests, options: DecodeOptions) -> torch.Tensor:
        """Decode as AttentionPath.decode."""
        out, _ = self.context.decode(
            q,
            cache.keys,
            _share(requests),
            softmax_scale=options.scale,
            descale_q=options.descale_q,
            descale_k=cache.descale,
            batch_invariant=options.batch_invariant,
        )
        return out.to(options.dtype)

    def sparse_decode(
        self, q: torch.Tensor, cache: Cache, chosen: ChosenKeys, schedule: MlaSchedule, options: DecodeOptions
    ) -> torch.Tensor:
        """Decode as AttentionPath.sparse_decode."""
        selected = LocalIndices(chosen.indices, chosen.counts)
        out, _ = self.context.sparse_decode(q, cache.keys, selected, softmax_scale=options.scale, batch_invariant=options.batch_invariant)
        return out

    def choose_slots(self, queries: IndexQueries, index_cache: torch.Tensor, requests: DecodeRequests, topk: int) -> ChosenKeys:
        """Choose as AttentionPath.choose_slots; the slots are those of the rank's own keys."""
        by_request = queries.q.unflatten(0, (-1, requests.s_q))
        positions = self.context.indexer_topk(by_request, queries.weights, index_cache, _share(requests), topk)
        return ChosenKeys(*self.context.shard.local_indices(positions, requests.block_table, index_cache.shape[1]))

    def every_slot(self, requests: DecodeRequests, page_size: int, topk: int) -> ChosenKeys:
        """Choose as AttentionPath.every_slot; the slots are those of the rank's own keys."""
        position = torch.arange(topk, dtype=torch.int32, device=requests.cache_seqlens.device)
        behind = torch.arange(requests.s_q - 1, -1, -1, dtype=torch.int32, device=position.device)
        seen = position < (requests.cache_seqlens.unsqueeze(1) - behind).unsqueeze(-1)
        return ChosenKeys(*self.context.shard.local_indices(torch.where(seen, position, -1), requests.block_table, page_size))

    def gather(self, cache: Cache, chunk: ContextChunk, dtype: torch.dtype) -> torch.Tensor:
        """Gather as AttentionPath.gather, from all ranks."""
        starts = self.context.shard.local_lengths(chunk.starts)
        counts = self.context.shard.local_lengths(chunk.starts + chunk.cu_seqlens.diff()) - starts
        ends = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
        rows = super().gather(cache, ContextChunk(chunk.block_table, starts, ends, chunk.keys, chunk.max_seqlen), dtype)
        request, position = chunk.places()
        own, local = self.context.shard.locate(position)
        taken = rows[torch.where(own, ends[request] + local - starts[request], 0)]
        return self.context.join(taken.view(torch.int32).mul_(own.unsqueeze(1))).view(dtype)

    def gather_index(self, index_cache: torch.Tensor, chunk: ContextChunk) -> IndexRows:
        """Gather as AttentionPath.gather_index, from all ranks."""
        request, position = chunk.places()
        own, local = self.context.shard.locate(position)
        page_size = index_cache.shape[1]
        column = torch.where(own, local // page_size, 0)
        slots = torch.where(own, chunk.block_table[request, column].long() * page_size + local % page_size, -1)
        return IndexRows(*(self.context.join(part) for part in gather_index_rows(index_cache, slots)))


def _share(requests: DecodeRequests) -> ShardedRequests:
    """Return the rank's share of decode requests. Raise ValueError if they were planned without context parallelism."""
    if requests.share is None:
        raise ValueError("decode requests have no share of the rank; supported: plan_batch(.., context=) for a layer with a context")
    return requests.share
