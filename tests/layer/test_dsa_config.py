"""Configurations and weights of indexers by Hugging Face's keys and names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_mla.layer import Indexer, IndexerConfig, IndexerWeights, MlaAttention, MlaConfig, MlaWeights, load_indexer_weights
from cute_mla.layer.indexer_config import IndexerType
from cute_mla.layer.rope import Rotation
from tests.layer.dsa_models import GLM_5_2, V3_2, indexer_checkpoint, short_topk
from tests.layer.mla_models import GLM_5, GLM_5_3_FLASH, MISTRAL_SMALL_4, PREFIX, V2_LITE, V3, reduced
from tests.layer.mla_steps import Sequences


def config_of(config: dict[str, Any]) -> IndexerConfig:
    """Return the indexer of a configuration."""
    indexer = MlaConfig.from_hugging_face(config).indexer
    assert indexer is not None
    return indexer


def test_which_models_have_an_indexer() -> None:
    assert MlaConfig.from_hugging_face(V3).indexer is None
    assert MlaConfig.from_hugging_face(V2_LITE).indexer is None
    assert config_of(V3_2) == IndexerConfig(2048, 64, rope_interleave=False)
    assert config_of(GLM_5) == IndexerConfig(2048, 32, rope_interleave=True)
    assert config_of(GLM_5_3_FLASH).key_pool == 16


def test_a_pairing_that_only_the_model_type_tells() -> None:
    """GlmMoeDsaConfig of transformers does not write indexer_rope_interleave."""
    plain = {key: value for key, value in GLM_5.items() if key != "indexer_rope_interleave"}
    assert config_of({**plain, "model_type": "glm_moe_dsa"}).rope_interleave
    assert not config_of({**plain, "model_type": "deepseek_v32"}).rope_interleave
    assert not config_of({**GLM_5, "model_type": "glm_moe_dsa", "indexer_rope_interleave": False}).rope_interleave


def full_layers(config: dict[str, Any], layers: int = 12) -> list[int]:
    """Return the layers with an indexer of their own."""
    own = config_of(config)
    return [layer for layer in range(layers) if own.is_full(layer)]


def test_which_layers_share() -> None:
    """By frequency, layers 0 and 1, then every fourth behind layer 1 (index_skip_topk_offset 2); by a pattern or a list, as it says."""
    assert full_layers(V3_2) == list(range(12))
    assert full_layers(GLM_5_2) == [0, 1, 5, 9]
    assert full_layers({**GLM_5_2, "index_skip_topk_offset": 4}) == [0, 1, 2, 3, 7, 11]
    assert full_layers({**GLM_5_2, "index_topk_pattern": "FSSFFS"}, 6) == [0, 3, 4]
    types: list[IndexerType] = ["full", "shared", "full"]
    assert full_layers({**GLM_5_2, "index_topk_pattern": "FFF", "indexer_types": types}, 3) == [0, 2]
    assert config_of({**GLM_5_2, "indexer_types": types}).is_full(3)  # behind the last: a layer that drafts
    assert config_of(GLM_5_2).is_full(78)
    assert not config_of(GLM_5_2).is_full(76)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index_topk": 0}, "index_topk is 0; supported: an integer, 1 to 1073741824"),
        ({"index_n_heads": 65}, "index_n_heads is 65; supported: an integer, 1 to 64"),
        ({"index_n_heads": None}, "the config has index_topk and no index_n_heads; supported: the configs of DeepSeek-V3.2"),
        ({"index_head_dim": 64}, "index_head_dim is 64; supported: 128"),
        ({"indexer_rope_interleave": 1}, "indexer_rope_interleave is 1; supported: True and False"),
        ({"indexer_types": ["full", "half"]}, r"indexer_types is \['full', 'half'\]; supported: for each layer full or shared"),
        ({"index_topk_pattern": "FX"}, "index_topk_pattern is 'FX'; supported"),
        ({"index_topk_pattern": "SF"}, "layer 0 shares the keys of an indexer, and there is none before it; supported: full"),
        ({"index_topk_freq": -1}, "index_topk_freq is -1; supported: an integer, 1 or more"),
        ({"index_topk_freq": 4}, "num_hidden_layers is None; supported: an integer, 1 to 65536"),
        ({"index_topk_freq": 4, "num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; supported: an integer, 1 to 65536"),
    ],
)
def test_what_a_config_may_not_say(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MlaConfig.from_hugging_face({**V3_2, **change})


def test_indexers_that_are_not_supported() -> None:
    for model, message in (
        ({**V2_LITE, "index_topk": 9, "index_n_heads": 4}, "q_lora_rank is None with an indexer; supported: an integer"),
        (
            {**MISTRAL_SMALL_4, "index_topk": 9, "index_n_heads": 4},
            "kv_lora_rank is 256 and qk_rope_head_dim 64 with an indexer; supported: 512 and 64, 512 and 0",
        ),
        (V3, "the config has no indexer; supported: configs with index_topk"),
    ):
        with pytest.raises(ValueError, match=message):
            IndexerWeights.from_tensors({}, MlaConfig.from_hugging_face(model))


def test_beyond_topk_without_an_indexer_is_refused() -> None:
    """GLM-5.3-Flash: up to index_topk keys a layer attends to all, and not to more."""
    sequences = Sequences.drawn({**GLM_5_3_FLASH, "index_topk": 32}, [33])
    part = replace(sequences, hidden=(sequences.hidden[0][:32],))
    part.expect(part.step([0], 0), part.expected([0]))
    with pytest.raises(ValueError, match=r"the layer has no indexer, and batch\.selection is empty"):
        sequences.step([32], 1)


def test_weights_by_name(tmp_path: Path) -> None:
    """From a file, in bf16 but for what is multiplied in fp32; e4m3 weights by the scales of their blocks; None where a layer shares."""
    safetensors = pytest.importorskip("safetensors.torch")
    raw = short_topk(reduced({**GLM_5_2, "indexer_types": ["full", "shared"]}))
    config = MlaConfig.from_hugging_face(raw)
    tensors = indexer_checkpoint(raw)
    name = f"{PREFIX}indexer.wk.weight"
    codes, scales = tensors[name].to(torch.float8_e4m3fn), torch.tensor([[0.5]])
    safetensors.save_file({**tensors, name: codes, f"{name}_scale_inv": scales}, tmp_path / "model.safetensors")
    weights = load_indexer_weights(tmp_path, 0, config)
    assert weights is not None
    assert torch.equal(weights.wk, (codes.float() * 0.5).bfloat16())
    assert torch.equal(weights.wq_b, tensors[f"{PREFIX}indexer.wq_b.weight"].bfloat16())
    for field, stored in (("k_norm", "k_norm.weight"), ("k_norm_bias", "k_norm.bias"), ("weights_proj", "weights_proj.weight")):
        assert getattr(weights, field).dtype == torch.float32
        assert torch.equal(getattr(weights, field), tensors[f"{PREFIX}indexer.{stored}"])
    assert load_indexer_weights(tmp_path, 1, config) is None
    assert load_indexer_weights(tmp_path, 0, MlaConfig.from_hugging_face(reduced(V3))) is None
    assert "wq_b=<bfloat16 [512, 2048] on cpu>" in repr(weights)


@pytest.mark.parametrize("missing", ["wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight"])
def test_weights_that_are_missing_or_of_another_shape(missing: str) -> None:
    raw = short_topk(reduced(V3_2))
    tensors, full = indexer_checkpoint(raw), f"{PREFIX}indexer.{missing}"
    with pytest.raises(ValueError, match=f"{full} has shape .*; supported with this config"):
        IndexerWeights.from_tensors({**tensors, full: torch.zeros(3)}, MlaConfig.from_hugging_face(raw), prefix=PREFIX)
    del tensors[full]
    with pytest.raises(ValueError, match=f"there is no {full}; supported: a checkpoint with all weights"):
        IndexerWeights.from_tensors(tensors, MlaConfig.from_hugging_face(raw), prefix=PREFIX)


def test_weights_that_nobody_reads() -> None:
    raw = short_topk(reduced(V3_2))
    tensors = indexer_checkpoint(raw) | {f"{PREFIX}indexer.q_input_norm.weight": torch.ones(96)}
    with pytest.raises(ValueError, match=r"no use for .*indexer\.q_input_norm\.weight; supported with this config: wq_b, wk, k_norm"):
        IndexerWeights.from_tensors(tensors, MlaConfig.from_hugging_face(raw), prefix=PREFIX)


def test_the_indexer_is_part_of_the_layer() -> None:
    raw = short_topk(reduced(GLM_5))
    config, tensors = MlaConfig.from_hugging_face(raw), indexer_checkpoint(raw)
    indexer = Indexer(config, IndexerWeights.from_tensors(tensors, config, prefix=PREFIX))
    layer = MlaAttention(config, MlaWeights.from_tensors(tensors, config, prefix=PREFIX), indexer)
    assert {name for name in layer.state_dict() if name.startswith("indexer.")} == {
        f"indexer.{name}" for name in ("wq_b", "wk", "k_norm", "k_norm_bias", "weights_proj")
    }
    assert repr(indexer) == "Indexer(heads=4, rope='interleaved')"
    dense = MlaConfig.from_hugging_face(reduced({key: value for key, value in GLM_5.items() if key != "index_topk"}))
    with pytest.raises(ValueError, match="an indexer is given, and the config has none; supported: configs with index_topk"):
        MlaAttention(dense, layer.weights, indexer)


def test_columns_and_norm_of_hy4() -> None:
    """The last 64 columns are rotated: they come first in the layer. The eps of the norm shrinks keys of variance 1 to 1 / sqrt(1 + 3)."""
    raw = short_topk(reduced({**GLM_5, "model_type": "hy_v4", "learnable_sink_init": 0.0}))
    config, tensors = MlaConfig.from_hugging_face(raw), indexer_checkpoint(raw)
    assert config.indexer is not None
    weights = IndexerWeights.from_tensors(tensors, config, prefix=PREFIX)
    wk = tensors[f"{PREFIX}indexer.wk.weight"]
    assert torch.equal(weights.wk, torch.cat((wk[64:], wk[:64])))
    returned = weights.to_tensors(config)
    assert all(torch.equal(weight.float(), tensors[f"{PREFIX}{name}"].float()) for name, weight in returned.items())
    keys, still = torch.randn(3, 128, generator=torch.Generator().manual_seed(1)), Rotation(torch.ones(3, 32), torch.zeros(3, 32))
    keys = torch.nn.functional.layer_norm(keys, (128,))
    plain = replace(weights, k_norm=torch.ones(128), k_norm_bias=torch.zeros(128))
    scales = [
        Indexer(replace(config, indexer=replace(config.indexer, norm_eps=eps)), plain).rows(keys.bfloat16(), still).scales
        for eps in (1e-6, 3.0)
    ]
    torch.testing.assert_close(scales[1], scales[0] / 2, rtol=0.01, atol=0)


def test_eps_of_the_norm_of_keys() -> None:
    for eps in (0.0, -1e-6, float("nan"), None):
        with pytest.raises(ValueError, match=r"norm_eps is .*; supported: a positive finite number"):
            IndexerConfig(topk=2048, heads=32, norm_eps=eps)  # type: ignore[arg-type]
