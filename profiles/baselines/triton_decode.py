"""A plain MLA decode in Triton, as a lower bar."""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch

from ...spec.dense_decode import LATENT
from ...spec.mla import D_QK, D_V, LOG2E, ceil_div
from ..rows import Case
from ..shapes import DecodeShape
from ..workloads.dense_decode import DenseDecode
from ..workloads.workload import Results, Workload
from .baseline import Run

_BLOCK_KEYS = 32
_LEAST_ROWS, _MOST_ROWS = 16, 64  # query rows of a program; tl.dot needs at least 16
_PROGRAMS_PER_SM = 2
_MOST_SPLITS = 64
_WARPS = {16: 4, 32: 4, 64: 8}  # by query rows of a program


class TritonDecode:
    """Dense decode with 16-bit operands and one KV head."""

    name = "Triton"
    ops = ("dense_decode",)

    def version(self) -> str:
        """Return the version of Triton. ImportError without it."""
        return str(importlib.import_module("triton").__version__)

    def unsupported_reason(self, case: Case) -> str:
        """Return the reason for 8-bit operands, several KV heads or packed query tokens, else ""."""
        assert isinstance(case.shape, DecodeShape)
        if case.shape.tokens:
            return "its requests have equally many query tokens"
        if case.shape.operands != LATENT:
            return "it takes operands of 16 bits"
        return "it takes one KV head" if case.shape.h_kv != 1 else ""

    def runs(self, workload: Workload[Any]) -> list[Run]:
        """Return a run for each operand set. All runs share the buffers of partial results."""
        assert isinstance(workload, DenseDecode)
        kernels = importlib.import_module(".triton_kernels", __package__)
        shape, device = workload.shape, workload.device
        rows = shape.s_q * shape.h_q
        block_rows = min(max(_power_of_two(rows), _LEAST_ROWS), _MOST_ROWS)
        splits = split_count(shape, ceil_div(rows, block_rows), _sm_count(device))
        grid = (shape.batch, ceil_div(rows, block_rows), splits)
        out_parts = torch.empty(shape.batch, splits, rows, D_V, dtype=torch.float32, device=device)
        lse_parts = torch.empty(shape.batch, splits, rows, dtype=torch.float32, device=device)

        def of(operands: Any) -> Run:
            out, lse = torch.full_like(operands.out, math.nan), torch.full_like(operands.lse, math.nan)
            table = operands.block_table

            def run() -> Results:
                kernels.decode_split[grid](
                    *(operands.q, operands.k_cache, table, workload.cache_seqlens, out_parts, lse_parts),
                    *(D_QK**-0.5 * LOG2E, table.stride(0), rows, shape.s_q, splits),
                    PAGE=shape.page_size,
                    BLOCK_ROWS=block_rows,
                    BLOCK_KEYS=_BLOCK_KEYS,
                    num_warps=_WARPS[block_rows],
                    num_stages=2,
                )
                kernels.merge_splits[(shape.batch, rows)](out_parts, lse_parts, out, lse, rows, shape.h_q, splits, LN2=1 / LOG2E)
                return {"out": out, "lse": lse}

            return run

        return [of(operands) for operands in workload.sets]


def split_count(shape: DecodeShape, row_blocks: int, sm_count: int) -> int:
    """Return the splits that give every SM two programs, limited to the key blocks of the longest request and to _MOST_SPLITS."""
    full_gpu = ceil_div(_PROGRAMS_PER_SM * sm_count, max(shape.batch * row_blocks, 1))
    longest = ceil_div(max(shape.lengths, default=0), _BLOCK_KEYS)
    return max(min(full_gpu, longest, _MOST_SPLITS), 1)


def _power_of_two(value: int) -> int:
    """Round a positive number up to a power of two."""
    return 1 << (value - 1).bit_length()


def _sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
