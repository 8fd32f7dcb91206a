"""The shell of a kernel all of whose warps have one role, the same for every architecture."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import cutlass
from cutlass import cute

from ..manifest import Role, kernel_name
from ..spec.abi import params_of
from ..spec.arch import Arch
from .definition import KernelConfig, KernelDefinition
from .example_arguments import example_arguments


class WarpKernel:
    """One variant of a kernel. A subclass has `kernel`, on the op's arguments, and says how it is launched.

    role: the role of its warps. launch: what cute's launch takes besides grid, block and use_pdl.
    """

    op: str
    role: str
    arguments: type
    threads: int
    cluster: int = 1
    launch: Mapping[str, Any] = MappingProxyType({})
    kernel: Any

    def __init__(self, config: KernelConfig, arch: Arch) -> None:
        self.config: Any = config
        self.name = kernel_name(self.op, arch.name, config.name)

    @cute.jit
    def host(self, args: Any):
        """Compile for the types of the arguments; never run, since the runtime launches the kernel itself."""
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(args).launch(grid=(self.cluster, 1, 1), block=(self.threads, 1, 1), use_pdl=True, **self.launch)

    def definition(self, elements: Mapping[str, type[cutlass.Numeric]], expected: dict[str, int], smem_bytes: int = 0) -> KernelDefinition:
        """Return the variant, ready to compile. elements: what pointers point to."""
        return KernelDefinition(
            op=self.op,
            config=self.config,
            host=self.host,
            args=(example_arguments(self.arguments, elements),),
            params=params_of(self.arguments),
            block=(self.threads, 1, 1),
            cluster=(self.cluster, 1, 1),
            smem_bytes=smem_bytes,
            roles=(Role(self.role, 0, self.threads // 32),),
            expected=expected,
        )
