"""decode: calls of dense and sparse decode, checked and prepared once, then found again and repeated.

A repeated call costs a few microseconds on the host (profiles/NOTES.md, "Time on the host"):

    run_cached            packs the arguments into a key (op, numbers, flags, absences) and a tuple of tensors
    CallCache.find        takes the last call of this key if it fits, else another call of this key that fits
    PreparedCall.fits     compares the tensors with those that were checked: class, dtype, device, shape, strides and need of gradients by
                          one call of torch's guard; then addresses: freed memory and alignment
    PreparedCall.start    allocates what the caller did not give: results and workspace; makes the plan of a new schedule object
    CudaLaunches.start    writes the addresses of the tensors to where the launches take them from, and launches; on the simulated device
                          SingleLaunches.start does, one launch after the other

Every other call goes through `prepare`, which makes all checks and keeps their outcome in the device's call cache. There is one way to
launch: a call that was just prepared runs like a repeated one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import itemgetter
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ..runtime.call_cache import ADDRESS_ALIGNMENT, Allocation, CallCache, PreparedCall, Tensors, guard
from ..runtime.current import device_for
from ..runtime.device import Device
from ..runtime.launch import BufferRef, CallSteps, Launches, MappedTensor, step_of
from ..spec.combine import CombineArguments
from ..spec.dense_decode import MAX_ROW_ALIGNMENT
from ..spec.mla import LOG2E
from ..spec.split_plan import PLAN_COLUMNS, UNIT_COLUMNS
from . import dense_decode, sparse_decode
from .arguments import is_flag, short_repr
from .decode_plan import DecodePlan, Options, Results, check_common, check_options
from .overlap import check_no_overlap
from .paged_cache import GATHER_ALIGNMENT
from .split_plan import KeyCounts, MlaSchedule, ScheduleKey, plan_specs
from .strides import TMA_ALIGNMENT
from .tensor_spec import address_of, check_address, check_workspace

_PLAN = ("tile_scheduler_metadata", "num_splits")
_RESULTS = Results._fields
_TYPED = tuple(name for name in Options._fields if not name.endswith("kv_format"))  # options whose classes a key holds

_ALIGNED = ("k_cache", "extra_k_cache", "workspace")  # tensors whose addresses are multiples of ADDRESS_ALIGNMENT
assert UNIT_COLUMNS == PLAN_COLUMNS  # parts and units are rows of one tensor
assert ADDRESS_ALIGNMENT == TMA_ALIGNMENT == GATHER_ALIGNMENT == MAX_ROW_ALIGNMENT

_data_ptr = torch.Tensor.data_ptr
_UNFIT = (AttributeError, TypeError, RuntimeError, ValueError)  # of a look-up: an argument has no address, or no hash or order


class CallKey(NamedTuple):
    """The part of a call that is not a tensor, and which tensors are absent.

    op: dense_decode or sparse_decode. descale_q to tree_mask: whether the argument is None, or, for an argument that the op must be
    without, the argument itself. schedule: False without a schedule object, True with one that has no plan yet, else the shapes that it
        was planned for. num_splits to workspace, cu_seqlens_q: whether the tensor is None. types: classes of head_dim_v to empty_lse, of
    max_seqlen_q and of both windows, because 1 equals True. A prepared call is kept under plain ints, floats and bools.
    """

    op: ModuleType
    head_dim_v: int
    softmax_scale: float | None
    causal: bool
    is_fp8_kvcache: bool
    batch_invariant: bool
    empty_lse: float
    kv_format: Any
    extra_kv_format: Any
    window: int | None
    window_sink: int
    descale_q: Any
    descale_k: Any
    attn_sink: Any
    extra_k_cache: Any
    extra_indices_in_kvcache: Any
    topk_length: Any
    extra_topk_length: Any
    tree_mask: Any
    schedule: ScheduleKey | bool
    num_splits: bool
    out: bool
    lse: bool
    workspace: bool
    max_seqlen_q: int | None
    cu_seqlens_q: bool
    types: tuple[type, ...]


def run_cached(
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
    kv_format: str | None = None,
    extra_kv_format: str | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    tree_mask: torch.Tensor | None = None,
    window: int | None = None,
    window_sink: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode, with the arguments of api.flashmla.flash_mla_with_kvcache."""
    schedule: MlaSchedule | None = None
    planned_for: ScheduleKey | bool = False
    if num_splits is None and isinstance(tile_scheduler_metadata, MlaSchedule):
        schedule = tile_scheduler_metadata
        planned_for = schedule.key or True
        tile_scheduler_metadata, num_splits = schedule.plan or (None, None)
    types = (
        head_dim_v.__class__, softmax_scale.__class__, causal.__class__, is_fp8_kvcache.__class__, batch_invariant.__class__,
        empty_lse.__class__, max_seqlen_q.__class__, window.__class__, window_sink.__class__,
    )  # fmt: skip
    # Both keys are tuples of the fields of CallKey, which takes three times as long to make.
    if indices is None:
        key: tuple[Any, ...] = (
            dense_decode, head_dim_v, softmax_scale, causal, is_fp8_kvcache, batch_invariant, empty_lse, kv_format, extra_kv_format,
            window, window_sink, descale_q is None, descale_k is None,
            attn_sink is None, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length, tree_mask is None,
            planned_for, num_splits is None, out is None, lse is None, workspace is None,
            max_seqlen_q, cu_seqlens_q is None, types,
        )  # fmt: skip
        tensors: tuple[Any, ...] = (
            q, k_cache, block_table, cache_seqlens, descale_q, descale_k, attn_sink, tree_mask, cu_seqlens_q,
            tile_scheduler_metadata, num_splits, out, lse, workspace,
        )  # fmt: skip
    else:
        key = (
            sparse_decode, head_dim_v, softmax_scale, causal, is_fp8_kvcache, batch_invariant, empty_lse, kv_format, extra_kv_format,
            window, window_sink, descale_q, descale_k,
            attn_sink is None, extra_k_cache is None, extra_indices_in_kvcache is None, topk_length is None, extra_topk_length is None,
            tree_mask, planned_for, num_splits is None, out is None, lse is None, workspace is None,
            max_seqlen_q, cu_seqlens_q is None, types,
        )  # fmt: skip
        tensors = (
            q, k_cache, indices, topk_length, extra_k_cache, extra_indices_in_kvcache, extra_topk_length, attn_sink, cu_seqlens_q,
            tile_scheduler_metadata, num_splits, out, lse, workspace,
        )  # fmt: skip
    cache: CallCache | None = None
    found = None
    try:
        cache = device_for(q.device).call_cache
        found = cache.find(key, tensors)
    except _UNFIT:  # `prepare` says which argument it is
        cache = None
    call, given, addresses = _find_or_prepare(cache, CallKey._make(key), tensors, schedule) if found is None else found
    tensors = call.start(tensors, given, addresses, schedule)
    return tensors[-3], tensors[-2]


def _find_or_prepare(
    cache: CallCache | None, key: CallKey, tensors: tuple[Any, ...], schedule: MlaSchedule | None
) -> tuple[Any, tuple[torch.Tensor, ...], list[int]]:
    """Return what CallCache.find does, of a call that was found under plain numbers and flags, or is prepared. ValueError as prepare.

    cache: to look into and to add to; None: neither.
    """
    plain = plain_key(key, tensors)
    found = None
    if cache is not None and plain != key:
        try:
            found = cache.find(plain, tensors)
        except _UNFIT:
            cache = None
    if found is not None:
        return found
    call = prepare(plain, tensors, schedule)
    given = call.pick(tensors)
    if cache is not None:
        cache.add(plain, tensors[0].shape, call)
    return call, given, [*map(_data_ptr, given)]


def plain_key(key: CallKey, tensors: tuple[Any, ...]) -> CallKey:
    """Return the key with its options as ints, floats, bools and strings. ValueError unless each is supported by itself."""
    _check_order(dict(zip(key.op.Operands._fields, tensors, strict=False)).get("descale_q", key.descale_q))
    options = check_options(Options(*(getattr(key, name) for name in Options._fields)), key.op.HEAD_DIMS_V)
    types = tuple(getattr(options, name).__class__ for name in _TYPED)
    return key._replace(**options._asdict(), types=types)


def prepare(key: CallKey, tensors: tuple[Any, ...], schedule: MlaSchedule | None) -> PreparedCall:
    """Check a call and prepare its launches. ValueError if the call is not supported.

    key: with plain options. tensors: the operands of key.op, the plan's two tensors, out, lse and workspace. schedule: the object that made
    the plan, or will make it if its tensors are None.
    """
    names = (*key.op.Operands._fields, *_PLAN, *_RESULTS)
    named = dict(zip(names, tensors, strict=True))
    device, plan = _checked(key, named, schedule)
    launching = plan.has_keys and not plan.is_empty
    made = {"out", "lse"} | ({*_PLAN} if launching else set()) | ({"workspace"} if launching and plan.workspace_bytes else set())
    given = [name for name in names if named[name] is not None]
    complete = [name for name in names if named[name] is not None or name in made]
    pick = itemgetter(*map(names.index, given))
    rows = address_of("q", named["q"]) | (0 if named["out"] is None else address_of("out", named["out"]))
    numbers = {name: i for i, name in enumerate(complete)}
    launches: Launches | None = None
    if launching:
        launches = device.prepare(_steps(key, device, plan, numbers))
    elif not plan.is_empty:
        launches = NoKeys(numbers["out"], numbers["lse"], key.empty_lse, numbers.get("cu_seqlens_q"))
    return PreparedCall(
        pick=pick,
        like=guard(pick(tensors)),
        out=given.index("out") if "out" in given else 0,
        second=given.index("extra_k_cache") if "extra_k_cache" in given else 1,
        workspace=given.index("workspace") if "workspace" in given else 1,
        row_remainder=rows % ADDRESS_ALIGNMENT,
        allocations=tuple(
            Allocation(names.index(name), shape, dtype)
            for name, shape, dtype in (
                ("out", plan.results.out_shape, plan.results.out_dtype),
                ("lse", plan.results.lse_shape, torch.float32),
                ("workspace", (plan.workspace_bytes,), torch.uint8),
            )
            if name in made and name not in given
        ),
        make=_planner(device, plan, names) if set(_PLAN) <= made.difference(given) else None,
        pick_all=None if made <= set(given) else itemgetter(*map(names.index, complete)),
        launches=launches,
    )


class NoKeys(NamedTuple):
    """The results of requests that cannot have keys, written by torch.

    out, lse, cu_seqlens_q: numbers of the tensors among those of a call; the last one None where the call has none.
    """

    out: int
    lse: int
    empty_lse: float
    cu_seqlens_q: int | None

    def start(self, tensors: Sequence[torch.Tensor], addresses: list[int]) -> None:
        """Fill out with 0 and lse with empty_lse, on the current stream."""
        out, lse = tensors[self.out], tensors[self.lse]
        if self.cu_seqlens_q is None:
            out.zero_()
            lse.fill_(self.empty_lse)
        else:
            used = torch.arange(len(out), dtype=torch.int32, device=out.device) < tensors[self.cu_seqlens_q][-1]
            out.masked_fill_(used.view(-1, 1, 1), 0)
            lse.masked_fill_(used.view(-1, 1), self.empty_lse)


def _planner(device: Device, plan: DecodePlan, names: tuple[str, ...]) -> Callable[[Tensors, MlaSchedule], Tensors]:
    """Return a function that makes the plan of a schedule object and puts its tensors among those of a call. names: of the tensors."""
    at = names.index(_PLAN[0])

    def make(tensors: Tensors, schedule: MlaSchedule) -> Tensors:
        lengths, extra_lengths = (None if name is None else tensors[names.index(name)] for name in plan.lengths)
        offsets = None if plan.ragged is None else tensors[names.index("cu_seqlens_q")]
        counts = KeyCounts(lengths, extra_lengths, *plan.key_limits, offsets)
        made = schedule.prepare(device, plan.schedule_key, counts, plan.split)
        return *tensors[:at], *made, *tensors[at + len(made) :]

    return make


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
        check_workspace(results.workspace, plan.workspace_bytes, operands.q.device, plan.op)
    check_no_overlap(results._asdict(), {name: tensor for name, tensor in named.items() if name not in _RESULTS})
    for name in _ALIGNED:
        if named.get(name) is not None:
            check_address(name, address_of(name, named[name]), ADDRESS_ALIGNMENT)
    if schedule is not None:
        schedule.check(plan.schedule_key)
    return device, plan


def _check_order(descale_q: Any) -> None:
    """Raise ValueError if a flag is where descale_q is, as in a call with FlashMLA's arguments by position."""
    if is_flag(descale_q):
        raise ValueError(
            f"descale_q is {descale_q}; supported: a torch tensor, or None. By position, descale_q and descale_k come between causal and "
            "is_fp8_kvcache: pass is_fp8_kvcache and later arguments by name, or import cute_mla.flash_mla, which has FlashMLA's order"
        )


def _steps(key: CallKey, device: Device, plan: DecodePlan, numbers: dict[str, int]) -> CallSteps:
    """Return the launches of a call: decode, and combine if a request can be split. numbers: of the tensors, by argument."""

    def buffer(name: str | None) -> BufferRef | None:
        return None if name is None or name not in numbers else BufferRef(numbers[name])

    out_accum = lse_accum = None
    if plan.workspace_bytes:
        out_bytes, lse_bytes = plan.results.accum_bytes
        out_accum = BufferRef(numbers["workspace"], 0, out_bytes)
        lse_accum = BufferRef(numbers["workspace"], out_bytes, lse_bytes)
    units = None
    if plan.split.table_rows:
        parts_bytes, table_bytes = (rows * PLAN_COLUMNS * 4 for rows in (plan.grid[2], plan.split.table_rows))
        units = BufferRef(numbers["tile_scheduler_metadata"], parts_bytes, table_bytes)
    shared = {name: buffer(name) for name in ("num_splits", "out", "lse")} | {"out_accum": out_accum, "lse_accum": lse_accum}
    arguments = key.op.Arguments(
        **{name: MappedTensor(numbers[operand], layout) for name, (operand, layout) in plan.maps.items()},
        **{name: buffer(operand) for name, operand in plan.pointers.items()},
        **shared,
        **plan.scalars,
        **({} if key.op is sparse_decode else {"units": units}),
        plan=buffer("tile_scheduler_metadata"),
        scale_log2=(plan.default_scale if key.softmax_scale is None else key.softmax_scale) * LOG2E,
        empty_lse=key.empty_lse,
    )
    steps = [step_of(device.kernel(plan.op, plan.kernel), plan.grid, arguments)]
    if plan.combine is not None:
        lengths, extra_lengths = map(buffer, plan.lengths)
        merging = CombineArguments(
            **shared,
            **plan.combine.scalars,
            lengths=lengths,
            extra_lengths=extra_lengths,
            attn_sink=buffer("attn_sink"),
            cu_seqlens_q=None if units else buffer("cu_seqlens_q"),
            units=units,
            empty_lse=key.empty_lse,
        )
        steps.append(step_of(device.kernel("combine", plan.combine.kernel), plan.combine.grid, merging))
    # rows of query tokens that no request has keep what they hold
    uninitialized = (*(("out", "lse") if plan.ragged is None else ()), *(("workspace",) if plan.workspace_bytes else ()))
    return CallSteps(tuple(steps), len(numbers), tuple(numbers[name] for name in uninitialized))
