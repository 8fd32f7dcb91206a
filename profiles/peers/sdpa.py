"""torch's scaled_dot_product_attention, by one of its backends."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from ...spec.dense_prefill import D_V
from ..rows import Case
from ..shapes import DensePrefillShape
from ..subjects.dense_prefill import DensePrefill
from ..subjects.subject import Results, Subject
from .peer import Run


class Sdpa:
    """Dense prefill of sequences that are equally long. It gives no lse.

    padded: values are padded with zeros to as many columns as keys have, outside the timing, for a backend that needs that.
    """

    ops = ("dense_prefill",)

    def __init__(self, name: str, backend: SDPBackend, *, padded: bool) -> None:
        self.name = name
        self._backend = backend
        self._padded = padded

    def version(self) -> str:
        """Of torch, and of cuDNN where there is one."""
        cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
        return torch.__version__ if cudnn is None else f"{torch.__version__}, cuDNN {cudnn}"

    def refusal(self, case: Case) -> str:
        """Sequences of several lengths."""
        assert isinstance(case.shape, DensePrefillShape)
        return "it takes sequences of one length" if len(set(case.shape.lengths)) > 1 else ""

    def runs(self, subject: Subject[Any]) -> list[Run]:
        """The tensors stay as they are, seen as [b, h, tokens, d]."""
        assert isinstance(subject, DensePrefill)
        shape = subject.shape
        options = {"is_causal": shape.causal, "scale": shape.d_qk**-0.5, "enable_gqa": shape.h_q != shape.h_kv}

        def of(operands: Any) -> Run:
            v = pad(operands.v, (0, shape.d_qk - D_V)) if self._padded else operands.v
            heads_first = [tensor.unflatten(0, (shape.batch, -1)).transpose(1, 2) for tensor in (operands.q, operands.k, v)]

            def run() -> Results:
                with sdpa_kernel(self._backend):
                    out = scaled_dot_product_attention(*heads_first, **options)  # type: ignore[arg-type]
                return {"out": out.transpose(1, 2).flatten(0, 1)[..., :D_V]}

            return run

        return [of(operands) for operands in subject.sets]
