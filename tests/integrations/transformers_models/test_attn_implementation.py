"""attn_implementation="cute_mla" of models that are not patched: transformers expands the keys, dense prefill attends to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import cute_mla
from cute_mla.integrations.transformers import register
from cute_mla.integrations.transformers.interface import attend
from cute_mla.spec.arch import Arch
from tests.integrations.transformers_models.tiny_models import MODELS, make, tokens
from tests.support.launched import record_launches

UNINDEXED = [name for name in MODELS if name not in ("deepseek_v32", "glm_5")]


def expanding(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """Return a model with our attention function."""
    register()
    model = make(name, dtype, **changes)
    model.set_attn_implementation("cute_mla")
    return model


@pytest.mark.parametrize("name", UNINDEXED)
def test_greedy_tokens(name: str) -> None:
    ids, mask = tokens(20, 5, 1)
    models = (make(name), expanding(name))
    expected, found = (each.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False) for each in models)
    assert torch.equal(found, expected)


def test_several_query_heads_for_each_kv_head(arch: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any model with heads of 128 columns, such as Llama's, by the kernels."""
    register()
    config = LlamaConfig(
        vocab_size=50, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=128
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    ids, mask = tokens(20, 5)
    ids = ids % 50
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits[mask.bool()]
    model.set_attn_implementation("cute_mla")
    names = record_launches(monkeypatch)
    with cute_mla.simulate(arch, 2) as device, torch.no_grad():
        found = model(ids, attention_mask=mask).logits[mask.bool()]
    assert device.findings == []
    assert names == ["dense_prefill_bf16_d128"]
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["deepseek_v3", "glm_4_7_flash"])
def test_the_kernels(name: str, arch: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill, and one token over cached keys, of requests with padding."""
    exact, ours = make(name, num_hidden_layers=1), expanding(name, torch.bfloat16, num_hidden_layers=1)
    ids, mask = tokens(66, 5)
    names = record_launches(monkeypatch)
    with torch.no_grad(), cute_mla.simulate(arch, 2) as device:
        first, last = ids[:, :-1], ids[:, -1:]
        for each in (exact, ours):
            each.cache = each(first, attention_mask=mask[:, :-1], use_cache=True).cache
        expected, found = (each(last, attention_mask=mask, cache=each.cache).logits for each in (exact, ours))
    assert device.findings == []
    columns = "d256" if name.startswith("glm") else "d192"
    assert names == [f"dense_prefill_bf16_{columns}"] * 2
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=0.025 * float(expected.abs().max()))


def test_models_with_an_indexer_are_for_patch() -> None:
    ids, _ = tokens(4)
    for name in ("deepseek_v32", "glm_5"):
        with pytest.raises(ValueError, match=r"the model has an indexer; supported: cute_mla\.integrations\.transformers\.patch"):
            expanding(name)(ids)


def states(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.1}, r"dropout is 0\.1; supported: 0"),
        ({"sliding_window": 4}, r"sliding_window is given; supported: full attention"),
        ({"softcap": 4.0, "s_aux": torch.zeros(2)}, r"softcap, s_aux is given; supported: full attention"),
        ({"indices": torch.zeros(1)}, r"indices is given; supported: full attention"),
        ({"attention_mask": torch.ones(2, 1, 3, 5)}, r"attention_mask has shape \[2, 1, 3, 5\]; supported: \[2, 5\]"),
        ({"attention_mask": torch.ones(2, 4)}, r"attention_mask has shape \[2, 4\]; supported: \[2, 5\]"),
    ],
)
def test_options_that_change_the_result(options: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"attention_mask": None, **options}
    with pytest.raises(ValueError, match=message):
        attend(torch.nn.Module(), states(2, 4, 3, 16), states(2, 2, 5, 16), states(2, 2, 5, 8), **given)


def test_attention_without_causality_and_a_default_scale() -> None:
    q, k, v = states(2, 4, 3, 16), states(2, 2, 5, 16), states(2, 2, 5, 8)
    found, weights = attend(torch.nn.Module(), q, k, v, None, is_causal=False)
    expected = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), enable_gqa=True)
    assert weights is None
    torch.testing.assert_close(found, expected.transpose(1, 2).float())
