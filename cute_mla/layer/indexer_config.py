"""Configuration of the indexer of sparse attention, and which layers of a model have one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..ops.arguments import check_flag, check_integer, is_number, short_repr
from ..spec.mqa_logits import COLUMNS, MAX_HEADS
from ..spec.topk_indices import MAX_TOPK
from .checkpoint import MAX_LAYERS
from .config_keys import DOTS3, MISTRAL_LARGE_4

IndexerType = Literal["full", "shared"]

_TYPES: dict[str, IndexerType] = {"full": "full", "shared": "shared", "F": "full", "S": "shared"}
# Values of model_type whose configurations may lack indexer_rope_interleave
_INTERLEAVED = ("glm_moe_dsa", "hy_v4", MISTRAL_LARGE_4, DOTS3)


@dataclass(frozen=True)
class IndexerConfig:
    """Configuration of an indexer, whose queries and keys have 128 columns.

    topk: most keys that a token attends to. heads: of its queries, 1 to 64.
    rope_interleave: True if columns 2i and 2i + 1 of the first 64 columns of queries and keys are a pair, as in GLM-5; False if i and
    i + 32 are, as in DeepSeek-V3.2. MlaConfig.rope_interleave is that of attention's own queries and keys.
    types: "full" for a layer that has an indexer, "shared" for one that takes what the last layer before it with an indexer chose; layers
    behind the last entry, such as those that draft tokens, have one.
    key_pool: neighbouring keys that are chosen together, beside those of the last pool, which is not complete; more than one: of keys
    without rotary columns.
    rope_last: True if the last 64 columns are rotated, as in Hy4. norm_eps: of the norm of keys, whatever rms_norm_eps says.
    from_hidden: True if queries are projected from hidden states, behind a LayerNorm with an epsilon of 1e-6, and multiplied by their
    position as by MlaConfig.softmax_scaling, with weights of their own (Mistral Large 4); False: from those behind q_a_norm.
    """

    topk: int
    heads: int
    rope_interleave: bool = False
    types: tuple[IndexerType, ...] = ()
    key_pool: int = 1
    rope_last: bool = False
    norm_eps: float = 1e-6
    from_hidden: bool = False

    def __post_init__(self) -> None:
        check_integer("index_topk", self.topk, 1, MAX_TOPK)
        check_integer("index_n_heads", self.heads, 1, MAX_HEADS)
        check_integer("index_kpool", self.key_pool, 1)
        if self.topk % self.key_pool:
            raise ValueError(f"index_topk is {self.topk} with index_kpool {self.key_pool}; supported: a multiple of it")
        check_flag("indexer_rope_interleave", self.rope_interleave)
        check_flag("rope_last", self.rope_last)
        check_flag("from_hidden", self.from_hidden)
        if not is_number(self.norm_eps) or not 0 < float(self.norm_eps) < float("inf"):
            raise ValueError(f"norm_eps is {short_repr(self.norm_eps)}; supported: a positive finite number")
        if "shared" in self.types[:1]:
            raise ValueError("layer 0 shares the keys of an indexer, and there is none before it; supported: full")

    @staticmethod
    def from_hugging_face(config: Mapping[str, Any]) -> IndexerConfig | None:
        """Read the indexer of a model's config.json, None if it has none. Raise ValueError if a key is missing or unsupported."""
        if config.get("index_topk") is None:
            return None
        if config.get("index_n_heads") is None:
            raise ValueError("the config has index_topk and no index_n_heads; supported: the configs of DeepSeek-V3.2 and GLM-5")
        columns = config.get("index_head_dim", COLUMNS)
        if columns != COLUMNS:
            raise ValueError(f"index_head_dim is {short_repr(columns)}; supported: {COLUMNS}")
        interleave = config.get("indexer_rope_interleave")
        return IndexerConfig(
            topk=config["index_topk"],
            heads=config["index_n_heads"],
            rope_interleave=config.get("model_type") in _INTERLEAVED if interleave is None else interleave,
            types=_types(config),
            key_pool=config.get("index_kpool") or 1,
            rope_last=config.get("model_type") == "hy_v4",
            from_hidden=config.get("model_type") == MISTRAL_LARGE_4,
        )

    def is_full(self, layer: int) -> bool:
        """Return whether a layer has an indexer of its own."""
        check_integer("layer", layer, 0)
        return layer >= len(self.types) or self.types[layer] == "full"


def _types(config: Mapping[str, Any]) -> tuple[IndexerType, ...]:
    """Return the type of each layer: indexer_types, else index_topk_pattern, else by index_topk_freq (configuration_glm_moe_dsa.py)."""
    for name in ("indexer_types", "index_topk_pattern"):
        given = config.get(name)
        if given is not None:
            return _named_types(name, given)
    period = check_integer("index_topk_freq", config.get("index_topk_freq") or 1, 1)
    if period == 1:
        return ()
    offset = check_integer("index_skip_topk_offset", config.get("index_skip_topk_offset", 2), 0)
    layers = check_integer("num_hidden_layers", config.get("num_hidden_layers"), 1, MAX_LAYERS)
    return tuple("full" if max(layer - offset + 1, 0) % period == 0 else "shared" for layer in range(layers))


def _named_types(name: str, given: Any) -> tuple[IndexerType, ...]:
    if not isinstance(given, Sequence) or not all(isinstance(entry, str) and entry in _TYPES for entry in given):
        raise ValueError(f"{name} is {short_repr(given)}; supported: for each layer full or shared, or a string of F and S")
    return tuple(_TYPES[entry] for entry in given)
