"""Byte layouts of latent caches whose slots are gathered by index.

    latent   d_latent 16-bit columns and 64 RoPE columns, 1,152 bytes a token
    fp8_656  512 e4m3 | 4 fp32 scales, one per 128 columns | 64 bf16 RoPE columns: 656 bytes a token (DeepSeek-V3.2)
    fp8_584  pages: a row of 576 bytes per token, 448 e4m3 | 64 bf16 RoPE columns, then behind all rows of the page 8 bytes per
             token, 7 e8m0 scales, one per 64 columns, and a byte of padding (DeepSeek-V4). The RoPE columns are values too.

A page may be followed by padding: its distance to the next page is a stride. A slot is page * page_size + row.
"""

from __future__ import annotations

from dataclasses import dataclass

from .mla import D_LATENT, D_ROPE, ELEMENT_BYTES


@dataclass(frozen=True)
class CacheFormat:
    """One layout.

    d_qk: columns of a key; the first 512 are the values. quantised: number of leading columns stored as e4m3; the columns
    after them have 16 bits. group: quantised columns that share a scale. row_bytes: bytes from one token's data to the next
    token's. scale_bytes: bytes of one token's scales. scales_inside: True if the scales lie between the quantised and the
    16-bit columns of the row, False if they lie behind all rows of the page.
    """

    name: str
    d_qk: int
    quantised: int
    group: int
    row_bytes: int
    scale_bytes: int
    scales_inside: bool

    @property
    def groups(self) -> int:
        """Scales of a token."""
        return self.quantised // self.group if self.group else 0

    @property
    def wide_offset(self) -> int:
        """Byte of a row at which the 16-bit columns begin."""
        return self.quantised + (self.scale_bytes if self.scales_inside else 0)

    def page_bytes(self, page_size: int) -> int:
        """Return the bytes of a page, without padding behind it."""
        return page_size * (self.row_bytes + (0 if self.scales_inside else self.scale_bytes))


LATENT = CacheFormat("latent", D_LATENT + D_ROPE, 0, 0, (D_LATENT + D_ROPE) * ELEMENT_BYTES, 0, scales_inside=True)
FP8_656 = CacheFormat("fp8_656", D_LATENT + D_ROPE, D_LATENT, 128, 656, 16, scales_inside=True)
FP8_584 = CacheFormat("fp8_584", D_LATENT, D_LATENT - D_ROPE, 64, 576, 8, scales_inside=False)

FORMATS: dict[str, CacheFormat] = {cache.name: cache for cache in (LATENT, FP8_656, FP8_584)}

# Formats of FlashMLA without kernels here, by their bytes of a token.
UNSUPPORTED = {
    528: "V41 (DeepSeek-V4.1, 512 e4m3 and 16 scales)",
    288: "V41_FP4 (DeepSeek-V4.1, 512 e2m1 and 32 scales)",
}
