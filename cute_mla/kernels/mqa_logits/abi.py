"""The arguments of the logits kernels, the same on every architecture: tensor maps, element types, and the shell around `run`."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float8E4M3FN, Float32, Uint8, cute
from cutlass.experimental import cuda as tensor_maps

from ...manifest import Barrier, NamedBarrier, Role, kernel_name
from ...spec.arch import Arch
from ...spec.mqa_logits import COLUMNS, PARAMS, TILE_KEYS, MqaLogitsArguments, MqaLogitsConfig
from ..definition import KernelDefinition
from ..example_arguments import example_arguments

OP = "mqa_logits"
MAPS = 2
MIN_BLOCKS_PER_SM = 1  # unless told that there is a CTA a multiprocessor, ptxas ignores setmaxnreg on Blackwell (C7508)


class MqaLogitsKernel:
    """One variant of the kernel. A subclass has `threads` and `run`, which builds the roles and gives each its warps."""

    threads: int

    def __init__(self, config: MqaLogitsConfig, arch: Arch) -> None:
        self.config = config
        self.name = kernel_name(OP, arch.name, config.name)

    def run(self, args: MqaLogitsArguments) -> None:
        """Run the roles: the body of the kernel."""
        raise NotImplementedError

    @cute.jit
    def host(self, args: MqaLogitsArguments):
        """Compile for the types of the arguments; never run, since the runtime launches the kernel itself."""
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(typed_maps(args, self.config), tuple(args)[MAPS:]).launch(
            grid=(1, 1, 1), block=(self.threads, 1, 1), min_blocks_per_mp=MIN_BLOCKS_PER_SM
        )

    @cute.kernel
    def kernel(self, maps: tuple[cutlass.GridConstant[tensor_maps.TensorMap], ...], others: tuple[Any, ...]):
        """Run the roles on the arguments by name."""
        self.run(MqaLogitsArguments(*maps, *others))

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
        scales = Uint8 if self.config.paged else Float32
        elements = {"q_map": Uint8, "k_map": Uint8, "weights": Float32, "scales": scales, "logits": Float32}
        return KernelDefinition(
            op=OP,
            config=self.config,
            host=self.host,
            args=(example_arguments(MqaLogitsArguments, elements),),
            params=PARAMS,
            block=(self.threads, 1, 1),
            cluster=(1, 1, 1),
            smem_bytes=smem_bytes,
            barriers=barriers,
            named_barriers=named_barriers,
            roles=roles,
            expected=expected,
            tmem_columns=tmem_columns,
            overlapped=overlapped or {},
        )


def typed_maps(args: MqaLogitsArguments, config: MqaLogitsConfig) -> tuple[tensor_maps.TensorMap, ...]:
    """Return the maps of q and of the keys. They fix the types; the runtime passes maps of its own."""
    q_box = [COLUMNS, config.head_tile, config.block_tokens]
    k_box = [COLUMNS, TILE_KEYS, 1] if config.paged else [COLUMNS, TILE_KEYS]
    return tuple(_map(pointer, box) for pointer, box in ((args.q_map, q_box), (args.k_map, k_box)))


def _map(pointer: cute.Pointer, box: list[int]) -> tensor_maps.TensorMap:
    return tensor_maps.create_tensor_map_tiled(
        global_address=pointer.toint(),
        dtype=Float8E4M3FN,
        global_dims=box,
        global_strides=[COLUMNS // 16] * (len(box) - 1),
        box_dims=box,
        swizzle=tensor_maps.TensorMapSwizzle.s128b,
    )
