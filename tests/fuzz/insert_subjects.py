"""Keys and queries that are normalised, rotated and written: to caches, and to the index cache of an indexer."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_mla.cache import insert_kv_cache
from cute_mla.indexer import prepare_index_queries, write_index_cache
from cute_mla.testing.operations import OPERATIONS
from tests.fuzz.cache_subjects import KEY_COLUMNS, cache_of, expect_written, key_faults, scale_faults
from tests.fuzz.calls import Setting
from tests.fuzz.contract import E4M3, WIDE, Contract, is_plain
from tests.fuzz.scalars import is_eps, is_flag, is_one_of
from tests.fuzz.subjects import Arguments, Subject, Verify, case_arguments

_MOST_SLOTS = 1 << 31
_ROTARY, _COLUMNS, _KEY_BYTES = 64, 128, 132
_PAGE_SIZES = (16, 32, 64, 128)
_MOST_INDEX_HEADS, _MOST_HEADS = 64, 128
_IS_ROPE = is_one_of("half_split", "interleaved")


def _angles(c: Contract, tokens: int, beside: str) -> None:
    """Check cos_sin and positions."""
    table = c.tensor("cos_sin", torch.float32)
    if table is not None and c.shaped("cos_sin", table, None, _ROTARY, beside="cos_sin"):
        c.last_contiguous("cos_sin", table)
        c.aligned("cos_sin", table, 0, positive=False)
        c.require(table.shape[0] < 1 << 31 and table.device.type == "cpu", "cos_sin")
    positions = c.tensor("positions", torch.int64, torch.int32, optional=True)
    c.require(positions is None or positions.device.type == "cpu", "positions")
    if positions is not None:
        c.shaped("positions", positions, tokens, beside=beside)


def _insert_faults(arguments: Arguments, setting: Setting) -> set[str]:
    c = Contract(arguments)
    c.numbers(power_of_two=is_flag, eps=is_eps)
    if c.faults:
        return c.faults
    cache, kind = cache_of(c)
    slots = c.tensor("slot_mapping", torch.int64, torch.int32)
    if cache is None or slots is None or not c.require(slots.dim() == 1 and len(slots) < _MOST_SLOTS, "slot_mapping"):
        return c.faults
    kv_c = key_faults(c, cache, kind, slots)
    dtypes = WIDE if kv_c is None else (kv_c.dtype,)
    weight = c.tensor("norm_weight", *dtypes)
    c.shaped("norm_weight", weight, {"latent_320": 256, "latent_1088": 1024}.get(kind, 512), beside="k_cache")
    c.require(weight is None or (weight.is_contiguous() and weight.device.type == "cpu"), "norm_weight")
    if kind == "latent_512":
        for name in ("cos_sin", "positions", "q_pe"):
            c.require(c.get(name) is None, name, "k_cache")
    else:
        _angles(c, len(slots), "slot_mapping")
        q_pe = c.tensor("q_pe", *dtypes, optional=True)
        if q_pe is not None and c.shaped("q_pe", q_pe, len(slots), None, _ROTARY, beside="slot_mapping"):
            c.require(1 <= q_pe.shape[1] <= _MOST_HEADS and len(slots) * q_pe.shape[1] <= 1 << 30 and q_pe.device.type == "cpu", "q_pe")
            c.output("q_pe", tuple(q_pe.shape), dtypes, last=True)
    c.output("keys", (len(slots), KEY_COLUMNS.get(kind, 576)), dtypes, last=True)
    c.require(c.get("keys") is None or not is_plain(arguments["keys"]) or arguments["keys"].device.type == "cpu", "keys")
    if {"q_pe", "keys", "norm_weight"} & c.faults:
        c.faults |= {"kv_c", "k_cache", "slot_mapping"}
    scale_faults(c, kind)
    c.require(not c.get("power_of_two") or kind in ("fp8_656", "fp8_584"), "power_of_two")
    if not c.faults:
        c.output("k_cache", tuple(cache.shape), (cache.dtype,))
        c.apart(("k_cache", "q_pe", "keys"))
    return c.faults


def _index_keys_faults(arguments: Arguments, setting: Setting) -> set[str]:
    c = Contract(arguments)
    c.numbers(hadamard=is_flag, eps=is_eps, rope=_IS_ROPE, scale_format=is_one_of("fp32", "ue8m0"))
    k = c.tensor("k", torch.bfloat16)
    if k is None or not c.require(k.dim() == 2 and k.shape[1] == _COLUMNS and k.device.type == "cpu", "k"):
        return c.faults
    c.last_contiguous("k", k)
    slots = c.tensor("slot_mapping", torch.int64, torch.int32)
    c.shaped("slot_mapping", slots, len(k), beside="k")
    c.require(slots is None or slots.device.type == "cpu", "slot_mapping")
    _angles(c, len(k), "k")
    for name in ("norm_weight", "norm_bias"):
        tensor = c.tensor(name, torch.float32)
        c.shaped(name, tensor, _COLUMNS, beside=name)
        c.require(tensor is None or (tensor.is_contiguous() and tensor.device.type == "cpu"), name)
        c.aligned(name, tensor)
    cache = c.tensor("index_cache", torch.uint8)
    if cache is not None and c.shaped("index_cache", cache, None, None, 1, _KEY_BYTES, beside="index_cache"):
        right = cache.shape[1] in _PAGE_SIZES and 0 < len(cache) < 1 << 30 and cache.stride(1) == _KEY_BYTES and cache.stride(3) == 1
        right = right and len(cache) * cache.shape[1] < _MOST_SLOTS and cache.device.type == "cpu"
        c.require(right and (len(cache) == 1 or cache.stride(0) >= cache.shape[1] * _KEY_BYTES), "index_cache")
        c.aligned("index_cache", cache, 0)
        if not c.faults:
            c.apart(("index_cache",))
    return c.faults


def _index_queries_faults(arguments: Arguments, setting: Setting) -> set[str]:
    c = Contract(arguments)
    c.numbers(hadamard=is_flag, rope=_IS_ROPE)
    q = c.tensor("q", torch.bfloat16)
    if q is None or not c.require(q.dim() == 3 and q.shape[2] == _COLUMNS and 1 <= q.shape[1] <= _MOST_INDEX_HEADS, "q"):
        return c.faults
    c.last_contiguous("q", q)
    c.require(len(q) * q.shape[1] <= 1 << 30, "q")
    _angles(c, len(q), "q")
    c.same_device(q, "weights", "out", "out_weights")
    weights = c.tensor("weights", torch.float32, torch.bfloat16)
    c.shaped("weights", weights, *q.shape[:2])
    c.last_contiguous("weights", weights)
    c.output("out", tuple(q.shape), (E4M3,), last=True)
    c.output("out_weights", tuple(q.shape[:2]), (torch.float32,), last=True)
    if "out" not in c.faults and c.get("out") is not None:
        c.aligned("out", arguments["out"], 0, 1)
    if not c.faults:
        c.apart(("out", "out_weights"))
    return c.faults


def _expect_index_queries(arguments: Arguments, setting: Setting) -> Verify:
    codes, weights = OPERATIONS["index_write"].expected(arguments)

    def verify(result: tuple[Tensor, Tensor]) -> str:
        same = torch.equal(result[0].view(torch.uint8), codes.view(torch.uint8))
        return "" if same and torch.equal(result[1].nan_to_num(7.0), weights.nan_to_num(7.0)) else "other queries or weights"

    return verify


INSERT_SUBJECTS: dict[str, Subject] = {
    "insert_kv_cache": Subject(
        insert_kv_cache, case_arguments, _insert_faults, expect_written("cache_insert", "k_cache", "q_pe", "keys"), ("kv_format",)
    ),
    "write_index_cache": Subject(write_index_cache, case_arguments, _index_keys_faults, expect_written("index_write", "index_cache")),
    "prepare_index_queries": Subject(prepare_index_queries, case_arguments, _index_queries_faults, _expect_index_queries),
}
