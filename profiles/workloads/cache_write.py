"""Workload of write_kv_cache: keys of new tokens, written to slots in random order."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...cache import dequantise_cache, quantise_cache, write_kv_cache
from ...spec.cache_rows import latent_columns
from ...spec.mla import ceil_div
from ...testing.compare import EQUAL
from ..shapes import CacheInsertShape, CacheWriteShape
from .operands import generator, random_slots, values
from .workload import DTYPES, POISON_BYTE, Results, Workload, spread_samples


@dataclass(frozen=True)
class Operands:
    """Tensors of one write_kv_cache call. slots: int64, all different."""

    keys: torch.Tensor
    k_cache: torch.Tensor
    slots: torch.Tensor


def unwritten_cache(shape: CacheWriteShape | CacheInsertShape, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate a cache just large enough for the tokens, filled with NaN bytes."""
    layout = shape.format
    row = (ceil_div(shape.tokens, shape.page_size), shape.page_size, 1)
    if layout.quantised:
        cache = torch.empty((*row, layout.page_bytes(1)), dtype=torch.uint8, device=device)
    else:
        cache = torch.empty((*row, layout.d_qk), dtype=dtype, device=device)
    cache.view(torch.uint8).fill_(POISON_BYTE)
    return cache


class CacheWrite(Workload[Operands]):
    """Writes to a cache just large enough for the tokens. The reference dequantiser reads the cache back for the comparison."""

    def prepare(self) -> None:
        """Set the tolerance. Sets share nothing: there is neither plan nor workspace."""
        self.tolerances = {"out": EQUAL}
        assert isinstance(self.case.shape, CacheWriteShape)
        self.shape = self.case.shape

    def make_operands(self, seed: int) -> Operands:
        """Allocate one operand set; the cache is filled with NaN bytes."""
        shape, dtype = self.shape, DTYPES[self.case.dtype]
        draw = generator(self.device, seed)
        cache = unwritten_cache(shape, dtype, self.device)
        slots = random_slots(draw, shape.tokens, shape.page_size)
        return Operands(values(draw, dtype, shape.tokens, shape.format.d_qk), cache, slots)

    def call(self, operands: Operands) -> None:
        """Call write_kv_cache."""
        columns = latent_columns(self.shape.format)
        rotary = operands.keys[:, columns:] if columns < self.shape.format.d_qk else None
        write_kv_cache(operands.keys[:, :columns], rotary, operands.k_cache, operands.slots, kv_format=self.shape.cache)

    def poison(self) -> None:
        """Fill the caches with bytes that are NaN both as e4m3 codes and as scales."""
        for operands in self.sets:
            operands.k_cache.view(torch.uint8).fill_(POISON_BYTE)

    def results(self, operands: Operands) -> Results:
        """Return out, fp32 [tokens, d_qk]: the keys that the cache holds."""
        return {"out": dequantise_cache(operands.k_cache, self.shape.cache).flatten(0, 2)[operands.slots].float()}

    def samples(self) -> tuple[int, ...]:
        """Return the tokens to check."""
        return spread_samples(self.shape.tokens)

    def part(self, results: Results, sample: int) -> Results:
        """Return out [d_qk] of a token."""
        return {"out": results["out"][sample]}

    def expected(self, operands: Operands, sample: int) -> Results:
        """Return the token's key, rounded by the reference quantiser."""
        key = operands.keys[sample].view(1, 1, 1, -1)
        if self.shape.format.quantised:
            key = dequantise_cache(quantise_cache(key, self.shape.cache), self.shape.cache)
        return {"out": key.flatten().float()}
