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
from .operands import generator, page_order, selections, values
from .workload import DTYPES, Results, Workload, spread_samples

_PAGES_AT_A_TIME = 4096  # pages quantised at a time


@dataclass(frozen=True)
class Operands:
    """Tensors of one flash_mla_with_kvcache call with indices."""

    q: torch.Tensor
    k_cache: torch.Tensor
    indices: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


class SparseDecode(Workload[Operands]):
    """Decodes with topk selected keys a token. Requests have separate contexts, on pages in random order."""

    def prepare(self) -> None:
        """Set the tolerances; make plan and workspace."""
        self.tolerances = {"out": SPARSE_DECODE_OUT, "lse": LSE}
        assert isinstance(self.case.shape, SparseDecodeShape)
        self.shape = shape = self.case.shape
        self.counted = torch.empty(shape.batch, dtype=torch.int32, device=self.device)  # the plan uses only its length
        self.metadata, self.num_splits = self.plan()
        nbytes = workspace_size("sparse_decode", batch=shape.batch, s_q=shape.s_q, h_q=shape.h_q, device=self.device)
        self.workspace = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=self.device)

    @property
    def has_plan(self) -> bool:
        """True."""
        return True

    @property
    def is_fp8(self) -> bool:
        """True if the cache is quantised."""
        return bool(self.shape.format.quantised)

    def plan(self) -> Any:
        """Make a new plan on the device."""
        shape = self.shape
        return get_mla_metadata(self.counted, shape.s_q * shape.h_q, 1, shape.h_q, self.is_fp8, shape.topk)

    def make_operands(self, seed: int) -> Operands:
        """Allocate one operand set."""
        shape, dtype, device = self.shape, DTYPES[self.case.dtype], self.device
        draw = generator(device, seed)
        each = ceil_div(shape.context, shape.page_size)
        pages = page_order(device, shape.batch * each, seed).view(shape.batch, each)
        chosen = selections(draw, shape.batch * shape.s_q, shape.topk, shape.context).view(shape.batch, -1)
        page, row = chosen // shape.page_size, chosen % shape.page_size
        slots = pages.gather(1, page.long()) * shape.page_size + row
        return Operands(
            q=values(draw, dtype, shape.batch, shape.s_q, shape.h_q, shape.format.d_qk),
            k_cache=self._cache(draw, dtype, shape.batch * each),
            indices=slots.view(shape.batch, shape.s_q, shape.topk),
            out=torch.full((shape.batch, shape.s_q, shape.h_q, D_V), math.nan, dtype=dtype, device=device),
            lse=torch.full((shape.batch, shape.h_q, shape.s_q), math.nan, dtype=torch.float32, device=device),
        )

    def _cache(self, draw: torch.Generator, dtype: torch.dtype, pages: int) -> torch.Tensor:
        """Allocate a cache. Quantising takes several times the memory of its result, so a few pages are quantised at a time."""
        shape = self.shape
        size = (shape.page_size, 1, shape.format.d_qk)
        if not self.is_fp8:
            return values(draw, dtype, pages, *size)
        parts = [
            quantise_cache(values(draw, dtype, min(_PAGES_AT_A_TIME, pages - first), *size), shape.cache)
            for first in range(0, pages, _PAGES_AT_A_TIME)
        ]
        return torch.cat(parts)

    def call(self, operands: Operands) -> None:
        """Call sparse decode, with combine if requests may be split."""
        flash_mla_with_kvcache(
            operands.q,
            operands.k_cache,
            None,
            None,
            D_V,
            self.metadata,
            self.num_splits,
            is_fp8_kvcache=self.is_fp8,
            indices=operands.indices,
            out=operands.out,
            lse=operands.lse,
            workspace=self.workspace,
        )

    def results(self, operands: Operands) -> Results:
        """Return out and lse."""
        return {"out": operands.out, "lse": operands.lse}

    def samples(self) -> tuple[int, ...]:
        """Return the query tokens to check, numbered over the batch."""
        return spread_samples(self.shape.batch * self.shape.s_q)

    def part(self, results: Results, sample: int) -> Results:
        """Return out [h_q, 512] and lse [h_q] of a token."""
        request, token = divmod(sample, self.shape.s_q)
        return {name: tensor[request, token] if name == "out" else tensor[request, :, token] for name, tensor in results.items()}

    def expected(self, operands: Operands, sample: int) -> Results:
        """Return a token's results. Only the pages that hold its keys are dequantised."""
        request, token = divmod(sample, self.shape.s_q)
        indices = operands.indices[request, token].long()
        pages, place = torch.unique(indices // self.shape.page_size, return_inverse=True)
        rows = dequantise_cache(operands.k_cache[pages], self.shape.cache).flatten(0, 2)
        keys = rows[place * self.shape.page_size + indices % self.shape.page_size]
        out, _, lse = reference.attend_to_all(operands.q[request, token], keys, self.shape.format.d_qk**-0.5, None)
        return {"out": out, "lse": lse}
