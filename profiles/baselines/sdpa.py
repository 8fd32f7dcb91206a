"""torch.nn.functional.scaled_dot_product_attention with a fixed backend, forward and backward."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from ..rows import Case
from ..shapes import DensePrefillShape
from ..workloads.workload import Results, Workload
from .baseline import Run
from .gradients import Leaves, gradient_run


class Sdpa:
    """Dense prefill of sequences of one length, without lse, and its backward pass.

    padded: pad v with zeros to the columns of k, outside the timing, for a backend that requires equal head dimensions; the padding of
    gradients is inside.
    """

    ops = ("dense_prefill", "dense_prefill_backward")

    def __init__(self, name: str, backend: SDPBackend, *, padded: bool) -> None:
        self.name = name
        self._backend = backend
        self._padded = padded

    def version(self) -> str:
        """Return the version of torch, with that of cuDNN if available."""
        cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
        return torch.__version__ if cudnn is None else f"{torch.__version__}, cuDNN {cudnn}"

    def unsupported_reason(self, case: Case) -> str:
        """Return the reason for sequences of several lengths, with cached keys or with a mask of keys, else ""."""
        assert isinstance(case.shape, DensePrefillShape)
        if case.shape.shown:
            return "these backends take no mask of keys"
        if case.shape.cached:
            return "its causal mask begins at the first key"
        return "it takes sequences of one length" if len(set(case.shape.lengths)) > 1 else ""

    def runs(self, workload: Workload) -> list[Run]:
        """Return a run for each operand set, on views [b, h, tokens, d] of the operands."""
        shape = workload.case.shape
        assert isinstance(shape, DensePrefillShape)
        options = {"is_causal": shape.causal, "scale": shape.d_qk**-0.5, "enable_gqa": shape.h_q != shape.h_kv}

        def of(operands: Leaves) -> Run:
            v = pad(operands.v, (0, shape.d_qk - shape.d_v)) if self._padded else operands.v
            heads_first = [tensor.unflatten(0, (shape.batch, -1)).transpose(1, 2) for tensor in (operands.q, operands.k, v)]

            def run() -> Results:
                with sdpa_kernel(self._backend):
                    out = scaled_dot_product_attention(*heads_first, **options)  # type: ignore[arg-type]
                return {"out": out.transpose(1, 2).flatten(0, 1)[..., : shape.d_v]}

            return run

        if workload.case.op == "dense_prefill_backward":
            return [gradient_run(operands, lambda leaves: of(leaves)()["out"]) for operands in workload.sets]
        return [of(operands) for operands in workload.sets]
