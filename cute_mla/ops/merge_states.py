"""merge_states: attention states over disjoint sets of keys into one, in one launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch

from ..runtime.current import device_for
from ..spec.merge_states import HEAD_DIMS, LISTED_STATES, MAX_HEADS, MAX_TOKENS, MergeStatesArguments, MergeStatesConfig, grid, row_dtypes
from .arguments import check_empty_lse, check_no_grad
from .launch_plan import LaunchPlan, named_strides
from .overlap import check_no_overlap
from .strides import output_strides
from .tensor_spec import (
    DTYPE_NAMES,
    TensorSpec,
    check_device,
    check_dtype,
    check_dtype_of_columns,
    check_last_contiguous,
    check_shape,
    operand_spec,
    optional_spec,
    spec_of,
)

States: TypeAlias = torch.Tensor | Sequence[torch.Tensor]


class Operands(NamedTuple):
    """The states of a call. outs, lses: one tensor per state, or if stacked one tensor of all states."""

    outs: tuple[torch.Tensor, ...]
    lses: tuple[torch.Tensor, ...]
    stacked: bool

    def named(self) -> dict[str, torch.Tensor]:
        """Return all tensors, by name: "outs[0]", "lses[0]", .."""
        return {f"{name}[{i}]": state for name in ("outs", "lses") for i, state in enumerate(getattr(self, name))}


class CallSpec(NamedTuple):
    """Everything that decides on a launch, but for values and addresses.

    outs, lses: the spec of one state. states: number of states. state_strides: elements from state to state in outs and in lses, 0 for
    listed states.
    """

    outs: TensorSpec
    lses: TensorSpec
    states: int
    state_strides: tuple[int, int]
    out: TensorSpec | None
    lse: TensorSpec | None


@dataclass(frozen=True)
class MergeStatesPlan(LaunchPlan):
    """The launch of a call, and the shapes of its results."""

    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """Return whether there is no row to merge."""
        return 0 in self.lse_shape


def run(
    outs: States,
    lses: States,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    empty_lse: float = math.inf,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge states, with the arguments of api.states.merge_states."""
    empty_lse = check_empty_lse(empty_lse)
    operands = operands_of(outs, lses)
    launch_plan = plan(check(operands, out, lse))
    _check_overlap(operands, out, lse)
    first = operands.outs[0]
    device = device_for(first.device)
    if out is None:
        out = first.new_empty(launch_plan.out_shape)
        device.mark_uninitialized(out)
    if lse is None:
        lse = first.new_empty(launch_plan.lse_shape, dtype=torch.float32)
        device.mark_uninitialized(lse)
    if not launch_plan.is_empty:
        states = {**_pointers("state_out", operands.outs), **_pointers("state_lse", operands.lses)}
        args = MergeStatesArguments(**states, out=out, lse=lse, **launch_plan.scalars, empty_lse=empty_lse)
        device.launch(device.kernel("merge_states", launch_plan.kernel), launch_plan.grid, args, pdl=True)
    return out, lse


def run_lists(
    outs: list[torch.Tensor], lses: list[torch.Tensor], stacked: bool = False, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge states given as lists, as a torch op takes them. stacked: each list is one tensor of all states."""
    return run(outs[0], lses[0], **options) if stacked else run(outs, lses, **options)


def is_stacked(outs: States, lses: States) -> bool:
    """Return whether the states are two stacks rather than two sequences. ValueError if they are one of each, or neither."""
    stacked = isinstance(outs, torch.Tensor)
    alike = isinstance(lses, torch.Tensor) if stacked else isinstance(outs, list | tuple) and isinstance(lses, list | tuple)
    if not alike:
        raise ValueError(f"outs is a {type(outs).__name__}, lses a {type(lses).__name__}; supported: two tensors, or two lists of them")
    for name, states in (("outs", outs), ("lses", lses)):
        if isinstance(states, torch.Tensor) and not spec_of(name, states).shape:
            raise ValueError(f"{name} has shape []; supported: states along the first dimension")
    return stacked


def operands_of(outs: States, lses: States) -> Operands:
    """Return the states of a call. ValueError unless there are as many outs as lses, at least 1, and at most 8 if not stacked."""
    stacked = is_stacked(outs, lses)
    if len(outs) != len(lses) or not len(outs):
        raise ValueError(f"outs has {len(outs)} states, lses {len(lses)}; supported: the same number, at least 1")
    if stacked and len(outs) > 1:
        return Operands((outs,), (lses,), True)  # type: ignore[arg-type]
    if len(outs) > LISTED_STATES:
        raise ValueError(f"outs has {len(outs)} tensors; supported: 1 to {LISTED_STATES}, or more states in one tensor")
    return Operands(tuple(outs), tuple(lses), False)


def check(operands: Operands, out: torch.Tensor | None, lse: torch.Tensor | None) -> CallSpec:
    """Check each argument by itself, and that states are alike. ValueError unless they are supported."""
    one_out, one_lse = _spec_of_all("outs", operands.outs), _spec_of_all("lses", operands.lses)
    states, state_strides = len(operands.outs), (0, 0)
    if operands.stacked:
        states, state_strides = len(operands.outs[0]), (one_out.stride[0], one_lse.stride[0])
        one_out, one_lse = _spec_in_stack("outs", one_out), _spec_in_stack("lses", one_lse)
    check_no_grad(out=out, lse=lse, **operands.named())
    return CallSpec(one_out, one_lse, states, state_strides, optional_spec("out", out), optional_spec("lse", lse))


@lru_cache(maxsize=4096)
def plan(call: CallSpec) -> MergeStatesPlan:
    """Return the launch of a call. ValueError unless its tensors fit together."""
    outs, lses = call.outs, call.lses
    if len(outs.shape) not in (3, 4) or outs.shape[-1] not in HEAD_DIMS:
        dims = " or ".join(map(str, HEAD_DIMS))
        raise ValueError(
            f"a state has out of shape {list(outs.shape)}; supported: [tokens, heads, {dims}] and [batch, tokens, heads, {dims}]"
        )
    check_dtype("a state's out", outs, torch.bfloat16, torch.float16)
    check_dtype_of_columns("a state's out", outs, row_dtypes(outs.shape[-1]))
    check_last_contiguous("a state's out", outs)
    *leading, tokens, heads, head_dim = outs.shape
    lse_shape = (*leading, tokens, heads)
    check_shape("a state's lse", lses, lse_shape)
    check_dtype("a state's lse", lses, torch.float32)
    check_device("a state's lse", lses, outs.device)
    batch = leading[0] if leading else 1
    if batch * tokens > MAX_TOKENS:
        raise ValueError(f"a state has out of shape {list(outs.shape)}, {batch * tokens} tokens; supported: to {MAX_TOKENS}")
    if heads > MAX_HEADS:
        raise ValueError(f"a state has out of shape {list(outs.shape)}; supported: to {MAX_HEADS} heads")
    out_strides = output_strides("out", call.out, outs.shape, outs.dtype, outs)
    if call.out is not None:
        check_last_contiguous("out", call.out)
    lse_strides = output_strides("lse", call.lse, lse_shape, torch.float32, outs)
    out_state, lse_state = call.state_strides
    return MergeStatesPlan(
        kernel=MergeStatesConfig(DTYPE_NAMES[outs.dtype], head_dim).name,
        grid=grid(batch, tokens, heads),
        scalars={
            "state_out_stride_state": out_state,
            "state_lse_stride_state": lse_state,
            **named_strides("state_out", "batch token head", outs.stride[:-1]),
            **named_strides("state_lse", "batch token head", lses.stride),
            **named_strides("out", "batch token head", out_strides[:-1]),
            **named_strides("lse", "batch token head", lse_strides),
            "tokens": tokens,
            "heads": heads,
            "states": call.states,
        },
        out_shape=tuple(outs.shape),
        lse_shape=lse_shape,
    )


def _check_overlap(operands: Operands, out: torch.Tensor | None, lse: torch.Tensor | None) -> None:
    """Raise ValueError if a result shares memory with anything but the whole state that it replaces."""
    if out is None and lse is None:
        return
    states = operands.named()
    for name, result, group in (("out", out, operands.outs), ("lse", lse, operands.lses)):
        if result is not None and any(_is_state(result, state, operands.stacked) for state in group):
            check_no_overlap({name: result}, {other: state for other, state in states.items() if not other.startswith(f"{name}s")})
        else:
            check_no_overlap({name: result}, states)
    check_no_overlap({"out": out, "lse": lse}, {})


def _is_state(result: torch.Tensor, group: torch.Tensor, stacked: bool) -> bool:
    """Return whether a result has the address and strides of a state: of one in a stack, or of a listed one."""
    distance, strides = result.data_ptr() - group.data_ptr(), group.stride()
    if not stacked:
        return distance == 0 and result.stride() == strides
    step = strides[0] * group.itemsize
    return step > 0 and result.stride() == strides[1:] and distance % step == 0 and 0 <= distance // step < len(group)


def _pointers(name: str, tensors: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor | None]:
    """Name the pointers to all states, null where there is no tensor."""
    padded = (*tensors, *(None,) * (LISTED_STATES - len(tensors)))
    return {f"{name}_{state}": tensor for state, tensor in enumerate(padded)}


def _spec_of_all(name: str, tensors: tuple[torch.Tensor, ...]) -> TensorSpec:
    """Return the spec that all tensors have. ValueError if they differ."""
    first, *others = (operand_spec(f"{name}[{i}]", tensor) for i, tensor in enumerate(tensors))
    for i, other in enumerate(others, start=1):
        if other != first:
            raise ValueError(f"{name}[{i}] is {_spec_text(other)}; supported: as {name}[0], {_spec_text(first)}")
    return first


def _spec_text(spec: TensorSpec) -> str:
    return f"{spec.dtype} of shape {list(spec.shape)} and strides {list(spec.stride)} on {spec.device}"


def _spec_in_stack(name: str, stack: TensorSpec) -> TensorSpec:
    """Return the spec of one state of a stack. ValueError if the states share memory."""
    if stack.stride[0] == 0 and 0 not in stack.shape:
        raise ValueError(f"{name} has shape {list(stack.shape)} and strides {list(stack.stride)}; supported: states apart from each other")
    return stack._replace(shape=stack.shape[1:], stride=stack.stride[1:])
