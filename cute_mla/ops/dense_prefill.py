"""dense_prefill: attention of packed sequences over keys and values of their own, in one launch."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..runtime.current import device_for
from ..spec.arch import Arch
from ..spec.dense_prefill import (
    BOX_COLUMNS,
    BOX_ROWS,
    HEAD_DIMS,
    MAX_ITEMS,
    MAX_TOKENS,
    ROW_BYTES,
    DensePrefillArguments,
    DensePrefillConfig,
    DensePrefillProblem,
    head_dtypes,
)
from ..spec.masked_prefill import DTYPE as MASKED_DTYPE
from ..spec.masked_prefill import HEAD_DIMS as MASKED_HEAD_DIMS
from ..spec.masked_prefill import MASK_WORD_KEYS, MaskedPrefillArguments
from ..spec.mla import ELEMENT_BYTES, LOG2E, ceil_div
from ..spec.tensor_map import Swizzle, TensorMap
from .arguments import check_empty_lse, check_flag, check_integer, check_no_grad, check_scale, is_number, short_repr
from .launch_plan import LaunchPlan, named_strides
from .limits import heads_error
from .overlap import check_no_overlap
from .strides import TMA_ALIGNMENT, alignment, check_rows, map_strides, output_strides
from .tensor_spec import (
    DTYPE_NAMES,
    TensorSpec,
    address_of,
    check_address,
    check_counts,
    check_device,
    check_dtype,
    check_dtype_of_columns,
    check_last_contiguous,
    check_shape,
    operand_spec,
    optional_spec,
)


class Operands(NamedTuple):
    """The tensors that a call reads."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_seqlens_qo: torch.Tensor
    cu_seqlens_kv: torch.Tensor
    key_mask: torch.Tensor | None


class Options(NamedTuple):
    """The arguments that are not tensors."""

    max_seqlen_qo: int
    max_seqlen_kv: int
    dropout_p: float
    softmax_scale: float | None
    causal: bool
    deterministic: bool
    is_varlen: bool
    empty_lse: float


class CallSpec(NamedTuple):
    """Everything that decides on a launch, but for values and addresses.

    max_seqlen_kv: 0 where it decides nothing: without a mask.
    address_alignment: what strides.alignment gives for the addresses of q and of the caller's out.
    """

    q: TensorSpec
    k: TensorSpec
    v: TensorSpec
    cu_seqlens_qo: TensorSpec
    cu_seqlens_kv: TensorSpec
    key_mask: TensorSpec | None
    causal: bool
    max_seqlen_qo: int
    max_seqlen_kv: int
    out: TensorSpec | None
    lse: TensorSpec | None
    address_alignment: int


class HeadLayout(NamedTuple):
    """Layout of a tensor map over heads.

    shape: (columns, heads, tokens). strides: bytes between heads and between tokens. box_rows: tokens of a box.
    """

    dtype: str
    shape: tuple[int, int, int]
    strides: tuple[int, ...]
    box_rows: int = BOX_ROWS


@dataclass(frozen=True)
class DensePrefillPlan(LaunchPlan):
    """The launch of a call, and the shapes of its results.

    op: of the kernel. layouts: of the tensor maps of q, k and v; None for a map that no instruction uses.
    """

    op: str
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...]
    layouts: tuple[HeadLayout | None, ...]
    default_scale: float

    @property
    def is_empty(self) -> bool:
        """Return whether there is no row to compute."""
        return 0 in self.grid


def run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_qo: torch.Tensor,
    cu_seqlens_kv: torch.Tensor,
    max_seqlen_qo: int,
    max_seqlen_kv: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    deterministic: bool = False,
    is_varlen: bool = True,
    *,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    empty_lse: float = math.inf,
    key_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend packed sequences, with the arguments of api.varlen.flash_attn_varlen_func."""
    operands = Operands(q, k, v, cu_seqlens_qo, cu_seqlens_kv, key_mask)
    given = Options(max_seqlen_qo, max_seqlen_kv, dropout_p, softmax_scale, causal, deterministic, is_varlen, empty_lse)
    options = check_options(given)
    call = check(operands, options, out, lse)
    device = device_for(q.device, "dense_prefill")
    launch_plan = plan(call, device.arch, device.sm_count)
    check_address("k", k.data_ptr(), TMA_ALIGNMENT)
    check_address("v", v.data_ptr(), TMA_ALIGNMENT)
    check_no_overlap({"out": out, "lse": lse}, operands._asdict())
    if out is None:
        out = q.new_empty(launch_plan.out_shape)
        device.mark_uninitialized(out)
    if lse is None:
        lse = q.new_empty(launch_plan.lse_shape, dtype=torch.float32)
        device.mark_uninitialized(lse)
    if not launch_plan.is_empty:
        scale = launch_plan.default_scale if options.softmax_scale is None else options.softmax_scale
        q_map, k_map, v_map = (_map(tensor, layout, q) for tensor, layout in zip((q, k, v), launch_plan.layouts, strict=True))
        common: dict[str, Any] = {
            **launch_plan.scalars,
            "q_map": q_map,
            "k_map": k_map,
            "v_map": v_map,
            "q": q,
            "cu_seqlens_q": cu_seqlens_qo,
            "cu_seqlens_k": cu_seqlens_kv,
            "out": out,
            "lse": lse,
            "scale_log2": scale * LOG2E,
            "empty_lse": options.empty_lse,
        }
        args = DensePrefillArguments(**common) if key_mask is None else MaskedPrefillArguments(**common, key_mask=key_mask)
        device.launch(device.kernel(launch_plan.op, launch_plan.kernel), launch_plan.grid, args, pdl=True)
    return out, lse


def check_options(options: Options) -> Options:
    """Return the options as ints, floats and bools. ValueError unless each is supported by itself."""
    if not is_number(options.dropout_p) or options.dropout_p != 0:
        raise ValueError(f"dropout_p is {short_repr(options.dropout_p)}; supported: 0, for only the forward pass is there")
    return Options(
        max_seqlen_qo=check_integer("max_seqlen_qo", options.max_seqlen_qo, 0),
        max_seqlen_kv=check_integer("max_seqlen_kv", options.max_seqlen_kv, 0),
        dropout_p=0.0,
        softmax_scale=None if options.softmax_scale is None else check_scale("softmax_scale", options.softmax_scale),
        causal=check_flag("causal", options.causal),
        deterministic=check_flag("deterministic", options.deterministic),
        is_varlen=check_flag("is_varlen", options.is_varlen),
        empty_lse=check_empty_lse(options.empty_lse),
    )


def check(operands: Operands, options: Options, out: Any, lse: Any) -> CallSpec:
    """Check each tensor by itself. ValueError unless it is supported. options: as check_options returns them."""
    check_no_grad(q=operands.q, k=operands.k, v=operands.v, out=out, lse=lse)
    return CallSpec(
        q=operand_spec("q", operands.q),
        k=operand_spec("k", operands.k),
        v=operand_spec("v", operands.v),
        cu_seqlens_qo=operand_spec("cu_seqlens_qo", operands.cu_seqlens_qo),
        cu_seqlens_kv=operand_spec("cu_seqlens_kv", operands.cu_seqlens_kv),
        key_mask=optional_spec("key_mask", operands.key_mask),
        causal=options.causal,
        max_seqlen_qo=options.max_seqlen_qo,
        max_seqlen_kv=0 if operands.key_mask is None else options.max_seqlen_kv,
        out=optional_spec("out", out),
        lse=optional_spec("lse", lse),
        address_alignment=alignment(address_of("q", operands.q), 0 if out is None else address_of("out", out)),
    )


@lru_cache(maxsize=4096)
def plan(call: CallSpec, arch: Arch, sm_count: int) -> DensePrefillPlan:
    """Return the launch of a call on a device with sm_count SMs. ValueError unless its tensors fit together."""
    q = call.q
    check_heads(q, call.k, call.v)
    batch = check_lengths(call.cu_seqlens_qo, call.cu_seqlens_kv, q)
    total_q, h_q, d_qk = q.shape
    total_k, h_kv, _ = call.k.shape
    out_shape = (total_q, h_q, HEAD_DIMS[d_qk])
    out_strides = output_strides("out", call.out, out_shape, q.dtype, q)
    if call.out is not None:
        check_last_contiguous("out", call.out)
    lse_strides = output_strides("lse", call.lse, (total_q, h_q), torch.float32, q)
    check_rows(ROW_BYTES, call.address_alignment, {"q": q}, {"out": call.out})
    problem = DensePrefillProblem(
        arch=arch,
        dtype=DTYPE_NAMES[q.dtype],
        d_qk=d_qk,
        batch=batch,
        h_q=h_q,
        h_kv=h_kv,
        max_seqlen_q=min(call.max_seqlen_qo, total_q),
    )
    if call.key_mask is not None:
        check_mask(call.key_mask, q, min(call.max_seqlen_kv, total_k))
    if problem.items > MAX_ITEMS:
        raise ValueError(
            f"q has shape {list(q.shape)}, cu_seqlens_qo {list(call.cu_seqlens_qo.shape)}, and max_seqlen_qo is {call.max_seqlen_qo}: "
            f"{problem.items} work items; supported: to {MAX_ITEMS}"
        )
    return DensePrefillPlan(
        op="dense_prefill" if call.key_mask is None else "masked_prefill",
        kernel=problem.config.name,
        grid=problem.grid(sm_count),
        scalars={
            **named_strides("q", "token head", q.stride[:2]),
            **named_strides("out", "token head", out_strides[:2]),
            **named_strides("lse", "token head", lse_strides),
            "batch": batch,
            "h_q": h_q,
            "heads_per_kv": h_q // h_kv,
            "total_q": total_q,
            "total_k": total_k,
            "row_blocks": problem.row_blocks,
            "causal": int(call.causal),
            **_mask_scalars(call.key_mask, total_k),
        },
        out_shape=out_shape,
        lse_shape=(total_q, h_q),
        layouts=_layouts(call, problem.config, arch),
        default_scale=d_qk**-0.5,
    )


def _mask_scalars(key_mask: TensorSpec | None, total_k: int) -> dict[str, int]:
    """Return the integer arguments that a mask adds."""
    if key_mask is None:
        return {}
    # no sequence has more keys, and so their number fits 32 bits
    words = min(key_mask.shape[1], ceil_div(total_k, MASK_WORD_KEYS))
    return {**named_strides("mask", "token", key_mask.stride[:1]), "mask_words": words}


# The smallest tensor map: the 16 bytes at its address.
UNUSED_LAYOUT = HeadLayout("bf16", (TMA_ALIGNMENT // ELEMENT_BYTES, 1, 1), (TMA_ALIGNMENT, TMA_ALIGNMENT))


def _map(tensor: torch.Tensor, layout: HeadLayout | None, q: torch.Tensor) -> TensorMap:
    """Return the tensor map of q, k or v. A map that no instruction uses is laid over q, which is memory of the call."""
    if layout is None:
        return tensor_map(UNUSED_LAYOUT, q.data_ptr() & -TMA_ALIGNMENT)
    return tensor_map(layout, tensor.data_ptr())


@lru_cache(maxsize=4096)
def tensor_map(layout: HeadLayout, address: int) -> TensorMap:
    """Return a tensor map with boxes of 64 columns by some tokens of one head. Cached, because allocators give addresses again."""
    return TensorMap(
        dtype=layout.dtype,
        address=address,
        dims=layout.shape,
        strides=layout.strides,
        box=(BOX_COLUMNS, 1, layout.box_rows),
        swizzle=Swizzle.B128,
    )


def _layouts(call: CallSpec, config: DensePrefillConfig, arch: Arch) -> tuple[HeadLayout | None, ...]:
    """Return the layouts of q, k and v. ValueError if a tensor map cannot hold a tensor that is always loaded by one."""
    layouts, key_rows = [], config.key_box_rows(arch)
    for name, spec, box_rows, used in (
        ("q", call.q, config.query_box_rows(arch), call.q.shape[0] > 0),
        ("k", call.k, key_rows, call.k.shape[0] > 0),
        ("v", call.v, key_rows, call.v.shape[0] > 0),
    ):
        tokens, heads, columns = spec.shape
        layouts.append(HeadLayout(config.dtype, (columns, heads, tokens), map_strides(name, spec, 1, 0), box_rows) if used else None)
    return tuple(layouts)


def check_heads(q: TensorSpec, k: TensorSpec, v: TensorSpec, supported: Collection[int] = tuple(HEAD_DIMS)) -> None:
    """Raise ValueError unless q, k and v have supported head sizes and one dtype, and k and v as many tokens and heads.

    supported: columns of q.
    """
    if len(q.shape) != 3 or q.shape[-1] not in supported:
        sizes = " or ".join(map(str, supported))
        raise ValueError(f"q has shape {list(q.shape)}; supported: [total_q, h_q, {sizes}], the head sizes that kernels are built for")
    check_shape("k", k, ("total_k", "h_kv", q.shape[-1]))
    check_shape("v", v, (*k.shape[:2], HEAD_DIMS[q.shape[-1]]))
    check_dtype("q", q, torch.bfloat16, torch.float16)
    check_dtype_of_columns("q", q, head_dtypes(q.shape[-1]))
    for name, spec in (("q", q), ("k", k), ("v", v)):
        check_dtype(name, spec, q.dtype)
        check_device(name, spec, q.device)
        check_last_contiguous(name, spec)
        if spec.shape[0] > MAX_TOKENS:
            raise ValueError(f"{name} has shape {list(spec.shape)}; supported: to {MAX_TOKENS} tokens")
    error = heads_error(q.shape[1], k.shape[1], "dense_prefill")
    if error is not None:
        raise ValueError(f"q has shape {list(q.shape)}, k {list(k.shape)}: {error}")


def check_mask(key_mask: TensorSpec, q: TensorSpec, keys: int) -> None:
    """Raise ValueError unless key_mask has a bit for every key that a sequence may have, and kernels for heads such as q's take masks.

    keys: of the longest sequence.
    """
    if key_mask.shape[:1] != q.shape[:1] or len(key_mask.shape) != 2 or key_mask.shape[1] < ceil_div(keys, MASK_WORD_KEYS):
        words = ceil_div(keys, MASK_WORD_KEYS)
        raise ValueError(f"key_mask has shape {list(key_mask.shape)}; supported: [{q.shape[0]}, {words} or more], a bit a key")
    check_dtype("key_mask", key_mask, torch.int32)
    check_device("key_mask", key_mask, q.device)
    check_last_contiguous("key_mask", key_mask)
    if q.shape[-1] not in MASKED_HEAD_DIMS:
        sizes = " or ".join(map(str, MASKED_HEAD_DIMS))
        raise ValueError(f"q has {q.shape[-1]} columns with key_mask; supported: {sizes}")
    check_dtype_of_columns("q with key_mask", q, (MASKED_DTYPE,))


def check_lengths(cu_seqlens_qo: TensorSpec, cu_seqlens_kv: TensorSpec, q: TensorSpec) -> int:
    """Return the number of sequences. ValueError unless cu_seqlens_qo and cu_seqlens_kv have as many."""
    check_counts("cu_seqlens_qo", cu_seqlens_qo, ("batch + 1",), q.device)
    entries = cu_seqlens_qo.shape[0]
    if entries == 0:
        raise ValueError("cu_seqlens_qo has shape [0]; supported: [batch + 1], at least 1")
    check_counts("cu_seqlens_kv", cu_seqlens_kv, (entries,), q.device)
    return entries - 1
