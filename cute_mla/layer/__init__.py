"""Multi-head latent attention of DeepSeek-V2, V3 and models with other columns, from a layer's weights to its output.

config has the sizes of a layer, weights its matrices or a shard of them, and batch the requests of one step. attention computes the layer;
path selects the kernels or, on devices without kernels, plain torch.
"""

from .attention import MlaAttention
from .batch import ContextChunk, DecodeRequests, MlaBatch, PrefillRequests, plan_batch, plan_sequences
from .config import Llama3Scaling, MlaConfig, YarnScaling
from .weights import MlaWeights, Shard, load_weights

__all__ = [
    "ContextChunk",
    "DecodeRequests",
    "Llama3Scaling",
    "MlaAttention",
    "MlaBatch",
    "MlaConfig",
    "MlaWeights",
    "PrefillRequests",
    "Shard",
    "YarnScaling",
    "load_weights",
    "plan_batch",
    "plan_sequences",
]
