"""attn_implementation="cute_mla" of models that are not patched: transformers expands the keys, prefill attends to them.

Torch computes it in fp32: the logits and tokens of the eager models, beyond index_topk too. In bf16 the kernels do on the simulated device.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

import cute_mla
from cute_mla.integrations.transformers import register
from cute_mla.integrations.transformers.interface import attend
from cute_mla.spec.arch import Arch
from tests.integrations.transformers_models.tiny_models import MODELS, OTHERS, make, tokens
from tests.support.launched import record_launches

FAMILIES = [name for name in (*MODELS, *OTHERS) if name != "kimi_k2_5"]  # its text model is DeepSeek-V3's
PICKY: dict[str, dict[str, Any]] = {"glm_5_3_flash": {"index_topk": 32}}  # that choose two pools of 16 keys; others 16 keys


def expanding(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    """Return a model with our attention function."""
    register()
    model = make(name, dtype, **changes)
    model.set_attn_implementation("cute_mla")
    return model


def walk(model: PreTrainedModel, *lengths: int) -> list[Tensor]:
    """Return the results of three padded prompts, then those of one and of three further tokens, without those of padding."""
    ids, mask = tokens(*lengths)
    cache, found = DynamicCache(config=model.config), []
    for new in (ids, tokens(1, 1, 1, seed=8)[0], tokens(3, 3, 3, seed=9)[0]):
        mask = mask if new is ids else torch.cat((mask, torch.ones_like(new)), dim=1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
        with torch.no_grad():
            out = model(new, attention_mask=mask, position_ids=positions, cache=cache)[0]
        found.append(out[mask[:, -new.shape[1] :].bool()])
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_equal_to_eager(name: str) -> None:
    """Models with an indexer choose, layers may share a choice; sinks, windows and compressed keys are those of the models."""
    model = make(name, **PICKY.get(name, {"index_topk": 16}))
    expected = walk(model, 40, 17, 3)
    register()
    model.set_attn_implementation("cute_mla")
    for one, other in zip(walk(model, 40, 17, 3), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * float(other.abs().max()))


@pytest.mark.parametrize("name", ["deepseek_v3", "kimi_k2_5", "deepseek_v32", "hy_v4", "deepseek_v4"])
def test_greedy_tokens(name: str) -> None:
    ids, mask = tokens(20, 5, 1)
    changes: dict[str, Any] = {"index_topk": 16} if name.startswith(("deepseek_v32", "hy")) else {}
    models = (make(name, **changes), expanding(name, **changes))
    expected, found = (each.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False) for each in models)
    assert torch.equal(found, expected)


def test_gradients_of_sinks_and_of_chosen_keys() -> None:
    ids, _ = tokens(24, 24)
    grads = []
    for model in (make("hy_v4", index_topk=16), expanding("hy_v4", index_topk=16)):
        model(ids, labels=ids, use_cache=False).loss.backward()
        attention = model.model.layers[0].self_attn
        grads.append((attention.sinks.grad, attention.kv_b_proj.weight.grad))
    for found, expected in zip(grads[1], grads[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6)


def test_gradients_of_sinks_beside_kernels() -> None:
    """The kernels have none of lse."""
    ids, _ = tokens(24)
    grads = []
    for model in (make("hy_v4", num_experts_per_tok=8), expanding("hy_v4", torch.bfloat16, num_experts_per_tok=8)):
        with cute_mla.simulate("sm90", 2) if model.dtype == torch.bfloat16 else nullcontext():
            model(ids, labels=ids, use_cache=False).loss.backward()
        grads.append(model.model.layers[2].self_attn.sinks.grad)
    torch.testing.assert_close(grads[1], grads[0], rtol=0.1, atol=0)


def test_windows_and_packed_sequences() -> None:
    """Any model: a window of 5 tokens; then without one, two sequences in a row, that positions tell apart."""
    sizes = {"vocab_size": 50, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    register()
    for window, options in ((5, {}), (None, {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]])})):
        model = MistralForCausalLM(MistralConfig(**sizes, num_key_value_heads=2, sliding_window=window)).eval()
        found = []
        for implementation in ("eager", "cute_mla"):
            model.set_attn_implementation(implementation)
            with torch.no_grad():
                found.append(model(tokens(12)[0] % 50, use_cache=False, **options).logits)
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-5)


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


@pytest.mark.parametrize(
    ("name", "changes", "kinds"),
    [
        ("deepseek_v32", {"num_hidden_layers": 1}, ["masked_prefill", "dense_prefill", "masked_prefill"]),
        (
            "deepseek_v4",
            {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "compressed_sparse_attention"]},
            ["sparse_prefill"] * 6,
        ),
        ("glm_5", {"num_hidden_layers": 1, "indexer_types": ["full"]}, ["dense_prefill"]),  # of 256 columns none takes a mask
        ("hy_v4", {"num_hidden_layers": 1, "indexer_types": ["full"], "index_topk": 640}, ["dense_prefill"] * 3),
        (
            "mistral_large_4",
            {"num_hidden_layers": 1, "indexer_types": ["full"], "kv_source_layers": [0], "no_rope_layers": [1]},
            ["masked_prefill", "dense_prefill", "masked_prefill"],
        ),
    ],
)
def test_the_kernels_of_chosen_keys(
    name: str, changes: dict[str, Any], kinds: list[str], arch: Arch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the same model in torch, which chooses the same keys: of one layer, and of DeepSeek-V4 all compressed ones."""
    model = expanding(name, torch.bfloat16, **{"index_topk": 16, "num_experts_per_tok": 8, "topk_group": 2, **changes})
    lengths = (14, 5, 1) if name == "deepseek_v4" else (40, 17, 3)
    expected = walk(model, *lengths)
    names = record_launches(monkeypatch)
    with cute_mla.simulate(arch, 2) as device:
        found = walk(model, *lengths)
    assert device.findings == []
    assert [each.partition("_bf16")[0] for each in names] == kinds
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=0.025 * float(other.abs().max()))


def states(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.1}, r"dropout is 0\.1; supported: 0"),
        ({"softcap": 4.0}, r"softcap is given; supported: attention without one"),
        ({"sliding_window": 4}, r"sliding_window is given without a mask of four dimensions; supported: that of the model's mask function"),
        ({"indices": torch.zeros(1)}, r"indices is given without a mask of four dimensions"),
        ({"attention_mask": torch.ones(2, 4, 3, 5)}, r"attention_mask has shape \[2, 4, 3, 5\]; supported: \[2, 1, 3, 5\]"),
        ({"attention_mask": torch.full((2, 1, 3, 5), -0.5)}, r"attention_mask adds other values to scores than 0 and -10000 or less"),
        ({"attention_mask": torch.ones(2, 3, 5)}, r"attention_mask has shape \[2, 3, 5\]; supported: \[2, 5\]"),
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


def test_plain_causal_attention_that_no_kernel_takes() -> None:
    """Heads of 96 columns, and sinks with gradients, of a model whose mask is that of padding: torch, beside kernels too."""
    mask = torch.tensor([[True] * 5, [False, False, True, True, True]])
    visible = torch.ones(3, 5, dtype=torch.bool).tril(2) & mask.unsqueeze(1) & mask[:, 2:].unsqueeze(2)
    for columns in (96, 192):
        sink = states(4).requires_grad_(columns == 192)
        q, k, v = (states(*shape).bfloat16() for shape in ((2, 4, 3, columns), (2, 4, 5, columns), (2, 4, 5, columns * 2 // 3)))
        with cute_mla.simulate("sm90", 2):
            found, _ = attend(torch.nn.Module(), q, k, v, mask, s_aux=sink)
        scores = (q.double() @ k.double().mT * columns**-0.5).masked_fill(~visible.unsqueeze(1), -torch.inf)
        with_sink = torch.cat((scores, sink.double().view(1, 4, 1, 1).expand(2, 4, 3, 1)), dim=3).softmax(3)[..., :5]
        expected = (with_sink @ v.double() * mask[:, None, 2:, None]).transpose(1, 2)
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.02)
    found.float().sum().backward()
    assert sink.grad is not None
    assert bool(sink.grad.isfinite().all())
