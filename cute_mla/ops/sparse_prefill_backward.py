"""The backward of sparse prefill: statistics of the rows; then by chunks of tokens dQ, rows for the latent, their lists and sums."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..runtime.device import Device
from ..spec import row_statistics, sparse_prefill_dkv, sparse_prefill_dq
from ..spec.dense_decode import TILE_ROWS
from ..spec.mla import ELEMENT_BYTES, LOG2E
from ..spec.row_statistics import RowStatisticsArguments, RowStatisticsConfig
from ..spec.sparse_prefill_dkv import SparsePrefillDkvArguments
from ..spec.sparse_prefill_dq import SparsePrefillDqArguments
from ..spec.split_plan import TILE_KEYS
from ..spec.tensor_map import Swizzle, TensorMap
from .key_lists import IndexedKeys, RowSums
from .tensor_spec import DTYPE_NAMES

BOX_COLUMNS = 64


@dataclass(frozen=True)
class Saved:
    """What the backward takes of the forward. All with a batch in front.

    q: [batch, s_q, h_q, d_qk]. kv: [batch, s_kv, d_qk], or [s_kv, d_qk] with kv_offsets. out: [batch, s_q, h_q, 512]. lse: fp32 [batch,
    s_q, h_q]. attn_sink: fp32 [h_q], or None. keys: what the indices name.
    """

    q: torch.Tensor
    kv: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    attn_sink: torch.Tensor | None
    keys: IndexedKeys
    sm_scale: float

    @property
    def tokens(self) -> int:
        """Return the query tokens of all requests."""
        return self.q.shape[0] * self.q.shape[1]

    @property
    def heads(self) -> int:
        """Return the query heads."""
        return self.q.shape[2]


@dataclass(frozen=True)
class ScoreGradients:
    """P / sm_scale and dS of a chunk of tokens, bf16 [tokens, tiles, h_q, 64], as spec/sparse_prefill_dkv.py takes them."""

    probs: torch.Tensor
    dscores: torch.Tensor

    @staticmethod
    def empty(device: Device, q: torch.Tensor, tokens: int, topk: int) -> ScoreGradients:
        """Allocate them beside q."""
        probs, dscores = (q.new_empty(tokens, sparse_prefill_dkv.tiles(topk), q.shape[2], TILE_KEYS) for _ in range(2))
        device.mark_uninitialized(probs, dscores)
        return ScoreGradients(probs, dscores)

    def maps(self) -> tuple[TensorMap, TensorMap]:
        """Return their tensor maps."""
        return head_map(self.probs.flatten(0, 1)), head_map(self.dscores.flatten(0, 1))


def head_map(tensor: torch.Tensor) -> TensorMap:
    """Return a map of a tensor [.., heads, columns], with boxes of 64 columns of 64 heads. Strides are multiples of 16 bytes."""
    dims = tuple(reversed(tensor.shape))
    strides = tuple(
        stride * ELEMENT_BYTES if size > 1 else TILE_ROWS * ELEMENT_BYTES
        for size, stride in zip(dims[1:], reversed(tensor.stride()[:-1]), strict=True)
    )
    box = (BOX_COLUMNS, TILE_ROWS, *(1 for _ in dims[2:]))
    return TensorMap(DTYPE_NAMES[tensor.dtype], tensor.data_ptr(), dims, strides, box, Swizzle.B128)


def launch_statistics(
    device: Device, saved: Saved, dout: torch.Tensor, dlse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch row_statistics. Return fp32 [2, tokens, h_q], and what each row adds to d_sink [tokens, h_q], None without sinks.

    dlse: fp32 [batch, s_q, h_q] contiguous, or None.
    """
    statistics = saved.lse.new_empty(row_statistics.STATISTICS, saved.tokens, saved.heads)
    terms = None if saved.attn_sink is None else saved.lse.new_empty(saved.tokens, saved.heads)
    device.mark_uninitialized(statistics, *(() if terms is None else (terms,)))
    rows = saved.tokens * saved.heads
    args = RowStatisticsArguments(
        *(saved.out, dout, saved.lse, dlse, saved.attn_sink, statistics, terms),
        *(*saved.out.stride()[:3], *dout.stride()[:3], *saved.lse.stride()),
        *(rows, saved.q.shape[1], saved.heads),
    )
    kernel = device.kernel("row_statistics", RowStatisticsConfig(DTYPE_NAMES[saved.q.dtype]).name)
    device.launch(kernel, row_statistics.grid(rows), args, pdl=True)
    return statistics, terms


def launch_dq(
    device: Device, saved: Saved, chunk: tuple[int, int], dout: torch.Tensor, statistics: torch.Tensor, dq: torch.Tensor
) -> ScoreGradients:
    """Launch sparse_prefill_dq over a chunk of tokens: write their rows of dq, and return P and dS."""
    (first, tokens), q, keys = chunk, saved.q, saved.keys
    gradients = ScoreGradients.empty(device, q, tokens, keys.topk)
    config = sparse_prefill_dq.config_for(q.shape[-1])
    kv_batch = saved.kv.stride(0) * ELEMENT_BYTES if saved.kv.dim() == 3 else 0
    args = SparsePrefillDqArguments(
        *(head_map(q), head_map(dout), q, saved.kv, keys.kv_offsets, keys.indices, keys.topk_length, statistics, dq),
        *(gradients.probs, gradients.dscores, *q.stride()[:3], *dq.stride()[:3], *keys.indices.stride()[:2]),
        *(kv_batch, saved.kv.stride(-2) * ELEMENT_BYTES, saved.sm_scale, saved.sm_scale * LOG2E, 1 / saved.sm_scale),
        *(first, tokens, saved.tokens, q.shape[1], saved.heads, keys.s_kv, keys.topk, sparse_prefill_dkv.tiles(keys.topk)),
    )
    grid = sparse_prefill_dq.grid(saved.heads, tokens, device.sm_count)
    device.launch(device.kernel("sparse_prefill_dq", config.name), grid, args, pdl=True)
    return gradients


def launch_rows(
    device: Device, call: IndexedKeys, chunk: tuple[int, int], queries: tuple[torch.Tensor, torch.Tensor], gradients: ScoreGradients
) -> torch.Tensor:
    """Launch sparse_prefill_dkv over a chunk of tokens. Return its rows, bf16 [tokens * topk, d_qk].

    queries: q [batch, s_q, h_q, d_qk] and dout [batch, s_q, h_q, 512], whose rows TMA can load.
    """
    (first, tokens), q = chunk, queries[0]
    h_q, d_qk = q.shape[2:]
    rows = q.new_empty(tokens * call.topk, d_qk)
    device.mark_uninitialized(rows)
    config = sparse_prefill_dkv.config_for(d_qk, h_q)
    strides = call.indices.stride()
    args = SparsePrefillDkvArguments(
        *(head_map(tensor) for tensor in queries),
        *gradients.maps(),
        *(call.indices, call.topk_length, call.kv_offsets, rows, strides[0], strides[1], first, tokens, q.shape[1]),
        *(call.s_kv, call.topk, sparse_prefill_dkv.tiles(call.topk)),
    )
    device.launch(device.kernel("sparse_prefill_dkv", config.name), config.grid(tokens, device.sm_count), args, pdl=True)
    return rows


def launch_all(
    device: Device,
    saved: Saved,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    dq: torch.Tensor,
    dkv: torch.Tensor,
    chunk_tokens: int,
    accumulate: bool = False,
) -> torch.Tensor | None:
    """Compute all gradients, by chunks of so many tokens. Return d_sink, fp32 [h_q], or None without sinks. dkv: [keys, d_qk]."""
    statistics, terms = launch_statistics(device, saved, dout, dlse)
    if not saved.keys.topk or not saved.keys.keys:
        dq.zero_()
        if not accumulate:
            dkv.zero_()
        return None if terms is None else terms.sum(dim=0)
    chunks = list(saved.keys.chunks(chunk_tokens))
    sums = saved.lse.new_empty(dkv.shape) if len(chunks) > 1 else None
    total = RowSums(dkv, sums, saved.sm_scale, accumulate)
    for number, chunk in enumerate(chunks):
        gradients = launch_dq(device, saved, chunk, dout, statistics, dq)
        rows = launch_rows(device, saved.keys, chunk, (saved.q, dout), gradients)
        total.add(device, saved.keys.lists(device, chunk), rows, number == 0, number + 1 == len(chunks))
    return None if terms is None else terms.sum(dim=0)
