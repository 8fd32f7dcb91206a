"""Closed list of the kernels that ship. Nothing is compiled on a user's machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from cute_mla.kernels.definition import KernelConfig, KernelDefinition
from cute_mla.manifest import kernel_name
from cute_mla.spec import (
    cache_insert,
    cache_rows,
    dense_decode,
    dense_prefill,
    dense_prefill_dkdv,
    dense_prefill_dq,
    index_write,
    masked_prefill,
    merge_states,
    mqa_logits,
    sparse_decode,
    sparse_prefill,
    topk_indices,
)
from cute_mla.spec.arch import Arch
from cute_mla.spec.combine import CombineConfig
from cute_mla.spec.mla import LATENT_DIMS, key_dtypes
from cute_mla.spec.split_plan import SplitPlanConfig

OPS = (
    *("dense_decode", "sparse_decode", "dense_prefill", "masked_prefill", "sparse_prefill"),
    *("dense_prefill_dq", "dense_prefill_dkdv"),
    *("split_plan", "combine", "merge_states", "mqa_logits", "topk_indices", "index_write", "cache_write"),
    *("cache_insert", "cache_gather"),
)


@dataclass(frozen=True)
class Variant:
    """One kernel to build. module: the kernel's module, whose build(config, arch) returns the source."""

    op: str
    arch: Arch
    config: KernelConfig
    module: str

    @property
    def name(self) -> str:
        """Key of the kernel in the manifest."""
        return kernel_name(self.op, self.arch.name, self.config.name)

    def source(self) -> KernelDefinition:
        """Import the kernel's module, and with it the DSL, and return the kernel's source."""
        source: KernelDefinition = import_module(self.module).build(self.config, self.arch)
        return source


def closed_variants(arch: Arch, ops: Sequence[str] = OPS) -> tuple[Variant, ...]:
    """Return every variant that ships for an architecture, longest compilations first. ValueError for an unknown op."""
    for op in ops:
        if op not in OPS:
            raise ValueError(f"unknown op {op!r}; supported: {', '.join(OPS)}")
    attention = (
        ("sparse_decode", sparse_decode.closed_variants(arch)),
        ("sparse_prefill", sparse_prefill.closed_variants(arch)),
        ("dense_prefill", dense_prefill.closed_variants(arch)),
        ("masked_prefill", masked_prefill.closed_variants(arch)),
        ("dense_prefill_dkdv", dense_prefill_dkdv.closed_variants(arch)),
        ("dense_prefill_dq", dense_prefill_dq.closed_variants(arch)),
        ("dense_decode", dense_decode.closed_variants(arch)),
        ("mqa_logits", mqa_logits.closed_variants()),
    )
    combines = dict.fromkeys(CombineConfig(dtype, dims.latent) for d_qk, dims in LATENT_DIMS.items() for dtype in key_dtypes(d_qk))
    cache_kernels: list[tuple[str, KernelConfig]] = [
        *((op, config) for op in ("cache_write", "cache_gather") for config in cache_rows.closed_variants()),
        *(("cache_insert", config) for config in cache_insert.closed_variants()),
    ]
    listed = (
        *(Variant(op, arch, config, f"cute_mla.kernels.{op}.{arch.name}") for op, configs in attention for config in configs),
        Variant("split_plan", arch, SplitPlanConfig(), "cute_mla.kernels.split_plan.kernel"),
        *(Variant("combine", arch, config, "cute_mla.kernels.combine.kernel") for config in combines),
        *(Variant("merge_states", arch, config, "cute_mla.kernels.merge_states.kernel") for config in merge_states.closed_variants()),
        *(Variant("topk_indices", arch, config, "cute_mla.kernels.topk_indices.kernel") for config in topk_indices.closed_variants()),
        *(Variant("index_write", arch, config, "cute_mla.kernels.index_write.kernel") for config in index_write.closed_variants()),
        *(Variant(op, arch, config, f"cute_mla.kernels.{op}.kernel") for op, config in cache_kernels),
    )
    return tuple(variant for variant in listed if variant.op in ops)
