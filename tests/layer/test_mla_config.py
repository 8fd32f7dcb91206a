"""Configurations read from Hugging Face's keys, and what YaRN makes of scales."""

from __future__ import annotations

import math
from typing import Any

import pytest

from cute_mla.layer import Llama3Scaling, MlaConfig, YarnScaling
from tests.layer.mla_models import GLM_5, GLM_5_3_FLASH, MISTRAL_SMALL_4, V2_LITE, V3, YARN


def test_deepseek_v3() -> None:
    config = MlaConfig.from_hugging_face({**V3, "model_type": "deepseek_v3", "n_routed_experts": 256})
    assert (config.hidden_size, config.num_attention_heads, config.q_lora_rank) == (7168, 128, 1536)
    assert (config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim) == (512, 128, 64, 128)
    assert config.rope_scaling == YarnScaling(40, 4096, 32, 1, 1.0, 1.0)
    # 0.1 ln 40 + 1 = 1.36888795; squared 1.87385421; over the root of 192, 13.8564065.
    assert config.softmax_scale == pytest.approx(0.13523377, rel=1e-6)
    assert config.rope_scaling.rotary_scale == 1.0


LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4, "original_max_position_embeddings": 8192}


def test_llama_3() -> None:
    """The scaling of Llama 3.1 changes frequencies alone."""
    others = {name: value for name, value in V3.items() if name not in ("rope_theta", "rope_scaling")}
    config = MlaConfig.from_hugging_face({**others, "rope_parameters": {**LLAMA_3, "rope_theta": 5e5}})
    assert config.rope_scaling == Llama3Scaling(8, 1, 4, 8192)
    assert config.rope_theta == 5e5
    assert config.softmax_scale == 192**-0.5
    assert config.rope_scaling.to_hugging_face() == LLAMA_3


def test_deepseek_v2_lite() -> None:
    config = MlaConfig.from_hugging_face(V2_LITE)
    assert config.q_lora_rank is None
    # 0.0707 ln 40 + 1 = 1.26080378; squared 1.58962617; over the root of 192.
    assert config.softmax_scale == pytest.approx(0.11472138, rel=1e-6)


def test_glm_5() -> None:
    """GLM-4.7-Flash has the same columns, and 20 heads."""
    config = MlaConfig.from_hugging_face({**GLM_5, "model_type": "glm_moe_dsa"})
    assert (config.query_columns, config.v_head_dim, config.key_columns) == (256, 256, 576)
    assert (config.rope_theta, config.rope_scaling, config.rms_norm_eps) == (1_000_000, None, 1e-5)
    assert config.softmax_scale == 1 / 16
    assert MlaConfig.from_hugging_face({**GLM_5, "num_attention_heads": 20, "hidden_size": 2048, "q_lora_rank": 768}).v_head_dim == 256


def test_glm_5_3_flash() -> None:
    """Keys without rotary columns; attention is that of the part of a multimodal model that reads text."""
    config = MlaConfig.from_hugging_face({"model_type": "glm5_next", "text_config": GLM_5_3_FLASH, "vision_config": {"hidden_size": 1}})
    assert (config.kv_lora_rank, config.qk_rope_head_dim, config.key_columns) == (512, 0, 512)
    assert (config.qk_nope_head_dim, config.v_head_dim, config.query_columns) == (256, 256, 256)
    assert config.softmax_scale == 1 / 16


def test_mistral_small_4() -> None:
    """Its YaRN scales the softmax, by (0.1 ln 128 + 1) squared, and not the rotary columns; queries grow with their position."""
    config = MlaConfig.from_hugging_face({"text_config": MISTRAL_SMALL_4})
    assert (config.kv_lora_rank, config.qk_rope_head_dim, config.key_columns) == (256, 64, 320)
    assert (config.qk_nope_head_dim, config.v_head_dim, config.query_columns) == (64, 128, 128)
    assert config.rope_scaling == YarnScaling(128, 8192, 32, 1, 1.0, 1.0, 0.1)
    assert config.rope_scaling.rotary_scale == 1.0
    assert config.softmax_scale == pytest.approx(128**-0.5 * 1.48520303**2, rel=1e-6)


def test_without_scaling() -> None:
    for none in ({"rope_scaling": None}, {"rope_scaling": {"rope_type": "default"}}):
        config = MlaConfig.from_hugging_face({**V3, **none})
        assert config.rope_scaling is None
        assert config.softmax_scale == pytest.approx(1 / math.sqrt(192))


def test_where_newer_configs_keep_rope() -> None:
    newer = {key: value for key, value in V3.items() if key not in ("rope_theta", "rope_scaling")}
    newer["rope_parameters"] = {**V3["rope_scaling"], "rope_type": "yarn", "rope_theta": 50_000.0}
    config = MlaConfig.from_hugging_face(newer)
    assert config.rope_theta == 50_000.0
    assert config.rope_scaling == MlaConfig.from_hugging_face(V3).rope_scaling


def test_a_theta_beside_the_scaling() -> None:
    assert MlaConfig.from_hugging_face({**V3, "rope_theta": None, "rope_scaling": {**YARN, "rope_theta": 5e4}}).rope_theta == 5e4


def test_magnitudes_that_differ() -> None:
    """Mscale 0.5 and mscale_all_dim 0.25: (0.05 ln 40 + 1) / (0.025 ln 40 + 1) on the columns, the latter squared on the scale."""
    yarn = YarnScaling(40, 4096, mscale=0.5, mscale_all_dim=0.25)
    assert yarn.rotary_scale == pytest.approx(1.18444397 / 1.09222199, rel=1e-6)
    assert yarn.softmax_scale == pytest.approx(1.09222199**2, rel=1e-6)
    assert YarnScaling(40, 4096).softmax_scale == 1.0  # mscale_all_dim is 0 unless given
    assert YarnScaling(0.5, 4096, mscale_all_dim=1.0).softmax_scale == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_lora_rank": 384}, "kv_lora_rank is 384 with qk_rope_head_dim 64; supported: 512 with 64, 512 with 0, 256 with 64"),
        ({"kv_lora_rank": 256, "qk_rope_head_dim": 0}, "kv_lora_rank is 256 with qk_rope_head_dim 0; supported: 512 with 64"),
        ({"qk_rope_head_dim": 32}, "kv_lora_rank is 512 with qk_rope_head_dim 32; supported: 512 with 64"),
        ({"kv_lora_rank": "512"}, "kv_lora_rank is '512'; supported: an integer, 0 or more"),
        (
            {"qk_nope_head_dim": 96},
            "qk_nope_head_dim is 96 with v_head_dim 128; supported with qk_rope_head_dim 64: 128 with 128, 64 with 128",
        ),
        ({"v_head_dim": 192}, "qk_nope_head_dim is 128 with v_head_dim 192; supported"),
        ({"qk_nope_head_dim": 192}, "qk_nope_head_dim is 192 with v_head_dim 128; supported with qk_rope_head_dim 64: .*, 192 with 256"),
        (
            {**GLM_5_3_FLASH, "qk_nope_head_dim": 192},
            "qk_nope_head_dim is 192 with v_head_dim 256; supported with qk_rope_head_dim 0: 192 with 128, 128 with 128, 256 with 256",
        ),
        ({"qk_nope_head_dim": 192, "qk_rope_head_dim": 0}, r"rope_scaling is YarnScaling.* with qk_rope_head_dim 0; supported: None"),
        ({"text_config": [1]}, r"text_config is \[1\]; supported: a mapping"),
        (
            {"rope_scaling": {**YARN, "llama_4_scaling_beta": "0.1"}},
            r"rope_scaling\['llama_4_scaling_beta'\] is '0.1'; supported: a number",
        ),
        ({"hidden_size": 0}, "hidden_size is 0; supported: an integer, 1 or more"),
        ({"num_attention_heads": 2.5}, r"num_attention_heads is 2\.5; supported: an integer"),
        ({"q_lora_rank": -1}, "q_lora_rank is -1; supported: an integer, 1 or more"),
        ({"rope_theta": 0}, "rope_theta is 0; supported: a positive finite number"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'; supported: a positive finite number"),
        ({"attention_bias": 1}, "attention_bias is 1; supported: True and False"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "rope_scaling has no low_freq_factor, high_freq_factor"),
        ({"rope_scaling": {**LLAMA_3, "factor": 0}}, r"rope_scaling\['factor'\] is 0; supported: a positive"),
        ({"rope_scaling": {**LLAMA_3, "low_freq_factor": 4}}, "low_freq_factor 4 and high_freq_factor 4; supported: the former less"),
        ({"rope_scaling": {**LLAMA_3, "rope_type": "dynamic"}}, "type 'dynamic'; supported: yarn, deepseek_yarn, llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling is of type 'linear'; supported: yarn"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "rope_scaling has no original_max_position_embeddings"),
        ({"rope_scaling": {**YARN, "factor": None}}, "rope_scaling has no factor; supported"),
        ({"rope_scaling": {**YARN, "factor": -2}}, r"rope_scaling\['factor'\] is -2; supported: a positive"),
        ({"rope_scaling": {**YARN, "mscale": -1}}, r"rope_scaling\['mscale'\] is -1; supported: a number, 0 or more"),
        (
            {"rope_scaling": {**YARN, "mscale": 1.0, "attention_factor": 1.2}},
            r"rope_scaling\['attention_factor'\] is 1\.2; supported: 1\.36888",
        ),
        (
            {"rope_scaling": {**YARN, "mscale": 1.0, "attention_factor": "1"}},
            r"rope_scaling\['attention_factor'\] is '1'; supported: 1\.36888",
        ),
        (
            {"rope_scaling": {**YARN, "attention_factor": 0}},
            r"rope_scaling\['attention_factor'\] is 0; supported: a positive finite number",
        ),
        ({"rope_scaling": {**YARN, "truncate": False}}, "rope_scaling of type 'yarn' has truncate False; supported: rope_type, type"),
        ({"rope_scaling": {**LLAMA_3, "mscale": 2}}, "rope_scaling of type 'llama3' has mscale 2; supported: rope_type"),
        ({"rope_scaling": {"factor": 40}}, "rope_scaling of type 'default' has factor 40; supported: rope_type"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1]}}, r"rope_scaling of type 'default' has mrope_section \[1\]"),
        ({"rope_parameters": {"rope_theta": 5e4}}, r"the config has 10000 and 50000\.0 as rope_theta; supported: one"),
        ({"rope_parameters": {"rope_type": "default"}}, r"the config has YarnScaling.* and None as rope_scaling; supported: one"),
        ({"rope_scaling": {"mrope_section": [1]}}, r"rope_scaling of type 'default' has mrope_section \[1\]"),
        ({"rope_parameters": 3}, "rope_parameters is 3; supported: a mapping"),
        ({"qk_head_dim": 128}, "qk_head_dim is 128; supported with the other columns: 192"),
        ({"rope_scaling": {**YARN, "beta_fast": 1}}, "beta_slow 1 and beta_fast 1; supported: the former less"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MlaConfig.from_hugging_face({**V3, **change})


@pytest.mark.parametrize("missing", ["hidden_size", "q_lora_rank", "kv_lora_rank"])
def test_keys_that_are_missing(missing: str) -> None:
    with pytest.raises(ValueError, match=f"the config has no {missing}; supported: the configs of DeepSeek-V2 and V3"):
        MlaConfig.from_hugging_face({key: value for key, value in V3.items() if key != missing})
