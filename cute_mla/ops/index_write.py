"""index_write: the indexer's keys into an index cache, and its queries rotated and quantised as they are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, get_args

import torch

from ..runtime.current import device_for, has_kernels
from ..spec.index_write import MAX_ROWS, IndexWriteArguments, IndexWriteConfig, Rope, ScaleFormat, grid
from ..spec.mqa_logits import COLUMNS, MAX_HEADS
from .arguments import check_eps, check_flag, check_no_grad, short_repr
from .index_torch import layer_norm, prepared, write_index_rows
from .launch_plan import LaunchPlan
from .mqa_logits import check_cache
from .norm_rope import angles_at
from .overlap import check_no_overlap
from .paged_cache import MAX_SLOTS
from .rotation_tables import check_integers, check_table
from .strides import TMA_ALIGNMENT, output_strides
from .tensor_spec import (
    TensorSpec,
    check_address,
    check_contiguous,
    check_device,
    check_dtype,
    check_last_contiguous,
    check_shape,
    operand_spec,
    optional_spec,
)


class Keys(NamedTuple):
    """The tensors that a call of write_index_cache reads."""

    k: torch.Tensor
    slot_mapping: torch.Tensor
    norm_weight: torch.Tensor
    norm_bias: torch.Tensor
    cos_sin: torch.Tensor
    positions: torch.Tensor | None


class Queries(NamedTuple):
    """The tensors that a call of prepare_index_queries reads."""

    q: torch.Tensor
    weights: torch.Tensor
    cos_sin: torch.Tensor
    positions: torch.Tensor | None


class Options(NamedTuple):
    """Options of a call. scale_format, eps: of keys."""

    rope: Rope
    hadamard: bool
    scale_format: ScaleFormat = "fp32"
    eps: float = 0.0


class CallSpec(NamedTuple):
    """Everything that decides on a launch, but for values and addresses.

    operands: the specs of Keys or Queries, by their names. written: of the index cache, or of out and out_weights. kernels: whether the
    device has kernels.
    """

    operands: tuple[tuple[str, Any], ...]
    written: tuple[Any, ...]
    options: Options
    kernels: bool


@dataclass(frozen=True)
class IndexWritePlan(LaunchPlan):
    """The launch of a call. rows: keys, or heads of all tokens."""

    rows: int


def run_keys(
    k: torch.Tensor,
    index_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    rope: Rope,
    hadamard: bool = False,
    scale_format: ScaleFormat = "fp32",
    eps: float = 1e-6,
) -> None:
    """Write keys, with the arguments of api.index_write.write_index_cache."""
    operands = Keys(k, slot_mapping, norm_weight, norm_bias, cos_sin, positions)
    options = Options(rope, hadamard, scale_format, eps)
    call = check(operands, {"index_cache": index_cache}, options)
    launch_plan = plan(call)
    if call.kernels:
        check_address("index_cache", index_cache.data_ptr(), TMA_ALIGNMENT)
        _check_loads(operands)
        check_no_overlap({"index_cache": index_cache}, operands._asdict())
    if launch_plan.rows == 0:
        return
    if not call.kernels:
        rows = layer_norm(k, norm_weight, norm_bias, call.options.eps)
        rounded = prepared(rows, angles_at(cos_sin, positions, len(k)), rope, hadamard)
        write_index_rows(rounded, index_cache, slot_mapping, scale_format == "ue8m0")
        return
    tensors = {name: tensor for name, tensor in operands._asdict().items() if name != "k"}
    _launch(k, launch_plan, **tensors, weights=None, codes=index_cache, scaled_weights=None, epsilon=call.options.eps, factor=0.0)


def run_queries(
    q: torch.Tensor,
    weights: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    rope: Rope,
    hadamard: bool = False,
    out: torch.Tensor | None = None,
    out_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prepare queries, with the arguments of api.index_write.prepare_index_queries."""
    operands = Queries(q, weights, cos_sin, positions)
    call = check(operands, {"out": out, "out_weights": out_weights}, Options(rope, hadamard))
    launch_plan = plan(call)
    if call.kernels:
        _check_loads(operands)
        if out is not None:
            check_address("out", out.data_ptr(), TMA_ALIGNMENT)
    check_no_overlap({"out": out, "out_weights": out_weights}, operands._asdict())
    if out is None:
        out = _new(q.shape, torch.float8_e4m3fn, call)
    if out_weights is None:
        out_weights = _new(weights.shape, torch.float32, call)
    if launch_plan.rows == 0:
        return out, out_weights
    if not call.kernels:
        rows = prepared(q, angles_at(cos_sin, positions, len(q)), rope, hadamard)
        out.view(torch.uint8).copy_(rows.codes)
        out_weights.copy_(weights.float() * factor_of(q.shape[1]) * rows.scales)
        return out, out_weights
    keys_only = {"slot_mapping": None, "norm_weight": None, "norm_bias": None, "epsilon": 0.0}
    tensors = {name: tensor for name, tensor in operands._asdict().items() if name != "q"}
    _launch(q, launch_plan, **tensors, **keys_only, codes=out, scaled_weights=out_weights, factor=factor_of(q.shape[1]))
    return out, out_weights


def _new(shape: tuple[int, ...], dtype: torch.dtype, call: CallSpec) -> torch.Tensor:
    """Allocate a result on the device of a call."""
    (_, first), *_ = call.operands
    result = torch.empty(shape, dtype=dtype, device=first.device)
    if call.kernels:
        device_for(first.device).mark_uninitialized(result)
    return result


def factor_of(heads: int) -> float:
    """Return what the weight of a head is multiplied with, besides the scale of its query: heads^-1/2 * 128^-1/2."""
    return float((heads * COLUMNS) ** -0.5)


def check(operands: Keys | Queries, written: dict[str, torch.Tensor | None], options: Options) -> CallSpec:
    """Check each argument by itself. ValueError unless they are supported. written: the results, by their names."""
    plain = options._replace(hadamard=check_flag("hadamard", options.hadamard), eps=check_eps(options.eps))
    named = (("rope", options.rope, get_args(Rope)), ("scale_format", options.scale_format, get_args(ScaleFormat)))
    for name, value, known in named:
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"{name} is {short_repr(value)}; supported: {', '.join(map(repr, known))}")
    check_no_grad(**operands._asdict(), **written)
    given = operands._asdict()
    specs: tuple[tuple[str, Any], ...] = tuple((name, operand_spec(name, tensor)) for name, tensor in given.items() if name != "positions")
    specs += (("positions", optional_spec("positions", operands.positions)),)
    results = tuple((operand_spec if name == "index_cache" else optional_spec)(name, tensor) for name, tensor in written.items())
    return CallSpec(specs, results, plain, has_kernels(operands[0].device, "index_write"))


@lru_cache(maxsize=4096)
def plan(call: CallSpec) -> IndexWritePlan:
    """Return the launch of a call. ValueError unless its tensors fit together."""
    names = dict(call.operands)
    return _plan_keys(call, names) if "k" in names else _plan_queries(call, names)


def _plan_keys(call: CallSpec, names: dict[str, Any]) -> IndexWritePlan:
    """Return the launch of write_index_cache. names: its operands."""
    (cache,) = call.written
    k, slots = names["k"], names["slot_mapping"]
    check_shape("k", k, ("tokens", COLUMNS))
    tokens = _check_rows("k", call, k)
    page_size, page_stride = check_cache("index_cache", cache, k.device, "k")
    if cache.shape[0] * page_size > MAX_SLOTS:
        raise ValueError(f"index_cache has shape {list(cache.shape)}, {cache.shape[0] * page_size} slots; supported: to {MAX_SLOTS}")
    check_integers("slot_mapping", slots, tokens, k.device, "k")
    for name in ("norm_weight", "norm_bias"):
        check_shape(name, names[name], (COLUMNS,))
        check_dtype(name, names[name], torch.float32)
        check_contiguous(name, names[name])
        check_device(name, names[name], k.device, "k")
    scalars = {
        "rows_stride_head": 0,
        "slot_stride_token": slots.stride[0],
        "weights_stride_token": 0,
        "codes_stride_first": page_stride,
        "codes_stride_head": 0,
        "scaled_weights_stride_token": 0,
        "heads": 1,
        "slots": cache.shape[0] * page_size,
        "page_size": page_size,
        "wide_slots": int(slots.dtype == torch.int64),
        "wide_weights": 0,
    }
    return _plan(call, names, IndexWriteConfig("keys"), tokens, scalars)


def _plan_queries(call: CallSpec, names: dict[str, Any]) -> IndexWritePlan:
    """Return the launch of prepare_index_queries. names: its operands."""
    out, out_weights = call.written
    q, weights = names["q"], names["weights"]
    check_shape("q", q, ("tokens", "heads", COLUMNS))
    tokens, heads = _check_rows("q", call, q), q.shape[1]
    if not 1 <= heads <= MAX_HEADS:
        raise ValueError(f"q has shape {list(q.shape)}; supported: 1 to {MAX_HEADS} heads")
    check_shape("weights", weights, (tokens, heads), " with this q")
    check_dtype("weights", weights, torch.float32, torch.bfloat16)
    check_last_contiguous("weights", weights)
    check_device("weights", weights, q.device)
    strides = output_strides("out", out, (tokens, heads, COLUMNS), torch.float8_e4m3fn, q)
    weight_strides = output_strides("out_weights", out_weights, (tokens, heads), torch.float32, q)
    for name, spec in (("out", out), ("out_weights", out_weights)):
        if spec is not None:
            check_last_contiguous(name, spec)
    moved = [stride for size, stride in zip((tokens, heads), strides[:2], strict=True) if size > 1]
    if any(stride % TMA_ALIGNMENT for stride in moved):
        raise ValueError(f"out has strides {list(strides)}; supported: multiples of {TMA_ALIGNMENT} bytes between heads and tokens")
    scalars = {
        "rows_stride_head": q.stride[1],
        "slot_stride_token": 0,
        "weights_stride_token": weights.stride[0],
        "codes_stride_first": strides[0],
        "codes_stride_head": strides[1],
        "scaled_weights_stride_token": weight_strides[0],
        "heads": heads,
        **dict.fromkeys(("slots", "page_size", "wide_slots"), 0),
        "wide_weights": int(weights.dtype == torch.float32),
    }
    return _plan(call, names, IndexWriteConfig("queries"), tokens, scalars)


def _check_rows(name: str, call: CallSpec, rows: TensorSpec) -> int:
    """Return the tokens of k or q. ValueError unless kernels, or torch where there are none, can read it."""
    check_dtype(name, rows, torch.bfloat16, *(() if call.kernels else (torch.float32,)))
    check_last_contiguous(name, rows)
    if math.prod(rows.shape[:-1]) > MAX_ROWS:
        raise ValueError(f"{name} has shape {list(rows.shape)}; supported: to {MAX_ROWS} rows of {COLUMNS} columns")
    return rows.shape[0]


def _plan(call: CallSpec, names: dict[str, Any], config: IndexWriteConfig, tokens: int, scalars: dict[str, int]) -> IndexWritePlan:
    """Return the launch of either call: check what they share, and add its scalars. scalars: of what they do not share."""
    first, rows = call.operands[0]
    table, positions = names["cos_sin"], names["positions"]
    check_table("cos_sin", table, rows.device, first)
    if positions is not None:
        check_integers("positions", positions, tokens, rows.device, first)
    count = tokens * scalars["heads"]
    return IndexWritePlan(
        kernel=config.name,
        grid=grid(count),
        scalars={
            **scalars,
            "rows_stride_token": rows.stride[0],
            "position_stride_token": 0 if positions is None else positions.stride[0],
            "cos_sin_stride_position": table.stride[0],
            "row_count": count,
            "table_rows": table.shape[0],
            "wide_positions": int(positions is not None and positions.dtype == torch.int64),
            "half_split": int(call.options.rope == "half_split"),
            "hadamard": int(call.options.hadamard),
            "exponents": int(call.options.scale_format == "ue8m0"),
        },
        rows=count,
    )


def _check_loads(operands: Keys | Queries) -> None:
    """Raise ValueError unless fp32 operands start at multiples of what a lane loads at once."""
    for name in ("norm_weight", "norm_bias", "cos_sin"):
        tensor = getattr(operands, name, None)
        if tensor is not None:
            check_address(name, tensor.data_ptr(), TMA_ALIGNMENT)


def _launch(rows: torch.Tensor, launch_plan: IndexWritePlan, **more: torch.Tensor | float | None) -> None:
    """Launch the kernel over rows. more: the other pointers and the numbers in fp32, by their names."""
    device = device_for(rows.device)
    args = IndexWriteArguments(rows=rows, **more, **launch_plan.scalars)
    device.launch(device.kernel("index_write", launch_plan.kernel), launch_plan.grid, args, pdl=True)
