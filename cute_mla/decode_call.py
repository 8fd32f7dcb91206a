"""A decode call of dense or sparse attention: checked and prepared once, and from then on found again and repeated.

The way of a call that was made before, which costs a few microseconds (profiles/NOTES.md, "Time on the host"):

    api.flash_mla_with_kvcache   sorts its arguments into a key (kind, numbers, flags, what is absent) and tensors
    decode                       takes the call made last with this key if it fits, else another one that fits
    DecodeCall.fits              whether all tensors are such as the checks of that call were made of: class, dtype, device, shape, strides
                                 and need of gradients by one call of torch's own comparison, then the alignment of addresses
    DecodeCall.completed         makes what the caller did not give: results, workspace, or the plan of a schedule object
    CudaLaunches.start           writes the addresses of all tensors to where the launches take them from, and starts the launches;
                                 on the simulated device SingleLaunches.start does, one launch after the other

Every other call goes through `prepare`, which makes all checks and keeps what it found out. There is no second way of launching: a
call that was just prepared runs as one that was found again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import torch

from .cache.gathered import GATHER_ALIGNMENT
from .decode_op import DecodePlan, Wanted
from .dense_decode_op import DenseOperands
from .runtime.device import CallSteps, Device, Launches, MappedTensor, Place, Step, device_for
from .runtime.kept_calls import KeptCalls, guard
from .schedule import MlaSchedule, PlanSpecs
from .sparse_decode_op import SparseOperands
from .spec.abi import ParamKind
from .spec.dense_decode import MAX_ROW_ALIGNMENT
from .spec.mla import LOG2E
from .tensors import (
    TMA_ALIGNMENT,
    WORKSPACE_ALIGNMENT,
    address_of,
    alignment,
    check_address,
    check_apart,
    check_columns,
    check_contiguous,
    check_empty_lse,
    check_flag,
    check_scale,
    optional_spec,
    refuse_gradients,
    shown,
    spec_of,
)

Kind: TypeAlias = type[DenseOperands] | type[SparseOperands]

_PLAN = ("tile_scheduler_metadata", "num_splits")
_RESULTS = ("out", "lse", "workspace")
_UNUSED: dict[Kind, tuple[str, ...]] = {  # arguments of the other kind
    DenseOperands: ("attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length", "extra_topk_length"),
    SparseOperands: ("descale_q", "descale_k"),
}
# What decode kernels call the pointers of combine, where they do not call them the same; what they do not have is null.
_COMBINE_NAMES = {
    "dense_decode": {"lengths": "cache_seqlens"},
    "sparse_decode": {"lengths": "topk_length", "extra_lengths": "extra_topk_length"},
}

# Bytes of which the address of a tensor must be a multiple. _ALIGNMENT: what will do for each of them.
_ALIGNMENTS = {"k_cache": max(TMA_ALIGNMENT, GATHER_ALIGNMENT), "extra_k_cache": GATHER_ALIGNMENT, "workspace": WORKSPACE_ALIGNMENT}
_ALIGNMENT = math.lcm(*_ALIGNMENTS.values())

_data_ptr = torch.Tensor.data_ptr


class DecodeOptions(NamedTuple):
    """What a decode call is given besides tensors."""

    head_dim_v: int
    softmax_scale: float | None
    causal: bool
    is_fp8_kvcache: bool
    batch_invariant: bool
    empty_lse: float


def decode(key: tuple[Any, ...], tensors: tuple[Any, ...], schedule: MlaSchedule | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes a call, none of whose arguments has been looked at. Returns out and lse.

    key: the kind of operands, the options, the arguments that this kind must be without, and of all that may be absent whether it is.
    tensors: the operands, the plan's two tensors, out, lse and workspace. schedule: the object that has made the plan, or will if its
    tensors are None.
    """
    kept: KeptCalls | None = None
    call: DecodeCall | None = None
    try:
        kept = device_for(tensors[0].device).kept_calls
        call = kept.latest.get(key)
        if call is not None:
            given = call.pick(tensors)
            addresses = [*map(_data_ptr, given)]
            if not call.fits(given, addresses, schedule):
                call = kept.find(key, given[0].shape, given, addresses, schedule)
    except (AttributeError, TypeError, RuntimeError):  # something is no tensor with an address, or no option: the checks say it better
        kept = call = None
    if call is None:
        call = prepare(key, tensors, schedule)
        given = call.pick(tensors)
        addresses = [*map(_data_ptr, given)]
        if kept is not None:
            kept.keep(key, given[0].shape, call)
    if call.missing:
        tensors = call.completed(tensors, schedule)
        given = call.pick_all(tensors)
        addresses = [*map(_data_ptr, given)]
    if call.launches is not None:
        call.launches.start(given, addresses)
    return tensors[-3], tensors[-2]


@dataclass(frozen=True, slots=True)
class DecodeCall:
    """A call that has been checked, for all tensors like those that were checked. It holds none of them.

    pick: the tensors that are given, out of all. like: whether others are such, but for their addresses. out, second_cache, workspace:
    their numbers among those given; that of q (0) or the cache (1) where there is none. row_remainder: of the addresses of q and out,
    which decide on the kernel.
    missing: whether a plan or results have to be made. pick_all: the tensors of the launches, out of all, once they are made.
    launches: None if there is nothing to compute.
    """

    kind: Kind
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
    launches: Launches | None

    def fits(self, given: tuple[torch.Tensor, ...], addresses: list[int], schedule: MlaSchedule | None) -> bool:
        """Whether the checks would find nothing else for these tensors."""
        for tensor in given:
            if tensor.is_nested:  # torch's own comparison ends the process on one
                return False
        return (
            self.like(*given)
            and (addresses[0] | addresses[self.out]) % MAX_ROW_ALIGNMENT == self.row_remainder
            and not (addresses[1] | addresses[self.second_cache] | addresses[self.workspace]) % _ALIGNMENT
            and (schedule is None or schedule.serves(self.plan.schedule_key))
        )

    def completed(self, tensors: tuple[Any, ...], schedule: MlaSchedule | None) -> tuple[Any, ...]:
        """All tensors of the call, those that were not given made beside q."""
        *operands, metadata, num_splits, out, lse, workspace = tensors
        q, plan = operands[0], self.plan
        if out is None:
            out = q.new_empty(plan.results.out_shape, dtype=plan.results.out_dtype)
        if lse is None:
            lse = q.new_empty(plan.results.lse_shape, dtype=torch.float32)
        if self.launches is not None and workspace is None and plan.workspace_bytes:
            workspace = q.new_empty(plan.workspace_bytes, dtype=torch.uint8)
        if self.launches is not None and schedule is not None and num_splits is None:
            metadata, num_splits = schedule.prepare(self.device, plan.schedule_key, self.kind(*operands).counts(plan))
        return *operands, metadata, num_splits, out, lse, workspace


def prepare(key: tuple[Any, ...], tensors: tuple[Any, ...], schedule: MlaSchedule | None) -> DecodeCall:
    """Checks a call, and makes it ready for all like it. Arguments as those of `decode`. ValueError if it is not supported."""
    kind, *values = key
    options = DecodeOptions(*values[: len(DecodeOptions._fields)])
    unused = dict(zip(_UNUSED[kind], values[len(DecodeOptions._fields) :], strict=False))
    names = (*kind._fields, *_PLAN, *_RESULTS)
    named = dict(zip(names, tensors, strict=True))
    operands = kind(*tensors[: len(kind._fields)])
    device, plan = _checked(operands, options, unused, named, schedule)
    made = {"out", "lse"} if plan.is_empty else {*_PLAN, "out", "lse"} | ({"workspace"} if plan.workspace_bytes else set())
    present = {name for name in names if named[name] is not None}
    given = [name for name in names if name in present]
    complete = [name for name in names if name in present | made]
    pick = itemgetter(*map(names.index, given))
    rows = address_of("q", operands.q) | (0 if named["out"] is None else address_of("out", named["out"]))
    steps = None if plan.is_empty else _steps(operands, device, plan, options, {name: i for i, name in enumerate(complete)})
    return DecodeCall(
        kind=kind,
        device=device,
        plan=plan,
        pick=pick,
        like=guard(pick(tensors)),
        out=given.index("out") if "out" in present else 0,
        second_cache=given.index("extra_k_cache") if "extra_k_cache" in present else 1,
        workspace=given.index("workspace") if "workspace" in present else 1,
        row_remainder=rows % MAX_ROW_ALIGNMENT,
        missing=not made <= present,
        pick_all=itemgetter(*map(names.index, complete)),
        launches=None if steps is None else device.prepare(steps),
    )


def _checked(
    operands: DenseOperands | SparseOperands,
    options: DecodeOptions,
    unused: dict[str, Any],
    named: dict[str, Any],
    schedule: MlaSchedule | None,
) -> tuple[Device, DecodePlan]:
    """Where a call runs, and what it needs there. unused: arguments that it must be without. named: all tensors."""
    check_columns("head_dim_v", options.head_dim_v)
    if options.softmax_scale is not None:
        check_scale("softmax_scale", options.softmax_scale)
    check_empty_lse(options.empty_lse)
    given_plan = plan_specs(*(named[name] for name in _PLAN)) if schedule is None else None
    for name in ("causal", "is_fp8_kvcache", "batch_invariant"):
        check_flag(name, getattr(options, name))
    results = {name: named[name] for name in _RESULTS}
    refuse_gradients(**operands._asdict(), **results)
    if isinstance(operands, DenseOperands):
        _reject("without indices", unused)
        _check_fp8_flag(operands.k_cache, options.is_fp8_kvcache)
    else:
        if options.causal:
            raise ValueError("causal is True: not supported with indices; supported: False")
        _reject("with indices", unused)
    out, lse, workspace = results.values()
    wanted = Wanted(
        given_plan=given_plan,
        out=optional_spec("out", out),
        lse=optional_spec("lse", lse),
        causal=bool(options.causal),
        is_fp8_kvcache=bool(options.is_fp8_kvcache),
        batch_invariant=bool(options.batch_invariant),
        address_alignment=alignment(address_of("q", operands.q), 0 if out is None else out.data_ptr()),
    )
    device = device_for(operands.q.device)
    plan = operands.plan(wanted, device)
    if workspace is not None:
        _check_workspace(workspace, plan.workspace_bytes, operands.q.device, plan.op)
    check_apart(results, {name: tensor for name, tensor in named.items() if name not in results})
    for name, bytes_ in _ALIGNMENTS.items():
        if named.get(name) is not None:
            check_address(name, address_of(name, named[name]), bytes_)
    if schedule is not None:
        schedule.check(plan.schedule_key)
    return device, plan


def _steps(
    operands: DenseOperands | SparseOperands, device: Device, plan: DecodePlan, options: DecodeOptions, numbers: dict[str, int]
) -> CallSteps:
    """The launches of a call: decode, and combine if a request can be split. numbers: of the tensors, by name."""

    def place(name: str | None) -> Place | None:
        return None if name is None or name not in numbers else Place(numbers[name])

    out_accum = lse_accum = None
    if plan.workspace_bytes:
        out_accum = Place(numbers["workspace"], 0, plan.out_accum_bytes)
        lse_accum = Place(numbers["workspace"], plan.out_accum_bytes, plan.lse_accum_bytes)
    pointers = (*map(place, operands.pointers(plan)), *map(place, (*_PLAN, "out", "lse")), out_accum, lse_accum)
    maps = tuple(MappedTensor(numbers[name], layout) for name, layout in operands.maps(plan))
    scale_log2 = (plan.default_scale if options.softmax_scale is None else options.softmax_scale) * LOG2E
    scalars = (*plan.int64s, scale_log2, options.empty_lse, *plan.int32s)
    kernel = device.kernel(plan.op, plan.kernel)
    steps = [Step(kernel, plan.grid, maps, pointers, scalars, pdl=True)]
    if plan.combine_grid is not None:
        combine = device.kernel("combine", plan.combine_kernel)
        by_name = dict(zip((param.name for param in kernel.params if param.kind is ParamKind.POINTER), pointers, strict=True))
        sources = [_COMBINE_NAMES[plan.op].get(param.name, param.name) for param in combine.params if param.kind is ParamKind.POINTER]
        scalars = (*plan.results.strides, options.empty_lse, *plan.combine_int32s)
        steps.append(Step(combine, plan.combine_grid, (), tuple(map(by_name.get, sources)), scalars, pdl=True))
    written = ("out", "lse", "workspace") if plan.workspace_bytes else ("out", "lse")
    return CallSteps(tuple(steps), len(numbers), tuple(numbers[name] for name in written))


def plan_specs(metadata: torch.Tensor | MlaSchedule, num_splits: torch.Tensor | None) -> PlanSpecs | None:
    """Of the plan's tensors; None if a schedule object has them."""
    if isinstance(metadata, MlaSchedule):
        if num_splits is not None:
            raise ValueError("num_splits is given beside a schedule object; supported: None, as get_mla_metadata() returns")
        return None
    if not isinstance(metadata, torch.Tensor) or not isinstance(num_splits, torch.Tensor):
        raise ValueError(
            f"tile_scheduler_metadata is {type(metadata).__name__}, num_splits {type(num_splits).__name__}; "
            "supported: what get_mla_metadata returns, either a schedule object and None or two tensors"
        )
    return PlanSpecs(spec_of("tile_scheduler_metadata", metadata), spec_of("num_splits", num_splits))


def _reject(where: str, given: dict[str, Any]) -> None:
    """ValueError if any of the arguments is more than absent. where: the kind of call that does not have them."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} is {shown(value)}: not supported {where}; supported: None")


def _check_fp8_flag(k_cache: Any, is_fp8_kvcache: bool) -> None:
    dtype = spec_of("k_cache", k_cache).dtype
    if is_fp8_kvcache and dtype != torch.float8_e4m3fn:
        raise ValueError(
            f"is_fp8_kvcache is {is_fp8_kvcache!r} with a k_cache of {dtype}; supported without indices: {torch.float8_e4m3fn}"
        )


def _check_workspace(workspace: torch.Tensor, nbytes: int, device: torch.device, op: str) -> None:
    """ValueError unless the caller's workspace will do."""
    spec = spec_of("workspace", workspace)
    if spec.device != device:
        raise ValueError(f"workspace is on {spec.device}; supported: the device of q, {device}")
    check_contiguous("workspace", spec)
    if workspace.nbytes < nbytes:
        raise ValueError(f'workspace has {workspace.nbytes} bytes; supported: at least {nbytes}, see workspace_size("{op}", ...)')
