"""Our own MLA decode in Triton, as a floor."""

from __future__ import annotations

import importlib
import math
from typing import Any

import torch

from ...spec.dense_decode import LATENT
from ...spec.mla import D_QK, D_V, LOG2E, ceil_div
from ..rows import Case
from ..shapes import DecodeShape
from ..subjects.dense_decode import DenseDecode
from ..subjects.subject import Results, Subject
from .peer import Run

_BLOCK_KEYS = 32
_LEAST_ROWS, _MOST_ROWS = 16, 64  # of a program; tl.dot takes 16 at least
_PROGRAMS_PER_SM = 2
_MOST_SPLITS = 64
_WARPS = {16: 4, 32: 4, 64: 8}  # by rows of a program


class TritonDecode:
    """Dense decode of 16 bits, one KV head."""

    name = "Triton"
    ops = ("dense_decode",)

    def version(self) -> str:
        """Of Triton."""
        return str(importlib.import_module("triton").__version__)

    def refusal(self, case: Case) -> str:
        """Operands of 8 bits, and several KV heads."""
        assert isinstance(case.shape, DecodeShape)
        if case.shape.operands != LATENT:
            return "it takes operands of 16 bits"
        return "it takes one KV head" if case.shape.h_kv != 1 else ""

    def runs(self, subject: Subject[Any]) -> list[Run]:
        """All sets share the memory for the splits' results."""
        assert isinstance(subject, DenseDecode)
        kernels = importlib.import_module(".triton_kernels", __package__)
        shape, device = subject.shape, subject.device
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
                    *(operands.q, operands.k_cache, table, subject.cache_seqlens, out_parts, lse_parts),
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

        return [of(operands) for operands in subject.sets]


def split_count(shape: DecodeShape, row_blocks: int, sm_count: int) -> int:
    """As many splits as give every SM two programs, no more than the longest request has blocks of keys."""
    wanted = ceil_div(_PROGRAMS_PER_SM * sm_count, max(shape.batch * row_blocks, 1))
    longest = ceil_div(max(shape.lengths, default=0), _BLOCK_KEYS)
    return max(min(wanted, longest, _MOST_SPLITS), 1)


def _power_of_two(value: int) -> int:
    """The least power of two that is not below a positive number."""
    return 1 << (value - 1).bit_length()


def _sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
