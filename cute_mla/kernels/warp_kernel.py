"""The shell of a kernel all of whose warps have one role, the same for every architecture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import cutlass
from cutlass import cute

from ..manifest import Role, kernel_name
from ..spec.abi import params_of
from ..spec.arch import Arch
from .definition import KernelConfig, KernelDefinition
from .example_arguments import example_arguments


@dataclass(frozen=True)
class WarpLaunch:
    """Name, sizes and arguments of a kernel, and how it is launched.

    role: of its warps. arguments: the NamedTuple of the spec. min_blocks_per_sm: CTAs of which ptxas is told, so that it takes more
    registers than it would unasked; 0: it is told nothing.
    """

    op: str
    role: str
    arguments: type
    threads: int
    cluster: int = 1
    min_blocks_per_sm: int = 0

    def options(self) -> dict[str, Any]:
        """Return what cute's launch takes."""
        sizes = {"grid": (self.cluster, 1, 1), "block": (self.threads, 1, 1), "cluster": (self.cluster, 1, 1), "use_pdl": True}
        if self.min_blocks_per_sm == 0:
            return sizes
        # the carve-out has no effect here: without it the DSL asks the driver, which need not exist
        return {**sizes, "min_blocks_per_mp": self.min_blocks_per_sm, "preferred_smem_carveout": 100}


class WarpKernel:
    """One variant of a kernel. A subclass has `launch`, and `kernel` on the op's arguments."""

    launch: WarpLaunch
    kernel: Any

    def __init__(self, config: KernelConfig, arch: Arch) -> None:
        self.config: Any = config
        self.name = kernel_name(self.launch.op, arch.name, config.name)

    @cute.jit
    def host(self, args: Any):
        """Compile for the types of the arguments; never run, since the runtime launches the kernel itself."""
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(args).launch(**self.launch.options())

    def definition(self, elements: Mapping[str, type[cutlass.Numeric]], expected: dict[str, int], smem_bytes: int = 0) -> KernelDefinition:
        """Return the variant, ready to compile. elements: what pointers point to."""
        launch = self.launch
        return KernelDefinition(
            op=launch.op,
            config=self.config,
            host=self.host,
            args=(example_arguments(launch.arguments, elements),),
            params=params_of(launch.arguments),
            block=(launch.threads, 1, 1),
            cluster=(launch.cluster, 1, 1),
            smem_bytes=smem_bytes,
            roles=(Role(launch.role, 0, launch.threads // 32),),
            expected=expected,
        )
