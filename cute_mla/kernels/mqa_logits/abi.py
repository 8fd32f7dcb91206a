"""The arguments of the logits kernels, the same on every architecture: tensor maps, element types."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Float8E4M3FN, Float32, Uint8, cute
from cutlass.experimental import cuda as tensor_maps

from ...spec.mqa_logits import COLUMNS, TILE_KEYS, MqaLogitsArguments, MqaLogitsConfig


@dataclass(frozen=True)
class MqaLogitsAbi:
    """The arguments of one variant."""

    config: MqaLogitsConfig

    op = "mqa_logits"
    arguments = MqaLogitsArguments
    min_blocks_per_sm = 1  # unless told that there is a CTA a multiprocessor, ptxas ignores setmaxnreg on Blackwell (C7508)

    def elements(self) -> dict[str, type[cutlass.Numeric]]:
        """Return the types of the tensors: scales in pages are bytes."""
        scales = Uint8 if self.config.paged else Float32
        return {"q_map": Uint8, "k_map": Uint8, "weights": Float32, "scales": scales, "logits": Float32}

    def typed_maps(self, args: MqaLogitsArguments) -> tuple[tensor_maps.TensorMap, ...]:
        """Return the maps of q and of the keys. They fix the types; the runtime passes maps of its own."""
        config = self.config
        q_box = [COLUMNS, config.head_tile, config.block_tokens]
        k_box = [COLUMNS, TILE_KEYS, 1] if config.paged else [COLUMNS, TILE_KEYS]
        return tuple(_map(pointer, box) for pointer, box in ((args.q_map, q_box), (args.k_map, k_box)))

    def operands(self, args: MqaLogitsArguments) -> MqaLogitsArguments:
        """Return the arguments as they are."""
        return args


def _map(pointer: cute.Pointer, box: list[int]) -> tensor_maps.TensorMap:
    return tensor_maps.create_tensor_map_tiled(
        global_address=pointer.toint(),
        dtype=Float8E4M3FN,
        global_dims=box,
        global_strides=[COLUMNS // 16] * (len(box) - 1),
        box_dims=box,
        swizzle=tensor_maps.TensorMapSwizzle.s128b,
    )
