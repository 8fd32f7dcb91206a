"""Whole layers of vLLM over our backends: new keys into the cache, decode and prefill of one batch, against plain attention in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm._custom_ops
from torch import Tensor
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.quantization.utils.quant_utils import kFp8Dynamic128Sym, kFp8StaticTensorSym, kNvfp4Dynamic
from vllm.models.kimi_k3.nvidia import mla as kimi_k3
from vllm.v1.attention.ops.merge_attn_states import _merge_attn_states_torch

import cute_mla
from cute_mla.spec.arch import SM120, Arch
from tests.engines.vllm_adapter.vllm_parts import (
    DEEPSEEK_V3,
    GLM_4_7_FLASH,
    GLM_5_3_FLASH,
    LATENT,
    LAYER,
    MISTRAL_SMALL_4,
    ROPE,
    Columns,
    Request,
    Served,
    Setting,
    agree,
    batch_of,
    empty_cache,
    keys_of,
    layer_output,
    rows_of,
    serve,
)
from tests.support.launched import launched_ops

HEADS = 4
E4M3 = torch.float8_e4m3fn


def write(served: Served, cache: Tensor, kv: Sequence[tuple[Tensor, Tensor]], slots: Tensor) -> None:
    """Write new keys into the cache, as vLLM's layer does. More rows than slots, as in a padded batch."""
    latent, rotary = (torch.cat([*part, torch.full((2, part[0].shape[1]), torch.nan)]).to(part[0].dtype) for part in zip(*kv, strict=True))
    layer = served.layer
    layer.update_kv_cache(latent, rotary.unsqueeze(1), cache, slots, None, layer.kv_cache_dtype, layer._k_scale)


BATCHES: dict[str, list[Request]] = {
    "decode": [Request(1, 30), Request(1, 130)],
    "new prefill": [Request(40, 40), Request(7, 7)],
    "mixed": [Request(1, 70), Request(1, 5), Request(20, 20), Request(9, 100)],
    "context": [Request(30, 94), Request(3, 150)],
}


OTHER_COLUMNS = {"GLM-4.7-Flash": GLM_4_7_FLASH, "GLM-5.3-Flash": GLM_5_3_FLASH, "Mistral Small 4": MISTRAL_SMALL_4}


@pytest.mark.parametrize(
    ("requests", "cache", "columns"),
    [
        *((batch, "auto", DEEPSEEK_V3) for batch in BATCHES.values()),
        (BATCHES["mixed"], "fp8", DEEPSEEK_V3),
        *((BATCHES["mixed"], "auto", columns) for columns in OTHER_COLUMNS.values()),
    ],
    ids=[*BATCHES, "mixed fp8", *OTHER_COLUMNS],
)
def test_a_layer(arch: Arch, requests: list[Request], cache: str, columns: Columns, tmp_path: Path) -> None:
    served = serve(Setting(HEADS, cache=cache, columns=columns), tmp_path)
    batch = batch_of(requests, 64)
    generator = torch.Generator().manual_seed(6)
    q = torch.randn(batch.num_actual_tokens, HEADS, columns.nope + columns.rope, generator=generator).to(torch.bfloat16)
    kv = keys_of(batch, served.setting)
    storage = empty_cache(batch, served.setting)
    new = [
        (latent[len(latent) - request.tokens :], rotary[len(rotary) - request.tokens :])
        for request, (latent, rotary) in zip(requests, kv, strict=True)
    ]
    slots = torch.cat([rows[0] * 64 + rows[1] for rows in (rows_of(batch, request, 64) for request in range(batch.num_reqs))])
    out = torch.full((len(q), HEADS * columns.v), torch.nan, dtype=torch.bfloat16)
    with cute_mla.simulate(arch, 6), set_current_vllm_config(served.config), torch.inference_mode():
        write(served, storage, kv, slots)  # the context, of which the last ones are then written over
        write(served, storage, new, batch.slot_mapping)
        latent, rotary = (torch.cat(part) for part in zip(*new, strict=True))
        served.layer.forward_impl(q, latent, rotary.unsqueeze(1), storage, served.builder.build(0, batch), output=out)
    wanted = layer_output(served, batch, q, kv)
    if cache == "auto":
        agree(out, wanted, 2e-2)  # vLLM rounds absorbed queries and decompressed keys to bf16
    else:
        assert torch.nn.functional.cosine_similarity(out.float().flatten(), wanted.flatten(), dim=0) > 0.995


@pytest.mark.parametrize(("cache", "columns"), [("auto", GLM_4_7_FLASH), ("fp8", DEEPSEEK_V3)], ids=["auto", "fp8"])
def test_a_layer_on_rtx_boards(cache: str, columns: Columns, tmp_path: Path) -> None:
    test_a_layer(SM120, BATCHES["mixed"], cache, columns, tmp_path)


def k3_write(kv_c: Tensor, k_pe: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Torch for what Kimi K3's fused ops do to the cache."""
    cache[slots // 64, slots % 64] = torch.cat((kv_c, k_pe.squeeze(1)), dim=1)


def k3_prefill_keys(q: Tensor, k_nope: Tensor, k_pe: Tensor, kv_c: Tensor, cache: Tensor, slots: Tensor, *rotation: None) -> Tensor:
    """Torch for the op of new tokens of Kimi K3, whose keys and queries are not rotated."""
    assert rotation == (None, None)
    k3_write(kv_c, k_pe, cache, slots)
    return k3_keys(k_nope, k_pe)


def k3_keys(k_nope: Tensor, k_pe: Tensor) -> Tensor:
    """Torch for the op of keys from a chunk of the context."""
    return torch.cat((k_nope, k_pe.view(len(k_nope), 1, -1).expand(-1, k_nope.shape[1], -1)), dim=2)


def k3_decode_queries(
    q_nope: Tensor, q_pe: Tensor, kv_c: Tensor, k_pe: Tensor, cache: Tensor, slots: Tensor, *, positions: None, cos_sin_cache: None
) -> Tensor:
    """Torch for the op of decode tokens."""
    k3_write(kv_c, k_pe, cache, slots)
    return torch.cat((q_nope, q_pe), dim=2)


@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
def test_kimi_k3s_own_layer(arch: Arch, requests: list[Request], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its class calls the backends itself; of its parts, projections and collectives are left out."""
    served = serve(Setting(HEADS), tmp_path)
    for name, function in (
        ("fused_mla_key_concat_kv_cache_insert", k3_prefill_keys),
        ("fused_mla_kv_concat", k3_keys),
        ("fused_mla_decode_q_concat_kv_cache_insert", k3_decode_queries),
        ("merge_attn_states", _merge_attn_states_torch),
    ):
        monkeypatch.setattr(kimi_k3, name, function)
    layer = kimi_k3.MultiHeadLatentAttention.__new__(kimi_k3.MultiHeadLatentAttention)
    torch.nn.Module.__init__(layer)
    for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_b_proj", "impl", "W_UV", "W_UK_T", "_k_scale"):
        setattr(layer, name, getattr(served.layer, name))
    layer.layer_name, layer.num_local_heads, layer.kv_cache_dtype = LAYER, HEADS, "auto"
    layer.rotary_emb, layer.dcp_world_size = None, 1
    batch = batch_of(requests, 64)
    kv = keys_of(batch, served.setting)
    layer.kv_cache = empty_cache(batch, served.setting)
    q = torch.randn(batch.num_actual_tokens, HEADS, 192, generator=torch.Generator().manual_seed(6)).to(torch.bfloat16)
    new = [tuple(part[len(part) - request.tokens :] for part in both) for request, both in zip(requests, kv, strict=True)]
    latent, rotary = (torch.cat(part) for part in zip(*new, strict=True))
    for request, (mine, (_, own)) in enumerate(zip(requests, kv, strict=True)):
        rows = rows_of(batch, request, 64)[:, : mine.keys - mine.tokens]
        layer.kv_cache[tuple(rows)] = torch.cat(kv[request], dim=1)[: len(own) - mine.tokens]
    out = torch.full((len(q), HEADS * 128), torch.nan, dtype=torch.bfloat16)
    with cute_mla.simulate(arch, 6), torch.inference_mode():
        metadata = {LAYER: served.build(batch)}
        with set_forward_context(metadata, served.config, slot_mapping={LAYER: batch.slot_mapping}):
            layer._attention(torch.zeros(len(q)), q, latent, rotary.unsqueeze(1), out)
    agree(out, layer_output(served, batch, q, kv), 2e-2)


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_new_keys_go_to_their_slots_alone(arch: Arch, cache: str, tmp_path: Path) -> None:
    served = serve(Setting(HEADS, cache=cache), tmp_path)
    served.layer._k_scale.fill_(0.5)
    batch = batch_of([Request(3, 70)], 64)
    storage = empty_cache(batch, served.setting)
    before = storage.view(torch.uint8).clone()
    latent, rotary = torch.randn(3, LATENT).bfloat16(), torch.randn(3, ROPE).bfloat16()
    slots = batch.slot_mapping.clone()
    slots[1] = -1
    with cute_mla.simulate(arch, 6), torch.inference_mode():
        write(served, storage, [(latent, rotary)], slots)
    keys = torch.cat((latent, rotary), dim=1)
    if cache == "fp8":
        keys = (keys.float() / 0.5).clamp(-448, 448).to(torch.float8_e4m3fn)
    blocks, rows = slots[[0, 2]] // 64, slots[[0, 2]] % 64
    after = storage.view(torch.uint8)
    assert torch.equal(after[blocks, rows], keys[[0, 2]].view(torch.uint8))
    after[blocks, rows] = before[blocks, rows]
    assert torch.equal(after, before)


def group_scaled(x: Tensor, out: Tensor, scales: Tensor, group: int, eps: float, least: float, greatest: float, *layout: bool) -> None:
    """Torch for vLLM's op that quantises groups of columns, each by a scale of its own."""
    assert layout == (False, False, False)
    groups = x.float().unflatten(1, (-1, group))
    factors = groups.abs().amax(2).clamp(min=eps) / greatest
    scales.copy_(factors)
    out.copy_((groups / factors.unsqueeze(2)).clamp(least, greatest).flatten(1).to(out.dtype))


def nvfp4(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Stand-in for vLLM's op: bytes and scales that tell of every pair and group of columns which numbers they were given."""
    pairs = x.float().unflatten(1, (-1, 2)).sum(2)
    return pairs.view(torch.int32).bitwise_and(255).to(torch.uint8), x.float().unflatten(1, (-1, 16)).sum(2)


@pytest.mark.parametrize("kind", ["tensor", "group", "nvfp4"])
def test_output_that_vllm_quantises(arch: Arch, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All tokens, of decode and of prefill, are what vLLM makes of the layer's own output."""
    served = serve(Setting(HEADS), tmp_path)
    keys = {"tensor": kFp8StaticTensorSym, "group": kFp8Dynamic128Sym, "nvfp4": kNvfp4Dynamic}
    assert served.layer.impl.fused_output_quant_supported(keys[kind])
    assert not served.layer.prefill_backend.supports_quant_output(keys[kind])
    monkeypatch.setattr(torch.ops._C, "per_token_group_fp8_quant", group_scaled, raising=False)
    monkeypatch.setattr(vllm._custom_ops, "scaled_fp4_quant", nvfp4)
    batch = batch_of(BATCHES["mixed"], 64)
    tokens, columns = batch.num_actual_tokens, HEADS * DEEPSEEK_V3.v
    q = torch.randn(tokens, HEADS, 192, generator=torch.Generator().manual_seed(6)).to(torch.bfloat16)
    kv, storage = keys_of(batch, served.setting), empty_cache(batch, served.setting)
    slots = torch.cat([rows[0] * 64 + rows[1] for rows in (rows_of(batch, request, 64) for request in range(batch.num_reqs))])
    new = [tuple(part[len(part) - request.tokens :] for part in both) for request, both in zip(BATCHES["mixed"], kv, strict=True)]
    latent, rotary = (torch.cat(part) for part in zip(*new, strict=True))
    wide = torch.full((tokens, columns), torch.nan, dtype=torch.bfloat16)
    quantised = torch.zeros(tokens, columns // 2, dtype=torch.uint8) if kind == "nvfp4" else torch.zeros(tokens, columns, dtype=E4M3)
    scale, scales = torch.tensor([0.01]), torch.zeros(tokens, columns // (16 if kind == "nvfp4" else 128))
    options: dict[str, dict[str, Any]] = {
        "tensor": {"output_scale": scale},
        "group": {
            "output_block_scale": scales,
            "quant_group_size": 128,
            **dict.fromkeys(("quant_scale_ue8m0", "quant_col_major", "quant_tma_aligned"), False),
        },
        "nvfp4": {"output_scale": scale, "output_block_scale": scales},
    }
    with launched_ops(arch) as ops, set_current_vllm_config(served.config), torch.inference_mode():
        write(served, storage, kv, slots)
        metadata = served.builder.build(0, batch)
        given = (q, latent, rotary.unsqueeze(1), storage, metadata)
        served.layer.forward_impl(*given, output=wide)
        del ops[:]
        served.layer.forward_impl(*given, output=quantised, **options[kind])
    assert ops == ["dense_prefill", "dense_prefill", "dense_decode", "combine"]
    if kind == "tensor":
        assert torch.equal(quantised.float(), (wide.float() / scale).clamp(-448, 448).to(E4M3).float())
    elif kind == "group":
        worth = quantised.float().unflatten(1, (-1, 128)) * scales.unsqueeze(2)
        torch.testing.assert_close(worth.flatten(1), wide.float(), rtol=1 / 16, atol=1e-3)
    else:
        assert all(torch.equal(found, wanted) for found, wanted in zip((quantised, scales), nvfp4(wide, scale), strict=True))
