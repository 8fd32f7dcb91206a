"""Arguments that both decode ops take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...api import get_mla_metadata
from ...spec.mla import D_V
from ..cases.base import DecodeCase
from ..cases.dense_decode import DenseDecodeTensors
from ..cases.sparse_decode import SparseDecodeTensors
from .operation import empty_lse, output_argument

Plan = tuple[Tensor, Tensor]  # tile_scheduler_metadata, num_splits


def decode_arguments(
    case: DecodeCase, tensors: DenseDecodeTensors | SparseDecodeTensors, workspace: Tensor | None, make_plan: Callable[[], Plan]
) -> dict[str, Any]:
    """Return the arguments that both decode ops take. make_plan: makes a plan of tensors, called if the case asks for one."""
    metadata, num_splits = get_mla_metadata() if case.metadata == "object" else _copy_plan(make_plan())
    return {
        "q": tensors.q,
        "k_cache": tensors.k_cache,
        "head_dim_v": D_V,
        "tile_scheduler_metadata": metadata,
        "num_splits": num_splits,
        "softmax_scale": case.softmax_scale,
        "out": output_argument(tensors, "out"),
        "lse": output_argument(tensors, "lse"),
        "workspace": workspace,
        "batch_invariant": case.batch_invariant,
        "empty_lse": empty_lse(case),
    }


def _copy_plan(plan: Plan) -> Plan:
    """Copy a plan, as engines do that keep plans in buffers of their own."""
    metadata, num_splits = plan
    return torch.empty_like(metadata).copy_(metadata), torch.empty_like(num_splits).copy_(num_splits)
