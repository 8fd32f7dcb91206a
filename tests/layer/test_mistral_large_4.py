"""Layers of Mistral Large 4: scales of queries by position, learned frequencies, layers without RoPE, and latents of other layers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cute_mla
from cute_mla.layer import (
    Indexer,
    IndexerWeights,
    MlaAttention,
    MlaConfig,
    MlaWeights,
    Shard,
    YarnScaling,
    load_indexer_weights,
    load_weights,
    plan_batch,
    plan_sequences,
)
from cute_mla.layer.weights import ALPHA
from cute_mla.spec.arch import Arch
from tests.layer.mla_steps import TOLERANCE

HIDDEN, HEADS, INDEX_HEADS, TOPK, EPS = 96, 3, 4, 16, 1e-5
LARGE_4: dict[str, Any] = {
    "model_type": "mistral_large4_text",
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": EPS,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2048.0, "original_max_position_embeddings": 512}
    | {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": 1.0},
    "index_topk": TOPK,
    "index_n_heads": INDEX_HEADS,
    "index_head_dim": 128,
    "num_hidden_layers": 4,
    "no_rope_layers": [1, 0, 1, 0],
    "kv_source_layers": [0, 1, 0, 1],
    "indexer_types": ["full", "shared", "full", "full"],
    "final_logit_softcapping": 30.0,
}
MODEL = MlaConfig.from_hugging_face(LARGE_4)
LAYERS = [MODEL.of_layer(layer) for layer in range(4)]
DRAW = torch.Generator().manual_seed(5)
ALPHAS = 0.3 * torch.randn(32, generator=DRAW)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=DRAW) * shape[-1] ** -0.5


def tensors_of(layer: int, config: MlaConfig = MODEL) -> dict[str, Tensor]:
    """Return the weights of a layer by the names of a state dict of its attention, and alpha where it rotates."""
    own, roped = config.of_layer(layer), config.of_layer(layer).qk_rope_head_dim > 0
    heads = HEADS * 128
    shapes = {"q_proj": (heads, HIDDEN), "kv_b_proj": (HEADS * (own.qk_nope_head_dim + 128), 512), "o_proj": (HIDDEN, heads)}
    if own.latents != "borrowed":
        shapes["kv_a_proj_with_mqa"] = (own.key_columns, HIDDEN)
    if LARGE_4["indexer_types"][layer] == "full":
        shapes |= {"indexer.wq_b": (INDEX_HEADS * 128, HIDDEN), "indexer.wk": (128, HIDDEN), "indexer.weights_proj": (INDEX_HEADS, HIDDEN)}
    tensors = {f"{name}.weight": drawn(*shape) for name, shape in shapes.items()}
    norms = {"indexer.q_input_norm": HIDDEN, "indexer.k_norm": 128} if "indexer.wk" in shapes else {}
    for name, columns in norms.items():
        tensors |= {f"{name}.weight": 1 + 0.2 * torch.randn(columns), f"{name}.bias": 0.2 * torch.randn(columns)}
    if "kv_a_proj_with_mqa" in shapes:
        tensors["kv_a_layernorm.weight"] = 1 + 0.2 * torch.randn(512, generator=DRAW)
    for module, count in {"softmax_scaling": HEADS, **({"indexer.softmax_scaling": INDEX_HEADS} if norms else {})}.items():
        tensors |= {f"{module}.scale": 0.3 * torch.randn(count), f"{module}.bias": 1 + 0.3 * torch.randn(count)}
    return tensors | ({ALPHA: ALPHAS} if roped else {})


TENSORS = [tensors_of(layer) for layer in range(4)]


def layers(dtype: torch.dtype = torch.float32) -> list[MlaAttention]:
    """Return the four layers of the model."""
    built = []
    for config, tensors in zip(LAYERS, TENSORS, strict=True):
        indexed = any(name.startswith("indexer.") for name in tensors)
        indexer = Indexer(config, IndexerWeights.from_tensors(tensors, config).to(dtype=dtype)) if indexed else None
        built.append(MlaAttention(config, MlaWeights.from_tensors(tensors, config).to(dtype=dtype), indexer))
    return built


def frequencies() -> Tensor:
    """Return YaRN's frequencies times exp(alpha), fp64 (arXiv 2309.00071)."""
    plain = 1e4 ** (-torch.arange(32, dtype=torch.float64) / 32)
    pair = [64 * math.log(512 / (2 * math.pi * turns)) / (2 * math.log(1e4)) for turns in (32.0, 1.0)]
    first, last = math.floor(pair[0]), math.ceil(pair[1])
    slow = ((torch.arange(32, dtype=torch.float64) - first) / (last - first)).clamp(0, 1)
    return (plain * (1 - slow) + plain / 2048 * slow) * ALPHAS.double().exp()


def turned(columns: Tensor) -> Tensor:
    """Rotate columns [tokens, .., 64] of the tokens 0, 1, ..., in pairs of neighbours."""
    angles = torch.arange(len(columns), dtype=torch.float64).unsqueeze(1) * frequencies()
    pairs = torch.view_as_complex(columns.unflatten(-1, (-1, 2)).contiguous())
    turns = torch.polar(torch.ones_like(angles), angles).view(len(columns), *[1] * (columns.dim() - 2), 32)
    return torch.view_as_real(pairs * turns).flatten(-2)


def expected(layer: int, hidden: list[Tensor]) -> Tensor:
    """Return a layer's output over all keys of one sequence, in fp64. hidden: the hidden states that each layer is given."""
    weights = {name: weight.double() for name, weight in TENSORS[layer].items()}
    source, config = LARGE_4["kv_source_layers"][layer], LAYERS[layer]
    lender, states, tokens = TENSORS[source], hidden[layer].double(), len(hidden[layer])
    both = hidden[source].double() @ lender["kv_a_proj_with_mqa.weight"].double().T
    latent, rotary = both[:, :512], both[:, 512:]
    latent = latent / (latent.square().mean(1, keepdim=True) + EPS).sqrt() * lender["kv_a_layernorm.weight"].double()
    q = (states @ weights["q_proj.weight"].T).view(tokens, HEADS, 128)
    kv = (latent @ weights["kv_b_proj.weight"].T).view(tokens, HEADS, -1)
    k, v = kv.split((config.qk_nope_head_dim, 128), dim=2)
    if config.qk_rope_head_dim:
        q = torch.cat((q[..., :64], turned(q[..., 64:])), dim=2)
        k = torch.cat((k, turned(rotary).unsqueeze(1).expand(-1, HEADS, -1)), dim=2)
    logs = (torch.arange(tokens, dtype=torch.float64) + 1).log().unsqueeze(1)
    q = q * (logs * weights["softmax_scaling.scale"] + weights["softmax_scaling.bias"]).unsqueeze(2)
    scores = torch.einsum("qhd,khd->hqk", q, k) * 128**-0.5
    scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(2), v).flatten(1) @ weights["o_proj.weight"].T


def caches(dtype: torch.dtype, *, packed: bool = False, pages: int = 4) -> tuple[dict[int, Tensor], list[Tensor]]:
    """Return the caches of the layers with keys of their own, and those of the indexers' keys, NaN wherever nothing was written."""
    keys = {layer: torch.full((pages, 64, 1, columns), math.nan, dtype=dtype) for layer, columns in ((0, 576), (1, 512))}
    if packed:
        keys = {layer: torch.full((pages, 64, 1, bytes_), 0xFF, dtype=torch.uint8) for layer, bytes_ in ((0, 656), (1, 528))}
    return keys, [torch.full((pages, 64, 1, 132), 0xFF, dtype=torch.uint8) for _ in range(4)]


def step(built: list[MlaAttention], hidden: list[Tensor], lengths: tuple[list[int], list[int]], held: Any, decodes: int) -> list[Tensor]:
    """Return the outputs of all layers for the new tokens of two requests. lengths: new and cached tokens; hidden: of all of a request."""
    keys, index_keys = held
    table = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
    batch, outs = plan_batch(*lengths, table, 64, decodes=decodes), []
    new = [slice(cached, cached + count) for count, cached in zip(*lengths, strict=True)]
    for layer, attention in enumerate(built):
        own = torch.cat([hidden[layer][one] for one in new])
        index_cache = None if attention.indexer is None else index_keys[layer]
        outs.append(attention(own, keys[LARGE_4["kv_source_layers"][layer]], batch, index_cache=index_cache))
    return outs


def close(out: Tensor, wanted: Tensor, bound: float) -> None:
    assert (out.double() - wanted.double()).abs().max() <= bound * wanted.abs().max()


def test_attention_to_all_keys() -> None:
    """Prefill without a cache, then a prompt over caches and a token behind it, of at most index_topk keys."""
    hidden = [torch.randn(TOPK, HIDDEN, generator=DRAW) for _ in range(4)]
    wanted, built, held = [expected(layer, hidden) for layer in range(4)], layers(), caches(torch.float32)
    batch = plan_sequences([TOPK], "cpu")
    for layer, attention in enumerate(built):
        close(attention(hidden[layer], None, batch), wanted[layer], 1e-5)
    first = step(built, hidden, ([5, 8], [0, 0]), held, 0)
    both = step(built, hidden, ([1, TOPK - 8], [5, 8]), held, 1)  # a decode beside a prefill over cached keys
    for layer in range(4):
        close(first[layer], torch.cat((wanted[layer][:5], wanted[layer][:8])), 1e-5)
        close(both[layer], torch.cat((wanted[layer][5:6], wanted[layer][8:])), 1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_by_the_kernels(packed: bool, arch: Arch) -> None:
    """Beyond index_topk keys: sparse decode of one request, prefill of another, against the layer's own reference path."""
    hidden = [torch.randn(70, HIDDEN, generator=DRAW).bfloat16() for _ in range(4)]
    built, held = layers(torch.bfloat16), caches(torch.bfloat16, packed=packed)
    step(built, hidden, ([68, 20], [0, 0]), held, 0)
    copies = {layer: keys.clone() for layer, keys in held[0].items()}, [keys.clone() for keys in held[1]]
    wanted = step(built, hidden, ([2, 30], [68, 20]), copies, 1)
    with cute_mla.simulate(arch, 2) as device:
        found = step(built, hidden, ([2, 30], [68, 20]), held, 1)
    assert device.findings == []
    for layer, keys in held[0].items():
        assert torch.equal(keys.view(torch.uint8), copies[0][layer].view(torch.uint8))
    for one, other in zip(found, wanted, strict=True):
        close(one, other, TOLERANCE[torch.bfloat16])


def test_gradients_pass_through_lent_latents() -> None:
    """The lending layer's kv_a gets them by borrowing layers alone."""
    hidden, built, batch = [torch.randn(9, HIDDEN, generator=DRAW) for _ in range(4)], layers(), plan_sequences([9], "cpu")
    assert built[0].kv_a is not None
    built[0].kv_a.requires_grad_()
    outs = [attention(hidden[layer], None, batch) for layer, attention in enumerate(built)]
    outs[2].sum().backward()
    assert built[0].kv_a.grad is not None
    assert built[0].kv_a.grad.abs().sum() > 0


def test_options_of_layers() -> None:
    assert [(own.latents, own.key_columns, own.query_columns, own.learned_frequencies) for own in LAYERS] == [
        ("lent", 576, 128, True),
        ("lent", 512, 128, False),
        ("borrowed", 576, 128, True),
        ("borrowed", 512, 128, False),
    ]
    assert LAYERS[0].of_layer(7) == LAYERS[0]
    assert MODEL.of_layer(4).latents == "own"  # behind the last one
    assert isinstance(MODEL.rope_scaling, YarnScaling)
    assert MODEL.rope_scaling.rotary_scale == MODEL.rope_scaling.softmax_scale == 1
    assert MODEL.indexer is not None
    assert (MODEL.indexer.from_hidden, MODEL.indexer.rope_interleave, MODEL.rms_norm_eps) == (True, True, EPS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"no_rope_layers": None}, "the config has no no_rope_layers; supported"),
        ({"rope_parameters": None}, "the config has no rope_parameters; supported"),
        ({"no_rope_layers": [1, 0]}, r"no_rope_layers is \[1, 0\]; supported: an integer for each of num_hidden_layers 4"),
        ({"no_rope_layers": [1, 0, 2, 0]}, r"no_rope_layers is \(1, 0, 2, 0\); supported: 1 for a layer with RoPE, 0 for one without"),
        ({"kv_source_layers": "0101"}, r"kv_source_layers is '0101'; supported: an integer for each"),
        ({"kv_source_layers": [0, 1, 1, 1]}, r"layer 2 attends to the latents of layer 1; supported: those of the last layer before it"),
        (
            {"kv_source_layers": [0, 0, 2, 3]},
            "layer 1 attends to the latents of layer 0; supported: .*that has RoPE as it has",
        ),
        ({"no_rope_layers": [1] * 4}, r"kv_source_layers is \(0, 1, 0, 1\), where layer 2 attends to the latents of layer 0; supported"),
        ({"kv_source_layers": [0, 1, 3, 1]}, "layer 2 attends to the latents of layer 3; supported"),
        (
            {"rope_parameters": {**LARGE_4["rope_parameters"], "mscale_all_dim": 1.0, "mscale": 1.0, "attention_factor": None}},
            "neither mscale_all_dim nor llama_4_scaling_beta",
        ),
        ({"rope_parameters": {**LARGE_4["rope_parameters"], "llama_4_scaling_beta": 0.1}}, "neither mscale_all_dim nor llama_4"),
        (
            {"model_type": "deepseek_v3", "q_lora_rank": 96},
            r"no_rope_layers is \[1, 0, 1, 0\] with model_type 'deepseek_v3'; supported: with",
        ),
        ({"rope_parameters": {**LARGE_4["rope_parameters"], "attention_factor": "1"}}, r"rope_scaling\['attention_factor'\] is '1'; supp"),
    ],
)
def test_configurations_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MlaConfig.from_hugging_face({**LARGE_4, **change})


def test_layers_that_do_not_lend_may_stand_between() -> None:
    """Layer 1 keeps its latents to itself, so that layer 2 attends to those of layer 0 in transformers, too."""
    config = MlaConfig.from_hugging_face({**LARGE_4, "no_rope_layers": [1] * 4, "kv_source_layers": [0, 1, 0, 3]})
    assert [config.of_layer(layer).latents for layer in range(4)] == ["lent", "own", "borrowed", "own"]


def test_calls_that_are_refused() -> None:
    built, hidden = layers(), torch.zeros(3, HIDDEN)
    with pytest.raises(ValueError, match="no layer lends latents with 0 rotary columns; supported: behind a layer that does, in one step"):
        built[3](hidden, None, plan_sequences([3], "cpu"))
    batch = plan_sequences([3], "cpu")
    with torch.no_grad():
        built[1](hidden, None, batch)
    with pytest.raises(
        ValueError, match="the layer that lends latents ran under no_grad; supported: both in one mode, as with use_reentrant"
    ):
        built[3](hidden.clone().requires_grad_(), None, batch)
    with pytest.raises(ValueError, match=r"no_rope_layers, kv_source_layers or window_layers; supported: .*config\.of_layer\(layer\)"):
        MlaAttention(MODEL, built[0].weights)
    with pytest.raises(ValueError, match=r"the config has no_rope_layers, kv_source_layers or window_layers; supported"):
        MlaWeights.from_tensors(TENSORS[0], MODEL)
    with pytest.raises(ValueError, match=r"kv_source_layers is \[0\]; supported: a tuple of integers, one for each layer"):
        replace(LAYERS[0], kv_source_layers=[0])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="latents is 'shared'; supported: 'own', 'lent', 'borrowed'"):
        replace(LAYERS[0], latents="shared")  # type: ignore[arg-type]


def test_pages_with_something_between_them(arch: Arch) -> None:
    """Keys of 512 columns of 16 bits are read in rows, where tokens choose them."""
    built, hidden = layers(torch.bfloat16), [torch.randn(70, HIDDEN, generator=DRAW).bfloat16() for _ in range(4)]
    (keys, index_keys), wide = caches(torch.bfloat16), torch.zeros(4, 65, 1, 512, dtype=torch.bfloat16)
    keys[1] = wide[:, :64]
    with cute_mla.simulate(arch, 2), pytest.raises(ValueError, match=r"strides .*512 columns of 16 bits .*: pages one behind the other"):
        step(built, hidden, ([1, 1], [20, 20]), (keys, index_keys), 2)


def test_weights_come_back_and_keep_their_dtypes() -> None:
    for config, tensors in zip(LAYERS, TENSORS, strict=True):
        weights = MlaWeights.from_tensors(tensors, config)
        found = weights.to_tensors(config)
        if any(name.startswith("indexer.") for name in tensors):
            found |= IndexerWeights.from_tensors(tensors, config).to_tensors(config)
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensors[name]) for name in found)
        shard = MlaWeights.from_tensors(tensors, config, shard=Shard(2, 3))
        assert shard.q_scale is not None
        assert torch.equal(shard.q_scale, tensors["softmax_scaling.scale"][2:])
        layer = MlaAttention(config, weights.to(dtype=torch.bfloat16))
        assert layer.q_scale is not None
        assert (layer.q_b.dtype, layer.q_scale.dtype) == (torch.bfloat16, torch.float32)
    for change in (lambda layer: layer.to(torch.bfloat16), lambda layer: layer.float()):
        layer = change(MlaAttention(LAYERS[0], MlaWeights.from_tensors(TENSORS[0], LAYERS[0])))
        assert layer.alpha is not None
        assert torch.equal(layer.alpha, ALPHAS)


@pytest.mark.parametrize("model", ["model.", "model.language_model."])
def test_alpha_of_a_checkpoint(model: str, tmp_path: Path) -> None:
    """One tensor of the model, which every layer with RoPE reads."""
    safetensors = pytest.importorskip("safetensors.torch")
    stored = {f"{model}{ALPHA}": ALPHAS}
    for layer, tensors in enumerate(TENSORS):
        stored |= {f"{model}layers.{layer}.self_attn.{name}": tensor for name, tensor in tensors.items() if name != ALPHA}
    safetensors.save_file(stored, tmp_path / "model.safetensors")
    for layer, tensors in enumerate(TENSORS):
        weights = load_weights(tmp_path, layer, MODEL, dtype=torch.float32)
        wanted = MlaWeights.from_tensors(tensors, LAYERS[layer])
        assert all(torch.equal(one, wanted.to_tensors(LAYERS[layer])[name]) for name, one in weights.to_tensors(LAYERS[layer]).items())
        assert (load_indexer_weights(tmp_path, layer, MODEL) is None) == (layer == 1)
    del stored[f"{model}{ALPHA}"]
    safetensors.save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"there is no .*rotary_emb\.alpha; supported: a checkpoint with all weights"):
        load_weights(tmp_path, 0, MODEL)
