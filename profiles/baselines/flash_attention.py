"""FlashAttention-4. Its kernels are compiled in the first run, outside the timing."""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any

from ..rows import Case
from ..shapes import DensePrefillShape
from ..workloads.workload import Results, Workload
from .baseline import Run
from .gradients import Leaves, gradient_run


class FlashAttention4:
    """Dense prefill, forward and backward: batched if all sequences have one length, else packed.

    The backward pass is the deterministic one, as ours.
    """

    name = "FA4"
    ops = ("dense_prefill", "dense_prefill_backward")

    def version(self) -> str:
        """Return the version of the wheel flash-attn-4. ImportError without it."""
        importlib.import_module("flash_attn.cute")
        return metadata.version("flash-attn-4")

    def unsupported_reason(self, case: Case) -> str:
        """Return the reason for a mask of keys, else ""."""
        assert isinstance(case.shape, DensePrefillShape)
        return "it takes no mask of keys" if case.shape.shown else ""

    def runs(self, workload: Workload) -> list[Run]:
        """Return a run for each operand set. The library's lse is [h, tokens] or [b, h, tokens], and is transposed."""
        library, case = importlib.import_module("flash_attn.cute"), workload.call_case
        options = {"causal": case.causal, "return_lse": True}
        packed = len(set(case.lengths)) > 1
        if workload.case.op == "dense_prefill_backward":
            forward = packed_run if packed else batched_run
            return [
                gradient_run(operands, lambda leaves: forward(library, workload, leaves, {**options, "deterministic": True})()["out"])
                for operands in workload.sets
            ]
        return [(packed_run if packed else batched_run)(library, workload, operands, options) for operands in workload.sets]


def packed_run(library: Any, workload: Workload, operands: Leaves, options: dict[str, bool]) -> Run:
    """Return a run of flash_attn_varlen_func over packed sequences; its lse is [h, tokens]."""
    ends = {
        "cu_seqlens_q": workload.sets[0].cu_seqlens_q,
        "cu_seqlens_k": workload.sets[0].cu_seqlens_k,
        "max_seqlen_q": workload.call_case.max_seqlen_q,
        "max_seqlen_k": workload.call_case.max_seqlen_k,
    }

    def run() -> Results:
        out, lse = library.flash_attn_varlen_func(operands.q, operands.k, operands.v, **ends, **options)
        return {"out": out, "lse": lse.transpose(0, 1)}

    return run


def batched_run(library: Any, workload: Workload, operands: Leaves, options: dict[str, bool]) -> Run:
    """Return a run of flash_attn_func over sequences of one length; its lse is [b, h, tokens]."""
    q, k, v = (tensor.unflatten(0, (len(workload.call_case.lengths), -1)) for tensor in (operands.q, operands.k, operands.v))

    def run() -> Results:
        out, lse = library.flash_attn_func(q, k, v, **options)
        return {"out": out.flatten(0, 1), "lse": lse.transpose(1, 2).flatten(0, 1)}

    return run
