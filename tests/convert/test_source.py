"""Checkpoints that cannot be converted: each is refused before anything is written, with the reason."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cute_mla.convert import ConvertOptions, convert_checkpoint
from cute_mla.convert.source import SourceCheckpoint, SourceConfig
from cute_mla.layer import Llama3Scaling
from tests.convert.models import LLAMA, LLAMA3_ROPE, QWEN2, TOKENS, Weights, random_weights, write_checkpoint

GQA = {**LLAMA, "num_attention_heads": 6, "num_key_value_heads": 2}
WIDE = {**LLAMA, "head_dim": 128}


def test_configs_of_three_models() -> None:
    llama = SourceConfig.from_hugging_face({**LLAMA, "head_dim": None, "num_key_value_heads": None, "sliding_window": 4096})
    assert (llama.head_dim, llama.num_key_value_heads, llama.biases, llama.rope_theta) == (64, 3, (), 1e4)
    newer = {key: value for key, value in QWEN2.items() if key != "rope_theta"}
    newer |= {"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 5e5}, "use_sliding_window": False, "sliding_window": 4096}
    qwen2 = SourceConfig.from_hugging_face(newer)
    assert (qwen2.rope_theta, qwen2.rope_scaling, qwen2.biases) == (5e5, Llama3Scaling(8, 1, 4, 64), ("q", "k", "v"))
    mistral = SourceConfig.from_hugging_face({**LLAMA, "model_type": "mistral", "sliding_window": None})
    assert mistral.passed_on == {"bos_token_id": 1, "eos_token_id": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen3"}, "model_type is 'qwen3', which normalises queries and keys .* supported: llama, qwen2, mistral"),
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; supported: llama"),
        ({"model_type": None}, "model_type is None; supported: llama"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window of 4096; supported: attention to all keys"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 32}, "sliding_window of 32; supported: attention to all"),
        ({"model_type": ["qwen3"]}, r"model_type is \['qwen3'\]; supported: llama"),
        ({"layer_types": 2}, "sliding_window of None; supported: attention to all keys"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window of None; supported: attention to all keys"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type is 'linear'; supported: default and llama3"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'; supported: default and llama3"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "rope_scaling has no low_freq_factor"),
        ({"rope_scaling": 3}, "rope_scaling is 3; supported: a mapping"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5; supported: 1"),
        ({"rope_theta": 0}, "rope_theta is 0; supported: a positive"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; supported: a positive"),
        ({"mlp_bias": True}, "mlp_bias is True; supported: False, because the MLP of DeepSeek-V3 has no biases"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
        ({"quantization_config": {"bits": 4}}, "the config has a quantization_config; supported: weights in bf16"),
        ({"head_dim": 80}, "head_dim is 80; supported: 64 and 128"),
        (
            {"num_attention_heads": 4, "num_key_value_heads": 3},
            "num_attention_heads is 4 with num_key_value_heads 3; supported: a multiple",
        ),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4; supported: an integer, 1 to 3"),
        ({"hidden_size": "192"}, "hidden_size is '192'; supported: an integer, 1 or more"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1; supported: an integer, 1 to 65536"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; supported: an integer, 1 to 65536"),
        ({"num_hidden_layers": "x"}, "num_hidden_layers is 'x'; supported: an integer, 1 to 65536"),
        ({"vocab_size": 0}, "vocab_size is 0; supported: an integer, 1 or more"),
    ],
)
def test_configs_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SourceConfig.from_hugging_face({**LLAMA, **change})


def test_configs_that_are_none() -> None:
    with pytest.raises(ValueError, match="config is 3; supported: a mapping"):
        SourceConfig.from_hugging_face(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the config has no intermediate_size, rms_norm_eps; supported"):
        SourceConfig.from_hugging_face({key: value for key, value in LLAMA.items() if key not in ("intermediate_size", "rms_norm_eps")})


def without(name: str) -> Callable[[Weights], None]:
    def edit(weights: Weights) -> None:
        del weights[name]

    return edit


def replaced(name: str, weight: torch.Tensor) -> Callable[[Weights], None]:
    def edit(weights: Weights) -> None:
        weights[name] = weight

    return edit


FIRST = "model.layers.0.self_attn."


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (without(f"{FIRST}k_proj.weight"), r"there is no model\.layers\.0\.self_attn\.k_proj\.weight; supported"),
        (without("lm_head.weight"), r"there is no lm_head\.weight; supported"),
        (replaced(f"{FIRST}k_proj.bias", torch.zeros(64)), r"the config knows no model\.layers\.0\.self_attn\.k_proj\.bias; supported"),
        (replaced("model.layers.2.mlp.up_proj.weight", torch.zeros(1)), r"the config knows no model\.layers\.2\.mlp\.up_proj\.weight"),
        (replaced(f"{FIRST}q_norm.weight", torch.zeros(64)), r"knows no .*q_norm\.weight; a model with q_norm and k_norm normalises"),
        (replaced("model.norm.weight", torch.zeros(191)), r"model\.norm\.weight has shape \[191\]; supported with this config: \[192\]"),
        (replaced("model.norm.weight", torch.full((192,), float("nan"))), r"model\.norm\.weight has values that are not finite"),
        (replaced(f"{FIRST}v_proj.weight", torch.full((64, 192), float("inf"))), r"v_proj\.weight has values that are not finite"),
    ],
)
def test_weights_that_are_refused(edit: Callable[[Weights], None], message: str, tmp_path: Path) -> None:
    weights = random_weights(LLAMA)
    edit(weights)
    source = write_checkpoint(tmp_path / "source", LLAMA, weights)
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_ignored(tmp_path: Path) -> None:
    """Old checkpoints hold the frequencies; some with a tied head hold it nevertheless."""
    tied = {**LLAMA, "tie_word_embeddings": True}
    weights = random_weights(tied) | {f"{FIRST}rotary_emb.inv_freq": torch.ones(32), "lm_head.weight": torch.ones(97, 192)}
    assert SourceCheckpoint.open(write_checkpoint(tmp_path / "source", tied, weights)).dtype == torch.float64


def test_the_index_decides(tmp_path: Path) -> None:
    """Take a weight in two files from the one that the index names, not from the last by name."""
    weights = random_weights(LLAMA)
    source = write_checkpoint(tmp_path / "source", LLAMA, weights)
    save_file({name: weight + 1 for name, weight in weights.items()}, source / "z.safetensors")
    places = {name: "z.safetensors" if name == "lm_head.weight" else "model.safetensors" for name in weights}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    read = SourceCheckpoint.open(source).outer()
    assert torch.equal(read["lm_head.weight"], weights["lm_head.weight"] + 1)
    assert torch.equal(read["model.norm.weight"], weights["model.norm.weight"])


def test_integer_weights(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", LLAMA, random_weights(LLAMA), torch.int8)
    with pytest.raises(ValueError, match="has dtype I8; supported: BF16, F16, F32, F64"):
        SourceCheckpoint.open(source)


def test_fp16_underflows(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", LLAMA, random_weights(LLAMA), torch.float16)
    with pytest.raises(ValueError, match=r"fp16, where the scale 2\^-32 of the latent underflows; supported: dtype 'bf16' or 'fp32'"):
        convert_checkpoint(source, tmp_path / "out")
    assert convert_checkpoint(source, tmp_path / "out", ConvertOptions(dtype="bf16")).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", "config.json is not JSON"),
        ("model.safetensors", "nothing", "model.safetensors is damaged"),
        ("model.safetensors.index.json", "[]", "index.json has no weight_map"),
        ("model.safetensors.index.json", json.dumps({"weight_map": {"a": "../a.safetensors"}}), "index.json has no weight_map"),
    ],
)
def test_damaged_files(file: str, content: str, message: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", LLAMA, random_weights(LLAMA))
    (source / file).write_text(content)
    with pytest.raises(ValueError, match=message):
        SourceCheckpoint.open(source)


def test_files_that_are_cut_or_gone(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", LLAMA, random_weights(LLAMA))
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        SourceCheckpoint.open(source)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match="no such file of weights"):
        SourceCheckpoint.open(source)
    with pytest.raises(FileNotFoundError):
        SourceCheckpoint.open(tmp_path)


def test_without_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_checkpoint(tmp_path / "source", LLAMA, random_weights(LLAMA))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ModuleNotFoundError, match=r"package safetensors, which is not installed: pip install 'cute-mla\[weights\]'"):
        SourceCheckpoint.open(source)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "absorb"}, "method is 'absorb'; supported: transmla, mha2mla"),
        ({"rank": 0}, "rank is 0; supported: an integer, 1 to 512"),
        ({"rank": 513}, "rank is 513; supported: an integer, 1 to 512"),
        ({"rank": 64.0}, "rank is 64.0; supported: an integer"),
        ({"dtype": "fp16"}, "dtype is 'fp16'; supported: source, bf16, fp32"),
        ({"fold": 0}, "fold is 0; supported: an integer, 1 or more"),
        ({"attenuation": -1}, "attenuation is -1; supported: a number, 0 or more"),
        ({"attenuation": float("inf")}, "attenuation is inf; supported: a number"),
        ({"rotation": "quaternion"}, "rotation is 'quaternion'; supported: complex, real"),
        ({"strategy": "high"}, "strategy is 'high' with method 'transmla'; supported with the other method only"),
        ({"method": "mha2mla", "fold": 2}, "fold is 2 with method 'mha2mla'; supported with the other method only"),
        ({"method": "mha2mla", "strategy": "best"}, "strategy is 'best'; supported: 2-norm, high, low, uniform"),
        ({"method": "mha2mla", "svd": "split", "rank": 1}, "rank is 1 with svd 'split'; supported: 2 or more"),
    ],
)
def test_options_that_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ConvertOptions(**given)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (LLAMA, ConvertOptions(fold=3), "fold is 3 with head_dim 64; supported: 1, 2, 4, 8, 16, 32"),
        (WIDE, ConvertOptions(fold=128), "fold is 128 with head_dim 128; supported: 1, 2, 4, 8, 16, 32, 64"),
        (GQA, ConvertOptions(method="mha2mla", strategy="high"), "strategy is 'high' with 2 KV heads.* supported: 2-norm"),
        (GQA, ConvertOptions(method="mha2mla", strategy="low"), "strategy is 'low' with 2 KV heads.* supported: 2-norm"),
        (GQA, ConvertOptions(method="mha2mla", strategy="uniform"), "strategy is 'uniform' with 2 KV heads"),
        (WIDE, ConvertOptions(method="mha2mla", strategy="low"), "strategy is 'low' with head_dim 128; the slowest pairs"),
    ],
)
def test_options_that_a_model_refuses(config: dict[str, Any], options: ConvertOptions, message: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", config, random_weights(config))
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(source, tmp_path / "out", options)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (TOKENS.float(), r"calibration is torch\.float32 \[2, 70\]; supported: token ids"),
        (TOKENS[0], r"calibration is torch\.int64 \[70\]; supported"),
        (TOKENS[:, :1], r"\[2, 1\]; supported: token ids, int64 \[sequences, 2 or more\]"),
        (TOKENS[:0], r"\[0, 70\]; supported"),
        (TOKENS - 97, "calibration has the tokens -9[0-9] to -1; supported: 0 to 96"),
        (TOKENS + 1, "calibration has the tokens 2 to 97; supported: 0 to 96"),
    ],
)
def test_calibration_that_is_refused(tokens: torch.Tensor, message: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", LLAMA, random_weights(LLAMA))
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(source, tmp_path / "out", calibration=tokens)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
