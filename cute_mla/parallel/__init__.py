"""Context parallelism: decode over a KV cache whose keys are distributed over ranks.

shard computes which rank holds which key; decode attends to the keys of all ranks through torch.distributed.
"""

from .decode import ContextParallel, ShardedRequests
from .shard import ContextShard, LocalIndices

__all__ = ["ContextParallel", "ContextShard", "LocalIndices", "ShardedRequests"]
