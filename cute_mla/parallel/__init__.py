"""Decode over a KV cache whose keys are dealt to several ranks (context parallelism): who holds which key (shard), and attention over all
of them through torch.distributed (decode)."""

from .decode import ContextParallel, ShardedRequests
from .shard import ContextShard, LocalIndices

__all__ = ["ContextParallel", "ContextShard", "LocalIndices", "ShardedRequests"]
