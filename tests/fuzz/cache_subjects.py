"""Keys written to caches and gathered from them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cute_mla.cache import gather_kv_cache, write_kv_cache
from cute_mla.testing.compare import Tolerance
from cute_mla.testing.operations import OPERATIONS
from tests.fuzz.calls import Setting
from tests.fuzz.contract import BYTES, E4M3, WIDE, Contract, is_optional
from tests.fuzz.scalars import is_flag, is_integer
from tests.fuzz.subjects import Arguments, Subject, Verify, against, anything, case_arguments, same_slots

_EXACT = Tolerance(1e-30, 1e-30, 1e-12)
_MOST_ROWS = (1 << 31) - 1
_LATENTS = {576: "latent", 512: "latent_512", 320: "latent_320", 1088: "latent_1088"}
KEY_COLUMNS = {"fp8_584": 512, "latent_512": 512, "latent_320": 320, "latent_1088": 1088}  # of a key; of other formats 576


def cache_of(c: Contract) -> tuple[Tensor | None, str]:
    """Return the cache, and the name of its format."""
    cache = c.tensor("k_cache", *WIDE, *BYTES)
    if cache is None or not c.require(cache.dim() == 4 and cache.shape[2] == 1, "k_cache"):
        return None, ""
    kinds = {656: "fp8_656", 584: "fp8_584"} if cache.dtype in BYTES else _LATENTS
    known = kinds.get(cache.shape[3])
    kind = "fp8_576" if cache.shape[3] == 576 and cache.dtype == E4M3 else known
    if not c.require(kind is not None and c.get("kv_format") in (None, kind) and cache.shape[0] > 0 and cache.shape[1] > 0, "k_cache"):
        return None, ""
    c.last_contiguous("k_cache", cache)
    c.aligned("k_cache", cache, 0, *(() if kind == "fp8_584" else (1,)))
    if kind == "fp8_584":
        c.require(cache.shape[1] == 1 or cache.stride(1) == 584, "k_cache")
    c.require(cache.shape[0] * cache.shape[1] < 1 << 31 and cache.device.type == "cpu", "k_cache", "kv_c", "block_table")
    return cache, str(kind)


def scale_faults(c: Contract, kind: str) -> None:
    scale = c.tensor("descale_k", torch.float32, optional=True)
    c.require(c.get("descale_k") is None or (kind == "fp8_576" and scale is not None and scale.numel() == 1), "descale_k", "k_cache")
    c.require(scale is None or scale.device.type == "cpu", "descale_k")


def key_faults(c: Contract, cache: Tensor, kind: str, slots: Tensor) -> Tensor | None:
    """Check kv_c, k_pe and the device of the slots; return kv_c."""
    kv_c = c.tensor("kv_c", *((cache.dtype,) if kind.startswith("latent") else WIDE))
    k_pe = c.tensor("k_pe", *(WIDE if kv_c is None else (kv_c.dtype,)), optional=kind == "latent_512")
    latent = {"fp8_584": 448, "latent_320": 256, "latent_1088": 1024}.get(kind, 512)
    for name, tensor, width in (("kv_c", kv_c, latent), ("k_pe", k_pe, 64)):
        if name == "k_pe" and kind == "latent_512":
            c.require(c.get("k_pe") is None, "k_pe", "k_cache")
            continue
        c.shaped(name, tensor, len(slots), width, beside="slot_mapping")
        c.last_contiguous(name, tensor)
        if tensor is None:
            c.faults |= {"kv_c", "k_pe", "k_cache"}
    for name in ("kv_c", "k_pe", "slot_mapping"):
        value = c.get(name)
        c.require(not isinstance(value, Tensor) or value.device.type == "cpu", name)
    return kv_c


def _write_faults(arguments: Arguments, setting: Setting) -> set[str]:
    c = Contract(arguments)
    c.numbers(power_of_two=is_flag)
    if c.faults:
        return c.faults
    cache, kind = cache_of(c)
    slots = c.tensor("slot_mapping", torch.int64, torch.int32)
    if cache is None or slots is None or not c.require(slots.dim() == 1 and len(slots) < 1 << 31, "slot_mapping"):
        return c.faults
    key_faults(c, cache, kind, slots)
    scale_faults(c, kind)
    c.require(not c.get("power_of_two") or kind in ("fp8_656", "fp8_584"), "power_of_two")
    if not c.faults:
        c.output("k_cache", tuple(cache.shape), (cache.dtype,))
        c.apart(("k_cache",))
    return c.faults


def expect_written(op: str, cache_name: str, *more: str) -> Callable[[Arguments, Setting], Verify]:
    """Expect in a cache, and in other arguments, the bytes that the reference writes to copies of them, with the memory around."""

    def expect(arguments: Arguments, setting: Setting) -> Verify:
        cache, slots = arguments[cache_name], arguments["slot_mapping"]
        named = slots[(slots >= 0) & (slots < cache.shape[0] * cache.shape[1])]
        if len(named.unique()) != len(named):
            return same_slots
        copies = {name: _copied(arguments[name]) for name in (cache_name, *more) if arguments[name] is not None}
        OPERATIONS[op].expected({**arguments, **copies})

        def verify(result: None) -> str:
            wrong = [name for name, copy in copies.items() if not torch.equal(_storage_bytes(arguments[name]), _storage_bytes(copy))]
            return f"other bytes in {', '.join(wrong)}" if wrong else ""

        return verify

    return expect


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy with the memory around it."""
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage().clone(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _storage_bytes(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _gather_faults(arguments: Arguments, setting: Setting) -> set[str]:
    c = Contract(arguments)
    c.numbers(
        rows=lambda value: is_integer(value) and 0 <= value <= _MOST_ROWS,
        dtype=is_optional(lambda value: isinstance(value, torch.dtype)),
    )
    cache, kind = cache_of(c)
    table = c.tensor("block_table", torch.int32)
    if cache is None or table is None or not c.require(table.dim() == 2, "block_table"):
        return c.faults
    c.last_contiguous("block_table", table)
    c.counts("cu_seqlens", (len(table) + 1,))
    c.counts("starts", (len(table),), optional=True)
    if {"cu_seqlens", "starts"} & c.faults:
        c.faults.add("block_table")
    for name in ("block_table", "cu_seqlens", "starts"):
        value = c.get(name)
        c.require(not isinstance(value, Tensor) or value.device.type == "cpu", name)
    scale_faults(c, kind)
    if c.faults:
        return c.faults
    allowed = (cache.dtype,) if kind.startswith("latent") else WIDE
    dtype, out = arguments["dtype"], arguments["out"]
    c.require(dtype is None or dtype in allowed, "dtype")
    if out is not None:
        wanted = allowed if dtype is None else (dtype,)
        c.output("out", (arguments["rows"], KEY_COLUMNS.get(kind, 576)), wanted, last=True)
        if "out" in c.faults:
            c.faults |= {"dtype", "rows"}
        c.require(not isinstance(out, Tensor) or out.device.type == "cpu", "out")
        c.apart(("out",))
    c.require(arguments["rows"] < 1 << 20 or out is not None, "rows")
    return c.faults


def _expect_gathered(arguments: Arguments, setting: Setting) -> Verify:
    ends = arguments["cu_seqlens"]
    if (ends.diff() < 0).any() or int(ends[0]) != 0:
        return anything
    (expected,) = OPERATIONS["cache_gather"].expected(arguments)
    rows = min(int(ends[-1]), len(expected))
    return lambda result: against((expected[:rows],), {"out": _EXACT})((result[:rows],))


CACHE_SUBJECTS: dict[str, Subject] = {
    "write_kv_cache": Subject(
        write_kv_cache,
        case_arguments,
        _write_faults,
        expect_written("cache_write", "k_cache"),
        ("kv_format",),
    ),
    "gather_kv_cache": Subject(
        gather_kv_cache,
        case_arguments,
        _gather_faults,
        _expect_gathered,
        ("kv_format",),
    ),
}
