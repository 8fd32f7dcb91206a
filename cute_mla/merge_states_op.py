"""Merging of attention states as one launch: what a call of given shapes needs (planned once, kept), and the call itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from .runtime.arguments import Argument
from .runtime.device import Device
from .spec.merge_states import HEAD_DIMS, LISTED_STATES, MAX_HEADS, MAX_TOKENS, MergeStatesConfig, grid
from .tensors import (
    DTYPE_NAMES,
    TensorSpec,
    check_apart,
    check_device,
    check_dtype,
    check_last_contiguous,
    check_shape,
    optional_spec,
    output_strides,
    spec_of,
)

States = torch.Tensor | Sequence[torch.Tensor]


def is_stacked(outs: States, lses: States) -> bool:
    """Whether the states are given in two stacks, not in two sequences. ValueError if they are in one of each, or in neither."""
    stacked = isinstance(outs, torch.Tensor)
    right = isinstance(lses, torch.Tensor) if stacked else isinstance(outs, list | tuple) and isinstance(lses, list | tuple)
    if not right:
        raise ValueError(f"outs is a {type(outs).__name__}, lses a {type(lses).__name__}; supported: two tensors, or two lists of them")
    for name, states in (("outs", outs), ("lses", lses)):
        if isinstance(states, torch.Tensor) and not spec_of(name, states).shape:
            raise ValueError(f"{name} has shape []; supported: states along the first dimension")
    return stacked


class MergeCall(NamedTuple):
    """Everything about a call but values and addresses. outs, lses: of one state. states: how many. apart: elements from state to
    state of outs and of lses that are stacked, 0 of listed ones."""

    outs: TensorSpec
    lses: TensorSpec
    states: int
    apart: tuple[int, int]
    out: TensorSpec | None
    lse: TensorSpec | None


@dataclass(frozen=True)
class MergePlan:
    """What a call needs: variant and grid, shapes of its results, scalar arguments in the order of the kernel's parameters."""

    kernel: str
    grid: tuple[int, int, int]
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    int64s: tuple[int, ...]
    int32s: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """Whether there is no row to merge."""
        return 0 in self.lse_shape


class MergeOperands(NamedTuple):
    """The states of a call. outs, lses: a tensor each; stacked: of all states one."""

    outs: tuple[torch.Tensor, ...]
    lses: tuple[torch.Tensor, ...]
    stacked: bool

    @staticmethod
    def of(outs: States, lses: States) -> MergeOperands:
        """The states that a caller gives, in two stacks or in two sequences. ValueError if they are neither."""
        stacked = is_stacked(outs, lses)
        if len(outs) != len(lses) or not len(outs):
            raise ValueError(f"outs has {len(outs)} states, lses {len(lses)}; supported: the same number, at least 1")
        if stacked and len(outs) > 1:
            return MergeOperands((outs,), (lses,), True)  # type: ignore[arg-type]
        if len(outs) > LISTED_STATES:
            raise ValueError(f"outs has {len(outs)} tensors; supported: 1 to {LISTED_STATES}, or more states in one tensor")
        return MergeOperands(tuple(outs), tuple(lses), False)

    def plan(self, out: torch.Tensor | None, lse: torch.Tensor | None) -> MergePlan:
        """What the call needs. ValueError on anything not supported."""
        one_out, one_lse = _spec_of_all("outs", self.outs), _spec_of_all("lses", self.lses)
        states, apart = len(self.outs), (0, 0)
        if self.stacked:
            states, apart = len(self.outs[0]), (one_out.stride[0], one_lse.stride[0])
            one_out, one_lse = _of_stack("outs", one_out), _of_stack("lses", one_lse)
        plan = plan_call(MergeCall(one_out, one_lse, states, apart, optional_spec("out", out), optional_spec("lse", lse)))
        self._check_apart(out, lse)
        return plan

    def _check_apart(self, out: torch.Tensor | None, lse: torch.Tensor | None) -> None:
        """ValueError if a result shares memory with anything but the state that it replaces, whole."""
        if out is None and lse is None:
            return
        states = {f"{name}[{i}]": state for name in ("outs", "lses") for i, state in enumerate(getattr(self, name))}
        for name, result in (("out", out), ("lse", lse)):
            own = f"{name}s"
            if result is not None and any(self._is_state(result, group) for group in getattr(self, own)):
                check_apart({name: result}, {other: state for other, state in states.items() if not other.startswith(own)})
            else:
                check_apart({name: result}, states)
        check_apart({"out": out, "lse": lse}, {})

    def _is_state(self, result: torch.Tensor, group: torch.Tensor) -> bool:
        """Whether a result lies where a state does, one of a stack or the only one of a group."""
        distance, strides = result.data_ptr() - group.data_ptr(), group.stride()
        if not self.stacked:
            return distance == 0 and result.stride() == strides
        apart = strides[0] * group.itemsize
        return apart > 0 and result.stride() == strides[1:] and distance % apart == 0 and 0 <= distance // apart < len(group)

    def launch(self, device: Device, plan: MergePlan, out: torch.Tensor, lse: torch.Tensor, empty_lse: float) -> None:
        """Launches merge_states. Allocates nothing."""
        args: tuple[Argument, ...] = (*_pointers(self.outs), *_pointers(self.lses), out, lse, *plan.int64s, empty_lse, *plan.int32s)
        device.launch(device.kernel("merge_states", plan.kernel), plan.grid, args, pdl=True)


def _pointers(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor | None, ...]:
    return *tensors, *(None,) * (LISTED_STATES - len(tensors))


def _spec_of_all(name: str, tensors: tuple[torch.Tensor, ...]) -> TensorSpec:
    """The spec of each of these tensors. ValueError if they are not alike."""
    first, *others = (spec_of(f"{name}[{i}]", tensor) for i, tensor in enumerate(tensors))
    for i, other in enumerate(others, start=1):
        if other != first:
            raise ValueError(f"{name}[{i}] is {_shown(other)}; supported: as {name}[0], {_shown(first)}")
    return first


def _shown(spec: TensorSpec) -> str:
    return f"{spec.dtype} of shape {list(spec.shape)} and strides {list(spec.stride)} on {spec.device}"


def _of_stack(name: str, stack: TensorSpec) -> TensorSpec:
    """One of its states. ValueError if they lie upon one another."""
    if stack.stride[0] == 0 and 0 not in stack.shape:
        raise ValueError(f"{name} has shape {list(stack.shape)} and strides {list(stack.stride)}; supported: states apart from each other")
    return stack._replace(shape=stack.shape[1:], stride=stack.stride[1:])


@lru_cache(maxsize=4096)
def plan_call(call: MergeCall) -> MergePlan:
    """Checks a call and works out what it needs. ValueError on anything not supported."""
    outs, lses = call.outs, call.lses
    if len(outs.shape) not in (3, 4) or outs.shape[-1] not in HEAD_DIMS:
        dims = " or ".join(map(str, HEAD_DIMS))
        raise ValueError(
            f"a state has out of shape {list(outs.shape)}; supported: [tokens, heads, {dims}] and [batch, tokens, heads, {dims}]"
        )
    check_dtype("a state's out", outs, torch.bfloat16, torch.float16)
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
    strides = (outs.stride[:-1], lses.stride, out_strides[:-1], lse_strides)
    return MergePlan(
        kernel=MergeStatesConfig(DTYPE_NAMES[outs.dtype], head_dim).name,
        grid=grid(batch, tokens, heads),
        out_shape=tuple(outs.shape),
        lse_shape=lse_shape,
        int64s=(*call.apart, *(stride for tensor in strides for stride in (*(0,) * (3 - len(tensor)), *tensor))),
        int32s=(tokens, heads, call.states),
    )
