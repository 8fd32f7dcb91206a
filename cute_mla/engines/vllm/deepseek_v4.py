"""Attention of DeepSeek-V4 and V4.1 in vLLM: the layers that vLLM has for FlashMLA, with the functions of cute_mla.

These layers do not use vLLM's registry of backends: the module of a model picks a class of layer. serve() is called when vLLM loads the
class of such a model. Layouts of caches, metadata, indexer and output projection stay those of vLLM's FlashMLA. Names are replaced in
vLLM's modules, in the process:

    vllm.models.deepseek_v4.nvidia.model          _select_dsv4_attn_cls    picks a class of layer; replaced by serve(), the others with it
    vllm.models.deepseek_v4.nvidia.flashmla       flash_mla_with_kvcache   decodes over two caches
                                                  flash_mla_sparse_fwd     prefills over gathered rows of 16 bits
    vllm.v1.attention.backends.mla.sparse_swa     get_mla_metadata         makes an empty schedule, but none for RTX boards

and likewise in vllm.models.deepseek_v41. The last three are replaced when the first layer of CUTE_MLA_SPARSE is picked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import vllm.v1.attention.backends.mla.sparse_swa as vllm_metadata
from vllm.platforms import current_platform

from ...api import flash_mla_sparse_fwd, get_mla_metadata
from ...spec.arch import arch_for
from ...spec.kernel_ops import ARCHS_OF
from .. import two_caches
from . import DENSE, SPARSE

SERVED_ARCHS = ARCHS_OF["sparse_prefill"]
_HEADS = (8, 16, 32, 64, 128)  # that vLLM's kernels pad queries to


def serve(package: str) -> None:
    """Replace the picker of a package, if it is loaded for NVIDIA devices. A second call does nothing."""
    model: Any = sys.modules.get(f"{package}.nvidia.model")
    if model is not None and not isinstance(model._select_dsv4_attn_cls, _Picker):
        model._select_dsv4_attn_cls = _Picker(package, model._select_dsv4_attn_cls)


@dataclass(frozen=True)
class _Picker:
    """A function that picks a class of layer. vllms: vLLM's own, for all other backends."""

    package: str
    vllms: Callable[[Any], type]

    def __call__(self, config: Any) -> type:
        """Return the class of a layer. Raises ValueError where CUTE_MLA_SPARSE is chosen and not supported, and for CUTE_MLA."""
        backend = config.attention_config.backend
        if backend is None or backend.name not in (DENSE, SPARSE):
            return self.vllms(config)
        ranks, capability = config.parallel_config.prefill_context_parallel_size, current_platform.get_device_capability()
        served = capability is not None and arch_for((capability.major, capability.minor)) in SERVED_ARCHS
        capabilities = ", ".join(arch.capabilities_text for arch in SERVED_ARCHS)
        for name, given, supported, allowed in (
            ("attention backend", backend.name, backend.name == SPARSE, SPARSE),
            ("prefill_context_parallel_size", ranks, ranks == 1, 1),
            ("compute capability", capability and capability.as_version_str(), served, capabilities),
        ):
            if not supported:
                raise ValueError(f"{name} is {given} for DeepSeek-V4; supported: {allowed}")
        flashmla: Any = import_module(f"{self.package}.nvidia.flashmla")
        flashmla.flash_mla_with_kvcache, flashmla.flash_mla_sparse_fwd = two_caches.decode, flash_mla_sparse_fwd
        vllm_metadata.get_mla_metadata = get_mla_metadata
        return _served(flashmla.DeepseekV4FlashMLAAttention)


@cache
def _served(layer: Any) -> type:
    """Return a subclass of vLLM's layer that pads queries to fewer heads than 64 where a rank has few, and makes missing schedules."""

    class CuteMlaAttention(layer):  # type: ignore[misc]
        @classmethod
        def get_padded_num_q_heads(cls, num_heads: int) -> int:
            """Return the heads that queries and output are allocated with. Raises ValueError for more than 128."""
            return min(super().get_padded_num_q_heads(num_heads), *(heads for heads in _HEADS if heads >= num_heads))

        def _forward_decode(self, *, swa_metadata: Any, **call: Any) -> None:
            """Decode. On RTX boards, metadata lack the empty schedules, which layers of a kind share in a step."""
            for name, schedule in vars(swa_metadata).items():
                if name.startswith("tile_sched_") and schedule is None:
                    setattr(swa_metadata, name, get_mla_metadata()[0])
            super()._forward_decode(swa_metadata=swa_metadata, **call)

    return CuteMlaAttention
