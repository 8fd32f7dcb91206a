"""Workload of dense prefill: flash_attn_varlen_func over packed sequences that attend to themselves."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

import torch

from ... import reference
from ...api import flash_attn_varlen_func
from ...testing.compare import DENSE_PREFILL_OUT, PREFILL_LSE
from ..shapes import DensePrefillShape
from .dense_decode import sample_requests
from .operands import generator, shown_keys, values
from .workload import DTYPES, Results, Workload

_CHECKED_TOKENS = (0, 1, 127, 128)  # query tokens of a sequence that are compared, from its start and from its end


@dataclass(frozen=True)
class Operands:
    """Tensors of one flash_attn_varlen_func call."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    key_mask: torch.Tensor | None


class DensePrefill(Workload[Operands]):
    """Attends within packed sequences."""

    def prepare(self) -> None:
        """Set the tolerances; make the ends of the sequences. There is neither plan nor workspace."""
        self.tolerances = {"out": DENSE_PREFILL_OUT, "lse": PREFILL_LSE}
        assert isinstance(self.case.shape, DensePrefillShape)
        self.shape = self.case.shape
        self.ends = tuple(accumulate(self.shape.lengths, initial=0))
        self.key_ends = tuple(accumulate((length + self.shape.cached for length in self.shape.lengths), initial=0))
        self.cu_seqlens, self.cu_seqlens_k = (
            torch.tensor(ends, dtype=torch.int32, device=self.device) for ends in (self.ends, self.key_ends)
        )
        self.longest = max(self.shape.lengths)
        self.longest_k = self.longest + self.shape.cached
        seen = [keys for length in self.shape.lengths for keys in self.shape.seen(length)] if self.shape.shown else []
        self.seen = torch.tensor(seen, dtype=torch.int64, device=self.device)

    def make_operands(self, seed: int) -> Operands:
        """Allocate one operand set."""
        shape, dtype, device = self.shape, DTYPES[self.case.dtype], self.device
        draw = generator(device, seed)
        return Operands(
            q=values(draw, dtype, shape.tokens, shape.h_q, shape.d_qk),
            k=values(draw, dtype, shape.keys, shape.h_kv, shape.d_qk),
            v=values(draw, dtype, shape.keys, shape.h_kv, shape.d_v),
            out=torch.full((shape.tokens, shape.h_q, shape.d_v), math.nan, dtype=dtype, device=device),
            lse=torch.full((shape.tokens, shape.h_q), math.nan, dtype=torch.float32, device=device),
            key_mask=shown_keys(draw, self.seen, self.longest_k, shape.shown) if shape.shown else None,
        )

    def call(self, operands: Operands) -> None:
        """Call dense prefill."""
        flash_attn_varlen_func(
            operands.q,
            operands.k,
            operands.v,
            self.cu_seqlens,
            self.cu_seqlens_k,
            self.longest,
            self.longest_k,
            causal=self.shape.causal,
            out=operands.out,
            lse=operands.lse,
            key_mask=operands.key_mask,
        )

    def results(self, operands: Operands) -> Results:
        """Return out and lse."""
        return {"out": operands.out, "lse": operands.lse}

    def samples(self) -> tuple[int, ...]:
        """Return the sequences to check."""
        return sample_requests(self.shape.lengths)

    def _checked_tokens(self, sequence: int) -> list[int]:
        """Return the tokens of a sequence that are compared."""
        length = self.shape.lengths[sequence]
        candidates = (*_CHECKED_TOKENS, length // 2, *(length - 1 - token for token in _CHECKED_TOKENS))
        return sorted({token for token in candidates if 0 <= token < length})

    def part(self, results: Results, sample: int) -> Results:
        """Return out [h_q, tokens, d_v] and lse [h_q, tokens] of the checked tokens of a sequence."""
        tokens = torch.tensor([self.ends[sample] + token for token in self._checked_tokens(sample)], device=self.device)
        return {name: tensor[tokens].transpose(0, 1) for name, tensor in results.items()}

    def expected(self, operands: Operands, sample: int) -> Results:
        """Return the results of the checked tokens over all keys of the sequence, with the causal mask if there is one."""
        rows, keys = (slice(ends[sample], ends[sample + 1]) for ends in (self.ends, self.key_ends))
        tokens = torch.tensor(self._checked_tokens(sample), device=self.device)
        group = self.shape.h_q // self.shape.h_kv
        q = operands.q[rows][tokens].transpose(0, 1)
        k, v = (tensor[keys].transpose(0, 1).repeat_interleave(group, dim=0) for tensor in (operands.k, operands.v))
        length = self.shape.lengths[sample] + self.shape.cached
        visible = torch.arange(length, device=self.device) <= (tokens[:, None] + self.shape.cached if self.shape.causal else length)
        if operands.key_mask is not None:
            visible = visible & reference.mask_keys(operands.key_mask[rows][tokens], length)
        out, lse = reference.attention(q, k, v, self.shape.d_qk**-0.5, visible)
        return {"out": out, "lse": lse}
