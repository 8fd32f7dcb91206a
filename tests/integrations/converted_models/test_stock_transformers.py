"""Converted checkpoints in stock transformers: they load, compute and generate as their originals, and are patched like other models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from cute_mla.convert import convert_checkpoint
from cute_mla.integrations.transformers import patch
from tests.convert.models import LLAMA, LLAMA3_ROPE, QWEN2, TOKENS, logits, read_checkpoint

ROPE = {"rope_type": "default", "rope_theta": 1e4}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "rope_parameters": ROPE},
    "llama3": {**LLAMA, "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 1e4}},
    "llama_biases": {**LLAMA, "attention_bias": True, "rope_parameters": ROPE},
    "qwen2": {**QWEN2, "rope_parameters": ROPE},
}


def original(name: str, folder: Path) -> PreTrainedModel:
    """Save a random model of transformers, and return it in evaluation mode."""
    given = {key: value for key, value in MODELS[name].items() if key not in ("architectures", "model_type", "rope_theta")}
    kind = MODELS[name]["architectures"][0].removesuffix("ForCausalLM")
    config = getattr(transformers, f"{kind}Config")(**given)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
        for weight in (
            each for parameter, each in model.named_parameters() if parameter.endswith((".bias", "q_proj.weight", "k_proj.weight"))
        ):
            torch.nn.init.normal_(weight, std=0.25)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_generation(name: str, tmp_path: Path) -> None:
    model = original(name, tmp_path / "source")
    assert convert_checkpoint(tmp_path / "source", tmp_path / "out", calibration=TOKENS).exact
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(converted).__name__ == "DeepseekV3ForCausalLM"
    expected = logits(tmp_path / "source", TOKENS, torch.float64)
    with torch.no_grad():
        errors = [float((each(TOKENS).logits.double() - expected).abs().max()) for each in (converted, model)]
    assert errors[0] < 2 * errors[1] + 1e-6 * float(expected.abs().max())
    options = {"max_new_tokens": 12, "do_sample": False}
    greedy = model.generate(TOKENS, **options)
    found = converted.generate(TOKENS, return_dict_in_generate=True, **options)
    assert torch.equal(found.sequences, greedy)
    assert torch.equal(converted.generate(TOKENS, use_cache=False, **options), greedy)
    held = found.past_key_values.layers[0]
    assert held.keys.shape[-1] + held.values.shape[-1] == 576
    assert patch(converted) == 2
    assert torch.equal(converted.generate(TOKENS, **options), greedy)


def test_all_weights_are_read(tmp_path: Path) -> None:
    """No weight of the checkpoint is left over, and none is missing."""
    original("qwen2", tmp_path / "source")
    convert_checkpoint(tmp_path / "source", tmp_path / "out")
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    _, weights = read_checkpoint(tmp_path / "out")
    assert torch.equal(model.model.layers[1].self_attn.kv_a_proj_with_mqa.bias, weights["model.layers.1.self_attn.kv_a_proj_with_mqa.bias"])
