"""The public functions as ops of torch, torch.ops.cute_mla, and the traced forms of the functions, which call the ops.

The namespace is the name of the package: copies of it under other names, such as versions of a kernel package, live in one process.

Each op runs the eager body of its function, ops.*.run. A call that is not traced never comes here, because torch's dispatcher costs more
than the call. Each op allocates its results; the op beside it whose name ends in _out writes to the caller's. Arguments are those of the
public functions, except that a plan is always two tensors and that empty_lse None means inf. Fakes stand for the ops while they are traced;
they give shapes and dtypes, and other errors appear when the call is made.

A packed form of dense prefill passes slices of its tensor to flash_attn_varlen_func. Where gradients are on it is one op instead,
flash_attn_varlen_packed, whose backward pass writes the gradients of the slices straight into one gradient of the tensor.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import torch_schemas as schemas
from .ops import cache_gather, cache_insert, cache_write, decode, dense_prefill, dense_prefill_backward, sparse_prefill, split_plan
from .ops import index_write as index_op
from .ops import indexer_topk as indexer_op
from .ops import merge_states as merge
from .ops import mqa_logits as logits_op
from .ops import topk_indices as topk_op
from .ops.arguments import NO_BACKWARD, NO_DOUBLE_BACKWARD, NO_GIVEN_RESULTS, check_integer, check_no_grad
from .ops.limits import value_columns
from .ops.paged_cache import columns_of
from .ops.split_plan import MlaSchedule, ScheduleKey
from .ops.strides import as_rows
from .runtime.current import device_for
from .spec.cache_rows import CACHED
from .spec.dense_decode import num_parts
from .spec.mla import D_QK, D_V
from .spec.split_plan import PLAN_COLUMNS

_VARLEN_ARGUMENTS = 12  # of flash_attn_varlen_func and of flash_attn_varlen_packed, without those by keyword only

_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
_NAMESPACE = __name__.rpartition(".")[0].replace(".", "_")
_library = torch.library.Library(_NAMESPACE, "DEF")
_ops = getattr(torch.ops, _NAMESPACE)


class _Gradient(NamedTuple):
    """The backward pass of an op, as torch.library.register_autograd takes it."""

    backward: Callable[..., Any]
    setup_context: Callable[..., None] | None = None


def _define(schema: str, call: Callable[..., Any], fake: Callable[..., Any], gradient: _Gradient | str = NO_BACKWARD) -> None:
    """Register an op.

    call: its eager body. fake: the body for tensors without contents. gradient: a string refuses tensors that require gradients, and says
    what is supported.
    """
    _library.define(schema, tags=_TAGS)
    name = schema[: schema.index("(")]
    op = getattr(_ops, name).default
    _library.impl(name, call, "CompositeExplicitAutograd")
    if isinstance(gradient, str):
        _library.impl(name, _refusal(op, gradient), "Autograd", with_keyset=True)
    else:
        torch.library.register_autograd(f"{_NAMESPACE}::{name}", gradient.backward, setup_context=gradient.setup_context, lib=_library)
    torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_library)


def _refusal(op: Any, supported: str) -> Callable[..., Any]:
    """Return the autograd kernel of an op that refuses tensors that require gradients."""
    named = [argument.name for argument in op._schema.arguments]

    def refuse(keys: torch._C.DispatchKeySet, /, *args: Any, **options: Any) -> Any:
        for argument, value in (*zip(named, args, strict=False), *options.items()):
            for tensor in value if isinstance(value, list) else (value,):
                check_no_grad(supported, **{argument: tensor})
        return op.redispatch(keys & torch._C._after_autograd_keyset, *args, **options)

    return refuse


def _define_both(
    name: str,
    arguments: str,
    outs: tuple[str, ...],
    function: Callable[..., Any],
    fake: Callable[..., Any],
    gradients: tuple[_Gradient | str, str] = (NO_BACKWARD, NO_BACKWARD),
) -> None:
    """Register the op that returns new tensors `outs`, and the op `name`_out that writes to the caller's.

    function: the eager body. gradients: of the first op and of the second, as in _define.
    """

    def call(*args: Any, **options: Any) -> Any:
        if "empty_lse" in arguments and options.get("empty_lse") is None:
            options["empty_lse"] = math.inf
        return function(*args, **options)

    def write(*args: Any, **options: Any) -> None:
        call(*args, **options)

    results = [out for out in outs if not out.endswith("?")]
    options = "" if "*" in arguments else "*, "
    written = [f"Tensor({letter}!){out[len(out.rstrip('?')) :]} {out.rstrip('?')}" for letter, out in zip("abcd", outs, strict=False)]
    _define(f"{name}({arguments}) -> ({', '.join(f'Tensor {out}' for out in results)})", call, fake, gradients[0])
    _define(f"{name}_out({arguments}, {options}{', '.join(written)}) -> ()", write, _nothing, gradients[1])


def _nothing(*args: Any, **options: Any) -> None:
    """Stand for an op that writes to tensors of the caller."""


def _decode_results(q: Tensor, *args: Any, cu_seqlens_q: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """Allocate out and lse of decode."""
    shape = "[batch, s_q, h_q, columns]" if cu_seqlens_q is None else "[total_q, h_q, columns]"
    if q.dim() != (4 if cu_seqlens_q is None else 3):
        raise ValueError(f"q has shape {list(q.shape)}; supported: {shape}")
    *tokens, h_q, d_qk = q.shape
    dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    out = q.new_empty((*tokens, h_q, value_columns(d_qk)), dtype=dtype)
    return out, q.new_empty((*tokens[:1], h_q, *tokens[1:]), dtype=torch.float32)


def _prefill_results(q: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate out, max_logits and lse of sparse prefill."""
    rows = q.shape[:-1]
    return q.new_empty((*rows, D_V)), q.new_empty(rows, dtype=torch.float32), q.new_empty(rows, dtype=torch.float32)


def _run_indexer_prefill(*args: Any, **options: Any) -> tuple[Tensor, ...]:
    """Compute sparse prefill with lse_indexer."""
    check_integer("indexer_topk", options["indexer_topk"], 1)
    return sparse_prefill.run(*args, **options)


def _indexer_prefill_results(q: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate out, max_logits, lse and lse_indexer of sparse prefill."""
    return *_prefill_results(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


def _varlen_results(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Allocate out and lse of dense prefill."""
    rows = q.shape[:-1]
    return q.new_empty((*rows, v.shape[-1])), q.new_empty(rows, dtype=torch.float32)


def _gradients(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate dq, dk and dv of dense prefill, which are 0 in rows of no sequence."""
    return q.new_zeros(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)


def _split(q: Tensor | None, packed: Tensor, head_dim_qk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v, slices of the packed tensor; a q that is given beside it is returned as it is."""
    first = packed[..., :head_dim_qk]
    if q is not None:
        return q, first, packed[..., head_dim_qk:]
    return first, packed[..., head_dim_qk : 2 * head_dim_qk], packed[..., 2 * head_dim_qk :]


def _run_packed(q: Tensor | None, packed: Tensor, head_dim_qk: int, *args: Any, empty_lse: float | None = None) -> tuple[Tensor, Tensor]:
    """Compute dense prefill of a packed tensor."""
    return dense_prefill.run(*_split(q, packed, head_dim_qk), *args, empty_lse=math.inf if empty_lse is None else empty_lse)


def _packed_results(q: Tensor | None, packed: Tensor, head_dim_qk: int, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Allocate out and lse of dense prefill of a packed tensor."""
    return _varlen_results(*_split(q, packed, head_dim_qk))


def _run_packed_backward(
    dout: Tensor, q: Tensor | None, packed: Tensor, head_dim_qk: int, out: Tensor, lse: Tensor, *args: Any, **options: Any
) -> list[Tensor]:
    """Compute the gradient of q, unless it is None, and that of the packed tensor."""
    gradients = _packed_gradients(dout, q, packed)
    dq, dk, dv = _split(None if q is None else gradients[0], gradients[-1], head_dim_qk)
    dense_prefill_backward.run(dout, *_split(q, packed, head_dim_qk), out, lse, *args, **options, dq=dq, dk=dk, dv=dv)
    return gradients


def _packed_gradients(dout: Tensor, q: Tensor | None, packed: Tensor, *args: Any, **options: Any) -> list[Tensor]:
    """Allocate the gradient of q, unless it is None, and that of the packed tensor. They are 0 in rows of no sequence."""
    return [tensor.new_zeros(tensor.shape) for tensor in (q, packed) if tensor is not None]


def _save_varlen(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor]) -> None:
    """Keep what the backward pass of dense prefill reads."""
    _save(ctx, inputs[:3], inputs[3:], output)


def _save_packed(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: dict[str, Any], output: tuple[Tensor, Tensor]) -> None:
    """Keep what the backward pass of a packed form reads."""
    *operands, ctx.head_dim_qk = inputs[:3]
    _save(ctx, operands, inputs[3:], output)


def _save(ctx: Any, operands: Sequence[Tensor | None], others: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep tensors and options. others: the arguments after the operands."""
    cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv, _, softmax_scale, causal, *_ = others
    if output[0].dtype == torch.float16:
        raise ValueError("q has dtype torch.float16 and a gradient is needed; supported: torch.bfloat16, as .to(torch.bfloat16) gives")
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*operands, *output, cu_seqlens_qo, cu_seqlens_kv)
    ctx.options = (max_seqlen_qo, max_seqlen_kv, softmax_scale, causal)


def _varlen_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k and v, and None for the other arguments."""
    dout = _out_gradient(dout, dlse)
    if dout is None:
        return (None,) * _VARLEN_ARGUMENTS
    gradients = _ops.flash_attn_varlen_backward(dout, *ctx.saved_tensors, *ctx.options)
    return (*gradients, *(None,) * (_VARLEN_ARGUMENTS - len(gradients)))


def _packed_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, None if it is a slice, and of the packed tensor, and None for the other arguments."""
    dout = _out_gradient(dout, dlse)
    if dout is None:
        return (None,) * _VARLEN_ARGUMENTS
    q, packed, *saved = ctx.saved_tensors
    gradients = _ops.flash_attn_varlen_packed_backward(dout, q, packed, ctx.head_dim_qk, *saved, *ctx.options)
    return (None if q is None else gradients[0], gradients[-1], *(None,) * (_VARLEN_ARGUMENTS - 2))


def _out_gradient(dout: Tensor | None, dlse: Tensor | None) -> Tensor | None:
    """Return the gradient of out as kernels read it, None if there is none. ValueError if lse has a gradient."""
    if dlse is not None:
        raise ValueError("lse has a gradient; supported: gradients of out only, so lse.detach() where a loss depends on lse")
    return None if dout is None else as_rows(dout)


def _no_double_backward(ctx: Any, *gradients: Any) -> None:
    """Raise ValueError."""
    raise ValueError(f"a gradient of flash_attn_varlen_func requires grad; supported: {NO_DOUBLE_BACKWARD}")


def _merged_results(outs: list[Tensor], lses: list[Tensor], stacked: bool = False, **options: Any) -> tuple[Tensor, Tensor]:
    """Allocate out and lse of merge_states."""
    shape = outs[0].shape[1:] if stacked else outs[0].shape
    return outs[0].new_empty(shape), outs[0].new_empty(shape[:-1], dtype=torch.float32)


def _new_plan(cache_seqlens: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Allocate the result of get_mla_metadata."""
    given = inspect.signature(split_plan.run).bind(cache_seqlens, *args, **options).arguments
    options = {name: value for name, value in given.items() if name in split_plan.Options._fields}
    return _plan_tensors(split_plan.Options(**options).call(cache_seqlens.shape[0]), cache_seqlens)


def _new_sparse_plan(indices: Tensor, num_heads_q: int, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    s_q = indices.shape[1] if indices.dim() == 3 else 1
    return _plan_tensors(split_plan.CallSpec(indices.shape[0], num_heads_q, max(s_q, 1), indices.shape[-1], 0), indices)


def _plan_tensors(call: split_plan.CallSpec, like: Tensor) -> tuple[Tensor, Tensor]:
    """Allocate a plan's two tensors."""
    device = device_for(like.device)
    rows = num_parts(device.arch, call.rows, call.columns, device.sm_count) + (call.ragged.table_rows if call.ragged else 0)
    return like.new_empty((rows, PLAN_COLUMNS)), like.new_empty((call.batch + 1,))


def _new_keys(k_cache: Tensor, block_table: Tensor, cu_seqlens: Tensor, rows: int, **options: Any) -> Tensor:
    """Allocate the result of gather_kv_cache."""
    own = torch.bfloat16 if k_cache.dtype.itemsize == 1 else k_cache.dtype
    same = [cache for cache in CACHED.values() if bool(cache.quantised) == (k_cache.dtype.itemsize == 1)]
    d_qk = next((cache.d_qk for cache in same if columns_of(cache) == k_cache.shape[-1]), D_QK)  # no dict: a symbol has no hash
    return k_cache.new_empty((rows, d_qk), dtype=options.get("dtype") or own)


def _prepared(q: Tensor, weights: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Allocate the results of prepare_index_queries."""
    return q.new_empty(q.shape, dtype=torch.float8_e4m3fn), weights.new_empty(weights.shape, dtype=torch.float32)


def _new_indices(logits: Tensor, lengths: Tensor, topk: int) -> Tensor:
    """Allocate the result of topk_indices."""
    return lengths.new_empty((logits.shape[0], topk))


def _new_keys_of_tokens(q: Tensor, *args: Any, **options: Any) -> Tensor:
    """Allocate the result of indexer_topk or indexer_topk_prefill: topk is the sixth or seventh argument."""
    place = 4 if q.dim() == 4 else 5
    topk = args[place] if len(args) > place else options["topk"]
    tokens = q.shape[0] * q.shape[1] if q.dim() == 4 else q.shape[0]
    return q.new_empty((tokens, topk), dtype=torch.int32)


def _row_topk(q: Tensor, keys: Tensor, scales: Tensor, *args: Any, **options: Any) -> Tensor:
    return indexer_op.run_rows(q, (keys, scales), *args, **options)


def _new_logits(weights: Tensor, columns: int) -> Tensor:
    """Allocate the logits of the tokens that weights [tokens, heads] are of."""
    stride = (columns + logits_op.ROW_ALIGNMENT - 1) // logits_op.ROW_ALIGNMENT * logits_op.ROW_ALIGNMENT
    return weights.new_empty((weights.shape[0], stride))[:, :columns]


def _new_row_logits(q: Tensor, keys: Tensor, scales: Tensor, weights: Tensor, *args: Any, **options: Any) -> Tensor:
    """Allocate the result of fp8_mqa_logits."""
    columns = args[3] if len(args) > 3 else options.get("max_seqlen_k", 0)
    return _new_logits(weights, columns or keys.shape[0])


def _new_paged_logits(
    q: Tensor, cache: Tensor, weights: Tensor, context_lens: Tensor, block_table: Tensor, metadata: Tensor | None, columns: int, *args: Any
) -> Tensor:
    """Allocate the result of fp8_paged_mqa_logits."""
    return _new_logits(weights, columns)


def _row_logits(q: Tensor, keys: Tensor, scales: Tensor, *args: Any, **options: Any) -> Tensor:
    return logits_op.run_rows(q, (keys, scales), *args, **options)


_define_both("flash_mla_with_kvcache", schemas.DECODE, ("out", "lse", "workspace?"), decode.run_cached, _decode_results)
_define_both("flash_mla_sparse_fwd", schemas.PREFILL, ("out", "max_logits", "lse"), sparse_prefill.run, _prefill_results)
_define_both(
    "flash_mla_sparse_fwd_indexer",
    schemas.INDEXER_PREFILL,
    ("out", "max_logits", "lse", "lse_indexer"),
    _run_indexer_prefill,
    _indexer_prefill_results,
)
_define_both(
    "flash_attn_varlen_func",
    schemas.VARLEN,
    ("out", "lse"),
    dense_prefill.run,
    _varlen_results,
    (_Gradient(_varlen_backward, _save_varlen), NO_GIVEN_RESULTS),
)
_define_both("flash_attn_varlen_masked", f"{schemas.VARLEN}, Tensor key_mask", ("out", "lse"), dense_prefill.run, _varlen_results)
_define_both(
    "flash_attn_varlen_backward",
    schemas.VARLEN_BACKWARD,
    ("dq", "dk", "dv", "workspace?"),
    dense_prefill_backward.run,
    _gradients,
    (_Gradient(_no_double_backward), NO_DOUBLE_BACKWARD),
)
_define(
    f"flash_attn_varlen_packed({schemas.PACKED}, {schemas.VARLEN_OPTIONS}) -> (Tensor out, Tensor lse)",
    _run_packed,
    _packed_results,
    _Gradient(_packed_backward, _save_packed),
)
_define(
    f"flash_attn_varlen_packed_backward(Tensor dout, {schemas.PACKED}, {schemas.BACKWARD_OPTIONS}) -> Tensor[]",
    _run_packed_backward,
    _packed_gradients,
    _Gradient(_no_double_backward),
)
_define_both("merge_states", schemas.MERGE, ("out", "lse"), merge.run_lists, _merged_results)
_define(f"get_mla_metadata({schemas.PLAN}) -> {schemas.PLAN_RESULTS}", split_plan.run, _new_plan)
_define(f"plan_sparse_decode({schemas.SPARSE_PLAN}) -> {schemas.PLAN_RESULTS}", split_plan.run_sparse, _new_sparse_plan)
_define(f"write_kv_cache({schemas.WRITE}) -> ()", cache_write.run, _nothing)
_define(f"insert_kv_cache({schemas.INSERT}) -> ()", cache_insert.run, _nothing)
_define_both("gather_kv_cache", schemas.GATHER, ("out",), cache_gather.run, _new_keys)
_define(f"write_index_cache({schemas.INDEX_KEYS}) -> ()", index_op.run_keys, _nothing)
_define_both("prepare_index_queries", schemas.INDEX_QUERIES, ("out", "out_weights"), index_op.run_queries, _prepared)
_define_both("fp8_mqa_logits", schemas.ROW_LOGITS, ("out",), _row_logits, _new_row_logits)
_define_both("fp8_paged_mqa_logits", schemas.PAGED_LOGITS, ("out",), logits_op.run_pages, _new_paged_logits)
_define_both("indexer_topk", schemas.PAGED_TOPK, ("out", "workspace?"), indexer_op.run_pages, _new_keys_of_tokens)
_define_both("indexer_topk_prefill", schemas.ROW_TOPK, ("out", "workspace?"), _row_topk, _new_keys_of_tokens)
_define_both("topk_indices", schemas.TOPK, ("out",), topk_op.run, _new_indices)


def get_mla_metadata(cache_seqlens: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """Trace api.get_mla_metadata with arguments."""
    plan: tuple[Tensor, Tensor] = _ops.get_mla_metadata(cache_seqlens, *args)
    return plan


def flash_mla_with_kvcache(planned: tuple[Any, Tensor | None], given: dict[str, Tensor | None], **arguments: Any) -> tuple[Tensor, Tensor]:
    """Trace api.flash_mla_with_kvcache. planned: a plan's two tensors, or a schedule object and None. given: results and workspace."""
    metadata, num_splits = planned
    if isinstance(metadata, MlaSchedule) and num_splits is None:
        metadata, num_splits = _planned_by(metadata, **arguments)
    elif not isinstance(metadata, Tensor) or num_splits is None:
        split_plan.plan_specs(metadata, num_splits)  # raises ValueError
    arguments = {**arguments, "tile_scheduler_metadata": metadata, "num_splits": num_splits}
    out, lse = _call("flash_mla_with_kvcache", _decode_results, given, arguments)
    return out, lse


def flash_mla_sparse_fwd(given: dict[str, Tensor | None], *, indexer_topk: int, **arguments: Any) -> tuple[Tensor, ...]:
    """Trace api.flash_mla_sparse_fwd: an op of its own where lse_indexer is asked for."""
    if sparse_prefill.check_indexer(indexer_topk, given["lse_indexer"]):
        arguments["indexer_topk"] = indexer_topk
        results: tuple[Tensor, ...] = _call("flash_mla_sparse_fwd_indexer", _indexer_prefill_results, given, arguments)
        return results
    given = {name: tensor for name, tensor in given.items() if name != "lse_indexer"}
    out, max_logits, lse = _call("flash_mla_sparse_fwd", _prefill_results, given, arguments)
    return out, max_logits, lse


def flash_attn_varlen_func(given: dict[str, Tensor | None], *, key_mask: Tensor | None, **arguments: Any) -> tuple[Tensor, Tensor]:
    """Trace api.flash_attn_varlen_func. With a mask it is an op without gradients."""
    if key_mask is None:
        out, lse = _call("flash_attn_varlen_func", _varlen_results, given, arguments)
    else:
        out, lse = _call("flash_attn_varlen_masked", _varlen_results, given, {**arguments, "key_mask": key_mask})
    return out, lse


def flash_attn_varlen_packed(**arguments: Any) -> tuple[Tensor, Tensor]:
    """Call a packed form of flash_attn_varlen_func with gradients. q: None if the packed tensor holds it."""
    out, lse = _ops.flash_attn_varlen_packed(**arguments)
    return out, lse


def flash_attn_varlen_backward(given: dict[str, Tensor | None], **arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Trace api.flash_attn_varlen_backward."""
    dq, dk, dv = _call("flash_attn_varlen_backward", _gradients, given, arguments)
    return dq, dk, dv


def merge_states(outs: merge.States, lses: merge.States, given: dict[str, Tensor | None], empty_lse: float) -> tuple[Tensor, Tensor]:
    """Trace api.merge_states."""
    if merge.is_stacked(outs, lses):
        arguments = {"outs": [outs], "lses": [lses], "stacked": True, "empty_lse": empty_lse}
    else:
        arguments = {"outs": list(outs), "lses": list(lses), "empty_lse": empty_lse}
    out, lse = _call("merge_states", _merged_results, given, arguments)
    return out, lse


def write_kv_cache(*args: Tensor | None, **options: Any) -> None:
    """Trace cache.write_kv_cache."""
    _ops.write_kv_cache(*args, **options)


def insert_kv_cache(*args: Tensor | None, **options: Any) -> None:
    """Trace cache.insert_kv_cache."""
    _ops.insert_kv_cache(*args, **options)


def gather_kv_cache(*args: Any, out: Tensor | None, **options: Any) -> Tensor:
    """Trace cache.gather_kv_cache."""
    if out is None:
        new: Tensor = _ops.gather_kv_cache(*args, **options)
        return new
    _ops.gather_kv_cache_out(*args, **options, out=out)
    return out


def write_index_cache(*args: Tensor | None, **options: Any) -> None:
    """Trace indexer.write_index_cache."""
    _ops.write_index_cache(*args, **options)


def prepare_index_queries(given: dict[str, Tensor | None], **arguments: Any) -> tuple[Tensor, Tensor]:
    """Trace indexer.prepare_index_queries. given: out and out_weights."""
    out, out_weights = _call("prepare_index_queries", _prepared, given, arguments)
    return out, out_weights


def fp8_mqa_logits(q: Tensor, kv: Any, *args: Any, out: Tensor | None) -> Tensor:
    """Trace indexer.fp8_mqa_logits."""
    return _to_given("fp8_mqa_logits", (q, *kv, *args), out)


def fp8_paged_mqa_logits(*args: Any, out: Tensor | None) -> Tensor:
    """Trace indexer.fp8_paged_mqa_logits."""
    return _to_given("fp8_paged_mqa_logits", args, out)


def indexer_topk(arguments: dict[str, Any], given: dict[str, Tensor | None]) -> Tensor:
    """Trace indexer.indexer_topk. given: out and workspace."""
    return _chosen("indexer_topk", arguments, given)


def indexer_topk_prefill(arguments: dict[str, Any], given: dict[str, Tensor | None]) -> Tensor:
    """Trace indexer.indexer_topk_prefill. given: out and workspace."""
    return _chosen("indexer_topk_prefill", arguments, given)


def _chosen(name: str, arguments: dict[str, Any], given: dict[str, Tensor | None]) -> Tensor:
    """Call one of the two ops, or the one that writes to the caller's tensors if any is given."""
    called = _call(name, lambda **made_of: (_new_keys_of_tokens(**made_of),), given, arguments)
    chosen: Tensor = called[0] if isinstance(called, tuple) else called
    return chosen


def _to_given(name: str, args: tuple[Any, ...], out: Tensor | None) -> Tensor:
    """Call the op that allocates its result, or the op that writes to the caller's."""
    if out is None:
        new: Tensor = getattr(_ops, name)(*args)
        return new
    getattr(_ops, f"{name}_out")(*args, out=out)
    return out


def topk_indices(logits: Tensor, lengths: Tensor, topk: int, out: Tensor | None) -> Tensor:
    """Trace indexer.topk_indices."""
    return _to_given("topk_indices", (logits, lengths, topk), out)


def _call(name: str, make: Callable[..., tuple[Tensor, ...]], given: dict[str, Tensor | None], arguments: dict[str, Any]) -> Any:
    """Call the op that allocates its results or, if a result or workspace is given, the op that writes to given tensors."""
    if all(tensor is None for tensor in given.values()):
        return getattr(_ops, name)(**arguments)
    made = make(**arguments)
    names = [name for name in given if name != "workspace"]
    results = {name: new if given[name] is None else given[name] for name, new in zip(names, made, strict=True)}
    getattr(_ops, f"{name}_out")(**arguments, **{**given, **results})
    return tuple(results.values())


def _planned_by(schedule: MlaSchedule, **arguments: Any) -> tuple[Tensor, Tensor]:
    """Return the plan of a schedule object; make it at its first use. The op compares shapes with it when it runs."""
    if schedule.plan is not None:
        return schedule.plan
    q, k_cache, indices, extra = (arguments[name] for name in ("q", "k_cache", "indices", "extra_indices_in_kvcache"))
    offsets, max_seqlen_q = arguments["cu_seqlens_q"], arguments["max_seqlen_q"]
    if (offsets is None) != (max_seqlen_q is None) or q.dim() != (4 if offsets is None else 3):
        raise ValueError(f"q has shape {list(q.shape)}; supported: 4 dimensions, or 3 with cu_seqlens_q and max_seqlen_q")
    *tokens, h_q, _ = q.shape
    batch, s_q = tokens if offsets is None else (offsets.shape[0] - 1, max_seqlen_q)
    total_q = None if offsets is None else tokens[0]
    page_size, h_kv = k_cache.shape[1:3]
    table_rows = 0
    if indices is None:
        topk = extra_topk = None
        per_head = (s_q * (h_q // h_kv), h_kv, h_q)
        given = {"cu_seqlens_q": offsets, "total_q": total_q} | {name: arguments[name] for name in ("window", "window_sink")}
        plan = _ops.get_mla_metadata(arguments["cache_seqlens"], *per_head, **given)
        if total_q is not None:
            table_rows = split_plan.ragged_queries(batch, total_q, s_q, h_q // h_kv).table_rows
    else:
        topk, extra_topk = indices.shape[-1], 0 if extra is None else extra.shape[-1]
        lengths = (arguments["topk_length"], extra, arguments["extra_topk_length"])
        plan = _ops.plan_sparse_decode(indices, h_q, *lengths, offsets)
    parts = plan[0].shape[0] - table_rows
    shapes = (batch, s_q, h_q, h_kv, page_size, parts, q.device, topk, extra_topk, total_q)
    schedule.key = ScheduleKey(*shapes, arguments["window"], arguments["window_sink"])
    schedule.plan = plan
    return plan
