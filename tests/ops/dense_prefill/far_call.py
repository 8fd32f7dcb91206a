"""A dense prefill call that there is no memory for, by its specs."""

from __future__ import annotations

import torch

from cute_mla.ops import dense_prefill
from cute_mla.ops.tensor_spec import TensorSpec
from cute_mla.spec.dense_prefill import MAX_ITEMS, MAX_TOKENS


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
