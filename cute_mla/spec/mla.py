"""Dimensions of Multi-head Latent Attention, and constants that every op shares."""

from __future__ import annotations

import math

D_LATENT = 512  # compressed KV: keys and values both read it
D_ROPE = 64  # rotary part: keys only
D_QK = D_LATENT + D_ROPE
D_V = D_LATENT

MAX_HEADS = 128

DTYPES = ("bf16", "fp16")
ELEMENT_BYTES = 2  # of either

LOG2E = math.log2(math.e)  # of softmax scales and sinks, for exponentials in base 2


def ceil_div(numerator: int, denominator: int) -> int:
    """Return the least integer not below numerator / denominator, for positive denominators."""
    return -(-numerator // denominator)
