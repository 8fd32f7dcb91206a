"""What dense and sparse decode have in common: results, their place until combine has merged them, and combine itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from .schedule import PlanSpecs, ScheduleKey, check_plan
from .spec.combine import CombineConfig
from .spec.combine import grid as combine_grid
from .spec.dense_decode import DenseDecodeProblem
from .spec.mla import D_V
from .spec.sparse_decode import SparseDecodeProblem
from .spec.split_plan import accumulator_rows
from .tensors import TensorSpec, check_last_contiguous, output_strides

_FLOAT_BYTES = 4

Problem: TypeAlias = DenseDecodeProblem | SparseDecodeProblem


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
