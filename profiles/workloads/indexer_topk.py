"""Workload of indexer_topk and indexer_topk_prefill: logits of e4m3 keys and a selection of keys, in one call."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ... import reference
from ...api import workspace_size
from ...indexer import indexer_topk, indexer_topk_prefill
from ...spec.mla import ceil_div
from ...spec.mqa_logits import COLUMNS, SCALE_BYTES
from ...testing.compare import EQUAL
from ..shapes import IndexerShape
from .operands import generator, page_order
from .workload import Results, Workload, spread_samples

_UNWRITTEN = -2  # which no call returns
_KEYS_AT_A_TIME = 1 << 20  # whose numbers are drawn together
_MOST = 4  # halves: numbers are 0, 0.5, .. 2, and their negatives
_WEIGHT_STEPS = 32  # of a weight of 1


@dataclass(frozen=True)
class Operands:
    """Tensors of one call. keys: the index cache, uint8 [pages, page size, 1, 132], or keys in a row, e4m3 [keys, 128].

    places: the block table of a cache, else the scales of the keys.
    """

    q: torch.Tensor
    weights: torch.Tensor
    keys: torch.Tensor
    places: torch.Tensor
    out: torch.Tensor


class IndexerTopk(Workload[Operands]):
    """Scores and selects keys for query tokens that all see `context` keys.

    Numbers, weights and scales are such that fp32 holds every sum, whatever its order, so that the positions are exactly those of the
    reference. Numbers are spread as normal ones are, and half of the keys have twice the scale of the others.
    """

    def prepare(self) -> None:
        """Set the tolerance; make lengths and workspace."""
        self.tolerances = {"out": EQUAL}
        assert isinstance(self.case.shape, IndexerShape)
        self.shape = shape = self.case.shape
        self.starts = torch.zeros(shape.tokens, dtype=torch.int32, device=self.device)
        self.ends = torch.full((shape.tokens,), shape.context, dtype=torch.int32, device=self.device)
        batch, s_q = (shape.tokens, 1) if shape.paged else (1, shape.tokens)
        nbytes = workspace_size(
            "indexer_topk", batch=batch, s_q=s_q, h_q=shape.h_q, max_cache_seqlen=shape.context, topk=shape.topk, device=self.device
        )
        self.workspace = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=self.device)

    def make_operands(self, seed: int) -> Operands:
        """Allocate one operand set."""
        shape, device = self.shape, self.device
        draw = generator(device, seed)
        weights = torch.randint(-_WEIGHT_STEPS, _WEIGHT_STEPS + 1, (shape.tokens, shape.h_q), generator=draw, device=device) / _WEIGHT_STEPS
        q = _numbers(draw, shape.tokens, shape.h_q)
        out = torch.full((shape.tokens, shape.topk), _UNWRITTEN, dtype=torch.int32, device=device)
        if shape.paged:
            each = ceil_div(shape.context, shape.page_size)
            table = page_order(device, shape.tokens * each, seed).view(shape.tokens, each)
            return Operands(q.unsqueeze(1), weights, _cache(draw, table.numel(), shape.page_size), table, out)
        return Operands(q, weights, _numbers(draw, shape.context), _scales(draw, shape.context), out)

    def call(self, operands: Operands) -> None:
        """Call indexer_topk, or indexer_topk_prefill."""
        q, weights, topk, workspace, out = operands.q, operands.weights, self.shape.topk, self.workspace, operands.out
        if self.shape.paged:
            indexer_topk(q, weights, operands.keys, self.ends, operands.places, topk, workspace=workspace, out=out)
        else:
            keys = operands.keys, operands.places
            indexer_topk_prefill(q, keys, weights, self.starts, self.ends, topk, workspace=workspace, out=out)

    def poison(self) -> None:
        """Fill the workspace with NaN, and the results with a number that no call returns."""
        super().poison()
        for operands in self.sets:
            operands.out.fill_(_UNWRITTEN)

    def results(self, operands: Operands) -> Results:
        """Return out, fp64 [tokens, topk], NaN where nothing was written."""
        return {"out": operands.out.double().masked_fill(operands.out == _UNWRITTEN, math.nan)}

    def samples(self) -> tuple[int, ...]:
        """Return the query tokens to check."""
        return spread_samples(self.shape.tokens)

    def part(self, results: Results, sample: int) -> Results:
        """Return out [topk] of a query token."""
        return {"out": results["out"][sample]}

    def expected(self, operands: Operands, sample: int) -> Results:
        """Score and select the keys of a query token."""
        row = slice(sample, sample + 1)
        q, weights, ends, topk = operands.q[row], operands.weights[row], self.ends[row], self.shape.topk
        if self.shape.paged:
            found = reference.indexer_topk(q, weights, operands.keys, ends, operands.places[row], topk)
        else:
            found = reference.indexer_topk_prefill(q, (operands.keys, operands.places), weights, self.starts[row], ends, topk)
        return {"out": found[0].double()}


def _numbers(draw: torch.Generator, *size: int) -> torch.Tensor:
    """Draw e4m3 [*size, 128]: halves from -2 to 2."""
    made = torch.empty((*size, COLUMNS), dtype=torch.float8_e4m3fn, device=draw.device)
    for first in range(0, size[0], _KEYS_AT_A_TIME):
        here = made[first : first + _KEYS_AT_A_TIME]
        here.copy_(torch.randn(here.shape, generator=draw, device=draw.device).mul_(2).round_().clamp_(-_MOST, _MOST).div_(2))
    return made


def _scales(draw: torch.Generator, keys: int) -> torch.Tensor:
    """Draw fp32 [keys]: 1 or 0.5."""
    return 1.0 - torch.randint(0, 2, (keys,), generator=draw, device=draw.device) / 2


def _cache(draw: torch.Generator, pages: int, page_size: int) -> torch.Tensor:
    """Draw an index cache, uint8 [pages, page size, 1, 132]."""
    values = _numbers(draw, pages * page_size).view(torch.uint8).view(pages, page_size * COLUMNS)
    scales = _scales(draw, pages * page_size).view(torch.uint8).view(pages, page_size * SCALE_BYTES)
    return torch.cat([values, scales], dim=1).view(pages, page_size, 1, COLUMNS + SCALE_BYTES)
