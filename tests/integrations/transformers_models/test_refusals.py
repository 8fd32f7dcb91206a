"""Models, caches and calls that a patched model does not compute, and how it says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer

import cute_mla
from cute_mla.integrations.transformers import patch
from tests.integrations.transformers_models.tiny_models import make, tokens


class OtherLatentAttention(nn.Module):
    """Attention of a class that patch() does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.kv_a_proj_with_mqa = nn.Linear(4, 4)


def attention_of(model: PreTrainedModel, layer: int = 1) -> Any:
    """Return an attention module of a causal model."""
    return model.model.layers[layer].self_attn


def rescale(model: PreTrainedModel) -> None:
    attention_of(model).scaling *= 2


def rotate_faster(model: PreTrainedModel) -> None:
    model.model.rotary_emb.inv_freq *= 1.01


def scale_rotary(model: PreTrainedModel) -> None:
    model.model.rotary_emb.attention_scaling = 1.1


def add_other_attention(model: PreTrainedModel) -> None:
    model.model.layers[1].other = OtherLatentAttention()


def forget_weights(model: PreTrainedModel) -> None:
    attention_of(model).kv_b_proj.to("meta")


def quantise(model: PreTrainedModel) -> None:
    attention_of(model).o_proj.weight = nn.Parameter(torch.zeros(8, 8, dtype=torch.uint8), requires_grad=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (rescale, r"the scale of the softmax is 0\.\d+; supported with this configuration: 0\.\d+"),
        (rotate_faster, r"rope_parameters are \{.*\}; supported: no scaling, YaRN or llama3, over 32 pairs"),
        (scale_rotary, r"rope_parameters are \{.*\}; supported: no scaling, YaRN or llama3, over 32 pairs"),
        (
            add_other_attention,
            r"latent attention of class OtherLatentAttention; supported: AXK1Attention, .*and any by attn_implementation='cute_mla'",
        ),
        (forget_weights, r"the weights are on meta; supported: a model with its weights loaded"),
        (quantise, r"o_proj\.weight has shape \[8, 8\]; supported with this config: \[64, 256\]"),
    ],
)
def test_a_model_that_is_not_replaced_is_left_as_it_was(change: Callable[[PreTrainedModel], None], message: str) -> None:
    model = make("deepseek_v3")
    change(model)
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=message):
        patch(model)
    assert [type(module) for module in model.modules()] == before
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": 256, "qk_rope_head_dim": 32}, r"kv_lora_rank is 256 with qk_rope_head_dim 32; supported: 512 with 64"),
        ({"v_head_dim": 64}, r"qk_nope_head_dim is 128 with v_head_dim 64; supported"),
        ({"num_attention_heads": 129, "num_key_value_heads": 129}, r"the weights hold 129 heads; supported: up to 128"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}, r"of type 'linear'; supported: yarn"),
    ],
)
def test_configurations_without_kernels(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        patch(make("deepseek_v3", **changes))


def test_layers_that_name_other_latents_than_transformers_reads() -> None:
    """Layer 2 attends to the latents of layer 1 in transformers, whatever its entry says."""
    model = make("mistral_large_4", no_rope_layers=[1] * 4, kv_source_layers=[0, 1, 0, 1])
    with pytest.raises(ValueError, match="layer 2 attends to the latents of layer 0; supported: those of the last layer before it"):
        patch(model)


def test_layers_without_the_frequencies_of_their_model() -> None:
    layers = next(module for module in make("mistral_large_4").modules() if isinstance(module, nn.ModuleList) and len(module) == 4)
    with pytest.raises(ValueError, match="ModuleList has no rotary embedding with alpha; supported: the whole model"):
        patch(layers)


def test_drafts_beyond_the_tail_of_pools() -> None:
    model = make("glm_5_3_flash")
    patch(model)
    cache = model(tokens(70)[0], use_cache=True).cache
    with pytest.raises(ValueError, match=r"crop\(-50\) of a layer with pools of 16 keys; supported: to -49"):
        cache.crop(-50)
    cache.crop(-40)
    with pytest.raises(ValueError, match=r"crop\(-10\) of a layer with pools of 16 keys; supported: to -9"):
        cache.crop(-10)
    cache.crop(-9)
    assert cache.layers[2].lengths == [21]
    with torch.no_grad():
        model(tokens(45)[0], cache=cache, use_cache=True)
    with pytest.raises(ValueError, match="supported: to -45"):
        cache.crop(-46)


def test_models_without_latent_attention() -> None:
    with pytest.raises(ValueError, match=r"Linear has no latent attention to replace; supported: AXK1Attention, "):
        patch(nn.Linear(3, 3))
    model = make("deepseek_v3")
    assert patch(model) == 2
    with pytest.raises(ValueError, match=r"DeepseekV3ForCausalLM has no latent attention to replace"):
        patch(model)


@pytest.mark.parametrize("chunk_tokens", [0, -1, 1.5, True])
def test_chunks_without_tokens(chunk_tokens: Any) -> None:
    with pytest.raises(ValueError, match=r"chunk_tokens is .*; supported"):
        patch(make("deepseek_v3"), chunk_tokens=chunk_tokens)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    patched = make("deepseek_v3")
    patch(patched)
    return patched


def test_caches_of_other_kinds(model: PreTrainedModel) -> None:
    ids, _ = tokens(4)
    filled = DynamicCache(config=model.config)
    filled.update(torch.zeros(1, 1, 4, 512), torch.zeros(1, 1, 4, 64), 0)
    offloaded = DynamicCache(config=model.config)
    offloaded.offloading = True
    with torch.no_grad():
        for cache, name in (
            (StaticCache(config=model.config, max_cache_len=8), "StaticLayer"),
            (filled, "DynamicLayer with keys"),
            (offloaded, "DynamicCache with offloading"),
        ):
            with pytest.raises(ValueError, match=rf"is {name}; supported: a DynamicCache, new or filled by a patched model, without"):
                model(ids, cache=cache)
        latent = model(ids, use_cache=True).cache
        assert not isinstance(latent.layers[0], DynamicLayer) or latent.layers[0].lengths == [4]
        with pytest.raises(ValueError, match=r"a cache layer of cute_mla was given keys by another attention module"):
            make("deepseek_v3")(ids, cache=latent)
        with pytest.raises(ValueError, match=r"the batch has 2 requests, and the cache 1; supported: as many"):
            model(torch.cat((ids, ids)), cache=latent)


def test_masks_of_other_kinds(model: PreTrainedModel) -> None:
    ids, mask = tokens(6, 4)
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"attention_mask has shape \[2, 1, 6, 6\]; supported: \[2, cached and new tokens\]"):
            model(ids, attention_mask=torch.zeros(2, 1, 6, 6))
        with pytest.raises(ValueError, match=r"not plainly causal; supported: the causal mask, with padding"):
            model(ids[:1], position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), use_cache=False)
        cache = model(ids, attention_mask=mask, use_cache=True).cache
        new = ids[:, :1]
        with pytest.raises(ValueError, match=r"attention_mask is None, and some of the 6 cached tokens are padding"):
            model(new, cache=cache)
        with pytest.raises(ValueError, match=r"attention_mask keeps \[6, 6\] cached tokens, and \[6, 4\] were no padding before"):
            model(new, attention_mask=torch.ones(2, 7), cache=cache)
        with pytest.raises(ValueError, match=r"attention_mask covers 5 tokens, with 6 cached and 1 new ones; supported: 7"):
            model(new, attention_mask=torch.ones(2, 5), cache=cache)
        with pytest.raises(ValueError, match=r"crop\(-1\) of 0 tokens behind the last padding; supported: 0 to 0"):
            cache.crop(-1)
        model(new, attention_mask=torch.cat((mask, torch.ones(2, 1)), dim=1), cache=cache)
        cache.crop(-1)
        assert cache.layers[1].lengths == [6, 4]


def test_positions_of_other_shapes(model: PreTrainedModel) -> None:
    module = attention_of(model)
    for shape in ((3, 2, 6), (3, 6), (2, 5)):
        with pytest.raises(ValueError, match=r"position_ids has shape .*; supported: \[2 or 1, 6\]"):
            module(torch.zeros(2, 6, 64), position_ids=torch.zeros(shape, dtype=torch.long))


def test_gradients_through_the_cache(model: PreTrainedModel) -> None:
    ids, _ = tokens(4)
    cache = model(ids, use_cache=True).cache
    with pytest.raises(ValueError, match=r"requires grad, and the batch has 1 decode requests; supported: .*no_grad"):
        model(ids[:, :1], cache=cache)


def test_dropout_in_training() -> None:
    model = make("deepseek_v3", attention_dropout=0.1)
    patch(model)
    ids, _ = tokens(4)
    model(ids)
    with pytest.raises(ValueError, match=r"attention_dropout is 0\.1 in training; supported: 0"):
        model.train()(ids)


def test_fp32_is_not_for_the_kernels(model: PreTrainedModel) -> None:
    ids, _ = tokens(4)
    with cute_mla.simulate("sm90", 2), torch.no_grad(), pytest.raises(ValueError, match=r"dtype torch\.float32; supported"):
        model(ids)
