"""The backward of sparse prefill: statistics of the rows; then by chunks of tokens dQ, rows for the latent, their lists and sums."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..runtime.current import device_for
from ..runtime.device import Device
from ..spec import row_statistics, sparse_prefill_dkv, sparse_prefill_dq
from ..spec.arch import Arch
from ..spec.dense_decode import TILE_ROWS
from ..spec.mla import D_V, ELEMENT_BYTES, LOG2E
from ..spec.row_statistics import RowStatisticsArguments, RowStatisticsConfig
from ..spec.sparse_prefill_dkv import SparsePrefillDkvArguments
from ..spec.sparse_prefill_dq import SparsePrefillDqArguments
from ..spec.split_plan import TILE_KEYS
from ..spec.tensor_map import Swizzle, TensorMap
from . import sparse_prefill
from .arguments import NO_DOUBLE_BACKWARD, check_flag, check_integer, check_no_grad
from .fixed_sums import neighbour_sums
from .key_lists import DEFAULT_WORKSPACE, FLOAT_BYTES, Entries, IndexedKeys, KeyPlan, RowSums, check_accumulated, planned_tokens
from .launch_plan import LaunchPlan, named_strides
from .overlap import check_no_overlap
from .strides import TMA_ALIGNMENT, as_rows, check_rows, output_strides
from .tensor_spec import (
    DTYPE_NAMES,
    TensorSpec,
    check_address,
    check_device,
    check_dtype,
    check_last_contiguous,
    check_shape,
    operand_spec,
    optional_spec,
)

BOX_COLUMNS = 64


class Results(NamedTuple):
    """The tensors that a call writes, if the caller gives them."""

    dq: torch.Tensor | None
    dkv: torch.Tensor | None
    d_sink: torch.Tensor | None


class Rows(NamedTuple):
    """Tensors of query rows that a call takes beside q."""

    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None


class Limits(NamedTuple):
    """The arguments that are not tensors, beside those of the forward."""

    dkv_accumulate: bool
    max_workspace: int
    key_plan: KeyPlan | None


class CallSpec(NamedTuple):
    """Everything that decides on the launches, but for values and addresses. forward: the call whose gradients these are."""

    forward: sparse_prefill.CallSpec
    dout: TensorSpec
    dlse: TensorSpec | None
    dq: TensorSpec | None
    dkv: TensorSpec | None
    d_sink: TensorSpec | None
    key_plan: tuple[TensorSpec, ...] | None
    accumulate: bool
    max_workspace: int


@dataclass(frozen=True)
class SparsePrefillBackwardPlan(LaunchPlan):
    """The launches of a call. kernel, grid: of dQ over all tokens. chunk_tokens: that the launches of a chunk take."""

    chunk_tokens: int


@dataclass(frozen=True)
class Saved:
    """Operands and results of the forward, all with a batch in front.

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


def run(
    q: torch.Tensor,
    kv: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = D_V,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    *,
    kv_offsets: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
    key_plan: tuple[torch.Tensor, torch.Tensor] | None = None,
    dkv_accumulate: bool = False,
    max_workspace: int = DEFAULT_WORKSPACE,
    dq: torch.Tensor | None = None,
    dkv: torch.Tensor | None = None,
    d_sink: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of sparse prefill, with the arguments of api.flashmla.flash_mla_sparse_bwd."""
    operands = sparse_prefill.Operands(q, kv, indices, topk_length, attn_sink, kv_offsets)
    options = sparse_prefill.check_options(sparse_prefill.Options(sm_scale, d_v, 0, math.inf))
    results, rows = Results(dq, dkv, d_sink), Rows(out, lse, dout, dlse)
    limits = Limits(dkv_accumulate, max_workspace, KeyPlan.given(key_plan))
    call = check(operands, options, rows, results, limits)
    device = device_for(q.device, "sparse_prefill_backward")
    launch_plan = plan(call, device.arch, device.sm_count)
    check_address("kv", kv.data_ptr(), TMA_ALIGNMENT)
    check_no_overlap(results._asdict(), {**operands._asdict(), **rows._asdict()})
    dq = q.new_empty(q.shape) if dq is None else dq
    check_address("dq", dq.data_ptr(), TMA_ALIGNMENT)
    dkv = kv.new_empty(kv.shape) if dkv is None else dkv
    d_sink = q.new_zeros(q.shape[-2], dtype=torch.float32) if d_sink is None else d_sink
    device.mark_uninitialized(dq, *(() if call.accumulate else (dkv,)))
    saved = _saved(operands, rows, options.sm_scale, limits.key_plan)
    gradients = Results(_batched(dq, 4), dkv.reshape(-1, dkv.shape[-1]), d_sink)
    _launch(device, launch_plan, saved, rows, gradients, call.accumulate)
    return dq, dkv, d_sink


def check(operands: sparse_prefill.Operands, options: sparse_prefill.Options, rows: Rows, results: Results, limits: Limits) -> CallSpec:
    """Check each argument by itself. ValueError unless it is supported. options: as sparse_prefill.check_options returns them."""
    check_no_grad(NO_DOUBLE_BACKWARD, **rows._asdict(), **results._asdict())
    accumulate = check_flag("dkv_accumulate", limits.dkv_accumulate)
    for name in ("out", "lse"):  # which a forward call may leave out
        operand_spec(name, getattr(rows, name))
    return CallSpec(
        forward=sparse_prefill.check(operands, options, sparse_prefill.Results(rows.out, None, rows.lse)),
        dout=operand_spec("dout", rows.dout),
        dlse=optional_spec("dlse", rows.dlse),
        dq=optional_spec("dq", results.dq),
        dkv=optional_spec("dkv", results.dkv),
        d_sink=optional_spec("d_sink", results.d_sink),
        key_plan=None if limits.key_plan is None else limits.key_plan.specs(),
        accumulate=accumulate,
        max_workspace=check_integer("max_workspace", limits.max_workspace, 0),
    )


@lru_cache(maxsize=4096)
def plan(call: CallSpec, arch: Arch, sm_count: int) -> SparsePrefillBackwardPlan:
    """Return the launches of a call on a device with sm_count SMs. ValueError unless its tensors fit together."""
    forward, q, kv = sparse_prefill.plan(call.forward, arch, sm_count), call.forward.q, call.forward.kv
    check_shape("dout", call.dout, forward.out_shape)
    check_dtype("dout", call.dout, q.dtype)
    check_device("dout", call.dout, q.device)
    output_strides("dlse", call.dlse, forward.row_shape, torch.float32, q)
    output_strides("dq", call.dq, q.shape, q.dtype, q)
    if call.dq is not None:
        check_last_contiguous("dq", call.dq)
        check_rows(TMA_ALIGNMENT, TMA_ALIGNMENT, {}, {"dq": call.dq})
    check_accumulated("dkv", call.dkv, kv, call.accumulate)
    if call.d_sink is not None:
        output_strides("d_sink", call.d_sink, (q.shape[-2],), torch.float32, q)
    chunk = _chunk_tokens(call)
    row_ctas, _, _ = forward.grid
    return SparsePrefillBackwardPlan(sparse_prefill_dq.config_for(arch, q.shape[-1], q.shape[-2]).name, (row_ctas, 1, chunk), {}, chunk)


def _chunk_tokens(call: CallSpec) -> int:
    """Return the tokens of a chunk, at least 1: those of the plan, or as many as max_workspace has room for."""
    *leading, h_q, d_qk = call.forward.q.shape
    entries = Entries(math.prod(leading), call.forward.indices.shape[-1], math.prod(call.forward.kv.shape[:-2]))
    if call.key_plan is not None:
        return planned_tokens(call.key_plan, entries, call.forward.q.device)
    scores = 2 * sparse_prefill_dkv.tiles(entries.topk) * TILE_KEYS * h_q * ELEMENT_BYTES
    room = call.max_workspace - entries.tokens * h_q * 3 * FLOAT_BYTES
    return entries.chunk_tokens(scores + entries.topk * d_qk * ELEMENT_BYTES, d_qk, room)


def _batched(tensor: torch.Tensor, dimensions: int) -> torch.Tensor:
    """Return a tensor with a batch in front, of 1 if it lacks one."""
    return tensor if tensor.dim() == dimensions else tensor.unsqueeze(0)


def _saved(operands: sparse_prefill.Operands, rows: Rows, sm_scale: float, key_plan: KeyPlan | None) -> Saved:
    """Return what the launches take of the forward."""
    q, kv = _batched(operands.q, 4), operands.kv.squeeze(-2)
    if operands.kv_offsets is None:
        kv = _batched(kv, 3)
    lengths = None if operands.topk_length is None else _batched(operands.topk_length, 2)
    keys = IndexedKeys(_batched(operands.indices, 4).squeeze(-2), lengths, operands.kv_offsets, kv.shape[-2], key_plan)
    lse = _batched(rows.lse, 3)
    return Saved(as_rows(q), kv, as_rows(_batched(rows.out, 4)), lse, operands.attn_sink, keys, sm_scale)


def _launch(device: Device, launch_plan: SparsePrefillBackwardPlan, saved: Saved, rows: Rows, gradients: Results, accumulate: bool) -> None:
    """Launch everything. gradients: dq with a batch in front, dkv [keys, d_qk], d_sink."""
    dlse = None if rows.dlse is None else rows.dlse.contiguous()
    terms = launch_all(device, saved, as_rows(_batched(rows.dout, 4)), dlse, gradients, launch_plan.chunk_tokens, accumulate)
    assert gradients.d_sink is not None
    if terms is None:
        gradients.d_sink.zero_()
    else:
        gradients.d_sink.copy_(neighbour_sums(terms))


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
    strides = {"out": saved.out.stride()[:3], "dout": dout.stride()[:3], "lse": saved.lse.stride()}
    args = RowStatisticsArguments(
        out=saved.out,
        dout=dout,
        lse=saved.lse,
        dlse=dlse,
        attn_sink=saved.attn_sink,
        statistics=statistics,
        sink_terms=terms,
        **_head_strides(strides),
        rows=rows,
        s_q=saved.q.shape[1],
        h_q=saved.heads,
    )
    if not rows:
        return statistics, terms
    kernel = device.kernel("row_statistics", RowStatisticsConfig(DTYPE_NAMES[saved.q.dtype]).name)
    device.launch(kernel, row_statistics.grid(rows), args, pdl=True)
    return statistics, terms


def launch_dq(
    device: Device, saved: Saved, chunk: tuple[int, int], dout: torch.Tensor, statistics: torch.Tensor, dq: torch.Tensor
) -> ScoreGradients:
    """Launch sparse_prefill_dq over a chunk of tokens: write their rows of dq, and return P and dS."""
    q, keys = saved.q, saved.keys
    gradients = ScoreGradients.empty(device, q, chunk[1], keys.topk)
    config = sparse_prefill_dq.config_for(device.arch, q.shape[-1], saved.heads)
    args = SparsePrefillDqArguments(
        q_map=head_map(q),
        dout_map=head_map(dout),
        q=q,
        kv=saved.kv,
        statistics=statistics,
        dq=dq,
        probs=gradients.probs,
        dscores=gradients.dscores,
        **_head_strides({"q": q.stride()[:3], "dq": dq.stride()[:3]}),
        kv_stride_batch=saved.kv.stride(0) * ELEMENT_BYTES if saved.kv.dim() == 3 else 0,
        kv_stride_row=saved.kv.stride(-2) * ELEMENT_BYTES,
        sm_scale=saved.sm_scale,
        scale_log2=saved.sm_scale * LOG2E,
        inverse_scale=1 / saved.sm_scale,
        all_tokens=saved.tokens,
        h_q=saved.heads,
        **_chunk(keys, chunk),
    )
    grid = sparse_prefill_dq.grid(saved.heads, chunk[1], device.sm_count)
    device.launch(device.kernel("sparse_prefill_dq", config.name), grid, args, pdl=True)
    return gradients


def launch_rows(
    device: Device, call: IndexedKeys, chunk: tuple[int, int], queries: tuple[torch.Tensor, torch.Tensor], gradients: ScoreGradients
) -> torch.Tensor:
    """Launch sparse_prefill_dkv over a chunk of tokens. Return its rows, bf16 [tokens * topk, d_qk].

    queries: q [batch, s_q, h_q, d_qk] and dout [batch, s_q, h_q, 512], whose rows TMA can load.
    """
    q, dout = queries
    h_q, d_qk = q.shape[2:]
    rows = q.new_empty(chunk[1] * call.topk, d_qk)
    device.mark_uninitialized(rows)
    config = sparse_prefill_dkv.config_for(d_qk, h_q)
    probs_map, dscores_map = gradients.maps()
    args = SparsePrefillDkvArguments(
        q_map=head_map(q), dout_map=head_map(dout), probs_map=probs_map, dscores_map=dscores_map, rows=rows, **_chunk(call, chunk)
    )
    device.launch(device.kernel("sparse_prefill_dkv", config.name), config.grid(chunk[1], device.sm_count), args, pdl=True)
    return rows


def _head_strides(strides: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Name the strides of tensors by batch, token and head."""
    return {name: stride for tensor in strides for name, stride in named_strides(tensor, "batch token head", strides[tensor]).items()}


def _chunk(keys: IndexedKeys, chunk: tuple[int, int]) -> dict[str, Any]:
    """Return the arguments that say which tokens a launch takes, and what their indices mean."""
    return {
        "indices": keys.indices,
        "topk_length": keys.topk_length,
        "kv_offsets": keys.kv_offsets,
        **named_strides("indices", "batch token", keys.indices.stride()[:2]),
        "first_token": chunk[0],
        "tokens": chunk[1],
        "s_q": keys.indices.shape[1],
        "s_kv": keys.s_kv,
        "topk": keys.topk,
        "tiles": sparse_prefill_dkv.tiles(keys.topk),
    }


def launch_all(
    device: Device,
    saved: Saved,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    gradients: Results,
    chunk_tokens: int,
    accumulate: bool = False,
) -> torch.Tensor | None:
    """Compute dq and dkv, by chunks of so many tokens. Return what each row adds to d_sink [tokens, h_q], or None without sinks.

    gradients: dq with a batch in front, and dkv [keys, d_qk].
    """
    dq, dkv = gradients.dq, gradients.dkv
    assert dq is not None
    assert dkv is not None
    statistics, terms = launch_statistics(device, saved, dout, dlse)
    if not saved.tokens or not saved.keys.topk or not saved.keys.keys:
        dq.zero_()
        if not accumulate:
            dkv.zero_()
        return terms
    chunks = list(saved.keys.chunks(chunk_tokens))
    sums = saved.lse.new_empty(dkv.shape) if len(chunks) > 1 else None
    total = RowSums(dkv, sums, saved.sm_scale, accumulate)
    for number, chunk in enumerate(chunks):
        scores = launch_dq(device, saved, chunk, dout, statistics, dq)
        rows = launch_rows(device, saved.keys, chunk, (saved.q, dout), scores)
        del scores  # lest two chunks have memory at a time
        total.add(device, saved.keys.chunk_lists(device, number, chunk), rows, number == 0, number + 1 == len(chunks))
        del rows
    return terms
