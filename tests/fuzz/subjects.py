"""The functions that are called: how a case becomes arguments, what is at fault in them, and what a call must return."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

import cute_mla
from cute_mla.ops.split_plan import MlaSchedule
from cute_mla.spec import dense_decode, sparse_decode
from cute_mla.spec.arch import ARCHS
from cute_mla.spec.split_plan import piece_overhead
from cute_mla.testing.cases.base import BaseCase
from cute_mla.testing.compare import (
    DENSE_DECODE_OUT,
    DENSE_PREFILL_GRADIENT,
    DENSE_PREFILL_OUT,
    FP8_DENSE_OUT,
    LSE,
    NO_BOUND,
    PREFILL_LSE,
    SPARSE_DECODE_OUT,
    SPARSE_PREFILL_OUT,
    Tolerance,
    compare,
)
from cute_mla.testing.operations import OPERATIONS, operation
from cute_mla.testing.operations.decode import token_ranges
from cute_mla.testing.split_plan_reference import reference_plan
from tests.fuzz import contract
from tests.fuzz.calls import PlanCase, Setting
from tests.fuzz.decode_contract import decode_faults
from tests.fuzz.ragged import are_apart, is_plan, of_used_rows, used_tokens
from tests.support.recording_device import RecordingDevice

Arguments = dict[str, Any]
Verify = Callable[[Any], str]  # of what a call returned: what is wrong with it, or nothing

_GUARD = 256  # bytes of another allocation's before and after a workspace
_MOST_SCALE = 10.0  # beyond it, scores leave the range in which tolerances mean anything
_ROUNDED_LSE = replace(LSE, abs_tol=1e-4, cos_tol=1e-3)  # README: over very few keys of FP8, each rounded once to bf16
_MOST_SCORE = 1e4
_LEAST_OUT = 1e-5
_HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclass(frozen=True)
class Subject:
    """A function of the API.

    arguments(case): of a right call, inside a device. faults(arguments, setting): the names of all arguments of which one may be blamed.
    expect(arguments, setting): what is known of the result, from before the call. unbroken: arguments of which faults says nothing.
    more: names that the function takes as **keywords.
    """

    function: Callable[..., Any]
    arguments: Callable[[Any], Arguments]
    faults: Callable[[Arguments, Setting], set[str]]
    expect: Callable[[Arguments, Setting], Verify]
    unbroken: tuple[str, ...] = ()
    more: tuple[str, ...] = ()

    @property
    def breakable(self) -> tuple[str, ...]:
        """Return the arguments that may be broken."""
        parameters = inspect.signature(self.function).parameters.values()
        named = [item.name for item in parameters if item.kind != item.VAR_KEYWORD and item.name not in self.unbroken]
        return (*named, *self.more)


def against(expected: tuple[Tensor, ...], tolerances: Mapping[str, Tolerance]) -> Verify:
    """Results agree with a reference's."""
    # A whole result that is nothing to its type, such as values scaled by a great sink, has no direction.
    wide = replace(next(iter(tolerances.values())), cos_tol=math.inf)
    first = next(iter(tolerances))
    if expected[0].numel() and expected[0].nan_to_num().abs().max() < _LEAST_OUT:
        tolerances = {**tolerances, first: wide}

    def verify(results: Any) -> str:
        if not isinstance(results, tuple) or len(results) != len(expected):
            return f"{type(results).__name__} returned, a tuple of {len(expected)} expected"
        pairs = zip(tolerances.items(), results, expected, strict=True)
        return "; ".join(filter(None, (compare(name, got, wanted, limit).reason for (name, limit), got, wanted in pairs)))

    return verify


def against_tame(expected: tuple[Tensor, ...], tolerances: Mapping[str, Tolerance]) -> Verify:
    """Compare as `against` does, and pass a call whose reference is unreliable.

    Unreliable are scores so large that fp32 rounds them by more than the tolerances, and rows over keys that are NaN.
    """
    lse = torch.stack([result for name, result in zip(tolerances, expected, strict=True) if name.startswith("lse")])
    return anything if (lse.isnan() | (lse.isfinite() & (lse.abs() > _MOST_SCORE))).any() else against(expected, tolerances)


def anything(results: Any) -> str:
    """Nothing is known of the values, but the call has ended and kept to its operands."""
    return ""


def overwritten_plan(results: Any) -> str:
    """Accept as `anything` does; rows may also belong to no part of the plan or to several, which the simulated device notices."""
    return ""


def same_slots(results: Any) -> str:
    """Accept as `anything` does; several tokens share a slot, and the simulated device notices that their writes are unordered."""
    return ""


# Functions above, and the kinds of findings that they allow.
ALLOWED_FINDINGS: dict[Verify, set[str]] = {overwritten_plan: {"poison", "race"}, same_slots: {"race"}}


def allowed_findings(verify: Verify, arguments: Arguments) -> set[str]:
    """Return the kinds of findings that a right call may have: of its judge, and of used block-table entries outside the cache."""
    kinds = set(ALLOWED_FINDINGS.get(verify, ()))
    read = "k_cache" in arguments and isinstance(arguments.get("block_table"), Tensor) and arguments.get("indices") is None
    if read and _uses_no_page(arguments):
        kinds.add("block_table")
    if isinstance(arguments.get("context_lens"), Tensor) and _names_no_page(arguments):
        kinds.add("block_table")
    return kinds


def _names_no_page(arguments: Arguments) -> bool:
    """Return whether the longest token of a request sees a key on a page that the index cache does not have. Written key by key."""
    pages, page = arguments["cache" if "cache" in arguments else "index_cache"].shape[:2]
    most = arguments.get("max_context_len", math.inf)
    lens = arguments["context_lens"]
    lengths = (lens if lens.dim() == 2 else lens.unsqueeze(1)).tolist()
    return any(
        not 0 <= row[key // page] < pages
        for row, ends in zip(arguments["block_table"].tolist(), lengths, strict=True)
        for key in range(min(max(ends, default=0), len(row) * page, most))
    )


def _uses_no_page(arguments: Arguments) -> bool:
    """Return whether a key of a request lies in a page that the cache does not have. Written key by key, unlike the device's check."""
    table, (pages, page) = arguments["block_table"].tolist(), arguments["k_cache"].shape[:2]
    if "cache_seqlens" in arguments:
        spans = [(0, length) for length in arguments["cache_seqlens"].tolist()]
    else:
        ends, starts = arguments["cu_seqlens"].clamp(max=arguments["rows"]).tolist(), arguments["starts"]
        firsts = [0] * len(table) if starts is None else starts.tolist()
        spans = [(first, first + end - begin) for first, begin, end in zip(firsts, ends[:-1], ends[1:], strict=True)]
    return any(
        not 0 <= row[key // page] < pages
        for row, (first, end) in zip(table, spans, strict=True)
        if first >= 0
        for key in range(first, min(end, len(row) * page))
    )


# ------------------------------------------------------------ attention


def case_arguments(case: BaseCase) -> Arguments:
    """Return the arguments of a library case's call, with a guarded workspace of exact size if results are given."""
    op = operation(case)
    tensors = op.make_tensors(case, "cpu")
    workspace = None
    if tensors.output_buffers and (size := op.workspace_bytes(case, tensors)):
        workspace = torch.zeros(size + 2 * _GUARD, dtype=torch.uint8)[_GUARD : _GUARD + size]
    return op.arguments(case, tensors, workspace)


def _is_tame(scale: Any) -> bool:
    return scale is None or 1e-6 < float(scale) < _MOST_SCALE


def _decode_faults(arguments: Arguments, setting: Setting) -> set[str]:
    arch = ARCHS[setting.arch]
    d_v: Any = arguments.get("head_dim_v")

    def parts(rows: int, columns: int) -> set[int]:
        if arguments.get("indices") is not None:
            return {sparse_decode.num_parts(arch, rows, columns, setting.sm_count)}
        return {dense_decode.num_parts(arch, rows, columns, setting.sm_count, operands, d_v) for operands in dense_decode.OPERANDS}

    with RecordingDevice(arch, setting.sm_count).active():
        return decode_faults(arguments, parts, cute_mla.workspace_size)


def _expect_decode(arguments: Arguments, setting: Setting) -> Verify:
    metadata = arguments["tile_scheduler_metadata"]
    ragged = arguments.get("cu_seqlens_q") is not None
    if ragged and not are_apart(token_ranges(arguments)):
        return overwritten_plan
    if not isinstance(metadata, MlaSchedule) and not is_plan(arguments):
        return overwritten_plan
    if not _is_tame(arguments["softmax_scale"]):
        return anything
    sparse = arguments.get("indices") is not None
    expected = OPERATIONS["sparse_decode" if sparse else "dense_decode"].expected(arguments)
    tolerances = _decode_tolerances(arguments, sparse)
    if not ragged:
        return against_tame(expected, tolerances)
    used = used_tokens(arguments)
    if against_tame((expected[0][used], expected[1][used]), tolerances) is anything:
        return anything
    return of_used_rows(arguments, against(expected, tolerances))


def _decode_tolerances(arguments: Arguments, sparse: bool) -> dict[str, Tolerance]:
    if sparse:
        return {"out": SPARSE_DECODE_OUT, "lse": LSE if arguments["k_cache"].shape[3] == 576 else _ROUNDED_LSE}
    return {"out": FP8_DENSE_OUT if arguments["q"].dtype == torch.float8_e4m3fn else DENSE_DECODE_OUT, "lse": LSE}


def _expect_sparse_prefill(arguments: Arguments, setting: Setting) -> Verify:
    if not _is_tame(arguments["sm_scale"]):
        return anything
    rows = ("max_logits", "lse", "lse_indexer")[: 3 if arguments["indexer_topk"] else 2]
    tolerances = {"out": SPARSE_PREFILL_OUT, **dict.fromkeys(rows, PREFILL_LSE)}
    return against_tame(OPERATIONS["sparse_prefill"].expected(arguments), tolerances)


def _sparse_backward_faults(arguments: Arguments, setting: Setting) -> set[str]:
    with RecordingDevice(ARCHS[setting.arch], setting.sm_count).active():
        return contract.sparse_backward_faults(arguments)


def _expect_sparse_backward(arguments: Arguments, setting: Setting) -> Verify:
    """Expect gradients of an lse that belongs to the operands; of others anything."""
    forward = {name: arguments[name] for name in ("q", "kv", "indices", "sm_scale", "attn_sink", "topk_length", "kv_offsets")}
    _, _, true_lse = OPERATIONS["sparse_prefill"].expected({**forward, "empty_lse": math.inf, "indexer_topk": 0})
    known = arguments["lse"].isfinite() & true_lse.isfinite()
    if not _is_tame(arguments["sm_scale"]) or ((arguments["lse"] - true_lse)[known].abs() > 1e-3).any():
        return anything
    if arguments["dkv_accumulate"]:  # the judge has overwritten what is added to
        return anything
    if not arguments["dout"].isfinite().all() or (arguments["lse"].isfinite() != true_lse.isfinite())[~true_lse.isfinite()].any():
        return anything
    dkv = replace(NO_BOUND, cos_tol=3e-5)
    return against(OPERATIONS["sparse_prefill_backward"].expected(arguments), {"dq": NO_BOUND, "dkv": dkv, "d_sink": NO_BOUND})


def _leaves_open(arguments: Arguments) -> bool:
    """Return whether scale or offsets leave the results of dense prefill open."""
    ends = arguments["cu_seqlens_qo"].clamp(0, len(arguments["q"]))
    longest = int(ends.diff().max()) if len(ends) > 1 else 0
    return not _is_tame(arguments["softmax_scale"]) or bool((ends.diff() < 0).any()) or longest > arguments["max_seqlen_qo"]


def _expect_dense_prefill(arguments: Arguments, setting: Setting) -> Verify:
    if _leaves_open(arguments) or not all(rows.isfinite().all() for rows in _queries_of_sequences(arguments)):
        return anything
    return against(OPERATIONS["dense_prefill"].expected(arguments), {"out": DENSE_PREFILL_OUT, "lse": PREFILL_LSE})


def _queries_of_sequences(arguments: Arguments) -> list[Tensor]:
    ends = arguments["cu_seqlens_qo"].clamp(0, len(arguments["q"])).tolist()
    return [arguments["q"][first:end] for first, end in pairwise(ends)]


def _backward_faults(arguments: Arguments, setting: Setting) -> set[str]:
    with RecordingDevice(ARCHS[setting.arch], setting.sm_count).active():
        return contract.backward_faults(arguments, cute_mla.workspace_size)


def _expect_backward(arguments: Arguments, setting: Setting) -> Verify:
    """Expect gradients of out and lse that belong to the operands; of others anything. A sequence of right calls may be NaN as a whole."""
    whole = all(rows.isfinite().all() or rows.isnan().all() for rows in _queries_of_sequences(arguments))
    if _leaves_open(arguments) or not whole:
        return anything
    lse, keys = arguments["lse"], arguments["cu_seqlens_kv"].clamp(0, len(arguments["k"])).diff()
    if (keys < 0).any() or (keys > arguments["max_seqlen_kv"]).any():
        return anything
    _, true_lse = OPERATIONS["dense_prefill"].expected({**arguments, "empty_lse": math.inf})
    known = lse.isfinite() & true_lse.isfinite()
    if ((lse - true_lse)[known].abs() > 1e-3).any() or (lse.isnan() != true_lse.isnan())[~true_lse.isnan()].any():
        return anything
    dv = replace(DENSE_PREFILL_GRADIENT, abs_tol=3e-2, cos_tol=math.inf)
    return against(OPERATIONS["dense_prefill_backward"].expected(arguments), {"dq": NO_BOUND, "dk": NO_BOUND, "dv": dv})


# ------------------------------------------------------------ forms of dense prefill


def _kvpacked(case: Any) -> Arguments:
    plain = case_arguments(case)
    return {**_without(plain, "k", "v"), "kv": torch.cat((plain["k"], plain["v"]), -1), "head_dim_qk": case.d_qk}


def _qkvpacked(case: Any) -> Arguments:
    plain = case_arguments(case)
    packed = torch.cat((plain["q"], plain["k"], plain["v"]), -1)
    rest = _without(plain, "q", "k", "v", "cu_seqlens_qo", "cu_seqlens_kv", "max_seqlen_qo", "max_seqlen_kv")
    return {**rest, "qkv": packed, "cu_seqlens": plain["cu_seqlens_qo"], "max_seqlen": plain["max_seqlen_qo"], "head_dim_qk": case.d_qk}


def _without(arguments: Arguments, *names: str) -> Arguments:
    return {name: value for name, value in arguments.items() if name not in names}


def _unpacked(arguments: Arguments) -> Arguments:
    """Return the arguments of flash_attn_varlen_func."""
    columns = arguments["head_dim_qk"]
    packed = arguments["kv"] if "kv" in arguments else arguments["qkv"]
    d_v = contract.PREFILL_COLUMNS[columns]
    plain = {**arguments, "k": packed[..., -d_v - columns : -d_v], "v": packed[..., -d_v:]}
    if "qkv" in arguments:
        plain["q"] = packed[..., :columns]
        plain |= {f"cu_seqlens_{side}": arguments["cu_seqlens"] for side in ("qo", "kv")}
        plain["max_seqlen_qo"] = arguments["max_seqlen"]
    return plain


# ------------------------------------------------------------ merge_states


def _expect_merge(arguments: Arguments, setting: Setting) -> Verify:
    out = Tolerance(1e-5, 1.05 * _HALF_ULP[arguments["outs"][0].dtype], 1e-5)
    return against(OPERATIONS["merge_states"].expected(arguments), {"out": out, "lse": Tolerance(3e-6, 2e-6, 1e-7)})


# ------------------------------------------------------------ plans


def _plan_arguments(case: PlanCase) -> Arguments:
    lengths = torch.tensor(case.lengths, dtype=torch.int32)
    heads = case.group * case.h_kv
    return {
        "cache_seqlens": lengths,
        "num_q_tokens_per_head_k": case.s_q * case.group,
        "num_heads_k": case.h_kv,
        "num_heads_q": heads if case.topk is not None or heads % 2 else None,
        "is_fp8_kvcache": False,
        "topk": case.topk,
    }


def _expect_plan(arguments: Arguments, setting: Setting) -> Verify:
    lengths, topk = arguments["cache_seqlens"], arguments["topk"]
    if lengths is None:
        return lambda result: "" if isinstance(result[0], MlaSchedule) and result[1] is None else f"{result} returned"
    rows, columns = arguments["num_q_tokens_per_head_k"], arguments["num_heads_k"]
    if topk is not None:
        rows, columns = arguments["num_heads_q"], rows // arguments["num_heads_q"]
    shape = (ARCHS[setting.arch], int(rows), int(columns), setting.sm_count)
    if topk is None:
        parts = dense_decode.num_parts(*shape, d_v=int(arguments.get("head_dim_v", 512)))
    else:
        parts = sparse_decode.num_parts(*shape)
    planned = lengths.tolist() if topk is None else [int(topk)] * len(lengths)
    plan = reference_plan(planned, parts, overhead=piece_overhead(ARCHS[setting.arch]))

    def verify(result: Any) -> str:
        if list(result[0].shape) != [parts, 8] or list(result[1].shape) != [len(planned) + 1]:
            return f"shapes {[list(tensor.shape) for tensor in result]}"
        same = not planned or (result[0].tolist() == [list(part) for part in plan.parts] and result[1].tolist() == list(plan.num_splits))
        return "" if same else f"the plan is {result[0].tolist()} and {result[1].tolist()}, expected {plan}"

    return verify


_FORMATS = ("kv_format", "extra_kv_format")
_SPARSE = ("indices", "topk_length", "extra_indices_in_kvcache", "extra_topk_length")

DEVICE_SUBJECTS: dict[str, Subject] = {
    "dense_decode": Subject(
        cute_mla.flash_mla_with_kvcache,
        lambda case: {**case_arguments(case), "is_fp8_kvcache": case.seed % 2 == 1 and case.operands != "latent"},
        _decode_faults,
        _expect_decode,
        (*_FORMATS, *_SPARSE),
    ),
    "sparse_decode": Subject(
        cute_mla.flash_mla_with_kvcache,
        lambda case: {**case_arguments(case), "causal": False},
        _decode_faults,
        _expect_decode,
        (*_FORMATS, "block_table", "cache_seqlens"),
    ),
    "sparse_prefill": Subject(
        cute_mla.flash_mla_sparse_fwd,
        case_arguments,
        lambda arguments, setting: contract.sparse_prefill_faults(arguments),
        _expect_sparse_prefill,
    ),
    "sparse_prefill_backward": Subject(
        cute_mla.flash_mla_sparse_bwd,
        case_arguments,
        _sparse_backward_faults,
        _expect_sparse_backward,
    ),
    "dense_prefill": Subject(
        cute_mla.flash_attn_varlen_func,
        case_arguments,
        lambda arguments, setting: contract.dense_prefill_faults(arguments),
        _expect_dense_prefill,
    ),
    "dense_prefill_kvpacked": Subject(
        cute_mla.flash_attn_varlen_kvpacked_func,
        _kvpacked,
        lambda arguments, setting: contract.packed_faults("kv", 1)(arguments),
        lambda arguments, setting: _expect_dense_prefill(_unpacked(arguments), setting),
    ),
    "dense_prefill_qkvpacked": Subject(
        cute_mla.flash_attn_varlen_qkvpacked_func,
        _qkvpacked,
        lambda arguments, setting: contract.packed_faults("qkv", 2)(arguments),
        lambda arguments, setting: _expect_dense_prefill(_unpacked(arguments), setting),
    ),
    "dense_prefill_backward": Subject(
        cute_mla.flash_attn_varlen_backward,
        case_arguments,
        _backward_faults,
        _expect_backward,
    ),
    "merge_states": Subject(
        cute_mla.merge_states,
        case_arguments,
        lambda arguments, setting: contract.merge_faults(arguments),
        _expect_merge,
    ),
    "get_mla_metadata": Subject(
        cute_mla.get_mla_metadata,
        _plan_arguments,
        lambda arguments, setting: contract.plan_faults(arguments),
        _expect_plan,
        ("cu_seqlens_q", "total_q", "window", "window_sink", "is_fp8_q"),
    ),
}
