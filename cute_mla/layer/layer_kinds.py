"""Lists of a configuration that say how the layers of a model differ: which rotate no columns, and whose latent keys each attends to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..ops.arguments import is_integer, short_repr
from .config_keys import MISTRAL_LARGE_4


def read_layers(config: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Return a list of integers of a config, one for each layer; () if there is none. Raise ValueError for other values."""
    given = config.get(name)
    if given is None:
        return ()
    kind = config.get("model_type")
    if kind not in (None, MISTRAL_LARGE_4):  # whose class in transformers does not read it
        raise ValueError(
            f"{name} is {short_repr(given)} with model_type {short_repr(kind)}; supported: with {MISTRAL_LARGE_4} or without one"
        )
    layers = config.get("num_hidden_layers")
    number: int = layers if layers is not None and is_integer(layers) else 0
    if not isinstance(given, Sequence) or not all(is_integer(entry) for entry in given) or len(given) < number:
        raise ValueError(f"{name} is {short_repr(given)}; supported: an integer for each of num_hidden_layers {short_repr(layers)}")
    return tuple(given)[: number or None]


def check_layers(no_rope_layers: tuple[int, ...], kv_source_layers: tuple[int, ...]) -> None:
    """Raise ValueError for entries other than 0 and 1, and for layers that attend to latents other than those lent last.

    Of a layer's kind, rotary or not, the last layer before it whose latents others attend to must be the one that its entry names.
    transformers attends to the former, whatever the entry says (modeling_mistral_large4.py, shared_kv_states).
    """
    for name, given in (("no_rope_layers", no_rope_layers), ("kv_source_layers", kv_source_layers)):
        if not isinstance(given, tuple) or not all(is_integer(entry) for entry in given):
            raise ValueError(f"{name} is {short_repr(given)}; supported: a tuple of integers, one for each layer")
    if any(entry not in (0, 1) for entry in no_rope_layers):
        raise ValueError(f"no_rope_layers is {short_repr(no_rope_layers)}; supported: 1 for a layer with RoPE, 0 for one without")
    kinds = no_rope_layers or (1,) * len(kv_source_layers)
    if kv_source_layers and len(kinds) != len(kv_source_layers):
        raise ValueError(f"there are {len(kinds)} no_rope_layers and {len(kv_source_layers)} kv_source_layers; supported: as many")
    lent: dict[int, int] = {}
    for layer, source in enumerate(kv_source_layers):
        if source != layer and lent.get(kinds[layer]) != source:
            raise ValueError(
                f"kv_source_layers is {short_repr(kv_source_layers)}, where layer {layer} attends to the latents of layer {source}; "
                "supported: those of the last layer before it whose latents are shared, and that has RoPE as it has, or has none"
            )
        if source == layer and layer in kv_source_layers[layer + 1 :]:
            lent[kinds[layer]] = layer
