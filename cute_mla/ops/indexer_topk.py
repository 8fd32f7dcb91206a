"""indexer_topk: the keys with the greatest logits, of so many query tokens at a time that their logits fit into a bounded workspace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ..runtime.current import device_for
from ..runtime.device import Device
from ..spec.mla import ceil_div
from ..spec.mqa_logits import MAX_KEYS
from ..spec.topk_indices import BLOCKS_PER_SM, CLUSTERS, MAX_TOPK
from . import mqa_logits, topk_indices
from .arguments import check_flag, check_integer, check_no_grad
from .mqa_logits import ROW_ALIGNMENT, Pages, Rows
from .overlap import check_no_overlap
from .strides import output_strides
from .tensor_spec import check_address, check_last_contiguous, check_workspace, operand_spec, optional_spec
from .topk_indices import Keys

LOGITS_BYTES = 64 << 20  # most of a workspace
SHORT_ROW_BYTES, OF_SHORT_ROWS = 1 << 19, 40 << 20  # most of a workspace for rows of 131,072 logits or fewer
LOGIT_BYTES = 4
_ROWS_STEP = 8  # rows of a chunk, so that work items of mqa_logits are whole
_LEAST_WAVE = 0.8  # of the CTAs that run at once
_WORKSPACE_ALIGNMENT = 16  # bytes
_MAX_SLOTS = (1 << 31) - 1


class Chunks(NamedTuple):
    """Division of query tokens: chunks of whole requests, or of tokens of a request where a whole one's logits do not fit."""

    batch: int
    tokens: int
    requests_each: int
    tokens_each: int

    @property
    def rows(self) -> int:
        """Return the most rows of logits that a chunk has."""
        return min(self.requests_each, self.batch) * min(self.tokens_each, self.tokens)

    def slices(self) -> Iterator[tuple[slice, slice]]:
        """Yield the requests and the tokens of each chunk."""
        for request in range(0, self.batch, self.requests_each):
            for token in range(0, self.tokens, self.tokens_each):
                requests, tokens = min(request + self.requests_each, self.batch), min(token + self.tokens_each, self.tokens)
                yield slice(request, requests), slice(token, tokens)


class Division(NamedTuple):
    """Division of a call. columns: of the logits. row_stride: elements between rows of them. is_scored: False if all keys are chosen."""

    chunks: Chunks
    columns: int
    row_stride: int
    is_scored: bool

    @property
    def nbytes(self) -> int:
        """Return the bytes of the workspace."""
        return self.chunks.rows * self.row_stride * LOGIT_BYTES if self.is_scored else 0


def divide(batch: int, tokens: int, columns: int, topk: int, sm_count: int, logits_bytes: int = LOGITS_BYTES) -> Division:
    """Divide a call of `tokens` query tokens a request, each with at most `columns` keys, so that logits take at most logits_bytes.

    Of short rows they take at most OF_SHORT_ROWS. ValueError if not even one row of logits fits.
    """
    row_stride = ceil_div(columns, ROW_ALIGNMENT) * ROW_ALIGNMENT
    row_bytes, is_scored = row_stride * LOGIT_BYTES, columns > topk > 0
    if is_scored and row_bytes > logits_bytes:
        raise ValueError(f"a query token has up to {columns} keys; supported: to {logits_bytes // LOGIT_BYTES}")
    most = max(batch * tokens, 1)
    if is_scored:
        fitting = (min(logits_bytes, OF_SHORT_ROWS) if row_bytes <= SHORT_ROW_BYTES else logits_bytes) // row_bytes
        most = most if most <= fitting else _whole_waves(fitting, sm_count)
    whole = max(most // max(tokens, 1), 1)
    return Division(Chunks(batch, tokens, whole, min(most, max(tokens, 1))), columns, row_stride, is_scored)


def _whole_waves(fitting: int, sm_count: int) -> int:
    """Return the rows of a chunk, of those that fit: as many as fill all SMs with CTAs of the selection, 1, 2, 4 or 8 a row."""
    for cluster in CLUSTERS:
        wave = BLOCKS_PER_SM * sm_count // cluster
        if fitting >= max(_LEAST_WAVE * wave, _ROWS_STEP):
            return min(max(fitting // max(wave, 1), 1) * wave, fitting) // _ROWS_STEP * _ROWS_STEP
    return fitting


def run_pages(
    q: torch.Tensor,
    weights: torch.Tensor,
    index_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    topk: int,
    *,
    slots: bool = False,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Choose keys of an index cache, with the arguments of api.indexer_topk.indexer_topk."""
    slots = check_flag("slots", slots)
    topk = check_integer("topk", topk, 0, MAX_TOPK)
    operands = Pages(q, index_cache, weights, context_lens, block_table)
    call = mqa_logits.check(operands, MAX_KEYS, False, None, "index_cache")
    device = device_for(q.device, "indexer_topk")
    scored = mqa_logits.plan(call, device.sm_count)
    mqa_logits.check_addresses(call, operands)
    batch, tokens = q.shape[:2]
    columns, page_size, pages = scored.scalars["keys"], scored.scalars["page_size"], scored.scalars["pages"]
    if slots and pages * page_size > _MAX_SLOTS:
        raise ValueError(f"index_cache has shape {list(index_cache.shape)} with slots; supported: to {_MAX_SLOTS} slots")
    planned = divide(batch, tokens, columns, topk, device.sm_count)
    out, logits = _memory(device, planned, operands, topk, workspace, out)
    ends = context_lens
    if planned.chunks.tokens_each < tokens and ends.dim() == 1:
        ends = _ends_of_tokens(context_lens, tokens, columns)
    for requests, part in planned.chunks.slices():
        count = part.stop - part.start
        rows = slice(requests.start * tokens + part.start, (requests.stop - 1) * tokens + part.stop)
        table, own = block_table[requests], ends[requests] if ends.dim() == 1 else ends[requests, part].contiguous()
        view = None
        if logits is not None:
            view = _rows_of(device, logits, planned, rows)
            taken = Pages(q[requests, part], index_cache, weights[rows], own, table)
            mqa_logits.launch(mqa_logits.check(taken, columns, False, view), taken, view)
        keys = Keys(None, own, table if slots else None, columns, count, own.dim() == 2, page_size if slots else 0, pages if slots else 0)
        topk_indices.select(device, view, columns, keys, out[rows])
    return out


def run_rows(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    topk: int,
    *,
    max_seqlen_k: int | None = None,
    workspace: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Choose keys in a row, with the arguments of api.indexer_topk.indexer_topk_prefill."""
    topk = check_integer("topk", topk, 0, MAX_TOPK)
    operands = mqa_logits.rows_of(q, kv, weights, ks, ke)
    call = mqa_logits.check(operands, 1, False, None)
    device = device_for(q.device, "indexer_topk")
    total = mqa_logits.plan(call, device.sm_count).scalars["keys"]
    mqa_logits.check_addresses(call, operands)
    columns = total if max_seqlen_k is None else min(check_integer("max_seqlen_k", max_seqlen_k, 0), total)
    planned = divide(q.shape[0], 1, columns, topk, device.sm_count)
    out, logits = _memory(device, planned, operands, topk, workspace, out)
    for rows, _ in planned.chunks.slices():
        view = None
        if logits is not None:
            view = _rows_of(device, logits, planned, rows)
            taken = Rows(q[rows], operands.kv, operands.kv_scale, weights[rows], ks[rows], ke[rows])
            mqa_logits.launch(mqa_logits.check(taken, columns, False, view), taken, view)
        keys = Keys(ks[rows], ke[rows], None, total, 1, True, 0, 0)
        topk_indices.select(device, view, columns, keys, out[rows])
    return out


def _memory(
    device: Device, planned: Division, operands: Rows | Pages, topk: int, workspace: Any, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return out, and the workspace as fp32 rows of logits, None if none are computed. ValueError unless the caller's tensors fit."""
    check_no_grad(out=out)
    q = operand_spec("q", operands.q)
    shape = (planned.chunks.batch * planned.chunks.tokens, topk)
    given = optional_spec("out", out)
    output_strides("out", given, shape, torch.int32, q)
    if given is not None:
        check_last_contiguous("out", given)
    if workspace is not None:
        check_workspace(workspace, planned.nbytes, q.device, "indexer_topk")
        check_address("workspace", workspace.data_ptr(), _WORKSPACE_ALIGNMENT)
    check_no_overlap({"out": out, "workspace": workspace}, operands._asdict())
    if out is None:
        out = operands.weights.new_empty(shape, dtype=torch.int32)
        device.mark_uninitialized(out)
    if not planned.nbytes:
        return out, None
    if workspace is None:
        workspace = operands.weights.new_empty(planned.nbytes, dtype=torch.uint8)
    flat = workspace.view(-1).view(torch.uint8)[: planned.nbytes].view(torch.float32)
    return out, flat.view(planned.chunks.rows, planned.row_stride)


def _rows_of(device: Device, logits: torch.Tensor, planned: Division, rows: slice) -> torch.Tensor:
    """Return logits [rows of a chunk, columns] in the workspace, where those of the chunk before count for nothing."""
    own = logits[: rows.stop - rows.start]
    device.mark_uninitialized(own)
    return own[:, : planned.columns]


def _ends_of_tokens(context_lens: torch.Tensor, tokens: int, most: int) -> torch.Tensor:
    """Return int32 [batch, tokens]: the keys that each query token sees, of lengths [batch]."""
    behind = torch.arange(1 - tokens, 1, dtype=torch.int32, device=context_lens.device)
    return context_lens.clamp(0, most).unsqueeze(1) + behind
