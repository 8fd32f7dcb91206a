"""Split plans: how the key tiles of a batch are divided among the SMs. A plan is made on the device, for calls of the same shapes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch

from ..runtime.current import device_for
from ..runtime.device import Device
from ..spec.arch import Arch
from ..spec.dense_decode import MAX_KEYS, num_parts
from ..spec.mla import MAX_HEADS
from ..spec.split_plan import NO_LIMIT, PLAN_COLUMNS, SplitPlanArguments, SplitPlanConfig
from .arguments import check_flag, check_integer, short_repr
from .indices import check_indices
from .launch_plan import LaunchPlan
from .limits import heads_error
from .tensor_spec import TensorSpec, check_contiguous, check_counts, check_device, check_dtype, check_shape, operand_spec

# tile_scheduler_metadata, int32 [num_parts, 8], and num_splits, int32 [batch + 1].
SplitPlan: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class KeyCounts(NamedTuple):
    """Keys of each request in its cache and in a second cache: int32 [batch], or None where every request has the limit."""

    lengths: torch.Tensor | None
    extra_lengths: torch.Tensor | None
    limit: int
    extra_limit: int


class CallSpec(NamedTuple):
    """Everything that decides on a plan, but for the lengths of the requests.

    rows: query rows that share keys. columns: groups of such rows in a request. limit, extra_limit: as in KeyCounts.
    """

    batch: int
    rows: int
    columns: int
    limit: int
    extra_limit: int


class Options(NamedTuple):
    """The arguments of get_mla_metadata that are not tensors."""

    num_q_tokens_per_head_k: int
    num_heads_k: int
    num_heads_q: int | None = None
    is_fp8_kvcache: bool = False
    topk: int | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the CallSpec. ValueError unless the options are supported."""
        _check_heads(self.num_q_tokens_per_head_k, self.num_heads_k, self.num_heads_q)
        if self.topk is None:
            return self.num_q_tokens_per_head_k, self.num_heads_k
        heads = _sparse_heads(self.num_heads_k, self.num_heads_q, self.topk)
        return heads, self.num_q_tokens_per_head_k // heads


def run(
    cache_seqlens: torch.Tensor,
    num_q_tokens_per_head_k: int,
    num_heads_k: int,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> SplitPlan:
    """Plan a batch, with the arguments of api.flashmla.get_mla_metadata."""
    call = check(cache_seqlens, Options(num_q_tokens_per_head_k, num_heads_k, num_heads_q, is_fp8_kvcache, topk))
    device = device_for(cache_seqlens.device)
    lengths = cache_seqlens if topk is None else None
    counts = KeyCounts(lengths, None, call.limit, call.extra_limit)
    return launch(device, plan(call, device.arch, device.sm_count), counts, cache_seqlens.device)


def run_sparse(
    indices: torch.Tensor,
    num_heads_q: int,
    topk_length: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> SplitPlan:
    """Plan a batch of sparse decode by its indices and their lengths, as a schedule object does at its first use."""
    call = check_sparse(indices, num_heads_q, topk_length, extra_indices, extra_topk_length)
    device = device_for(indices.device)
    counts = KeyCounts(topk_length, extra_topk_length, call.limit, call.extra_limit)
    return launch(device, plan(call, device.arch, device.sm_count), counts, indices.device)


def check(cache_seqlens: Any, options: Options) -> CallSpec:
    """Check the arguments of get_mla_metadata. ValueError unless they are supported."""
    check_flag("is_fp8_kvcache", options.is_fp8_kvcache)
    rows, columns = options.shape
    spec = operand_spec("cache_seqlens", cache_seqlens)
    check_shape("cache_seqlens", spec, ("batch",))
    check_dtype("cache_seqlens", spec, torch.int32)
    check_contiguous("cache_seqlens", spec)
    return CallSpec(spec.shape[0], rows, columns, NO_LIMIT if options.topk is None else options.topk, 0)


def check_sparse(
    indices: Any, num_heads_q: int, topk_length: Any = None, extra_indices: Any = None, extra_topk_length: Any = None
) -> CallSpec:
    """Check the arguments of run_sparse. ValueError unless they are supported."""
    spec = operand_spec("indices", indices)
    check_indices("indices", spec, ("batch", "s_q", "topk"), spec)
    batch, s_q, topk = spec.shape
    extra_topk = 0
    if extra_indices is not None:
        extra = operand_spec("extra_indices_in_kvcache", extra_indices)
        check_indices("extra_indices_in_kvcache", extra, (batch, s_q, "topk"), spec)
        extra_topk = extra.shape[2]
    for name, lengths in (("topk_length", topk_length), ("extra_topk_length", extra_topk_length)):
        if lengths is not None:
            check_counts(name, operand_spec(name, lengths), (batch,), spec.device)
    return CallSpec(batch, num_heads_q, max(s_q, 1), topk, extra_topk)


@lru_cache(maxsize=4096)
def plan(call: CallSpec, arch: Arch, sm_count: int) -> LaunchPlan:
    """Return the launch of split_plan on a device with sm_count SMs."""
    return _launch_plan(call.batch, num_parts(arch, call.rows, call.columns, sm_count), call.limit, call.extra_limit)


def _launch_plan(batch: int, parts: int, limit: int, extra_limit: int) -> LaunchPlan:
    scalars = {"batch": batch, "num_parts": parts, "max_keys": limit, "extra_max_keys": extra_limit}
    return LaunchPlan(SplitPlanConfig().name, (1, 1, 1), scalars)


def launch(device: Device, launch_plan: LaunchPlan, counts: KeyCounts, where: torch.device) -> SplitPlan:
    """Allocate a plan's two tensors on the torch device `where`, and launch split_plan. An empty batch has a plan of zeros."""
    batch, parts = launch_plan.scalars["batch"], launch_plan.scalars["num_parts"]
    allocate = torch.empty if batch else torch.zeros
    metadata = allocate((parts, PLAN_COLUMNS), dtype=torch.int32, device=where)
    num_splits = allocate((batch + 1,), dtype=torch.int32, device=where)
    if batch:
        device.mark_uninitialized(metadata, num_splits)
        args = SplitPlanArguments(counts.lengths, counts.extra_lengths, metadata, num_splits, **launch_plan.scalars)
        device.launch(device.kernel("split_plan", launch_plan.kernel), launch_plan.grid, args)
    return metadata, num_splits


class ScheduleKey(NamedTuple):
    """The shapes that a schedule object was planned for. topk, extra_topk: None in dense decode."""

    batch: int
    s_q: int
    h_q: int
    h_kv: int
    page_size: int
    num_parts: int
    device: torch.device
    topk: int | None = None
    extra_topk: int | None = None


class MlaSchedule:
    """The schedule object that get_mla_metadata() returns. The first flash_mla_with_kvcache that gets it makes its plan on the device.

    plan: tile_scheduler_metadata, int32 [num_sm_parts, 8], and num_splits, int32 [batch + 1]; None before the first use.
    key: the shapes that the plan was made for.
    """

    def __init__(self) -> None:
        self.plan: SplitPlan | None = None
        self.key: ScheduleKey | None = None

    def __repr__(self) -> str:
        if self.key is None:
            return f"{type(self).__name__}(not planned)"
        shapes = ", ".join(f"{name}={value}" for name, value in self.key._asdict().items() if value is not None)
        return f"{type(self).__name__}({shapes})"

    @property
    def tile_scheduler_metadata(self) -> torch.Tensor | None:
        """Return the first tensor of the plan, or None before the first use."""
        return None if self.plan is None else self.plan[0]

    @property
    def num_splits(self) -> torch.Tensor | None:
        """Return the second tensor of the plan, or None before the first use."""
        return None if self.plan is None else self.plan[1]

    def check(self, key: ScheduleKey) -> None:
        """Raise ValueError if the schedule was planned for other shapes."""
        if self.key is not None and self.key != key:
            changed = ", ".join(
                f"{name} {new} after {old}" for name, old, new in zip(key._fields, self.key, key, strict=True) if old != new
            )
            raise ValueError(
                f"tile_scheduler_metadata was planned for other shapes: {changed}; supported: one schedule per set of shapes, "
                "get another from get_mla_metadata()"
            )

    def prepare(self, device: Device, key: ScheduleKey, counts: KeyCounts) -> SplitPlan:
        """Make, store and return the plan for these shapes."""
        launch_plan = _launch_plan(key.batch, key.num_parts, counts.limit, counts.extra_limit)
        self.plan, self.key = launch(device, launch_plan, counts, key.device), key
        return self.plan


class PlanSpecs(NamedTuple):
    """Specs of a plan's two tensors."""

    metadata: TensorSpec
    num_splits: TensorSpec


def plan_specs(metadata: Any, num_splits: Any) -> PlanSpecs | None:
    """Return the specs of the caller's plan, or None for a schedule object. ValueError unless get_mla_metadata returns such a pair."""
    if isinstance(metadata, MlaSchedule):
        if num_splits is not None:
            raise ValueError("num_splits is given beside a schedule object; supported: None, as get_mla_metadata() returns")
        return None
    if not isinstance(metadata, torch.Tensor) or not isinstance(num_splits, torch.Tensor):
        raise ValueError(
            f"tile_scheduler_metadata is {type(metadata).__name__}, num_splits {type(num_splits).__name__}; "
            "supported: what get_mla_metadata returns, either a schedule object and None or two tensors"
        )
    return PlanSpecs(operand_spec("tile_scheduler_metadata", metadata), operand_spec("num_splits", num_splits))


def check_plan(specs: PlanSpecs, batch: int, num_parts: int, device: torch.device) -> None:
    """Raise ValueError unless the tensors have the shapes of a plan with num_parts parts for this batch, and are on `device`."""
    check_shape("tile_scheduler_metadata", specs.metadata, ("num_sm_parts", PLAN_COLUMNS))
    parts = specs.metadata.shape[0]
    if parts != num_parts:
        raise ValueError(
            f"tile_scheduler_metadata has {parts} rows; supported: {num_parts}, as get_mla_metadata returns for this call's "
            "s_q * h_q / h_kv, h_kv and device"
        )
    check_shape("num_splits", specs.num_splits, (batch + 1,))
    for name, spec in (("tile_scheduler_metadata", specs.metadata), ("num_splits", specs.num_splits)):
        check_dtype(name, spec, torch.int32)
        check_device(name, spec, device)
        check_contiguous(name, spec)


def _check_heads(num_q_tokens_per_head_k: Any, num_heads_k: Any, num_heads_q: Any) -> None:
    check_integer("num_q_tokens_per_head_k", num_q_tokens_per_head_k, 1)
    error = heads_error(num_heads_k if num_heads_q is None else num_heads_q, num_heads_k)
    if error is not None:
        raise ValueError(f"num_heads_k is {short_repr(num_heads_k)}, num_heads_q {short_repr(num_heads_q)}: {error}")
    if num_heads_q is not None and num_q_tokens_per_head_k % (num_heads_q // num_heads_k):
        raise ValueError(
            f"num_q_tokens_per_head_k is {num_q_tokens_per_head_k} with {num_heads_q} query heads and {num_heads_k} KV heads; "
            "supported: s_q * num_heads_q / num_heads_k"
        )


def _sparse_heads(num_heads_k: int, num_heads_q: int | None, topk: Any) -> int:
    """Return the query heads of sparse decode. ValueError on heads or a topk that sparse decode does not support."""
    if num_heads_q is None:
        raise ValueError(f"num_heads_q is None with topk {short_repr(topk)}; supported with topk: 1 to {MAX_HEADS}")
    error = heads_error(num_heads_q, num_heads_k, "sparse_decode")
    if error is not None:
        raise ValueError(f"num_heads_k is {num_heads_k}, num_heads_q {num_heads_q}: {error}")
    check_integer("topk", topk, 0, MAX_KEYS)
    return num_heads_q
