"""Arguments of dense_decode for launches that compute nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from cute_mla.runtime.arguments import Span
from cute_mla.spec.abi import ParamKind
from cute_mla.spec.dense_decode import PARAMS
from cute_mla.spec.tensor_map import TensorMap

COUNTS = Counter(param.kind for param in PARAMS)
FLOATS = (0.5, float("inf"))


def decode_arguments(kv_map: TensorMap, first_int64: int = 2**33) -> tuple[Any, ...]:
    """Return arguments in ABI order: distinct ones, of each kind of scalar in rising order. Integers of 32 bits begin at 0."""
    workspace = torch.empty(8192, dtype=torch.uint8)
    spans = {"out_accum": Span(workspace, 0, 4096), "lse_accum": Span(workspace, 4096, 512)}
    scalars = {
        ParamKind.INT64: iter(range(first_int64, first_int64 + COUNTS[ParamKind.INT64])),
        ParamKind.INT32: iter(range(COUNTS[ParamKind.INT32])),
        ParamKind.FLOAT32: iter(FLOATS),
    }

    def argument(name: str, kind: ParamKind) -> Any:
        if kind is ParamKind.TENSOR_MAP:
            return kv_map
        return spans.get(name, torch.empty(4)) if kind is ParamKind.POINTER else next(scalars[kind])

    return tuple(argument(param.name, param.kind) for param in PARAMS)
