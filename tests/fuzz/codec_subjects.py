"""Caches quantised and read in plain torch, which launch nothing: other tests take them as the reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_mla.cache import dequantise_cache, empty_cache, quantise_cache
from cute_mla.spec.cache_format import CacheFormat
from cute_mla.spec.cache_rows import KNOWN
from tests.fuzz.calls import CacheCase, Setting
from tests.fuzz.contract import Contract
from tests.fuzz.scalars import is_flag, is_one_of
from tests.fuzz.subjects import Arguments, Subject, Verify


def _types(layout: CacheFormat) -> tuple[torch.dtype, ...]:
    """Types of a cache, the default one first."""
    if not layout.quantised:
        return torch.bfloat16, torch.float16
    return (torch.uint8, torch.int8, torch.float8_e4m3fn) if layout.groups else (torch.float8_e4m3fn,)


def _columns(layout: CacheFormat) -> int:
    return layout.page_bytes(1) // _types(layout)[0].itemsize


def _keys(case: CacheCase) -> tuple[Tensor, Tensor | None]:
    """kv, and a cache for it if one is given."""
    layout = KNOWN[case.cache_format]
    kv = torch.randn(case.pages, case.page_size, 1, layout.d_qk, generator=torch.Generator().manual_seed(case.seed))
    if not case.given:
        return kv, None
    stride = layout.page_bytes(case.page_size) + case.padding * _types(layout)[0].itemsize
    return kv, empty_cache(case.cache_format, case.pages, case.page_size, page_stride=stride)


def _quantise_arguments(case: CacheCase) -> Arguments:
    kv, out = _keys(case)
    return {"kv": kv, "cache_format": case.cache_format, "power_of_two": case.power_of_two, "out": out}


def _quantise_faults(arguments: Arguments, setting: Setting) -> set[str]:
    c = Contract(arguments)
    c.numbers(power_of_two=is_flag)
    if not c.require(is_one_of(*KNOWN)(arguments["cache_format"]), "cache_format"):
        return c.faults
    layout = KNOWN[arguments["cache_format"]]
    flag = arguments["power_of_two"]
    c.require(not is_flag(flag) or not flag or (layout.groups > 0 and layout.code == "e4m3"), "power_of_two")
    kv = c.tensor("kv")
    if not c.shaped("kv", kv, None, None, 1, layout.d_qk, beside="cache_format") or kv is None:
        return c.faults
    floats = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
    c.require(kv.dtype in floats and kv.device.type != "meta", "kv")
    out = c.tensor("out", *_types(layout), optional=True)
    c.require(out is not None or kv.shape[0] * layout.page_bytes(kv.shape[1]) < 1 << 40, "kv")
    if out is not None and c.shaped("out", out, *kv.shape[:2], 1, _columns(layout), beside="kv"):
        _check_pages(c, "out", out, layout)
        c.require(out.device == kv.device, "out", "kv")
        c.output("out", tuple(out.shape), _types(layout))
        c.apart(("out",))
    return c.faults


def _check_pages(c: Contract, name: str, cache: Tensor, layout: CacheFormat) -> None:
    if layout.groups:
        c.last_contiguous(name, cache)
        c.require(layout.scales_inside or cache.shape[1] <= 1 or cache.stride(1) == cache.shape[3], name)


def _expect_quantised(arguments: Arguments, setting: Setting) -> Verify:
    kv, cache_format = arguments["kv"].float(), arguments["cache_format"]
    relative, absolute = (14, 0.02) if KNOWN[cache_format].code == "e4m3" else (4, 0.2)  # e2m1 has a bit of mantissa

    def verify(cache: Any) -> str:
        if arguments["out"] is not None and cache is not arguments["out"]:
            return "the cache returned is not the one given"
        error = (dequantise_cache(cache, cache_format) - kv).abs()
        return "" if not error.numel() or float((error - kv.abs() / relative).max()) < absolute else f"off by {float(error.max())}"

    return verify


def _dequantise_arguments(case: CacheCase) -> Arguments:
    kv, out = _keys(case)
    return {"cache": quantise_cache(kv, case.cache_format, out=out), "cache_format": case.cache_format}


def _dequantise_faults(arguments: Arguments, setting: Setting) -> set[str]:
    c = Contract(arguments)
    if not c.require(is_one_of(*KNOWN)(arguments["cache_format"]), "cache_format"):
        return c.faults
    layout = KNOWN[arguments["cache_format"]]
    cache = c.tensor("cache", *_types(layout))
    if c.shaped("cache", cache, None, None, 1, _columns(layout), beside="cache_format") and cache is not None:
        _check_pages(c, "cache", cache, layout)
        c.require(cache.device.type != "meta", "cache")
    return c.faults


def _expect_dequantised(arguments: Arguments, setting: Setting) -> Verify:
    shape = [*arguments["cache"].shape[:3], KNOWN[arguments["cache_format"]].d_qk]
    return lambda kv: "" if list(kv.shape) == shape and kv.dtype == torch.float32 else f"{kv.dtype} {list(kv.shape)}"


CODEC_SUBJECTS: dict[str, Subject] = {
    "quantise_cache": Subject(quantise_cache, _quantise_arguments, _quantise_faults, _expect_quantised, ("descale_k",)),
    "dequantise_cache": Subject(dequantise_cache, _dequantise_arguments, _dequantise_faults, _expect_dequantised, ("descale_k",)),
}
