"""The way back from a patched model: checkpoints that transformers loads alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from cute_mla.integrations.transformers import patch, unpatch
from tests.integrations.transformers_models.tiny_models import MODELS, make, tokens


def logits_of(model: PreTrainedModel) -> Tensor:
    """Return the logits of padded prompts, without those of padding."""
    ids, mask = tokens(30, 12)
    with torch.no_grad():
        return model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nothing_is_left_of_patch(name: str, dtype: torch.dtype) -> None:
    """Names, dtypes, bits and gradients of the weights are those of before, and so is the eager attention."""
    model = make(name, dtype).train()
    before, flags = {key: weight.clone() for key, weight in model.state_dict().items()}, [p.requires_grad for p in model.parameters()]
    kinds = [type(module) for module in model.modules()]
    assert patch(model) == unpatch(model)
    assert [type(module) for module in model.modules()] == kinds
    assert [weight.requires_grad for weight in model.parameters()] == flags
    assert all(module.training for module in model.modules())
    after = model.state_dict()
    assert list(after) == list(before)
    assert {key: (weight.dtype, weight.is_contiguous()) for key, weight in after.items()} == {
        key: (weight.dtype, True) for key, weight in before.items()
    }
    assert [key for key in before if not torch.equal(after[key], before[key])] == []
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("name", ["deepseek_v3_halves", "glm_5", "hy_v4", "ling_3", "longcat_flash"])
def test_a_trained_model_is_saved_and_loaded(name: str, tmp_path: Path) -> None:
    """Two steps of training behind patch(); transformers then loads weights that give the same logits, and others than before."""
    model = make(name)
    first = logits_of(model)
    patch(model)
    model.train()
    moved = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.SGD(moved, lr=0.5)
    ids, _ = tokens(20, 20)
    for _ in range(2):
        optimizer.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
    trained = logits_of(model.eval())
    unpatch(model)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="eager").eval()
    bound = 1e-4 * float(trained.abs().max())
    torch.testing.assert_close(logits_of(loaded), trained, rtol=0, atol=bound)
    assert float((trained - first).abs().max()) > 100 * bound
    assert patch(model) > 0


def test_models_without_a_way_back() -> None:
    model = make("deepseek_v3")
    with pytest.raises(ValueError, match=r"DeepseekV3ForCausalLM has no attention of cute_mla; supported: a model behind patch\(\)"):
        unpatch(model)
    patch(model)
    model.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ValueError, match=r"the model's configuration has a quantization_config; supported: models whose weights are not"):
        unpatch(model)
    outer = make("kimi_k2_5")  # the attention's configuration is that of the text model inside
    patch(outer)
    outer.config.quantization_config = {"quant_method": "fp8"}
    with pytest.raises(ValueError, match=r"the model's configuration has a quantization_config; supported: models whose weights are not"):
        unpatch(outer)
