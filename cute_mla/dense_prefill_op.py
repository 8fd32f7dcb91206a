"""Dense prefill as one launch: what a call of given shapes needs (planned once, kept), and the call itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from .runtime.arguments import Argument
from .runtime.device import Device
from .spec.arch import Arch
from .spec.dense_prefill import BOX_COLUMNS, BOX_ROWS, D_V, HEAD_DIMS, MAX_ITEMS, MAX_TOKENS, DensePrefillConfig, DensePrefillProblem
from .spec.mla import ELEMENT_BYTES, LOG2E
from .spec.tensor_map import Swizzle, TensorMap
from .support import heads_problem
from .tensors import (
    DTYPE_NAMES,
    TMA_ALIGNMENT,
    TensorSpec,
    check_address,
    check_counts,
    check_device,
    check_dtype,
    check_last_contiguous,
    check_shape,
    is_map_stride,
    map_stride,
    map_strides,
    output_strides,
    row_alignment,
    spec_of,
)


class VarlenWanted(NamedTuple):
    """What a caller says beside its operands, and the results that it gives.

    max_seqlen_q: query tokens of the longest sequence. address_alignment: what row_alignment takes, of q and out (the caller's,
    if given).
    """

    causal: bool
    max_seqlen_q: int
    out: TensorSpec | None
    lse: TensorSpec | None
    address_alignment: int


class DensePrefillCall(NamedTuple):
    """Everything about a call but values and addresses."""

    q: TensorSpec
    k: TensorSpec
    v: TensorSpec
    cu_seqlens_q: TensorSpec
    cu_seqlens_k: TensorSpec
    wanted: VarlenWanted


class HeadLayout(NamedTuple):
    """A tensor of heads as its map has it. shape: (columns, heads, tokens). strides: bytes between heads and between tokens."""

    dtype: str
    shape: tuple[int, int, int]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class DensePrefillPlan:
    """What a call needs.

    kernel, grid: the variant and its CTAs. out_shape, lse_shape: of the results. layouts: of q, k and v for their tensor maps,
    None for one that no instruction uses. int64s, int32s: scalar arguments, in the order of the kernel's parameters.
    """

    kernel: str
    grid: tuple[int, int, int]
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    layouts: tuple[HeadLayout | None, ...]
    default_scale: float
    int64s: tuple[int, ...]
    int32s: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """Whether there is no row to compute."""
        return 0 in self.grid


class VarlenResults(NamedTuple):
    """What a call writes."""

    out: torch.Tensor
    lse: torch.Tensor


class VarlenOperands(NamedTuple):
    """The operands of a call, not yet checked."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor

    def plan(self, wanted: VarlenWanted, device: Device) -> DensePrefillPlan:
        """What the call needs on a device. ValueError on anything not supported."""
        call = DensePrefillCall(
            q=spec_of("q", self.q),
            k=spec_of("k", self.k),
            v=spec_of("v", self.v),
            cu_seqlens_q=spec_of("cu_seqlens_q", self.cu_seqlens_q),
            cu_seqlens_k=spec_of("cu_seqlens_k", self.cu_seqlens_k),
            wanted=wanted,
        )
        plan = plan_call(call, device.arch, device.sm_count)
        check_address("k", self.k.data_ptr(), TMA_ALIGNMENT)
        check_address("v", self.v.data_ptr(), TMA_ALIGNMENT)
        return plan

    def launch(self, device: Device, plan: DensePrefillPlan, results: VarlenResults, softmax_scale: float | None, empty_lse: float) -> None:
        """Launches dense_prefill. Allocates nothing."""
        scale = plan.default_scale if softmax_scale is None else softmax_scale
        maps = (self._map(tensor, layout) for tensor, layout in zip((self.q, self.k, self.v), plan.layouts, strict=True))
        args: tuple[Argument, ...] = (
            *maps,
            self.q,
            self.cu_seqlens_q,
            self.cu_seqlens_k,
            *results,
            *plan.int64s,
            scale * LOG2E,
            empty_lse,
            *plan.int32s,
        )
        device.launch(device.kernel("dense_prefill", plan.kernel), plan.grid, args, pdl=True)

    def _map(self, tensor: torch.Tensor, layout: HeadLayout | None) -> TensorMap:
        """The tensor map of q, k or v. One that no instruction uses lies over the call's own memory, too: there always is q."""
        if layout is None:
            return tensor_map(_UNUSED, self.q.data_ptr() & -TMA_ALIGNMENT)
        return tensor_map(layout, tensor.data_ptr())


# The least that a map can hold: the 16 bytes at its address.
_UNUSED = HeadLayout("bf16", (TMA_ALIGNMENT // ELEMENT_BYTES, 1, 1), (TMA_ALIGNMENT, TMA_ALIGNMENT))


@lru_cache(maxsize=4096)
def tensor_map(layout: HeadLayout, address: int) -> TensorMap:
    """A tensor of heads at an address, for boxes of 64 columns by 64 tokens of one head. Kept: allocators give addresses again."""
    return TensorMap(
        dtype=layout.dtype,
        address=address,
        dims=layout.shape,
        strides=layout.strides,
        box=(BOX_COLUMNS, 1, BOX_ROWS),
        swizzle=Swizzle.B128,
    )


@lru_cache(maxsize=4096)
def plan_call(call: DensePrefillCall, arch: Arch, sm_count: int) -> DensePrefillPlan:
    """Checks a call and works out what it needs on a device with sm_count SMs. ValueError on anything not supported."""
    q, wanted = call.q, call.wanted
    _check_heads(call)
    batch = _check_lengths(call)
    total_q, h_q, d_qk = q.shape
    total_k, h_kv, _ = call.k.shape
    out_strides = output_strides("out", wanted.out, (total_q, h_q, D_V), q.dtype, q)
    if wanted.out is not None:
        check_last_contiguous("out", wanted.out)
    lse_strides = output_strides("lse", wanted.lse, (total_q, h_q), torch.float32, q)
    q_strides = tuple(map_stride(q, dim) for dim in (1, 0))
    aligned = row_alignment(wanted.address_alignment, q, wanted.out)
    problem = DensePrefillProblem(
        arch=arch,
        dtype=DTYPE_NAMES[q.dtype],
        d_qk=d_qk,
        batch=batch,
        h_q=h_q,
        h_kv=h_kv,
        max_seqlen_q=min(wanted.max_seqlen_q, total_q),
        # Strides that no tensor map can hold, 0 among them, are served by the variants that do without one.
        row_alignment=aligned if all(map(is_map_stride, q_strides)) else ELEMENT_BYTES,
    )
    if problem.items > MAX_ITEMS:
        raise ValueError(
            f"q has shape {list(q.shape)}, cu_seqlens_q {list(call.cu_seqlens_q.shape)}, and max_seqlen_q is {wanted.max_seqlen_q}: "
            f"{problem.items} work items; supported: to {MAX_ITEMS}"
        )
    return DensePrefillPlan(
        kernel=problem.config.name,
        grid=problem.grid(sm_count),
        out_shape=(total_q, h_q, D_V),
        lse_shape=(total_q, h_q),
        layouts=_layouts(call, problem.config),
        default_scale=d_qk**-0.5,
        int64s=(*q.stride[:2], *out_strides[:2], *lse_strides),
        int32s=(batch, h_q, h_q // h_kv, total_q, total_k, problem.row_blocks, int(wanted.causal)),
    )


def _layouts(call: DensePrefillCall, config: DensePrefillConfig) -> tuple[HeadLayout | None, ...]:
    """Of q, k and v. ValueError if a tensor map cannot hold what is always loaded by one."""
    layouts = []
    for name, spec, used in (
        ("q", call.q, config.access_bytes > ELEMENT_BYTES),
        ("k", call.k, call.k.shape[0] > 0),
        ("v", call.v, call.v.shape[0] > 0),
    ):
        tokens, heads, columns = spec.shape
        layouts.append(HeadLayout(config.dtype, (columns, heads, tokens), map_strides(name, spec, 1, 0)) if used else None)
    return tuple(layouts)


def _check_heads(call: DensePrefillCall) -> None:
    """ValueError unless q, k and v are heads of supported sizes and types, over as many keys as values."""
    q, k, v = call.q, call.k, call.v
    if len(q.shape) != 3 or q.shape[-1] not in HEAD_DIMS:
        sizes = " or ".join(map(str, HEAD_DIMS))
        raise ValueError(f"q has shape {list(q.shape)}; supported: [total_q, h_q, {sizes}], the head sizes that kernels are built for")
    check_shape("k", k, ("total_k", "h_kv", q.shape[-1]))
    check_shape("v", v, (*k.shape[:2], D_V))
    check_dtype("q", q, torch.bfloat16, torch.float16)
    for name, spec in (("q", q), ("k", k), ("v", v)):
        check_dtype(name, spec, q.dtype)
        check_device(name, spec, q.device)
        check_last_contiguous(name, spec)
        if spec.shape[0] > MAX_TOKENS:
            raise ValueError(f"{name} has shape {list(spec.shape)}; supported: to {MAX_TOKENS} tokens")
    problem = heads_problem(q.shape[1], k.shape[1], "dense_prefill")
    if problem is not None:
        raise ValueError(f"q has shape {list(q.shape)}, k {list(k.shape)}: {problem}")


def _check_lengths(call: DensePrefillCall) -> int:
    """The number of sequences. ValueError unless both tables of lengths are of as many."""
    check_counts("cu_seqlens_q", call.cu_seqlens_q, ("batch + 1",), call.q)
    entries = call.cu_seqlens_q.shape[0]
    if entries == 0:
        raise ValueError("cu_seqlens_q has shape [0]; supported: [batch + 1], at least 1")
    check_counts("cu_seqlens_k", call.cu_seqlens_k, (entries,), call.q)
    return entries - 1
