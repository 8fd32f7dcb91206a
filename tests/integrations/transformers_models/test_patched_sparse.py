"""Patched models whose indexers choose keys: DeepSeek-V3.2, and GLM-5, where layers share a choice.

Our indexer rounds its queries and keys to e4m3, as DeepSeek's own does, and transformers' does not. Near the last chosen key they therefore
differ, and logits are compared in two ways: with transformers' by how much nearer they are than those of dense attention, and with the
patched model's own of one call without a cache.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import cute_mla
from cute_mla.integrations.transformers import patch
from cute_mla.spec.arch import Arch
from tests.integrations.transformers_models.tiny_models import make, tokens
from tests.support.launched import record_launches

NAMES = ["deepseek_v32", "dots3_note", "glm_5", "glm_5_3_flash", "hy_v4", "mistral_large_4"]
TOPK = 16
# Options of models of one layer
ALONE: dict[str, dict[str, Any]] = {
    "deepseek_v32": {},
    "dots3_note": {"layer_types": ["indexed_attention"]},
    "glm_5_3_flash": {"layer_types": ["indexed_attention"], "indexer_types": ["full"]},
    "mistral_large_4": {"no_rope_layers": [1], "kv_source_layers": [0], "indexer_types": ["full"]},
}


def patched(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """Return a patched model that chooses TOPK keys."""
    model = make(name, dtype, index_topk=TOPK, **changes)
    patch(model)
    return model


def logits_of(model: PreTrainedModel, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
    """Return the logits of all tokens but padding, from one call."""
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=positions, **options).logits.float()
    return logits if mask is None else logits[mask.bool()]


def rms(difference: Tensor) -> float:
    return float(difference.square().mean().sqrt())


@pytest.mark.parametrize("name", NAMES)
def test_up_to_topk_tokens_all_are_chosen(name: str) -> None:
    ids, _ = tokens(TOPK, TOPK)
    torch.testing.assert_close(logits_of(patched(name), ids), logits_of(make(name, index_topk=TOPK), ids), rtol=0, atol=1e-3)


@pytest.mark.parametrize(("name", "changes"), [*((name, {}) for name in NAMES), ("mistral_large_4", {"no_rope_layers": [0]})])
def test_the_choice_is_that_of_transformers_but_for_roundings(name: str, changes: dict[str, Any]) -> None:
    """One layer has 0.34 to 0.47 of the difference to dense attention; 0.7 to 1.0 with the indexer's pairs of columns exchanged.

    Of Mistral Large 4 without RoPE, 0.95 without the scales of the indexer's queries, and 0.66 without their norm.
    """
    ids, mask = tokens(70, 40)
    one: dict[str, Any] = {"num_hidden_layers": 1, **ALONE.get(name, {"indexer_types": ["full"]}), **changes}
    sparse, dense = (logits_of(make(name, index_topk=topk, **one), ids, mask) for topk in (TOPK, 640))
    ours = patched(name, **one)
    found = logits_of(ours, ids, mask)
    (own,), (other,) = ([each for each in model.modules() if hasattr(each, "indexer")] for model in (ours, make(name, **one)))
    assert own.indexer.norm_eps == other.indexer.k_norm.eps
    assert rms(found - sparse) < 0.6 * rms(dense - sparse)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prefill_chunk_size": 25}], ids=["greedy", "beams", "chunks"])
def test_pages_of_the_indexer_follow_those_of_the_keys(name: str, options: dict[str, Any]) -> None:
    """Tokens generated over the cache have the logits of one call over the whole sequence, without a cache."""
    model = patched(name)
    ids, mask = tokens(60, 33)
    whole = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, **options)
    seen = torch.cat((mask, torch.ones(2, 8, dtype=mask.dtype)), dim=1)
    expected = logits_of(model, whole, seen, use_cache=False)
    with torch.no_grad():
        cache = model(
            whole[:, :-1], attention_mask=seen[:, :-1], position_ids=(seen.cumsum(1) - 1).clamp(min=0)[:, :-1], use_cache=True
        ).cache
        last = model(whole[:, -1:], attention_mask=seen, position_ids=seen.cumsum(1)[:, -1:] - 1, cache=cache).logits
    torch.testing.assert_close(last[:, 0], expected[[67, 67 + 41]], rtol=0, atol=1e-3)
    if not options:
        ends = torch.tensor([59, 68 + 32])
        for step in range(8):
            assert torch.equal(expected[ends + step].argmax(1), whole[:, 60 + step])


@pytest.mark.parametrize("name", ["glm_5_3_flash", "mistral_large_4"])
def test_drafts_that_are_taken_back(name: str) -> None:
    """Five tokens, of which three leave the pages and, of pools, the tail; others follow as in one call over the sequence that remains."""
    model, (prompt, _), (drafts, _), (others, _) = patched(name), tokens(62), tokens(5, seed=4), tokens(4, seed=5)
    with torch.no_grad():
        cache = model(prompt, use_cache=True).cache
        model(drafts, cache=cache)
        cache.crop(-3)
        found = model(others, cache=cache).logits[0]
    expected = logits_of(model, torch.cat((prompt, drafts[:, :2], others), dim=1), use_cache=False)[0, -4:]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "changes", "attention"),
    [
        ("deepseek_v32", {"num_hidden_layers": 1}, {"masked_prefill", "sparse_decode"}),
        ("dots3_note", ALONE["dots3_note"], {"masked_prefill", "sparse_decode"}),
        ("glm_5", {"indexer_types": ["full", "shared"]}, {"sparse_prefill", "sparse_decode"}),  # of 256 columns none takes a mask
        ("glm_5_3_flash", {"layer_types": ["indexed_attention"] * 2, "indexer_types": ["full", "shared"]}, {"sparse_prefill"}),
        ("hy_v4", {"indexer_types": ["full", "shared"]}, {"sparse_prefill", "sparse_decode"}),
        ("mistral_large_4", {"indexer_types": ["full", *["shared"] * 3]}, {"masked_prefill", "sparse_prefill", "sparse_decode"}),
        # Keys without rotary columns, of an indexer that rotates none: sparse prefill decodes
        ("mistral_large_4", {**ALONE["mistral_large_4"], "no_rope_layers": [0]}, {"masked_prefill", "sparse_prefill"}),
    ],
    ids=[*NAMES, "mistral_large_4_nope"],
)
def test_the_kernels(name: str, changes: dict[str, Any], attention: set[str], arch: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill of two requests and a token behind each, in bf16, against the same model in torch, whose first layer alone chooses."""
    layers = len(changes.get("indexer_types", ["full"]))
    model = patched(name, torch.bfloat16, **{"num_experts_per_tok": 8, "topk_group": 2, "num_hidden_layers": layers, **changes})
    ids, mask = tokens(24, 20)
    new = torch.ones(2, 1, dtype=torch.long)
    seen = torch.cat((mask, new), dim=1)
    names = record_launches(monkeypatch)

    def walk() -> list[Tensor]:
        cache = DynamicCache(config=model.config)
        first = logits_of(model, ids, mask, cache=cache)
        with torch.no_grad():
            return [first, model(new, attention_mask=seen, position_ids=seen.cumsum(1)[:, -1:] - 1, cache=cache).logits.float()]

    expected = walk()
    assert names == []
    with cute_mla.simulate(arch, 2) as device:
        found = walk()
    assert device.findings == []
    kinds = {each.partition("_bf16")[0].partition("_e4m3")[0].partition("_fp32")[0] for each in names}
    assert {"index_write", "mqa_logits", "topk_indices"} <= kinds
    assert kinds & {"masked_prefill", "sparse_prefill", "sparse_decode", "dense_prefill", "dense_decode"} == attention
    for one_of_them, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one_of_them, other, rtol=0, atol=0.025 * float(other.abs().max()))
