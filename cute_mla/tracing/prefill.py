"""Ops of prefill, sparse and dense, and of their backward passes.

A packed form of dense prefill passes slices of its tensor to flash_attn_varlen_func. Where gradients are on it is one op instead,
flash_attn_varlen_packed, whose backward pass writes the gradients of the slices straight into one gradient of the tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..ops import dense_prefill, dense_prefill_backward, key_lists, sparse_prefill, sparse_prefill_backward
from ..ops.arguments import NO_BACKWARD, NO_DOUBLE_BACKWARD, NO_GIVEN_RESULTS, check_integer, check_no_grad
from ..ops.strides import as_rows
from ..spec.mla import D_V
from .register import Function, Gradient, TorchOp, ops

KEY_PLAN = {"key_plan": "Tensor[]? key_plan=None"}  # row_starts and entries
_NO_INDEXER = "gradients of calls without indexer_topk"
_PACKED = {"q": "Tensor? q", "k": "Tensor packed", "v": "int head_dim_qk"}  # k and v are slices of packed, and q too if it is None


def _sparse_results(q: Tensor, **others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate out, max_logits and lse of sparse prefill."""
    rows = q.shape[:-1]
    return q.new_empty((*rows, D_V)), q.new_empty(rows, dtype=torch.float32), q.new_empty(rows, dtype=torch.float32)


def _indexer_results(q: Tensor, **others: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate out, max_logits, lse and lse_indexer of sparse prefill."""
    return *_sparse_results(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _run_sparse(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = D_V,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    kv_offsets: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """Compute sparse prefill without lse_indexer."""
    return sparse_prefill.run(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, kv_offsets=kv_offsets, **options)


def _run_indexer(*args: Any, **options: Any) -> tuple[Tensor, ...]:
    """Compute sparse prefill with lse_indexer."""
    check_integer("indexer_topk", options["indexer_topk"], 1)
    return sparse_prefill.run(*args, **options)


@dataclass(frozen=True)
class _SparseFwd(TorchOp):
    """The ops of flash_mla_sparse_fwd, of which one returns lse_indexer, too."""

    def register(self, function: Function, name: str | None = None) -> Function:
        """Register both; return a function that calls the one that a call asks for."""
        d_v = {"d_v": f"int d_v={D_V}", "indexer_topk": ""}
        # torch differentiates ops all of whose tensors may be given by position
        offsets = {"topk_length": "Tensor? topk_length=None, Tensor? kv_offsets=None", "kv_offsets": ""}
        plain = replace(self, spelled={**d_v, **offsets}, without=("lse_indexer",), body=_run_sparse)
        spelled = {**d_v, "kv_offsets": "SymInt indexer_topk, Tensor? kv_offsets=None"}
        indexer = replace(
            plain,
            spelled=spelled,
            fake=_indexer_results,
            results=(*self.results, "lse_indexer"),
            body=_run_indexer,
            without=(),
            gradients=(_NO_INDEXER, _NO_INDEXER),
        )
        calls = TorchOp.register(plain, function), TorchOp.register(indexer, function, f"{function.__name__}_indexer")

        def call(**arguments: Any) -> Any:
            if sparse_prefill.check_indexer(arguments["indexer_topk"], arguments["lse_indexer"]):
                return calls[1](**arguments)
            del arguments["indexer_topk"], arguments["lse_indexer"]
            return calls[0](**arguments)

        return call


def _sparse_gradients(q: Tensor, kv: Tensor, **others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate dq, dkv and d_sink of sparse prefill."""
    return q.new_empty(q.shape), kv.new_empty(kv.shape), q.new_empty(q.shape[-2:-1], dtype=torch.float32)


def _key_plan(indices: Tensor, s_kv: int, kv_offsets: Tensor | None, chunk_tokens: int, **others: Any) -> tuple[Tensor, Tensor]:
    """Allocate the lists of plan_sparse_backward."""
    *leading, _, topk = indices.shape
    tokens, requests = math.prod(leading), leading[0] if len(leading) == 2 and kv_offsets is None else 1
    chunks = (tokens + chunk_tokens - 1) // chunk_tokens
    return indices.new_empty((max(chunks, 1), requests * s_kv + 1)), indices.new_empty((tokens, topk))


def _save_sparse(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, ...]) -> None:
    """Keep what the backward pass of sparse prefill reads."""
    names = [argument.name for argument in ops.flash_mla_sparse_fwd.default._schema.arguments]
    given = dict(zip(names, inputs, strict=False))
    ctx.set_materialize_grads(False)
    ctx.inputs = len(inputs)
    ctx.sm_scale, ctx.has_sink = given["sm_scale"], given.get("attn_sink") is not None
    out, _, lse = output
    others = (given.get(name) for name in ("attn_sink", "topk_length", "kv_offsets"))
    ctx.save_for_backward(given["q"], given["kv"], out, lse, given["indices"], *others)


def _sparse_backward(ctx: Any, dout: Tensor | None, dmax: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, kv and attn_sink, and None for the other arguments."""
    if dmax is not None:
        raise ValueError("max_logits has a gradient; supported: gradients of out and lse, so max_logits.detach()")
    if dout is None and dlse is None:
        return (None,) * ctx.inputs
    q, kv, out, lse, indices, attn_sink, topk_length, kv_offsets = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dkv, d_sink = ops.flash_mla_sparse_bwd(
        q, kv, out, lse, dout, indices, ctx.sm_scale, D_V, attn_sink, topk_length, kv_offsets=kv_offsets, dlse=dlse
    )
    # q, kv, indices, sm_scale, d_v, attn_sink, ..
    made = (dq, dkv, None, None, None, d_sink if ctx.has_sink else None)
    return (*made, *(None,) * ctx.inputs)[: ctx.inputs]


def _varlen_results(q: Tensor, v: Tensor, **others: Any) -> tuple[Tensor, Tensor]:
    """Allocate out and lse of dense prefill."""
    rows = q.shape[:-1]
    return q.new_empty((*rows, v.shape[-1])), q.new_empty(rows, dtype=torch.float32)


def _gradients(q: Tensor, k: Tensor, v: Tensor, **others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate dq, dk and dv of dense prefill, which are 0 in rows of no sequence."""
    return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)


def split(q: Tensor | None, packed: Tensor, head_dim_qk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v, slices of the packed tensor; a q that is given beside it is returned as it is."""
    first = packed[..., :head_dim_qk]
    if q is not None:
        return q, first, packed[..., head_dim_qk:]
    return first, packed[..., head_dim_qk : 2 * head_dim_qk], packed[..., 2 * head_dim_qk :]


def _run_packed(q: Tensor | None, packed: Tensor, head_dim_qk: int, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Compute dense prefill of a packed tensor."""
    return dense_prefill.run(*split(q, packed, head_dim_qk), *args, **options)


def _packed_results(q: Tensor | None, packed: Tensor, head_dim_qk: int, **others: Any) -> tuple[Tensor, Tensor]:
    """Allocate out and lse of dense prefill of a packed tensor."""
    q, _, v = split(q, packed, head_dim_qk)
    return _varlen_results(q, v)


def _run_packed_backward(
    dout: Tensor, q: Tensor | None, packed: Tensor, head_dim_qk: int, out: Tensor, lse: Tensor, *args: Any, **options: Any
) -> list[Tensor]:
    """Compute the gradient of q, unless it is None, and that of the packed tensor."""
    gradients = _packed_gradients(q, packed)
    dq, dk, dv = split(None if q is None else gradients[0], gradients[-1], head_dim_qk)
    dense_prefill_backward.run(dout, *split(q, packed, head_dim_qk), out, lse, *args, **options, dq=dq, dk=dk, dv=dv)
    return gradients


def _packed_gradients(q: Tensor | None, packed: Tensor, **others: Any) -> list[Tensor]:
    """Allocate the gradient of q, unless it is None, and that of the packed tensor. They are 0 in rows of no sequence."""
    return [tensor.new_zeros(tensor.shape) for tensor in (q, packed) if tensor is not None]


def _save(op: str, *kept: str) -> Function:
    """Return a function that keeps what the backward pass of an op reads. kept: operands, and what is not a tensor of them."""

    def save(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor]) -> None:
        names = [argument.name for argument in getattr(ops, op).default._schema.arguments]
        given = dict(zip(names, inputs, strict=False))
        if output[0].dtype == torch.float16:
            raise ValueError("q has dtype torch.float16 and a gradient is needed; supported: torch.bfloat16, as .to(torch.bfloat16) gives")
        ctx.set_materialize_grads(False)
        ctx.names = tuple(given)
        ctx.head_dim_qk = given.get("head_dim_qk")
        ctx.options = tuple(given[name] for name in ("max_seqlen_qo", "max_seqlen_kv", "softmax_scale", "causal"))
        ctx.save_for_backward(*(given[name] for name in kept), *output, given["cu_seqlens_qo"], given["cu_seqlens_kv"])

    return save


def _varlen_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k and v, and None for the other arguments."""
    dout = _out_gradient(dout, dlse)
    made = () if dout is None else ops.flash_attn_varlen_backward(dout, *ctx.saved_tensors, *ctx.options)
    return *made, *(None,) * (len(ctx.names) - len(made))


def _packed_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, None if it is a slice, and of the packed tensor, and None for the other arguments."""
    dout = _out_gradient(dout, dlse)
    if dout is None:
        return (None,) * len(ctx.names)
    q, packed, *saved = ctx.saved_tensors
    gradients = ops.flash_attn_varlen_packed_backward(dout, q, packed, ctx.head_dim_qk, *saved, *ctx.options)
    return (None if q is None else gradients[0], gradients[-1], *(None,) * (len(ctx.names) - 2))


def _out_gradient(dout: Tensor | None, dlse: Tensor | None) -> Tensor | None:
    """Return the gradient of out as kernels read it, None if there is none. ValueError if lse has a gradient."""
    if dlse is not None:
        raise ValueError("lse has a gradient; supported: gradients of out only, so lse.detach() where a loss depends on lse")
    return None if dout is None else as_rows(dout)


def _no_double_backward(ctx: Any, *gradients: Any) -> None:
    """Raise ValueError."""
    raise ValueError(f"a gradient of flash_attn_varlen_func requires grad; supported: {NO_DOUBLE_BACKWARD}")


@dataclass(frozen=True)
class _Varlen(TorchOp):
    """The ops of flash_attn_varlen_func: with gradients, with a mask and without gradients, and of packed tensors."""

    def register(self, function: Function, name: str | None = None) -> Function:
        """Register all; return a function that calls the one that a call asks for."""
        plain = replace(self, without=("key_mask",))
        masked = replace(self, spelled={"key_mask": "Tensor key_mask"}, gradients=(NO_BACKWARD, NO_BACKWARD))
        packed = TorchOp(
            _run_packed,
            _packed_results,
            spelled=_PACKED,
            without=(*self.results, "key_mask"),
            gradients=(Gradient(_packed_backward, _save("flash_attn_varlen_packed", "q", "packed")), NO_BACKWARD),
            returned="(Tensor out, Tensor lse)",
        )
        calls = TorchOp.register(plain, function), TorchOp.register(masked, function, "flash_attn_varlen_masked")
        packed.register(function, "flash_attn_varlen_packed")

        def call(key_mask: Tensor | None, **arguments: Any) -> Any:
            if key_mask is None:
                return calls[0](**arguments)
            check_no_grad("gradients of calls without key_mask", **{name: arguments[name] for name in ("q", "k", "v")})
            return calls[1](**arguments, key_mask=key_mask)

        return call


@dataclass(frozen=True)
class _Backward(TorchOp):
    """The ops of flash_attn_varlen_backward: of tensors, and of packed ones."""

    def register(self, function: Function, name: str | None = None) -> Function:
        """Register both; return a function that calls the first."""
        packed = replace(
            self, run=_run_packed_backward, fake=_packed_gradients, results=(), without=(*self.results, "workspace"), spelled=_PACKED
        )
        TorchOp.register(replace(packed, returned="Tensor[]"), function, "flash_attn_varlen_packed_backward")
        return TorchOp.register(self, function)


def varlen_packed(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Call a packed form of flash_attn_varlen_func with gradients. q: None if the packed tensor holds it."""
    out, lse = ops.flash_attn_varlen_packed(*args, **options)
    return out, lse


SPARSE_FWD = _SparseFwd(
    sparse_prefill.run,
    _sparse_results,
    ("out", "max_logits", "lse"),
    {"d_v": f"int d_v={D_V}"},
    gradients=(Gradient(_sparse_backward, _save_sparse), NO_GIVEN_RESULTS),
)
SPARSE_BWD = TorchOp(
    sparse_prefill_backward.run,
    _sparse_gradients,
    ("dq", "dkv", "d_sink"),
    {"d_v": f"int d_v={D_V}", **KEY_PLAN},
    gradients=(NO_DOUBLE_BACKWARD, NO_DOUBLE_BACKWARD),
)
SPARSE_PLAN = TorchOp(key_lists.run_plan, _key_plan, returned="(Tensor row_starts, Tensor entries)")
VARLEN = _Varlen(
    dense_prefill.run,
    _varlen_results,
    ("out", "lse"),
    gradients=(Gradient(_varlen_backward, _save("flash_attn_varlen_func", "q", "k", "v")), NO_GIVEN_RESULTS),
)
BACKWARD = _Backward(
    dense_prefill_backward.run,
    _gradients,
    ("dq", "dk", "dv", "workspace?"),
    gradients=(Gradient(_no_double_backward), NO_DOUBLE_BACKWARD),
)
