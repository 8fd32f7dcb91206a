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

from cute_mla.cli import served_models
from cute_mla.integrations.transformers.patching import TRAITS
from cute_mla.layer import MlaAttention, MlaConfig, MlaWeights, plan_sequences
from cute_mla.layer.weights import ALPHA
from tests.integrations.transformers_models.tiny_models import MODELS, OTHERS, make, tokens

# By class of configuration, a small model with it
COMPUTED = {
    "AXK1Config": "axk1",
    "BailingHybridConfig": "ling_3",
    "DeepseekV2Config": "deepseek_v2",
    "DeepseekV3Config": "deepseek_v3",
    "DeepseekV32Config": "deepseek_v32",
    "Dots3NoteTextConfig": "dots3_note",
    "Glm4MoeLiteConfig": "glm_4_7_flash",
    "Glm5NextTextConfig": "glm_5_3_flash",
    "GlmMoeDsaConfig": "glm_5",
    "HYV4Config": "hy_v4",
    "KimiLinearConfig": "kimi_linear",
    "LongcatFlashConfig": "longcat_flash",
    "Mistral4Config": "mistral_4",
    "MistralLarge4TextConfig": "mistral_large_4",
    "SarvamMLAConfig": "sarvam_mla",
    "YoutuConfig": "youtu",
}
REFUSED = {
    "AXK2Config": "model_type is 'axk2': A.X-K2 has keys of 128 . 32 columns",
    "HYV4VLTextConfig": "model_type 'hy_v4_vl_text'",
    "MiniCPM3Config": "model_type 'minicpm3'",
}


# By row of `cute-mla show models`, a small model whose attention is compared with transformers'
EVIDENCE = dict(
    pair.split(": ")
    for pair in (
        *("DeepSeek-V2: deepseek_v2", "DeepSeek-V2-Lite: deepseek_v2_lite", "DeepSeek-V3, V3.1, R1: deepseek_v3", "Youtu: youtu"),
        *("DeepSeek-V3.2: deepseek_v32", "Kimi K2: deepseek_v3", "Kimi Linear: kimi_linear", "LongCat Flash: longcat_flash"),
        *("Ling 3: ling_3", "A.X-K1: axk1", "A.X-K2-Light: axk2_light", "Hy4: hy_v4", "GLM-4.7-Flash: glm_4_7_flash"),
        *("GLM-5, 5.1, 5.2: glm_5", "GLM-5.3-Flash: glm_5_3_flash", "Mistral Small 4: mistral_4", "DeepSeek-V4: deepseek_v4"),
        *("Mistral Large 4, 54 of 72 layers: mistral_large_4", "Mistral Large 4, 18 of 72 layers: mistral_large_4"),
        *("dots3-note, 13 of 46 layers: dots3_note", "dots3-note, 33 of 46 layers: dots3_note"),
    )
)


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


def test_the_table_claims_what_is_compared() -> None:
    """The layer in test_computed here or behind patch(), and attention in test_equal_to_eager, which takes all small models.

    What is compared with engines is so in tests/engines.
    """
    here = {model.name: model.evidence.removesuffix(served_models.ENGINE).removesuffix(", ") for model in served_models.MODELS}
    claimed = {name: evidence for name, evidence in here.items() if evidence not in ("", served_models.SIZES)}
    layers = {*COMPUTED.values(), *MODELS}
    assert claimed == {name: served_models.LAYER if small in layers else served_models.FUNCTION for name, small in EVIDENCE.items()}
    assert set(EVIDENCE.values()) <= {*MODELS, *OTHERS}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^(the config has .*)?{REFUSED[name]}.*; supported: "):
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
    batch = plan_sequences([40], "cpu")
    for module, hidden, out in seen:
        own = TRAITS.get("hy_v4.HYV4Attention") if name == "HYV4Config" else None  # pairs of columns that transformers' class alone has
        config = MlaConfig.from_hugging_face({**module.config.to_dict(), **(own.keys if own else {})}).of_layer(module.layer_idx)
        tensors = module.state_dict()
        if config.learned_frequencies:
            tensors[ALPHA] = next(each.alpha for each in model.modules() if hasattr(each, "alpha"))
        layer = MlaAttention(config, MlaWeights.from_tensors(tensors, config))
        found = layer(hidden[0], None, batch)
        torch.testing.assert_close(found, out[0], rtol=0, atol=1e-5 * float(out.abs().max()))
