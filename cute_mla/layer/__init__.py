"""Multi-head latent attention of DeepSeek-V2 and V3, from a layer's weights to its output.

config says what a layer is, weights holds (a shard of) its matrices, batch what is computed in one step, attention computes it, by the
kernels or (path) in plain torch where there are none.
"""

from .attention import MlaAttention
from .batch import ContextChunk, DecodeRequests, MlaBatch, PrefillRequests, plan_batch
from .config import MlaConfig, YarnScaling
from .weights import MlaWeights, Shard, load_weights

__all__ = [
    "ContextChunk",
    "DecodeRequests",
    "MlaAttention",
    "MlaBatch",
    "MlaConfig",
    "MlaWeights",
    "PrefillRequests",
    "Shard",
    "YarnScaling",
    "load_weights",
    "plan_batch",
]
