"""Keys of a model's config.json: those that the layer reads, those without effect on it, and those that it refuses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..ops.arguments import short_repr

MISTRAL_LARGE_4 = "mistral_large4_text"
DOTS3 = "dots3_note_text"

# Values of model_type with the attention of the layer. That of the others differs, often without a key that says so.
MODEL_TYPES = (
    *("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe_lite", "glm_moe_dsa", "glm5_next", "glm5_next_text"),
    *("mistral4", "axk1", "sarvam_mla", "youtu", "kimi_linear", "longcat_flash", "bailing_hybrid", "hy_v4"),
    MISTRAL_LARGE_4,
    DOTS3,
)
_UNSERVED = {
    "axk2": "A.X-K2 has keys of 128 + 32 columns, which no kernel reads; supported: transformers' own modules, with "
    "attn_implementation='cute_mla' or 'sdpa'",
}
_READ = (
    *("hidden_size", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank"),
    *("rms_norm_eps", "max_position_embeddings", "rope_interleave", "attention_bias", "rope_theta", "rope_scaling", "rope_parameters"),
    *("index_topk", "index_n_heads", "index_head_dim", "indexer_rope_interleave", "indexer_types", "index_topk_pattern", "index_topk_freq"),
    *("index_skip_topk_offset", "index_kpool", "mla_use_nope", "mla_scale_q_lora", "mla_scale_kv_lora", "mla_use_output_gate"),
    *("gated_attention_proj_granularity_type", "learnable_sink_init", "no_rope_layers", "kv_source_layers"),
)
# Names of attention all the same: of training, of engines, of sizes that others give, of other parts of a model
_WITHOUT_EFFECT = (
    *("attention_dropout", "attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "output_attentions"),
    *("num_key_value_heads", "head_dim", "qk_head_dim", "partial_rotary_factor", "index_kpool_compress"),
    *("norm_topk_prob", "scale_emb", "scale_depth"),
)
# The value with which a key changes nothing
_OFF = ("use_sliding_window", "add_cross_attention")
_NEUTRAL: Mapping[str, Any] = {**dict.fromkeys(_OFF, False), "use_mla": True, "index_kpool_always_select_tail": True, "pruned_heads": {}}
_LAYERS = {"full_attention", "indexed_attention", "linear_attention"}  # the last: layers of another kind, which the layer is not for

_ATTENTION = re.compile(
    r"att(entio)?n|rope|rotary|position|yarn|mla|nope|latent|lora|head|index|gate|norm|scal|sink|window|bias|softmax|sparse|dsa|layer_config"
    r"|(^|_)(q|v|o|qk|kv|qkv)(_|$)|^k_"
)
_ELSEWHERE = re.compile(r"moe|expert|route|routing|mlp|ffn|mtp|nextn|vision|image|video|audio|loss|lm_head|^linear_|^kda_|^hc_")


def check_keys(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a model_type that is not known, and for keys that may change attention and that the layer does not read.

    A key passes if the layer reads it, if its value is None or the one that changes nothing, or if it is known to have no effect. A key
    that is not known passes unless its name has a word of attention (_ATTENTION) and none of other parts of a model (_ELSEWHERE).
    """
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in _UNSERVED:
        raise ValueError(f"model_type is {kind!r}: {_UNSERVED[kind]}")
    refused = [f"{name} {short_repr(value)}" for name, value in config.items() if value is not None and not _passes(str(name), value)]
    if refused:
        raise ValueError(
            f"the config has {', '.join(refused)}; supported: no other keys of attention than those of DeepSeek-V3.2 and GLM-5, and no "
            f"model_type or {', '.join(MODEL_TYPES)}"
        )


def _passes(name: str, value: Any) -> bool:
    if name == "model_type":
        return value in MODEL_TYPES
    if name == "layer_types":
        return isinstance(value, list | tuple) and all(isinstance(kind, str) and kind in _LAYERS for kind in value)
    if name in _NEUTRAL:
        return bool(value == _NEUTRAL[name])
    return name in _READ or name in _WITHOUT_EFFECT or not _ATTENTION.search(name) or bool(_ELSEWHERE.search(name))
