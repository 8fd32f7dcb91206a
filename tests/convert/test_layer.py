"""Attention of converted checkpoints in cute_mla.layer: prefill and decode over a paged cache agree with the original's attention."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_mla
from cute_mla.convert import ConvertOptions, convert_checkpoint
from cute_mla.layer import MlaAttention, MlaConfig, load_weights, plan_batch
from tests.convert.models import LLAMA, LLAMA3_ROPE, QWEN2, grouped_attention, random_weights, read_checkpoint, write_checkpoint

PROMPT, STEPS = 65, 3
MODELS: dict[str, Mapping[str, Any]] = {
    "llama": {**LLAMA, "rms_norm_eps": 1e-5},
    "llama3": {**LLAMA, "rope_scaling": LLAMA3_ROPE},
    "qwen2": QWEN2,
}


def layer_of(config: Mapping[str, Any], folder: Path, dtype: torch.dtype, options: ConvertOptions | None = None) -> MlaAttention:
    """Convert a random model in fp32 and load its first layer."""
    source = write_checkpoint(folder / "source", config, random_weights(config), torch.float32)
    assert convert_checkpoint(source, folder / "out", options).exact
    sized = MlaConfig.from_hugging_face(read_checkpoint(folder / "out")[0])
    return MlaAttention(sized, load_weights(folder / "out", 0, sized, dtype=dtype))


def attend(layer: MlaAttention, hidden: Tensor) -> Tensor:
    """Prefill 65 tokens and decode the others one by one."""
    cache = torch.full((2, 64, 1, layer.config.key_columns), float("nan"), dtype=hidden.dtype)
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    prefill = layer(hidden[:PROMPT], cache, plan_batch([PROMPT], [0], table, 64, decodes=0))
    steps = [layer(hidden[i : i + 1], cache, plan_batch([1], [i], table, 64, decodes=1)) for i in range(PROMPT, len(hidden))]
    return torch.cat([prefill, *steps])


def expected(folder: Path, hidden: Tensor) -> Tensor:
    """Return attention of the original's first layer in fp64, scaled as the converted model's hidden states are."""
    config, weights = read_checkpoint(folder / "source")
    prefix = "model.layers.0."
    own = {name.removeprefix(prefix): weight.double() for name, weight in weights.items() if name.startswith(prefix)}
    return grouped_attention(hidden.double().unsqueeze(0), own, config)[0] * (1e-6 / config["rms_norm_eps"]) ** 0.5


@pytest.mark.parametrize("model", MODELS)
def test_in_fp32(model: str, tmp_path: Path) -> None:
    layer = layer_of(MODELS[model], tmp_path, torch.float32)
    hidden = torch.randn(PROMPT + STEPS, 192, generator=torch.Generator().manual_seed(1))
    reference = expected(tmp_path, hidden)
    error = (attend(layer, hidden).double() - reference).norm() / reference.norm()
    assert float(error) < 1e-5


@pytest.mark.parametrize(("model", "rank"), [("llama", 512), ("qwen2", 256)])
def test_kernels_on_the_simulated_device(model: str, rank: int, tmp_path: Path) -> None:
    """In bf16, the kernels agree with the torch path, and both with the original as far as bf16 goes."""
    config = {**MODELS[model], "num_attention_heads": 3}
    layer = layer_of(config, tmp_path, torch.bfloat16, ConvertOptions(rank=rank))
    hidden = torch.randn(PROMPT + 1, 192, generator=torch.Generator().manual_seed(1)).bfloat16()
    by_torch = attend(layer, hidden).double()
    with cute_mla.simulate("sm90", sm_count=4) as device:
        by_kernels = attend(layer, hidden).double()
    assert device.launches >= 4
    assert device.findings == []
    reference = expected(tmp_path, hidden)
    assert float((by_kernels - by_torch).norm() / by_torch.norm()) < 0.02
    assert float((by_torch - reference).norm() / reference.norm()) < 0.06
