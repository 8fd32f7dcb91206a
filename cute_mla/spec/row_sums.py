"""row_sums: adds the rows of each key's list, in the order of the list.

sums[s] = (.. ((sums[s] + rows[e_0]) + rows[e_1]) + ..), in fp32, over the entries e_0, e_1, .. of key s as key_lists orders them. A launch
goes through the lists of a chunk of tokens, and sums are carried from chunk to chunk in fp32. So chunks, other requests and the number of
SMs cannot change a bit. The launch of the last chunk writes scale * sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .abi import Float32, Int32, Int64, Pointer, params_of
from .mla import BF16, D_LATENT, D_QK

FP32 = "fp32"
WARP_COLUMNS = 64  # of a row that one warp adds
COLUMNS = (D_QK, D_LATENT, 128)  # of a row: latents of sparse attention, and keys of an indexer
OUT_DTYPES = (BF16, FP32)
MAX_KEYS = (1 << 31) - 1  # the grid's first dimension


class RowSumsArguments(NamedTuple):
    """Launch arguments of row_sums, in ABI order: the one list that host, launch and kernel share."""

    rows: Pointer  # bf16 [rows, columns]: that of an entry has the entry's number
    entries: Pointer  # int32, as in KeyListsArguments
    row_starts: Pointer  # int32 [keys + 1], likewise
    sums: Pointer  # fp32 [keys, columns]: carried from and to other chunks; null if the only chunk is the first and the last
    out: Pointer  # dtype [keys, columns], written by the last chunk
    out_stride_key: Int64  # in elements
    scale: Float32  # of out
    first: Int32  # 1: sums begin at 0 and are not read
    last: Int32  # 1: write out, not sums
    accumulate: Int32  # 1: add to out, which is fp32


PARAMS = params_of(RowSumsArguments)


@dataclass(frozen=True)
class RowSumsConfig:
    """One compiled variant: columns of a row, and element type of out."""

    columns: int
    out_dtype: str

    @property
    def name(self) -> str:
        """The kernel's name in the manifest, without op and arch."""
        return f"{self.out_dtype}_d{self.columns}"


def closed_variants() -> tuple[RowSumsConfig, ...]:
    """Return every variant that ships, on each architecture."""
    return tuple(RowSumsConfig(columns, dtype) for columns in COLUMNS for dtype in OUT_DTYPES)
