"""Codes and scales of quantised caches by formulas written out without torch."""

from __future__ import annotations

import math
import struct

import torch

NAN = float("nan")


def e4m3(code: int) -> float:
    """Return the value of a code: 1 sign, 4 exponent bits of bias 7, 3 mantissa bits; NaN for all ones, no infinities."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return NAN
    return sign * (math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10))


POSITIVE = [e4m3(code) for code in range(127)]


def nearest_e4m3(value: float) -> int:
    """Return the code nearest to a value, the even one of two that are equally near, 448 beyond the range."""
    sign = 0x80 if math.copysign(1.0, value) < 0 else 0
    magnitude = abs(value)
    below = max(code for code in range(127) if POSITIVE[code] <= magnitude)
    return sign | min(range(below, min(below + 2, 127)), key=lambda code: (abs(POSITIVE[code] - magnitude), code & 1))


def fp32(value: float) -> float:
    """Return a value rounded to fp32."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def power_of_two_scale(amax: float) -> int:
    """Return the exponent of the least power of two not below max(amax / 448, 1e-4)."""
    wanted = max(fp32(amax / 448), fp32(1e-4))
    return next(exponent for exponent in range(-20, 128) if math.ldexp(1, exponent) >= wanted)


def fp32_groups(row: list[float], power_of_two: bool) -> bytes:
    """Return the codes of 512 columns, then 4 fp32 scales, one per 128 columns."""
    codes, scales = b"", b""
    for group in range(4):
        columns = row[128 * group : 128 * group + 128]
        amax = max(map(abs, columns))
        scale = math.ldexp(1, power_of_two_scale(amax)) if power_of_two else fp32(amax / 448)
        codes += bytes(nearest_e4m3(fp32(value / scale)) for value in columns)
        scales += struct.pack("<f", scale)
    return codes + scales


def e8m0_groups(row: list[float], groups: int, group: int) -> tuple[bytes, bytes]:
    """Return the codes of the first groups x group columns, and an e8m0 scale per group."""
    codes, scales = b"", b""
    for first in range(0, groups * group, group):
        columns = row[first : first + group]
        exponent = power_of_two_scale(max(map(abs, columns)))
        codes += bytes(nearest_e4m3(fp32(math.ldexp(value, -exponent))) for value in columns)
        scales += bytes([exponent + 127])
    return codes, scales


def drawn_keys(pages: int, page_size: int, d_qk: int, group: int, seed: int) -> torch.Tensor:
    """Return keys fp32 [pages, page_size, 1, d_qk] of all sizes: the columns of a group are of one size, and column 5 is 0."""
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(pages, page_size, 1, d_qk, generator=generator)
    kv *= torch.exp(3 * torch.randn(pages, page_size, 1, d_qk // group, generator=generator)).repeat_interleave(group, -1)
    kv[..., 5] = 0
    return kv


def page_bytes(cache: torch.Tensor, page: int) -> bytes:
    """Return all bytes of a page, in the order of memory."""
    nbytes = cache.shape[1] * cache.shape[3]
    return bytes(cache.as_strided((nbytes,), (1,), cache.storage_offset() + page * cache.stride(0)).tolist())
