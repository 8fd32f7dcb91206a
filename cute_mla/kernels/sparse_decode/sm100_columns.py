"""The columns of a variant's keys that a CTA of a pair holds, on SM100: what moves them, and where their scales wait in shared memory."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Int32

from ...spec.cache_format import CacheFormat
from ...spec.mla import D_LATENT, D_ROPE, ELEMENT_BYTES
from ...spec.sparse_decode import SparseDecodeConfig
from ..primitives.smem import Array, Field
from ..sm100.config import GROUP_WARPS, PAIR
from ..sm100.row_conversion import latent_e4m3_columns
from ..sm100.row_copy import CHUNK, LANES, CopiedColumns, CopiedTile, latent_columns, rope_columns
from ..sm100.row_producer import KV_STAGES, ColumnMover
from .sm100_gather import LATENT_BOXES, SPARE_BOX, ScaledColumns, ScaledTile
from .sm100_v41 import HALVES, MixedTile, V41Tile


def scale_fields(config: SparseDecodeConfig) -> tuple[Field, ...]:
    """Return the fields of shared memory for scales."""
    if not config.format.quantised:
        return ()
    warps = KV_STAGES * GROUP_WARPS
    if config.mixes_formats:
        return Array("sScales", Int32, warps * HALVES * LANES), Array("sNarrow", Int32, warps)
    return (Array("sScales", Int32, warps * LANES),)


def columns_of_cta(config: SparseDecodeConfig, dtype: type[cutlass.Numeric], memory: dict[str, Any], rank: Int32) -> ColumnMover:
    """Return the mover of the columns that the CTA of this rank holds. memory: with the fields for scales."""
    cache = config.format
    if not cache.quantised:
        return CopiedTile((latent_columns(rank), rope_columns(cache.wide_offset + D_LATENT * ELEMENT_BYTES, rank)))
    if config.mixes_formats:
        return MixedTile(latent_e4m3_columns(rank), rank, memory["sScales"], memory["sNarrow"])
    if cache.scale == "e8m0" and cache.quantised == D_LATENT:
        return V41Tile(latent_e4m3_columns(rank), rank, memory["sScales"])
    copied = _wide_columns(cache, rank)
    return ScaledTile(ScaledColumns.create(cache, dtype, rank), copied, rank, memory["sScales"])


def _wide_columns(cache: CacheFormat, rank: Int32) -> tuple[CopiedColumns, ...]:
    """Return the movers of the 16-bit columns behind the quantised ones."""
    if cache.quantised == cache.d_qk:
        return ()
    if cache.d_qk > D_LATENT:
        return (rope_columns(cache.wide_offset, rank),)
    # they are the last values, which the odd CTA holds
    held = rank == PAIR - 1
    box = cutlass.select_(held, Int32(LATENT_BOXES - 1), Int32(SPARE_BOX))
    return (CopiedColumns.create(D_ROPE * ELEMENT_BYTES // CHUNK, box, Int32(cache.wide_offset), held),)
