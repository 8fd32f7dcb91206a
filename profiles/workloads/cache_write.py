"""Workload of write_kv_cache: keys of new tokens, written to slots in random order."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...cache import dequantise_cache, quantise_cache, write_kv_cache
from ...ops.cache_codec import to_e4m3
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
        element = torch.uint8 if layout.groups else torch.float8_e4m3fn  # of a whole row: no scales lie between its codes
        cache = torch.empty((*row, layout.page_bytes(1)), dtype=element, device=device)
    else:
        cache = torch.empty((*row, layout.d_qk), dtype=dtype, device=device)
    cache.view(torch.uint8).fill_(POISON_BYTE)
    return cache


def cached_keys(shape: CacheWriteShape | CacheInsertShape, k_cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the keys in some slots, fp32 [slots, d_qk]; those of fp8_576 have the scale 1."""
    rows = k_cache if k_cache.dtype == torch.float8_e4m3fn else dequantise_cache(k_cache, shape.cache)
    return rows.flatten(0, 2)[slots].float()


def rounded_key(shape: CacheWriteShape | CacheInsertShape, key: torch.Tensor) -> torch.Tensor:
    """Return a key [d_qk] as the cache holds it, fp32 [d_qk]."""
    if not shape.format.quantised:
        return key.float()
    if not shape.format.groups:
        return to_e4m3(key.float()).view(torch.float8_e4m3fn).float()
    return dequantise_cache(quantise_cache(key.view(1, 1, 1, -1), shape.cache), shape.cache).flatten().float()


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
        return {"out": cached_keys(self.shape, operands.k_cache, operands.slots)}

    def samples(self) -> tuple[int, ...]:
        """Return the tokens to check."""
        return spread_samples(self.shape.tokens)

    def part(self, results: Results, sample: int) -> Results:
        """Return out [d_qk] of a token."""
        return {"out": results["out"][sample]}

    def expected(self, operands: Operands, sample: int) -> Results:
        """Return the token's key, rounded by the reference quantiser."""
        return {"out": rounded_key(self.shape, operands.keys[sample])}
