"""One dense-decode row on a device: operands, the calls to time, and the proof that they compute the right answer.

Everything goes through the public API, with outputs and workspace given, so that a timed call allocates nothing. It runs
on a GPU or, for tests, on the simulated device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import reference
from ..api import flash_mla_with_kvcache, get_mla_metadata, workspace_size
from ..spec.dense_decode import FP8, LATENT
from ..spec.mla import D_QK, D_V, ceil_div
from ..testing.cases import DESCALE_K, DESCALE_Q, descale_tensor
from ..testing.compare import DENSE_DECODE_OUT, FP8_DENSE_OUT, LSE, compare
from .rows import Case
from .shapes import DecodeShape
from .timing import rotation_sets

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_UNUSED_PAGE = 2147480000  # in table entries beyond a request's length, which must never be read
_POISON_BYTE = 0xFF  # NaN in every float type here
_SAMPLED_REQUESTS = 5


@dataclass(frozen=True)
class Operands:
    """One set of tensors of a call, as flash_mla_with_kvcache describes them."""

    q: torch.Tensor
    k_cache: torch.Tensor
    block_table: torch.Tensor
    descales: tuple[torch.Tensor | None, torch.Tensor | None]
    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class Check:
    """A comparison with the fp32 reference on some requests. reason: empty if all passed."""

    reason: str
    out_max_abs: float
    out_cos_diff: float
    lse_max_abs: float
    requests: tuple[int, ...]

    @property
    def passed(self) -> bool:
        """Whether everything compared was within bounds."""
        return not self.reason


class DecodeBench:
    """The operands of a case: several sets of equal shapes and lengths, other values and page orders.

    Timed calls share cache_seqlens, the plan and the workspace.
    """

    def __init__(self, case: Case, device: torch.device, l2_bytes: int) -> None:
        if not isinstance(case.shape, DecodeShape):
            raise ValueError(f"case {case.name} belongs to {case.op}; supported: dense_decode")
        self.case = case
        self.shape = case.shape
        self.device = device
        self.causal = self.shape.s_q > 1
        self.cache_seqlens = torch.tensor(self.shape.lengths, dtype=torch.int32, device=device)
        self.metadata, self.num_splits = self.plan()
        nbytes = workspace_size(
            "dense_decode", batch=self.shape.batch, s_q=self.shape.s_q, h_q=self.shape.h_q, h_kv=self.shape.h_kv, device=device
        )
        self.workspace = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=device)
        count = rotation_sets(set_bytes(case), l2_bytes)
        self.sets = [make_operands(case, device, case.seed + index) for index in range(count)]

    def plan(self) -> Any:
        """Plans the work on the device, anew."""
        shape = self.shape
        rows = shape.s_q * (shape.h_q // shape.h_kv)
        return get_mla_metadata(self.cache_seqlens, rows, shape.h_kv, shape.h_q)

    def call(self, operands: Operands) -> None:
        """The timed call: dense decode, and combine where requests are split."""
        flash_mla_with_kvcache(
            operands.q,
            operands.k_cache,
            operands.block_table,
            self.cache_seqlens,
            D_V,
            self.metadata,
            self.num_splits,
            causal=self.causal,
            descale_q=operands.descales[0],
            descale_k=operands.descales[1],
            out=operands.out,
            lse=operands.lse,
            workspace=self.workspace,
        )

    def poison(self) -> None:
        """Fills every output and the workspace with NaN, so that a result left over from before cannot pass."""
        self.workspace.fill_(_POISON_BYTE)
        for operands in self.sets:
            operands.out.fill_(math.nan)
            operands.lse.fill_(math.nan)

    def check(self, written: Sequence[Operands], compared: Sequence[Operands]) -> Check:
        """Looks for NaN in all outputs of the written sets, and compares a sample of requests of some with the reference."""
        requests = sample_requests(self.shape.lengths)
        tolerance = FP8_DENSE_OUT if self.shape.operands == FP8 else DENSE_DECODE_OUT
        reasons, out_abs, out_cos, lse_abs = [], 0.0, 0.0, 0.0
        if any(bool(tensor.isnan().any()) for operands in written for tensor in (operands.out, operands.lse)):
            reasons.append("out or lse has NaN, or was not written everywhere")
        for operands in compared:
            for request in requests:
                expected_out, expected_lse = reference_request(operands, request, self.shape, self.causal)
                out = compare(f"out[{request}]", operands.out[request].transpose(0, 1), expected_out, tolerance)
                lse = compare(f"lse[{request}]", operands.lse[request], expected_lse, LSE)
                reasons += [result.reason for result in (out, lse) if not result.passed]
                out_abs, out_cos, lse_abs = max(out_abs, out.max_abs), max(out_cos, out.cos_diff), max(lse_abs, lse.max_abs)
        return Check("; ".join(dict.fromkeys(reasons)), out_abs, out_cos, lse_abs, requests)


def set_bytes(case: Case) -> int:
    """Bytes of one operand set, as far as they pass through L2: the compulsory bytes of the case."""
    return int(case.work.bytes)


def sample_requests(lengths: Sequence[int]) -> tuple[int, ...]:
    """Requests worth checking, a few at most: first, last, longest, shortest, middle."""
    if not lengths:
        return ()
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    candidates = (0, len(lengths) - 1, by_length[-1], by_length[0], len(lengths) // 2)
    return tuple(sorted(set(candidates)))[:_SAMPLED_REQUESTS]


def make_operands(case: Case, device: torch.device, seed: int) -> Operands:
    """Values N(0, 0.1) clamped to [-1, 1], as scales and e4m3 where the operands say so, pages in random order, NaN in the
    outputs."""
    assert isinstance(case.shape, DecodeShape)
    shape, dtype = case.shape, _DTYPES[case.dtype]
    scales = DESCALE_Q if shape.operands == FP8 else None, None if shape.operands == LATENT else DESCALE_K
    generator = torch.Generator(device=device).manual_seed(seed)
    pages = [ceil_div(length, shape.page_size) for length in shape.lengths]
    pool = max(sum(pages), 1)

    def random_tensor(scale: float | None, *size: int) -> torch.Tensor:
        values = torch.empty(size, dtype=dtype, device=device)
        values.normal_(0.0, 0.1, generator=generator).clamp_(-1.0, 1.0)
        return values if scale is None else values.div_(scale).to(torch.float8_e4m3fn)

    order = torch.randperm(pool, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    table = torch.full((shape.batch, max([*pages, 1])), _UNUSED_PAGE, dtype=torch.int32)
    first = 0
    for request, count in enumerate(pages):
        table[request, :count] = order[first : first + count]
        first += count
    return Operands(
        q=random_tensor(scales[0], shape.batch, shape.s_q, shape.h_q, D_QK),
        k_cache=random_tensor(scales[1], pool, shape.page_size, shape.h_kv, D_QK),
        block_table=table.to(device),
        descales=(descale_tensor(scales[0], device), descale_tensor(scales[1], device)),
        out=torch.full((shape.batch, shape.s_q, shape.h_q, D_V), math.nan, dtype=dtype, device=device),
        lse=torch.full((shape.batch, shape.h_q, shape.s_q), math.nan, dtype=torch.float32, device=device),
    )


def reference_request(operands: Operands, request: int, shape: DecodeShape, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """out fp32 [h_q, s_q, 512] and lse fp32 [h_q, s_q] of one request.

    The heads of a KV head are rows beside each other, so that 128k keys need no copy of the cache per head.
    """
    length, group = shape.lengths[request], shape.h_q // shape.h_kv
    descale_q, descale_k = operands.descales
    k = reference.gather_pages(operands.k_cache, operands.block_table[request], length)
    k = reference.scaled(k, descale_k).transpose(0, 1)  # [h_kv, length, 576]
    q = reference.scaled(operands.q[request], descale_q).transpose(0, 1).reshape(shape.h_kv, group * shape.s_q, D_QK)
    visible = reference.visible_keys(shape.s_q, length, causal, q.device).repeat(group, 1)
    out, lse = reference.attention(q, k, k[..., :D_V], D_QK**-0.5, visible)
    return out.reshape(shape.h_q, shape.s_q, D_V), lse.reshape(shape.h_q, shape.s_q)
