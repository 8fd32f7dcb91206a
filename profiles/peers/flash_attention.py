"""FlashAttention-4, which compiles its kernel at the first run, outside the timing."""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any

from ..rows import Case
from ..subjects.dense_prefill import DensePrefill, Operands
from ..subjects.subject import Results, Subject
from .peer import Run


class FlashAttention4:
    """Dense prefill: with a batch dimension where all sequences are equally long, packed where they are not."""

    name = "FA4"
    ops = ("dense_prefill",)

    def version(self) -> str:
        """Of the wheel."""
        importlib.import_module("flash_attn.cute")
        return metadata.version("flash-attn-4")

    def refusal(self, case: Case) -> str:
        """It takes all of the rows."""
        return ""

    def runs(self, subject: Subject[Any]) -> list[Run]:
        """lse comes [h, tokens], or [b, h, tokens]."""
        assert isinstance(subject, DensePrefill)
        library = importlib.import_module("flash_attn.cute")
        options = {"causal": subject.shape.causal, "return_lse": True}
        packed = len(set(subject.shape.lengths)) > 1
        return [(_packed if packed else _batched)(library, subject, operands, options) for operands in subject.sets]


def _packed(library: Any, subject: DensePrefill, operands: Operands, options: dict[str, bool]) -> Run:
    ends = {
        "cu_seqlens_q": subject.cu_seqlens,
        "cu_seqlens_k": subject.cu_seqlens,
        "max_seqlen_q": subject.longest,
        "max_seqlen_k": subject.longest,
    }

    def run() -> Results:
        out, lse = library.flash_attn_varlen_func(operands.q, operands.k, operands.v, **ends, **options)
        return {"out": out, "lse": lse.transpose(0, 1)}

    return run


def _batched(library: Any, subject: DensePrefill, operands: Operands, options: dict[str, bool]) -> Run:
    q, k, v = (tensor.unflatten(0, (subject.shape.batch, -1)) for tensor in (operands.q, operands.k, operands.v))

    def run() -> Results:
        out, lse = library.flash_attn_func(q, k, v, **options)
        return {"out": out.flatten(0, 1), "lse": lse.transpose(1, 2).flatten(0, 1)}

    return run
