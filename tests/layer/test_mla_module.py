"""The layer as a torch.nn.Module: parameters, state_dict, to, and what it and the objects of a step look like."""

from __future__ import annotations

import copy
import pickle
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from cute_mla.layer import MlaAttention, MlaBatch, MlaConfig, MlaWeights
from tests.layer.mla_models import MODELS, V2_LITE, V3
from tests.layer.mla_steps import Sequences

EVERY_MODEL = pytest.mark.parametrize("model", MODELS)
CONTEXTS, DECODES = [5, 2], 1


def sequences_of(model: str, dtype: torch.dtype = torch.float32) -> Sequences:
    """Return sequences for a decode and a prefill over keys in the cache."""
    return Sequences.drawn(MODELS[model], [6, 4], dtype).with_context(CONTEXTS)


def step(layer: MlaAttention, sequences: Sequences) -> torch.Tensor:
    """Return the output of one step, over a cache of its own."""
    hidden = torch.cat(sequences.new_tokens(CONTEXTS))
    out: torch.Tensor = layer(hidden, sequences.k_cache.clone(), sequences.plan(CONTEXTS, DECODES))
    return out


def zeroed(layer: MlaAttention) -> MlaAttention:
    """Return a layer of the same sizes whose weights are all 0."""
    weights = layer.weights
    given = {field.name: getattr(weights, field.name) for field in fields(MlaWeights)}
    zeros: dict[str, Any] = {name: None if weight is None else torch.zeros_like(weight) for name, weight in given.items()}
    return MlaAttention(layer.config, MlaWeights(**zeros))


@EVERY_MODEL
def test_weights_are_parameters_without_gradients_at_first(model: str) -> None:
    layer = sequences_of(model).layer()
    held = {"q_a", "q_a_norm", "q_b", "kv_a", "kv_a_norm", "kv_b", "o"} - ({"q_a", "q_a_norm"} if model == "v2_lite" else set())
    held |= {"kimi_k3": {"gate"}, "scaled_gated": {"gate", "sinks"}}.get(model, set())
    assert isinstance(layer, torch.nn.Module)
    assert set(layer.state_dict()) == set(dict(layer.named_parameters())) == held
    assert not any(parameter.requires_grad for parameter in layer.parameters())
    assert list(layer.buffers()) == []
    for name in held:
        assert getattr(layer.weights, name) is getattr(layer, name)
    assert not step(layer, sequences_of(model)).requires_grad


def test_a_layer_shares_the_memory_of_its_weights() -> None:
    weights = sequences_of("v3").layer().weights
    layer = MlaAttention(MlaConfig.from_hugging_face(sequences_of("v3").config), weights)
    assert layer.kv_b.data_ptr() == weights.kv_b.data_ptr()


@EVERY_MODEL
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("meta", [False, True])
def test_a_state_dict_makes_another_layer_the_same(model: str, assign: bool, meta: bool) -> None:
    """Also of a layer without memory, as engines make it before they load weights."""
    sequences = sequences_of(model)
    layer = sequences.layer()
    expected = step(layer, sequences)
    other = zeroed(layer)
    assert not torch.equal(step(other, sequences), expected)
    if meta:
        other = other.to("meta") if assign else other.to("meta").to_empty(device="cpu")
    other.load_state_dict(layer.state_dict(), assign=assign)
    assert torch.equal(step(other, sequences), expected)


def test_dtypes_change_and_frequencies_do_not() -> None:
    """bf16 weights that were fp32 in between give the same step: frequencies stay in fp32, where rounding to bf16 would change them."""
    sequences = sequences_of("v3", torch.bfloat16)
    layer = sequences.layer()
    expected = step(layer, sequences)
    assert torch.equal(step(layer.float().to(torch.bfloat16), sequences), expected)
    assert {parameter.dtype for parameter in layer.half().parameters()} == {torch.float16}
    assert layer.bfloat16() is layer


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_compute_the_same(duplicate: object) -> None:
    sequences = sequences_of("v2_lite")
    layer = sequences.layer()
    other = duplicate(layer)  # type: ignore[operator]
    assert other.kv_b.data_ptr() != layer.kv_b.data_ptr()
    assert torch.equal(step(other, sequences), step(layer, sequences))


def test_a_layer_is_part_of_a_model() -> None:
    layer = sequences_of("v3").layer()
    model = torch.nn.ModuleDict({"attention": layer})
    assert "attention.kv_b" in model.state_dict()
    seen: list[torch.Size] = []
    layer.register_forward_hook(lambda module, given, out: seen.append(out.shape))
    step(layer, sequences_of("v3"))
    assert seen == [(3, layer.config.hidden_size)]


def test_what_objects_look_like() -> None:
    layer, sequences = sequences_of("v3", torch.bfloat16).layer(), sequences_of("v3", torch.bfloat16)
    assert repr(layer) == "MlaAttention(hidden_size=96, heads=3 of 3, q_lora_rank=1536, dtype=torch.bfloat16, device='cpu')"
    lite = Sequences.drawn(V2_LITE, [1]).layer()
    assert "q_lora_rank=None" in repr(lite)
    assert repr(lite.weights).startswith("MlaWeights(q_a=None, q_a_norm=None, q_b=<float32 [576, 96] on cpu>, kv_a=<float32 [576, 96]")
    plan: MlaBatch = sequences.plan(CONTEXTS, DECODES)
    text = repr(plan)
    assert text.startswith(
        "MlaBatch(positions=<int64 [3] on cpu>, slot_mapping=<int64 [3] on cpu>, decode=DecodeRequests(block_table=<int32"
    )
    assert "schedule=MlaSchedule(not planned), max_keys=6, share=None), prefill=PrefillRequests(" in text
    assert text.endswith("chunks=<1 of ContextChunk>), selection=Selection(empty))")
    assert plan.prefill is not None
    assert repr(plan.prefill.chunks[0]).startswith("ContextChunk(block_table=<int32 [1, 1] on cpu>, starts=")
    assert repr(replace(plan.prefill, chunks=())).endswith("tokens=2, chunks=())")
    assert len(text) < 500
    assert "hidden_size=7168" in repr(MlaConfig.from_hugging_face(V3))
