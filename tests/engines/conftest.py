"""SGLang's modules, as far as the adapter imports them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.engines.sglang_parts import (
    ADAPTERS,
    INTERFACE,
    MODULES,
    FlashMlaPlan,
    Recorded,
    SparseBase,
    WindowBase,
    Written,
    padded_rows,
    verify_mask,
)

# SGLang's lists of backends, and the names under which it hands out what adds to them.
_LISTS = {
    "ATTENTION_BACKEND_CHOICES": "add_attention_backend_choices",
    "CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS": "add_chunked_prefix_cache_attention_backend",
    "DETERMINISTIC_ATTENTION_BACKEND_CHOICES": "add_deterministic_attention_backend_choices",
    "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND": "add_radix_supported_deterministic_attention_backend_choices",
}


_FULL = {"fa3": lambda runner: ("FlashAttention of", runner)}


def _v4_backend(answers: SimpleNamespace) -> dict[str, Any]:
    """Return what the adapter uses of SGLang's backend of DeepSeek-V4."""
    return {
        **dict.fromkeys(("_maybe_precompute_flashmla_sched_meta", "can_use_swapab_attention")),
        "DeepseekV4AttnBackend": lambda runner: (runner, {**answers.hooks}),
        "use_dsv4_q8kv8_sparse_prefill": lambda option: answers.q8_prefill,
    }


def _dots3(answers: SimpleNamespace) -> dict[str, dict[str, Any]]:
    """Return what the adapter uses of SGLang's backend of dots3-note."""
    return {
        "configs.dots3": {"Dots3Config": answers.dots3},
        "layers.attention.dots_hybrid_backend": {
            "DotsSWAMLAAttnBackend": WindowBase,
            "_normalize_cache_seqlens_rows": lambda lengths, seq_lens, batch: padded_rows(lengths, seq_lens[:batch]),
            "_normalize_page_table_rows": lambda table, batch: padded_rows(table, table.new_zeros(batch, table.shape[1])),
        },
    }


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Yield modules of SGLang that the adapter imports, and what its two look-ups answer."""
    asked = INTERFACE["asked"]
    answers = SimpleNamespace(
        parallel=Recorded(asked["get_parallel"], attn_tp_size=8, attn_dcp_size=1),
        kernel=SimpleNamespace(
            dsa_prefill_backend="flashmla_auto",
            dsa_decode_backend="flashmla_kv",
            dsv4_attn_backend="flashmla",
            dsv4_prefill_backend="auto",
        ),
        spec=Recorded(asked["get_spec"], speculative_num_draft_tokens=3, speculative_eagle_topk=None, speculative_algorithm=None),
        factories={},
        deterministic=False,
        listed={name: ["triton"] for name in _LISTS},
        handlers={},
        split_queries=["dsa"],
        hooks={},
        sparse=False,
        v4=False,
        dots3=type("Dots3Config", (), {}),
        q8_prefill=False,
    )
    attributes = {"forward_metadata": None, "data_type": None, "needs_cpu_seq_lens": True, "supports_ragged_verify_graph": False}
    base = type("AttentionBackend", (), {**attributes, "verify_mask": None})

    def register_attention_backend(name: str) -> Any:
        return lambda factory: answers.factories.setdefault(name, factory)

    hooks = SimpleNamespace(register=lambda target, hook, kind: answers.hooks.update({target: (hook, kind)}), apply_hooks=lambda: None)
    handlers = SimpleNamespace(register=answers.handlers.__setitem__)

    added = {add: answers.listed[name].extend for name, add in _LISTS.items()}
    added["add_chunked_prefix_cache_attention_backend"] = answers.listed["CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS"].append

    stand_ins = {
        "server_args": {**answers.listed, **added},
        "layers.attention.attention_registry": {"register_attention_backend": register_attention_backend, "ATTENTION_BACKENDS": _FULL},
        "layers.attention.base_attn_backend": {"AttentionBackend": base},
        "layers.attention.verify_mask": {"VerifyMask": verify_mask},
        "mem_cache.memory_pool": {"KVWriteLoc": Written},
        "runtime_context": {
            "get_exec": lambda: SimpleNamespace(
                kernel=answers.kernel, deterministic=SimpleNamespace(enable_deterministic_inference=answers.deterministic)
            ),
            "get_parallel": lambda: answers.parallel,
            "get_spec": lambda: answers.spec,
        },
        "configs.model_config": {"is_deepseek_dsa": lambda config: answers.sparse, "is_deepseek_v4": lambda config: answers.v4},
        **_dots3(answers),
        "layers.attention.deepseek_v4_backend": _v4_backend(answers),
        "layers.attention.dsa_backend": {"DeepseekSparseAttnBackend": SparseBase, "DSAFlashMLAMetadata": FlashMlaPlan},
        "plugins.hook_registry": {"HookRegistry": hooks, "HookType": SimpleNamespace(REPLACE="replace")},
        "models.deepseek_common.attention_backend_handler": {
            "AttentionBackendRegistry": handlers,
            "handle_attention_dsa": "as dsa",
            "handle_attention_triton": "as triton",
            "handle_attention_trtllm_mla": "as trtllm_mla",
        },
        "models.deepseek_common.utils": {"FORWARD_ABSORB_CORE_ATTENTION_BACKENDS": answers.split_queries},
        "speculative.eagle_utils": {"TreeMaskMode": SimpleNamespace(QLEN_ONLY="draft tokens alone")},
        "speculative.ragged_verify": {"resolve_ragged_verify_layout": lambda batch: getattr(batch, "layout", None)},
    }
    for name in ADAPTERS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name, contents in stand_ins.items():
        module = ModuleType(f"sglang.srt.{name}")
        for key, value in contents.items():
            assert key in MODULES[module.__name__]
            setattr(module, key, value)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in filter(lambda module: module.startswith("sglang.kernels."), MODULES):
        module = ModuleType(name)
        vars(module).update(MODULES[name])
        monkeypatch.setitem(sys.modules, name, module)
    yield answers
    for name in ADAPTERS:
        sys.modules.pop(name, None)
