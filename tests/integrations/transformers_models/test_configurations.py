"""Every configuration of transformers with latent attention: the layer computes what transformers does, or names what it refuses."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedConfig

from cute_mla.layer import MlaAttention, MlaConfig, MlaWeights, plan_sequences
from tests.integrations.transformers_models.tiny_models import make, tokens

# By class of configuration, a small model with it
COMPUTED = {
    "AXK1Config": "axk1",
    "DeepseekV2Config": "deepseek_v2",
    "DeepseekV3Config": "deepseek_v3",
    "DeepseekV32Config": "deepseek_v32",
    "Glm4MoeLiteConfig": "glm_4_7_flash",
    "Glm5NextTextConfig": "glm_5_3_flash",
    "GlmMoeDsaConfig": "glm_5",
    "Mistral4Config": "mistral_4",
    "SarvamMLAConfig": "sarvam_mla",
    "YoutuConfig": "youtu",
}
REFUSED = {
    "AXK2Config": "gated_norm_rank 16, .*model_type 'axk2'",
    "BailingHybridConfig": "model_type 'bailing_hybrid'",
    "Dots3NoteTextConfig": "sliding_attention.*, sliding_window 512, .*model_type 'dots3_note_text', .*per_layer_config",
    "HYV4Config": "learnable_sink_init 0.0, .*model_type 'hy_v4'",
    "HYV4VLTextConfig": "learnable_sink_init 0.0, .*model_type 'hy_v4_vl_text'",
    "KimiLinearConfig": "model_type 'kimi_linear'",
    "LongcatFlashConfig": "model_type 'longcat_flash'",
    "MiniCPM3Config": "model_type 'minicpm3'",
    "MistralLarge4TextConfig": "no_rope_layers .*, kv_source_layers .*, model_type 'mistral_large4_text'",
}


def configurations() -> dict[str, dict[str, Any]]:
    """Return the default configurations of all models of transformers that have latent attention, by class."""
    found = {}
    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/configuration_*.py")):
        if "kv_lora_rank" in file.read_text():
            module = import_module(f"transformers.models.{file.parent.name}.{file.stem}")
            for name, kind in inspect.getmembers(module, inspect.isclass):
                if issubclass(kind, PreTrainedConfig) and hasattr(kind, "kv_lora_rank"):
                    found[name] = getattr(module, name)().to_dict()
    return found


FOUND = configurations()


def test_each_is_listed() -> None:
    assert set(FOUND) == set(COMPUTED) | set(REFUSED)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^the config has .*{REFUSED[name]}.*; supported: "):
        MlaConfig.from_hugging_face(FOUND[name])


@pytest.mark.parametrize("name", COMPUTED)
def test_computed(name: str) -> None:
    """The outputs of every attention module in fp32, from its configuration and its state_dict as they are."""
    MlaConfig.from_hugging_face(FOUND[name])
    model, seen = make(COMPUTED[name], rms_norm_eps=1e-6), []  # transformers' norms of latents have this one, whatever is configured
    attentions = [module for module in model.modules() if hasattr(module, "kv_b_proj")]
    for module in attentions:
        module.register_forward_hook(
            lambda module, args, given, out: seen.append((module, given["hidden_states"], out[0])), with_kwargs=True
        )
    ids, _ = tokens(40)
    with torch.no_grad():
        model(ids, use_cache=False)
    assert len(seen) == len(attentions) > 0
    for module, hidden, out in seen:
        config = MlaConfig.from_hugging_face(module.config.to_dict())
        layer = MlaAttention(config, MlaWeights.from_tensors(module.state_dict(), config))
        found = layer(hidden[0], None, plan_sequences([40], "cpu"))
        torch.testing.assert_close(found, out[0], rtol=0, atol=1e-5 * float(out.abs().max()))
