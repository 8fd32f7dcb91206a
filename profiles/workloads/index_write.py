"""Workload of write_index_cache, keys to slots in random order, and of prepare_index_queries; positions in random order."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ...indexer import prepare_index_queries, write_index_cache
from ...ops.index_torch import IndexRows, layer_norm, prepared
from ...ops.index_write import factor_of
from ...ops.norm_rope import angles_at
from ...spec.index_write import Rope
from ...spec.mla import ceil_div
from ...spec.mqa_logits import COLUMNS, ROW_BYTES
from ...testing.compare import EQUAL
from ..shapes import IndexWriteShape
from .operands import angle_table, generator, random_slots, values
from .workload import DTYPES, POISON_BYTE, Results, Workload, spread_samples

_EPS = 1e-6
_ROPE: Rope = "half_split"  # as DeepSeek-V3.2 has it
_CODES = torch.float8_e4m3fn


@dataclass(frozen=True)
class Operands:
    """Tensors of one call. rows: bf16 [tokens, 128], of queries [tokens, heads, 128]. slots, positions: int64, all different.

    norm_weight, norm_bias: fp32 [128]. weights: fp32 [tokens, heads]. Keys: the index cache is written. Queries: out and out_weights.
    """

    rows: torch.Tensor
    cos_sin: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    norm_weight: torch.Tensor
    norm_bias: torch.Tensor
    weights: torch.Tensor
    index_cache: torch.Tensor
    out: torch.Tensor
    out_weights: torch.Tensor


class IndexWrite(Workload[Operands]):
    """Writes keys to an index cache just large enough for the tokens, or prepares queries."""

    def prepare(self) -> None:
        """Set the tolerances. Sets share nothing: there is neither plan nor workspace."""
        self.tolerances = {"out": EQUAL, "scales": EQUAL}
        assert isinstance(self.case.shape, IndexWriteShape)
        self.shape = self.case.shape

    def make_operands(self, seed: int) -> Operands:
        """Allocate one operand set; what is written is filled with NaN bytes."""
        shape, device = self.shape, self.device
        draw = generator(device, seed)
        heads = (shape.h_q,) if shape.h_q else ()
        pages = 0 if heads else ceil_div(shape.tokens, shape.page_size)
        operands = Operands(
            rows=values(draw, DTYPES[self.case.dtype], shape.tokens, *heads, COLUMNS),
            cos_sin=angle_table(draw, shape.tokens),
            positions=torch.randperm(shape.tokens, generator=draw, device=device),
            slots=random_slots(draw, shape.tokens, shape.page_size),
            norm_weight=1 + values(draw, torch.float32, COLUMNS),
            norm_bias=values(draw, torch.float32, COLUMNS),
            weights=values(draw, torch.float32, shape.tokens, shape.h_q),
            index_cache=torch.empty(pages, shape.page_size, 1, ROW_BYTES, dtype=torch.uint8, device=device),
            out=torch.empty(shape.tokens, shape.h_q, COLUMNS, dtype=_CODES, device=device),
            out_weights=torch.empty(shape.tokens, shape.h_q, dtype=torch.float32, device=device),
        )
        self._unwrite(operands)
        return operands

    def _unwrite(self, operands: Operands) -> None:
        for tensor in (operands.index_cache, operands.out):
            tensor.view(torch.uint8).fill_(POISON_BYTE)
        operands.out_weights.fill_(math.nan)

    def call(self, operands: Operands) -> None:
        """Call write_index_cache, or prepare_index_queries."""
        o = operands
        if self.shape.h_q:
            prepare_index_queries(o.rows, o.weights, o.cos_sin, o.positions, rope=_ROPE, out=o.out, out_weights=o.out_weights)
        else:
            write_index_cache(o.rows, o.index_cache, o.slots, o.norm_weight, o.norm_bias, o.cos_sin, o.positions, rope=_ROPE, eps=_EPS)

    def poison(self) -> None:
        """Fill what is written with bytes that are NaN both as e4m3 codes and as scales."""
        for operands in self.sets:
            self._unwrite(operands)

    def results(self, operands: Operands) -> Results:
        """Return out, the codes in fp32 [tokens, .., 128], and scales, fp32: those of keys [tokens], or the weights [tokens, heads]."""
        if self.shape.h_q:
            return {"out": operands.out.float(), "scales": operands.out_weights}
        size = self.shape.page_size
        pages = operands.index_cache.flatten(1)
        codes = pages[:, : size * COLUMNS].reshape(-1, COLUMNS).view(_CODES)
        scales = pages[:, size * COLUMNS :].contiguous().view(torch.float32).flatten()
        return {"out": codes.float()[operands.slots], "scales": scales[operands.slots]}

    def samples(self) -> tuple[int, ...]:
        """Return the tokens to check."""
        return spread_samples(self.shape.tokens)

    def part(self, results: Results, sample: int) -> Results:
        """Return out [.., 128] and scales [1] or [heads] of a token."""
        return {"out": results["out"][sample], "scales": results["scales"][sample].flatten()}

    def expected(self, operands: Operands, sample: int) -> Results:
        """Return the token's key or queries by the rule in torch."""
        token = slice(sample, sample + 1)
        rows, angles = operands.rows[token], angles_at(operands.cos_sin, operands.positions[token], 1)
        if self.shape.h_q:
            made = prepared(rows, angles, _ROPE, False)
            return _of_token(made, operands.weights[token] * factor_of(self.shape.h_q) * made.scales)
        made = prepared(layer_norm(rows, operands.norm_weight, operands.norm_bias, _EPS), angles, _ROPE, False)
        return _of_token(made, made.scales)


def _of_token(made: IndexRows, scales: torch.Tensor) -> Results:
    """Return the results of one token from rows [1, .., 128] and scales [1, ..]."""
    return {"out": made.codes.view(_CODES).float()[0], "scales": scales.flatten()}
