"""topk_indices: positions of the greatest numbers of each row, or the slots of the keys there, in ascending order of position.

Numbers are ordered by value, -0 as +0 and NaN below -inf, and equal ones by position, the lower first. So the result is a function of the
row alone, whatever divides it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from .abi import Int32, Int64, Pointer, params_of
from .arch import Arch

DTYPE = "fp32"  # of logits
THREADS = 512
WARPS = THREADS // 32
RESIDENT_ROWS = 1024  # numbers of its part of a row that a warp keeps in shared memory
RESIDENT = WARPS * RESIDENT_ROWS  # of a CTA
CLUSTERS = (1, 2, 4, 8)  # CTAs that share a row
WIDE, NARROW = max(CLUSTERS), min(CLUSTERS)
LEAST_SHARED = 2  # CTAs that share a row which one cannot keep
BLOCKS_PER_SM = 2
LISTED = 8192  # numbers that a CTA which reads a row once keeps
STREAM_THREADS = 256
STREAM_TILE = 4096  # numbers that it looks at together
MAX_STREAMED_TOPK = 2048  # beyond it two CTAs are faster
STREAM_BYTES = 115_152  # of its shared memory, which not every architecture has

MAX_ROWS = ((1 << 31) - 1) // WIDE  # the grid's first dimension
MAX_COLUMNS = 1 << 30  # so that every position computed from a warp's share is an int32
MAX_TOPK = 1 << 30


class TopkIndicesArguments(NamedTuple):
    """Launch arguments of topk_indices, in ABI order: the one list that host, launch and kernel share.

    Row r is query token r % tokens_per_request of request r // tokens_per_request. Its first `length` columns count:
    end - first, clipped to 0 .. columns, with first and end clipped to 0 .. keys.
    """

    logits: Pointer  # fp32 [rows, columns]; null if columns <= topk, where none is read
    first_keys: Pointer  # int32 [rows], or null: all 0
    end_keys: Pointer  # int32 [rows], or [requests] if not length_per_token
    block_table: Pointer  # int32 [requests, table columns] of a variant with slots, else null
    indices: Pointer  # int32 [rows, topk], out
    logits_stride_row: Int64  # in elements, as the next two
    indices_stride_row: Int64
    table_stride: Int64
    columns: Int32
    topk: Int32
    keys: Int32
    tokens_per_request: Int32
    length_per_token: Int32  # 1: end is end_keys[r]; 0: end_keys[request], clipped, - tokens_per_request + 1 + token
    page_size: Int32  # of a variant with slots: a power of two
    pages: Int32  # an entry of the table outside [0, pages) has the slot -1 for each of its keys


PARAMS = params_of(TopkIndicesArguments)


@dataclass(frozen=True)
class TopkIndicesConfig:
    """One compiled variant: element type of the rows, CTAs that share a row, and whether keys are given by their slots.

    stream: the one CTA of a row reads it once.
    """

    dtype: str
    cluster: int
    slots: bool = False
    stream: bool = False

    @property
    def name(self) -> str:
        """The kernel's name in the manifest, without op and arch."""
        return f"{self.dtype}_{'stream' if self.stream else f'cluster{self.cluster}'}{'_slots' if self.slots else ''}"


def order_terms(config: TopkIndicesConfig, arch: Arch) -> dict[str, Any]:
    """Return the terms of the order that all variants of all architectures share, since the result is a function of the row."""
    rule = "greater first, then lower position; -0 as +0, NaN below -inf"
    return {"op": "topk_indices", "revision": 1, "dtype": config.dtype, "rule": rule, "result": "ascending positions"}


def streams(arch: Arch) -> bool:
    """Return whether an architecture has kernels that read a row once."""
    return arch.smem_per_block >= STREAM_BYTES


def config_for(rows: int, columns: int, topk: int, sm_count: int, slots: bool = False, once: bool = True) -> TopkIndicesConfig:
    """Return the variant for a shape: as many CTAs share a row as run at once, two at least where one cannot keep it.

    Of a row that one can keep, it is eight or one. Where rows are too many for two CTAs each, one reads a long row once. once: whether the
    architecture streams.
    """
    together = [cluster for cluster in CLUSTERS if rows * cluster <= BLOCKS_PER_SM * sm_count]
    if columns > RESIDENT:
        if once and rows * LEAST_SHARED > BLOCKS_PER_SM * sm_count and topk <= MAX_STREAMED_TOPK:
            return TopkIndicesConfig(DTYPE, NARROW, slots, stream=True)
        cluster = max(LEAST_SHARED, *together, NARROW)
    else:
        cluster = WIDE if WIDE in together and columns > RESIDENT // WIDE else NARROW
    return TopkIndicesConfig(DTYPE, cluster, slots)


def grid(rows: int, cluster: int) -> tuple[int, int, int]:
    """Return the CTAs: those of a row follow one another."""
    return rows * cluster, 1, 1


def closed_variants(arch: Arch) -> tuple[TopkIndicesConfig, ...]:
    """Return every variant that ships for an architecture."""
    clusters = (TopkIndicesConfig(DTYPE, cluster, slots) for slots in (False, True) for cluster in CLUSTERS)
    once = (TopkIndicesConfig(DTYPE, NARROW, slots, stream=True) for slots in (False, True) if streams(arch))
    return *clusters, *once
