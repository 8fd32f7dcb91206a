"""vLLM finds the backends by name, and its own checks accept what is_supported says and nothing else."""

from __future__ import annotations

import itertools
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.config import set_current_vllm_config
from vllm.model_executor.custom_op import op_registry_oot
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport
from vllm.v1.attention.backends.mla.prefill.base import MLADimensions
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
from vllm.v1.attention.backends.mla.prefill.selector import MLAPrefillSelectorConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.utils import select_common_block_size

from cute_mla import is_supported
from cute_mla.engines.vllm import register
from tests.engines.vllm_adapter.vllm_parts import GLM_5_3_FLASH, Columns, Setting, configuration

HOPPER, BLACKWELL = DeviceCapability(9, 0), DeviceCapability(10, 0)
RTX = DeviceCapability(12, 0)
ARCH_OF = {HOPPER: "sm90", BLACKWELL: "sm100", DeviceCapability(10, 3): "sm103", RTX: "sm120", DeviceCapability(12, 1): "sm121"}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def backend(name: str) -> type[AttentionBackend]:
    return AttentionBackendEnum[name].get_class()


def verdict(name: str, **changes: Any) -> list[str]:
    """VLLM's reasons against a backend, for DeepSeek-V3 or V3.2 on Hopper with changes."""
    usual = {
        "head_size": 576,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 64,
        "use_mla": True,
        "has_sink": False,
        "use_sparse": name == "CUTE_MLA_SPARSE",
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": HOPPER,
        "attn_type": "decoder",
    }
    return backend(name).validate_configuration(**{**usual, **changes})


def test_the_version_is_the_one_that_the_adapter_is_for() -> None:
    assert vllm.__version__.startswith("0.33.")


def test_the_entry_point_registers_both_backends_and_prefill() -> None:
    (point,) = (point for point in entry_points(group="vllm.general_plugins") if point.name == "cute_mla")
    assert point.load() is register
    assert backend("CUTE_MLA").full_cls_name() == ("cute_mla.engines.vllm.dense", "CuteMla")
    assert backend("CUTE_MLA_SPARSE").full_cls_name() == ("cute_mla.engines.vllm.sparse", "CuteMlaSparse")
    assert MLAPrefillBackendEnum["CUTE_MLA"].get_class().get_name() == "CUTE_MLA"
    for name in ("CUTE_MLA", "CUTE_MLA_SPARSE"):
        assert backend(name).get_name() == name


def test_a_process_may_load_plugins_twice() -> None:
    before = list(AttentionBackendEnum.__members__), list(MLAPrefillBackendEnum.__members__), dict(op_registry_oot)
    register()
    assert before == (list(AttentionBackendEnum.__members__), list(MLAPrefillBackendEnum.__members__), op_registry_oot)


@pytest.mark.parametrize("capability", ARCH_OF, ids=str)
@pytest.mark.parametrize("name", ["CUTE_MLA", "CUTE_MLA_SPARSE"])
def test_what_is_supported_is_valid_and_nothing_else(name: str, capability: DeviceCapability) -> None:
    sparse = name == "CUTE_MLA_SPARSE"
    wide = {"auto": None, "float16": torch.float16, "bfloat16": torch.bfloat16}
    fp8 = ("fp8_ds_mla",) if sparse else ("fp8", "fp8_e4m3")
    valid = 0
    for head_size, dtype, cache in itertools.product((320, 512, 576), DTYPES, (*wide, "fp8", "fp8_e4m3", "fp8_ds_mla", "fp8_e5m2")):
        known = cache in fp8 or (cache in wide and wide[cache] in (None, dtype))
        # Without rotary columns, packed caches and their queries have zeros for them, and sparse prefill decodes over 16-bit caches.
        op = "dense_decode" if not sparse else "sparse_decode" if cache in fp8 or head_size == 576 else "sparse_prefill"
        columns = 576 if sparse and cache in fp8 and head_size == 512 else head_size
        supported, _ = is_supported(op, ARCH_OF[capability], head_dim=columns, dtype=dtype, fp8_kvcache=cache in fp8, h_kv=1)
        expected = known and supported
        reasons = verdict(name, head_size=head_size, dtype=dtype, kv_cache_dtype=cache, device_capability=capability)
        assert (reasons == []) == expected, (head_size, dtype, cache, reasons)
        valid += expected
    assert valid == (6 if sparse else 10)


def test_512_columns_are_for_models_without_rotary_ones(tmp_path: Path) -> None:
    for columns, reasons in (
        (GLM_5_3_FLASH, []),
        (Columns(latent=448), ["qk_rope_head_dim is 64 with a head size of 512; supported: 0"]),
    ):
        with set_current_vllm_config(configuration(Setting(16, topk=128, columns=columns), tmp_path)):
            assert verdict("CUTE_MLA_SPARSE", head_size=512) == reasons


@pytest.mark.parametrize("name", ["CUTE_MLA", "CUTE_MLA_SPARSE"])
@pytest.mark.parametrize("option", ["use_batch_invariant", "use_kv_connector", "use_dcp"], ids=lambda option: option.removeprefix("use_"))
def test_options_that_are_supported(name: str, option: str) -> None:
    assert verdict(name, **{option: True}) == []


@pytest.mark.parametrize("name", ["CUTE_MLA", "CUTE_MLA_SPARSE"])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"head_size": 128}, "head_size not supported"),
        ({"dtype": torch.float32}, "dtype not supported"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
        ({"block_size": 8}, "block_size not supported"),
        ({"use_mla": False}, "non-MLA not supported"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
        ({"device_capability": DeviceCapability(8, 0)}, "compute capability not supported"),
        ({"device_capability": DeviceCapability(11, 0)}, "compute capability not supported"),
        ({"attn_type": "encoder"}, "attention type encoder not supported"),
        ({"has_sliding_window": True}, "sliding window not supported"),
        ({"use_pcp": True}, "PCP not supported"),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype is float16 with a model of torch.bfloat16; supported: "),
    ],
)
def test_reasons_against(name: str, changes: dict[str, Any], reason: str) -> None:
    assert any(found.startswith(reason) for found in verdict(name, **changes))


def test_sinks_are_for_sparse_attention_and_blocks_of_drafts_for_dense() -> None:
    assert verdict("CUTE_MLA_SPARSE", has_sink=True) == []
    assert verdict("CUTE_MLA", has_sink=True) == ["attention sinks not supported"]
    assert verdict("CUTE_MLA", use_non_causal=True, use_dcp=True) == []
    assert "non-causal attention not supported" in verdict("CUTE_MLA_SPARSE", use_non_causal=True)


def test_dense_and_sparse_models_have_different_backends() -> None:
    assert verdict("CUTE_MLA", use_sparse=True) == ["sparse not supported"]
    assert verdict("CUTE_MLA_SPARSE", use_sparse=False) == ["non-sparse not supported"]


@pytest.mark.parametrize("name", ["CUTE_MLA", "CUTE_MLA_SPARSE"])
def test_adaptive_verification_is_supported(name: str) -> None:
    assert verdict(name, use_adaptive_verification=True) == []


@pytest.mark.parametrize(("ranks", "interleave", "dense", "sparse"), [(1, 1, 4, 4), (1, 16, 4, 4), (2, 1, 4, 4), (2, 64, 4, 4)])
def test_graphs_have_a_bound_on_lengths_of_query(ranks: int, interleave: int, dense: int, sparse: int) -> None:
    parallel = SimpleNamespace(decode_context_parallel_size=ranks, cp_kv_cache_interleave_size=interleave)
    speculation = SimpleNamespace(num_speculative_tokens=3, parallel_drafting=False)
    config = SimpleNamespace(parallel_config=parallel, speculative_config=speculation, use_v2_model_runner=True)
    for name, bound in (("CUTE_MLA", dense), ("CUTE_MLA_SPARSE", sparse)):
        assert backend(name).get_builder_cls().get_varlen_cudagraph_max_query_len(config, None) == bound


def test_fp16_over_the_packed_cache_has_our_reason() -> None:
    reasons = verdict("CUTE_MLA_SPARSE", dtype=torch.float16, kv_cache_dtype="fp8_ds_mla")
    assert reasons == ["dtype not supported", is_supported("sparse_decode", "sm90", dtype=torch.float16, fp8_kvcache=True)[1]]


@pytest.mark.parametrize(("framework", "kernel"), [(16, 16), (32, 32), (48, 16), (64, 64), (96, 32), (128, 128), (256, 256)])
def test_vllm_cuts_its_blocks_into_pages_that_kernels_read(framework: int, kernel: int) -> None:
    assert select_common_block_size(framework, [backend("CUTE_MLA")]) == kernel
    assert is_supported("dense_decode", "sm90", page_size=kernel)[0]


@pytest.mark.parametrize("name", ["CUTE_MLA", "CUTE_MLA_SPARSE"])
def test_cuda_graphs_and_the_base_of_lse_are_declared(name: str) -> None:
    layer = backend(name).get_impl_cls()
    assert layer.can_return_lse_for_decode
    assert layer.lse_base_on_e
    assert backend(name).get_builder_cls()._cudagraph_support is AttentionCGSupport.UNIFORM_BATCH


@pytest.mark.parametrize("capability", [*ARCH_OF, DeviceCapability(8, 9)], ids=str)
def test_prefill_is_valid_for_the_dimensions_that_are_supported(capability: DeviceCapability) -> None:
    prefill = MLAPrefillBackendEnum["CUTE_MLA"].get_class()
    for nope, rope, v in ((128, 64, 128), (64, 64, 128), (128, 0, 128), (192, 64, 256), (256, 0, 256), (128, 64, 192)):
        config = MLAPrefillSelectorConfig(torch.bfloat16, MLADimensions(qk_nope_head_dim=nope, qk_rope_head_dim=rope, v_head_dim=v))
        expected = capability in ARCH_OF and is_supported("dense_prefill", ARCH_OF[capability], head_dim=nope + rope, head_dim_v=v)[0]
        assert (prefill.validate_configuration(capability, config) == []) == expected
    fp32 = MLAPrefillSelectorConfig(torch.float32, MLADimensions(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128))
    assert prefill.validate_configuration(HOPPER, fp32) == ["dtype torch.float32 not supported"]
