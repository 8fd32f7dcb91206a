"""sparse_prefill: attention of each query token over rows of an unpaged latent that its indices name, in one launch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..runtime.current import device_for
from ..spec.arch import Arch
from ..spec.dense_decode import MAX_KEYS, TILINGS
from ..spec.mla import D_V, LOG2E
from ..spec.sparse_prefill import MAX_TOKENS, SparsePrefillArguments, SparsePrefillProblem
from .arguments import check_columns, check_empty_lse, check_integer, check_no_grad, check_scale
from .indices import check_indices, check_queries, check_sink
from .launch_plan import LaunchPlan, named_strides
from .overlap import check_no_overlap
from .paged_cache import GATHER_ALIGNMENT, MAX_SLOTS
from .strides import alignment, check_rows, output_strides
from .tensor_spec import (
    DTYPE_NAMES,
    TensorSpec,
    address_of,
    check_address,
    check_counts,
    check_device,
    check_dtype,
    check_last_contiguous,
    check_shape,
    operand_spec,
    optional_spec,
)


class Operands(NamedTuple):
    """The tensors that a call reads."""

    q: torch.Tensor
    kv: torch.Tensor
    indices: torch.Tensor
    topk_length: torch.Tensor | None
    attn_sink: torch.Tensor | None
    kv_offsets: torch.Tensor | None


class Options(NamedTuple):
    """The arguments that are not tensors."""

    sm_scale: float
    d_v: int
    indexer_topk: int
    empty_lse: float


class Results(NamedTuple):
    """The tensors that a call writes; None: to be allocated, lse_indexer only with indexer_topk."""

    out: torch.Tensor | None
    max_logits: torch.Tensor | None
    lse: torch.Tensor | None
    lse_indexer: torch.Tensor | None = None


class CallSpec(NamedTuple):
    """Everything that decides on a launch, but for values and addresses.

    address_alignment: what strides.alignment gives for the addresses of q and of the caller's out.
    """

    q: TensorSpec
    kv: TensorSpec
    indices: TensorSpec
    topk_length: TensorSpec | None
    attn_sink: TensorSpec | None
    kv_offsets: TensorSpec | None
    out: TensorSpec | None
    max_logits: TensorSpec | None
    lse: TensorSpec | None
    lse_indexer: TensorSpec | None
    indexer_topk: int
    address_alignment: int

    @property
    def leading(self) -> tuple[int, ...]:
        """Return the dimensions that count tokens: (s_q,) or (batch, s_q)."""
        return tuple(self.q.shape[:-2])


@dataclass(frozen=True)
class SparsePrefillPlan(LaunchPlan):
    """The launch of a call. out_shape: shape of out. row_shape: shape of max_logits, lse and lse_indexer."""

    out_shape: tuple[int, ...]
    row_shape: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """Return whether there is no output to compute."""
        return 0 in self.out_shape


def run(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = D_V,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    indexer_topk: int = 0,
    *,
    kv_offsets: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    max_logits: torch.Tensor | None = None,
    lse_indexer: torch.Tensor | None = None,
    empty_lse: float = math.inf,
) -> tuple[torch.Tensor, ...]:
    """Attend to indexed rows, with the arguments of api.flashmla.flash_mla_sparse_fwd."""
    operands = Operands(q, kv, indices, topk_length, attn_sink, kv_offsets)
    given = Results(out, max_logits, lse, lse_indexer)
    options = check_options(Options(sm_scale, d_v, indexer_topk, empty_lse))
    call = check(operands, options, given)
    device = device_for(q.device, "sparse_prefill")
    launch_plan = plan(call, device.arch, device.sm_count)
    check_address("kv", kv.data_ptr(), GATHER_ALIGNMENT)
    check_no_overlap(given._asdict(), operands._asdict())
    rows = (max_logits, lse, lse_indexer) if call.indexer_topk else (max_logits, lse)
    results = (
        q.new_empty(launch_plan.out_shape) if out is None else out,
        *(q.new_empty(launch_plan.row_shape, dtype=torch.float32) if tensor is None else tensor for tensor in rows),
    )
    if not launch_plan.is_empty:
        device.mark_uninitialized(*results)
        args = SparsePrefillArguments(
            **operands._asdict(),
            **Results(*results)._asdict(),
            **launch_plan.scalars,
            scale_log2=options.sm_scale * LOG2E,
            empty_lse=options.empty_lse,
        )
        device.launch(device.kernel("sparse_prefill", launch_plan.kernel), launch_plan.grid, args, pdl=True)
    return results


def check_options(options: Options) -> Options:
    """Return the options as ints and floats. ValueError unless each is supported by itself."""
    return Options(
        sm_scale=check_scale("sm_scale", options.sm_scale),
        d_v=check_columns("d_v", options.d_v),
        indexer_topk=check_integer("indexer_topk", options.indexer_topk, 0),
        empty_lse=check_empty_lse(options.empty_lse),
    )


def check(operands: Operands, options: Options, results: Results) -> CallSpec:
    """Check each tensor by itself. ValueError unless it is supported. options: as check_options returns them."""
    indexer_topk = check_indexer(options.indexer_topk, results.lse_indexer)
    q, out = operands.q, results.out
    address_alignment = alignment(address_of("q", q), 0 if out is None else address_of("out", out))
    check_no_grad(q=q, kv=operands.kv, attn_sink=operands.attn_sink, **results._asdict())
    return CallSpec(
        q=operand_spec("q", q),
        kv=operand_spec("kv", operands.kv),
        indices=operand_spec("indices", operands.indices),
        topk_length=optional_spec("topk_length", operands.topk_length),
        attn_sink=optional_spec("attn_sink", operands.attn_sink),
        kv_offsets=optional_spec("kv_offsets", operands.kv_offsets),
        out=optional_spec("out", out),
        max_logits=optional_spec("max_logits", results.max_logits),
        lse=optional_spec("lse", results.lse),
        lse_indexer=optional_spec("lse_indexer", results.lse_indexer),
        indexer_topk=indexer_topk,
        address_alignment=address_alignment,
    )


def check_indexer(indexer_topk: Any, lse_indexer: torch.Tensor | None) -> int:
    """Return the indices that lse_indexer counts. ValueError unless they are a number, and not 0 with a tensor for the result."""
    count = check_integer("indexer_topk", indexer_topk, 0)
    if count == 0 and lse_indexer is not None:
        raise ValueError("lse_indexer is given with indexer_topk 0; supported: with indexer_topk 1 to topk")
    return count


@lru_cache(maxsize=4096)
def plan(call: CallSpec, arch: Arch, sm_count: int) -> SparsePrefillPlan:
    """Return the launch of a call on a device with sm_count SMs. ValueError unless its tensors fit together."""
    q = call.q
    check_queries(q, ("s_q",), ("batch", "s_q"))
    h_q, d_qk = q.shape[-2:]
    s_kv, kv_strides = _check_kv(call)
    topk = _check_tables(call)
    problem = SparsePrefillProblem(
        arch=arch,
        dtype=DTYPE_NAMES[q.dtype],
        d_qk=d_qk,
        batch=call.leading[0] if len(call.leading) == 2 else 1,
        s_q=call.leading[-1],
        h_q=h_q,
    )
    if problem.tokens > MAX_TOKENS:
        raise ValueError(f"q has shape {list(q.shape)}, {problem.tokens} query tokens; supported: to {MAX_TOKENS}")
    row_shape = (*call.leading, h_q)
    out_shape = (*row_shape, D_V)
    out_strides = output_strides("out", call.out, out_shape, q.dtype, q)
    if call.out is not None:
        check_last_contiguous("out", call.out)
    check_rows(TILINGS[arch.name].row_bytes, call.address_alignment, {"q": q}, {"out": call.out})
    return SparsePrefillPlan(
        kernel=problem.config.name,
        grid=problem.grid(sm_count),
        scalars={
            **named_strides("q", "batch token head", q.stride[:-1]),
            **named_strides("out", "batch token head", out_strides[:-1]),
            **named_strides("max_logits", "batch token head", output_strides("max_logits", call.max_logits, row_shape, torch.float32, q)),
            **named_strides("lse", "batch token head", output_strides("lse", call.lse, row_shape, torch.float32, q)),
            **named_strides("lse_indexer", "batch token head", _lse_indexer_strides(call, row_shape, topk)),
            **named_strides("indices", "batch token", call.indices.stride[:-2]),
            **named_strides("kv", "batch row", kv_strides),
            "tokens": problem.tokens,
            "s_q": problem.s_q,
            "h_q": h_q,
            "s_kv": s_kv,
            "topk": topk,
            "indexer_topk": call.indexer_topk,
        },
        out_shape=out_shape,
        row_shape=row_shape,
    )


def _lse_indexer_strides(call: CallSpec, shape: tuple[int, ...], topk: int) -> tuple[int, ...]:
    """Return the strides of lse_indexer, 0 if it is not asked for. ValueError unless tensor and number of indices fit the call."""
    check_integer("indexer_topk", call.indexer_topk, 0, topk)
    return output_strides("lse_indexer", call.lse_indexer, shape, torch.float32, call.q) if call.indexer_topk else (0,) * len(shape)


def _check_kv(call: CallSpec) -> tuple[int, tuple[int, int]]:
    """Return the rows of kv, of each request if kv has a batch, and the bytes between requests and between rows.

    ValueError if kernels cannot read kv.
    """
    q, kv, offsets = call.q, call.kv, call.kv_offsets
    batched = len(call.leading) == 2
    if offsets is not None:
        if not batched:
            raise ValueError(f"kv_offsets is given with q of shape {list(q.shape)}; supported: with q [batch, s_q, h_q, {q.shape[-1]}]")
        check_counts("kv_offsets", offsets, (call.leading[0] + 1,), q.device)
    row_shape = ("s_kv", 1, q.shape[-1])
    if batched and offsets is None:
        check_shape("kv", kv, (call.leading[0], *row_shape), " with a batch and no kv_offsets")
    else:
        check_shape("kv", kv, row_shape, " with kv_offsets" if batched else " without a batch")
    check_dtype("kv", kv, q.dtype)
    check_device("kv", kv, q.device)
    check_last_contiguous("kv", kv)
    rows = kv.shape[-3]
    if rows > MAX_SLOTS:
        raise ValueError(f"kv has shape {list(kv.shape)}; supported: s_kv to {MAX_SLOTS}")
    requests = 0 if len(kv.shape) == 3 else _byte_stride(kv, 0)
    return rows, (requests, _byte_stride(kv, len(kv.shape) - 3))


def _byte_stride(kv: TensorSpec, dimension: int) -> int:
    """Return the bytes between neighbours along a dimension, 0 if it has size 1. ValueError unless rows stay aligned."""
    stride = kv.stride[dimension] * kv.dtype.itemsize if kv.shape[dimension] > 1 else 0
    if stride % GATHER_ALIGNMENT:
        raise ValueError(
            f"kv has shape {list(kv.shape)} and strides {list(kv.stride)}, {stride} bytes along dimension {dimension}; "
            f"supported: multiples of {GATHER_ALIGNMENT} bytes"
        )
    return stride


def _check_tables(call: CallSpec) -> int:
    """Return the indices of a token. ValueError unless indices, lengths and sinks fit the queries."""
    check_indices("indices", call.indices, (*call.leading, 1, "topk"), call.q)
    topk = call.indices.shape[-1]
    if topk > MAX_KEYS:
        raise ValueError(f"indices has shape {list(call.indices.shape)}; supported: topk to {MAX_KEYS}")
    if call.topk_length is not None:
        check_counts("topk_length", call.topk_length, call.leading, call.q.device)
    check_sink(call.attn_sink, call.q)
    return topk
