"""A dense prefill call, for tests that change one argument of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import cute_mla
from cute_mla.ops import dense_prefill
from cute_mla.ops.tensor_spec import TensorSpec
from cute_mla.spec.dense_prefill import HEAD_DIMS, MAX_ITEMS, MAX_TOKENS


@dataclass
class VarlenCall:
    """Operands of one call, with defaults for everything."""

    batch: int = 2
    total_q: int = 300
    total_k: int = 500
    h_q: int = 8
    h_kv: int = 2
    d_qk: int = 192
    max_seqlen_qo: int = 290
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        self.operands: dict[str, Any] = {
            "q": torch.zeros(self.total_q, self.h_q, self.d_qk, dtype=self.dtype),
            "k": torch.zeros(self.total_k, self.h_kv, self.d_qk, dtype=self.dtype),
            "v": torch.zeros(self.total_k, self.h_kv, HEAD_DIMS[self.d_qk], dtype=self.dtype),
            "cu_seqlens_qo": torch.zeros(self.batch + 1, dtype=torch.int32),
            "cu_seqlens_kv": torch.zeros(self.batch + 1, dtype=torch.int32),
            "max_seqlen_qo": self.max_seqlen_qo,
            "max_seqlen_kv": 400,
        }

    def results(self) -> dict[str, torch.Tensor]:
        """Return tensors for the results."""
        rows = (self.total_q, self.h_q)
        return {"out": torch.empty(*rows, HEAD_DIMS[self.d_qk], dtype=self.dtype), "lse": torch.empty(rows)}

    def run(self, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Call flash_attn_varlen_func."""
        return cute_mla.flash_attn_varlen_func(**{**self.operands, **options})


def far_call(step: int) -> dense_prefill.CallSpec:
    """Return a call with so many elements between neighbours of every dimension."""
    cpu = torch.device("cpu")
    ends = TensorSpec((2,), (1,), torch.int32, cpu)
    return dense_prefill.CallSpec(
        q=TensorSpec((MAX_TOKENS, 3, 192), (step, 2 * step, 1), torch.bfloat16, cpu),
        k=TensorSpec((MAX_TOKENS, 3, 192), (step, 2 * step, 1), torch.bfloat16, cpu),
        v=TensorSpec((MAX_TOKENS, 3, 128), (step, 2 * step, 1), torch.bfloat16, cpu),
        cu_seqlens_qo=ends,
        cu_seqlens_kv=ends,
        key_mask=None,
        causal=True,
        max_seqlen_qo=MAX_ITEMS,
        max_seqlen_kv=0,
        out=TensorSpec((MAX_TOKENS, 3, 128), (3 * step, step, 1), torch.bfloat16, cpu),
        lse=TensorSpec((MAX_TOKENS, 3), (3 * step, step), torch.float32, cpu),
        address_alignment=16,
    )
