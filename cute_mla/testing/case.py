"""What the cases of all ops have in common, and the operands that they share: q and results in their layouts.

Whatever lies in and around a tensor before it gets its values is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ..spec.arch import Arch
from ..spec.dense_decode import MAX_ROW_ALIGNMENT
from ..spec.mla import D_ROPE, D_V

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

_CPU_ELEMENTS = 1 << 25  # tensors up to this size are made on the CPU, so that every device gets the same bits
STEEP = 4.0  # with "rising" and its kin: rope part of q, and bound of the rope part of k; scores span +-43 at the usual scale

Values = Literal["normal", "rising", "falling", "peaks"]
QLayout = Literal["packed", "sliced", "odd", "even", "heads_first"]
Outputs = Literal["allocated", "given", "strided", "odd"]
Tags = dict[str, Callable[[Any], str]]

_ROW_ELEMENTS = {"odd": 1, "even": 2}  # of which the rows of q or out in that layout are multiples; the others: of the most bytes

# How each field that is not part of the shape appears in a case's id, when it is not at its default.
TAGS: Tags = {
    "values": str,
    "q_layout": lambda layout: f"q_{layout}",
    "cache_layout": lambda layout: f"kv_{layout}",
    "outputs": lambda outputs: f"out_{outputs}",
    "metadata": lambda _: "tensor_plan",
    "softmax_scale": lambda scale: f"scale{scale:g}",
    "batch_invariant": lambda _: "invariant",
    "empty_lse": lambda value: f"empty{value:g}",
    "sm_count": lambda count: f"sm{count}",
    "seed": lambda seed: f"seed{seed}",
}


class Config(Protocol):
    """A compiled variant."""

    @property
    def name(self) -> str:
        """The kernel's name in the manifest, without op and arch."""


class Problem(Protocol):
    """The shapes of a call."""

    @property
    def config(self) -> Config:
        """The variant that serves it."""


class Given(NamedTuple):
    """A result's tensor that the caller gives, full of NaN, and the tensor that it is a slice of."""

    tensor: Tensor
    storage: Tensor


class Operands(Protocol):
    """The tensors of a call, as far as those of every op go."""

    @property
    def given(self) -> Mapping[str, Given]:
        """By name, the results that the call is to fill; it allocates what is not among them."""


@dataclass(frozen=True)
class BaseCase:
    """One call of any op, as far as all of them go.

    q_layout: "sliced": a 16-byte aligned slice of a larger tensor; "odd": rows one element longer than d_qk, aligned to nothing
        but the element; "even": rows two elements longer, aligned to two of them; "heads_first": a transposed
        [h_q, b, s_q, d_qk], as engines' absorption matmuls leave it.
    outputs: "given": results and workspace come from the caller; "strided": so, out being a 16-byte aligned slice and the
        others slices; "odd": so, rows of out being one element longer than d_v apart.
    sm_count: streaming multiprocessors of the simulated device, None for those of the usual board; a GPU has its own.
    cut_by: the field that a suite lowers to make a case cheaper. d_v: columns of out.
    """

    op: ClassVar[str]
    tags: ClassVar[Tags] = TAGS
    cut_by: ClassVar[str]
    d_v: ClassVar[int] = D_V

    dtype: str = "bf16"
    q_layout: QLayout = "packed"
    outputs: Outputs = "allocated"
    softmax_scale: float | None = None
    empty_lse: float | None = None
    sm_count: int | None = None
    seed: int = 0

    @property
    def id(self) -> str:
        """A short name that differs between cases: the shape, then every other field that is not at its default."""
        defaults = {field.name: field.default for field in fields(self)}
        unusual = ((name, tag) for name, tag in self.tags.items() if name in defaults and getattr(self, name) != defaults[name])
        return "-".join([self.shape_id, *(tag(getattr(self, name)) for name, tag in unusual)])

    @property
    def shape_id(self) -> str:
        """The first part of the id."""
        raise NotImplementedError

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        """(requests, query tokens of each, query heads, columns of q)."""
        raise NotImplementedError

    @property
    def scale(self) -> float:
        """The scale of the softmax, as given or by default."""
        return self.q_shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def tiles(self) -> int:
        """Tiles of 64 query rows x 64 keys, the measure of a simulated case's cost; one without keys counts as one key tile."""
        raise NotImplementedError

    def problem(self, arch: Arch) -> Problem:
        """The shapes of the call."""
        raise NotImplementedError

    @property
    def q_dtype(self) -> torch.dtype:
        """The element type of q."""
        return DTYPES[self.dtype]

    @property
    def row_alignment(self) -> int:
        """As in DenseDecodeProblem."""
        layouts = ((self.q_layout, self.q_dtype), (self.outputs, DTYPES[self.dtype]))
        unaligned = [_ROW_ELEMENTS[layout] * dtype.itemsize for layout, dtype in layouts if layout in _ROW_ELEMENTS]
        return min(unaligned, default=MAX_ROW_ALIGNMENT)


@dataclass(frozen=True)
class BatchedCase(BaseCase):
    """One call whose requests have equally many query tokens.

    batch: requests; s_q: query tokens of each; h_q: query heads.
    """

    cut_by: ClassVar[str] = "batch"

    batch: int = 1
    s_q: int = 1
    h_q: int = 16

    @property
    def d_qk(self) -> int:
        """Columns of q."""
        raise NotImplementedError

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        """(requests, query tokens of each, query heads, columns of q)."""
        return self.batch, self.s_q, self.h_q, self.d_qk


def generator_for(case: BaseCase, elements: int, device: torch.device, offset: int = 0) -> torch.Generator:
    """Draws a tensor of so many elements of a case; a case's tensors have an offset each."""
    home = torch.device("cpu") if elements <= _CPU_ELEMENTS else device
    return torch.Generator(home).manual_seed(case.seed + offset)


def normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """fp32: N(0, 1)/10 clamped to +-1."""
    return torch.randn(shape, generator=generator, device=generator.device).div_(10).clamp_(-1, 1)


def signs(device: torch.device) -> Tensor:
    """fp32 [64] of +1 and -1: the direction in which the ramps of q and k lie."""
    return 1.0 - 2.0 * (torch.arange(D_ROPE, device=device) % 3 == 0)


def levels(values: str, fraction: Tensor, generator: torch.Generator) -> Tensor:
    """How far each key's score lies from the middle, from -STEEP to STEEP; fraction: the key's position, 0 to 1."""
    if values == "rising":
        return (2 * fraction - 1) * STEEP
    if values == "falling":
        return (1 - 2 * fraction) * STEEP
    peak = torch.rand(fraction.shape, generator=generator, device=generator.device) < 0.02
    return torch.where(peak, STEEP, 0.0)


def nan_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Full of NaN."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def q_storage(case: BaseCase, device: torch.device) -> Tensor:
    """q [b, s_q, h_q, d_qk] in its layout, NaN in and around it."""
    (batch, s_q, h_q, d_qk), dtype = case.q_shape, case.q_dtype
    match case.q_layout:
        case "packed":
            return nan_tensor((batch, s_q, h_q, d_qk), dtype, device)
        case "sliced":
            return nan_tensor((batch, s_q, h_q + 2, d_qk + 64), dtype, device)[:, :, 1:-1, 32:-32]
        case "odd":
            return nan_tensor((batch, s_q, h_q, d_qk + 1), dtype, device)[..., 1:]
        case "even":
            return nan_tensor((batch, s_q, h_q, d_qk + 2), dtype, device)[..., 2:]
        case "heads_first":
            return nan_tensor((h_q, batch, s_q, d_qk), dtype, device).permute(1, 2, 0, 3)


def given_out(case: BaseCase, device: torch.device) -> Given:
    """dtype [b, s_q, h_q, d_v]."""
    (batch, s_q, h_q, _), dtype = case.q_shape, DTYPES[case.dtype]
    if case.outputs == "given":
        out = nan_tensor((batch, s_q, h_q, case.d_v), dtype, device)
        return Given(out, out)
    out = nan_tensor((batch, s_q, h_q + 1, case.d_v + (1 if case.outputs == "odd" else 64)), dtype, device)
    return Given(out[:, :, 1:, :-1] if case.outputs == "odd" else out[:, :, 1:, 32:-32], out)


def given_fp32(case: BaseCase, shape: tuple[int, int, int], dense: int, device: torch.device) -> Given:
    """fp32 of this shape, packed or strided: then elements are neighbours in memory along the dimension `dense`, 1 or 2."""
    if case.outputs == "given":
        packed = nan_tensor(shape, torch.float32, device)
        return Given(packed, packed)
    storage = nan_tensor((shape[0], shape[3 - dense], shape[dense] + 3), torch.float32, device)
    view = storage[..., 1:-2]
    return Given(view if dense == 2 else view.transpose(1, 2), storage)
