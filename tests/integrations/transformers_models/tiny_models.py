"""Models of transformers with two or three layers and random weights. Their attention has the columns of the real models."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY = 89
PADDING = 0
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "max_position_embeddings": 4096,
    "pad_token_id": PADDING,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_EXPERTS = {"n_routed_experts": 8}
_MIXED = {"first_k_dense_replace": 1, **_EXPERTS}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
# The latents are normalised with 1e-6 whatever rms_norm_eps is.
_V3 = {
    "q_lora_rank": 48,
    "rms_norm_eps": 0.01,
    "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "max_position_embeddings": 163840,
    **_MIXED,
}
_LATENT_Q = {"q_lora_rank": 48, **_MIXED}
_GROWING = {"llama_4_scaling_beta": 0.5}  # queries grow every 16 positions
_INDEXED = {"index_topk": 640, "index_head_dim": 128, "index_n_heads": 2}
_VISION = {"num_attention_heads": 2, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
# Models with vision: model_type of the configuration of their text, and that of their vision
_AROUND_TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "kimi_k2_5": ("deepseek_v3", {**_VISION, "pos_emb_height": 4}),
    "glm_5_3_flash": ("glm5_next_text", {**_VISION, "out_hidden_size": 64, "projection_intermediate_size": 32}),
    "mistral_large_4": ("mistral_large4_text", {**_VISION, "model_type": "pixtral", "patch_size": 14, "image_size": 28}),
}


# Name of a model: the classes of its configuration and of the model, and what the configuration has besides the sizes above.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek_v2_lite": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {"q_lora_rank": None, "rope_parameters": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, "n_group": None, **_MIXED},
    ),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", {"q_lora_rank": 48, "topk_method": "group_limited_greedy", **_MIXED}),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", _V3),
    "deepseek_v3_halves": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {**_V3, "rope_interleave": False}),
    "deepseek_v32": ("DeepseekV32Config", "DeepseekV32ForCausalLM", {**_V3, **_INDEXED}),
    "glm_4_7_flash": ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM", {"q_lora_rank": 48, **_EXPERTS}),
    "glm_5": (
        "GlmMoeDsaConfig",
        "GlmMoeDsaForCausalLM",
        {"q_lora_rank": 48, "num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"], **_MIXED, **_INDEXED},
    ),
    "glm_5_3_flash": (
        "Glm5NextConfig",
        "Glm5NextForConditionalGeneration",
        {
            "num_hidden_layers": 3,
            "layer_types": ["indexed_attention"] * 3,
            "indexer_types": ["full", "shared", "full"],
            **_LATENT_Q,
            **_INDEXED,
        },
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        "KimiLinearForCausalLM",
        {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "full_attention"],
            "num_local_experts": 8,
            "linear_head_dim": 16,
            "linear_num_heads": 2,
        },
    ),
    "mistral_4": (
        "Mistral4Config",
        "Mistral4ForCausalLM",
        {
            "q_lora_rank": 48,
            "rope_parameters": {**_YARN, "original_max_position_embeddings": 16, "mscale": 1.0, "mscale_all_dim": 1.0, **_GROWING},
            **_MIXED,
        },
    ),
    "mistral_large_4": (
        "MistralLarge4Config",
        "MistralLarge4ForConditionalGeneration",
        {
            "num_hidden_layers": 4,
            "qk_nope_head_dim": 64,
            "no_rope_layers": [1, 1, 0, 1],
            "kv_source_layers": [0, 0, 2, 0],
            "indexer_types": ["full", "shared", "full", "full"],
            **_INDEXED,
            **_EXPERTS,
        },
    ),
    "axk1": ("AXK1Config", "AXK1ForCausalLM", {**_V3}),
    "hy_v4": (
        "HYV4Config",
        "HYV4ForCausalLM",
        {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"], "rms_norm_eps": 0.01, **_LATENT_Q, **_INDEXED},
    ),
    "ling_3": (
        "BailingHybridConfig",
        "BailingHybridForCausalLM",
        {"layer_types": ["linear_attention", "full_attention"], "num_experts": 8, "head_dim": 16, "q_lora_rank": None},
    ),
    "longcat_flash": (
        "LongcatFlashConfig",
        "LongcatFlashForCausalLM",
        {
            "num_layers": 1,
            "q_lora_rank": 48,
            "zero_expert_num": 0,
            "moe_topk": 2,
            "ffn_hidden_size": 96,
            "expert_ffn_hidden_size": 32,
            **_EXPERTS,
        },
    ),
    "dots3_note": (
        "Dots3NoteTextConfig",
        "Dots3NoteForCausalLM",
        {
            "num_hidden_layers": 3,
            "layer_types": ["indexed_attention", "sliding_attention", "sliding_attention"],
            "sliding_window": 23,
            "swa_num_attention_heads": 3,
            "swa_num_key_value_heads": 3,
            "swa_q_lora_rank": 40,
            **_LATENT_Q,
            **_INDEXED,
        },
    ),
    "youtu": ("YoutuConfig", "YoutuForCausalLM", {"q_lora_rank": 48}),
    "kimi_k2_5": ("Kimi_K25Config", "Kimi_K25ForConditionalGeneration", {**_V3}),
}
# Models whose modules patch() does not know
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "axk2_light": (
        "AXK2Config",
        "AXK2ForCausalLM",
        {"kv_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64, **_LATENT_Q, **_INDEXED},
    ),
    "deepseek_v4": (
        "DeepseekV4Config",
        "DeepseekV4ForCausalLM",
        {
            "num_key_value_heads": 1,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
            "mlp_layer_types": ["moe"] * 3,
            "sliding_window": 9,
            "o_groups": 2,
            "o_lora_rank": 32,
            **_LATENT_Q,
            **_INDEXED,
        },
    ),
    "sarvam_mla": ("SarvamMLAConfig", "DeepseekV3ForCausalLM", {**_V3, "q_lora_rank": None}),
}


def make(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """Return a model in evaluation mode with eager attention. changes: to its configuration."""
    config_class, model_class, own = {**MODELS, **OTHERS}[name]
    given = {**_SIZES, **own, **changes}
    if name in _AROUND_TEXT:
        kind, vision = _AROUND_TEXT[name]
        text = {"model_type": kind, **given}
        given = {name: given[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
        given |= {"text_config": text, "vision_config": vision, "tie_word_embeddings": False}
    config = getattr(transformers, config_class)(**given, attn_implementation="eager")
    build = getattr(transformers, model_class)._from_config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = build(config, dtype=torch.float32)
        for parameter_name, weight in model.named_parameters():
            if weight.dim() == 1 and any(word in parameter_name for word in ("norm", "sinks", "alpha", "softmax_scaling")):
                weight.data += 0.2 * torch.randn_like(weight)  # a norm of 1 would hide one that is left out
                if "sinks" in parameter_name:
                    weight.data += 3  # that they weigh as much as 20 keys
            elif weight.dim() in (2, 3) and "conv" not in parameter_name:
                columns = 1 if "embed" in parameter_name else weight.shape[-1]
                weight.data = torch.randn_like(weight) * columns**-0.5  # so that values stay near 1 on their way
        if dtype != torch.float32:  # model.to(dtype) would round the frequencies of the rotary embedding
            weights = model.state_dict()
            model = build(config, dtype=dtype)
            model.load_state_dict(weights)
    return model.eval()


def tokens(*lengths: int, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random tokens of requests, padded on the left to the longest, and their attention_mask, both [requests, longest]."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCABULARY, (len(lengths), max(lengths)), generator=draw)
    mask = torch.arange(max(lengths)) >= max(lengths) - torch.tensor(lengths).unsqueeze(1)
    return ids.where(mask, PADDING), mask.long()
