"""Multi-head latent attention of DeepSeek-V2, V3 and models with other columns, from a layer's weights to its output.

config has the sizes of a layer, weights its matrices or a shard of them, and batch the requests of one step. attention computes the layer;
path selects the kernels or, on devices without kernels, plain torch. indexer has that of a layer with sparse attention, forms decides
between dense and sparse attention, and selection holds the keys chosen, for all layers of a step.
"""

from .attention import MlaAttention
from .batch import ContextChunk, DecodeRequests, MlaBatch, PrefillRequests, plan_batch, plan_sequences
from .config import Llama3Scaling, MlaConfig, YarnScaling
from .index_keys import PooledIndexCache
from .indexer import Indexer, IndexerWeights, load_indexer_weights
from .indexer_config import IndexerConfig
from .selection import ChosenKeys, Selection
from .weights import MlaWeights, Shard, load_weights

__all__ = [
    "ChosenKeys",
    "ContextChunk",
    "DecodeRequests",
    "Indexer",
    "IndexerConfig",
    "IndexerWeights",
    "Llama3Scaling",
    "MlaAttention",
    "MlaBatch",
    "MlaConfig",
    "MlaWeights",
    "PooledIndexCache",
    "PrefillRequests",
    "Selection",
    "Shard",
    "YarnScaling",
    "load_indexer_weights",
    "load_weights",
    "plan_batch",
    "plan_sequences",
]
