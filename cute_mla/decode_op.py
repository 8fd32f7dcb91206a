"""What dense and sparse decode have in common: results, their place until combine has merged them, and combine itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import torch

from .runtime.arguments import Memory, Span
from .runtime.device import Device, Launches, Step
from .schedule import KeyCounts, MlaSchedule, PlanSpecs, ScheduleKey, check_plan
from .spec.abi import ParamKind
from .spec.combine import CombineConfig
from .spec.combine import grid as combine_grid
from .spec.dense_decode import DenseDecodeProblem
from .spec.mla import D_V, LOG2E
from .spec.sparse_decode import SparseDecodeProblem
from .spec.split_plan import accumulator_rows
from .spec.tensor_map import TensorMap
from .tensors import WORKSPACE_ALIGNMENT, TensorSpec, check_address, check_last_contiguous, output_strides

_FLOAT_BYTES = 4

Problem: TypeAlias = DenseDecodeProblem | SparseDecodeProblem
# What decode kernels call the pointers of combine, where they do not call them the same; what they do not have is null.
_COMBINE_NAMES = {
    "dense_decode": {"lengths": "cache_seqlens"},
    "sparse_decode": {"lengths": "topk_length", "extra_lengths": "extra_topk_length"},
}
Given: TypeAlias = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]  # out, lse, workspace of a caller


class Wanted(NamedTuple):
    """What the caller of any decode says of plan and results. given_plan: None if a schedule object plans.

    address_alignment: what row_alignment says, of the addresses of q and out (the caller's, if given) alone.
    """

    given_plan: PlanSpecs | None
    out: TensorSpec | None
    lse: TensorSpec | None
    causal: bool
    is_fp8_kvcache: bool
    batch_invariant: bool
    address_alignment: int


@dataclass(frozen=True)
class Results:
    """Shapes and strides of out and lse, the type of out, and of the split accumulators: accum_rows of them."""

    out_shape: tuple[int, int, int, int]
    out_dtype: torch.dtype
    lse_shape: tuple[int, int, int]
    out_strides: tuple[int, ...]
    lse_strides: tuple[int, ...]
    accum_rows: int

    @property
    def strides(self) -> tuple[int, ...]:
        """As kernels take them: (batch, token, head) of out, (batch, head, token) of lse."""
        return *self.out_strides, *self.lse_strides


@dataclass(frozen=True)
class DecodePlan:
    """What a call needs.

    op, kernel, grid: variant of the decode kernel, and its CTAs along (query rows, KV heads or query tokens, parts).
    combine_kernel, combine_grid: the same of combine; no grid if no request can be split.
    key_limits: most keys of a request in its cache and in a second one, for the plan. default_scale: softmax_scale.
    int64s, int32s: scalar arguments of the decode kernel, in the order of its parameters. combine_int32s: those of combine.
    """

    op: str
    kernel: str
    grid: tuple[int, int, int]
    schedule_key: ScheduleKey
    results: Results
    out_accum_bytes: int
    lse_accum_bytes: int
    combine_kernel: str
    combine_grid: tuple[int, int, int] | None
    combine_int32s: tuple[int, ...]
    key_limits: tuple[int, int]
    default_scale: float
    int64s: tuple[int, ...]
    int32s: tuple[int, ...]

    @property
    def workspace_bytes(self) -> int:
        """out_accum followed by lse_accum."""
        return self.out_accum_bytes + self.lse_accum_bytes

    @property
    def is_empty(self) -> bool:
        """Whether there is no output to compute."""
        return 0 in self.results.out_shape


def accumulator_bytes(accum_rows: int, s_q: int, h_q: int) -> tuple[int, int]:
    """Bytes of out_accum and lse_accum."""
    lse_bytes = accum_rows * s_q * h_q * _FLOAT_BYTES
    return lse_bytes * D_V, lse_bytes


def check_results(problem: Problem, wanted: Wanted, num_parts: int, q: TensorSpec, out_dtype: torch.dtype) -> Results:
    """Where the results of a call with a plan of num_parts parts go, beside q. ValueError if the caller's plan or tensors do not fit."""
    out_shape = (problem.batch, problem.s_q, problem.h_q, D_V)
    lse_shape = (problem.batch, problem.h_q, problem.s_q)
    out_strides = output_strides("out", wanted.out, out_shape, out_dtype, q)
    lse_strides = output_strides("lse", wanted.lse, lse_shape, torch.float32, q)
    if wanted.out is not None:
        check_last_contiguous("out", wanted.out)
    if wanted.given_plan is not None:
        check_plan(wanted.given_plan, problem.batch, num_parts, q.device)
    return Results(
        out_shape=out_shape,
        out_dtype=out_dtype,
        lse_shape=lse_shape,
        out_strides=out_strides[:3],
        lse_strides=lse_strides,
        accum_rows=0 if 0 in out_shape else accumulator_rows(problem.batch, num_parts, problem.max_splits),
    )


def plan_combine(problem: Problem, results: Results, sm_count: int) -> tuple[str, tuple[int, int, int] | None]:
    """The kernel and grid of combine; no grid if no request can be split."""
    name = CombineConfig(problem.dtype).name
    return name, combine_grid(problem.batch, problem.s_q, problem.h_q, sm_count) if results.accum_rows else None


def accumulators(plan: DecodePlan, workspace: torch.Tensor | None) -> tuple[Span | None, Span | None]:
    """out_accum and lse_accum within the workspace."""
    if workspace is None:
        return None, None
    return Span(workspace, 0, plan.out_accum_bytes), Span(workspace, plan.out_accum_bytes, plan.lse_accum_bytes)


class DecodeOperands(Protocol):
    """The operands of a dense or sparse decode."""

    def check_addresses(self) -> None:
        """ValueError unless the addresses are such as kernels can use."""

    def counts(self, plan: DecodePlan) -> KeyCounts:
        """The keys of each request, for the plan."""
        ...

    def maps(self, plan: DecodePlan) -> tuple[TensorMap, ...]:
        """The tensor maps of the decode kernel."""
        ...

    def memory(self, plan: DecodePlan) -> tuple[Memory | None, ...]:
        """The pointers of the decode kernel in front of those that every decode has."""
        ...


class PreparedDecode(NamedTuple):
    """A call that has been checked, for all tensors like those that were checked. launches: None if there is nothing to compute."""

    device: Device
    plan: DecodePlan
    launches: Launches | None

    def __call__(
        self,
        operands: DecodeOperands,
        planned: tuple[torch.Tensor | MlaSchedule, torch.Tensor | None],
        given: Given,
        like: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the call. planned: metadata and num_splits, or the object that makes them. given: out, lse and workspace; what is
        missing is made beside `like`. Returns out and lse."""
        device, plan = self.device, self.plan
        operands.check_addresses()
        out, lse, workspace = given
        if workspace is not None and workspace.data_ptr() % WORKSPACE_ALIGNMENT:
            check_address("workspace", workspace.data_ptr(), WORKSPACE_ALIGNMENT)
        if out is None:
            out = like.new_empty(plan.results.out_shape, dtype=plan.results.out_dtype)
        if lse is None:
            lse = like.new_empty(plan.results.lse_shape, dtype=torch.float32)
        if self.launches is None:
            return out, lse
        if not plan.workspace_bytes:
            workspace = None
        elif workspace is None:
            workspace = like.new_empty(plan.workspace_bytes, dtype=torch.uint8)
        metadata, num_splits = planned
        if isinstance(metadata, MlaSchedule):
            metadata, num_splits = metadata.prepare(device, plan.schedule_key, operands.counts(plan))
        device.undefined(out, lse, *(() if workspace is None else (workspace,)))
        memory = (*operands.memory(plan), metadata, num_splits, out, lse, *accumulators(plan, workspace), None)
        self.launches(operands.maps(plan), memory)
        return out, lse


def prepare(device: Device, plan: DecodePlan, softmax_scale: float | None, empty_lse: float) -> PreparedDecode:
    """A call of this plan."""
    if plan.is_empty:
        return PreparedDecode(device, plan, None)
    scale_log2 = (plan.default_scale if softmax_scale is None else softmax_scale) * LOG2E
    scalars = (*plan.int64s, scale_log2, empty_lse, *plan.int32s)
    decode = device.kernel(plan.op, plan.kernel)
    maps = tuple(i for i, param in enumerate(decode.params) if param.kind is ParamKind.TENSOR_MAP)
    names = [param.name for param in decode.params if param.kind is ParamKind.POINTER]
    steps = [Step(decode, plan.grid, maps, tuple(range(len(names))), scalars, pdl=True)]
    if plan.combine_grid is not None:
        combine = device.kernel("combine", plan.combine_kernel)
        sources = [_COMBINE_NAMES[plan.op].get(param.name, param.name) for param in combine.params if param.kind is ParamKind.POINTER]
        memory = tuple(names.index(name) if name in names else len(names) for name in sources)
        steps.append(Step(combine, plan.combine_grid, (), memory, (*plan.results.strides, empty_lse, *plan.combine_int32s), pdl=True))
    return PreparedDecode(device, plan, device.prepare(steps))
