"""Cache codec: the reference quantiser and dequantiser of the formats in spec.cache_rows. Plain torch, on any device, exact.

A cache is a tensor [pages, page size, 1, bytes of a token]: 656, 584, 528 or 288 bytes as uint8, int8 or float8_e4m3fn, 576 columns
of float8_e4m3fn ("fp8_576"), or columns of bf16 or fp16 ("latent": 576). Pages may lie apart, with any stride. In fp8_584 and v41_paged
the bytes of a token are in two places of its page. There the tokens of a page follow each other without a gap, and the last two
dimensions only count bytes.
"""

from __future__ import annotations

from types import EllipsisType
from typing import Any, NamedTuple

import torch

from ..spec.cache_format import FORMATS, V41, CacheFormat
from ..spec.cache_rows import E4M3_MAX, FP8_576, KNOWN, LEAST_POWER_OF_TWO_AMAX
from ..spec.mla import ELEMENT_BYTES
from .arguments import check_flag, check_integer, check_no_grad, is_integer, short_repr
from .overlap import check_no_overlap
from .paged_cache import WIDE, check_cache_scale, columns_of, dtypes_of
from .strides import check_writable
from .tensor_spec import (
    TensorSpec,
    check_device,
    check_dtype,
    check_last_contiguous,
    check_shape,
    optional_spec,
    spec_of,
)

_MAX_BYTES = 1 << 40  # of a cache
_E8M0_NAN = 255
_E4M3_NAN = 0x7F  # the NaN that GPUs make, of the two codes
_BF16_NAN = 0x7FFF  # the NaN that GPUs make when they round to bf16
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of the codes 0 to 7; 8 is the sign
_E2M1_MAX = _E2M1[-1]
_E2M1_SIGN = 8
_LEAST_E4M3 = 2.0**-9


class Parts(NamedTuple):
    """The bytes of a cache, one row per token: uint8 [pages, page, bytes of codes], [.., scale bytes], [.., 128 or 0]."""

    codes: torch.Tensor
    scales: torch.Tensor
    wide: torch.Tensor


def empty_cache(
    cache_format: str, pages: int, page_size: int, *, page_stride: int | None = None, fill: int = 0, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return a cache [pages, page_size, 1, columns or bytes of a token] of any format on the CPU, every byte `fill`.

    page_stride: bytes from page to page, default the bytes of a page; FlashMLA pads the pages of fp8_584 to a multiple of 576.
    dtype: bf16 (default) or fp16 for "latent", "latent_512", "latent_320" and "latent_1088", float8_e4m3fn for "fp8_576"; for others uint8
    (default), int8 or float8_e4m3fn.
    ValueError for another format or dtype, a stride that is too small or splits an element, or a fill outside 0 .. 255.
    """
    layout = _known_format(cache_format)
    pages, page_size = check_integer("pages", pages, 0), check_integer("page_size", page_size, 0)
    fill = check_integer("fill", fill, 0, 255)
    own = dtypes_of(layout)
    if dtype is not None and dtype not in own:
        raise ValueError(f"dtype is {short_repr(dtype)} with {cache_format}; supported: {', '.join(map(str, own))}")
    dtype = dtype or own[0]
    token, least = layout.page_bytes(1), layout.page_bytes(page_size)
    stride = least if page_stride is None else page_stride
    if not is_integer(stride) or stride < least or stride % dtype.itemsize:
        raise ValueError(
            f"page_stride is {short_repr(page_stride)}; supported: at least the {least} bytes of {page_size} tokens in {cache_format}"
            + (f", a multiple of {dtype.itemsize}" if dtype.itemsize > 1 else "")
        )
    if max(pages, 1) * max(stride, 1) >= _MAX_BYTES:  # without bytes too, torch counts pages and distances in 64 bits
        raise ValueError(f"pages is {pages}, {stride} bytes apart; supported: less than {_MAX_BYTES} bytes in all")
    storage = torch.full((pages * stride,), fill, dtype=torch.uint8)
    return storage.as_strided((pages, page_size, 1, token), (stride, token, token, 1)).view(dtype)


def quantise_cache(
    kv: torch.Tensor,
    cache_format: str,
    *,
    power_of_two: bool = False,
    descale_k: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Store keys as a cache: kv [pages, page size, 1, d_qk] of any float dtype to [pages, page size, 1, columns or bytes of a token].

    cache_format: of d_qk 576 "latent", "fp8_576", "fp8_656"; of 512 "latent_512", "fp8_584", "v41", "v41_paged", "nope_528", "v41_fp4"; of
    320 "latent_320"; of 1,088 "latent_1088". 16-bit caches take the keys as they are, rounded to bf16 unless they are fp16. In "fp8_576" a
    column is divided by descale_k, fp32 of one element, default 1, rounded to the nearest e4m3 and limited to +-448.
    In the others a group of columns is divided by its scale, rounded to the nearest e4m3 (ties to even) and limited to +-448; the other
    columns are rounded to bf16. The scale is amax / 448 in fp32; with power_of_two, and always in fp8_584, v41 and v41_paged, whose scales
    are e8m0, it is the least power of two not below max(amax / 448, 1e-4), as FlashMLA's quantiser takes it. A group with a NaN or an
    infinity becomes NaN. Rounding to bf16 gives the NaN that GPUs give, 0x7FFF; bf16 columns are copied.
    In v41_fp4 codes are e2m1, limited to +-6, and a scale is amax / 6, limited to 2^-9 .. 448 and rounded to e4m3; power_of_two is False.
    out: the cache to write to, of any strides that the format allows, such as one of empty_cache; default a new contiguous one.
    Bytes of padding in out stay as they are.

    Returns the cache. ValueError on another format, shape, dtype or device, and for keys that require gradients.
    """
    layout = _known_format(cache_format)
    check_flag("power_of_two", power_of_two)
    if power_of_two and (layout.scale == "e4m3" or not layout.groups):
        raise ValueError(f"power_of_two is True with {cache_format}; supported: False")
    spec = spec_of("kv", kv)
    check_no_grad(kv=kv, descale_k=descale_k)
    check_shape("kv", spec, ("pages", "page size", 1, layout.d_qk))
    if not kv.is_floating_point():
        raise ValueError(f"kv has dtype {kv.dtype}; supported: floating point")
    _check_memory("kv", spec)
    check_cache_scale(optional_spec("descale_k", descale_k), layout, spec.device, "kv")
    out = _result(out, layout, "kv", kv)
    for columns, values in stored("out", out, layout, scaled(layout, kv.squeeze(2), descale_k), power_of_two):
        columns.copy_(values)
    return out


def scaled(layout: CacheFormat, keys: torch.Tensor, descale_k: torch.Tensor | None) -> torch.Tensor:
    """Return keys as `stored` takes them: those of fp8_576 divided by the scale of the cache."""
    if layout is not FP8_576:
        return keys
    return keys.float() if descale_k is None else keys.float() / descale_k


def stored(
    name: str, cache: torch.Tensor, layout: CacheFormat, keys: torch.Tensor, power_of_two: bool
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return views of a cache, [pages, page size, ..], each with the values that the keys [.., d_qk] store there.

    ValueError unless the cache, the argument `name`, has this format.
    """
    if layout.groups:
        parts, own = parts_of(name, cache, layout), quantised(keys, layout, power_of_two)
        return [(parts.codes, own.codes), (parts.scales[..., : own.scales.shape[-1]], own.scales), (parts.wide, own.wide)]
    if layout is FP8_576:
        return [(cache.view(torch.uint8).squeeze(2), to_e4m3(keys))]
    return [(cache.squeeze(2), _to_bf16(keys) if cache.dtype == torch.bfloat16 else keys)]


def stored_keys(
    name: str, cache: torch.Tensor, layout: CacheFormat, where: tuple[torch.Tensor, ...] | EllipsisType, descale_k: torch.Tensor | None
) -> torch.Tensor:
    """Return the keys at some places (page, row) of a cache: [.., d_qk] in the cache's dtype, or fp32 if it is quantised."""
    if layout.groups:
        return dequantised(Parts(*(columns[where] for columns in parts_of(name, cache, layout))), layout)
    if layout is not FP8_576:
        return cache.squeeze(2)[where]
    values = cache.view(torch.uint8).squeeze(2)[where].view(torch.float8_e4m3fn).float()
    return values if descale_k is None else values * descale_k


def quantised(keys: torch.Tensor, layout: CacheFormat, power_of_two: bool) -> Parts:
    """Return the bytes of keys [.., d_qk], without padding behind the scales."""
    groups = keys[..., : layout.quantised].float().unflatten(-1, (layout.groups, layout.group))
    scales = _fp4_scales(groups) if layout.scale == "e4m3" else _scales(groups, power_of_two or layout.scale == "e8m0")
    divisor = torch.where(scales > 0, scales, 1.0).unsqueeze(-1)  # where the scale is 0, all values are 0 or underflow
    divisor = torch.where(scales.isnan().unsqueeze(-1), scales.unsqueeze(-1), divisor)
    values = (groups / divisor).flatten(-2)
    return Parts(
        codes=_to_e2m1(values) if layout.code == "e2m1" else to_e4m3(values),
        scales={"fp32": _fp32_bytes, "e8m0": to_e8m0, "e4m3": to_e4m3}[layout.scale](scales),
        wide=_contiguous_bytes(_to_bf16(keys[..., layout.quantised :])).view(torch.uint8),
    )


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Return the e4m3 codes of floats as uint8: rounded to nearest even and limited to +-448."""
    codes = values.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(values.isnan(), _E4M3_NAN, codes)


def _to_bf16(values: torch.Tensor) -> torch.Tensor:
    """Return floats as bf16: rounded to nearest even, NaN as GPUs round it. The bits of bf16 values do not change."""
    if values.dtype == torch.bfloat16:
        return values
    bits = values.to(torch.bfloat16).view(torch.int16)
    return torch.where(values.isnan(), _BF16_NAN, bits).view(torch.bfloat16)


def dequantise_cache(cache: torch.Tensor, cache_format: str, *, descale_k: torch.Tensor | None = None) -> torch.Tensor:
    """Return the keys of a cache: fp32 [pages, page size, 1, d_qk], value times scale in fp32, without further rounding.

    cache: a tensor of the format cache_format, as quantise_cache returns it. descale_k: its scale in "fp8_576", fp32 of one element,
    default 1.
    ValueError on another format, shape, dtype, device or stride.
    """
    layout = _known_format(cache_format)
    spec = spec_of("cache", cache)
    check_no_grad(cache=cache, descale_k=descale_k)
    _check_memory("cache", spec)
    _check_cache("cache", spec, layout)
    check_cache_scale(optional_spec("descale_k", descale_k), layout, spec.device, "cache")
    return stored_keys("cache", cache, layout, ..., descale_k).float().unsqueeze(2)


def reorder_cache(cache: torch.Tensor, cache_format: str, to_format: str, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Copy a cache of DeepSeek-V4.1 into the other order of its bytes: every token's scales behind its row, or behind all rows of a page.

    cache: [pages, page size, 1, 528] of uint8, int8 or float8_e4m3fn. cache_format, to_format: "v41" or "v41_paged", the order of cache and
    of the result. out: the cache to write to, of any strides that to_format allows; default a new contiguous one of uint8.

    Returns the cache. Codes and scales keep their bits. ValueError on another format, shape, dtype, device or stride.
    """
    orders = {name: layout for name, layout in FORMATS.items() if layout.kernels == V41.name}
    for name, value in (("cache_format", cache_format), ("to_format", to_format)):
        if not isinstance(value, str) or value not in orders:
            raise ValueError(f"{name} is {short_repr(value)}; supported: {', '.join(orders)}")
    spec = spec_of("cache", cache)
    check_no_grad(cache=cache)
    _check_memory("cache", spec)
    source = parts_of("cache", cache, orders[cache_format])
    out = _result(out, orders[to_format], "cache", cache)
    target = parts_of("out", out, orders[to_format])
    target.codes.copy_(source.codes)
    target.scales.copy_(source.scales)
    return out


def _result(out: torch.Tensor | None, layout: CacheFormat, name: str, source: torch.Tensor) -> torch.Tensor:
    """Return the cache of this format that takes what the argument `name` holds: `out`, or a new one if that is None.

    source: [pages, page size, 1, ..]. ValueError for an `out` of another device, shape, dtype or stride, or over the memory of source.
    """
    pages, page_size = source.shape[:2]
    if out is None:
        if pages * layout.page_bytes(page_size) >= _MAX_BYTES:
            raise ValueError(f"{name} has shape {list(source.shape)}; supported: less than {_MAX_BYTES} bytes of {layout.name}")
        dtype = source.dtype if not layout.quantised and source.dtype in WIDE else None
        return empty_cache(layout.name, pages, page_size, dtype=dtype).to(source.device)
    given = spec_of("out", out)
    check_device("out", given, source.device, name)
    check_writable("out", given)
    check_no_overlap({"out": out}, {name: source})
    _check_cache("out", given, layout)
    if out.shape[:2] != source.shape[:2]:
        raise ValueError(f"out has shape {list(out.shape)}; supported: as many pages and tokens as {name}, {pages} and {page_size}")
    return out


def _check_cache(name: str, spec: TensorSpec, layout: CacheFormat) -> None:
    """Raise ValueError unless shape and dtype are those of a cache of this format."""
    check_shape(name, spec, ("pages", "page size", 1, columns_of(layout)))
    check_dtype(name, spec, *dtypes_of(layout))


def dequantised(parts: Parts, layout: CacheFormat) -> torch.Tensor:
    """Return the keys of these bytes: fp32 [.., d_qk]."""
    codes, scale_bytes = _contiguous_bytes(parts.codes), _contiguous_bytes(parts.scales)
    values = _from_e2m1(codes) if layout.code == "e2m1" else codes.view(torch.float8_e4m3fn).float()
    groups = values.unflatten(-1, (layout.groups, layout.group))
    if layout.scale == "e8m0":
        scales = _from_e8m0(scale_bytes[..., : layout.groups])
    else:
        scales = scale_bytes.view(torch.float32 if layout.scale == "fp32" else torch.float8_e4m3fn).float()
    narrow = (groups * scales.unsqueeze(-1)).flatten(-2)
    if layout.quantised == layout.d_qk:
        return narrow
    return torch.cat([narrow, _contiguous_bytes(parts.wide).view(torch.bfloat16).float()], dim=-1)


def _contiguous_bytes(view: torch.Tensor) -> torch.Tensor:
    """Return a copy at the beginning of its storage, as a view with wider elements requires."""
    return view.clone(memory_format=torch.contiguous_format)


def _known_format(cache_format: Any) -> CacheFormat:
    """Return the format of this name. ValueError if there is none."""
    layout = KNOWN.get(cache_format) if isinstance(cache_format, str) else None
    if layout is None:
        raise ValueError(f"cache_format is {short_repr(cache_format)}; supported: {', '.join(KNOWN)}")
    return layout


def _check_memory(name: str, spec: TensorSpec) -> None:
    """Raise ValueError for a tensor without memory."""
    if spec.device.type == "meta":
        raise ValueError(f"{name} is on meta; supported: the CPU and CUDA devices")


def parts_of(name: str, cache: torch.Tensor, layout: CacheFormat) -> Parts:
    """Return views of a cache's codes, scales and 16-bit columns. ValueError unless the cache has this format, which has groups."""
    spec = spec_of(name, cache)
    token = layout.page_bytes(1)
    _check_cache(name, spec, layout)
    check_last_contiguous(name, spec)
    cache = cache.view(torch.uint8)
    wide = slice(layout.wide_offset, layout.wide_offset + (layout.d_qk - layout.quantised) * ELEMENT_BYTES)
    if layout.scales_inside:
        rows = cache.squeeze(2)
        return Parts(rows[..., : layout.code_bytes], rows[..., layout.code_bytes : layout.wide_offset], rows[..., wide])
    pages, page_size = spec.shape[:2]
    if page_size > 1 and cache.stride(1) != token:
        raise ValueError(f"{name} has strides {list(spec.stride)}; supported: {token} bytes along dimension 1, pages without gaps")
    data = page_size * layout.row_bytes
    page = cache.as_strided((pages, page_size * token), (cache.stride(0), 1))
    rows = page[:, :data].unflatten(1, (page_size, layout.row_bytes))
    scales = page[:, data:].unflatten(1, (page_size, layout.scale_bytes))
    return Parts(rows[..., : layout.code_bytes], scales, rows[..., wide])


def _scales(groups: torch.Tensor, power_of_two: bool) -> torch.Tensor:
    """Return the scales of groups: fp32 [..., groups] for fp32 [..., groups, columns]. NaN for a group with a value that is not finite."""
    amax = groups.abs().amax(dim=-1)
    scales = amax / E4M3_MAX
    if power_of_two:
        scales = power_of_two_scales(scales.clamp_min(LEAST_POWER_OF_TWO_AMAX))
    return torch.where(groups.isfinite().all(dim=-1), scales, float("nan"))


def power_of_two_scales(scales: torch.Tensor) -> torch.Tensor:
    """Return the least power of two that is not below each positive fp32 number; infinities and NaN stay."""
    mantissa, exponent = torch.frexp(scales)  # mantissa in [0.5, 1): ceil(log2) without a logarithm's rounding
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    return torch.where(scales.isfinite(), torch.ldexp(torch.ones_like(scales), exponent), scales)


def _fp4_scales(groups: torch.Tensor) -> torch.Tensor:
    """Return the scales of v41_fp4, rounded to e4m3, as fp32; NaN for a group with a value that is not finite."""
    scales = (groups.abs().amax(dim=-1) / _E2M1_MAX).clamp(_LEAST_E4M3, E4M3_MAX).to(torch.float8_e4m3fn).float()
    return torch.where(groups.isfinite().all(dim=-1), scales, float("nan"))


def _to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """Return the e2m1 codes of floats, two in a byte: rounded to nearest even and limited to +-6; 6 for NaN, as GPUs round it."""
    magnitudes = torch.tensor(_E2M1, device=values.device)
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    size = values.abs().unsqueeze(-1)
    ties_up = torch.arange(len(middles), device=values.device) % 2 == 1  # to the even one of the codes beside it
    codes = ((size > middles) | ((size == middles) & ties_up)).sum(dim=-1)
    codes = torch.where(values.isnan(), len(_E2M1) - 1, codes + _E2M1_SIGN * values.signbit())
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return (low | high << 4).to(torch.uint8)


def _from_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Return the values of e2m1 codes, two in a byte, in fp32."""
    each = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2).long()
    magnitudes = torch.tensor((*_E2M1, *(-value for value in _E2M1)), device=codes.device)
    return magnitudes[each]


def _fp32_bytes(scales: torch.Tensor) -> torch.Tensor:
    """Return the bytes of fp32 numbers."""
    return scales.contiguous().view(torch.uint8)


def to_e8m0(scales: torch.Tensor) -> torch.Tensor:
    """Return the biased exponents of powers of two as uint8, 255 for NaN."""
    exponent = (scales.contiguous().view(torch.int32) >> 23) & 0xFF
    return torch.where(scales.isnan(), _E8M0_NAN, exponent).to(torch.uint8)


def _from_e8m0(codes: torch.Tensor) -> torch.Tensor:
    """Return 2^(code - 127) in fp32, NaN for code 255."""
    exponent = codes.to(torch.int32)
    bits = torch.where(exponent == 0, 1 << 22, exponent << 23)  # 2^-127 is subnormal
    return torch.where(exponent == _E8M0_NAN, float("nan"), bits.view(torch.float32))
