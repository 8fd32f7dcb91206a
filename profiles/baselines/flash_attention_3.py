"""FlashAttention-3, forward only, in the package fa3-fwd.

The package has no pages: a cache is gathered into contiguous keys outside the timing. Its plan of splits is made in each call.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any

from cute_mla.spec.dense_decode import LATENT
from cute_mla.spec.mla import D_QK, D_V

from ..rows import Case
from ..shapes import DecodeShape, DensePrefillShape
from ..workloads.workload import Results, Workload
from .baseline import Run
from .flash_attention import batched_run, packed_run

_DTYPE = "bf16"


class FlashAttention3:
    """Dense decode over contiguous latents, and dense prefill, on Hopper."""

    name = "FA3"
    ops = ("dense_decode", "dense_prefill")

    def version(self) -> str:
        """Return the version of the wheel fa3-fwd. ImportError without it."""
        importlib.import_module("fa3_fwd_interface")
        return metadata.version("fa3-fwd")

    def unsupported_reason(self, case: Case) -> str:
        """Return the reason for other operands than latents of 576 values, packed query tokens or a mask of keys, else ""."""
        shape = case.shape
        if case.dtype != _DTYPE:
            return f"it was built for {_DTYPE}"
        if isinstance(shape, DecodeShape):
            if shape.tokens:
                return "its requests have equally many query tokens"
            return (
                "" if (shape.operands, shape.d_qk) == (LATENT, D_QK) else f"of the operands, {_DTYPE} latents of {D_QK} alone are measured"
            )
        assert isinstance(shape, DensePrefillShape)
        return "it takes no mask of keys" if shape.shown else ""

    def runs(self, workload: Workload) -> list[Run]:
        """Return a run for each operand set, by the op of the workload."""
        library = importlib.import_module("fa3_fwd_interface")
        case = workload.call_case
        if workload.case.op == "dense_decode":
            return [_decode(library, case.causal, operands) for operands in workload.sets]
        make = packed_run if len(set(case.lengths)) > 1 else batched_run
        options = {"causal": case.causal, "return_attn_probs": True}
        return [make(library, workload, operands, options) for operands in workload.sets]


def _decode(library: Any, causal: bool, operands: Any) -> Run:
    """Return a run on q as 64 RoPE columns and qv of 512, over keys [b, longest, h_kv, 576] in the order of each request."""
    pages = operands.block_table.long().clamp(0, len(operands.k_cache) - 1)  # entries beyond a request's length are out of range
    keys = operands.k_cache[pages].flatten(1, 2)
    latent, rope = operands.q[..., :D_V].contiguous(), operands.q[..., D_V:].contiguous()
    options = {"softmax_scale": D_QK**-0.5, "causal": causal, "num_splits": 0, "return_softmax_lse": True}

    def run() -> Results:
        out, lse, *_ = library.flash_attn_with_kvcache(
            rope, keys[..., D_V:], keys[..., :D_V], qv=latent, cache_seqlens=operands.cache_seqlens, **options
        )
        return {"out": out, "lse": lse}

    return run
