"""The layer by the kernels, on the simulated device of every architecture: one small batch, and what is not for kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import cute_mla
from cute_mla.spec.arch import SM100, Arch
from tests.layer.mla_models import GLM_5, GLM_5_3_FLASH, KIMI_K3, MISTRAL_FAR, SCALED_GATED, V2_LITE, V3
from tests.layer.mla_steps import Sequences
from tests.support.launched import record_launches

CONTEXTS, DECODES = [65, 0, 5], 1  # of a decode, and of two prefills
SMS = 2


def test_a_mixed_batch_by_the_kernels(arch: Arch) -> None:
    """All kinds of attention in one step: against the reference in the tests, and against the layer's own reference path."""
    sequences = Sequences.drawn(V3, [66, 9, 8], torch.bfloat16).with_context(CONTEXTS)
    by_reference = replace(sequences, k_cache=sequences.k_cache.clone())
    with cute_mla.simulate(arch, SMS) as device:
        assert sequences.layer().path == "kernels"
        out = sequences.step(CONTEXTS, DECODES)
    ran = device.launches
    assert ran >= 5  # plan, decode, two of prefill, merge
    assert device.findings == []
    expected = sequences.expected(CONTEXTS)
    sequences.expect(out, expected)
    sequences.expect(by_reference.step(CONTEXTS, DECODES), out.float())
    assert device.launches == ran
    assert torch.equal(by_reference.k_cache.nan_to_num(7.0), sequences.k_cache.nan_to_num(7.0))


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return record_launches(monkeypatch)


@pytest.mark.parametrize(
    ("model", "cache", "decode", "prefill", "merge"),
    [
        (GLM_5, "latent", "bf16_cluster", "bf16_d256", "bf16_d256"),
        (GLM_5_3_FLASH, "latent_512", "bf16_d512_cluster", "bf16_d256", "bf16_d256"),
        (MISTRAL_FAR, "latent_320", "bf16_d320_cluster", "bf16_d128", "bf16_d128"),
        (KIMI_K3, "latent", "bf16_cluster", "bf16_d192", "bf16_d128"),
        (SCALED_GATED, "latent", "bf16_cluster", "bf16_d192", "bf16_d128"),
    ],
    ids=["glm_5", "glm_5_3_flash", "mistral_far", "kimi_k3", "scaled_gated"],
)
def test_other_columns(model: dict[str, Any], cache: str, decode: str, prefill: str, merge: str, arch: Arch, launched: list[str]) -> None:
    """A mixed batch by the kernels of these columns, and of no others. The bytes in the cache are those of the reference path."""
    sequences = Sequences.drawn(model, [66, 9, 8], torch.bfloat16).with_context(CONTEXTS)
    by_reference = replace(sequences, k_cache=sequences.k_cache.clone())
    with cute_mla.simulate(arch, SMS) as device:
        assert sequences.layer().path == "kernels"
        out = sequences.step(CONTEXTS, DECODES)
    assert device.findings == []
    first, second, *rest = launched
    assert [first, second] == [f"cache_insert_bf16_{cache}", "split_plan_i32"]
    keys_on_m = arch == SM100 and cache == "latent"
    assert rest[0].startswith("dense_decode_bf16_few_heads" if keys_on_m else f"dense_decode_{decode}")
    assert [name for name in rest[1:] if not name.startswith("combine")] == [
        f"dense_prefill_{prefill}",
        f"cache_gather_b16_{cache}",
        f"dense_prefill_{prefill}",
        f"merge_states_{merge}",
    ]
    sequences.expect(out, sequences.expected(CONTEXTS))
    by_reference.step(CONTEXTS, DECODES)
    assert torch.equal(by_reference.k_cache.nan_to_num(7.0), sequences.k_cache.nan_to_num(7.0))


def test_an_e4m3_cache_is_for_576_columns() -> None:
    sequences = Sequences.drawn(MISTRAL_FAR, [3], torch.bfloat16)
    cache = sequences.k_cache.to(torch.float8_e4m3fn)
    with (
        cute_mla.simulate("sm90", SMS),
        pytest.raises(ValueError, match=r"k_cache has dtype torch\.float8_e4m3fn; supported: torch\.bfloat16"),
    ):
        sequences.layer()(torch.cat(sequences.hidden), cache, sequences.plan([0], 1))


def test_one_schedule_serves_all_layers_of_a_step(arch: Arch) -> None:
    """The second layer does not plan again. fp16, and padding that gives zeros."""
    sequences = Sequences.drawn(V2_LITE, [3, 1], torch.float16).with_context([2, 0])
    plan = sequences.plan([2, 0], 2)
    slots, lengths = plan.slot_mapping.clone(), torch.tensor([3, 0], dtype=torch.int32)
    slots[1] = -1
    assert plan.decode is not None
    padded = replace(plan, slot_mapping=slots, decode=replace(plan.decode, cache_seqlens=lengths))
    layer, hidden = sequences.layer(), torch.cat(sequences.new_tokens([2, 0]))
    with cute_mla.simulate(arch, SMS) as device:
        out = layer(hidden, sequences.k_cache, padded)
        first = device.launches
        assert torch.equal(layer(hidden, sequences.k_cache, padded), out)
        assert device.launches == 2 * first - 1
    expected = sequences.expected([2, 0])
    expected[1] = 0
    sequences.expect(out, expected)


def test_fp32_is_not_for_the_kernels(arch: Arch) -> None:
    sequences = Sequences.drawn(V3, [3])
    with (
        cute_mla.simulate(arch, SMS),
        pytest.raises(ValueError, match=r"k_cache has .* dtype torch\.float32; supported: .* of bfloat16, float16"),
    ):
        sequences.step([0], 0)
