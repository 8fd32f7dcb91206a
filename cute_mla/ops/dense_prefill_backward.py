"""dense_prefill_backward: gradients of dense prefill, in one launch for dq and one for dk and dv."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..runtime.arguments import Memory, Span
from ..runtime.current import device_for
from ..runtime.device import Device
from ..spec.arch import Arch
from ..spec.dense_decode import MAX_ROW_ALIGNMENT
from ..spec.dense_prefill import BOX_ROWS, HEAD_DIMS, MAX_ITEMS, ROW_BYTES
from ..spec.dense_prefill_dkdv import TILE_QUERIES, DensePrefillDkdvArguments, DensePrefillDkdvProblem
from ..spec.dense_prefill_dq import (
    DTYPE,
    STATISTIC_BYTES,
    STATISTICS,
    TILE_KEYS,
    TILE_ROWS,
    BackwardWorkspace,
    DensePrefillDqArguments,
    DensePrefillDqProblem,
)
from ..spec.mla import LOG2E
from ..spec.tensor_map import TensorMap
from .arguments import NO_DOUBLE_BACKWARD, check_flag, check_integer, check_no_grad, check_scale
from .dense_prefill import UNUSED_LAYOUT, HeadLayout, check_heads, check_lengths, tensor_map
from .launch_plan import LaunchPlan, named_strides
from .overlap import check_no_overlap
from .paged_cache import dtype_of
from .strides import TMA_ALIGNMENT, alignment, check_rows, map_strides, output_strides, row_alignment
from .tensor_spec import (
    DTYPE_NAMES,
    TensorSpec,
    address_of,
    check_address,
    check_device,
    check_dtype,
    check_last_contiguous,
    check_shape,
    check_workspace,
    operand_spec,
    optional_spec,
)

_OP = "dense_prefill_backward"


class Operands(NamedTuple):
    """The tensors that a call reads."""

    dout: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    cu_seqlens_qo: torch.Tensor
    cu_seqlens_kv: torch.Tensor


class Options(NamedTuple):
    """The arguments that are not tensors."""

    max_seqlen_qo: int
    max_seqlen_kv: int
    softmax_scale: float | None
    causal: bool
    deterministic: bool


class Results(NamedTuple):
    """The tensors that a call writes, if the caller gives them."""

    dq: torch.Tensor | None
    dk: torch.Tensor | None
    dv: torch.Tensor | None
    workspace: torch.Tensor | None


class CallSpec(NamedTuple):
    """Everything that decides on the launches, but for values and addresses.

    address_alignment: what strides.alignment gives for the addresses of q, dout, out and the caller's dq.
    key_alignment: the same for those of the caller's dk and dv.
    """

    dout: TensorSpec
    q: TensorSpec
    k: TensorSpec
    v: TensorSpec
    out: TensorSpec
    lse: TensorSpec
    cu_seqlens_qo: TensorSpec
    cu_seqlens_kv: TensorSpec
    causal: bool
    max_seqlen_qo: int
    max_seqlen_kv: int
    dq: TensorSpec | None
    dk: TensorSpec | None
    dv: TensorSpec | None
    address_alignment: int
    key_alignment: int


@dataclass(frozen=True)
class DensePrefillBackwardPlan(LaunchPlan):
    """The launches of a call: that of dq, and in `keys` that of dk and dv.

    dq_maps, dkdv_maps: layouts of the tensor maps of each launch over q, dout, k and v; None for a map that no instruction uses.
    """

    keys: LaunchPlan
    workspace: BackwardWorkspace
    dq_maps: Mapping[str, HeadLayout | None]
    dkdv_maps: Mapping[str, HeadLayout | None]
    default_scale: float


def run(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens_qo: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    deterministic: bool = True,
    dq: torch.Tensor | None = None,
    dk: torch.Tensor | None = None,
    dv: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the gradients of dense prefill, with the arguments of api.varlen.flash_attn_varlen_backward."""
    operands = Operands(dout, q, k, v, out, lse, cu_seqlens_qo, cu_seqlens_kv)
    options = check_options(Options(max_seqlen_qo, max_seqlen_kv, softmax_scale, causal, deterministic))
    results = Results(dq, dk, dv, workspace)
    call = check(operands, options, results)
    device = device_for(q.device, _OP)
    launch_plan = plan(call, device.arch, device.sm_count)
    for name, tensor in (("k", k), ("v", v)):
        check_address(name, tensor.data_ptr(), TMA_ALIGNMENT)
    if workspace is not None:
        check_workspace(workspace, launch_plan.workspace.nbytes, q.device, _OP)
        check_address("workspace", workspace.data_ptr(), TMA_ALIGNMENT)
    check_no_overlap(results._asdict(), operands._asdict())
    # Kernels leave rows of no sequence alone, and a gradient must not be garbage there.
    dq, dk, dv = (tensor.new_zeros(tensor.shape) if given is None else given for tensor, given in ((q, dq), (k, dk), (v, dv)))
    if workspace is None:
        workspace = q.new_empty(launch_plan.workspace.nbytes, dtype=torch.uint8)
    device.mark_uninitialized(workspace)
    scale = launch_plan.default_scale if options.softmax_scale is None else options.softmax_scale
    _launch(device, launch_plan, operands, Results(dq, dk, dv, workspace), scale)
    return dq, dk, dv


def _launch(device: Device, launch_plan: DensePrefillBackwardPlan, operands: Operands, results: Results, scale: float) -> None:
    """Launch the kernels that have work."""
    mapped: dict[str, Memory] = {name: getattr(operands, name) for name in launch_plan.dq_maps}
    shared: dict[str, Any] = {
        "cu_seqlens_q": operands.cu_seqlens_qo,
        "cu_seqlens_k": operands.cu_seqlens_kv,
        "softmax_scale": scale,
        "scale_log2": scale * LOG2E,
    }
    nbytes = launch_plan.workspace.nbytes
    statistics = Span(results.workspace, 0, nbytes) if nbytes else None
    if 0 not in launch_plan.grid:
        rows = {name: getattr(operands, name) for name in ("q", "dout", "out", "lse")}
        maps = _maps(launch_plan.dq_maps, mapped)
        dq_args = DensePrefillDqArguments(
            **maps, **rows, **shared, **launch_plan.scalars, dq=results.dq, statistics=statistics, q_copy=None, dout_copy=None
        )
        device.launch(device.kernel("dense_prefill_dq", launch_plan.kernel), launch_plan.grid, dq_args, pdl=True)
    keys = launch_plan.keys
    if 0 not in keys.grid:
        maps = _maps(launch_plan.dkdv_maps, mapped)
        rows_of_box = TILE_QUERIES[device.arch.name][operands.q.shape[-1]]
        statistics_map = maps["q_map"]
        if statistics is not None:
            statistics_map = _statistics_map(launch_plan.workspace, rows_of_box, statistics.data_ptr())
        dkdv_args = DensePrefillDkdvArguments(**maps, **shared, statistics_map=statistics_map, dk=results.dk, dv=results.dv, **keys.scalars)
        device.launch(device.kernel("dense_prefill_dkdv", keys.kernel), keys.grid, dkdv_args, pdl=True)


def _maps(layouts: Mapping[str, HeadLayout | None], tensors: Mapping[str, Memory]) -> dict[str, TensorMap]:
    """Return tensor maps over these tensors. A map that no instruction uses is laid over q or k, memory of the call."""
    unused = (tensors["q"].data_ptr() or tensors["k"].data_ptr()) & -TMA_ALIGNMENT
    return {
        f"{name}_map": tensor_map(UNUSED_LAYOUT, unused) if layout is None else tensor_map(layout, tensors[name].data_ptr())
        for name, layout in layouts.items()
    }


@lru_cache(maxsize=4096)
def _statistics_map(layout: BackwardWorkspace, box_rows: int, address: int) -> TensorMap:
    """Return the tensor map of both statistics of all rows."""
    head = layout.statistics_stride * STATISTIC_BYTES
    return TensorMap(
        dtype="fp32",
        address=address,
        dims=(layout.total_q, layout.h_q, STATISTICS),
        strides=(head, layout.h_q * head),
        box=(box_rows, 1, STATISTICS),
    )


def check_options(options: Options) -> Options:
    """Return the options as ints, floats and bools. ValueError unless each is supported by itself."""
    return Options(
        max_seqlen_qo=check_integer("max_seqlen_qo", options.max_seqlen_qo, 0),
        max_seqlen_kv=check_integer("max_seqlen_kv", options.max_seqlen_kv, 0),
        softmax_scale=None if options.softmax_scale is None else check_scale("softmax_scale", options.softmax_scale),
        causal=check_flag("causal", options.causal),
        deterministic=check_flag("deterministic", options.deterministic),
    )


def check(operands: Operands, options: Options, results: Results) -> CallSpec:
    """Check each tensor by itself. ValueError unless it is supported. options: as check_options returns them."""
    check_no_grad(NO_DOUBLE_BACKWARD, **operands._asdict(), **results._asdict())
    specs = {name: operand_spec(name, tensor) for name, tensor in operands._asdict().items()}
    given = {name: tensor for name, tensor in results._asdict().items() if tensor is not None}
    return CallSpec(
        **specs,
        causal=options.causal,
        max_seqlen_qo=options.max_seqlen_qo,
        max_seqlen_kv=options.max_seqlen_kv,
        dq=optional_spec("dq", results.dq),
        dk=optional_spec("dk", results.dk),
        dv=optional_spec("dv", results.dv),
        address_alignment=alignment(
            *(address_of(name, getattr(operands, name)) for name in ("q", "dout", "out")), *_addresses(given, "dq")
        ),
        key_alignment=alignment(*_addresses(given, "dk", "dv")),
    )


def _addresses(given: Mapping[str, torch.Tensor], *names: str) -> list[int]:
    """Return the addresses of the results that the caller gives."""
    return [address_of(name, given[name]) for name in names if name in given]


@lru_cache(maxsize=4096)
def plan(call: CallSpec, arch: Arch, sm_count: int) -> DensePrefillBackwardPlan:
    """Return the launches of a call on a device with sm_count SMs. ValueError unless its tensors fit together."""
    q, k, v = call.q, call.k, call.v
    check_heads(q, k, v, HEAD_DIMS)
    batch = check_lengths(call.cu_seqlens_qo, call.cu_seqlens_kv, q)
    check_dtype("q", q, dtype_of(DTYPE))
    _check_rows(call)
    total_q, h_q, d_qk = q.shape
    total_k, h_kv, _ = k.shape
    strides = {}
    for name, like in (("dq", q), ("dk", k), ("dv", v)):
        given = getattr(call, name)
        strides[name] = output_strides(name, given, tuple(like.shape), q.dtype, q)
        if given is not None:
            check_last_contiguous(name, given)
    problem = DensePrefillDqProblem(
        arch=arch,
        dtype=DTYPE_NAMES[q.dtype],
        d_qk=d_qk,
        batch=batch,
        h_q=h_q,
        h_kv=h_kv,
        max_seqlen_q=min(call.max_seqlen_qo, total_q),
    )
    keys = DensePrefillDkdvProblem(arch, problem.dtype, d_qk, batch, h_kv, min(call.max_seqlen_kv, total_k))
    _check_items("q", q, ("max_seqlen_qo", call.max_seqlen_qo), problem.items)
    _check_items("k", k, ("max_seqlen_kv", call.max_seqlen_kv), keys.items)
    workspace = BackwardWorkspace(total_q, h_q)
    common = {"batch": batch, "heads_per_kv": h_q // h_kv, "total_q": total_q, "total_k": total_k, "causal": int(call.causal)}
    rows = {name: getattr(call, name).stride[:2] for name in ("q", "dout", "out", "lse")} | {"dq": strides["dq"]}
    aligned = all(spec is None or row_alignment(spec, call.key_alignment) == MAX_ROW_ALIGNMENT for spec in (call.dk, call.dv))
    return DensePrefillBackwardPlan(
        kernel=problem.config.name,
        grid=problem.grid(sm_count),
        scalars={
            **_named(rows),
            **common,
            "statistics_stride": workspace.statistics_stride,
            "h_q": h_q,
            "row_blocks": problem.row_blocks,
        },
        keys=LaunchPlan(
            kernel=keys.config.name,
            grid=keys.grid(sm_count),
            scalars={
                **_named({name: strides[name] for name in ("dk", "dv")}),
                **common,
                "h_kv": h_kv,
                "query_limit": min(problem.row_blocks * TILE_ROWS, total_q),
                "row_blocks": keys.row_blocks,
                "aligned": int(aligned),
            },
        ),
        workspace=workspace,
        dq_maps=_layouts(call, BOX_ROWS, TILE_KEYS[arch.name][d_qk]),
        dkdv_maps=_layouts(call, TILE_QUERIES[arch.name][d_qk], BOX_ROWS),
        default_scale=d_qk**-0.5,
    )


def _named(strides: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Name the strides along tokens and heads of several tensors."""
    return {name: value for tensor, pair in strides.items() for name, value in named_strides(tensor, "token head", pair[:2]).items()}


def _layouts(call: CallSpec, query_rows: int, key_rows: int) -> dict[str, HeadLayout | None]:
    """Return the layouts of the maps of a launch. ValueError if a tensor map cannot hold a tensor.

    query_rows, key_rows: rows of a box of q and dout, and of k and v.
    """
    boxes = {"q": (call.q, query_rows), "dout": (call.dout, query_rows), "k": (call.k, key_rows), "v": (call.v, key_rows)}
    return {name: _layout(name, spec, rows) if spec.shape[0] else None for name, (spec, rows) in boxes.items()}


def _layout(name: str, spec: TensorSpec, box_rows: int) -> HeadLayout:
    tokens, heads, columns = spec.shape
    return HeadLayout(DTYPE_NAMES[spec.dtype], (columns, heads, tokens), map_strides(name, spec, 1, 0), box_rows)


def _check_rows(call: CallSpec) -> None:
    """Raise ValueError unless dout, out and lse have a row for every row of q."""
    rows = tuple(call.q.shape[:2])
    for name, spec in (("dout", call.dout), ("out", call.out)):
        check_shape(name, spec, (*rows, HEAD_DIMS[call.q.shape[2]]))
        check_dtype(name, spec, call.q.dtype)
        check_last_contiguous(name, spec)
        check_device(name, spec, call.q.device)
    check_rows(ROW_BYTES, call.address_alignment, {"q": call.q, "dout": call.dout, "out": call.out}, {"dq": call.dq})
    check_shape("lse", call.lse, rows)
    check_dtype("lse", call.lse, torch.float32)
    check_device("lse", call.lse, call.q.device)


def _check_items(name: str, spec: TensorSpec, longest: tuple[str, int], items: int) -> None:
    """Raise ValueError if the work items over a tensor cannot be counted in 32 bits. longest: name and value of the length."""
    if items > MAX_ITEMS:
        raise ValueError(
            f"{name} has shape {list(spec.shape)}, and {longest[0]} is {longest[1]}: {items} work items; supported: to {MAX_ITEMS}"
        )
