"""What the kernels of every attention op and architecture have in common: names and types of a variant, and what the build needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import Float32

from ...manifest import Barrier, NamedBarrier, Role, kernel_name
from ...spec.abi import Param
from ...spec.arch import Arch
from ..definition import KernelDefinition
from ..example_arguments import example_arguments

ELEMENT_TYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}
FLOATS = ("attn_sink", "max_logits", "lse", "out_accum", "lse_accum")  # parameters that point to fp32, where an op has them


class AttentionKernel:
    """One variant of a kernel. An op's entry is a subclass that has `op`, `params`, and `host`, the function to compile; an
    architecture's kernel is a subclass of that with `threads` and `run`."""

    op: str
    params: tuple[Param, ...]
    host: Callable[..., Any]
    threads: int

    def __init__(self, config: Any, arch: Arch) -> None:
        self.config = config
        self.name = kernel_name(self.op, arch.name, config.name)
        self.dtype = ELEMENT_TYPES[config.dtype]

    def elements(self) -> dict[str, type[cutlass.Numeric]]:
        """What the pointers among the parameters point to, if not to int32."""
        return {"q": self.dtype, "out": self.dtype, **dict.fromkeys(FLOATS, Float32)}

    def source(
        self,
        smem_bytes: int,
        barriers: tuple[Barrier, ...],
        named_barriers: tuple[NamedBarrier, ...],
        roles: tuple[Role, ...],
        expected: dict[str, int],
        tmem_columns: int = 0,
        overlapped: dict[str, int] | None = None,
    ) -> KernelDefinition:
        """The variant, ready to compile."""
        return KernelDefinition(
            op=self.op,
            config=self.config,
            host=self.host,
            args=example_arguments(self.params, self.elements()),
            params=self.params,
            block=(self.threads, 1, 1),
            cluster=(self.config.cluster, 1, 1),
            smem_bytes=smem_bytes,
            barriers=barriers,
            named_barriers=named_barriers,
            roles=roles,
            expected=expected,
            tmem_columns=tmem_columns,
            overlapped=overlapped or {},
        )
