"""Attention backends CUTE_MLA and CUTE_MLA_SPARSE, and MLA prefill backend CUTE_MLA, of vLLM 0.33.

vLLM calls register() in each of its processes, through the entry point `cute_mla` of the group `vllm.general_plugins`. The module of a
backend is imported only when vLLM looks the backend up.

    dense    decode over bf16, fp16 and e4m3 caches
    sparse   decode and prefill by indices, over bf16 caches and FP8 caches of 656 bytes a token
    prefill  dense prefill of new tokens and of chunks of the context
    indexer  choice of the keys for layers of the sparse backend
    models   classes of vLLM whose attention layers are picked by deepseek_v4: DeepSeek-V4 and V4.1
"""

from __future__ import annotations

DENSE = "CUTE_MLA"
SPARSE = "CUTE_MLA_SPARSE"
PREFILL = "CUTE_MLA"


def register() -> None:
    """Register the backends, the indexer op and DeepSeek-V4's layers with vLLM. A second call in the same process does nothing."""
    from vllm.model_executor.custom_op import CustomOp, op_registry_oot
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from . import indexer_op, models

    for name, path in ((DENSE, "dense.CuteMla"), (SPARSE, "sparse.CuteMlaSparse")):
        if name not in AttentionBackendEnum.__members__:
            register_backend(name, f"{__name__}.{path}")
    if indexer_op.NAME not in op_registry_oot:
        CustomOp.register_oot(name=indexer_op.NAME)(indexer_op.CuteMlaIndexer)
    if PREFILL not in MLAPrefillBackendEnum.__members__:
        register_mla_prefill_backend(PREFILL, f"{__name__}.prefill.CuteMlaPrefill")
    models.register()
