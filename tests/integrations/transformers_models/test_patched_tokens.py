"""Patched models in fp32, where torch computes the layer: the greedy tokens and the logits of the eager models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from cute_mla.integrations.transformers import patch
from cute_mla.integrations.transformers.latent_cache import PAGE_SIZE, LatentCacheLayer
from tests.integrations.transformers_models.tiny_models import MODELS, make, tokens

GREEDY: dict[str, Any] = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True}


def patched(model: PreTrainedModel, **options: Any) -> PreTrainedModel:
    """Return a patched copy."""
    copied = copy.deepcopy(model)
    patch(copied, **options)
    return copied


def agree(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None, options: dict[str, Any] | None = None, **patching: Any) -> Any:
    """Generate with the eager and with the patched model, compare tokens and logits, and return the latter's results."""
    ours = patched(model, **patching)
    expected, found = (each.generate(ids, attention_mask=mask, **GREEDY, **(options or {})) for each in (model, ours))
    assert torch.equal(found.sequences, expected.sequences)
    for one, other in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4 * float(other.abs().max()))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_requests_of_different_lengths(name: str) -> None:
    """One request without padding, one with it, and one of a single token; the cache then holds latent keys in pages."""
    found = agree(make(name), *tokens(70, 5, 1), {"max_new_tokens": 60})
    layers = [layer for layer in found.past_key_values.layers if isinstance(layer, LatentCacheLayer)]
    assert len(layers) == len([layer for layer in found.past_key_values.layers if not found_linear(layer)])
    widths = {
        "dots3_note": [576, 1088, 1088],
        "glm_5_3_flash": [512] * 3,
        "mistral_4": [320] * 2,
        "mistral_large_4": [576, 0, 512, 0],  # 0: keys of another layer
    }.get(name, [576] * len(layers))
    for layer, columns in zip(layers, widths, strict=True):
        assert layer.lengths == [129, 64, 60]  # the last token is in no cache
        assert layer.keys is not None
        assert list(layer.keys.shape) == [3 * layer.pages, PAGE_SIZE, 1, columns]
        assert 3 <= layer.pages <= 4


def found_linear(layer: Any) -> bool:
    """Return whether a cache layer is that of linear attention."""
    return not hasattr(layer, "keys")


@pytest.mark.parametrize("name", ["deepseek_v3", "glm_4_7_flash", "glm_5_3_flash", "kimi_linear", "mistral_4", "mistral_large_4"])
@pytest.mark.parametrize("chunk_tokens", [8192, 100])
def test_prefill_in_chunks(name: str, chunk_tokens: int) -> None:
    """The later pieces of the prompt attend to cached keys in the decompressed form: at once, or in chunks whose states are merged."""
    wide: dict[str, Any] = {"index_topk": 1024} if name in ("glm_5_3_flash", "mistral_large_4") else {}  # all keys are chosen
    agree(make(name, **wide), *tokens(830), {"max_new_tokens": 3, "prefill_chunk_size": 410}, chunk_tokens=chunk_tokens)


def test_prefill_in_chunks_of_padded_requests() -> None:
    """The first piece of the second request is all padding, that of the third in part."""
    agree(make("deepseek_v3"), *tokens(500, 90, 300), {"max_new_tokens": 3, "prefill_chunk_size": 200})


def test_beams() -> None:
    """Beams reorder the pages, and a prompt is repeated for each."""
    agree(make("deepseek_v3"), *tokens(9, 4), {"max_new_tokens": 12, "num_beams": 3, "num_return_sequences": 2})


def test_drafts_are_cropped() -> None:
    """Drafts looked up in the prompt: several new tokens a step, of which the wrong ones leave the cache."""
    ids, _ = tokens(40)
    found = agree(make("deepseek_v3"), torch.cat((ids, ids), dim=1), None, {"max_new_tokens": 20, "prompt_lookup_num_tokens": 5})
    assert found.past_key_values.get_seq_length() == 99


def test_a_conversation_goes_on() -> None:
    """A second prompt behind the cache of the first one, and the same cache copied for another one."""
    model = make("deepseek_v2_lite")
    ours = patched(model)
    ids, mask = tokens(30, 12)
    results = []
    for each in (model, ours):
        with torch.no_grad():
            first = each(ids, attention_mask=mask, use_cache=True)
        for seed in (5, 6):
            more, _ = tokens(7, 7, seed=seed)
            whole = torch.cat((ids, more), dim=1), torch.cat((mask, torch.ones_like(more)), dim=1)
            cache = copy.deepcopy(first.cache)
            results.append(each.generate(whole[0], attention_mask=whole[1], cache=cache, max_new_tokens=5, do_sample=False))
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])
    assert not torch.equal(results[0], results[1])


def test_without_a_cache() -> None:
    model = make("deepseek_v3")
    ids, mask = tokens(30, 12, 1)
    with torch.no_grad():
        expected, found = (each(ids, attention_mask=mask, use_cache=False).logits for each in (model, patched(model)))
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ["deepseek_v3", "mistral_large_4"])
def test_gradients_are_those_of_the_eager_model(name: str) -> None:
    """Also of latents that other layers borrow. A model can be copied behind such a step."""
    model = make(name).train()
    ours = patched(model)
    ids, _ = tokens(20, 20)
    for each in (model, ours):
        each(ids, labels=ids, use_cache=False).loss.backward()
    own, replaced = (getattr(each.model, "language_model", each.model) for each in (model, ours))
    torch.testing.assert_close(replaced.embed_tokens.weight.grad, own.embed_tokens.weight.grad, rtol=1e-3, atol=1e-5)
    for layer, field, weight in ((0, "kv_a", "kv_a_proj_with_mqa"), (1, "kv_b", "kv_b_proj")):
        expected = getattr(own.layers[layer].self_attn, weight).weight.grad
        torch.testing.assert_close(getattr(replaced.layers[layer].self_attn.attention, field).grad, expected, rtol=1e-3, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(copy.deepcopy(ours)(ids).logits, ours(ids).logits)


def test_positions_of_the_caller() -> None:
    """Positions that do not count from 0, one row for all requests."""
    model = make("deepseek_v3")
    ids, _ = tokens(10, 10)
    positions = torch.arange(100, 110).unsqueeze(0)
    with torch.no_grad():
        expected, found = (each(ids, position_ids=positions).logits for each in (model, patched(model)))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


def test_a_mask_that_changes_in_place() -> None:
    """The tensor of the call before, with other contents, is planned anew."""
    module = patched(make("deepseek_v3")).model.layers[0].self_attn
    hidden, mask = torch.randn(2, 6, 64), torch.ones(2, 6, dtype=torch.bool)
    with torch.no_grad():
        module(hidden, mask, DynamicCache())
        mask[1, :3] = False
        found, _ = module(hidden, mask, DynamicCache())
        expected, _ = module(hidden, mask.clone(), DynamicCache())
    assert torch.equal(found, expected)
    assert not found[1, :3].any()


def test_padding_may_hold_anything() -> None:
    """NaN in the hidden states of padding reaches nothing, and the output there is 0."""
    model = patched(make("deepseek_v3"))
    _, mask = tokens(9, 5)
    module = model.model.layers[0].self_attn
    hidden = torch.randn(2, 9, 64)
    with torch.no_grad():
        expected, _ = module(hidden, mask.bool(), DynamicCache())
        found, _ = module(hidden.masked_fill(mask.unsqueeze(2) == 0, torch.nan), mask.bool(), DynamicCache())
    assert torch.equal(found, expected)
    assert not found[1, :4].any()


def test_nothing_but_padding() -> None:
    module = patched(make("deepseek_v3")).model.layers[0].self_attn
    cache = DynamicCache()
    with torch.no_grad():
        out, _ = module(torch.randn(2, 3, 64), torch.zeros(2, 3, dtype=torch.bool), cache)
        assert not out.any()
        out, _ = module(torch.randn(2, 1, 64), torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0]], dtype=torch.bool), cache)
    assert out[0].any()
    assert not out[1].any()
    assert cache.layers[0].lengths == [1, 0]
