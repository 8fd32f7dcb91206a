"""The shell of an attention kernel, the same for every op and architecture: ABI in, roles out."""

from __future__ import annotations

from typing import Any, Protocol

import cutlass
from cutlass import Float32, cute
from cutlass.experimental import cuda as tensor_maps

from ...manifest import Barrier, NamedBarrier, Role, kernel_name
from ...spec.abi import params_of
from ...spec.arch import Arch
from ..definition import KernelDefinition
from ..example_arguments import example_arguments

ELEMENT_TYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "e4m3": cutlass.Float8E4M3FN}
# pointers to fp32, where an op has them
FLOATS = ("attn_sink", "max_logits", "lse", "lse_indexer", "out_accum", "lse_accum", "descale_q", "descale_k")


class AttentionConfig(Protocol):
    """A variant of any attention op."""

    @property
    def name(self) -> str:
        """Return the kernel's name in the manifest, without op and arch."""

    @property
    def dtype(self) -> str:
        """Return the element type of out: "bf16" or "fp16"; of the operands of logits kernels: "e4m3"."""

    @property
    def cluster(self) -> int:
        """Return the CTAs of a cluster."""


class KernelAbi(Protocol):
    """The arguments of one variant: their types, and the view of them that its roles take."""

    @property
    def op(self) -> str:
        """Return the op's name in the manifest."""

    @property
    def arguments(self) -> type:
        """Return the NamedTuple of the spec, whose tensor maps come first."""

    @property
    def min_blocks_per_sm(self) -> int:
        """Return the CTAs per multiprocessor of the launch bounds; 0: unset."""

    @property
    def config(self) -> AttentionConfig:
        """Return the variant."""

    def elements(self) -> dict[str, type[cutlass.Numeric]]:
        """Return what pointers point to, where element_types does not say, or says something else."""

    def typed_maps(self, args: Any) -> tuple[tensor_maps.TensorMap, ...]:
        """Return typed maps in place of the pointers that stand in for the op's tensor maps, in order."""

    def operands(self, args: Any) -> Any:
        """Return the op's operands: the arguments by meaning."""


class AttentionKernel:
    """One variant of a kernel. A subclass has `threads` and `run`, which builds the roles and gives each its warps.

    dtype: of out, 16 bits, or of e4m3 operands.
    """

    threads: int

    def __init__(self, abi: KernelAbi, arch: Arch) -> None:
        self.abi = abi
        self.name = kernel_name(abi.op, arch.name, abi.config.name)
        self.dtype = ELEMENT_TYPES[abi.config.dtype]

    def run(self, operands: Any) -> None:
        """Run the roles: the body of the kernel."""
        raise NotImplementedError

    @cute.jit
    def host(self, args: Any):
        """Compile for the types of the arguments; never run, since the runtime launches the kernel itself."""
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        maps = self.abi.typed_maps(args)
        cluster = self.abi.config.cluster
        self.kernel(maps, tuple(args)[len(maps) :]).launch(
            grid=(cluster, 1, 1), block=(self.threads, 1, 1), cluster=(cluster, 1, 1), min_blocks_per_mp=self.abi.min_blocks_per_sm
        )

    @cute.kernel
    def kernel(self, maps: tuple[cutlass.GridConstant[tensor_maps.TensorMap], ...], others: tuple[Any, ...]):
        """Run the roles on the arguments by meaning."""
        self.run(self.abi.operands(self.abi.arguments(*maps, *others)))

    def definition(
        self,
        smem_bytes: int,
        barriers: tuple[Barrier, ...],
        named_barriers: tuple[NamedBarrier, ...],
        roles: tuple[Role, ...],
        expected: dict[str, int],
        tmem_columns: int = 0,
        overlapped: dict[str, int] | None = None,
    ) -> KernelDefinition:
        """Return the variant, ready to compile."""
        elements = {"q": self.dtype, "out": self.dtype, **dict.fromkeys(FLOATS, Float32), **self.abi.elements()}
        return KernelDefinition(
            op=self.abi.op,
            config=self.abi.config,
            host=self.host,
            args=(example_arguments(self.abi.arguments, elements),),
            params=params_of(self.abi.arguments),
            block=(self.threads, 1, 1),
            cluster=(self.abi.config.cluster, 1, 1),
            smem_bytes=smem_bytes,
            barriers=barriers,
            named_barriers=named_barriers,
            roles=roles,
            expected=expected,
            tmem_columns=tmem_columns,
            overlapped=overlapped or {},
        )
