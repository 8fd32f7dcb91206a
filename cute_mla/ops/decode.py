"""decode: calls of dense and sparse decode, checked and prepared once, then found again and repeated.

A repeated call costs a few microseconds on the host (profiles/NOTES.md, "Time on the host"):

    BODY                  packs the arguments into a key (op, numbers, flags, absences) and a tuple of tensors. It is source, generated
                          from the fields of Options, Operands and Results, and becomes the body of flash_mla_with_kvcache
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

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter
from types import ModuleType
from typing import Any, NamedTuple, get_args, get_type_hints

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


class Source(NamedTuple):
    """The source of a function's body, whose parameters are those of a public function, and the names that it uses."""

    lines: tuple[str, ...]
    names: dict[str, Any]


@lru_cache
def _optional(operands: Any) -> tuple[str, ...]:
    """Return the operands of an op that may be None."""
    return tuple(name for name, hint in get_type_hints(operands).items() if type(None) in get_args(hint))


def _excluded(op: ModuleType) -> tuple[str, ...]:
    """Return the tensors that an op must be without: optional ones of the other op."""
    (other,) = {dense_decode, sparse_decode} - {op}
    return tuple(name for name in _optional(other.Operands) if name not in op.Operands._fields)


def _tensors(op: ModuleType) -> tuple[str, ...]:
    """Return the tensors of a call: operands, the plan's, results and workspace."""
    return *op.Operands._fields, *_PLAN, *_RESULTS


def _packing(op: ModuleType) -> tuple[str, ...]:
    """Return the lines that pack the arguments of a call into a CallKey, as plain tuples, and a tuple of tensors."""
    fields: tuple[tuple[str, ...], ...] = (
        Options._fields,
        tuple(f"{name}.__class__" for name in _TYPED),
        _excluded(op),
        tuple(f"{name} is None" for name in (*_optional(op.Operands), "num_splits", *_RESULTS)),
    )
    packed = ", ".join(f"({''.join(f'{value}, ' for value in values)})" for values in fields)
    return f"key = ({op.__name__.rpartition('.')[2]}, planned_for, {packed})", f"tensors = ({', '.join(_tensors(op))})"


class CallKey(NamedTuple):
    """The part of a call that is not a tensor, and which tensors are absent.

    schedule: False without a schedule object, True with one that has no plan yet, else the shapes that it was planned for.
    options: the fields of Options. types: their classes, because 1 equals True. excluded: arguments that the op must be without.
    absences: whether each tensor that may be None is. A prepared call is kept under plain ints, floats and bools.
    """

    op: ModuleType
    schedule: ScheduleKey | bool
    options: Options
    types: tuple[type, ...]
    excluded: tuple[Any, ...]
    absences: tuple[bool, ...]


def run_packed(key: tuple[Any, ...], tensors: tuple[Any, ...], schedule: MlaSchedule | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode. key: fields of a CallKey. tensors: the operands of its op, the plan's two tensors, out, lse and workspace."""
    cache: CallCache | None = None
    found = None
    try:
        cache = device_for(tensors[0].device).call_cache
        found = cache.find(key, tensors)
    except _UNFIT:  # `prepare` says which argument it is
        cache = None
    call, given, addresses = _find_or_prepare(cache, CallKey._make(key), tensors, schedule) if found is None else found
    tensors = call.start(tensors, given, addresses, schedule)
    return tensors[-3], tensors[-2]


# The body of flash_mla_with_kvcache.
BODY = Source(
    (
        "schedule, planned_for = None, False",
        "if num_splits is None and isinstance(tile_scheduler_metadata, MlaSchedule):",
        "    schedule = tile_scheduler_metadata",
        "    planned_for = schedule.key or True",
        "    tile_scheduler_metadata, num_splits = schedule.plan or (None, None)",
        "if indices is None:",
        *(f"    {line}" for line in _packing(dense_decode)),
        "else:",
        *(f"    {line}" for line in _packing(sparse_decode)),
        "return run_packed(key, tensors, schedule)",
    ),
    {each.__name__.rpartition(".")[2]: each for each in (dense_decode, sparse_decode, MlaSchedule, run_packed)},
)


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
    arguments = (*zip(_tensors(key.op), tensors, strict=True), *zip(_excluded(key.op), key.excluded, strict=True))
    _check_order(dict(arguments)["descale_q"])
    options = check_options(Options._make(key.options), key.op.HEAD_DIMS_V)
    return key._replace(options=options, types=tuple(getattr(options, name).__class__ for name in _TYPED))


def prepare(key: CallKey, tensors: tuple[Any, ...], schedule: MlaSchedule | None) -> PreparedCall:
    """Check a call and prepare its launches. ValueError if the call is not supported.

    key: with plain options. tensors: the operands of key.op, the plan's two tensors, out, lse and workspace. schedule: the object that made
    the plan, or will make it if its tensors are None.
    """
    names = _tensors(key.op)
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
        launches = NoKeys(numbers["out"], numbers["lse"], key.options.empty_lse, numbers.get("cu_seqlens_q"))
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
    operands = key.op.Operands(*(named[name] for name in key.op.Operands._fields))
    results = Results(*(named[name] for name in _RESULTS))
    options = {name: getattr(key.options, name) for name in key.op.EXCLUDED_OPTIONS}
    for name, value in (*zip(_excluded(key.op), key.excluded, strict=True), *options.items()):
        if value is not None:
            raise ValueError(f"{name} is {short_repr(value)}: not supported {key.op.WHERE}; supported: None")
    split_plan = plan_specs(*(named[name] for name in _PLAN)) if schedule is None else None
    planned_parts = None if schedule is None or schedule.key is None else schedule.key.num_parts
    call = key.op.check(operands, check_common(key.options, operands.q, results, split_plan, planned_parts))
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
    options = key.options

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
        scale_log2=(plan.default_scale if options.softmax_scale is None else options.softmax_scale) * LOG2E,
        empty_lse=options.empty_lse,
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
            empty_lse=options.empty_lse,
        )
        steps.append(step_of(device.kernel("combine", plan.combine.kernel), plan.combine.grid, merging))
    # rows of query tokens that no request has keep what they hold
    uninitialized = (*(("out", "lse") if plan.ragged is None else ()), *(("workspace",) if plan.workspace_bytes else ()))
    return CallSteps(tuple(steps), len(numbers), tuple(numbers[name] for name in uninitialized))
