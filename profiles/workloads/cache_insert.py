"""Workload of insert_kv_cache: keys of new tokens to slots in random order, at positions in random order, with queries."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...cache import insert_kv_cache
from ...ops.norm_rope import angles_at, rms_norm, rotated
from ...spec.cache_insert import normalised_columns, rotates
from ...spec.cache_rows import latent_columns
from ...spec.mla import D_ROPE
from ...testing.compare import EQUAL
from ..shapes import CacheInsertShape
from .cache_write import cached_keys, rounded_key, unwritten_cache
from .operands import angle_table, generator, random_slots, values
from .workload import DTYPES, POISON_BYTE, Results, Workload, spread_samples

_EPS = 1e-6


@dataclass(frozen=True)
class Operands:
    """Tensors of one insert_kv_cache call. slots, positions: int64, all different. q_pe is rotated in place, from what `queries` holds."""

    keys: torch.Tensor
    queries: torch.Tensor | None
    q_pe: torch.Tensor | None
    k_cache: torch.Tensor
    slots: torch.Tensor
    norm_weight: torch.Tensor
    cos_sin: torch.Tensor | None
    positions: torch.Tensor | None


class CacheInsert(Workload[Operands]):
    """Inserts into a cache just large enough for the tokens. The reference dequantiser reads the cache back for the comparison."""

    def prepare(self) -> None:
        """Set the tolerances. Sets share nothing: there is neither plan nor workspace."""
        self.tolerances = {"out": EQUAL, "q_pe": EQUAL}
        assert isinstance(self.case.shape, CacheInsertShape)
        self.shape = self.case.shape

    def make_operands(self, seed: int) -> Operands:
        """Allocate one operand set; the cache is filled with NaN bytes."""
        shape, layout, dtype = self.shape, self.shape.format, DTYPES[self.case.dtype]
        draw = generator(self.device, seed)
        queries = values(draw, dtype, shape.tokens, shape.h_q, D_ROPE) if shape.h_q else None
        return Operands(
            keys=values(draw, dtype, shape.tokens, layout.d_qk),
            queries=queries,
            q_pe=None if queries is None else queries.clone(),
            k_cache=unwritten_cache(shape, dtype, self.device),
            slots=random_slots(draw, shape.tokens, shape.page_size),
            norm_weight=1 + values(draw, dtype, normalised_columns(layout)),
            cos_sin=angle_table(draw, shape.tokens) if rotates(layout) else None,
            positions=torch.randperm(shape.tokens, generator=draw, device=self.device) if rotates(layout) else None,
        )

    def call(self, operands: Operands) -> None:
        """Call insert_kv_cache."""
        columns = latent_columns(self.shape.format)
        rotary = operands.keys[:, columns:] if columns < self.shape.format.d_qk else None
        insert_kv_cache(
            operands.keys[:, :columns],
            rotary,
            operands.q_pe,
            operands.k_cache,
            operands.slots,
            operands.norm_weight,
            operands.cos_sin,
            operands.positions,
            kv_format=self.shape.cache,
            eps=_EPS,
        )

    def poison(self) -> None:
        """Fill the caches with bytes that are NaN both as e4m3 codes and as scales, and take back the rotation of the queries."""
        for operands in self.sets:
            operands.k_cache.view(torch.uint8).fill_(POISON_BYTE)
            if operands.q_pe is not None and operands.queries is not None:
                operands.q_pe.copy_(operands.queries)

    def results(self, operands: Operands) -> Results:
        """Return out, fp32 [tokens, d_qk], the keys that the cache holds, and with heads q_pe."""
        out = cached_keys(self.shape, operands.k_cache, operands.slots)
        return {"out": out} if operands.q_pe is None else {"out": out, "q_pe": operands.q_pe}

    def samples(self) -> tuple[int, ...]:
        """Return the tokens to check."""
        return spread_samples(self.shape.tokens)

    def part(self, results: Results, sample: int) -> Results:
        """Return out [d_qk] and q_pe [h_q, 64] of a token."""
        return {name: tensor[sample] for name, tensor in results.items()}

    def expected(self, operands: Operands, sample: int) -> Results:
        """Return the token's key, normalised, rotated and rounded by the reference quantiser, and its queries."""
        layout, token = self.shape.format, slice(sample, sample + 1)
        columns = normalised_columns(layout)
        whole = operands.keys[token]
        key = torch.cat((rms_norm(whole[:, :columns], operands.norm_weight, _EPS), whole[:, columns:]), dim=1)
        results: dict[str, torch.Tensor] = {}
        if operands.cos_sin is not None and operands.positions is not None:
            angles = angles_at(operands.cos_sin, operands.positions[token], 1)
            key[:, -D_ROPE:] = rotated(key[:, -D_ROPE:], angles)
            if operands.queries is not None:
                results["q_pe"] = rotated(operands.queries[token], angles)[0].float()
        return {"out": rounded_key(self.shape, key[0]), **results}
