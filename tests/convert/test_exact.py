"""Models whose conversion is exact, and models whose conversion cannot be: the first show no loss, the second do.

The constructions follow from what a slot can hold: one complex linear function of the input at each of DeepSeek's 32 frequencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_mla.convert import ConvertOptions, convert_checkpoint
from tests.convert.models import LLAMA, LLAMA3_ROPE, QWEN2, TOKENS, Edit, Keys, Weights, logits, random_weights, write_checkpoint

GQA = {**LLAMA, "num_attention_heads": 6, "num_key_value_heads": 2}
WIDE = {**LLAMA, "head_dim": 128, "num_attention_heads": 2}
WIDE_GQA = {**LLAMA, "hidden_size": 320, "head_dim": 128, "num_attention_heads": 8, "num_key_value_heads": 4}
SMOLLM = {**LLAMA, "num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "rope_theta": 1e5, "tie_word_embeddings": True}
QWEN2_GQA = {**QWEN2, "num_attention_heads": 4, "num_key_value_heads": 2}
RANK = 200


def multiples(config: Mapping[str, Any], *, real: bool = False) -> Edit:
    """Make the keys of all heads, at each frequency, multiples of the first head's."""

    def edit(weights: Weights, layer: int) -> None:
        draw = torch.Generator().manual_seed(layer)
        pairs = Keys(config).read(weights, layer)
        factors = torch.randn(pairs.shape[:2], dtype=torch.complex128, generator=draw)
        Keys(config).write(weights, layer, (factors.real if real else factors).unsqueeze(-1) * pairs[:1])

    return edit


def even_pairs(config: Mapping[str, Any]) -> Edit:
    """Empty the odd pairs of keys, whose frequencies DeepSeek does not have for heads of 128 columns."""

    def edit(weights: Weights, layer: int) -> None:
        pairs = Keys(config).read(weights, layer)
        pairs[:, 1::2] = 0
        Keys(config).write(weights, layer, pairs)

    return edit


def fast_pairs(weights: Weights, layer: int) -> None:
    """Empty the slower half of the pairs of keys."""
    pairs = Keys(WIDE).read(weights, layer)
    pairs[:, pairs.shape[1] // 2 :] = 0
    Keys(WIDE).write(weights, layer, pairs)


def odd_pairs_like_even_ones(config: Mapping[str, Any]) -> Edit:
    """Make each odd pair of keys a multiple of the even pair before it, which turns faster."""

    def edit(weights: Weights, layer: int) -> None:
        pairs = Keys(config).read(weights, layer)
        pairs[:, 1::2] = 0.5j * pairs[:, ::2]
        Keys(config).write(weights, layer, pairs)

    return edit


def one_head_a_pair(config: Mapping[str, Any]) -> Edit:
    """Empty each pair of keys, and of their biases, in all heads but one."""

    def edit(weights: Weights, layer: int) -> None:
        pairs = Keys(config).read(weights, layer)
        owned = torch.arange(pairs.shape[1]) % len(pairs) == torch.arange(len(pairs)).unsqueeze(1)  # [KV heads, pairs]
        Keys(config).write(weights, layer, pairs * owned.unsqueeze(-1))
        bias = f"model.layers.{layer}.self_attn.k_proj.bias"
        if bias in weights:
            weights[bias] = weights[bias] * owned.repeat(1, 2).flatten()

    return edit


def narrow_values(weights: Weights, layer: int) -> None:
    """Give the values a rank of 200, less than their columns."""
    draw = torch.Generator().manual_seed(layer)
    name = f"model.layers.{layer}.self_attn.v_proj.weight"
    rows, inputs = weights[name].shape
    mixed = torch.randn(rows, RANK, dtype=torch.float64, generator=draw) @ torch.randn(RANK, inputs, dtype=torch.float64, generator=draw)
    weights[name] = mixed * (RANK * inputs) ** -0.5


def unused_queries(weights: Weights, layer: int) -> None:
    """Let the queries of each head use a pair only if it is the first KV head's."""
    name = f"model.layers.{layer}.self_attn.q_proj.weight"
    weights[name] = weights[name].clone()
    weights[name][len(weights[name]) // 2 :] = 0


@dataclass(frozen=True)
class Construction:
    """Model: a configuration, what is done to random weights, and the options of the conversion."""

    config: Mapping[str, Any]
    edits: tuple[Edit, ...] = ()
    options: ConvertOptions | None = None

    def weights(self) -> Weights:
        weights = random_weights(self.config)
        for layer in range(self.config["num_hidden_layers"]):
            for edit in self.edits:
                edit(weights, layer)
        return weights


REAL = ConvertOptions(rotation="real", attenuation=0)
EXACT = {
    "mqa": Construction(LLAMA),
    "mqa_real": Construction(LLAMA, (), REAL),
    "mqa_biases": Construction(QWEN2),
    "mqa_biases_of_llama": Construction({**LLAMA, "attention_bias": True, "rms_norm_eps": 1e-5}),
    "mqa_eps_theta_tied": Construction({**LLAMA, "rms_norm_eps": 1e-5, "rope_theta": 1e5, "tie_word_embeddings": True}),
    "mqa_llama3": Construction({**LLAMA, "rope_scaling": LLAMA3_ROPE}),
    "mqa_rank_64": Construction(LLAMA, (), ConvertOptions(rank=64)),
    "gqa_complex_multiples": Construction(GQA, (multiples(GQA),)),
    "gqa_real_multiples": Construction(GQA, (multiples(GQA, real=True),), REAL),
    "gqa_unused_queries": Construction(GQA, (unused_queries,)),
    "wide_even_pairs": Construction(WIDE, (even_pairs(WIDE),)),
    "wide_gqa_values_of_rank_200": Construction(WIDE_GQA, (multiples(WIDE_GQA), even_pairs(WIDE_GQA), narrow_values)),
    "one_head_a_pair": Construction(SMOLLM, (one_head_a_pair(SMOLLM),)),
    "one_head_a_pair_biases": Construction(QWEN2_GQA, (one_head_a_pair(QWEN2_GQA),)),
    "mha2mla_one_head_a_pair": Construction(QWEN2_GQA, (one_head_a_pair(QWEN2_GQA),), ConvertOptions(method="mha2mla")),
    "mha2mla_uniform": Construction(WIDE, (even_pairs(WIDE),), ConvertOptions(method="mha2mla", strategy="uniform", svd="split")),
    "mha2mla_high": Construction(WIDE, (fast_pairs,), ConvertOptions(method="mha2mla", strategy="high")),
    "mha2mla_low": Construction(LLAMA, (), ConvertOptions(method="mha2mla", strategy="low")),
}
INEXACT = {
    "gqa": Construction(GQA),
    "gqa_folded": Construction(GQA, (multiples(GQA),), ConvertOptions(fold=2)),
    "gqa_complex_multiples_by_real_rotation": Construction(GQA, (multiples(GQA),), REAL),
    "wide": Construction(WIDE),
    "wide_odd_pairs_like_even_ones": Construction(WIDE, (odd_pairs_like_even_ones(WIDE),), ConvertOptions(fold=2)),
    "rank_below_that_of_values": Construction(WIDE_GQA, (multiples(WIDE_GQA), even_pairs(WIDE_GQA)), ConvertOptions(rank=RANK - 1)),
    "mha2mla": Construction(GQA, (), ConvertOptions(method="mha2mla")),
    "mha2mla_split": Construction(LLAMA, (), ConvertOptions(method="mha2mla", rank=120, svd="split")),
}


def converted(folder: Path, construction: Construction, dtype: torch.dtype) -> tuple[Path, Path, bool]:
    """Write and convert the model in a dtype; return both folders and whether the report calls the conversion exact."""
    source = write_checkpoint(folder / f"source_{dtype}", construction.config, construction.weights(), dtype)
    report = convert_checkpoint(source, folder / f"out_{dtype}", construction.options, calibration=TOKENS)
    return source, folder / f"out_{dtype}", report.exact


@pytest.mark.parametrize("name", EXACT)
def test_logits_in_fp64(name: str, tmp_path: Path) -> None:
    source, out, exact = converted(tmp_path, EXACT[name], torch.float64)
    expected = logits(source, TOKENS, torch.float64)
    error = float((logits(out, TOKENS, torch.float64) - expected).abs().max())
    assert exact
    assert float(expected.abs().max()) > 3
    assert error < 1e-9


@pytest.mark.parametrize("name", ["mqa_biases", "mqa_eps_theta_tied", "gqa_complex_multiples", "wide_gqa_values_of_rank_200"])
def test_logits_in_fp32(name: str, tmp_path: Path) -> None:
    """The error is at most twice the error of the original computed in fp32."""
    source, out, exact = converted(tmp_path, EXACT[name], torch.float32)
    expected = logits(source, TOKENS, torch.float64)
    error, own = (float((logits(folder, TOKENS, torch.float32) - expected).abs().max()) for folder in (out, source))
    assert exact
    assert error < 2 * own


@pytest.mark.parametrize("name", INEXACT)
def test_a_loss_is_seen(name: str, tmp_path: Path) -> None:
    """The checks of this file can fail."""
    source, out, exact = converted(tmp_path, INEXACT[name], torch.float64)
    error = float((logits(out, TOKENS, torch.float64) - logits(source, TOKENS, torch.float64)).abs().max())
    assert not exact
    assert error > 0.1
