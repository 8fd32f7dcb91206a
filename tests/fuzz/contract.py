"""Arguments of a call that are at fault by the documentation: written from the docstrings, not from the checks.

A contract gives the names of all arguments of which one may be blamed; none if the call is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cute_mla.runtime.current import device_for
from tests.fuzz.scalars import is_flag, is_integer, is_scale

WIDE = (torch.bfloat16, torch.float16)
BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn)
E4M3 = torch.float8_e4m3fn
PREFILL_COLUMNS = {192: 128, 128: 128, 256: 256}  # of q and k in dense prefill, and those of v and out that go with them
MASKED_COLUMNS = (192, 128)
MERGED = {*((columns, dtype) for columns in (512, 128) for dtype in WIDE), (256, torch.bfloat16)}  # of rows of merge_states


def is_plain(value: Any) -> bool:
    """Return whether the value is a plain strided tensor."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    return not (value.is_nested or value.is_quantized or value.is_neg() or value.is_conj())


def byte_strides(tensor: Tensor, *dims: int) -> list[int]:
    """Return bytes between neighbours along those of these dimensions that have any."""
    return [tensor.stride(dim) * tensor.element_size() for dim in dims if tensor.shape[dim] > 1]


def bytes_of(tensor: Tensor) -> np.ndarray:
    """Return the addresses of all of its bytes, ascending."""
    addresses = np.full(1, tensor.data_ptr(), dtype=np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        addresses = (addresses[:, None] + np.arange(size) * (stride * tensor.element_size())).reshape(-1)
    return np.unique((addresses[:, None] + np.arange(tensor.element_size())).reshape(-1))


def span(tensor: Tensor) -> tuple[int, int]:
    """Return first address and end."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def share_memory(tensor: Tensor, other: Tensor) -> bool:
    """Return whether any byte belongs to both tensors."""
    if not tensor.numel() or not other.numel() or tensor.device.type == "meta" or other.device.type == "meta":
        return False
    (start, end), (other_start, other_end) = span(tensor), span(other)
    if end <= other_start or other_end <= start:
        return False
    return max(tensor.numel(), other.numel()) > 1 << 24 or np.intersect1d(bytes_of(tensor), bytes_of(other), True).size > 0


def arch_name() -> str:
    """Return the architecture of the simulated device."""
    return device_for(torch.device("cpu")).arch.name


def row_bytes() -> int:
    """Return the number of bytes at multiples of which rows of decode and of sparse prefill begin, on the simulated device."""
    return {"sm90": 4}.get(arch_name(), 16)


class Contract:
    """The faults of a call's arguments."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.arguments = arguments
        self.faults: set[str] = set()

    def require(self, right: bool, *names: str) -> bool:
        """Blame one of these arguments unless the condition holds."""
        if not right:
            self.faults.update(names)
        return right

    def get(self, name: str) -> Any:
        """Return an argument, None if it is not given."""
        return self.arguments.get(name)

    def tensor(self, name: str, *dtypes: torch.dtype, optional: bool = False, trained: bool = False) -> Tensor | None:
        """Return an argument that has to be a tensor of these types (none: any), None if it is not. trained: it may need a gradient."""
        value = self.get(name)
        if value is None and optional:
            return None
        if not self.require(is_plain(value), name):
            return None
        right = (trained or not (value.requires_grad and torch.is_grad_enabled())) and (not dtypes or value.dtype in dtypes)
        return value if self.require(right, name) else None

    def same_device(self, q: Tensor | None, *names: str) -> None:
        """Check that these tensors are on q's device, where kernels run."""
        if q is None or not self.require(q.device.type == "cpu", "q", "outs"):
            return
        for name in names:
            value = self.get(name)
            self.require(not is_plain(value) or value.device == q.device, name)

    def shaped(self, name: str, tensor: Tensor | None, *sizes: int | None, beside: str = "q") -> bool:
        """Check that a tensor has these sizes, which another argument decides. None: any size."""
        if tensor is None:
            return False
        fits = tensor.dim() == len(sizes) and all(size in (None, own) for size, own in zip(sizes, tensor.shape, strict=True))
        return self.require(fits, name, beside)

    def last_contiguous(self, name: str, tensor: Tensor | None) -> None:
        """Neighbours along the last dimension are neighbours in memory."""
        if tensor is not None and tensor.dim():
            self.require(tensor.shape[-1] <= 1 or tensor.stride(-1) == 1, name)

    def aligned(self, name: str, tensor: Tensor | None, *dims: int, positive: bool = True) -> None:
        """Address and strides along these dimensions are multiples of 16 bytes."""
        if tensor is None or tensor.device.type == "meta":
            return
        strides = byte_strides(tensor, *dims)
        self.require(all(stride % 16 == 0 and (stride > 0 or not positive) and stride < 1 << 40 for stride in strides), name)
        self.require(tensor.data_ptr() % 16 == 0, name)

    def rows(self, *names: str, nbytes: int = 16) -> None:
        """Rows of these tensors, of those that are given and not empty, begin at multiples of so many bytes."""
        for name in names:
            tensor = self.get(name)
            if is_plain(tensor) and tensor.numel() and tensor.device.type != "meta":
                distances = (tensor.data_ptr(), *byte_strides(tensor, *range(tensor.dim() - 1)))
                self.require(not any(distance % nbytes for distance in distances), name)

    def counts(self, name: str, size: tuple[int | None, ...], optional: bool = False) -> Tensor | None:
        """Lengths or offsets: contiguous int32."""
        tensor = self.tensor(name, torch.int32, optional=optional)
        if tensor is None or not self.shaped(name, tensor, *size):
            return None
        self.require(tensor.is_contiguous(), name)
        return tensor

    def output(self, name: str, shape: tuple[int, ...], dtypes: Sequence[torch.dtype], last: bool = False) -> None:
        """Check a result's tensor, if given: of this shape, without overlap of its elements."""
        tensor = self.tensor(name, *dtypes, optional=True)
        if tensor is None or not self.shaped(name, tensor, *shape):
            return
        if last:
            self.last_contiguous(name, tensor)
        dims = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
        reach = 0
        for stride, size in dims:
            self.require(stride > reach or not tensor.numel(), name)
            reach += (size - 1) * stride

    def apart(self, written: Sequence[str]) -> None:
        """Check that written tensors share no memory with others."""
        tensors = {name: value for name, value in self.arguments.items() if is_plain(value)}
        for name in written:
            for other, tensor in tensors.items():
                if name in tensors and name != other:
                    self.require(not share_memory(tensors[name], tensor), name, other)

    def numbers(self, **wanted: Callable[[Any], bool]) -> None:
        """Arguments that are no tensors; those not given are right."""
        for name, right in wanted.items():
            self.require(name not in self.arguments or right(self.arguments[name]), name)


def is_empty_lse(value: Any) -> bool:
    """Inf or -inf."""
    return isinstance(value, float | np.floating) and math.isinf(value)


def is_optional(right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """None, or that."""
    return lambda value: value is None or right(value)


def equals(number: int) -> Callable[[Any], bool]:
    """Return a check for this integer."""
    return lambda value: is_integer(value) and value == number


def sparse_prefill_faults(arguments: Mapping[str, Any]) -> set[str]:
    """Return the faulty arguments of flash_mla_sparse_fwd."""
    c = Contract(arguments)
    c.numbers(d_v=equals(512), sm_scale=is_scale, empty_lse=is_empty_lse, indexer_topk=lambda value: is_integer(value) and value >= 0)
    indexed = arguments.get("indexer_topk", 0)
    c.require(c.get("lse_indexer") is None or not is_integer(indexed) or indexed != 0, "lse_indexer", "indexer_topk")
    q = _sparse_operands(c)
    if q is None:
        return c.faults
    indices, shape = c.get("indices"), tuple(q.shape[:-1])
    if is_plain(indices) and indices.dim():
        c.require(not is_integer(indexed) or indexed <= indices.shape[-1], "indexer_topk", "indices")
    c.output("out", (*shape, 512), (q.dtype,), last=True)
    c.rows("q", "out", nbytes=row_bytes())
    for name in ("max_logits", "lse", "lse_indexer"):
        c.output(name, shape, (torch.float32,))
    c.same_device(q, "kv", "indices", "topk_length", "attn_sink", "kv_offsets", "out", "max_logits", "lse", "lse_indexer")
    c.apart(("out", "max_logits", "lse", "lse_indexer"))
    return c.faults


def sparse_backward_faults(arguments: Mapping[str, Any]) -> set[str]:
    """Return the faulty arguments of flash_mla_sparse_bwd."""
    c = Contract(arguments)
    c.numbers(d_v=equals(512), sm_scale=is_scale, dkv_accumulate=is_flag, max_workspace=lambda value: is_integer(value) and value >= 0)
    c.require(c.get("key_plan") is None, "key_plan")  # calls here are broken by values that are no plan
    q = _sparse_operands(c)
    if q is None:
        return c.faults
    shape, adds = tuple(q.shape[:-1]), is_flag(c.get("dkv_accumulate")) and bool(c.get("dkv_accumulate"))
    for name, columns in (("out", (512,)), ("lse", ())):
        c.require(c.get(name) is not None, name)
        c.output(name, (*shape, *columns), (torch.float32 if name == "lse" else q.dtype,), last=name == "out")
    c.rows("q", "out", nbytes=row_bytes())
    c.shaped("dout", c.tensor("dout", q.dtype), *shape, 512)
    c.output("dlse", shape, (torch.float32,))
    c.output("dq", tuple(q.shape), (q.dtype,), last=True)
    c.rows("dq")
    kv, dkv = c.get("kv"), c.tensor("dkv", *((torch.float32,) if adds else (q.dtype, torch.float32)), optional=True)
    c.require(dkv is not None or not adds, "dkv", "dkv_accumulate")
    if dkv is not None and is_plain(kv) and c.shaped("dkv", dkv, *kv.shape, beside="kv"):
        c.require(dkv.is_contiguous(), "dkv")
    c.output("d_sink", (q.shape[-2],), (torch.float32,))
    c.same_device(q, *(name for name, value in arguments.items() if isinstance(value, Tensor) and name != "q"))
    c.apart(("dq", "dkv", "d_sink"))
    return c.faults


def _sparse_operands(c: Contract) -> Tensor | None:
    """Check what sparse prefill and its backward have in common. Return q, None if there is no telling what the rest should be."""
    q = c.tensor("q", *WIDE)
    if q is None or not c.require(q.dim() in (3, 4) and q.shape[-1] in (576, 512) and 1 <= q.shape[-2] <= 128, "q", "kv"):
        return None
    c.last_contiguous("q", q)
    leading, h_q, d_qk = tuple(q.shape[:-2]), q.shape[-2], q.shape[-1]
    c.require(math.prod(leading) <= (1 << 31) - (1 << 16), "q")
    offsets = c.get("kv_offsets")
    if offsets is not None:
        c.require(len(leading) == 2, "kv_offsets", "q")
        c.counts("kv_offsets", (leading[0] + 1,))
    kv = c.tensor("kv", q.dtype)
    if kv is None:
        c.faults.add("q")
    batch = leading[:1] if len(leading) == 2 and offsets is None else ()
    if c.shaped("kv", kv, *batch, None, 1, d_qk, beside="kv_offsets") and kv is not None:
        c.last_contiguous("kv", kv)
        c.aligned("kv", kv, kv.dim() - 3, *((0,) if batch else ()), positive=False)
        c.require(kv.shape[-3] < 1 << 31, "kv")
    else:
        c.faults.add("q")
    indices = c.tensor("indices", torch.int32)
    if c.shaped("indices", indices, *leading, 1, None) and indices is not None:
        c.last_contiguous("indices", indices)
        c.require(indices.shape[-1] <= (1 << 31) - 64, "indices")
    c.counts("topk_length", leading, optional=True)
    sink = c.tensor("attn_sink", torch.float32, optional=True)
    if sink is not None and c.shaped("attn_sink", sink, h_q):
        c.require(sink.is_contiguous(), "attn_sink")
    return q


def _varlen(c: Contract, forward: bool = True) -> Tensor | None:
    """Check what forward and backward have in common. Return q, None if there is no telling what the rest should be."""
    for name in ("max_seqlen_qo", "max_seqlen_kv"):
        c.require(is_integer(c.get(name)) and c.get(name) >= 0, name)
    q = c.tensor("q", *(WIDE if forward else (torch.bfloat16,)))
    if q is not None and q.dim() == 3:
        c.require(q.dtype == torch.bfloat16 or q.shape[-1] != 256, "q")
    if q is None or not c.require(q.dim() == 3 and q.shape[-1] in PREFILL_COLUMNS and q.shape[1] >= 1, "q"):
        return None
    k, v = c.tensor("k", q.dtype), c.tensor("v", q.dtype)
    if k is None or v is None:
        c.faults.add("q")
        return None
    if c.shaped("k", k, None, None, q.shape[2]):
        c.require(k.shape[1] >= 1 and q.shape[1] % max(k.shape[1], 1) == 0, "q", "k")
        c.shaped("v", v, *k.shape[:2], PREFILL_COLUMNS[q.shape[-1]], beside="k")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        c.last_contiguous(name, tensor)
        if tensor.dim() == 3 and len(tensor):
            c.aligned(name, tensor, 0, 1)
    limit = (1 << 31) - 128
    c.require(len(q) <= limit, "q")
    c.require(not k.dim() or len(k) <= limit, "k", "v")
    ends = c.counts("cu_seqlens_qo", (None,))
    if ends is not None and c.require(len(ends) >= 1, "cu_seqlens_qo"):
        c.counts("cu_seqlens_kv", (len(ends),))
        if "cu_seqlens_kv" in c.faults:
            c.faults.add("cu_seqlens_qo")
    return q


def dense_prefill_faults(arguments: Mapping[str, Any]) -> set[str]:
    """Return the faulty arguments of flash_attn_varlen_func."""
    c = Contract(arguments)
    c.numbers(
        dropout_p=lambda value: not isinstance(value, bool) and isinstance(value, Real) and value == 0,
        softmax_scale=is_optional(is_scale),
        empty_lse=is_empty_lse,
        **dict.fromkeys(("causal", "deterministic", "is_varlen"), is_flag),
    )
    q = _varlen(c)
    if q is None:
        return c.faults
    c.output("out", (*q.shape[:2], PREFILL_COLUMNS[q.shape[-1]]), (q.dtype,), last=True)
    c.rows("out")
    c.output("lse", tuple(q.shape[:2]), (torch.float32,))
    _masked(c, q)
    c.same_device(q, "k", "v", "cu_seqlens_qo", "cu_seqlens_kv", "key_mask", "out", "lse")
    c.apart(("out", "lse"))
    return c.faults


def _masked(c: Contract, q: Tensor) -> None:
    """Find faults of a mask, and of what does not go with one."""
    mask = c.tensor("key_mask", torch.int32, optional=True)
    if mask is None:
        return
    if c.shaped("key_mask", mask, len(q), None):
        given, k = c.arguments["max_seqlen_kv"], c.arguments["k"]
        keys = min(int(given), len(k)) if is_integer(given) and k.dim() else 0
        c.require(mask.shape[1] >= -(-keys // 32), "key_mask")
        c.last_contiguous("key_mask", mask)
    c.require(q.dtype == torch.bfloat16 and q.shape[-1] in MASKED_COLUMNS, "q", "key_mask")
    for name in ("q", "out"):
        rows = c.get(name)
        if isinstance(rows, Tensor) and rows.dim() == 3:
            strides = byte_strides(rows, 0, 1)
            whole = not any(number % 16 for number in (*strides, 0 if rows.device.type == "meta" else rows.data_ptr()))
            c.require(whole and (name == "out" or all(0 < stride < 1 << 40 for stride in strides)), name, "key_mask")


def backward_faults(arguments: Mapping[str, Any], workspace: Callable[..., int]) -> set[str]:
    """Return the faulty arguments of flash_attn_varlen_backward. workspace(..): bytes, as workspace_size."""
    c = Contract(arguments)
    c.numbers(softmax_scale=is_optional(is_scale), **dict.fromkeys(("causal", "deterministic"), is_flag))
    q = _varlen(c, forward=False)
    if q is None:
        return c.faults
    for name in ("dout", "out"):
        rows = c.tensor(name, q.dtype)
        if rows is None:
            c.faults.add("q")
        elif c.shaped(name, rows, *q.shape[:2], PREFILL_COLUMNS[q.shape[2]]):
            c.last_contiguous(name, rows)
            if len(rows):
                c.aligned(name, rows, 0, 1, positive=name == "dout")
    c.shaped("lse", c.tensor("lse", torch.float32), *q.shape[:2])
    if c.faults:
        return c.faults
    k, v = c.arguments["k"], c.arguments["v"]
    for name, like in (("dq", q), ("dk", k), ("dv", v)):
        c.output(name, tuple(like.shape), (q.dtype,), last=True)
    c.rows("dq")
    given = c.tensor("workspace", optional=True)
    if given is not None and c.require(given.is_contiguous(), "workspace") and not c.faults:
        shape = {"batch": len(c.arguments["cu_seqlens_qo"]) - 1, "s_q": int(c.arguments["max_seqlen_qo"]), "h_q": q.shape[1]}
        size = workspace("dense_prefill_backward", **shape, h_kv=k.shape[1], total_q=len(q), device="cpu")
        c.require(given.nbytes >= size, "workspace")
        c.require(given.device.type == "meta" or given.data_ptr() % 16 == 0, "workspace")
    c.same_device(q, "dout", "k", "v", "out", "lse", "cu_seqlens_qo", "cu_seqlens_kv", "dq", "dk", "dv", "workspace")
    c.apart(("dq", "dk", "dv", "workspace"))
    return c.faults


def packed_faults(name: str, before_v: int) -> Callable[[Mapping[str, Any]], set[str]]:
    """Return the faulty arguments of flash_attn_varlen_func's packed forms: keys, or queries too, in one tensor."""

    def faults(arguments: Mapping[str, Any]) -> set[str]:
        c = Contract(arguments)
        columns = c.get("head_dim_qk")
        packed = c.tensor(name)
        if not c.require(is_integer(columns) and columns in PREFILL_COLUMNS, "head_dim_qk"):
            return c.faults
        d_v = PREFILL_COLUMNS[columns]
        if not c.shaped(name, packed, None, None, before_v * columns + d_v, beside="head_dim_qk") or packed is None:
            return c.faults
        plain = dict(arguments)
        plain["k"], plain["v"] = packed[..., -d_v - columns : -d_v], packed[..., -d_v:]
        if name == "qkv":
            plain |= {"q": packed[..., :columns], "cu_seqlens_qo": plain["cu_seqlens"], "cu_seqlens_kv": plain["cu_seqlens"]}
            plain |= {"max_seqlen_qo": plain["max_seqlen"], "max_seqlen_kv": plain["max_seqlen"]}
        named = {"cu_seqlens_qo": "cu_seqlens", "cu_seqlens_kv": "cu_seqlens", "max_seqlen_qo": "max_seqlen", "max_seqlen_kv": "max_seqlen"}
        found = dense_prefill_faults({key: value for key, value in plain.items() if key not in (name, "head_dim_qk")})
        return found | {named[key] for key in found if key in named} | ({name} if found & {"q", "k", "v"} else set())

    return faults


def merge_faults(arguments: Mapping[str, Any]) -> set[str]:
    """Return the faulty arguments of merge_states."""
    c = Contract(arguments)
    c.numbers(empty_lse=is_empty_lse)
    outs, lses = c.get("outs"), c.get("lses")
    stacked = isinstance(outs, Tensor)
    right = isinstance(lses, Tensor) if stacked else isinstance(outs, list | tuple) and isinstance(lses, list | tuple)
    if not c.require(right, "outs", "lses"):
        return c.faults
    both = (outs, lses) if stacked else (*outs, *lses)
    alike = all(is_plain(tensor) and not (tensor.requires_grad and torch.is_grad_enabled()) for tensor in both)
    if not c.require(alike, "outs", "lses") or not c.require(not stacked or (outs.dim() > 0 and lses.dim() > 0), "outs", "lses"):
        return c.faults
    if not c.require(len(outs) == len(lses) > 0 and (stacked or len(outs) <= 8), "outs", "lses"):
        return c.faults
    for states in (outs, lses):
        looks = {(state.shape, state.stride(), state.dtype, state.device) for state in (states[:1] if stacked else states)}
        c.require(len(looks) == 1, "outs", "lses")
        c.require(not stacked or len(states) == 1 or states.stride(0) > 0 or not states.numel(), "outs", "lses")
    first, lse = outs[0], lses[0]
    shape = first.dim() in (3, 4) and (first.shape[-1], first.dtype) in MERGED
    if not c.require(shape and lse.shape == first.shape[:-1] and lse.dtype == torch.float32, "outs", "lses"):
        return c.faults
    c.require(first.shape[-2] <= 65_535 * 4 and math.prod(first.shape[:-2]) < 1 << 31, "outs")
    c.require(first.stride(-1) == 1, "outs")
    c.same_device(first, "lses", "out", "lse")
    c.require(lse.device == first.device, "lses", "outs")
    c.output("out", tuple(first.shape), (first.dtype,), last=True)
    c.output("lse", tuple(lse.shape), (torch.float32,))
    if not c.faults:
        _merged_apart(c, [*outs], [*lses])
    return c.faults


def _merged_apart(c: Contract, outs: list[Tensor], lses: list[Tensor]) -> None:
    """Results are the states' memory only if each is a state."""
    given = {name: c.get(name) for name in ("out", "lse")}
    for name, own, others in (("out", outs, lses), ("lse", lses, outs)):
        result = given[name]
        if result is None:
            continue
        for state in own:
            same = state.data_ptr() == result.data_ptr() and state.stride() == result.stride()
            c.require(same or not share_memory(result, state), name, "outs", "lses")
        c.require(not any(share_memory(result, other) for other in others), name, "outs", "lses")
    if given["out"] is not None and given["lse"] is not None:
        c.require(not share_memory(given["out"], given["lse"]), "out", "lse")


def plan_faults(arguments: Mapping[str, Any]) -> set[str]:
    """Return the faulty arguments of get_mla_metadata."""
    c = Contract(arguments)
    c.numbers(is_fp8_kvcache=is_flag)
    rows, h_kv, h_q, topk = (c.get(name) for name in ("num_q_tokens_per_head_k", "num_heads_k", "num_heads_q", "topk"))
    if c.get("cache_seqlens") is None:
        c.require(all(value is None for value in (rows, h_kv, h_q, topk)), "cache_seqlens")
        return c.faults
    columns = (512, 256, 1024) if topk is None else (512,)
    d_v = c.arguments.get("head_dim_v", 512)
    c.require(is_integer(d_v) and d_v in columns, "head_dim_v")
    lengths = c.counts("cache_seqlens", (None,))
    if lengths is not None:
        c.require(lengths.device.type == "cpu", "cache_seqlens")
    whole = c.require(is_integer(rows) and rows >= 1, "num_q_tokens_per_head_k")
    whole &= c.require(is_integer(h_kv) and 1 <= h_kv <= 128, "num_heads_k")
    whole &= c.require((is_integer(h_q) and 1 <= h_q <= 128) or (h_q is None and topk is None), "num_heads_q")
    c.require(topk is None or (is_integer(topk) and 0 <= topk <= (1 << 31) - 64), "topk")
    if whole and h_q is not None:
        c.require(h_q % h_kv == 0 and rows % max(h_q // h_kv, 1) == 0, "num_heads_k", "num_heads_q", "num_q_tokens_per_head_k")
    c.require(topk is None or not whole or h_kv == 1, "num_heads_k", "topk")
    return c.faults
