"""Byte layouts of latent caches whose slots are gathered by index.

    latent     d_latent 16-bit columns and 64 RoPE columns, 1,152 bytes a token
    fp8_656    512 e4m3 | 4 fp32 scales, one per 128 columns | 64 bf16 RoPE columns: 656 bytes a token (DeepSeek-V3.2)
    fp8_584    pages: a row of 576 bytes per token, 448 e4m3 | 64 bf16 RoPE columns, then behind all rows of the page 8 bytes per
               token, 7 e8m0 scales, one per 64 columns, and a byte of padding (DeepSeek-V4). The RoPE columns are values too.
    v41        512 e4m3 | 16 e8m0 scales, one per 32 columns: 528 bytes a token (DeepSeek-V4.1). Keys are values, and the RoPE
               columns, 448 to 511, are quantised like the others.
    v41_paged  as v41, but pages: rows of 512 bytes, then behind all rows of the page 16 bytes of scales per token
    nope_528   512 e4m3 | 4 fp32 scales, one per 128 columns: 528 bytes a token (DeepSeek-V3.2's without RoPE columns)
    v41_fp4    256 bytes of e2m1, two columns each, the even one in the low half | 32 e4m3 scales, one per 16 columns: 288 bytes
               a token. Only as extra cache beside v41 or v41_paged.

A page may be followed by padding: its distance to the next page is a stride. A slot is page * page_size + row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .mla import D_LATENT, D_ROPE, ELEMENT_BYTES

Code = Literal["e4m3", "e2m1"]
Scale = Literal["fp32", "e8m0", "e4m3"]

_CODE_BITS: dict[Code, int] = {"e4m3": 8, "e2m1": 4}
_SCALE_BYTES: dict[Scale, int] = {"fp32": 4, "e8m0": 1, "e4m3": 1}


@dataclass(frozen=True)
class CacheFormat:
    """One layout.

    d_qk: columns of a key; the first 512 are the values. quantised: number of leading columns stored as codes; the columns
    after them have 16 bits. group: quantised columns that share a scale. row_bytes: bytes from one token's data to the next
    token's. scale_bytes: bytes of one token's scales. scales_inside: True if the scales lie between the quantised and the
    16-bit columns of the row, False if they lie behind all rows of the page. scale, code: types of a scale and of a quantised
    column. served_as: name of the format whose kernels serve this one too; empty: kernels of its own. beside: name of the format that
    the first cache must have where this is the format of a second one; empty: its own.
    """

    name: str
    d_qk: int
    quantised: int
    group: int
    row_bytes: int
    scale_bytes: int
    scales_inside: bool
    scale: Scale = "fp32"
    code: Code = "e4m3"
    served_as: str = ""
    beside: str = ""

    @property
    def groups(self) -> int:
        """Scales of a token."""
        return self.quantised // self.group if self.group else 0

    @property
    def code_bytes(self) -> int:
        """Bytes of a token's quantised columns."""
        return self.quantised * _CODE_BITS[self.code] // 8

    @property
    def bytes_of_scale(self) -> int:
        """Bytes of one scale."""
        return _SCALE_BYTES[self.scale]

    @property
    def wide_offset(self) -> int:
        """Byte of a row at which the 16-bit columns begin."""
        return self.code_bytes + (self.scale_bytes if self.scales_inside else 0)

    @property
    def kernels(self) -> str:
        """Name of the format in the names of the kernels that serve it."""
        return self.served_as or self.name

    def page_bytes(self, page_size: int) -> int:
        """Return the bytes of a page, without padding behind it."""
        return page_size * (self.row_bytes + (0 if self.scales_inside else self.scale_bytes))


LATENT = CacheFormat("latent", D_LATENT + D_ROPE, 0, 0, (D_LATENT + D_ROPE) * ELEMENT_BYTES, 0, scales_inside=True)
FP8_656 = CacheFormat("fp8_656", D_LATENT + D_ROPE, D_LATENT, 128, 656, 16, scales_inside=True)
FP8_584 = CacheFormat("fp8_584", D_LATENT, D_LATENT - D_ROPE, 64, 576, 8, scales_inside=False, scale="e8m0")
V41 = CacheFormat("v41", D_LATENT, D_LATENT, 32, 528, 16, scales_inside=True, scale="e8m0")
V41_PAGED = CacheFormat("v41_paged", D_LATENT, D_LATENT, 32, 512, 16, scales_inside=False, scale="e8m0", served_as="v41")
NOPE_528 = CacheFormat("nope_528", D_LATENT, D_LATENT, 128, 528, 16, scales_inside=True)
V41_FP4 = CacheFormat("v41_fp4", D_LATENT, D_LATENT, 16, 288, 32, scales_inside=True, scale="e4m3", code="e2m1", beside="v41")

FORMATS: dict[str, CacheFormat] = {cache.name: cache for cache in (LATENT, FP8_656, FP8_584, V41, V41_PAGED, NOPE_528, V41_FP4)}


def paged_twin(cache: CacheFormat) -> CacheFormat | None:
    """Return the format with its scales behind all rows of a page that the kernels of `cache` serve too, or None."""
    return next((other for other in FORMATS.values() if other.served_as == cache.name), None)
