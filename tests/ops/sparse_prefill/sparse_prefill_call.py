"""A sparse prefill call, for tests that change one argument of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import cute_mla


@dataclass
class PrefillCall:
    """Operands of one call, with defaults for everything. batch: None for the form without one. ragged: with kv_offsets."""

    batch: int | None = None
    s_q: int = 5
    h_q: int = 64
    d_qk: int = 576
    s_kv: int = 100
    topk: int = 64
    ragged: bool = False
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        self.leading = (self.s_q,) if self.batch is None else (self.batch, self.s_q)
        self.q = torch.zeros(*self.leading, self.h_q, self.d_qk, dtype=self.dtype)
        self.kv = torch.zeros(*(() if self.ragged else self.leading[:-1]), self.s_kv, 1, self.d_qk, dtype=self.dtype)
        self.indices = torch.zeros(*self.leading, 1, self.topk, dtype=torch.int32)
        self.options: dict[str, Any] = {"sm_scale": 0.25}
        if self.ragged:
            assert self.batch is not None
            self.options["kv_offsets"] = torch.zeros(self.batch + 1, dtype=torch.int32)

    def lengths(self) -> torch.Tensor:
        return torch.zeros(*self.leading, dtype=torch.int32)

    def results(self) -> dict[str, torch.Tensor]:
        """Return tensors for the results."""
        rows = (*self.leading, self.h_q)
        return {"out": torch.empty(*rows, 512, dtype=self.dtype), "lse": torch.empty(rows), "max_logits": torch.empty(rows)}

    def run(self, **options: Any) -> tuple[torch.Tensor, ...]:
        """Call flash_mla_sparse_fwd."""
        given = {"q": self.q, "kv": self.kv, "indices": self.indices}
        return cute_mla.flash_mla_sparse_fwd(**{**given, **self.options, **options})
