"""Patched models in bf16 by the kernels on the simulated device: logits, tokens, and which kernels run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import cute_mla
from cute_mla.integrations.transformers import patch
from cute_mla.spec.arch import SM100, Arch
from tests.integrations.transformers_models.tiny_models import MODELS, make, tokens
from tests.support.launched import record_launches

SMS = 2
STEPS = 3
# Greatest error of logits, as a share of the greatest logit: two or three layers whose weights, activations and keys are rounded to bf16.
# The eager models in bf16 have errors of up to 0.025 here, the patched ones of up to 0.019.
BOUND = 0.025
# Formats of the layers' caches, where they are not all "latent"; "of" one: that of another layer. Variants of dense decode over them
CACHES = {
    "glm_5_3_flash": ["latent_512"] * 3,
    "mistral_4": ["latent_320"] * 2,
    "mistral_large_4": ["latent", "of latent", "latent_512", "of latent"],
}
DECODED = {"latent": "bf16_cluster", "latent_320": "bf16_d320", "latent_512": "bf16_d512"}
KEYS_ON_M = {**DECODED, "latent": "bf16_few_heads"}  # of SM100, where the models here have few heads
ALL_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 8, "topk_group": 2}  # a rounding cannot choose another expert


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return record_launches(monkeypatch)


def agree(found: Tensor, exact: Tensor) -> None:
    """Compare logits [.., vocabulary] with those of the eager model in fp32, and the tokens wherever the first two differ by more."""
    bound = BOUND * float(exact.abs().max())
    torch.testing.assert_close(found.float(), exact, rtol=0, atol=bound)
    first, second = exact.topk(2, dim=-1).values.unbind(-1)
    clear = first - second > 2 * bound
    assert torch.equal(found.argmax(-1)[clear], exact.argmax(-1)[clear])
    assert clear.numel() < 60 or clear.float().mean() > 0.4


def models(name: str, **changes: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return the eager model in fp32, and the patched one in bf16."""
    ours = make(name, torch.bfloat16, **ALL_EXPERTS, **changes)
    patch(ours)
    return make(name, **ALL_EXPERTS, **changes), ours


def walk(model: PreTrainedModel, ids: Tensor, mask: Tensor, following: Tensor) -> list[Tensor]:
    """Return the logits of a prompt's tokens without padding, then those of each following token."""
    cache, found = DynamicCache(config=model.config), []
    for new in (ids, *following.split(1, dim=1)):
        mask = mask if new is ids else torch.cat((mask, torch.ones_like(new)), dim=1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
        with torch.no_grad():
            logits = model(new, attention_mask=mask, position_ids=positions, cache=cache).logits
        found.append(logits[mask[:, -new.shape[1] :].bool()])
    return found


@pytest.mark.parametrize("name", [name for name in MODELS if name != "dots3_note"])
def test_a_padded_prompt_and_the_tokens_behind_it(name: str, arch: Arch, launched: list[str]) -> None:
    exact, ours = models(name)
    ids, mask = tokens(70, 62)
    following, _ = tokens(STEPS, STEPS, seed=8)
    expected = walk(exact, ids, mask, following)
    assert launched == []
    with cute_mla.simulate(arch, SMS) as device:
        found = walk(ours, ids, mask, following)
    assert device.findings == []
    for one, other in zip(found, expected, strict=True):
        agree(one, other)
    indexed = [each for each in launched if each.startswith("index_write")]  # keys of the indexers; all tokens are attended to here
    assert len(indexed) == {"deepseek_v32": 2, "glm_5": 2, "hy_v4": 2, "mistral_large_4": 3}.get(name, 0) * (1 + STEPS)
    launched[:] = [each for each in launched if each not in indexed]
    wide = "d256" if name.startswith(("glm", "hy")) else "d128" if name.startswith("mistral") else "d192"
    layers = CACHES.get(name, {"glm_5": 3, "hy_v4": 3, "ling_3": 1}.get(name, 2) * ["latent"])
    inserts = [[] if cache.startswith("of ") else [f"cache_insert_bf16_{cache}"] for cache in layers]
    prefill = [each for insert in inserts for each in (*insert, f"dense_prefill_bf16_{wide}")]
    assert launched[: len(prefill)] == prefill
    decode = [each for each in launched[len(prefill) :] if not each.startswith("combine")]
    assert [each.startswith("split_plan") for each in decode].count(True) == STEPS  # one plan a step, for all layers
    kernels = KEYS_ON_M if arch == SM100 else DECODED
    decoded = [kernels[cache.removeprefix("of ")] for cache in layers]
    rest = [each for each in decode if not each.startswith("split_plan")]
    step = [each for insert, kernel in zip(inserts, decoded, strict=True) for each in (*insert, f"dense_decode_{kernel}")]
    assert all(one.startswith(other) for one, other in zip(rest, step * STEPS, strict=True))


def test_layers_with_a_window(arch: Arch, launched: list[str]) -> None:
    """dots3-note: window layers prefill in the absorbed form, over pages of the new keys alone, and decode over the cache."""
    exact, ours = models("dots3_note")
    ids, mask = tokens(70, 62)
    following, _ = tokens(STEPS, STEPS, seed=8)
    expected = walk(exact, ids, mask, following)
    with cute_mla.simulate(arch, SMS) as device:
        found = walk(ours, ids, mask, following)
    assert device.findings == []
    for one, other in zip(found, expected, strict=True):
        agree(one, other)
    ran = [each.partition("_cluster")[0] for each in launched if not each.startswith(("index_write", "combine"))]
    prefill = 2 * ["cache_insert_bf16_latent_1088", "split_plan_i32", "dense_decode_bf16_d1088"]
    assert ran[:8] == ["cache_insert_bf16_latent", "dense_prefill_bf16_d192", *prefill]
    names = [each for each in ran[8:] if "d1088" in each or each.startswith("split_plan")]
    assert names == STEPS * ["split_plan_i32", "split_plan_i32", *2 * ["dense_decode_bf16_d1088"]]  # one plan of each kind a step


def test_prefill_over_cached_keys(arch: Arch, launched: list[str]) -> None:
    """200 new tokens over 190 cached ones are prefilled in the decompressed form, and their states merged."""
    exact, ours = models("deepseek_v3", num_hidden_layers=1)
    ids, _ = tokens(390)
    caches = DynamicCache(config=exact.config), DynamicCache(config=ours.config)
    with cute_mla.simulate(arch, SMS) as device, torch.no_grad():
        for part in ids.split((190, 200), dim=1):
            expected, found = (model(part, cache=cache).logits for model, cache in zip((exact, ours), caches, strict=True))
            agree(found, expected)
    assert device.findings == []
    own = ["cache_insert_bf16_latent", "dense_prefill_bf16_d192"]
    assert launched == [*own, *own, "cache_gather_b16_latent", "dense_prefill_bf16_d192", "merge_states_bf16_d128"]


def test_drafts_of_several_tokens(arch: Arch, launched: list[str]) -> None:
    """Five new tokens are decoded in one launch, the last three dropped, and others decoded in their place."""
    exact, ours = models("deepseek_v2_lite", num_hidden_layers=1)
    prompt, _ = tokens(64)
    caches = DynamicCache(config=exact.config), DynamicCache(config=ours.config)
    with cute_mla.simulate(arch, SMS) as device, torch.no_grad():
        for seed, count in ((3, 64), (4, 5), (5, 2)):
            new = prompt if count == 64 else tokens(count, seed=seed)[0]
            expected, found = (model(new, cache=cache).logits for model, cache in zip((exact, ours), caches, strict=True))
            agree(found, expected)
            if count == 5:
                for cache in caches:
                    cache.crop(-3)
    assert device.findings == []
    assert caches[1].get_seq_length() == 68
    assert [each for each in launched if each.startswith("dense_prefill")] == ["dense_prefill_bf16_d192"]


def test_generate(arch: Arch, launched: list[str]) -> None:
    """The whole of generate(), whose tokens are those of the eager model in bf16 as far as the logits decide."""
    exact, ours = models("glm_4_7_flash")
    ids, mask = tokens(9, 4)
    with cute_mla.simulate(arch, SMS):
        found = ours.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
    assert any(each.startswith("dense_decode") for each in launched)
    following = found[:, ids.shape[1] :]
    for step, logits in enumerate(walk(exact, ids, mask, following[:, :-1])):
        last = logits[[8, 12]] if step == 0 else logits
        chosen = last.gather(1, following[:, step : step + 1]).squeeze(1)
        assert (last.max(dim=1).values - chosen <= 2 * BOUND * last.abs().max()).all()


def test_gradients_by_the_kernels(arch: Arch, launched: list[str]) -> None:
    exact, ours = (model.train() for model in models("deepseek_v3", num_hidden_layers=1))
    ids, _ = tokens(20, 20)
    exact(ids, labels=ids, use_cache=False).loss.backward()
    with cute_mla.simulate(arch, SMS):
        ours(ids, labels=ids, use_cache=False).loss.backward()
    assert {"dense_prefill_dq_bf16_d192", "dense_prefill_dkdv_bf16_d192"} <= set(launched)
    expected, found = (each.model.embed_tokens.weight.grad.float() for each in (exact, ours))
    assert torch.nn.functional.cosine_similarity(found.flatten(), expected.flatten(), dim=0) > 0.99


def test_a_copied_cache_is_another_cache(arch: Arch) -> None:
    """Two continuations of one prompt do not see each other's keys."""
    _, ours = models("deepseek_v2", num_hidden_layers=1)
    prompt, _ = tokens(64)
    one, other = tokens(2, 2, seed=9)[0].split(1)
    with cute_mla.simulate(arch, SMS), torch.no_grad():
        first = ours(prompt, use_cache=True).cache
        second = copy.deepcopy(first)
        alone = ours(one, cache=copy.deepcopy(first)).logits
        ours(other, cache=second)
        assert torch.equal(ours(one, cache=first).logits, alone)
