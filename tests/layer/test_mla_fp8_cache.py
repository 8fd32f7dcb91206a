"""The layer over a cache of e4m3 keys: what is in the cache is rounded, and nothing else differs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import cute_mla
from cute_mla.ops.cache_codec import to_e4m3
from cute_mla.spec.arch import Arch
from tests.layer.mla_models import V2_LITE, V3
from tests.layer.mla_steps import TOLERANCE, Sequences

SCALE = torch.tensor([0.02])  # keys of these models reach about 4
CONTEXTS, DECODES = [65, 0, 5], 1  # of a decode, and of two prefills
ROUNDING = 0.03  # of keys of 3 bits of mantissa, against the largest output, about


def rounded(sequences: Sequences) -> Tensor:
    """Return the cache in e4m3; NaN stays NaN."""
    return to_e4m3(sequences.k_cache.float() / SCALE).view(torch.float8_e4m3fn)


def step(sequences: Sequences, cache: Tensor, contexts: list[int], decodes: int, **options: int) -> Tensor:
    """Return a step over that cache."""
    hidden = torch.cat(sequences.new_tokens(contexts))
    return sequences.layer()(hidden, cache, sequences.plan(contexts, decodes, **options), descale_k=SCALE)


def unwritten(cache: Tensor) -> Tensor:
    """Return the rows that were never written."""
    return cache.float().isnan().all(dim=-1)


def test_fp16_weights_have_no_cache_in_e4m3() -> None:
    sequences = Sequences.drawn(V2_LITE, [3], torch.float16)
    with pytest.raises(ValueError, match=r"k_cache has dtype torch\.float8_e4m3fn; supported: torch\.float16$"):
        step(sequences, rounded(sequences), [0], 0)


@pytest.mark.parametrize("decodes", [0, 3])
def test_it_is_the_layer_over_the_rounded_keys(decodes: int) -> None:
    """In fp32 on the reference path, against a cache of fp32 with the same keys, to which nothing is added."""
    contexts = [65, 30, 5]
    sequences = Sequences.drawn(V3, [66, 31, 6]).with_context(contexts)
    cache = rounded(sequences)
    out = step(sequences, cache, contexts, decodes, chunk_tokens=40)
    exact, plan = cache.float() * SCALE, sequences.plan(contexts, decodes, chunk_tokens=40)
    same = sequences.layer()(
        torch.cat(sequences.new_tokens(contexts)), exact, replace(plan, slot_mapping=torch.full_like(plan.slot_mapping, -1))
    )
    torch.testing.assert_close(out, same, rtol=1e-5, atol=1e-6)
    expected = sequences.expected(contexts)
    error = (out - expected).abs().max() / expected.abs().max()
    assert TOLERANCE[torch.float32] < error < ROUNDING, "rounded, but not by more"


@pytest.mark.parametrize(("config", "dtype"), [(V3, torch.bfloat16), (V2_LITE, torch.bfloat16)])
def test_by_the_kernels(config: dict[str, object], dtype: torch.dtype, arch: Arch) -> None:
    """A mixed batch: the same bytes in the cache as on the layer's reference path, and the same output but for roundings of 16 bits."""
    sequences = Sequences.drawn(config, [66, 9, 8], dtype).with_context(CONTEXTS)
    cache = rounded(sequences)
    by_reference = cache.clone()
    with cute_mla.simulate(arch, 2) as device:
        out = step(sequences, cache, CONTEXTS, DECODES)
    assert device.launches >= 7  # write, plan, decode, gather, two of prefill, merge
    expected = step(sequences, by_reference, CONTEXTS, DECODES)
    assert torch.equal(cache.view(torch.uint8), by_reference.view(torch.uint8))
    assert unwritten(cache[0]).all()
    assert unwritten(cache).sum() == cache.shape[0] * cache.shape[1] - (66 + 9 + 8)
    assert out.dtype == dtype
    assert (out - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
    naive = sequences.expected(CONTEXTS)
    assert (out.float() - naive).abs().max() <= (ROUNDING + TOLERANCE[dtype]) * naive.abs().max()


@pytest.mark.parametrize(("config", "dtype"), [(V3, torch.bfloat16), (V2_LITE, torch.bfloat16)])
def test_queries_in_e4m3(config: dict[str, object], dtype: torch.dtype, arch: Arch) -> None:
    """Decode rounds its queries too, and prefill does not: by the kernels as on the reference path, and near the exact result."""
    contexts = [65, 20, 0]
    sequences = Sequences.drawn(config, [66, 21, 6], dtype).with_context(contexts)
    hidden, layer = torch.cat(sequences.new_tokens(contexts)), sequences.layer()

    def run(descale_q: Tensor | None) -> Tensor:
        return layer(hidden, rounded(sequences), sequences.plan(contexts, 2), descale_q=descale_q, descale_k=SCALE)

    plain, by_reference = run(None), run(torch.tensor([0.05]))
    with cute_mla.simulate(arch, 2) as device:
        by_kernels = run(torch.tensor([0.05]))
    assert device.findings == []
    assert by_kernels.dtype == by_reference.dtype == dtype
    assert torch.equal(by_reference[2:], plain[2:])
    assert not torch.equal(by_reference[:2], plain[:2])
    expected = sequences.expected(contexts)
    for out in (by_reference, by_kernels):
        assert (out.float() - expected).abs().max() <= 2 * (ROUNDING + TOLERANCE[dtype]) * expected.abs().max()
    assert (by_kernels.float() - by_reference.float()).abs().max() <= ROUNDING * expected.abs().max()


def test_keys_beyond_the_range_are_limited() -> None:
    sequences = Sequences.drawn(V3, [3])
    cache = rounded(sequences)
    sequences.layer()(torch.cat(sequences.hidden), cache, sequences.plan([0], 1), descale_k=torch.tensor(1e-6))
    written = cache.float()[~unwritten(cache)]
    assert written.isfinite().all()
    assert (written.abs() == 448).float().mean() > 0.9
    assert math.isnan(cache.float()[0, 0, 0, 0])


def test_what_is_refused() -> None:
    sequences = Sequences.drawn(V3, [3])
    hidden, plan, layer = torch.cat(sequences.hidden), sequences.plan([0], 1), sequences.layer()
    with pytest.raises(ValueError, match="descale_k is given with a latent cache; supported: with fp8_576"):
        layer(hidden, sequences.k_cache, plan, descale_k=SCALE)
    with pytest.raises(ValueError, match=r"k_cache has dtype torch\.float8_e5m2; supported: torch\.float32, torch\.float8_e4m3fn"):
        layer(hidden, sequences.k_cache.to(torch.float8_e5m2), plan)
    with pytest.raises(ValueError, match=r"descale_k has shape \[2\]; supported: one element"):
        layer(hidden, rounded(sequences), plan, descale_k=torch.ones(2))
    with pytest.raises(ValueError, match=r"descale_q has shape \[2\]; supported: one element"):
        layer(hidden, rounded(sequences), plan, descale_q=torch.ones(2))
    with pytest.raises(ValueError, match=r"descale_q has dtype torch\.float64; supported: torch\.float32"):
        layer(hidden, rounded(sequences), plan, descale_q=torch.ones(1).double())
