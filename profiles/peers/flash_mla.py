"""FlashMLA, of which the package sgl-flash-mla keeps the kernels for Hopper and dense decode: `use_legacy`.

Its sparse kernels take 64 or 128 heads. Fewer are padded with rows of zeros, outside the timing, as engines do.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any

import torch

from ...spec.cache_format import FP8_656
from ...spec.dense_decode import FP8, FP8_CACHE
from ...spec.mla import D_V
from ..rows import Case
from ..shapes import DecodeShape, SparseDecodeShape, SparsePrefillShape
from ..subjects.dense_decode import DenseDecode
from ..subjects.sparse_decode import SparseDecode
from ..subjects.sparse_prefill import SparsePrefill
from ..subjects.subject import Results, Subject
from .peer import Run

_PAGE_SIZE = 64
_HEADS = (64, 128)
_DECODE_TOPK, _PREFILL_TOPK = 64, 128  # topk is a multiple of them


class FlashMla:
    """Dense decode of 16 bits and of e4m3, sparse decode of 656 bytes a token, sparse prefill."""

    name = "FlashMLA"
    ops = ("dense_decode", "sparse_decode", "sparse_prefill")

    def version(self) -> str:
        """Of the wheel."""
        importlib.import_module("flash_mla")
        return metadata.version("sgl-flash-mla")

    def refusal(self, case: Case) -> str:
        """Caches, pages and selections that it does not take."""
        shape = case.shape
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

    def runs(self, subject: Subject[Any]) -> list[Run]:
        """By the op of the subject."""
        library = importlib.import_module("flash_mla")
        if isinstance(subject, DenseDecode):
            return _dense_decode(library, subject)
        if isinstance(subject, SparseDecode):
            return _sparse_decode(library, subject)
        assert isinstance(subject, SparsePrefill)
        return _sparse_prefill(library, subject)


def _dense_decode(library: Any, subject: DenseDecode) -> list[Run]:
    """All sets share a plan, which the first run makes, or which is made here for e4m3."""
    shape, (plan, _) = subject.shape, library.get_mla_metadata()
    options: dict[str, Any] = {"causal": subject.causal, "use_legacy": True, "is_fp8_kvcache": shape.operands == FP8}
    if shape.operands == FP8:
        rows = shape.s_q * (shape.h_q // shape.h_kv)
        plan.tile_scheduler_metadata, plan.num_splits = library.get_mla_decoding_metadata(
            subject.cache_seqlens, rows, shape.h_kv, is_fp8_kvcache=True, use_legacy=True
        )

    def of(operands: Any) -> Run:
        descales = {"descale_q": operands.descales[0], "descale_k": operands.descales[1]}
        arguments = (operands.q, operands.k_cache, operands.block_table, subject.cache_seqlens, D_V, plan)
        return lambda: _named(library.flash_mla_with_kvcache(*arguments, **options, **descales))

    return [of(operands) for operands in subject.sets]


def _sparse_decode(library: Any, subject: SparseDecode) -> list[Run]:
    """All sets share a plan, which the first run makes. lse comes [b, h, s_q]."""
    plan, _ = library.get_mla_metadata()
    heads = subject.shape.h_q

    def of(operands: Any) -> Run:
        arguments = (padded_heads(operands.q, 2), operands.k_cache, None, None, D_V, plan)
        options = {"indices": operands.indices, "is_fp8_kvcache": True, "use_legacy": True}

        def run() -> Results:
            out, lse = library.flash_mla_with_kvcache(*arguments, **options)
            return {"out": out[:, :, :heads], "lse": lse[:, :heads]}

        return run

    return [of(operands) for operands in subject.sets]


def _sparse_prefill(library: Any, subject: SparsePrefill) -> list[Run]:
    """It has neither plan nor workspace."""
    heads = subject.shape.h_q

    def of(operands: Any) -> Run:
        arguments = (padded_heads(operands.q, 1), operands.kv, operands.indices, subject.scale)

        def run() -> Results:
            out, max_logits, lse = library.flash_mla_sparse_fwd(*arguments, use_legacy=True)
            return {"out": out[:, :heads], "max_logits": max_logits[:, :heads], "lse": lse[:, :heads]}

        return run

    return [of(operands) for operands in subject.sets]


def _named(results: tuple[torch.Tensor, torch.Tensor]) -> Results:
    out, lse = results
    return {"out": out, "lse": lse}


def padded_heads(q: torch.Tensor, dimension: int) -> torch.Tensor:
    """q with zeros for the heads that lack to the next number in _HEADS, or q itself if none does."""
    heads = q.shape[dimension]
    wanted = next(number for number in _HEADS if number >= heads)
    if wanted == heads:
        return q
    size = list(q.shape)
    size[dimension] = wanted - heads
    return torch.cat([q, q.new_zeros(size)], dim=dimension)
