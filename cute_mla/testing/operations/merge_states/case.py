"""Cases of merge_states."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ....spec.arch import Arch
from ....spec.merge_states import MergeStatesConfig
from ....spec.mla import D_V, ceil_div
from ...cases.base import DTYPES, TAGS, BaseCase, Tags
from ...cases.far import FAR_DIMENSIONS, far_tensor
from ...cases.tensors import OutputBuffer, generator_for, nan_tensor, sliced_buffers

StateForm = Literal["listed", "stacked"]
StateLayout = Literal["packed", "sliced", "odd", "heads_first", "far_states", "far_requests", "far_tokens", "far_heads"]
EmptyStates = Literal["none", "some", "all"]
LseValues = Literal["normal", "rising"]

_ROWS_OF_A_TILE = 512  # rows of one state that cost about as much on the simulated device as a tile of attention
_LSE_SPREAD = 3.0
_RISE = 250.0  # of lse from the first state to the last, half of it in the last step: exp overflows if the maximum leaves it out
_FAR_STATES = ("far_states", *FAR_DIMENSIONS)  # layouts by the dimension of [states, requests, tokens, heads] that lies far


class MergeProblem(NamedTuple):
    """The properties of a call that select the kernel."""

    config: MergeStatesConfig


@dataclass(frozen=True)
class MergeStatesCase(BaseCase):
    """One merge of `states` results over the same queries.

    batch: requests, None: tensors without a batch dimension. form: "listed": a list of tensors; "stacked": one tensor of all states.
    layout: of the states: "sliced": rows are 16-byte aligned slices; "odd": rows begin at odd elements; "heads_first": tokens and heads
        transposed, lse too; "far_states": the last of stacked states lies FAR_ELEMENTS or more from the first; one of FAR_DIMENSIONS: the
        last request, token or head does, in out and in lse.
    empty: which rows have an infinite lse and NaN in out: "some": each row in some of the states, and a few in all of them.
    values: of lse; "rising": from -250 at the first state to -125 before the last, which is at 0.
    in_place: out and lse are the second state.
    """

    op: ClassVar[str] = "merge_states"
    cut_by: ClassVar[str] = "tokens"
    tags: ClassVar[Tags] = {
        "form": str,
        "layout": lambda layout: f"states_{layout}",
        "empty": lambda empty: f"{empty}_empty",
        "values": str,
        "in_place": lambda _: "in_place",
        **TAGS,
    }

    states: int = 2
    batch: int | None = None
    tokens: int = 5
    h_q: int = 3
    head_dim: int = D_V
    form: StateForm = "listed"
    layout: StateLayout = "packed"
    empty: EmptyStates = "none"
    values: LseValues = "normal"
    in_place: bool = False

    @property
    def shape_id(self) -> str:
        """Return the first part of the id."""
        batch = "" if self.batch is None else f"b{self.batch}-"
        return f"{self.dtype}-d{self.head_dim}-n{self.states}-{batch}t{self.tokens}-h{self.h_q}"

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """Return the shape of an lse: requests if there is a batch, tokens, heads."""
        return (*(() if self.batch is None else (self.batch,)), self.tokens, self.h_q)

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        """Return requests, tokens, heads and columns of the queries whose results are merged."""
        return (1 if self.batch is None else self.batch), self.tokens, self.h_q, self.head_dim

    @property
    def tiles(self) -> int:
        """Return the cost on the simulated device, in tiles of attention."""
        return max(ceil_div(math.prod(self.rows_shape) * self.states, _ROWS_OF_A_TILE), 1)

    def problem(self, arch: Arch) -> MergeProblem:
        """Return the properties of the call that select the kernel."""
        return MergeProblem(MergeStatesConfig(self.dtype, self.head_dim))


@dataclass(frozen=True)
class MergeStatesTensors:
    """The operands of a case: outs [states, *rows, head_dim] and lses [states, *rows]."""

    outs: Tensor
    lses: Tensor
    output_buffers: Mapping[str, OutputBuffer] = field(default_factory=dict)


def make_merge_states_tensors(case: MergeStatesCase, device: str | torch.device = "cpu") -> MergeStatesTensors:
    """Make the operands of a case: equal for equal cases."""
    device, shape = torch.device(device), (case.states, *case.rows_shape)
    draw = generator_for(case, math.prod(shape) * case.head_dim, device)
    outs = torch.randn(*shape, case.head_dim, generator=draw, device=draw.device)
    lses = _LSE_SPREAD * torch.randn(shape, generator=draw, device=draw.device)
    if case.values == "rising":
        levels = torch.linspace(-_RISE, -_RISE / 2, case.states, device=draw.device)
        levels[-1] = 0.0
        lses += levels.view(-1, *[1] * (lses.dim() - 1))
    empty = _empty_rows(case)
    signs = torch.where(torch.arange(empty.numel()).view(empty.shape) % 2 == 0, math.inf, -math.inf)
    lses = torch.where(empty, signs, lses.cpu())
    outs = outs.cpu().masked_fill(empty.unsqueeze(-1), math.nan)
    results = {"out": ((*case.rows_shape, case.head_dim), DTYPES[case.dtype]), "lse": (case.rows_shape, torch.float32)}
    far = FAR_DIMENSIONS.index(case.outputs) - (case.batch is None) if case.outputs in FAR_DIMENSIONS else 0
    buffers = sliced_buffers("allocated" if case.in_place else case.outputs, results, device, far)
    return MergeStatesTensors(_placed(case.layout, outs.to(device, DTYPES[case.dtype])), _placed(case.layout, lses.to(device)), buffers)


def _empty_rows(case: MergeStatesCase) -> Tensor:
    """Return which rows of which states are empty, bool [states, *rows]; "some": every third row is so in all states."""
    shape = (case.states, *case.rows_shape)
    if case.empty != "some":
        return torch.full(shape, case.empty == "all")
    row = torch.arange(math.prod(case.rows_shape)).view(case.rows_shape)
    state = torch.arange(case.states).view(-1, *[1] * row.dim())
    return (row % 3 == 0) | ((row + state) % 2 == 0)


def _placed(layout: StateLayout, values: Tensor) -> Tensor:
    """Copy outs [states, .., tokens, heads, columns] or lses [states, .., tokens, heads] to their layout, with NaN around them."""
    if layout == "packed":
        return values.contiguous()
    rows = 3 if values.is_floating_point() and values.dtype != torch.float32 else 2  # dimensions of a request's tokens
    if layout in _FAR_STATES:
        far = _FAR_STATES.index(layout)
        return far_tensor(values.shape, 0 if far == 0 else values.dim() - rows + far - 2, values.dtype, values.device).copy_(values)
    if layout == "heads_first":
        return values.transpose(-rows, -rows + 1).contiguous().transpose(-rows, -rows + 1)
    before, after = (8, 8) if layout == "sliced" else (1, 2)
    wide = nan_tensor((*values.shape[:-1], values.shape[-1] + before + after), values.dtype, values.device)
    inner = wide[..., before : before + values.shape[-1]]
    return inner.copy_(values)
