"""Configuration of a model in which some layers have a window and sizes of their own: dots3-note."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..ops.arguments import short_repr

_WINDOW, _OTHERS = "sliding_attention", ["indexed_attention", "full_attention"]
_MODEL = ("layer_types", "sliding_window", "per_layer_config", "rope_parameters")  # keys that say how layers differ
_INDEXER = ("index_topk", "index_n_heads", "index_head_dim")


def split_layers(config: Mapping[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any] | None, tuple[int, ...]]:
    """Return the configuration of layers without a window, that of those with one, and for each layer 1 or 0: whether it has one.

    None stands for the configuration of a kind that no layer has. config: as transformers' Dots3NoteTextConfig has it, whose
    per_layer_config holds the sizes of window layers. Raises ValueError for others, such as a config.json with names that begin with swa_,
    and if layers of one kind differ.
    """
    kinds, sizes, rope = config.get("layer_types"), config.get("per_layer_config"), config.get("rope_parameters")
    if not isinstance(kinds, list | tuple) or not isinstance(rope, Mapping) or not isinstance(sizes, Mapping | None):
        raise ValueError(
            "the config has no layer_types and no rope_parameters of each; supported of dots3-note: Dots3NoteTextConfig(**config).to_dict()"
        )
    full = [kind for kind in _OTHERS if kind in kinds]
    if not kinds or len(full) > 1 or any(kind not in (_WINDOW, *full) for kind in kinds):
        raise ValueError(f"layer_types is {short_repr(list(kinds))}; supported: {_WINDOW}, and {' or '.join(_OTHERS)}")
    windowed = tuple(int(kind == _WINDOW) for kind in kinds)
    of_layer = {int(layer): values for layer, values in (sizes or {}).items()}
    own = [of_layer.get(layer, {}) for layer, flag in enumerate(windowed) if flag]
    if any(each != own[0] for each in own) or any(of_layer.get(layer) for layer, flag in enumerate(windowed) if not flag):
        raise ValueError(f"per_layer_config is {short_repr(sizes)}; supported: the same for every layer with a window, none for others")
    shared = {name: value for name, value in config.items() if name not in _MODEL}
    dense = {name: value for name, value in shared.items() if name not in _INDEXER}
    windows = {**dense, **own[0], "rope_parameters": rope.get(_WINDOW)} if own else None
    others = {**(shared if full == _OTHERS[:1] else dense), "rope_parameters": rope.get(full[0])} if full else None
    return others, windows, windowed
