"""Dimensions of Multi-head Latent Attention, and constants that every op shares."""

from __future__ import annotations

import math
from dataclasses import dataclass

D_LATENT = 512  # compressed KV: keys and values both read it
D_ROPE = 64  # rotary part: keys only
D_QK = D_LATENT + D_ROPE
D_V = D_LATENT


@dataclass(frozen=True)
class LatentDims:
    """Columns of a key: latent ones, which are the values, and rotary ones behind them."""

    latent: int
    rotary: int

    @property
    def d_qk(self) -> int:
        """Return the columns of a key."""
        return self.latent + self.rotary


# By the columns of a key, which decide on both parts: DeepSeek and Kimi, GLM-5.3-Flash, Mistral Small 4
LATENT_DIMS = {dims.d_qk: dims for dims in (LatentDims(D_LATENT, D_ROPE), LatentDims(D_LATENT, 0), LatentDims(256, D_ROPE))}
VALUE_COLUMNS = tuple(dict.fromkeys(dims.latent for dims in LATENT_DIMS.values()))

# Of dense decode, with the window layers of dots3-note
D_WIDE = 1024
WIDE_DIMS = LatentDims(D_WIDE, D_ROPE)
DENSE_DIMS = {**LATENT_DIMS, WIDE_DIMS.d_qk: WIDE_DIMS}
DENSE_VALUE_COLUMNS = (*VALUE_COLUMNS, D_WIDE)

MAX_HEADS = 128

BF16, FP16 = DTYPES = ("bf16", "fp16")
ELEMENT_BYTES = 2  # of either

LOG2E = math.log2(math.e)  # of softmax scales and sinks, for exponentials in base 2


def key_dtypes(d_qk: int) -> tuple[str, ...]:
    """Return the 16-bit element types of dense decode over keys of this many columns: models with other columns than D_QK have bf16."""
    return DTYPES if d_qk == D_QK else (BF16,)


def ceil_div(numerator: int, denominator: int) -> int:
    """Return the least integer not below numerator / denominator, for positive denominators."""
    return -(-numerator // denominator)
