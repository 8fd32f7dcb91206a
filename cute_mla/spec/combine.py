"""combine: merges the splits of each request, out = sum_s w_s out_s / sum_s w_s with w_s = 2^(lse_s - max lse)."""

from __future__ import annotations

from dataclasses import dataclass

from .abi import Param, float32s, int32s, int64s, pointers

ROWS_PER_BLOCK = 8  # one warp merges one row (query token, head)

PARAMS: tuple[Param, ...] = (
    *pointers(
        "cache_seqlens",  # int32 [batch]
        "num_splits",  # int32 [batch + 1]
        "out_accum",  # fp32 [accumulator rows, s_q, h_q, 512]
        "lse_accum",  # fp32 [accumulator rows, s_q, h_q], base 2
        "out",  # dtype [batch, s_q, h_q, 512]
        "lse",  # fp32 [batch, h_q, s_q], natural log
    ),
    *int64s(
        "out_stride_batch",
        "out_stride_token",
        "out_stride_head",
        "lse_stride_batch",
        "lse_stride_head",
        "lse_stride_token",
    ),
    *float32s("empty_lse"),
    *int32s(
        "s_q",
        "h_q",
        "split_tiles",  # as in split_plan: when fixed, a request uses ceil(tiles / split_tiles) of its accumulator rows
    ),
)


@dataclass(frozen=True)
class CombineConfig:
    """One compiled variant: the element type of out."""

    dtype: str

    @property
    def name(self) -> str:
        """The kernel's name in the manifest, without op and arch."""
        return self.dtype
