"""FlashMLA, in the package sgl-flash-mla, whose option `use_legacy` selects the kernels for Hopper and dense decode.

Its sparse kernels take 64 or 128 heads. Fewer heads are padded with zeros, outside the timing, as engines do.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any

import torch

from cute_mla.spec.cache_format import FP8_656
from cute_mla.spec.dense_decode import FP8, FP8_CACHE
from cute_mla.spec.mla import D_V

from ..rows import Case
from ..shapes import DecodeShape, SparseDecodeShape, SparsePrefillShape
from ..workloads.workload import Results, Workload
from .baseline import Run

_PAGE_SIZE = 64
_HEADS = (64, 128)
_DECODE_TOPK, _PREFILL_TOPK = 64, 128  # topk must be a multiple


class FlashMla:
    """Dense decode with 16-bit or e4m3 operands, sparse decode over a 656-byte cache, and sparse prefill."""

    name = "FlashMLA"
    ops = ("dense_decode", "sparse_decode", "sparse_prefill")

    def version(self) -> str:
        """Return the version of the wheel sgl-flash-mla. ImportError without it."""
        importlib.import_module("flash_mla")
        return metadata.version("sgl-flash-mla")

    def unsupported_reason(self, case: Case) -> str:
        """Return the reason for unsupported caches, page sizes and topk, else ""."""
        shape = case.shape
        if isinstance(shape, DecodeShape | SparseDecodeShape) and shape.tokens:
            return "its requests have equally many query tokens"
        if isinstance(shape, DecodeShape) and shape.operands == FP8_CACHE:
            return "it takes an e4m3 cache with e4m3 queries only"
        if isinstance(shape, DecodeShape) and shape.page_size != _PAGE_SIZE:
            return f"its pages have {_PAGE_SIZE} keys"
        if isinstance(shape, SparseDecodeShape) and shape.cache != FP8_656.name:
            return f"of the caches, {FP8_656.name} alone is measured"
        if isinstance(shape, SparseDecodeShape) and shape.topk % _DECODE_TOPK:
            return f"topk is a multiple of {_DECODE_TOPK}"
        if isinstance(shape, SparsePrefillShape) and shape.topk % _PREFILL_TOPK:
            return f"topk is a multiple of {_PREFILL_TOPK}"
        return ""

    def runs(self, workload: Workload) -> list[Run]:
        """Return a run for each operand set, by the op of the workload."""
        library = importlib.import_module("flash_mla")
        make = {"dense_decode": _dense_decode, "sparse_decode": _sparse_decode, "sparse_prefill": _sparse_prefill}
        return make[workload.case.op](library, workload)


def _dense_decode(library: Any, workload: Workload) -> list[Run]:
    """Return runs that share a plan: made by the first run, or here for e4m3."""
    shape, (plan, _) = workload.call_case, library.get_mla_metadata()
    options: dict[str, Any] = {"causal": shape.causal, "use_legacy": True, "is_fp8_kvcache": shape.operands == FP8}
    if shape.operands == FP8:
        rows = shape.s_q * (shape.h_q // shape.h_kv)
        plan.tile_scheduler_metadata, plan.num_splits = library.get_mla_decoding_metadata(
            workload.sets[0].cache_seqlens, rows, shape.h_kv, is_fp8_kvcache=True, use_legacy=True
        )

    def of(operands: Any) -> Run:
        descales = {"descale_q": operands.descale_q, "descale_k": operands.descale_k}
        arguments = (operands.q, operands.k_cache, operands.block_table, operands.cache_seqlens, D_V, plan)
        return lambda: _named(library.flash_mla_with_kvcache(*arguments, **options, **descales))

    return [of(operands) for operands in workload.sets]


def _sparse_decode(library: Any, workload: Workload) -> list[Run]:
    """Return runs that share a plan, made by the first run. lse is [b, h, s_q]."""
    plan, _ = library.get_mla_metadata()
    heads = workload.call_case.h_q

    def of(operands: Any) -> Run:
        arguments = (padded_heads(operands.q, 2), operands.k_cache, None, None, D_V, plan)
        options = {"indices": operands.indices, "is_fp8_kvcache": True, "use_legacy": True}

        def run() -> Results:
            out, lse = library.flash_mla_with_kvcache(*arguments, **options)
            return {"out": out[:, :, :heads], "lse": lse[:, :heads]}

        return run

    return [of(operands) for operands in workload.sets]


def _sparse_prefill(library: Any, workload: Workload) -> list[Run]:
    """Return runs; sparse prefill has neither plan nor workspace."""
    heads = workload.call_case.h_q

    def of(operands: Any) -> Run:
        arguments = (padded_heads(operands.q, 1), operands.kv, operands.indices, workload.call_case.scale)

        def run() -> Results:
            out, max_logits, lse = library.flash_mla_sparse_fwd(*arguments, use_legacy=True)
            return {"out": out[:, :heads], "max_logits": max_logits[:, :heads], "lse": lse[:, :heads]}

        return run

    return [of(operands) for operands in workload.sets]


def _named(results: tuple[torch.Tensor, torch.Tensor]) -> Results:
    out, lse = results
    return {"out": out, "lse": lse}


def padded_heads(q: torch.Tensor, dimension: int) -> torch.Tensor:
    """Return q, padded with zeros along `dimension` to the next head count in _HEADS."""
    heads = q.shape[dimension]
    padded = next(number for number in _HEADS if number >= heads)
    if padded == heads:
        return q
    size = list(q.shape)
    size[dimension] = padded - heads
    return torch.cat([q, q.new_zeros(size)], dim=dimension)
