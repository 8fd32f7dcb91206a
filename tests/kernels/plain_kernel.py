"""Kernels of tests: one warp a CTA, no shared memory, no variants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cute_mla.kernels.definition import KernelDefinition
from cute_mla.kernels.example_arguments import example_arguments
from cute_mla.spec.abi import params_of


@dataclass(frozen=True)
class PlainConfig:
    """The only variant of a kernel."""

    name: str


def plain_kernel(name: str, host: Callable[..., Any], arguments: type) -> KernelDefinition:
    """Return a kernel, ready to compile. arguments: NamedTuple of its arguments, whose pointers are to int32."""
    return KernelDefinition(
        op=name,
        config=PlainConfig(name),
        host=host,
        args=(example_arguments(arguments, {}),),
        params=params_of(arguments),
        block=(32, 1, 1),
        cluster=(1, 1, 1),
        smem_bytes=0,
    )
