"""The arguments of the dense decode kernels: tensor map, element types, operands."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32, Uint8
from cutlass.experimental import cuda as tensor_maps

from ...spec.dense_decode import CAUSAL, FP8, LATENT, TILE_ROWS, DenseDecodeArguments, DenseDecodeConfig
from ...spec.mla import D_QK
from ...spec.split_plan import TILE_KEYS
from ..attention.kernel import ELEMENT_TYPES
from ..attention.lengths import Lengths, RowTile, Units, VisibleTiles
from ..attention.scheduler import SplitKvSchedule
from .operands import BOX_BYTES_PER_KEY, DenseDecodeOperands


@dataclass(frozen=True)
class DenseDecodeAbi:
    """The arguments of one variant. rows: query rows of a CTA."""

    config: DenseDecodeConfig
    rows: int = TILE_ROWS

    op = "dense_decode"
    arguments = DenseDecodeArguments

    @property
    def min_blocks_per_sm(self) -> int:
        """Return 1 for three warpgroups: ptxas ignores setmaxnreg without it, and caps all of them at 168 registers."""
        return int(self.config.few_heads or self.config.rows64)

    @property
    def cache_dtype(self) -> type[cutlass.Numeric]:
        """Return the element type of the cache."""
        return ELEMENT_TYPES[self.config.dtype] if self.config.operands == LATENT else cutlass.Float8E4M3FN

    @property
    def query_dtype(self) -> type[cutlass.Numeric]:
        """Return the element type of q."""
        return cutlass.Float8E4M3FN if self.config.operands == FP8 else ELEMENT_TYPES[self.config.dtype]

    def elements(self) -> dict[str, type[cutlass.Numeric]]:
        """Return the types that depend on the operands."""
        return {"q": self.query_dtype, "cache": Uint8}

    def typed_maps(self, args: DenseDecodeArguments) -> tuple[tensor_maps.TensorMap, ...]:
        """Return the maps of the cache. Their boxes and swizzles are the host's."""
        kv_map = tensor_maps.create_tensor_map_tiled(
            global_address=args.kv_map.toint(),
            dtype=self.cache_dtype,
            global_dims=[self.config.d_qk, TILE_KEYS],
            global_strides=[self.config.d_qk // 8],
            box_dims=[BOX_BYTES_PER_KEY * 8 // self.cache_dtype.width, TILE_KEYS],
            swizzle=tensor_maps.TensorMapSwizzle.s128b,
        )
        return kv_map, kv_map

    def operands(self, args: DenseDecodeArguments) -> DenseDecodeOperands:
        """Return the arguments by meaning."""
        causal = cutlass.select_(args.mask == CAUSAL, Int32(1), Int32(0))
        units = Units(args.units, args.requests, args.total_q, args.s_q, causal)
        key_masks = self.config.key_masks
        window = VisibleTiles(args.reach, args.sink_keys, in_keys=True) if key_masks else None
        lengths = Lengths(args.cache_seqlens, None, args.max_keys, Int32(0), units, window)
        pinned = not key_masks or self.config.d_qk != D_QK
        ctas = self.config.cluster
        cluster_rows = ctas // self.config.column_ctas * self.rows
        rows = RowTile(args.mask, args.s_q, args.heads_per_kv, args.reach, ctas, cluster_rows, pinned)
        schedule = SplitKvSchedule(args.plan, args.num_splits, lengths, args.batch, args.max_splits, args.accum_rows, rows)
        most_box_keys = TILE_KEYS // 2 if self.config.column_ctas > 1 else TILE_KEYS
        return DenseDecodeOperands(args, schedule, units, key_masks, most_box_keys, self.config.column_ctas)
