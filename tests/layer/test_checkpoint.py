"""Files of checkpoints: the index decides where a tensor lies; what is damaged or leads elsewhere is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cute_mla.layer import MlaConfig, load_weights
from tests.layer.mla_models import PREFIX, V3, checkpoint, reduced

SMALL = reduced(V3, hidden=24, heads=2)
CONFIG = MlaConfig.from_hugging_face(SMALL)
TENSORS = checkpoint(SMALL, torch.bfloat16)


def write_index(folder: Path, content: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(content if isinstance(content, str) else json.dumps(content))


def test_the_index_decides(tmp_path: Path) -> None:
    """Take a tensor in two files from the one that the index names, not from the last by name."""
    save_file(TENSORS, tmp_path / "a.safetensors")
    save_file({name: tensor + 1 for name, tensor in TENSORS.items()}, tmp_path / "b.safetensors")
    write_index(tmp_path, {"weight_map": {name: "b.safetensors" if "o_proj" in name else "a.safetensors" for name in TENSORS}})
    read = load_weights(tmp_path, 0, CONFIG)
    assert torch.equal(read.o, TENSORS[f"{PREFIX}o_proj.weight"] + 1)
    assert torch.equal(read.kv_b, TENSORS[f"{PREFIX}kv_b_proj.weight"])


@pytest.mark.parametrize("model", ["language_model.model.", "model.language_model."])
def test_multimodal_models(model: str, tmp_path: Path) -> None:
    renamed = {name.replace("model.", model, 1).replace("layers.0", "layers.7"): tensor for name, tensor in TENSORS.items()}
    save_file({**renamed, "vision_tower.layers.7.self_attn.q_proj.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert torch.equal(load_weights(tmp_path, 7, CONFIG).o, TENSORS[f"{PREFIX}o_proj.weight"])
    save_file({**renamed, "model.layers.7.self_attn.o_proj.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"tensors named model\.layers\.7\.self_attn\.\* and {model}layers.*; supported: one model"):
        load_weights(tmp_path, 7, CONFIG)


@pytest.mark.parametrize(
    "index",
    ["{", "[" * 100_000, "\udcff", [], {}, {"weight_map": [1]}, {"weight_map": {f"{PREFIX}o_proj.weight": 3}}]
    + [
        {"weight_map": {f"{PREFIX}o_proj.weight": file}}
        for file in ("../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", "")
    ],
)
def test_an_index_that_is_damaged_or_leads_elsewhere(index: Any, tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    (tmp_path / "in").mkdir()
    if index == "\udcff":
        (tmp_path / "in" / "model.safetensors.index.json").write_bytes(b"\xff")
    else:
        write_index(tmp_path / "in", index)
    with pytest.raises(ValueError, match=r"index\.json (is not JSON|has no weight_map from names to files beside it).*; supported: the"):
        load_weights(tmp_path / "in", 0, CONFIG)


def test_files_that_are_damaged_or_hold_something_else(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file(TENSORS, file)
    whole = file.read_bytes()
    names = [*TENSORS, f"{PREFIX}g_proj.weight"]
    write_index(tmp_path, {"weight_map": dict.fromkeys(names, "a.safetensors")})
    for content in (whole[:-1], b"", b"not safetensors", b"\xff" * 64, whole):  # the last: g_proj is not in it
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.safetensors is damaged: .*; supported: whole safetensors files"):
            load_weights(tmp_path, 0, CONFIG)
    file.unlink()
    with pytest.raises(FileNotFoundError, match="no such file of weights"):
        load_weights(tmp_path, 0, CONFIG)


@pytest.mark.parametrize("layer", [-1, "0", 1.0, None])
def test_layers_that_are_none(layer: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"layer is .*; supported: an integer, 0 or more"):
        load_weights(tmp_path, layer, CONFIG)
