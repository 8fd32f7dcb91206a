"""The interface of SGLang that the adapter relies on, read from SGLang's source without importing it.

python tests/engines/sglang_interface.py FOLDER     # of an unpacked wheel or a site-packages: writes sglang_interfaces/VERSION.json
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).with_name("sglang_interfaces")  # a file per version

# Module: what of it. A class has the members that count: methods are recorded with their parameters, attributes as "attribute". Values, and
# names that another module defines, are recorded as "value".
WANTED: dict[str, dict[str, tuple[str, ...]]] = {
    "sglang.srt.plugins": {"GENERAL_PLUGINS_GROUP": ()},
    "sglang.srt.plugins.hook_registry": {"HookRegistry": ("register", "apply_hooks"), "HookType": ("REPLACE",)},
    "sglang.srt.server_args": {
        "ATTENTION_BACKEND_CHOICES": (),
        "CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS": (),
        "DETERMINISTIC_ATTENTION_BACKEND_CHOICES": (),
        "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND": (),
        "add_attention_backend_choices": (),
        "add_chunked_prefix_cache_attention_backend": (),
        "add_deterministic_attention_backend_choices": (),
        "add_radix_supported_deterministic_attention_backend_choices": (),
    },
    "sglang.srt.layers.attention.attention_registry": {
        "register_attention_backend": (),
        "ATTENTION_BACKENDS": (),
        "create_dsa_backend": (),
    },
    "sglang.srt.layers.attention.base_attn_backend": {
        "AttentionBackend": (
            *("forward_decode", "forward_extend", "init_forward_metadata", "init_forward_metadata_out_graph"),
            *("init_cuda_graph_state", "get_cuda_graph_seq_len_fill_value", "needs_cpu_seq_lens", "forward_metadata", "data_type"),
            *("supports_ragged_verify_graph", "verify_mask"),
        )
    },
    "sglang.srt.layers.attention.dsa_backend": {
        "DSAFlashMLAMetadata": ("flashmla_metadata", "num_splits"),
        "DSAMetadata": (
            *("cu_seqlens_q", "cu_seqlens_k", "max_seq_len_q", "max_seq_len_k", "dsa_cache_seqlens_int32", "flashmla_metadata"),
        ),
        "DeepseekSparseAttnBackend": (
            *("__init__", "_compute_flashmla_metadata", "_forward_flashmla_sparse", "_forward_flashmla_kv", "_forward_standard_mha"),
            *("dsa_kv_cache_store_fp8", "dsa_index_topk", "kv_cache_dim", "physical_page_size", "num_q_heads"),
            *("kv_lora_rank", "qk_rope_head_dim", "forward_decode", "forward_extend"),
        ),
    },
    "sglang.srt.layers.attention.dots_hybrid_backend": {
        "DotsSWAMLAAttnBackend": (
            *("__init__", "init_forward_metadata", "init_forward_metadata_in_graph", "forward_swa_mla_absorbed", "selected_backend"),
            *("maybe_rebuild_metadata_after_dp_padding", "token_to_kv_pool"),
        ),
        "_normalize_cache_seqlens_rows": (),
        "_normalize_page_table_rows": (),
        "wrap_dots_attention_backend": (),
    },
    "sglang.srt.layers.attention.flashattention_backend": {
        "FlashAttentionBackend": ("page_size", "forward_metadata"),
        "FlashAttentionMetadata": ("swa_page_table", "cache_seqlens_int32"),
    },
    "sglang.srt.layers.attention.deepseek_v4_backend": {
        "DeepseekV4AttnBackend": (),
        "_maybe_precompute_flashmla_sched_meta": (),
        "can_use_swapab_attention": (),
        "use_dsv4_q8kv8_sparse_prefill": (),
    },
    "sglang.kernels.ops.attention.flash_mla_interface": {"flash_mla_with_kvcache": (), "flash_mla_sparse_fwd": (), "get_mla_metadata": ()},
    "sglang.kernels.ops.attention.flash_mla_sm120": {"flash_mla_with_kvcache_sm120": ()},
    "sglang.srt.layers.attention.dsa.utils": {
        "resolve_fp8_mqa_logits_fn": (),
        "resolve_fp8_paged_mqa_logits_fn": (),
        "resolve_paged_mqa_logits_metadata_fn": (),
    },
    "sglang.srt.layers.attention.verify_mask": {"VerifyMask": ("buffer", "mode", "max_bs", "is_read", "fits")},
    "sglang.srt.layers.radix_attention": {
        "RadixAttention": (*("tp_q_head_num", "tp_k_head_num", "head_dim", "v_head_dim", "scaling", "layer_id", "sliding_window_size"),)
    },
    "sglang.srt.mem_cache.memory_pool": {
        "KVWriteLoc": ("for_batch",),
        "MLATokenToKVPool": ("get_key_buffer", "set_kv_buffer"),
        "ReqToTokenPool": ("req_to_token",),
    },
    "sglang.srt.model_executor.forward_batch_info": {
        "ForwardBatch": (
            *("forward_mode", "batch_size", "seq_lens", "req_pool_indices", "positions", "spec_info"),
            *("extend_seq_lens", "extend_seq_lens_cpu"),
        ),
        "ForwardMode": ("is_decode_or_idle", "is_target_verify", "is_extend_without_speculative"),
    },
    "sglang.srt.model_executor.forward_batch_deepseek_mha_mixin": {
        "ForwardBatchDeepSeekMHAMixin": (
            *("attn_attend_prefix_cache", "mha_return_lse"),
            *("prefix_chunk_idx", "prefix_chunk_cu_seq_lens", "prefix_chunk_max_seq_lens"),
        )
    },
    "sglang.srt.model_executor.model_runner": {
        "ModelRunner": ("page_size", "device", "kv_cache_dtype", "req_to_token_pool", "token_to_kv_pool", "model_config")
    },
    "sglang.srt.configs.dots3": {"Dots3Config": ()},
    "sglang.srt.configs.model_config": {
        "ModelConfig": ("num_attention_heads", "context_len", "hf_config", "hf_text_config"),
        "is_deepseek_dsa": (),
        "is_deepseek_v4": (),
    },
    "sglang.srt.models.deepseek_common.attention_backend_handler": {
        "AttentionBackendRegistry": ("register",),
        "handle_attention_dsa": (),
        "handle_attention_triton": (),
        "handle_attention_trtllm_mla": (),
    },
    "sglang.srt.models.deepseek_common.utils": {"FORWARD_ABSORB_CORE_ATTENTION_BACKENDS": ()},
    "sglang.srt.speculative.eagle_utils": {"TreeMaskMode": ()},
    "sglang.srt.speculative.eagle_info": {"EagleVerifyInput": ("custom_mask",)},
    "sglang.srt.speculative.ragged_verify": {
        "RaggedVerifyLayout": ("bs", "verify_lens", "qo_indptr_device", "padded_to_bucket"),
        "resolve_ragged_verify_layout": (),
    },
    "sglang.srt.runtime_context": {"get_exec": (), "get_parallel": (), "get_spec": ()},
}
LATER = {"sglang.kernels.ops.attention.flash_mla_interface"}  # not in SGLang 0.5.22
# What these return answers by name at run time: recorded is what SGLang's own code asks for.
ASKED = {
    "get_exec": (
        *("kernel.dsa_prefill_backend", "kernel.dsa_decode_backend", "kernel.dsv4_attn_backend"),
        "deterministic.enable_deterministic_inference",
    ),
    "get_parallel": ("attn_tp_size", "attn_dcp_size"),
    "get_spec": ("speculative_num_draft_tokens", "speculative_eagle_topk", "speculative_algorithm"),
}


def parameters(function: ast.FunctionDef) -> list[str]:
    """Return names of a function's parameters, in order, with * and ** before those that collect."""
    given = function.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    names += [argument.arg for argument in given.kwonlyargs]
    return names + ([f"**{given.kwarg.arg}"] if given.kwarg else [])


def attributes(node: ast.ClassDef) -> list[str]:
    """Return the attributes that a class and its methods set, and its properties."""
    found = {target.id for part in node.body for target in targets(part) if isinstance(target, ast.Name)}
    for part in ast.walk(node):
        for target in targets(part):
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                found.add(target.attr)
        if isinstance(part, ast.FunctionDef) and any(getattr(name, "id", "") == "property" for name in part.decorator_list):
            found.add(part.name)
    return sorted(found)


def targets(node: ast.AST) -> list[ast.expr]:
    """Return the targets of an assignment."""
    if isinstance(node, ast.AnnAssign):
        return [node.target]
    if isinstance(node, ast.Assign):
        return [name for target in node.targets for name in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return []


def describe(tree: ast.Module, name: str, members: tuple[str, ...]) -> Any:
    """Return a name of a module: the parameters of a function, the members of a class, or "value". SystemExit if it is gone."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return parameters(node)
        if isinstance(node, ast.ClassDef) and node.name == name:
            found: dict[str, Any] = dict.fromkeys(attributes(node), "attribute")
            found |= {part.name: parameters(part) for part in node.body if isinstance(part, ast.FunctionDef)}
            return {member: found[member] for member in members} or "value"
        if isinstance(node, ast.Assign | ast.AnnAssign) and any(getattr(target, "id", "") == name for target in targets(node)):
            return "value"
        if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
            return "value"
    raise SystemExit(f"{name} is gone")


def record(folder: Path) -> dict[str, Any]:
    """Return the record of the SGLang in a folder."""
    (version,) = (path.name.removeprefix("sglang-").removesuffix(".dist-info") for path in folder.glob("sglang-*.dist-info"))
    modules = {}
    for module, names in WANTED.items():
        path = folder / Path(*module.split("."))
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if module in LATER and not path.exists():
            continue
        tree = ast.parse(path.read_text())
        modules[module] = {name: describe(tree, name, members) for name, members in names.items()}
    source = "".join(path.read_text() for path in sorted((folder / "sglang" / "srt").rglob("*.py")))
    asked = {function: [name for name in names if f"{function}().{name}" in source] for function, names in ASKED.items()}
    return {"version": version, "modules": modules, "asked": asked}


if __name__ == "__main__":
    found = record(Path(sys.argv[1]))
    (RECORDS / f"{found['version']}.json").write_text(json.dumps(found, indent=1) + "\n")
