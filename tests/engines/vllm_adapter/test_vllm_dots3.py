"""Window layers of dots3-note in vLLM: its layer and metadata, decode by kernels on the simulated device, against attention in fp32."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import vllm.models
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.mla import triton_mla
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
from vllm.v1.attention.backends.registry import AttentionBackendEnum

import cute_mla
from cute_mla.engines.vllm import models
from cute_mla.reference import attention
from cute_mla.spec.arch import Arch
from tests.engines.vllm_adapter.sparse_parts import TOPK, choose, filled_cache, queries
from tests.engines.vllm_adapter.sparse_parts import expected as sparse_expected
from tests.engines.vllm_adapter.vllm_parts import (
    DEEPSEEK_V3,
    LAYER,
    Columns,
    Projection,
    Request,
    Served,
    Setting,
    agree,
    batch_of,
    configuration,
    empty_cache,
    keys_of,
    query_rows,
    rows_of,
)
from tests.support.launched import launched_ops

PACKAGE, WINDOW, HEADS = "vllm.models.dots3_note", 100, 8
DOTS3 = Columns(latent=1024, nope=192, v=128)
WINDOWS, FULL = Setting(HEADS, columns=DOTS3), Setting(2 * HEADS)  # window layers, and what the configuration says of the others


@pytest.fixture(scope="module")
def model() -> Any:
    """Return the module of the language model, served. Stand-ins: CUDA's FlashAttention, and the package's images and audio."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface"):
            module = ModuleType(name)
            module.flash_attn_varlen_func = module.get_scheduler_metadata = None  # type: ignore[attr-defined]
            patch.setitem(sys.modules, name, module)
        for name in ("compile_flash_attn_varlen_func_from_specs", "flash_attn_varlen_func", "get_scheduler_metadata"):
            patch.setattr(fa_utils, name, None, raising=False)
        package = ModuleType(PACKAGE)
        package.__path__ = [str(Path(next(iter(vllm.models.__path__))) / "dots3_note")]
        patch.setitem(sys.modules, PACKAGE, package)
        nvidia = ModuleType(f"{PACKAGE}.nvidia")
        nvidia.__path__ = [f"{package.__path__[0]}/nvidia"]
        patch.setitem(sys.modules, nvidia.__name__, nvidia)
        served = import_module(f"{PACKAGE}.nvidia.model")
        import_module("cute_mla.engines.vllm.dots3").serve(PACKAGE)
        return served


@pytest.fixture(autouse=True)
def _without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_mla, "_reserve_attn_logits_workspace", lambda *_, **__: None)
    monkeypatch.setattr(type(current_platform), "num_compute_units", lambda *device: 132, raising=False)


def layer_of(
    model: Any, folder: Path, backend: str | None = "CUTE_MLA_SPARSE", setting: Setting = FULL
) -> tuple[MLAAttention, Any, VllmConfig]:
    """Return a window layer as Dots3NoteSlidingAttention makes it, its metadata builder, and the configuration."""
    config = configuration(setting, folder)
    config.attention_config.backend = None if backend is None else AttentionBackendEnum[backend]
    weight = torch.randn(HEADS * (DOTS3.nope + DOTS3.v), DOTS3.latent, generator=torch.Generator().manual_seed(1)) * 0.03
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with set_current_vllm_config(config):
            layer = MLAAttention(
                num_heads=HEADS,
                scale=DOTS3.scale,
                qk_nope_head_dim=DOTS3.nope,
                qk_rope_head_dim=DOTS3.rope,
                v_head_dim=DOTS3.v,
                q_lora_rank=64,
                kv_lora_rank=DOTS3.latent,
                kv_b_proj=Projection(weight.bfloat16()),
                cache_config=config.cache_config,
                prefix=LAYER,
                sliding_window=WINDOW,
                attn_backend=model.Dots3NoteTritonMLABackend,
                prefill_backend_cls=MLAPrefillBackendEnum["CUTE_MLA"].get_class(),
            )
            spec = layer.get_kv_cache_spec(config)
            builder = model.Dots3NoteTritonMLABackend.get_builder_cls()(spec, [LAYER], config, torch.device("cpu"))
    finally:
        torch.set_default_dtype(before)
    return layer, builder, config


def padded_layer(model: Any, folder: Path, backend: str | None = "CUTE_MLA_SPARSE", cache: str = "auto") -> Served:
    """Return a layer with sparse attention as Dots3NoteFullAttention makes it."""
    setting = Setting(HEADS, topk=TOPK, cache=cache)
    config = configuration(setting, folder)
    config.attention_config.backend = None if backend is None else AttentionBackendEnum[backend]
    weight = torch.randn(HEADS * 256, 512, generator=torch.Generator().manual_seed(1)) * 0.03
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with set_current_vllm_config(config):
            layer = model.Dots3NotePaddedMLAAttention(
                num_heads=HEADS,
                scale=DEEPSEEK_V3.scale,
                **dict(zip(("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), DEEPSEEK_V3, strict=True)),
                q_lora_rank=64,
                kv_b_proj=Projection(weight.bfloat16()),
                cache_config=config.cache_config,
                prefix=LAYER,
                use_sparse=True,
                topk_indices_buffer=torch.full((256, TOPK), -1, dtype=torch.int32),
                prefill_backend_cls=MLAPrefillBackendEnum["CUTE_MLA"].get_class(),
                physical_head_size=1088,
            )
            layer.process_weights_after_loading(torch.bfloat16)
            spec = layer.attn_backend.customize_spec(layer.get_kv_cache_spec(config))
            builder = layer.attn_backend.get_builder_cls()(spec, [LAYER], config, torch.device("cpu"))
    finally:
        torch.set_default_dtype(before)
    return Served(setting, config, layer, builder)


def expected(q: Tensor, keys: Tensor) -> Tensor:
    """Attention of tokens [tokens, heads, columns], the last of keys [keys, columns], over their windows, in fp32."""
    out = torch.zeros(*q.shape[:2], DOTS3.latent)
    for token in range(len(q)):
        end = len(keys) - len(q) + token + 1
        seen = keys[max(end - WINDOW, 0) : end].float()[None]
        visible = torch.ones(1, seen.shape[1], dtype=torch.bool)
        out[token] = attention(q[token, :, None].float(), seen, seen[..., : DOTS3.latent], DOTS3.scale, visible)[0][:, 0]
    return out


@pytest.mark.parametrize(("tokens", "lengths"), [(1, (300, 1, 101)), (3, (3, 260))], ids=["one token", "drafts"])
def test_window_layers_decode(arch: Arch, model: Any, tmp_path: Path, tokens: int, lengths: tuple[int, ...]) -> None:
    layer, builder, config = layer_of(model, tmp_path)
    builder.reorder_batch_threshold = tokens
    batch = batch_of([Request(tokens, keys) for keys in lengths], 64)
    keys, cache = keys_of(batch, WINDOWS), empty_cache(batch, WINDOWS)
    for request, (latent, rotary) in enumerate(keys):
        pages, rows = rows_of(batch, request, 64)
        unseen = max(len(latent) - tokens + 1 - WINDOW, 0)
        cache[pages[unseen:-tokens], rows[unseen:-tokens]] = torch.cat((latent, rotary), dim=1)[unseen:-tokens]
    new = [torch.cat([part[column][-tokens:] for part in keys]) for column in (0, 1)]
    q = torch.randn(batch.num_actual_tokens, HEADS, 1088, generator=torch.Generator().manual_seed(3)).bfloat16()
    with launched_ops(arch) as ops, set_current_vllm_config(config), torch.inference_mode():
        layer.impl.do_kv_cache_update(new[0], new[1].unsqueeze(1), cache, batch.slot_mapping, "auto", layer._k_scale)
        metadata = builder.build(0, batch)
        for given in (q, q.split((1024, 64), dim=-1)):
            out, lse = layer.impl.forward_mqa(given, cache, metadata, layer)
            assert lse is None
            for request, parts in enumerate(keys):
                own = query_rows(batch, request)
                agree(out[own], expected(q[own], torch.cat(parts, dim=1)), 8e-3)
    assert [op for op in ops if op != "combine"] == ["cache_write", "split_plan", *2 * ["dense_decode"]]


@pytest.mark.parametrize("requests", [[Request(1, 300), Request(1, 5)], [Request(1, 20), Request(5, 90)]], ids=["decode", "prefill"])
def test_layers_with_sparse_attention(arch: Arch, model: Any, tmp_path: Path, requests: list[Request]) -> None:
    """Rows of the cache have 1,088 columns, of which 576 are keys and the others NaN."""
    served = padded_layer(model, tmp_path)
    assert served.layer.get_kv_cache_spec(served.config).head_size == 1088
    batch = batch_of(requests, 64)
    storage, chosen = empty_cache(batch, WINDOWS), choose(served, batch)
    (filled, worth), q = filled_cache(batch, served.setting), queries(batch.num_actual_tokens, HEADS)
    storage[..., :576] = filled
    pages, rows = rows_of(batch, 1, 64)
    key = storage[pages[-1], rows[-1], :576].clone()
    storage[pages[-1], rows[-1]] = torch.nan  # until it is written again
    with cute_mla.simulate(arch, 6):
        served.layer.impl.do_kv_cache_update(
            key[None, :512], key[None, None, 512:], storage, (pages * 64 + rows)[-1:], "auto", served.layer._k_scale
        )
        out, _ = served.mqa(q, storage, served.build(batch))
    assert torch.equal(storage[pages[-1], rows[-1], :576], key)
    agree(out, sparse_expected(batch, torch.cat(q, dim=-1), worth, chosen, (1, 0), DEEPSEEK_V3.scale)[0], 8e-3)


def test_other_backends_keep_vllms_layers(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, builder, config = layer_of(model, tmp_path, None)
    assert type(layer.impl).__name__ == "Dots3NoteTritonMLAImpl"
    monkeypatch.setattr(model.Dots3NotePaddedMLAAttention.__mro__[1], "__init__", lambda self, **given: given["taken"].append(given))
    taken: list[Any] = []
    with set_current_vllm_config(config):
        model.Dots3NotePaddedMLAAttention(physical_head_size=1088, taken=taken)
    assert taken == [{"physical_head_size": 1088, "taken": taken}]
    with set_current_vllm_config(config):
        assert builder.build(0, batch_of([Request(1, 70)], 64)).decode.plan is None


def test_fp8_caches_are_refused(model: Any, tmp_path: Path) -> None:
    with pytest.raises(
        NotImplementedError, match="kv_cache_dtype is fp8 in window layers of dots3-note; supported: auto, float16, bfloat16"
    ):
        layer_of(model, tmp_path, setting=Setting(HEADS, cache="fp8"))
    with pytest.raises(NotImplementedError, match="kv_cache_dtype is fp8_ds_mla for dots3-note; supported: auto, bfloat16"):
        padded_layer(model, tmp_path, cache="fp8_ds_mla")


def test_the_model_and_its_draft_are_watched() -> None:
    found = {name: model for name, model in ModelRegistry.models.items() if getattr(model, "module_name", "") == PACKAGE}
    assert found.keys() == {"Dots3NoteForCausalLM", "Dots3NoteMTPModel"}
    assert all(isinstance(model, models._Model) for model in found.values())
