"""Calibration: tokens from a file, and the pass of the original model over them, one layer at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from ..layer.rope import pair_frequencies
from ..ops.arguments import check_integer
from .source import SourceCheckpoint, SourceConfig

SEQUENCES, LENGTH = 128, 256  # those of TransMLA's published conversions
_AT_ONCE = 2048  # tokens that go through a layer together
_DAMPING = 1e-6  # of the mean of a moment's diagonal, so that inputs that calibration never saw are not lost


def read_tokens(file: str | Path, source: str | Path, *, sequences: int = SEQUENCES, length: int = LENGTH) -> Tensor:
    """Return tokens to calibrate with, int64 [up to `sequences`, length].

    file: a .npy file of token ids of any shape, or a text in UTF-8, which the tokenizer.json in the folder `source` splits with the package
    tokenizers. What exceeds the last whole sequence is dropped; a shorter file is one short sequence. Raises ValueError if the file cannot
    be used, FileNotFoundError without a tokenizer.json, ModuleNotFoundError without tokenizers.
    """
    check_integer("sequences", sequences, 1)
    check_integer("length", length, 2)
    file = Path(file)
    ids = _read_ids(file) if file.suffix == ".npy" else _tokenize(file, Path(source) / "tokenizer.json")
    if len(ids) < 2:
        raise ValueError(f"{file} has {len(ids)} tokens; supported: 2 or more")
    length = min(length, len(ids))
    count = min(sequences, len(ids) // length)
    return ids[: count * length].view(count, length)


def _read_ids(file: Path) -> Tensor:
    try:
        ids = np.load(file, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{file} is not an array of numpy: {error}; supported: token ids, or text in a file of another name") from error
    if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu":
        raise ValueError(f"{file} has dtype {getattr(ids, 'dtype', None)}; supported: integers, which are token ids")
    return torch.from_numpy(ids.astype(np.int64).reshape(-1))


def _tokenize(file: Path, tokenizer: Path) -> Tensor:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not text in UTF-8: {error}; supported: text, or token ids in a .npy file") from error
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "text is split into tokens with the package tokenizers, which is not installed: pip install 'cute-mla[convert]', "
            "or give token ids in a .npy file",
            name="tokenizers",
        ) from error
    if not tokenizer.is_file():
        raise FileNotFoundError(2, "no tokenizer for a calibration text; token ids in a .npy file need none", str(tokenizer))
    return torch.tensor(Tokenizer.from_file(str(tokenizer)).encode(text).ids, dtype=torch.int64)


class Calibration:
    """Hidden states of the calibration tokens in front of a layer of the original model.

    They are the only state between layers: moment() sums the inputs of a layer's attention, advance() goes through the layer. Computes in
    fp32, or in fp64 if the weights are fp64.
    """

    def __init__(self, source: SourceCheckpoint, tokens: Tensor) -> None:
        config = source.config
        if tokens.dim() != 2 or tokens.dtype not in (torch.int32, torch.int64) or tokens.shape[0] < 1 or tokens.shape[1] < 2:
            raise ValueError(f"calibration is {tokens.dtype} {list(tokens.shape)}; supported: token ids, int64 [sequences, 2 or more]")
        least, most = int(tokens.min()), int(tokens.max())
        if least < 0 or most >= config.vocab_size:
            raise ValueError(f"calibration has the tokens {least} to {most}; supported: 0 to {config.vocab_size - 1}")
        self.config = config
        self.dtype = torch.float64 if source.dtype == torch.float64 else torch.float32
        embedding = source.outer("model.embed_tokens.weight")["model.embed_tokens.weight"]
        self._batches = [embedding[batch].to(self.dtype) for batch in tokens.split(max(1, _AT_ONCE // tokens.shape[1]))]
        self._rotation = rotation(config, tokens.shape[1], self.dtype)

    def moment(self, layer: Mapping[str, Tensor]) -> Tensor:
        """Return the mean of x x^T over the inputs x of a layer's attention, fp64 [inputs, inputs].

        The last input is 1 if the model has biases. The first token of a sequence must count: it attracts much attention, and a rank that
        does not suffice would lose its key (perplexity of SmolLM2-135M at rank 256: 20.1 without the first tokens, 17.5 with them).
        """
        width = self.config.hidden_size + bool(self.config.biases)
        total, count = torch.zeros(width, width, dtype=torch.float64), 0
        for hidden in self._batches:
            inputs = self._normalise(hidden, layer["input_layernorm.weight"]).flatten(0, 1).double()
            if self.config.biases:
                inputs = torch.cat((inputs, inputs.new_ones(len(inputs), 1)), dim=1)
            total += inputs.T @ inputs
            count += len(inputs)
        return total / count

    def advance(self, layer: Mapping[str, Tensor]) -> None:
        """Replace the hidden states by those behind a layer. Raise ValueError if they are not finite."""
        weights = {name: weight.to(self.dtype) for name, weight in layer.items()}
        self._batches = [self._forward(hidden, weights) for hidden in self._batches]
        if not all(bool(torch.isfinite(hidden).all()) for hidden in self._batches):
            raise ValueError("the original model overflows on the calibration tokens; supported: models whose hidden states are finite")

    def _forward(self, hidden: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        config, (sequences, tokens, _) = self.config, hidden.shape
        inputs = self._normalise(hidden, weights["input_layernorm.weight"])
        q, k, v = (
            linear(inputs, weights[f"self_attn.{name}_proj.weight"], weights.get(f"self_attn.{name}_proj.bias"))
            .view(sequences, tokens, -1, config.head_dim)
            .transpose(1, 2)
            for name in ("q", "k", "v")
        )
        out = scaled_dot_product_attention(self._rotate(q), self._rotate(k), v, is_causal=True, enable_gqa=config.group > 1)
        hidden = hidden + linear(out.transpose(1, 2).flatten(2), weights["self_attn.o_proj.weight"], weights.get("self_attn.o_proj.bias"))
        inputs = self._normalise(hidden, weights["post_attention_layernorm.weight"])
        inner = silu(linear(inputs, weights["mlp.gate_proj.weight"])) * linear(inputs, weights["mlp.up_proj.weight"])
        return hidden + linear(inner, weights["mlp.down_proj.weight"])

    def _normalise(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(hidden, weight.shape, weight.to(self.dtype), self.config.rms_norm_eps)

    def _rotate(self, columns: Tensor) -> Tensor:
        """Turn the pairs (i, i + half) of columns [.., tokens, head_dim]."""
        real, imaginary = columns.chunk(2, dim=-1)
        cos, sin = self._rotation
        return torch.cat((real * cos - imaginary * sin, imaginary * cos + real * sin), dim=-1)


def rotation(config: SourceConfig, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the tokens 0, 1, .., each [tokens, pairs of a head]."""
    radians = pair_frequencies(config.head_dim, config.rope_theta, config.rope_scaling, torch.float64)
    angles = torch.outer(torch.arange(tokens, dtype=torch.float64), radians)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def root(moment: Tensor | None, inputs: int) -> Tensor:
    """Return a lower triangular L, fp64 [inputs, inputs], with L L^T = moment + damping: |W L| is the size of the outputs of a matrix W.

    Without a moment, every input counts alike: the identity.
    """
    if moment is None:
        return torch.eye(inputs, dtype=torch.float64)
    mean = float(moment.diagonal().mean())
    if not 0 < mean < math.inf:
        raise ValueError(f"the inputs of a layer's attention have a mean square of {mean}; supported: a positive finite number")
    damping: Any = _DAMPING * mean
    return torch.linalg.cholesky(moment + damping * torch.eye(inputs, dtype=torch.float64))
