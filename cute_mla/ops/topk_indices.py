"""topk_indices: positions of the greatest numbers of each row, in one launch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..runtime.current import device_for
from ..runtime.device import Device
from ..spec.arch import Arch
from ..spec.topk_indices import MAX_COLUMNS, MAX_ROWS, MAX_TOPK, TopkIndicesArguments, config_for, grid, streams
from .arguments import check_integer, check_no_grad
from .launch_plan import LaunchPlan
from .overlap import check_no_overlap
from .strides import output_strides
from .tensor_spec import TensorSpec, check_counts, check_dtype, check_last_contiguous, check_shape, operand_spec, optional_spec

# Arguments of the kernel for rows whose lengths are given one by one, and whose keys have no slots.
_NO_REQUESTS = {"table_stride": 0, "tokens_per_request": 1, "length_per_token": 1, "page_size": 0, "pages": 0}


class Keys(NamedTuple):
    """The keys that rows have, as the kernel's arguments of these names say. block_table: None: keys are given by their positions.

    page_size, pages: of the cache.
    """

    first_keys: torch.Tensor | None
    end_keys: torch.Tensor
    block_table: torch.Tensor | None
    keys: int
    tokens_per_request: int
    length_per_token: bool
    page_size: int
    pages: int


class CallSpec(NamedTuple):
    """Everything that decides on a launch, but for values and addresses."""

    logits: TensorSpec
    lengths: TensorSpec
    topk: int
    out: TensorSpec | None


def run(logits: torch.Tensor, lengths: torch.Tensor, topk: int, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Select positions, with the arguments of indexer.topk_indices."""
    call = check(logits, lengths, topk, out)
    device = device_for(logits.device)
    launch_plan = plan(call, device.arch, device.sm_count)
    check_no_overlap({"out": out}, {"logits": logits, "lengths": lengths})
    if out is None:
        out = lengths.new_empty((logits.shape[0], call.topk))
        device.mark_uninitialized(out)
    if out.numel():
        args = TopkIndicesArguments(
            logits, first_keys=None, end_keys=lengths, block_table=None, indices=out, **launch_plan.scalars, **_NO_REQUESTS
        )
        device.launch(device.kernel("topk_indices", launch_plan.kernel), launch_plan.grid, args, pdl=True)
    return out


def select(device: Device, logits: torch.Tensor | None, columns: int, keys: Keys, out: torch.Tensor) -> None:
    """Launch a selection of the keys of rows, into out int32 [rows, topk].

    logits: fp32 [rows, columns]; None: columns are at most topk, so that all keys are chosen.
    """
    rows, topk = out.shape
    if not out.numel():
        return
    config = config_for(rows, 0 if logits is None else columns, topk, device.sm_count, keys.block_table is not None, streams(device.arch))
    args = TopkIndicesArguments(
        logits=logits,
        indices=out,
        logits_stride_row=0 if logits is None else logits.stride(0),
        indices_stride_row=out.stride(0),
        table_stride=0 if keys.block_table is None else keys.block_table.stride(0),
        columns=columns,
        topk=topk,
        **{**keys._asdict(), "length_per_token": int(keys.length_per_token)},
    )
    device.launch(device.kernel("topk_indices", config.name), grid(rows, config.cluster), args, pdl=True)


def check(logits: Any, lengths: Any, topk: Any, out: Any = None) -> CallSpec:
    """Check each argument by itself. ValueError unless they are supported."""
    spec = operand_spec("logits", logits)
    check_shape("logits", spec, ("rows", "n"))
    check_dtype("logits", spec, torch.float32)
    check_last_contiguous("logits", spec)
    rows, columns = spec.shape
    if rows > MAX_ROWS or columns > MAX_COLUMNS:
        raise ValueError(f"logits has shape {[rows, columns]}; supported: to {MAX_ROWS} rows of {MAX_COLUMNS} numbers")
    counts = operand_spec("lengths", lengths)
    topk = check_integer("topk", topk, 0, MAX_TOPK)
    check_no_grad(logits=logits)
    return CallSpec(spec, counts, topk, optional_spec("out", out))


@lru_cache(maxsize=4096)
def plan(call: CallSpec, arch: Arch, sm_count: int) -> LaunchPlan:
    """Return the launch of a call on a device with sm_count SMs. ValueError unless its tensors fit together."""
    rows, columns = call.logits.shape
    check_counts("lengths", call.lengths, (rows,), call.logits.device, "logits")
    strides = output_strides("out", call.out, (rows, call.topk), torch.int32, call.logits)
    if call.out is not None:
        check_last_contiguous("out", call.out)
    config = config_for(rows, columns, call.topk, sm_count, once=streams(arch))
    scalars = {
        "logits_stride_row": call.logits.stride[0],
        "indices_stride_row": strides[0],
        "columns": columns,
        "keys": columns,
        "topk": call.topk,
    }
    return LaunchPlan(config.name, grid(rows, config.cluster), scalars)
