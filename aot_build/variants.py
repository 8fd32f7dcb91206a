"""Closed list of the kernels that ship. Nothing is compiled on a user's machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from cute_mla.kernels.definition import KernelConfig, KernelDefinition
from cute_mla.manifest import kernel_name
from cute_mla.spec.arch import Arch
from cute_mla.spec.kernel_ops import KERNEL_OPS

OPS = tuple(KERNEL_OPS)


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
    """Return every variant that ships for an architecture. ValueError for an unknown op."""
    for op in ops:
        if op not in OPS:
            raise ValueError(f"unknown op {op!r}; supported: {', '.join(OPS)}")
    return tuple(
        Variant(op, arch, config, kernels.module(op, arch))
        for op, kernels in KERNEL_OPS.items()
        if op in ops
        for config in kernels.variants(arch)
    )


def seconds_of(variant: Variant) -> float:
    """Return the seconds that one core needs for a kernel of this op; those of an attention kernel for an op that is not listed."""
    return KERNEL_OPS[variant.op].seconds if variant.op in KERNEL_OPS else 2.0
