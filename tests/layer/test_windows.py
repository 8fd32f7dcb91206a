"""Layers with a window: by the kernels, against the reference path, which is compared with transformers' eager model."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import cute_mla
from cute_mla.layer import MlaAttention, MlaBatch, MlaConfig, MlaWeights, plan_batch, plan_sequences
from cute_mla.parallel import ContextParallel
from cute_mla.spec.arch import Arch
from cute_mla.spec.dense_decode import key_columns
from tests.support.launched import record_launches

WINDOW, PAGE = 40, 64
CONFIG = MlaConfig(
    *(96, 3, 40, 1024, 192, 64, 128), rotary_norm=True, sliding_window=WINDOW, output_gate="head", mla_scale_kv_lora=True, rope_theta=5e4
)


def layer_of(config: MlaConfig, dtype: torch.dtype = torch.bfloat16) -> MlaAttention:
    draw, heads, hidden = torch.Generator().manual_seed(1), config.num_attention_heads, config.hidden_size
    shapes = {
        "q_a": (40, hidden),
        "q_b": (heads * 256, 40),
        "kv_a": (1088, hidden),
        "kv_b": (heads * 320, 1024),
        "o": (hidden, heads * 128),
    }
    weights = {name: torch.randn(shape, generator=draw) * shape[1] ** -0.5 for name, shape in shapes.items()}
    weights |= {name: 1 + 0.2 * torch.randn(size, generator=draw) for name, size in (("q_a_norm", 40), ("kv_a_norm", 1024))}
    weights |= {"gate": torch.randn(heads, hidden, generator=draw), "rotary_norm": 1 + 0.2 * torch.randn(64, generator=draw)}
    return MlaAttention(config, MlaWeights(**weights).to(dtype=dtype))


def walk(layer: MlaAttention, steps: list[tuple[list[int], int]], hidden: list[Tensor], chunk_tokens: int = 8192) -> list[Tensor]:
    """Pass sequences through a layer, and return the outputs. steps: new tokens of each request, and how many requests are decoded."""
    pages = [math.ceil(len(each) / PAGE) for each in hidden]
    table = torch.zeros(len(hidden), max(pages), dtype=torch.int32)
    for row, own in zip(table, (1 + torch.randperm(sum(pages), generator=torch.Generator().manual_seed(2))).split(pages), strict=True):
        row[: len(own)] = own
    cache = torch.full((sum(pages) + 1, PAGE, 1, 1088), torch.nan, dtype=layer.kv_b.dtype)
    done, outs = [0] * len(hidden), []
    for new, decodes in steps:
        batch = plan_batch(new, done, table, PAGE, decodes=decodes, chunk_tokens=chunk_tokens)
        tokens = torch.cat([each[first : first + count] for each, first, count in zip(hidden, done, new, strict=True)])
        outs.append(layer(tokens, cache, batch))
        done = [first + count for first, count in zip(done, new, strict=True)]
    return outs


STEPS = [([63, 41, 0], 0), ([3, 3, 90], 2), ([1, 1, 1], 3), ([30, 1, 7], 0)]
HIDDEN = [torch.randn(count, 96, generator=torch.Generator().manual_seed(count)).bfloat16() for count in (97, 46, 98)]


def test_steps_by_the_kernels(arch: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill of new tokens, drafts beside prefill, decode, and prefill over cached keys, in chunks that do not matter."""
    layer, launched = layer_of(CONFIG), record_launches(monkeypatch)
    expected = walk(layer, STEPS, HIDDEN)
    with cute_mla.simulate(arch, 2) as device:
        found = walk(layer, STEPS, HIDDEN, chunk_tokens=50)
    assert device.findings == []
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=1.5e-2 * float(other.abs().max()))
    kinds = {name.partition("_cluster")[0] for name in launched if not name.startswith("combine")}
    if CONFIG.key_columns in key_columns(arch):
        assert kinds == {"cache_insert_bf16_latent_1088", "split_plan_i32", "dense_decode_bf16_d1088"}
    else:
        assert kinds == {"cache_write_b16_latent_1088"}


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, sliding_window=1)], ids=["40", "1"])
def test_one_sequence_equals_its_steps(config: MlaConfig) -> None:
    """Prefill without a cache is decode of token by token; more keys than the window change nothing."""
    layer, hidden = layer_of(config, torch.float32), [HIDDEN[2].float()]
    whole = layer(hidden[0], None, plan_sequences([98], "cpu"))
    parts = torch.cat(walk(layer, [([37], 0), *[([1], 1)] * 3, ([50], 0), ([8], 1)], hidden))
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-5 * float(whole.abs().max()))
    other = hidden[0].clone()
    other[0] += 1
    changed = (layer(other, None, plan_sequences([98], "cpu")) != whole).any(dim=1)
    assert changed.nonzero().flatten().tolist() == list(range(config.sliding_window or 0))


def test_empty_batches() -> None:
    layer = layer_of(CONFIG, torch.float32)
    assert layer(torch.zeros(0, 96), None, plan_sequences([0, 0], "cpu")).shape == (0, 96)
    nobody = torch.zeros(0, dtype=torch.int64)
    assert layer(torch.zeros(0, 96), None, MlaBatch(nobody, nobody)).shape == (0, 96)


def test_what_is_refused() -> None:
    layer = layer_of(CONFIG, torch.float32).requires_grad_()
    with pytest.raises(ValueError, match="requires grad, and the config has a sliding_window; supported"):
        layer(HIDDEN[0].float(), None, plan_sequences([97], "cpu"))
    with pytest.raises(ValueError, match="a context is given, and "):
        MlaAttention(CONFIG, layer.weights, context=ContextParallel.__new__(ContextParallel))
