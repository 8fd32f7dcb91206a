"""Decode plans: the parts of check and plan that dense and sparse decode share.

A decode call is one launch or two. The CTAs of the decode kernel leave partial results of split requests in the workspace, and combine
merges them. A call launches combine if its plan could split a request.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from ..spec.cache_rows import KNOWN
from ..spec.combine import CombineConfig
from ..spec.combine import grid as combine_grid
from ..spec.dense_decode import DenseDecodeProblem
from ..spec.sparse_decode import SparseDecodeProblem
from ..spec.split_plan import RaggedQueries, accumulator_rows
from ..spec.tensor_map import TensorMap
from .arguments import check_columns, check_empty_lse, check_flag, check_integer, check_no_grad, check_scale
from .launch_plan import LaunchPlan, named_strides
from .limits import MAX_QUERY_TOKENS
from .paged_cache import check_format_name
from .split_plan import CallSpec as SplitPlanCall
from .split_plan import PlanLaunch, PlanSpecs, ScheduleKey, check_plan, check_window, window_scalars
from .strides import alignment, output_strides
from .tensor_spec import TensorSpec, address_of, check_last_contiguous, optional_spec

_FLOAT_BYTES = 4

Problem: TypeAlias = DenseDecodeProblem | SparseDecodeProblem


class Options(NamedTuple):
    """The arguments that are not tensors."""

    head_dim_v: int
    softmax_scale: float | None
    causal: bool
    is_fp8_kvcache: bool
    batch_invariant: bool
    empty_lse: float
    kv_format: Any
    extra_kv_format: Any
    max_seqlen_q: Any
    window: int | None
    window_sink: int
    few_heads: bool


class Results(NamedTuple):
    """The tensors that a call writes; None: to be allocated."""

    out: torch.Tensor | None
    lse: torch.Tensor | None
    workspace: torch.Tensor | None


class CommonSpec(NamedTuple):
    """The part of a CallSpec that dense and sparse decode share.

    split_plan: specs of the caller's plan, or None if a schedule object plans. planned_parts: parts of that object's plan; None before it
    has one. options: plain ones, but for those that do not decide on a launch. address_alignment: what strides.alignment gives for the
    addresses of q and of the caller's out.
    """

    split_plan: PlanSpecs | None
    planned_parts: int | None
    out: TensorSpec | None
    lse: TensorSpec | None
    options: Options
    address_alignment: int


@dataclass(frozen=True)
class ResultLayout:
    """Layout of the results: shapes and strides of out and lse, and accum_rows rows of the accumulators of split requests.

    strides: of out and lse, in elements, by argument of the kernels. accum_tokens: query tokens of a row of the accumulators.
    """

    out_shape: tuple[int, ...]
    out_dtype: torch.dtype
    lse_shape: tuple[int, ...]
    strides: Mapping[str, int]
    accum_rows: int
    accum_tokens: int

    @property
    def accum_bytes(self) -> tuple[int, int]:
        """Return the bytes of out_accum and of lse_accum."""
        *_, h_q, d_v = self.out_shape
        return accumulator_bytes(self.accum_rows, self.accum_tokens, h_q, d_v)


@dataclass(frozen=True)
class DecodePlan(LaunchPlan):
    """The launches of a call. The grid has CTAs along (query rows, KV heads or query tokens, parts).

    op: name of the decode kernel.
    maps: by argument of the kernel, the operand that a tensor map describes, and that map at address 0.
    pointers: by argument of the kernel, the operand that a pointer leads to, or None for the null pointer.
    lengths: operands with the keys of each request, in its cache and in a second cache. key_limits: the most keys there.
    combine: the launch of combine, or None if no request can be split.
    default_scale: softmax_scale where the caller gives none.
    has_keys: False if no request can have a key, so that out is 0 and lse empty_lse without a launch.
    split: the launch of split_plan that makes a plan for this call.
    ragged: given where requests have different numbers of query tokens.
    """

    op: str
    maps: Mapping[str, tuple[str, TensorMap]]
    pointers: Mapping[str, str | None]
    lengths: tuple[str, str | None]
    key_limits: tuple[int, int]
    schedule_key: ScheduleKey
    results: ResultLayout
    combine: LaunchPlan | None
    default_scale: float
    has_keys: bool
    split: PlanLaunch
    ragged: RaggedQueries | None

    @property
    def workspace_bytes(self) -> int:
        """Return the bytes of out_accum followed by lse_accum."""
        return sum(self.results.accum_bytes)

    @property
    def is_empty(self) -> bool:
        """Return whether there is no output to compute."""
        return 0 in self.results.out_shape or not self.scalars["batch"]


def accumulator_bytes(accum_rows: int, s_q: int, h_q: int, d_v: int) -> tuple[int, int]:
    """Return the bytes of out_accum, fp32 [accum_rows, s_q, h_q, d_v], and of lse_accum, fp32 [accum_rows, s_q, h_q]."""
    lse_bytes = accum_rows * s_q * h_q * _FLOAT_BYTES
    return lse_bytes * d_v, lse_bytes


def check_options(options: Options, value_columns: tuple[int, ...]) -> Options:
    """Return the options as plain ints, floats, bools and strings. ValueError unless each is supported by itself.

    value_columns: the op's head_dim_v.
    """
    scale, max_seqlen_q = options.softmax_scale, options.max_seqlen_q
    window, window_sink = check_window(options.window, options.window_sink)
    return Options(
        head_dim_v=check_columns("head_dim_v", options.head_dim_v, *value_columns),
        softmax_scale=None if scale is None else check_scale("softmax_scale", scale),
        causal=check_flag("causal", options.causal),
        is_fp8_kvcache=check_flag("is_fp8_kvcache", options.is_fp8_kvcache),
        batch_invariant=check_flag("batch_invariant", options.batch_invariant),
        empty_lse=check_empty_lse(options.empty_lse),
        kv_format=check_format_name(options.kv_format, KNOWN),
        extra_kv_format=check_format_name(options.extra_kv_format, KNOWN, "extra_kv_format"),
        max_seqlen_q=None if max_seqlen_q is None else check_integer("max_seqlen_q", max_seqlen_q, 1, MAX_QUERY_TOKENS),
        window=window,
        window_sink=window_sink,
        few_heads=check_flag("few_heads", options.few_heads),
    )


def check_common(
    options: Options, q: Any, results: Results, split_plan: PlanSpecs | None, planned_parts: int | None = None
) -> CommonSpec:  # fmt: skip
    """Check the results of a call. ValueError unless each is supported by itself. options: as check_options returns them."""
    check_no_grad(**results._asdict())
    return CommonSpec(
        split_plan=split_plan,
        planned_parts=planned_parts,
        out=optional_spec("out", results.out),
        lse=optional_spec("lse", results.lse),
        options=options._replace(softmax_scale=None, empty_lse=math.inf),
        address_alignment=alignment(address_of("q", q), 0 if results.out is None else address_of("out", results.out)),
    )


def check_tokens(q: TensorSpec, cu_seqlens_q: TensorSpec | None, max_seqlen_q: int | None, where: str) -> None:
    """Raise ValueError unless q is [batch, s_q, h_q, d_qk], or packed [total_q, h_q, d_qk] with cu_seqlens_q and max_seqlen_q.

    where: the calls of an op, for messages.
    """
    if (cu_seqlens_q is None) != (max_seqlen_q is None):
        given, missing = ("max_seqlen_q", "cu_seqlens_q") if cu_seqlens_q is None else ("cu_seqlens_q", "max_seqlen_q")
        raise ValueError(f"{missing} is None beside {given}; supported: both, or neither")
    if cu_seqlens_q is not None and (len(q.shape) != 3 or q.shape[0] > MAX_QUERY_TOKENS):
        raise ValueError(
            f"q has shape {list(q.shape)}; supported {where} and with cu_seqlens_q: [total_q, h_q, columns], total_q to {MAX_QUERY_TOKENS}"
        )


def query_strides(tensor: str, axes: str, strides: Sequence[int], ragged: RaggedQueries | None) -> Mapping[str, int]:
    """Name the strides of a tensor of query tokens as the spec's lists of arguments do.

    axes: of a tensor [batch, s_q, ..]. A packed one has [total_q, ..]; its tokens are requests where each is a unit of its own.
    """
    if ragged is None:
        return named_strides(tensor, axes, strides)
    packed = dict(zip(("token" if ragged.unit_tokens else "batch", "head"), strides, strict=False))
    return {f"{tensor}_stride_{axis}": packed.get(axis, 0) for axis in axes.split()}


def layout_results(
    problem: Problem, common: CommonSpec, num_parts: int, q: TensorSpec, out_dtype: torch.dtype, ragged: RaggedQueries | None
) -> ResultLayout:
    """Validate out, lse and the caller's plan of num_parts parts; return the layout of the results."""
    out_shape: tuple[int, ...] = (problem.batch, problem.s_q, problem.h_q, common.options.head_dim_v)
    lse_shape: tuple[int, ...] = (problem.batch, problem.h_q, problem.s_q)
    if ragged is not None:
        out_shape, lse_shape = (ragged.total_q, problem.h_q, common.options.head_dim_v), (ragged.total_q, problem.h_q)
    out_strides = output_strides("out", common.out, out_shape, out_dtype, q)
    lse_strides = output_strides("lse", common.lse, lse_shape, torch.float32, q)
    if common.out is not None:
        check_last_contiguous("out", common.out)
    if common.split_plan is not None:
        check_plan(common.split_plan, problem.batch, num_parts + (0 if ragged is None else ragged.table_rows), q.device)
    return ResultLayout(
        out_shape=out_shape,
        out_dtype=out_dtype,
        lse_shape=lse_shape,
        strides={
            **query_strides("out", "batch token head", out_strides[:-1], ragged),
            **query_strides("lse", "batch head token", lse_strides, ragged),
        },
        accum_rows=0 if 0 in (*out_shape, problem.batch) else accumulator_rows(problem.batch, num_parts, problem.max_splits),
        accum_tokens=problem.s_q,
    )


def plan_combine(
    problem: Problem, results: ResultLayout, max_keys: tuple[int, int], sm_count: int, split: SplitPlanCall, causal: int = 0
) -> LaunchPlan | None:
    """Return the launch of combine, or None if no request can be split. max_keys: most keys in a cache and in a second cache."""
    if not results.accum_rows:
        return None
    batch, s_q, h_q, d_v = problem.batch, problem.s_q, problem.h_q, results.out_shape[-1]
    return LaunchPlan(
        kernel=CombineConfig(problem.dtype, d_v).name,
        grid=combine_grid(batch, s_q, h_q, sm_count, d_v),
        scalars={
            **results.strides,
            "batch": batch,
            "s_q": s_q,
            "h_q": h_q,
            "max_keys": max_keys[0],
            "extra_max_keys": max_keys[1],
            "max_splits": problem.max_splits,
            "accum_rows": results.accum_rows,
            "requests": 0 if split.ragged is None else split.ragged.requests,
            "total_q": 0 if split.ragged is None else split.ragged.total_q,
            "causal": causal,
            **window_scalars(split.window),
        },
    )
