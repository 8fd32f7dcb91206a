"""Workload of dense decode: flash_mla_with_kvcache over a paged cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ... import reference
from ...api import flash_mla_with_kvcache, get_mla_metadata, workspace_size
from ...spec.dense_decode import FP8, LATENT
from ...spec.mla import ceil_div
from ...testing.cases.dense_decode import DESCALE_K, DESCALE_Q, descale_tensor
from ...testing.compare import DENSE_DECODE_OUT, FP8_DENSE_OUT, LSE
from ..shapes import DecodeShape
from .operands import first_tokens, generator, page_order, values
from .workload import DTYPES, MOST_SAMPLES, Results, Workload

_UNUSED_PAGE = 2147480000  # fills table entries beyond a request's length, which must never be read


@dataclass(frozen=True)
class Operands:
    """Tensors of one flash_mla_with_kvcache call. descales: of q and of the cache, None for 16-bit operands."""

    q: torch.Tensor
    k_cache: torch.Tensor
    block_table: torch.Tensor
    descales: tuple[torch.Tensor | None, torch.Tensor | None]
    out: torch.Tensor
    lse: torch.Tensor


class DenseDecode(Workload[Operands]):
    """Decodes over pages in random order; q and cache are e4m3 with descales if the shape's operands say so."""

    def prepare(self) -> None:
        """Set the tolerances; make lengths, plan and workspace."""
        assert isinstance(self.case.shape, DecodeShape)
        self.shape = shape = self.case.shape
        self.causal = shape.s_q > 1
        self.cu_seqlens_q = first_tokens(shape.tokens, self.device)
        self.total_q = sum(shape.tokens) if shape.tokens else None
        self.tolerances = {"out": FP8_DENSE_OUT if shape.operands == FP8 else DENSE_DECODE_OUT, "lse": LSE}
        self.cache_seqlens = torch.tensor(shape.lengths, dtype=torch.int32, device=self.device)
        self.metadata, self.num_splits = self.plan()
        nbytes = workspace_size(
            "dense_decode", batch=shape.batch, s_q=shape.s_q, h_q=shape.h_q, h_kv=shape.h_kv, total_q=self.total_q, device=self.device
        )
        self.workspace = torch.empty(max(nbytes, 1), dtype=torch.uint8, device=self.device)

    @property
    def has_plan(self) -> bool:
        """True."""
        return True

    def plan(self) -> Any:
        """Make a new plan on the device."""
        shape = self.shape
        rows = shape.s_q * (shape.h_q // shape.h_kv)
        offsets, total_q = self.cu_seqlens_q, self.total_q
        return get_mla_metadata(self.cache_seqlens, rows, shape.h_kv, shape.h_q, cu_seqlens_q=offsets, total_q=total_q)

    def make_operands(self, seed: int) -> Operands:
        """Allocate one operand set."""
        shape, dtype, device = self.shape, DTYPES[self.case.dtype], self.device
        scales = DESCALE_Q if shape.operands == FP8 else None, None if shape.operands == LATENT else DESCALE_K
        draw = generator(device, seed)
        pages = [ceil_div(length, shape.page_size) for length in shape.lengths]
        pool = max(sum(pages), 1)
        order = page_order(torch.device("cpu"), pool, seed)
        table = torch.full((shape.batch, max([*pages, 1])), _UNUSED_PAGE, dtype=torch.int32)
        first = 0
        for request, count in enumerate(pages):
            table[request, :count] = order[first : first + count]
            first += count

        def scaled_values(scale: float | None, *size: int) -> torch.Tensor:
            drawn = values(draw, dtype, *size)
            return drawn if scale is None else drawn.div_(scale).to(torch.float8_e4m3fn)

        tokens = (shape.batch, shape.s_q) if self.total_q is None else (self.total_q,)
        return Operands(
            q=scaled_values(scales[0], *tokens, shape.h_q, shape.d_qk),
            k_cache=scaled_values(scales[1], pool, shape.page_size, shape.h_kv, shape.d_qk),
            block_table=table.to(device),
            descales=(descale_tensor(scales[0], device), descale_tensor(scales[1], device)),
            out=torch.full((*tokens, shape.h_q, shape.d_v), math.nan, dtype=dtype, device=device),
            lse=torch.full((tokens[0], shape.h_q, *tokens[1:]), math.nan, dtype=torch.float32, device=device),
        )

    def call(self, operands: Operands) -> None:
        """Call dense decode, with combine if requests may be split."""
        flash_mla_with_kvcache(
            operands.q,
            operands.k_cache,
            operands.block_table,
            self.cache_seqlens,
            self.shape.d_v,
            self.metadata,
            self.num_splits,
            causal=self.causal,
            descale_q=operands.descales[0],
            descale_k=operands.descales[1],
            out=operands.out,
            lse=operands.lse,
            workspace=self.workspace,
            cu_seqlens_q=self.cu_seqlens_q,
            max_seqlen_q=None if self.cu_seqlens_q is None else self.shape.s_q,
        )

    def _tokens(self, sample: int) -> slice:
        """Return the packed query tokens of a request."""
        end = sum(self.shape.tokens[: sample + 1])
        return slice(end - self.shape.tokens[sample], end)

    def results(self, operands: Operands) -> Results:
        """Return out and lse."""
        return {"out": operands.out, "lse": operands.lse}

    def samples(self) -> tuple[int, ...]:
        """Return the requests to check."""
        return sample_requests(self.shape.lengths)

    def part(self, results: Results, sample: int) -> Results:
        """Return out [h_q, s_q, d_v] and lse [h_q, s_q] of a request."""
        if self.shape.tokens:
            return {name: tensor[self._tokens(sample)].transpose(0, 1) for name, tensor in results.items()}
        return {name: tensor[sample].transpose(0, 1) if name == "out" else tensor[sample] for name, tensor in results.items()}

    def expected(self, operands: Operands, sample: int) -> Results:
        """Return a request's results. The heads of a KV head become rows of one product, so that no head needs a copy of the cache."""
        shape = self.shape
        length, group = shape.lengths[sample], shape.h_q // shape.h_kv
        descale_q, descale_k = operands.descales
        k = reference.gather_pages(operands.k_cache, operands.block_table[sample], length)
        k = reference.scaled(k, descale_k).transpose(0, 1)  # [h_kv, length, d_qk]
        s_q = shape.query_tokens[sample]
        own = operands.q[self._tokens(sample) if shape.tokens else sample]
        q = reference.scaled(own, descale_q).transpose(0, 1).reshape(shape.h_kv, group * s_q, shape.d_qk)
        visible = reference.visible_keys(s_q, length, self.causal, q.device).repeat(group, 1)
        out, lse = reference.attention(q, k, k[..., : shape.d_v], shape.d_qk**-0.5, visible)
        return {"out": out.reshape(shape.h_q, s_q, shape.d_v), "lse": lse.reshape(shape.h_q, s_q)}


def sample_requests(lengths: Sequence[int]) -> tuple[int, ...]:
    """Return at most MOST_SAMPLES requests: first, last, longest, shortest, middle."""
    if not lengths:
        return ()
    by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
    candidates = (0, len(lengths) - 1, by_length[-1], by_length[0], len(lengths) // 2)
    return tuple(sorted(set(candidates)))[:MOST_SAMPLES]
