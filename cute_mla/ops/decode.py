"""decode: calls of dense and sparse decode, checked and prepared once, then found again and repeated.

A repeated call costs a few microseconds on the host (profiles/NOTES.md, "Time on the host"):

    run                   packs the arguments into a key (op, numbers, flags, absences) and a tuple of tensors, and takes the last call of
                          this key if it fits, else another call of this key that fits
    PreparedCall.fits     compares the tensors with those that were checked: class, dtype, device, shape, strides and need of gradients by
                          one call of torch's guard; then the alignment of addresses
    PreparedCall.complete allocates what the caller did not give: results, workspace, or the plan of a schedule object
    CudaLaunches.start    writes the addresses of the tensors to where the launches take them from, and launches; on the simulated device
                          SingleLaunches.start does, one launch after the other

Every other call goes through `prepare`, which makes all checks and keeps their outcome in the device's call cache. There is one way to
launch: a call that was just prepared runs like a repeated one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ..runtime.call_cache import CallCache, guard
from ..runtime.current import device_for
from ..runtime.launch import BufferRef, CallSteps, Device, Launches, MappedTensor, Step
from ..spec.abi import ParamKind
from ..spec.dense_decode import MAX_ROW_ALIGNMENT
from ..spec.mla import LOG2E
from . import dense_decode, sparse_decode
from .arguments import short_repr
from .decode_plan import DecodePlan, Options, Results, check_common
from .overlap import check_no_overlap
from .paged_cache import GATHER_ALIGNMENT
from .split_plan import KeyCounts, MlaSchedule, plan_specs
from .strides import TMA_ALIGNMENT
from .tensor_spec import address_of, check_address, check_contiguous, spec_of

_PLAN = ("tile_scheduler_metadata", "num_splits")
_RESULTS = Results._fields

# Alignment of addresses, in bytes. _ALIGNMENT serves each of these tensors.
_WORKSPACE_ALIGNMENT = 16  # kernels store whole vectors there
_ALIGNMENTS = {"k_cache": max(TMA_ALIGNMENT, GATHER_ALIGNMENT), "extra_k_cache": GATHER_ALIGNMENT, "workspace": _WORKSPACE_ALIGNMENT}
_ALIGNMENT = math.lcm(*_ALIGNMENTS.values())

_data_ptr = torch.Tensor.data_ptr


class CallKey(NamedTuple):
    """The part of a call that is not a tensor, and which tensors are absent.

    op: dense_decode or sparse_decode. descale_q to extra_topk_length: whether the argument is None, or, for an argument that the op must be
    without, the argument itself. scheduled: whether a schedule object plans. The other fields from num_splits on: whether the tensor is
    None.
    """

    op: ModuleType
    head_dim_v: int
    softmax_scale: float | None
    causal: bool
    is_fp8_kvcache: bool
    batch_invariant: bool
    empty_lse: float
    descale_q: Any
    descale_k: Any
    attn_sink: Any
    extra_k_cache: Any
    extra_indices_in_kvcache: Any
    topk_length: Any
    extra_topk_length: Any
    scheduled: bool
    num_splits: bool
    out: bool
    lse: bool
    workspace: bool


def run(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor | MlaSchedule | None,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    batch_invariant: bool = False,
    empty_lse: float = math.inf,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode, with the arguments of api.flashmla.flash_mla_with_kvcache."""
    schedule = None
    if num_splits is None and isinstance(tile_scheduler_metadata, MlaSchedule):
        schedule = tile_scheduler_metadata
        tile_scheduler_metadata, num_splits = schedule.plan or (None, None)
    # Both keys are tuples of the fields of CallKey, which takes three times as long to make.
    if indices is None:
        key: tuple[Any, ...] = (
            dense_decode, head_dim_v, softmax_scale, causal, is_fp8_kvcache, batch_invariant, empty_lse,
            descale_q is None, descale_k is None,
            attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length,
            schedule is not None, num_splits is None, out is None, lse is None, workspace is None,
        )  # fmt: skip
        tensors: tuple[Any, ...] = (
            q, k_cache, block_table, cache_seqlens, descale_q, descale_k,
            tile_scheduler_metadata, num_splits, out, lse, workspace,
        )  # fmt: skip
    else:
        key = (
            sparse_decode, head_dim_v, softmax_scale, causal, is_fp8_kvcache, batch_invariant, empty_lse,
            descale_q, descale_k,
            attn_sink is None, extra_k_cache is None, extra_indices_in_kvcache is None, topk_length is None, extra_topk_length is None,
            schedule is not None, num_splits is None, out is None, lse is None, workspace is None,
        )  # fmt: skip
        tensors = (
            q, k_cache, indices, topk_length, extra_k_cache, extra_indices_in_kvcache, extra_topk_length, attn_sink,
            tile_scheduler_metadata, num_splits, out, lse, workspace,
        )  # fmt: skip
    cache: CallCache | None = None
    call: PreparedCall | None = None
    try:
        cache = device_for(q.device).call_cache
        call = cache.latest.get(key)
        if call is not None:
            given = call.pick(tensors)
            addresses = [*map(_data_ptr, given)]
            if not call.fits(given, addresses, schedule):
                call = cache.find(key, q.shape, given, addresses, schedule)
    except (AttributeError, TypeError, RuntimeError):  # an argument is not a tensor with an address, or not hashable: `prepare` says which
        cache = call = None
    if call is None:
        call = prepare(CallKey._make(key), tensors, schedule)
        given = call.pick(tensors)
        addresses = [*map(_data_ptr, given)]
        if cache is not None:
            cache.add(key, q.shape, call)
    if call.missing:
        tensors = call.complete(tensors, schedule)
        given = call.pick_all(tensors)
        addresses = [*map(_data_ptr, given)]
    if call.launches is not None:
        call.launches.start(given, addresses)
    return tensors[-3], tensors[-2]


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A checked call, ready for all tensors like those that were checked. It holds none of them.

    pick: returns the given tensors, out of all. like: compares other given tensors with the checked ones, but for their addresses.
    out, second_cache, workspace: positions among the given tensors; an absent one has the position of q (0) or of the cache (1).
    row_remainder: remainder of the addresses of q and out, which decides on the kernel. missing: whether a plan or results have to be
    made. pick_all: returns the tensors of the launches, out of all, once they are made. lengths: positions of the lengths that a plan is
    made of, among all tensors. launches: None if there is nothing to compute.
    """

    device: Device
    plan: DecodePlan
    pick: Callable[[Sequence[Any]], tuple[torch.Tensor, ...]]
    like: Callable[..., bool]
    out: int
    second_cache: int
    workspace: int
    row_remainder: int
    missing: bool
    pick_all: Callable[[Sequence[Any]], tuple[torch.Tensor, ...]]
    lengths: tuple[int, int | None]
    launches: Launches | None

    def fits(self, given: tuple[torch.Tensor, ...], addresses: list[int], schedule: MlaSchedule | None) -> bool:
        """Return whether the checks of this call hold for these tensors."""
        for tensor in given:
            if tensor.is_nested:  # torch's guard ends the process on a nested tensor
                return False
        return (
            self.like(*given)
            and (addresses[0] | addresses[self.out]) % MAX_ROW_ALIGNMENT == self.row_remainder
            and not (addresses[1] | addresses[self.second_cache] | addresses[self.workspace]) % _ALIGNMENT
            and (schedule is None or schedule.serves(self.plan.schedule_key))
        )

    def complete(self, tensors: tuple[Any, ...], schedule: MlaSchedule | None) -> tuple[Any, ...]:
        """Return all tensors of the call. Allocate missing results and workspace on q's device, and make a missing plan."""
        *operands, metadata, num_splits, out, lse, workspace = tensors
        q, plan = operands[0], self.plan
        if out is None:
            out = q.new_empty(plan.results.out_shape, dtype=plan.results.out_dtype)
        if lse is None:
            lse = q.new_empty(plan.results.lse_shape, dtype=torch.float32)
        if self.launches is not None and workspace is None and plan.workspace_bytes:
            workspace = q.new_empty(plan.workspace_bytes, dtype=torch.uint8)
        if self.launches is not None and schedule is not None and num_splits is None:
            lengths, extra_lengths = (None if i is None else tensors[i] for i in self.lengths)
            counts = KeyCounts(lengths, extra_lengths, *plan.key_limits)
            metadata, num_splits = schedule.prepare(self.device, plan.schedule_key, counts)
        return *operands, metadata, num_splits, out, lse, workspace


def prepare(key: CallKey, tensors: tuple[Any, ...], schedule: MlaSchedule | None) -> PreparedCall:
    """Check a call and prepare its launches. ValueError if the call is not supported.

    tensors: the operands of key.op, the plan's two tensors, out, lse and workspace. schedule: the object that made the plan, or will make
    it if its tensors are None.
    """
    names = (*key.op.Operands._fields, *_PLAN, *_RESULTS)
    named = dict(zip(names, tensors, strict=True))
    device, plan = _checked(key, named, schedule)
    made = {"out", "lse"} if plan.is_empty else {*_PLAN, "out", "lse"} | ({"workspace"} if plan.workspace_bytes else set())
    given = [name for name in names if named[name] is not None]
    complete = [name for name in names if named[name] is not None or name in made]
    pick = itemgetter(*map(names.index, given))
    rows = address_of("q", named["q"]) | (0 if named["out"] is None else address_of("out", named["out"]))
    lengths, extra_lengths = plan.lengths
    steps = None if plan.is_empty else _steps(key, device, plan, {name: i for i, name in enumerate(complete)})
    return PreparedCall(
        device=device,
        plan=plan,
        pick=pick,
        like=guard(pick(tensors)),
        out=given.index("out") if "out" in given else 0,
        second_cache=given.index("extra_k_cache") if "extra_k_cache" in given else 1,
        workspace=given.index("workspace") if "workspace" in given else 1,
        row_remainder=rows % MAX_ROW_ALIGNMENT,
        missing=not made <= set(given),
        pick_all=itemgetter(*map(names.index, complete)),
        lengths=(names.index(lengths), None if extra_lengths is None else names.index(extra_lengths)),
        launches=None if steps is None else device.prepare(steps),
    )


def _checked(key: CallKey, named: dict[str, Any], schedule: MlaSchedule | None) -> tuple[Device, DecodePlan]:
    """Check a call; return its device and its plan there. named: all tensors, by argument."""
    options = Options(*(getattr(key, name) for name in Options._fields))
    operands = key.op.Operands(*(named[name] for name in key.op.Operands._fields))
    results = Results(*(named[name] for name in _RESULTS))
    for name in key.op.EXCLUDED:
        if getattr(key, name) is not None:
            raise ValueError(f"{name} is {short_repr(getattr(key, name))}: not supported {key.op.WHERE}; supported: None")
    split_plan = plan_specs(*(named[name] for name in _PLAN)) if schedule is None else None
    call = key.op.check(operands, check_common(options, operands.q, results, split_plan))
    device = device_for(operands.q.device)
    plan: DecodePlan = key.op.plan(call, device.arch, device.sm_count)
    if results.workspace is not None:
        _check_workspace(results.workspace, plan.workspace_bytes, operands.q.device, plan.op)
    check_no_overlap(results._asdict(), {name: tensor for name, tensor in named.items() if name not in _RESULTS})
    for name, alignment in _ALIGNMENTS.items():
        if named.get(name) is not None:
            check_address(name, address_of(name, named[name]), alignment)
    if schedule is not None:
        schedule.check(plan.schedule_key)
    return device, plan


def _check_workspace(workspace: torch.Tensor, nbytes: int, device: torch.device, op: str) -> None:
    """Raise ValueError unless the caller's workspace is contiguous, on `device`, and has at least nbytes bytes."""
    spec = spec_of("workspace", workspace)
    if spec.device != device:
        raise ValueError(f"workspace is on {spec.device}; supported: the device of q, {device}")
    check_contiguous("workspace", spec)
    if workspace.nbytes < nbytes:
        raise ValueError(f'workspace has {workspace.nbytes} bytes; supported: at least {nbytes}, see workspace_size("{op}", ...)')


def _steps(key: CallKey, device: Device, plan: DecodePlan, numbers: dict[str, int]) -> CallSteps:
    """Return the launches of a call: decode, and combine if a request can be split. numbers: of the tensors, by argument."""

    def buffer(name: str | None) -> BufferRef | None:
        return None if name is None or name not in numbers else BufferRef(numbers[name])

    out_accum = lse_accum = None
    if plan.workspace_bytes:
        out_bytes, lse_bytes = plan.results.accum_bytes
        out_accum = BufferRef(numbers["workspace"], 0, out_bytes)
        lse_accum = BufferRef(numbers["workspace"], out_bytes, lse_bytes)
    pointers = (*map(buffer, plan.pointers), *map(buffer, (*_PLAN, "out", "lse")), out_accum, lse_accum)
    maps = tuple(MappedTensor(numbers[name], layout) for name, layout in plan.maps)
    scale_log2 = (plan.default_scale if key.softmax_scale is None else key.softmax_scale) * LOG2E
    scalars = (*plan.int64s, scale_log2, key.empty_lse, *plan.int32s)
    kernel = device.kernel(plan.op, plan.kernel)
    steps = [Step(kernel, plan.grid, maps, pointers, scalars, pdl=True)]
    if plan.combine is not None:
        combine = device.kernel("combine", plan.combine.kernel)
        by_name = dict(zip((param.name for param in kernel.params if param.kind is ParamKind.POINTER), pointers, strict=True))
        by_name |= zip(("lengths", "extra_lengths"), map(buffer, plan.lengths), strict=True)
        sources = tuple(by_name.get(param.name) for param in combine.params if param.kind is ParamKind.POINTER)
        scalars = (*plan.combine.int64s, key.empty_lse, *plan.combine.int32s)
        steps.append(Step(combine, plan.combine.grid, (), sources, scalars, pdl=True))
    uninitialized = ("out", "lse", "workspace") if plan.workspace_bytes else ("out", "lse")
    return CallSteps(tuple(steps), len(numbers), tuple(numbers[name] for name in uninitialized))
