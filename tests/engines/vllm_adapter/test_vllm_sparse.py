"""Sparse decode and prefill through vLLM's layer and builder, on the simulated device, against attention in fp32."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm.envs as envs
from vllm.model_executor.model_loader.weight_utils import make_attention_sink
from vllm.models.hy_v4.nvidia import attention as hy_v4
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.workspace import current_workspace_manager

import cute_mla
from cute_mla.cache import quantise_cache
from cute_mla.spec.arch import SM120, Arch
from cute_mla.testing.compare import same_bits
from tests.engines.vllm_adapter.sparse_parts import TOPK, choose, expected, filled_cache, queries, served_by
from tests.engines.vllm_adapter.vllm_parts import (
    DEEPSEEK_V3,
    GLM_5_3_FLASH,
    LATENT,
    ROPE,
    Columns,
    Request,
    agree,
    batch_of,
    rows_of,
)

LSE = {"auto": 5e-4, "fp8_ds_mla": 5e-3}  # of the latter, keys are rounded to bf16 once more


BATCHES: dict[str, list[Request]] = {
    "decode": [Request(1, 300), Request(1, 5), Request(1, 64)],
    "ragged": [Request(1, 20), Request(1, 200), Request(5, 90)],
}


@pytest.mark.parametrize("cache", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("invariant", [False, True], ids=["", "invariant"])
def test_a_batch(arch: Arch, requests: list[Request], cache: str, invariant: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", invariant, raising=False)
    served = served_by(16, cache, tmp_path)
    assert served.layer.impl.supports_dense_mha_prefill is not invariant
    batch = batch_of(requests, 64)
    storage, worth = filled_cache(batch, served.setting)
    chosen = choose(served, batch)
    q = queries(batch.num_actual_tokens, 16)
    with cute_mla.simulate(arch, 6):
        out, lse = served.mqa(q, storage, served.build(batch))
    wanted, _ = expected(batch, torch.cat(q, dim=-1), worth, chosen, (1, 0))
    agree(out, wanted, 8e-3)
    assert lse is None


@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
def test_a_batch_of_a_packed_cache_on_rtx_boards(requests: list[Request], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Prefill, too, is sparse decode."""
    test_a_batch(SM120, requests, "fp8_ds_mla", False, monkeypatch, tmp_path)


@pytest.mark.parametrize("cache", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize("whole", [False, True], ids=["parts", "whole"])
def test_keys_without_rotary_columns(arch: Arch, cache: str, whole: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """GLM-5.3-Flash: new keys, decode and prefill by indices. Its queries may come in parts, of which one has no columns."""
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", whole, raising=False)
    served = served_by(16, cache, tmp_path, GLM_5_3_FLASH)
    assert served.layer.impl.supports_dense_mha_prefill is (cache == "auto" and not whole)
    requests = BATCHES["ragged"]
    batch = batch_of(requests, 64)
    storage, worth = filled_cache(batch, served.setting)
    chosen = choose(served, batch)
    q = torch.randn(batch.num_actual_tokens, 16, LATENT, generator=torch.Generator().manual_seed(4)).bfloat16()
    last = rows_of(batch, 2, 64)[:, -1]
    before = storage[tuple(last)].clone()
    storage[tuple(last)] = storage[0, 0]  # NaN, until it is written again
    (queries_of_others,) = current_workspace_manager().get_simultaneous(((len(q), 16, LATENT + ROPE), q.dtype))
    queries_of_others.fill_(math.nan)
    with cute_mla.simulate(arch, 6):
        key = torch.randn(90, LATENT, generator=torch.Generator().manual_seed(5)).bfloat16()[-1:]
        served.layer.update_kv_cache(key, key.new_empty(1, 1, 0), storage, (last[:1] * 64 + last[1:]), None, cache, served.layer._k_scale)
        written = storage[tuple(last)].clone()
        storage[tuple(last)] = before
        out, _ = served.mqa(q if whole else (q, q[..., :0]), storage, served.build(batch))
    if cache == "auto":
        assert torch.equal(written, key[0])
    else:
        wide = torch.nn.functional.pad(key, (0, ROPE))
        assert torch.equal(written, quantise_cache(wide[None, :, None], "fp8_656")[0, 0, 0].view(torch.uint8))
    agree(out, expected(batch, q, worth, chosen, (1, 0), GLM_5_3_FLASH.scale)[0], 8e-3)


@pytest.mark.parametrize("cache", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize("columns", [DEEPSEEK_V3, GLM_5_3_FLASH], ids=["576", "512"])
def test_sinks(arch: Arch, cache: str, columns: Columns, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hy4: its layer keeps this backend for its sinks, which are loaded when the layer exists. Decode, prefill, a token without keys."""
    backend = AttentionBackendEnum["CUTE_MLA_SPARSE"].get_class()
    monkeypatch.setattr(hy_v4, "get_attn_backend", lambda **_: backend)
    model = SimpleNamespace(kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, is_sparse=True, num_local_heads=8)
    assert hy_v4.HYV4MLAAttention._resolve_sink_backend(model, cache) is backend
    sinks = make_attention_sink(8, torch.float32)
    served = served_by(8, cache, tmp_path, columns, sinks=sinks)
    assert served.layer.impl.supports_dense_mha_prefill is False
    sinks.data.copy_(torch.linspace(-3, 6, 8))
    for requests in BATCHES.values():
        batch = batch_of(requests, 64)
        storage, worth = filled_cache(batch, served.setting)
        chosen = choose(served, batch)
        chosen[1] = -1
        q = torch.cat(queries(batch.num_actual_tokens, 8), dim=-1)[..., : columns.latent + columns.rope]
        with cute_mla.simulate(arch, 6):
            out, _ = served.mqa(q, storage, served.build(batch))
        wanted, lse = expected(batch, q, worth, chosen, (1, 0), columns.scale)
        agree(out, wanted * torch.sigmoid(lse - sinks).unsqueeze(-1), 8e-3)
        assert (out[1] == 0).all()


def test_sinks_of_other_types_and_heads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"sinks are torch.bfloat16 \[8\]; supported: torch.float32 \[8\]"):
        served_by(8, "auto", tmp_path, sinks=torch.zeros(8, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"sinks are torch.float32 \[16\]; supported: torch.float32 \[8\]"):
        served_by(8, "auto", tmp_path, sinks=torch.zeros(16))


@pytest.mark.parametrize("heads", [128, 8, 5])
def test_heads_of_a_rank(arch: Arch, heads: int, tmp_path: Path) -> None:
    served = served_by(heads, "fp8_ds_mla", tmp_path)
    batch = batch_of([Request(1, 100)], 64)
    storage, worth = filled_cache(batch, served.setting)
    chosen = choose(served, batch)
    q = queries(1, heads)
    with cute_mla.simulate(arch, 6):
        out, _ = served.mqa(q, storage, served.build(batch))
    agree(out, expected(batch, torch.cat(q, dim=-1), worth, chosen, (1, 0))[0], 8e-3)


@pytest.mark.parametrize("tokens", [1, 2], ids=["decode", "prefill too"])
@pytest.mark.parametrize("cache", ["auto", "fp8_ds_mla"])
def test_ranks_that_share_the_keys_return_lse(arch: Arch, cache: str, tokens: int, tmp_path: Path) -> None:
    served = served_by(16, cache, tmp_path)
    layer = served.layer.impl
    layer.dcp_world_size, layer.dcp_rank, layer.need_to_return_lse_for_decode = 2, 1, True
    batch = batch_of([Request(1, 60), Request(tokens, 40)], 64)  # this rank's keys: every other token's
    storage, worth = filled_cache(batch, served.setting)
    chosen = torch.full_like(layer.topk_indices_buffer, -1)
    chosen[0, :100] = torch.randperm(119)[:100]
    chosen[1:, :20] = 2 * torch.arange(20)  # all of them the other rank's
    layer.topk_indices_buffer.copy_(chosen)
    q = torch.cat(queries(1 + tokens, 16), dim=-1)
    with cute_mla.simulate(arch, 6):
        out, lse = served.mqa(q, storage, served.build(batch))
    wanted, norm = expected(batch, q, worth, chosen, (2, 1))
    agree(out, wanted, 8e-3)
    assert lse is not None
    assert (lse[0] - norm[0]).abs().max() < LSE[cache]
    assert (lse[1:] == -math.inf).all()
    assert (out[1:] == 0).all()


def test_padding_is_finite(arch: Arch, tmp_path: Path) -> None:
    served = served_by(16, "auto", tmp_path)
    batch = batch_of([Request(1, 100), Request(0, 0), Request(0, 0)], 64, padded_tokens=3)
    storage, worth = filled_cache(batch, served.setting)
    chosen = choose(served, batch)
    q = queries(3, 16)
    with cute_mla.simulate(arch, 6):
        metadata = served.build(batch)
        assert (metadata.num_decode_tokens, metadata.num_actual_tokens) == (3, 3)
        out, _ = served.mqa(q, storage, metadata)
    agree(out[:1], expected(batch, torch.cat(q, dim=-1), worth, chosen, (1, 0))[0][:1], 8e-3)
    assert (out[1:] == 0).all()


@pytest.mark.parametrize("cache", ["auto", "fp8_ds_mla"])
def test_batchmates_do_not_change_the_bits_of_an_invariant_token(
    arch: Arch, cache: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    served = served_by(16, cache, tmp_path)
    together = batch_of([Request(1, 100), Request(1, 30), Request(4, 70)], 64)
    storage, _ = filled_cache(together, served.setting)
    chosen = choose(served, together).clone()
    q = queries(6, 16)
    with cute_mla.simulate(arch, 6):
        out, _ = served.mqa(q, storage, served.build(together))
    alone = batch_of([Request(1, 100)], 64)
    alone.block_table_tensor = together.block_table_tensor[:1].clone()
    elsewhere = served_by(16, cache, tmp_path)
    elsewhere.layer.impl.topk_indices_buffer.copy_(chosen)
    with cute_mla.simulate(arch, 5):
        other, _ = elsewhere.mqa(tuple(part[:1] for part in q), storage, elsewhere.build(alone))
    assert same_bits(out[:1], other)


def test_plans_stay_where_they_are(arch: Arch, tmp_path: Path) -> None:
    served = served_by(16, "auto", tmp_path)
    with cute_mla.simulate(arch, 6):
        mixed = served.build(batch_of([Request(1, 20), Request(5, 90)], 64)).plans
        places = {tokens: (plan[0].data_ptr(), plan[1].data_ptr()) for tokens, plan in mixed.items()}
        assert list(places) == [6, 1]
        decode = served.build(batch_of([Request(1, 20), Request(1, 90)], 64)).plans
        fresh = cute_mla.get_mla_metadata(torch.zeros(2, dtype=torch.int32), 16, 1, 16, True, TOPK)
    assert list(decode) == [2]
    assert (decode[2][0].data_ptr(), decode[2][1].data_ptr()) == places[6]
    assert all(torch.equal(found, wanted) for found, wanted in zip(decode[2], fresh, strict=True))
