"""Configurations of models with latent attention, as their checkpoints and transformers 5.24 write them: read, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from cute_mla.layer import MlaConfig
from cute_mla.layer.config_keys import MODEL_TYPES
from tests.layer.mla_models import GLM_5, GLM_5_3_FLASH, MISTRAL_SMALL_4, V2_LITE, V3
from tests.support.tree import ROOT

# What configurations say besides attention, and about attention without changing it
MOE: dict[str, Any] = (
    {"architectures": ["DeepseekV3ForCausalLM"], "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    | {"attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": [1, 2], "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu"}
    | {"vocab_size": 129280, "initializer_range": 0.02, "intermediate_size": 18432, "moe_intermediate_size": 2048, "moe_layer_freq": 1}
    | {"n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8, "use_cache": True}
    | {"num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "routed_scaling_factor": 2.5, "topk_group": 4}
    | {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "pretraining_tp": 1}
    | {"transformers_version": "4.33.1", "aux_loss_alpha": 0.001, "seq_aux": True, "moe_router_dtype": "float32"}
    | {"quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}}
)
# What older releases of transformers write of every configuration below another one
GENERIC: dict[str, Any] = (
    {"add_cross_attention": False, "cross_attention_hidden_size": None, "output_attentions": False, "pruned_heads": {}, "top_k": 50}
    | {"output_scores": False, "is_decoder": False, "chunk_size_feed_forward": 0, "label2id": {"LABEL_0": 0}, "length_penalty": 1.0}
    | {"_attn_implementation_autoset": False, "forced_bos_token_id": None, "sep_token_id": None, "torchscript": False, "prefix": None}
)
FIVE: dict[str, Any] = {"mlp_layer_types": ["dense", "sparse"], "mlp_bias": False, "head_dim": 64, "output_router_logits": False}
DSA: dict[str, Any] = FIVE | {"layer_types": ["indexed_attention"], "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64}
KDA = {"full_attn_layers": [2], "kda_layers": [1], "gate_lower_bound": -5.0, "use_full_rank_gate": True}
HYBRID: dict[str, Any] = (
    {"layer_types": ["linear_attention", "full_attention"], "linear_head_dim": 128, "linear_num_heads": 32, "linear_conv_kernel_dim": 4}
) | {"linear_attn_config": KDA}
LINEAR: dict[str, Any] = V2_LITE | HYBRID | {"model_type": "kimi_linear", "moe_renormalize": True, "num_expert_group": 1}
GLM_5_2: dict[str, Any] = (
    GLM_5
    | DSA
    | {"model_type": "glm_moe_dsa", "head_dim": 192, "indexer_types": ["full", "shared"], "index_share_for_mtp_iteration": True}
    | {"index_topk_freq": 4, "index_topk_pattern": None, "index_skip_topk_offset": 3}
)
FLASH: dict[str, Any] = (
    GLM_5_3_FLASH
    | HYBRID
    | {"model_type": "glm5_next_text", "mla_use_nope": True, "mhc": True, "hc_mult": 4, "hc_eps": 1e-6, "linear_lower_bound": -5.0}
    | {"index_kpool_compress": True, "index_kpool_always_select_tail": True, "swiglu_limit": 10.0}
)
DOTS3: dict[str, Any] = {
    **V3,
    **DSA,
    "model_type": "dots3_note_text",
    "q_lora_rank": 1024,
    "rope_scaling": None,
    "rope_theta": None,
    "layer_types": ["indexed_attention", "sliding_attention", "sliding_attention"],
    "sliding_window": 512,
    "per_layer_config": {
        layer: {"num_attention_heads": 64, "kv_lora_rank": 1024, "qk_nope_head_dim": 192, "head_dim": 256} for layer in (1, 2)
    },
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.25}
        for kind, theta in (("indexed_attention", 8e7), ("sliding_attention", 5e4))
    },
}
READ: dict[str, dict[str, Any]] = {
    "dots3-note": DOTS3,
    "DeepSeek-V2": {**V3, **FIVE, "model_type": "deepseek_v2", "qk_head_dim": 192},
    "DeepSeek-V3": {**V3, "model_type": "deepseek_v3"},
    "DeepSeek-V3.2": {**V3, **DSA, "model_type": "deepseek_v32"},
    "Kimi K2": {**V3, "model_type": "kimi_k2", "num_attention_heads": 64},
    "Kimi K2.5": {"model_type": "kimi_k25", "text_config": {**V3, **GENERIC, "model_type": "kimi_k2"}, "vision_config": {"q": 1}},
    "GLM-4.7-Flash": {**V3, **FIVE, "model_type": "glm4_moe_lite", "qk_nope_head_dim": 192, "v_head_dim": 256, "qk_head_dim": 256},
    "GLM-5.2": GLM_5_2,
    "GLM-5.3-Flash": {"text_config": FLASH},
    "Mistral Small 4": {"text_config": {**MISTRAL_SMALL_4, "model_type": "mistral4", "head_dim": 128, "sliding_window": None}},
    "A.X-K1": {**V3, **FIVE, "model_type": "axk1"},
    "Sarvam": {**V2_LITE, "model_type": "sarvam_mla"},
    "Youtu": {**V3, "model_type": "youtu", "embedding_initializer_range": 0.04},
    "Kimi K3": {"text_config": {**LINEAR, "mla_use_nope": True, "mla_use_output_gate": True, "latent_moe_use_norm": True}},
    "Kimi Linear": {**LINEAR, "mla_use_nope": True},
    "LongCat Flash": {**V3, "mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_num": 256},
    "LongcatFlashConfig": {**V3, "model_type": "longcat_flash"},
    "Ling 3": {**V3, **HYBRID, "model_type": "bailing_hybrid", "kda_safe_gate": True},
    "Hy4": {**GLM_5, "model_type": "hy_v4", "learnable_sink_init": 0.0},
    "an unknown one": V3,
}


@pytest.mark.parametrize("model", READ)
def test_read(model: str) -> None:
    given = READ[model]
    MlaConfig.from_hugging_face({**MOE, "text_config": {**MOE, **given["text_config"]}} if "text_config" in given else {**MOE, **given})


OPTIONS = ("mla_use_nope", "mla_scale_q_lora", "mla_scale_kv_lora", "output_gate", "attention_sinks")


@pytest.mark.parametrize(
    ("model", "changes", "options"),
    [
        ("Kimi K3", {}, (True, False, False, "column", False)),
        ("Kimi Linear", {}, (True, False, False, None, False)),
        ("Kimi Linear", {"mla_use_nope": False}, (False, False, False, None, False)),
        ("LongCat Flash", {}, (False, True, True, None, False)),
        ("LongcatFlashConfig", {"mla_scale_q_lora": False}, (False, False, True, None, False)),
        ("Ling 3", {}, (False, False, False, "head", False)),
        ("Ling 3", {"gated_attention_proj_granularity_type": "element_wise"}, (False, False, False, "column", False)),
        ("Hy4", {}, (False, False, False, "column", True)),
        ("DeepSeek-V3", {}, (False, False, False, None, False)),
    ],
)
def test_options_of_the_layer(model: str, changes: dict[str, Any], options: tuple[Any, ...]) -> None:
    config = MlaConfig.from_hugging_face({**READ[model].get("text_config", READ[model]), **changes})
    assert tuple(getattr(config, name) for name in OPTIONS) == options
    assert config.indexer is None or config.indexer.rope_last == (model == "Hy4")


def test_layers_with_a_window() -> None:
    config = MlaConfig.from_hugging_face(DOTS3)
    full, *windowed = (config.of_layer(layer) for layer in range(3))
    assert windowed[0] == windowed[1]
    assert (full.sliding_window, full.key_columns, full.num_attention_heads, full.rope_theta) == (None, 576, 128, 8e7)
    assert full.indexer is not None
    assert full.indexer.rope_interleave
    window = windowed[0]
    assert (window.sliding_window, window.key_columns, window.num_attention_heads, window.rope_theta) == (512, 1088, 64, 5e4)
    assert window.indexer is None
    for each in (full, window):
        assert (each.rotary_norm, each.output_gate, each.mla_scale_q_lora, each.mla_scale_kv_lora) == (True, "head", True, True)
        each.check_one_layer()
    with pytest.raises(ValueError, match=r"no_rope_layers, kv_source_layers or window_layers; supported: that of one layer"):
        config.check_one_layer()
    sizes = {"0": DOTS3["per_layer_config"][1]}  # as JSON has it
    every = MlaConfig.from_hugging_face({**DOTS3, "layer_types": ["sliding_attention"], "per_layer_config": sizes})
    assert every == window
    dense = MlaConfig.from_hugging_face(
        {**DOTS3, "layer_types": ["full_attention"], "per_layer_config": None, "rope_parameters": DENSE_ROPE}
    )
    assert dense.indexer is None


DENSE_ROPE = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": None}, "the config has no layer_types and no rope_parameters of each; supported of dots3-note: Dots3Note"),
        ({"layer_types": ["chunked_attention"]}, r"layer_types is \['chunked_attention'\]; supported: sliding_attention, and indexed"),
        ({"layer_types": ["indexed_attention", "full_attention"]}, "layer_types is .*; supported: sliding_attention, and"),
        ({"per_layer_config": {1: {}, 2: {"kv_lora_rank": 512}}}, "per_layer_config is .*; supported: the same for every layer with a"),
        ({"per_layer_config": {0: {"q_lora_rank": 8}}}, "per_layer_config is .*; supported: the same for every layer with a window, none"),
        ({"sliding_window": 0}, "sliding_window is 0; supported"),
        ({"rope_interleave": False}, "rotary_norm is True; supported: with rope_interleave and rotary columns"),
        ({"attn_output_gate": True}, "the config has attn_output_gate True; supported: no other keys"),
    ],
)
def test_layers_with_a_window_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MlaConfig.from_hugging_face({**DOTS3, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_sinks": True}, "sliding_window is 9 with attention_sinks; supported: without"),
        ({"latents": "lent"}, "sliding_window is 9 with latents; supported: without"),
        ({"kv_lora_rank": 768}, "kv_lora_rank is 768 with qk_rope_head_dim 64; supported: .*1024 with 64"),
        ({"window": 3}, "window is 3; supported: None and MlaConfig"),
        ({"window_layers": 1}, r"window_layers is 1; supported: \(\) without window"),
        ({"window_layers": (1,)}, r"window_layers is \(1,\); supported: \(\) without window"),
    ],
)
def test_windows_beside_what_they_do_not_go_with(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MlaConfig(**{"hidden_size": 64, "num_attention_heads": 2, "q_lora_rank": None, "sliding_window": 9, **changes})


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        ("Ling 3", {"gated_attention_proj_granularity_type": "x"}, "gated_attention_proj_granularity_type is 'x'; supported: head_wise"),
        ("LongCat Flash", {"q_lora_rank": None}, "mla_scale_q_lora is True with q_lora_rank None; supported: False"),
        ("Kimi Linear", {"mla_use_nope": 1}, "mla_use_nope is 1; supported"),
    ],
)
def test_options_that_are_refused(model: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MlaConfig.from_hugging_face({**READ[model], **changes})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dots3-note": (
        {**V3, "layer_types": ["sliding_attention"], "sliding_window": 512, "per_layer_config": {"02": {}}},
        r"layer_types \['sliding_attention'\], sliding_window 512, per_layer_config {'02': {}};",
    ),
    "A.X-K2": ({**V3, "gated_norm_rank": 16}, "gated_norm_rank 16;"),
    "MiniCPM3": ({**V3, "model_type": "minicpm3", "scale_emb": 12, "scale_depth": 1.4}, "model_type 'minicpm3';"),
    "DeepSeek-V4": ({"model_type": "deepseek_v4", "head_dim": 512}, "model_type 'deepseek_v4';"),
    "DeepSeek-VL2": ({**V3, "use_mla": False}, "use_mla False;"),
    "a tail that is not seen": ({**GLM_5_3_FLASH, "index_kpool_always_select_tail": False}, "index_kpool_always_select_tail False;"),
}
UNKNOWN = (
    *("attn_output_gate", "q_norm", "qk_norm", "kv_lora_scale", "attention_sinks", "rotary_dim", "position_bias", "window_size"),
    *("indexer_scale", "v_proj_gate", "head_scale", "use_qkv", "softmax_temperature", "k_shift"),
)


@pytest.mark.parametrize("model", REFUSED)
def test_refused_by_name(model: str) -> None:
    given, named = REFUSED[model]
    with pytest.raises(ValueError, match=f"^the config has {named} supported: no other keys of attention .* model_type or deepseek_v2, "):
        MlaConfig.from_hugging_face(given)


def test_a_model_without_kernels_says_what_to_do() -> None:
    given = {**V3, "kv_lora_rank": 128, "qk_rope_head_dim": 32, "model_type": "axk2", "gated_norm_rank": 16}
    with pytest.raises(
        ValueError, match=r"model_type is 'axk2': A\.X-K2 has keys of 128 \+ 32 columns, .*; supported: .*'cute_mla' or 'sdpa'"
    ):
        MlaConfig.from_hugging_face(given)


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_names_of_attention(name: str) -> None:
    with pytest.raises(ValueError, match=f"^the config has {name} False; supported: "):
        MlaConfig.from_hugging_face({**V3, name: False})
    MlaConfig.from_hugging_face({**V3, name: None})


def test_the_page_lists_the_types() -> None:
    text = (ROOT / "docs" / "models.md").read_text()
    assert [kind for kind in MODEL_TYPES if f"`{kind}`" not in text] == []
