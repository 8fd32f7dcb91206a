"""Weights by Hugging Face's names, from state dicts and files: whole, sharded, quantised, and what is refused."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cute_mla.layer import MlaConfig, MlaWeights, Shard, load_weights
from tests.layer.mla_models import MODELS, PREFIX, V2_LITE, V3, Columns, checkpoint, reduced

SMALL = reduced(V3, hidden=24, heads=4) | {"q_lora_rank": 40}
CONFIG = MlaConfig.from_hugging_face(SMALL)


def same(one: MlaWeights, other: MlaWeights) -> bool:
    """Return whether all weights are equal, in dtype too."""
    pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in fields(MlaWeights)]
    return all(a is b if a is None or b is None else a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("model", MODELS)
def test_shapes(model: str) -> None:
    config = MlaConfig.from_hugging_face(reduced(MODELS[model], hidden=24, heads=4))
    weights = MlaWeights.from_tensors(checkpoint(reduced(MODELS[model], hidden=24, heads=4)), config, prefix=PREFIX)
    assert weights.heads(config) == 4
    assert (weights.q_a is None) == (weights.q_a_norm is None) == (model == "v2_lite")
    columns = Columns.of(MODELS[model])
    assert weights.q_b.shape == (4 * (columns.nope + columns.rotary), 24 if model == "v2_lite" else MODELS[model]["q_lora_rank"])
    assert weights.kv_a is not None
    assert weights.kv_a.shape == (columns.latent + columns.rotary, 24)
    assert weights.kv_b.shape == (4 * (columns.nope + columns.v), columns.latent)


def test_a_rank_holds_its_heads() -> None:
    tensors = checkpoint(SMALL)
    weights = MlaWeights.from_tensors(tensors, CONFIG, shard=Shard(1, 2), prefix=PREFIX)
    assert weights.heads(CONFIG) == 2
    assert torch.equal(weights.q_b, tensors[f"{PREFIX}q_b_proj.weight"][384:])
    assert torch.equal(weights.kv_b, tensors[f"{PREFIX}kv_b_proj.weight"][512:])
    assert torch.equal(weights.o, tensors[f"{PREFIX}o_proj.weight"][:, 256:])
    assert weights.kv_a is not None
    assert torch.equal(weights.kv_a, tensors[f"{PREFIX}kv_a_proj_with_mqa.weight"])
    for weight in (weights.q_b, weights.kv_b, weights.o):
        assert weight.is_contiguous()
        assert weight.untyped_storage().nbytes() == weight.nbytes


def test_biases_of_halves_and_of_ranks() -> None:
    """The rotary part of kv_a's bias is reordered as its rows are; only the first rank adds o's bias."""
    biased = SMALL | {"attention_bias": True, "rope_interleave": False}
    tensors, config = checkpoint(biased), MlaConfig.from_hugging_face(biased)
    first, second = (MlaWeights.from_tensors(tensors, config, shard=Shard(rank, 2), prefix=PREFIX) for rank in range(2))
    bias = tensors[f"{PREFIX}kv_a_proj_with_mqa.bias"]
    for weights in (first, second):
        assert weights.kv_a_bias is not None
        assert weights.q_a_bias is not None
        assert torch.equal(weights.kv_a_bias[:512], bias[:512])
        assert torch.equal(weights.kv_a_bias[512:].view(32, 2).T.flatten(), bias[512:])
        assert torch.equal(weights.q_a_bias, tensors[f"{PREFIX}q_a_proj.bias"])
    assert first.o_bias is not None
    assert torch.equal(first.o_bias, tensors[f"{PREFIX}o_proj.bias"])
    assert second.o_bias is None
    del tensors[f"{PREFIX}o_proj.bias"]
    with pytest.raises(ValueError, match=r"there is no model\.layers\.0\.self_attn\.o_proj\.bias"):
        MlaWeights.from_tensors(tensors, config, prefix=PREFIX)


@pytest.mark.parametrize("layout", ["file", "folder", "index"])
def test_safetensors(tmp_path: Path, layout: str) -> None:
    own = checkpoint(SMALL, torch.bfloat16)
    second = {name.replace("layers.0.", "layers.1."): tensor + 1 for name, tensor in own.items()}
    both = own | second | {"model.layers.10.self_attn.o_proj.weight": torch.zeros(1)}
    if layout == "index":
        names = sorted(both)
        parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, held in parts.items():
            save_file({name: both[name] for name in held}, tmp_path / file)
        places = {name: file for file, held in parts.items() for name in held}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    else:
        save_file(both, tmp_path / "model.safetensors")
    path = tmp_path / "model.safetensors" if layout == "file" else tmp_path
    assert same(load_weights(path, 0, CONFIG), MlaWeights.from_tensors(own, CONFIG, prefix=PREFIX))
    shard = Shard(3, 4)
    expected = MlaWeights.from_tensors(second, CONFIG, shard=shard, prefix="model.layers.1.self_attn.").to(dtype=torch.float16)
    assert same(load_weights(str(path), 1, CONFIG, shard=shard, dtype=torch.float16), expected)


def test_without_safetensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ModuleNotFoundError, match=r"the package safetensors, which is not installed: pip install 'cute-mla\[weights\]'"):
        load_weights("anywhere", 0, CONFIG)


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_weights(tmp_path, 0, CONFIG)


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight in e4m3, and a scale of each 128 rows and columns."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    scales = 0.5 + torch.rand(rows, columns, generator=torch.Generator().manual_seed(1))
    return weight.to(torch.float8_e4m3fn), scales


def test_weights_in_e4m3() -> None:
    """Weights in the layout of DeepSeek-V3's own checkpoint: blocks end with a matrix, not with a head."""
    tensors = checkpoint(SMALL)
    name = f"{PREFIX}q_b_proj.weight"
    tensors[name], scales = quantised(tensors[name])
    tensors[f"{name}_scale_inv"] = scales
    weights = MlaWeights.from_tensors(tensors, CONFIG, shard=Shard(1, 2), prefix=PREFIX)
    assert weights.q_b.dtype == torch.bfloat16
    for row, column in [(0, 0), (127, 39), (128, 0), (383, 39)]:
        wanted = tensors[name][384 + row, column].float() * scales[(384 + row) // 128, 0]
        assert weights.q_b[row, column] == wanted.bfloat16()


@pytest.mark.parametrize(
    ("suffix", "scales"),
    [
        ("weight_scale_inv", torch.tensor(0.25)),
        ("weight_scale", torch.tensor([0.25], dtype=torch.bfloat16)),
        ("weight_scale_inv", torch.full((1, 4), 125, dtype=torch.uint8).view(torch.float8_e8m0fnu)),
    ],
)
def test_scales_in_e4m3(suffix: str, scales: Tensor) -> None:
    """One scale of a whole weight, as in Mistral Small 4, and scales of blocks that are exponents: 2 ** (125 - 127)."""
    tensors = checkpoint(SMALL)
    name = f"{PREFIX}o_proj"
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].to(torch.float8_e4m3fn)
    others = {
        f"{PREFIX}k_scale": torch.ones(1),
        f"{name}.{suffix}": scales,
        f"{name}.activation_scale": torch.ones(1),
        f"{PREFIX}rotary_emb.inv_freq": torch.ones(32),
    }
    found = MlaWeights.from_tensors({**tensors, **others}, CONFIG, prefix=PREFIX)
    assert torch.equal(found.o, (tensors[f"{name}.weight"].float() / 4).bfloat16())


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        ({}, r"o_proj\.weight is in e4m3 with no scales; supported: weight_scale_inv or weight_scale"),
        (
            {"weight_scale": torch.ones(1), "weight_scale_inv": torch.ones(1)},
            "in e4m3 with .*weight_scale_inv and .*weight_scale; supported",
        ),
        (
            {"weight_scale_inv": torch.full((1, 4), 121, dtype=torch.uint8)},
            r"dtype torch\.uint8; .*float8_e8m0fnu\. Bytes that are exponents",
        ),
        ({"weight_scale": torch.ones(1, dtype=torch.int32)}, r"weight_scale has dtype torch\.int32; supported: torch\.bfloat16"),
        ({"weight_scale": torch.ones(24, 1)}, r"weight_scale has shape \[24, 1\]; supported beside \[24, 512\] in e4m3: \[1, 4\] or one"),
    ],
)
def test_scales_that_are_refused(scales: dict[str, Tensor], message: str) -> None:
    tensors = checkpoint(SMALL)
    name = f"{PREFIX}o_proj"
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=message):
        MlaWeights.from_tensors(tensors | {f"{name}.{suffix}": scale for suffix, scale in scales.items()}, CONFIG, prefix=PREFIX)


@pytest.mark.parametrize(
    "name",
    [
        *("g_proj.weight", "q_b_proj.lora_A.default.weight", "o_proj.bias", "q_b_proj.bias", "q_norm.weight", "sinks", "q_proj.weight"),
        *("kv_b_proj.output_scale", "indexer.wk.weight", "o_proj.bias.weight_scale"),
    ],
)
def test_tensors_that_nobody_reads(name: str) -> None:
    with pytest.raises(ValueError, match=rf"the layer has no use for {PREFIX}{name}; supported with this config: q_b_proj, "):
        MlaWeights.from_tensors(checkpoint(SMALL) | {PREFIX + name: torch.zeros(1)}, CONFIG, prefix=PREFIX)


def test_scales_of_what_is_not_quantised() -> None:
    with pytest.raises(
        ValueError, match=r"o_proj\.weight has dtype torch\.float32 and .*o_proj\.weight_scale_inv; supported with scales: .*e4m3"
    ):
        MlaWeights.from_tensors(checkpoint(SMALL) | {f"{PREFIX}o_proj.weight_scale_inv": torch.ones(1)}, CONFIG, prefix=PREFIX)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("o_proj", None, r"there is no model\.layers\.0\.self_attn\.o_proj\.weight"),
        ("kv_b_proj", torch.zeros(1024, 511), r"kv_b_proj\.weight has shape \[1024, 511\]; supported with this config: \[1024, 512\]"),
        ("q_a_layernorm", torch.zeros(40, dtype=torch.int8), r"q_a_layernorm\.weight has dtype torch\.int8; supported: torch\.bfloat16"),
    ],
)
def test_checkpoints_that_are_refused(name: str, tensor: Tensor | None, message: str) -> None:
    tensors = checkpoint(SMALL)
    if tensor is None:
        del tensors[f"{PREFIX}{name}.weight"]
    else:
        tensors[f"{PREFIX}{name}.weight"] = tensor
    with pytest.raises(ValueError, match=message):
        MlaWeights.from_tensors(tensors, CONFIG, prefix=PREFIX)


def test_a_checkpoint_of_the_other_kind() -> None:
    with pytest.raises(ValueError, match=r"there is no model\.layers\.0\.self_attn\.q_b_proj\.weight"):
        MlaWeights.from_tensors(checkpoint(reduced(V2_LITE, 24, 4)), CONFIG, prefix=PREFIX)


def test_ranks_that_are_refused() -> None:
    with pytest.raises(ValueError, match="rank is 2; supported: an integer, 0 to 1"):
        Shard(2, 2)
    for rank, world, name in ((0, 0, "world"), (0, 2.0, "world"), ("0", 2, "rank"), (True, 2, "rank"), (0, None, "world")):
        with pytest.raises(ValueError, match=rf"^{name} is .*; supported: an integer"):
            Shard(rank, world)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="4 heads on 3 ranks; supported: a divisor of the number of heads"):
        MlaWeights.from_tensors(checkpoint(SMALL), CONFIG, shard=Shard(0, 3), prefix=PREFIX)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("interleave", [True, False])
def test_tensors_come_back(model: str, interleave: bool) -> None:
    """Under their names, and their rows in the order of the checkpoint."""
    raw = {**reduced(MODELS[model], hidden=24, heads=4), "attention_bias": True, "rope_interleave": interleave}
    config, tensors = MlaConfig.from_hugging_face(raw), checkpoint(raw)
    gate = "gate_proj" if config.attention_sinks else "g_proj"  # beside sinks the gate has the name that it has in Hy4
    found = MlaWeights.from_tensors(tensors, config, prefix=PREFIX).to_tensors(config)
    expected = {name.removeprefix(PREFIX).replace("g_proj", gate): weight for name, weight in tensors.items()}
    assert found.keys() == expected.keys()
    assert [name for name, weight in found.items() if not torch.equal(weight, expected[name])] == []


def test_sinks_stay_in_fp32() -> None:
    raw = reduced(MODELS["scaled_gated"], hidden=24, heads=4)
    weights = MlaWeights.from_tensors(checkpoint(raw), MlaConfig.from_hugging_face(raw), prefix=PREFIX).to(dtype=torch.bfloat16)
    assert weights.sinks is not None
    assert (weights.q_b.dtype, weights.sinks.dtype) == (torch.bfloat16, torch.float32)
