"""Calibration tokens from files, the moments that the original model gives, and what weights them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cute_mla.convert import ConvertOptions, convert_checkpoint, read_tokens
from cute_mla.convert.calibration import Calibration, root
from cute_mla.convert.low_rank import balanced, joint, split
from cute_mla.convert.rotation import Pairs, choose
from cute_mla.convert.source import SourceCheckpoint, SourceConfig
from tests.convert.models import LLAMA, LLAMA3_ROPE, QWEN2, TOKENS, attention_inputs, logits, random_weights, write_checkpoint

GQA = {**LLAMA, "num_attention_heads": 6, "num_key_value_heads": 2}


@pytest.mark.parametrize("model", ["gqa", "biases", "llama3"])
def test_moments_are_those_of_the_model(model: str, tmp_path: Path) -> None:
    config = {"gqa": GQA, "biases": {**QWEN2, "rms_norm_eps": 1e-2}, "llama3": {**LLAMA, "rope_scaling": LLAMA3_ROPE}}[model]
    folder = write_checkpoint(tmp_path / "source", config, random_weights(config))
    source = SourceCheckpoint.open(folder)
    calibration = Calibration(source, TOKENS)
    for layer, inputs in enumerate(attention_inputs(folder, TOKENS, torch.float64)):
        flat = inputs.flatten(0, 1)
        if source.config.biases:
            flat = torch.cat((flat, torch.ones(len(flat), 1, dtype=torch.float64)), dim=1)
        weights = source.layer(layer)
        torch.testing.assert_close(calibration.moment(weights), flat.T @ flat / len(flat), rtol=1e-9, atol=1e-9)
        calibration.advance(weights)


def test_a_model_that_overflows(tmp_path: Path) -> None:
    weights = random_weights(LLAMA)
    weights["model.layers.0.mlp.down_proj.weight"] *= 1e308
    source = write_checkpoint(tmp_path / "source", LLAMA, weights)
    with pytest.raises(ValueError, match="the original model overflows on the calibration tokens"):
        convert_checkpoint(source, tmp_path / "out", calibration=TOKENS)
    assert not (tmp_path / "out").exists()


def test_the_root_of_a_moment() -> None:
    """Inputs that calibration never saw count a little, so that a matrix keeps its rows there."""
    moment = torch.diag(torch.tensor([4.0, 0.0], dtype=torch.float64))
    torch.testing.assert_close(root(moment, 2), torch.diag(torch.tensor([4.0 + 2e-6, 2e-6], dtype=torch.float64).sqrt()))
    assert torch.equal(root(None, 3), torch.eye(3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"mean square of 0\.0; supported: a positive finite number"):
        root(torch.zeros(2, 2, dtype=torch.float64), 2)


def random_pairs() -> tuple[Pairs, SourceConfig]:
    """Return pairs of 6 heads and 3 KV heads, of which the first has the strongest queries."""
    draw = torch.Generator().manual_seed(0)
    config = SourceConfig.from_hugging_face({**GQA, "num_key_value_heads": 3})
    q, k = (torch.randn(heads * 64, 192, dtype=torch.float64, generator=draw) for heads in (6, 3))
    q[:128] *= 5
    inputs = torch.randn(400, 192, dtype=torch.float64, generator=draw) * torch.linspace(0.1, 2, 192, dtype=torch.float64)
    return Pairs.of(q, k, config, root(inputs.T @ inputs / 400, 192)), config


def loss(options: ConvertOptions) -> float:
    pairs, config = random_pairs()
    return choose(pairs, config, options, 1e-24).loss


def test_losses_are_ordered() -> None:
    """A unitary mix loses less than an orthogonal one; both lose less than heads that are not mixed; folding gives more to choose from."""
    unitary, real, owned = (
        loss(ConvertOptions(**given)) for given in ({"fold": 1}, {"fold": 1, "rotation": "real"}, {"method": "mha2mla"})
    )
    folded = loss(ConvertOptions(fold=2))
    assert 0 < folded < unitary < real < 1
    assert unitary < owned < 1


def test_the_loss_is_that_of_the_scores() -> None:
    """The loss is 1 minus the largest eigenvalues over the trace, of keys weighted by the energy of their queries."""
    pairs, config = random_pairs()
    kept = whole = 0.0
    for pair in range(32):
        outputs = pairs.k[:, pair] @ pairs.metric.to(torch.complex128) * pairs.weights[:, pair : pair + 1]
        values = torch.linalg.eigvalsh(outputs @ outputs.conj().T)
        kept, whole = kept + float(values[-1]), whole + float(values.sum())
    assert choose(pairs, config, ConvertOptions(fold=1), 1e-24).loss == pytest.approx(1 - kept / whole, rel=1e-9)


def test_without_folding_where_that_is_exact() -> None:
    pairs, config = random_pairs()
    same = pairs._replace(k=pairs.k[:1].expand(3, -1, -1))
    assert choose(same, config, ConvertOptions(), 1e-24)[2:] == (0.0, 1)
    assert choose(pairs, config, ConvertOptions(), 1e-24).fold == 2
    assert choose(same, config, ConvertOptions(fold=4), 1e-24).fold == 4


def test_slots_belong_to_the_head_of_the_largest_norms() -> None:
    pairs, config = random_pairs()
    rotation = choose(pairs, config, ConvertOptions(method="mha2mla"), 1e-24).rotation
    owners = rotation.gather.real.argmax(dim=1).diagonal()  # slot s holds pair s
    assert owners.tolist() == [0] * 32
    weak = pairs._replace(k=pairs.k * torch.tensor([1, 1, 100.0], dtype=torch.float64).view(3, 1, 1))
    assert choose(weak, config, ConvertOptions(method="mha2mla"), 1e-24).rotation.gather[:, 2].real.diagonal().tolist() == [1.0] * 32


def test_factors() -> None:
    """At full rank all are the matrices; below, balanced factors lose the least on the calibration inputs."""
    draw = torch.Generator().manual_seed(1)
    k, v = (torch.randn(40, 60, dtype=torch.float64, generator=draw) for _ in range(2))
    inputs = torch.randn(500, 60, dtype=torch.float64, generator=draw) * torch.linspace(0.01, 3, 60, dtype=torch.float64)
    metric = root(inputs.T @ inputs / 500, 60)

    def error(factors: object, part: str) -> float:
        matrix, up = (k, factors.up_k) if part == "k" else (v, factors.up_v)  # type: ignore[attr-defined]
        return float(((matrix - up @ factors.down) @ inputs.T).square().mean())  # type: ignore[attr-defined]

    for whole in (balanced(k, v, metric, 60), joint(k, v, 60), split(k, v, 80)):
        assert max(error(whole, "k"), error(whole, "v")) < 1e-20
        assert whole.loss < 1e-20
    fewer = balanced(k, v, metric, 20), joint(k, v, 20), split(k, v, 20)
    assert [factors.down.shape for factors in fewer] == [(20, 60)] * 3
    sums = [error(factors, "k") + error(factors, "v") for factors in fewer]
    assert 1.5 * sums[0] < min(sums[1:])
    assert fewer[2].up_k[:, 10:].abs().max() == fewer[2].up_v[:, :10].abs().max() == 0
    large = balanced(1e4 * k, v, metric, 20)
    assert error(large, "v") == pytest.approx(error(fewer[0], "v"), rel=1e-6)


def test_tokens_from_an_array(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(100, dtype=np.int32).reshape(10, 10))
    assert torch.equal(read_tokens(tmp_path / "ids.npy", tmp_path, length=33), torch.arange(99).view(3, 33))
    assert torch.equal(read_tokens(tmp_path / "ids.npy", tmp_path, sequences=1, length=8), torch.arange(8).view(1, 8))
    assert read_tokens(tmp_path / "ids.npy", tmp_path).shape == (1, 100)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(5), "dtype float64; supported: integers"),
        (np.zeros(1, dtype=np.int64), "has 1 tokens; supported: 2 or more"),
        (np.array(["a", None], dtype=object), "is not an array of numpy"),
    ],
)
def test_arrays_that_are_refused(array: np.ndarray, message: str, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", array)
    with pytest.raises(ValueError, match=message):
        read_tokens(tmp_path / "ids.npy", tmp_path)


def test_texts_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="is not text in UTF-8"):
        read_tokens(tmp_path / "text.txt", tmp_path)
    (tmp_path / "text.txt").write_text("text")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ModuleNotFoundError, match=r"package tokenizers, which is not installed: .* or give token ids in a \.npy file"):
        read_tokens(tmp_path / "text.txt", tmp_path)


def test_calibration_helps(tmp_path: Path) -> None:
    """On the calibration tokens, logits are nearer to the original's than those of a conversion without calibration."""
    weights = random_weights(GQA)
    for layer in range(2):  # keys and values of a few directions, the first of which the tokens have little of
        for name in ("k", "v"):
            own = f"model.layers.{layer}.self_attn.{name}_proj.weight"
            weights[own] = weights[own] * torch.linspace(2, 0, 192, dtype=torch.float64) ** 2
        weights[f"model.layers.{layer}.input_layernorm.weight"] *= torch.linspace(0.05, 2, 192, dtype=torch.float64)
    source = write_checkpoint(tmp_path / "source", GQA, weights)
    expected = logits(source, TOKENS, torch.float64)
    errors = []
    for name, tokens in (("plain", None), ("calibrated", TOKENS)):
        convert_checkpoint(source, tmp_path / name, replace(ConvertOptions(), rank=60), calibration=tokens)
        errors.append(float((logits(tmp_path / name, TOKENS, torch.float64) - expected).square().mean()))
    assert errors[1] < 0.9 * errors[0]
