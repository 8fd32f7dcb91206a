"""The indexer's functions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import cute_mla
from cute_mla.indexer import fp8_mqa_logits, fp8_paged_mqa_logits, indexer_topk, topk_indices
from cute_mla.spec.mqa_logits import MAX_KEYS
from cute_mla.testing.operations import OPERATIONS
from cute_mla.testing.operations.mqa_logits.record import expected_logits
from tests.fuzz.calls import Setting
from tests.fuzz.contract import E4M3, Contract, is_plain
from tests.fuzz.scalars import is_flag, is_integer
from tests.fuzz.subjects import Arguments, Subject, Verify, case_arguments

_MOST = 1 << 30  # numbers of a row, and positions
_MOST_ROWS = ((1 << 31) - 1) // 8
_MOST_ALLOCATED = 1 << 20


def _topk_faults(arguments: Arguments, setting: Setting) -> set[str]:
    c = Contract(arguments)
    c.numbers(topk=lambda value: is_integer(value) and 0 <= value <= _MOST)
    logits = c.tensor("logits", torch.float32)
    if logits is None or not c.require(logits.dim() == 2, "logits"):
        return c.faults
    c.last_contiguous("logits", logits)
    c.require(logits.shape[0] <= _MOST_ROWS and logits.shape[1] <= _MOST and logits.device.type == "cpu", "logits")
    c.counts("lengths", (len(logits),))
    if "lengths" in c.faults:
        c.faults.add("logits")
    c.same_device(logits, "lengths", "out")
    if "topk" in c.faults:
        return c.faults
    c.output("out", (len(logits), arguments["topk"]), (torch.int32,), last=True)
    if "out" in c.faults:
        c.faults |= {"topk", "logits"}
    if not c.faults:
        c.apart(("out",))
    c.require(len(logits) * arguments["topk"] < _MOST_ALLOCATED or c.get("out") is not None, "topk")
    return c.faults


def _expect_chosen(op: str) -> Callable[[Arguments, Setting], Verify]:
    def expect(arguments: Arguments, setting: Setting) -> Verify:
        (expected,) = OPERATIONS[op].expected(arguments)
        return lambda result: "" if torch.equal(result, expected) else f"{int((result != expected).sum())} other keys"

    return expect


_MOST_HEADS, _COLUMNS, _KEY_BYTES = 64, 128, 132
_PAGE_SIZES = (16, 32, 64, 128)
_MOST_TOKENS = 1 << 24
_ROUNDING = 2.0**-9  # of the sum of all magnitudes: the tensor cores keep 13 bits or more of each sum of 32 products
_WORKSPACE_BYTES = 64 << 20


def _is_count(value: Any) -> bool:
    return is_integer(value) and 0 <= value <= MAX_KEYS


def _queries(c: Contract, dims: int) -> Tensor | None:
    """Check q and weights."""
    q = c.tensor("q", E4M3)
    if q is None or not c.require(q.dim() == dims and q.shape[-1] == _COLUMNS and 1 <= q.shape[-2] <= _MOST_HEADS, "q"):
        return None
    c.last_contiguous("q", q)
    c.aligned("q", q, *(range(dims - 1) if q.numel() else ()))  # of no tokens, strides lead nowhere
    if dims == 4 and q.shape[0] > 1 and q.shape[1] > 1:
        c.require(q.stride(0) == q.shape[1] * q.stride(1), "q")
    tokens = math.prod(q.shape[:-2])
    c.require(tokens <= _MOST_TOKENS, "q")
    weights = c.tensor("weights", torch.float32)
    c.shaped("weights", weights, tokens, q.shape[-2])
    c.last_contiguous("weights", weights)
    return q


def _logits_result(c: Contract, q: Tensor, tokens: int, columns: int) -> None:
    c.output("out", (tokens, columns), (torch.float32,), last=True)
    if "out" in c.faults:
        c.faults |= {"q", "kv", "max_seqlen_k", "max_context_len"} & set(c.arguments)
    if not c.faults:
        c.apart(("out",))
    c.require(tokens * columns < _MOST_ALLOCATED or c.get("out") is not None, "max_context_len", "max_seqlen_k")


def _row_logits_faults(arguments: Arguments, setting: Setting) -> set[str]:
    c = Contract(arguments)
    c.numbers(clean_logits=is_flag, max_seqlen_k=_is_count)
    kv = arguments["kv"]
    if not c.require(isinstance(kv, tuple | list) and len(kv) == 2 and all(is_plain(part) for part in kv), "kv"):
        return c.faults
    q = _queries(c, 3)
    if q is None:
        return c.faults
    for name in ("ks", "ke"):
        c.counts(name, (len(q),))
    if c.faults:
        return c.faults
    c.require(not (c.get("max_seqlen_k") and c.get("clean_logits")), "clean_logits", "max_seqlen_k")
    c.same_device(q, "weights", "ks", "ke", "out")
    if not c.faults:
        _logits_result(c, q, len(q), c.get("max_seqlen_k") or len(kv[0]))
    return c.faults


def _pages(c: Contract, q: Tensor, name: str) -> None:
    """Check an index cache, its lengths and its table."""
    cache = c.tensor(name, torch.uint8)
    if cache is not None:
        fits = (
            cache.dim() == 4 and cache.shape[1] in _PAGE_SIZES and tuple(cache.shape[2:]) == (1, _KEY_BYTES) and 0 < len(cache) < MAX_KEYS
        )
        if c.require(fits, name):
            packed = cache.stride(1) == _KEY_BYTES and cache.stride(3) == 1
            apart = len(cache) == 1 or cache.stride(0) >= cache.shape[1] * _KEY_BYTES
            c.require(packed and apart, name)
            c.aligned(name, cache, 0)
    table = c.tensor("block_table", torch.int32)
    c.shaped("block_table", table, len(q), None)
    c.last_contiguous("block_table", table)
    lens = c.get("context_lens")
    c.counts("context_lens", tuple(q.shape[:2]) if is_plain(lens) and lens.dim() == 2 else (len(q),))
    c.same_device(q, name, "weights", "block_table", "context_lens", "out", "workspace")


def _paged_logits_faults(arguments: Arguments, setting: Setting) -> set[str]:
    c = Contract(arguments)
    c.numbers(clean_logits=is_flag, max_context_len=_is_count)
    c.tensor("metadata", optional=True)
    q = _queries(c, 4)
    if q is None:
        return c.faults
    _pages(c, q, "cache")
    if not c.faults:
        _logits_result(c, q, q.shape[0] * q.shape[1], arguments["max_context_len"])
    return c.faults


def _indexer_topk_faults(arguments: Arguments, setting: Setting) -> set[str]:
    c = Contract(arguments)
    c.numbers(slots=is_flag, topk=lambda value: is_integer(value) and 0 <= value <= _MOST)
    q = _queries(c, 4)
    if q is None:
        return c.faults
    _pages(c, q, "index_cache")
    if c.faults:
        return c.faults
    columns = arguments["block_table"].shape[1] * arguments["index_cache"].shape[1]
    topk, tokens = arguments["topk"], q.shape[0] * q.shape[1]
    if not c.require(columns <= max(topk, _WORKSPACE_BYTES // 4), "block_table", "index_cache", "topk"):
        return c.faults
    c.output("out", (tokens, topk), (torch.int32,), last=True)
    if "out" in c.faults:
        c.faults |= {"topk", "q"}
    workspace = c.tensor("workspace", optional=True)
    if workspace is not None:
        needed = cute_mla.workspace_size(
            "indexer_topk", batch=len(q), s_q=q.shape[1], h_q=q.shape[2], max_cache_seqlen=columns, topk=topk, device="cpu"
        )
        c.require(workspace.is_contiguous() and workspace.nbytes >= needed, "workspace")
        c.require(workspace.device.type == "meta" or workspace.data_ptr() % 16 == 0, "workspace")
    if not c.faults:
        c.apart(("out", "workspace"))
    c.require(tokens * topk < _MOST_ALLOCATED or c.get("out") is not None, "topk")
    return c.faults


def _magnitudes(given: Arguments) -> Tensor:
    """Return the logits of the magnitudes of all operands: what the errors of sums are measured by."""
    changed = {**given, "q": given["q"].float().abs(), "weights": given["weights"].abs()}
    if "kv" in given:
        changed["kv"] = tuple(part.float().abs() for part in given["kv"])
    else:
        cache = given["cache"].clone()
        signs = torch.zeros(cache.shape[1] * _KEY_BYTES, dtype=torch.bool)
        signs[: cache.shape[1] * _COLUMNS] = True
        signs[cache.shape[1] * _COLUMNS + 3 :: 4] = True
        flat = cache.flatten(1)
        flat[:, signs] &= 0x7F
        changed["cache"] = flat.view(cache.shape)
    return expected_logits(**changed)


def _expect_logits(arguments: Arguments, setting: Setting) -> Verify:
    expected, limit = expected_logits(**arguments), _ROUNDING * _magnitudes(arguments).abs()

    def verify(result: Tensor) -> str:
        if result.shape != expected.shape:
            return f"shape {list(result.shape)}"
        close = (result - expected).abs() <= limit.nan_to_num(nan=math.inf)
        wrong = ~((result == expected) | close | expected.isnan())
        if arguments["clean_logits"]:
            wrong |= (result == -math.inf) != (expected == -math.inf)
        return f"{int(wrong.sum())} wrong logits" if wrong.any() else ""

    return verify


INDEXER_SUBJECTS: dict[str, Subject] = {
    "topk_indices": Subject(topk_indices, case_arguments, _topk_faults, _expect_chosen("topk_indices")),
    "fp8_mqa_logits": Subject(fp8_mqa_logits, case_arguments, _row_logits_faults, _expect_logits, ("kv",)),
    "fp8_paged_mqa_logits": Subject(fp8_paged_mqa_logits, case_arguments, _paged_logits_faults, _expect_logits),
    "indexer_topk": Subject(indexer_topk, case_arguments, _indexer_topk_faults, _expect_chosen("indexer_topk")),
}
