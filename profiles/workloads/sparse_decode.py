"""Workload of sparse decode: flash_mla_with_kvcache with indices into a paged cache, quantised or not."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ... import reference
from ...api import flash_mla_with_kvcache, get_mla_metadata, workspace_size
from ...cache import dequantise_cache, quantise_cache
from ...spec.mla import D_V, ceil_div
from ...testing.compare import LSE, SPARSE_DECODE_OUT
from ..shapes import SparseDecodeShape
from .operands import first_tokens, generator, page_order, selections, values
from .workload import DTYPES, Results, Workload, spread_samples

_PAGES_AT_A_TIME = 4096  # pages quantised at a time


@dataclass(frozen=True)
class Operands:
    """Tensors of one flash_mla_with_kvcache call with indices."""

    q: torch.Tensor
    caches: tuple[torch.Tensor, ...]  # the first one, and the second one if there is one
    indices: tuple[torch.Tensor, ...]
    out: torch.Tensor
    lse: torch.Tensor


class SparseDecode(Workload[Operands]):
    """Decodes with selected keys of one cache or two. Requests have separate contexts, on pages in random order."""

    def prepare(self) -> None:
        """Set the tolerances; make plan and workspace."""
        self.tolerances = {"out": SPARSE_DECODE_OUT, "lse": LSE}
        assert isinstance(self.case.shape, SparseDecodeShape)
        self.shape = shape = self.case.shape
        self.counted = torch.empty(shape.batch, dtype=torch.int32, device=self.device)  # the plan uses only its length
        self.cu_seqlens_q = first_tokens(shape.tokens, self.device)
        self.total_q = sum(shape.tokens) if shape.tokens else None
        self.metadata, self.num_splits = self.plan()
        nbytes = workspace_size("sparse_decode", batch=shape.batch, s_q=shape.s_q, h_q=shape.h_q, total_q=self.total_q, device=self.device)
        self.workspace = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=self.device)

    @property
    def has_plan(self) -> bool:
        """True."""
        return True

    @property
    def selected(self) -> tuple[tuple[str, int], ...]:
        """Format of each cache, and how many of its keys a token selects."""
        shape = self.shape
        return ((shape.cache, shape.topk), *(() if shape.extra is None else ((shape.extra, shape.extra_topk),)))

    @property
    def is_fp8(self) -> bool:
        """True if the cache is quantised."""
        return bool(self.shape.format.quantised)

    def plan(self) -> Any:
        """Make a new plan on the device."""
        shape = self.shape
        topk = sum(topk for _, topk in self.selected)
        rows, offsets = shape.s_q * shape.h_q, self.cu_seqlens_q
        return get_mla_metadata(self.counted, rows, 1, shape.h_q, self.is_fp8, topk, cu_seqlens_q=offsets, total_q=self.total_q)

    def make_operands(self, seed: int) -> Operands:
        """Allocate one operand set."""
        shape, dtype, device = self.shape, DTYPES[self.case.dtype], self.device
        draw = generator(device, seed)
        each = ceil_div(shape.context, shape.page_size)
        pages = page_order(device, shape.batch * each, seed).view(shape.batch, each)
        tokens = (shape.batch, shape.s_q) if self.total_q is None else (self.total_q,)
        pages_of = pages.repeat_interleave(torch.tensor(shape.query_tokens, device=device), 0)  # of each query token
        slots = []
        for _, topk in self.selected:
            chosen = selections(draw, len(pages_of), topk, shape.context)
            page, row = chosen // shape.page_size, chosen % shape.page_size
            slots.append((pages_of.gather(1, page.long()) * shape.page_size + row).view(*tokens, topk))
        return Operands(
            q=values(draw, dtype, *tokens, shape.h_q, shape.format.d_qk),
            caches=tuple(self._cache(draw, dtype, shape.batch * each, name) for name, _ in self.selected),
            indices=tuple(slots),
            out=torch.full((*tokens, shape.h_q, D_V), math.nan, dtype=dtype, device=device),
            lse=torch.full((tokens[0], shape.h_q, *tokens[1:]), math.nan, dtype=torch.float32, device=device),
        )

    def _cache(self, draw: torch.Generator, dtype: torch.dtype, pages: int, name: str) -> torch.Tensor:
        """Allocate a cache of the format of this name.

        Quantising takes several times the memory of its result, so a few pages are quantised at a time.
        """
        shape = self.shape
        size = (shape.page_size, 1, shape.format.d_qk)
        if not self.is_fp8:
            return values(draw, dtype, pages, *size)
        parts = [
            quantise_cache(values(draw, dtype, min(_PAGES_AT_A_TIME, pages - first), *size), name)
            for first in range(0, pages, _PAGES_AT_A_TIME)
        ]
        return torch.cat(parts)

    def call(self, operands: Operands) -> None:
        """Call sparse decode, with combine if requests may be split."""
        flash_mla_with_kvcache(
            operands.q,
            operands.caches[0],
            None,
            None,
            D_V,
            self.metadata,
            self.num_splits,
            is_fp8_kvcache=self.is_fp8,
            indices=operands.indices[0],
            extra_k_cache=operands.caches[1] if self.shape.extra else None,
            extra_indices_in_kvcache=operands.indices[1] if self.shape.extra else None,
            kv_format=self.shape.cache,
            extra_kv_format=self.shape.extra,
            out=operands.out,
            lse=operands.lse,
            workspace=self.workspace,
            cu_seqlens_q=self.cu_seqlens_q,
            max_seqlen_q=None if self.cu_seqlens_q is None else self.shape.s_q,
        )

    def _place(self, sample: int) -> tuple[int, ...]:
        """Return where a query token lies in q and in the indices."""
        return (sample,) if self.shape.tokens else divmod(sample, self.shape.s_q)

    def results(self, operands: Operands) -> Results:
        """Return out and lse."""
        return {"out": operands.out, "lse": operands.lse}

    def samples(self) -> tuple[int, ...]:
        """Return the query tokens to check, numbered over the batch."""
        return spread_samples(sum(self.shape.query_tokens))

    def part(self, results: Results, sample: int) -> Results:
        """Return out [h_q, 512] and lse [h_q] of a token."""
        if self.shape.tokens:
            return {name: tensor[sample] for name, tensor in results.items()}
        request, token = divmod(sample, self.shape.s_q)
        return {name: tensor[request, token] if name == "out" else tensor[request, :, token] for name, tensor in results.items()}

    def expected(self, operands: Operands, sample: int) -> Results:
        """Return a token's results. Only the pages that hold its keys are dequantised."""
        keys = []
        for (name, _), cache, selected in zip(self.selected, operands.caches, operands.indices, strict=True):
            indices = selected[self._place(sample)].long()
            pages, place = torch.unique(indices // self.shape.page_size, return_inverse=True)
            rows = dequantise_cache(cache[pages], name).flatten(0, 2)
            keys.append(rows[place * self.shape.page_size + indices % self.shape.page_size])
        out, _, lse = reference.attend_to_all(operands.q[self._place(sample)], torch.cat(keys), self.shape.format.d_qk**-0.5, None)
        return {"out": out, "lse": lse}
