"""A call of the backward pass, for tests that change one argument of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import cute_mla
from cute_mla.spec.dense_prefill import HEAD_DIMS

GRADIENTS = ("dq", "dk", "dv")


@dataclass
class BackwardCall:
    """Operands of one call, with defaults for everything."""

    batch: int = 2
    total_q: int = 300
    total_k: int = 500
    h_q: int = 8
    h_kv: int = 2
    d_qk: int = 192
    max_seqlen_qo: int = 290
    max_seqlen_kv: int = 400
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        rows, keys, d_v = (self.total_q, self.h_q), (self.total_k, self.h_kv), HEAD_DIMS[self.d_qk]
        self.operands: dict[str, Any] = {
            "dout": torch.zeros(*rows, d_v, dtype=self.dtype),
            "q": torch.zeros(*rows, self.d_qk, dtype=self.dtype),
            "k": torch.zeros(*keys, self.d_qk, dtype=self.dtype),
            "v": torch.zeros(*keys, d_v, dtype=self.dtype),
            "out": torch.zeros(*rows, d_v, dtype=self.dtype),
            "lse": torch.zeros(rows),
            "cu_seqlens_qo": torch.zeros(self.batch + 1, dtype=torch.int32),
            "cu_seqlens_kv": torch.zeros(self.batch + 1, dtype=torch.int32),
            "max_seqlen_qo": self.max_seqlen_qo,
            "max_seqlen_kv": self.max_seqlen_kv,
        }

    def results(self) -> dict[str, torch.Tensor]:
        """Return tensors for the results, and a workspace of exactly the bytes that the call needs."""
        size = cute_mla.workspace_size(
            "dense_prefill_backward", batch=self.batch, s_q=290, h_q=self.h_q, h_kv=self.h_kv, total_q=self.total_q, device="cpu"
        )
        gradients = {f"d{name}": torch.empty_like(self.operands[name]) for name in "qkv"}
        return {**gradients, "workspace": torch.empty(size, dtype=torch.uint8)}

    def run(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Call flash_attn_varlen_backward."""
        return cute_mla.flash_attn_varlen_backward(**{**self.operands, **options})
