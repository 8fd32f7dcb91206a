"""DeepSeek-V4 and V4.1 through vLLM's layers for FlashMLA, on the simulated device, against attention in fp32."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms.interface import DeviceCapability

from cute_mla.engines import two_caches
from cute_mla.engines.vllm import deepseek_v4, models
from cute_mla.spec.arch import ARCHS, Arch
from cute_mla.testing.compare import same_bits
from tests.engines.vllm_adapter.deepseek_v4_parts import ARCHITECTURES, Kind, Model, kinds_of, pick, sparse_swa, stand_in
from tests.engines.vllm_adapter.vllm_parts import Request, agree
from tests.support.launched import launched_ops

CASES = [
    pytest.param(arch, kind, id=f"{arch.name}, {name}") for arch in deepseek_v4.SERVED_ARCHS for name, kind in kinds_of(arch.name).items()
]
BATCHES: dict[str, list[Request]] = {
    "decode": [Request(1, 300), Request(1, 1), Request(1, 64)],
    "mixed": [Request(1, 200), Request(1, 5), Request(9, 140), Request(6, 6)],
}


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    arch = request.getfixturevalue("arch") if "arch" in request.fixturenames else ARCHS["sm90"]
    stand_in(monkeypatch, DeviceCapability(*arch.compute_capabilities[0]))


@pytest.mark.parametrize("requests", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(("arch", "kind"), CASES)
def test_a_layer(arch: Arch, kind: Kind, requests: list[Request], tmp_path: Path) -> None:
    model = Model(kind, requests, tmp_path)
    prefills = any(request.tokens > 1 for request in requests)
    with launched_ops(arch) as ops:
        out = model.run()
        first = [*ops]
        again = model.run()
    assert first == [*(["sparse_prefill"] if prefills else []), "split_plan", "sparse_decode", "combine"]
    assert ops[len(first) :] == [op for op in first if op != "split_plan"]  # layers of a kind share a plan
    agree(out, model.expected(), 8e-3)
    assert same_bits(out, again)


@pytest.mark.parametrize(("arch", "kind"), CASES)
def test_drafts_and_rows_that_pad_a_graph(arch: Arch, kind: Kind, tmp_path: Path) -> None:
    """Verification decodes requests of different numbers of tokens. Rows behind them have stale indices, and slots of -1."""
    model = Model(kind, [Request(3, 150), Request(1, 44), Request(0, 0)], tmp_path, padded_tokens=6)
    speculation = {"num_speculative_tokens": 2, "enable_adaptive_verification": False, "parallel_drafting": False}
    model.config.speculative_config = SimpleNamespace(**speculation, use_dspark=lambda: False)
    model.buffer[4:] = 0
    with launched_ops(arch) as ops:
        out = model.run()
    assert ops == ["split_plan", "sparse_decode", "combine"]
    agree(out, model.expected(), 8e-3)
    assert (out[4:] == 0).all()


@pytest.mark.parametrize("heads", [5, 16, 64, 128])
@pytest.mark.parametrize("arch", deepseek_v4.SERVED_ARCHS, ids=lambda arch: arch.name)
def test_heads(arch: Arch, heads: int, tmp_path: Path) -> None:
    model = Model(kinds_of(arch.name)["V4.1, 1"], [Request(1, 70), Request(3, 50)], tmp_path, heads)
    with launched_ops(arch):
        agree(model.run(), model.expected(), 8e-3)


@pytest.mark.parametrize("model", ARCHITECTURES)
def test_queries_are_padded_as_little_as_vllms_kernels_allow(model: str, tmp_path: Path) -> None:
    layer, _ = pick(model, tmp_path)
    known = {1: 8, 8: 8, 9: 16, 16: 16, 20: 32, 40: 64, 64: 64, 65: 128, 128: 128}
    assert {heads: layer.get_padded_num_q_heads(heads) for heads in known} == known
    with pytest.raises(ValueError, match="does not support 129 heads"):
        layer.get_padded_num_q_heads(129)


@pytest.mark.parametrize("model", ARCHITECTURES)
@pytest.mark.parametrize("backend", [None, "FLASHMLA_SPARSE", "FLASHMLA_SPARSE_DSV4"])
def test_other_backends_stay_vllms(model: str, backend: str | None, tmp_path: Path) -> None:
    flashmla = import_module(f"vllm.models.{model}.nvidia.flashmla")
    before = flashmla.flash_mla_with_kvcache, flashmla.flash_mla_sparse_fwd, sparse_swa.get_mla_metadata
    layer, _ = pick(model, tmp_path, backend)
    assert layer is flashmla.DeepseekV4FlashMLAAttention
    assert before == (flashmla.flash_mla_with_kvcache, flashmla.flash_mla_sparse_fwd, sparse_swa.get_mla_metadata)
    served, _ = pick(model, tmp_path)
    assert served is not layer
    assert served is pick(model, tmp_path)[0]
    assert issubclass(served, layer)
    assert flashmla.flash_mla_with_kvcache is two_caches.decode


def test_what_is_not_supported_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    choose = "for DeepSeek-V4; supported: CUTE_MLA_SPARSE"
    with pytest.raises(ValueError, match=f"attention backend is CUTE_MLA {choose}"):
        pick("deepseek_v4", tmp_path, "CUTE_MLA")
    _, config = pick("deepseek_v41", tmp_path)
    picker = import_module("vllm.models.deepseek_v41.nvidia.model")._select_dsv4_attn_cls
    config.parallel_config.prefill_context_parallel_size = 2
    with pytest.raises(ValueError, match="prefill_context_parallel_size is 2 for DeepSeek-V4; supported: 1"):
        picker(config)
    monkeypatch.setattr(type(deepseek_v4.current_platform), "get_device_capability", lambda *_, **__: DeviceCapability(8, 9))
    with pytest.raises(ValueError, match=r"compute capability is 8\.9 for DeepSeek-V4; supported: 9\.0, 10\.0 or 10\.3, 12\.0 or 12\.1"):
        pick("deepseek_v4", tmp_path)


def test_the_models_of_these_packages_and_their_drafts_are_watched() -> None:
    models.register()
    watched = {name for name, model in ModelRegistry.models.items() if isinstance(model, models._Model)}
    assert watched == {name for name, model in ModelRegistry.models.items() if getattr(model, "module_name", "") in models.PACKAGES}
    assert {*ARCHITECTURES.values(), "DeepSeekV4MTPModel", "DeepseekV4ForConditionalGeneration", "DSparkDraftModel"} < watched
    for model in ARCHITECTURES:
        layer = import_module(f"vllm.models.{model}.nvidia.model").DeepseekV4DecoderLayer
        assert "_select_dsv4_attn_cls" in layer.__init__.__code__.co_names
