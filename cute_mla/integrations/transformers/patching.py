"""Replacement of transformers' attention modules: which ones, and how their weights and configuration are read."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

import torch

from ...layer import Indexer, IndexerWeights, MlaAttention, MlaConfig, MlaWeights
from ...layer.batch import CHUNK_TOKENS
from ...layer.rope import frequencies
from ...layer.weights import ALPHA
from ...ops.arguments import check_integer
from .attention import LatentAttention, Traits
from .interface import EXPANDED, LATENT, register
from .step import Planner

# By module below transformers.models, and class. Kimi K2 is of the class of DeepSeek-V3; Kimi K2.5 has it inside.
TRAITS = {
    "axk1.AXK1Attention": Traits(),
    "bailing_hybrid.BailingHybridAttention": Traits(),
    "deepseek_v2.DeepseekV2Attention": Traits(),
    "deepseek_v3.DeepseekV3Attention": Traits(),
    "deepseek_v32.DeepseekV32Attention": Traits(),
    "dots3_note.Dots3NoteTextAttention": Traits(),
    "glm4_moe_lite.Glm4MoeLiteAttention": Traits(),
    "glm5_next.Glm5NextTextAttention": Traits(results=3, local_mask=True),
    "glm_moe_dsa.GlmMoeDsaAttention": Traits(results=3),
    "hy_v4.HYV4Attention": Traits(results=3, keys={"rope_interleave": False, "indexer_rope_interleave": False}),
    "kimi_linear.KimiLinearAttention": Traits(),
    "longcat_flash.LongcatFlashMLA": Traits(),
    "mistral4.Mistral4Attention": Traits(),
    "mistral_large4.MistralLarge4TextAttention": Traits(results=3),
    "youtu.YoutuAttention": Traits(),
}


def patch(model: torch.nn.Module, *, chunk_tokens: int = CHUNK_TOKENS) -> int:
    """Replace every attention module of a model by cute_mla.layer over a latent cache, and return how many there were.

    model: a model of transformers with its weights, whose attention is of a class in TRAITS. Changed in place. Its weights move to the new
    modules, whose names in state_dict() are those of MlaWeights: unpatch() before saving a checkpoint.
    chunk_tokens: cached keys that prefill decompresses at a time, over all requests.

    The model then computes decode in the absorbed form, and prefill of new tokens over cached ones in chunks, both on the layer's path:
    by the kernels on their devices, else in torch. Attention weights are not returned. The keys are in the layers of the DynamicCache
    that the model makes or is given. Beyond index_topk tokens, models with an indexer attend to those that it chooses, by e4m3 queries and
    keys as in DeepSeek's own implementation; transformers does not round them.

    Raises ValueError, and changes nothing, if the model has no such module, has latent attention of another class, has other columns,
    biases other than those of attention_bias, other rotary embeddings than the layer, or weights without contents.
    """
    check_integer("chunk_tokens", chunk_tokens, 1)
    found = list(_attention_modules(model))
    if not found:
        raise ValueError(f"{type(model).__name__} has no latent attention to replace; supported: {_supported()}")
    built = [(parent, name, _config_of(model, module, traits)) for parent, name, module, traits in found]
    planners: dict[tuple[int, int | None], Planner] = {}
    for (parent, name, config), (_, _, module, traits) in zip(built, found, strict=True):
        kind = (id(module.config), config.sliding_window)  # layers with a window and others have masks and plans of their own
        planner = planners.setdefault(kind, Planner(module.layer_idx, chunk_tokens))
        setattr(parent, name, LatentAttention(_trainable_as(model, module, config), module, traits, planner))
    register()
    for _, _, module, _ in found:
        module.config._attn_implementation = LATENT
    return len(found)


def unpatch(model: torch.nn.Module) -> int:
    """Put transformers' own attention modules back, with the weights as they are now, and return how many there were.

    Names and shapes in state_dict() are then those of before patch(), so that save_pretrained() writes a checkpoint that transformers loads
    alone. Parameters are new tensors, without gradients; an optimizer holds the old ones. Caches of the patched model are of no use.

    Raises ValueError, and changes nothing, if the model has no module that patch() made, or has quantised weights elsewhere: its attention
    was dequantised, which its configuration does not say.
    """
    found = [
        (parent, name, module)
        for parent in model.modules()
        for name, module in parent.named_children()
        if isinstance(module, LatentAttention)
    ]
    if not found:
        raise ValueError(f"{type(model).__name__} has no attention of cute_mla; supported: a model behind patch()")
    for config in (getattr(model, "config", None), *(module.hf_config for _, _, module in found)):
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError("the model's configuration has a quantization_config; supported: models whose weights are not quantised")
    for parent, name, module in found:
        setattr(parent, name, _restored(module))
        module.hf_config._attn_implementation = module.implementation
    return len(found)


def _restored(module: LatentAttention) -> torch.nn.Module:
    """Return the module that a LatentAttention replaced, with the weights of the latter in the dtypes of the former."""
    layer = module.attention
    tensors = layer.weights.to_tensors(layer.config)
    tensors.pop(ALPHA, None)  # which the model's own rotary embedding holds
    if layer.indexer is not None:
        tensors |= layer.indexer.weights.to_tensors(layer.config)
    with torch.device("meta"):
        restored = module.kind(module.hf_config, module.layer_idx)
    held = {name: weight.detach().to(module.dtypes.get(name), copy=True).contiguous() for name, weight in tensors.items()}
    restored.load_state_dict(held, assign=True)
    return restored.requires_grad_(layer.kv_b.requires_grad).train(module.training)


def _supported() -> str:
    return ", ".join(name.partition(".")[2] for name in TRAITS)


def _attention_modules(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, Any, Traits]]:
    """Yield parent, name, module and traits of each module to replace. ValueError for latent attention of another class."""
    for parent in model.modules():
        for name, module in parent.named_children():
            kind = type(module)
            traits = TRAITS.get(f"{kind.__module__.removeprefix('transformers.models.').partition('.')[0]}.{kind.__name__}")
            if traits is not None:
                if "cache" not in inspect.signature(kind.forward).parameters:
                    raise ValueError(f"{kind.__name__}.forward has no argument `cache`; supported: that of transformers 5.24")
                yield parent, name, module, traits
            elif hasattr(module, "kv_a_proj_with_mqa"):
                raise ValueError(
                    f"the model has latent attention of class {kind.__name__}; supported: {_supported()}, and any by "
                    f"attn_implementation={EXPANDED!r}"
                )


def _config_of(model: torch.nn.Module, module: Any, traits: Traits) -> MlaConfig:
    """Return the layer's configuration. ValueError if the module computes something else than the layer would."""
    config = MlaConfig.from_hugging_face({**module.config.to_dict(), **traits.keys}).of_layer(module.layer_idx)
    if module.kv_a_layernorm is not None:
        config = replace(config, rms_norm_eps=module.kv_a_layernorm.variance_epsilon)
    if config.indexer is not None and module.indexer is not None:
        config = replace(config, indexer=replace(config.indexer, norm_eps=module.indexer.k_norm.eps))
    if abs(module.scaling / config.softmax_scale - 1) > 1e-6:
        raise ValueError(f"the scale of the softmax is {module.scaling}; supported with this configuration: {config.softmax_scale}")
    if any(weight.is_meta for weight in module.parameters()):
        raise ValueError("the weights are on meta; supported: a model with its weights loaded")
    _layer_of({name: weight.to("meta") for name, weight in _tensors_of(model, module, config).items()}, config)
    for rotary in _rotary_embeddings(model, module):
        if not config.mla_use_nope and config.qk_rope_head_dim:
            _check_rotation(rotary, config, _rotary_prefix(module))
    return config


def _rotary_embeddings(model: torch.nn.Module, module: Any) -> list[Any]:
    """Return the rotary embeddings of a model that an attention module's queries and keys have."""
    name = f"{_rotary_prefix(module)}inv_freq"
    return [each for each in model.modules() if getattr(each, "config", None) is module.config and hasattr(each, name)]


def _rotary_prefix(module: Any) -> str:
    """Return what the names of a layer's frequencies begin with, where layers have embeddings by their type; else ""."""
    kinds = getattr(module.config, "layer_types", None)
    own = (getattr(module.config, "rope_parameters", None) or {}).get(kinds[module.layer_idx]) if kinds else None
    return f"{kinds[module.layer_idx]}_" if isinstance(own, Mapping) and kinds else ""


def _tensors_of(model: torch.nn.Module, module: Any, config: MlaConfig) -> dict[str, torch.Tensor]:
    """Return the weights of a module, and alpha of the model's rotary embedding where the layer has it."""
    tensors = module.state_dict()
    if config.learned_frequencies:
        held = [each.alpha.detach() for each in _rotary_embeddings(model, module)]
        if not held:
            raise ValueError(f"{type(model).__name__} has no rotary embedding with alpha; supported: the whole model, which has one")
        tensors[ALPHA] = held[0]
    return tensors


def _check_rotation(rotary: Any, config: MlaConfig, prefix: str) -> None:
    """Raise ValueError if a model's rotary embedding is not the layer's, to the precision that model.to(dtype) has left of it."""
    expected, given = frequencies(config), getattr(rotary, f"{prefix}inv_freq")
    scale = 1.0 if config.rope_scaling is None else config.rope_scaling.rotary_scale
    rounding = max(torch.finfo(given.dtype).eps, 1e-4)
    same = given.shape == expected.shape and torch.allclose(given.float().cpu(), expected, rtol=rounding, atol=0)
    if not same or abs(getattr(rotary, f"{prefix}attention_scaling") / scale - 1) > 1e-6:
        raise ValueError(
            f"rope_parameters are {rotary.config.rope_parameters}; supported: no scaling, YaRN or llama3, over {len(expected)} pairs"
        )


def _layer_of(tensors: Mapping[str, torch.Tensor], config: MlaConfig) -> MlaAttention:
    """Return the layer with the weights of a module, and with its indexer if it has one."""
    indexed = any(name.startswith("indexer.") for name in tensors)
    indexer = Indexer(config, IndexerWeights.from_tensors(tensors, config)) if indexed else None
    return MlaAttention(config, MlaWeights.from_tensors(tensors, config), indexer)


def _trainable_as(model: torch.nn.Module, module: Any, config: MlaConfig) -> MlaAttention:
    """Return the layer with the weights of a module, which require gradients as before; those of an indexer and alpha do not."""
    layer = _layer_of(_tensors_of(model, module, config), config)
    trained = any(weight.requires_grad for weight in module.parameters())
    for field in fields(layer.weights):
        weight = getattr(layer, field.name)
        if weight is not None and field.name != "alpha":
            weight.requires_grad_(trained)
    return layer
