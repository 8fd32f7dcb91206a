"""Split plans: how the key tiles of a batch are divided among the SMs. A plan is made on the device, for calls of the same shapes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import torch

from ..runtime.current import device_for
from ..runtime.device import Device
from ..spec import dense_decode, sparse_decode
from ..spec.arch import Arch
from ..spec.dense_decode import FP8, LATENT, MAX_KEYS, MAX_WINDOW, rows_ahead, unit_tokens, whole_eighths
from ..spec.mla import D_V, DENSE_VALUE_COLUMNS, MAX_HEADS
from ..spec.split_plan import NO_LIMIT, NO_WINDOW, PLAN_COLUMNS, KeyWindow, RaggedQueries, SplitPlanArguments, SplitPlanConfig
from .arguments import check_columns, check_flag, check_integer, short_repr
from .indices import check_indices
from .launch_plan import LaunchPlan
from .limits import MAX_QUERY_TOKENS, heads_error
from .tensor_spec import TensorSpec, check_contiguous, check_counts, check_device, check_dtype, check_shape, operand_spec

# tile_scheduler_metadata, int32 [num_parts, 8], and num_splits, int32 [batch + 1]. With cu_seqlens_q, num_splits has an element a unit and
# one, and the rows of the table of units, if there is one, follow those of the parts.
SplitPlan: TypeAlias = tuple[torch.Tensor, torch.Tensor]


class KeyCounts(NamedTuple):
    """Keys of each request in its cache and in a second cache: int32 [batch], or None where every request has the limit.

    cu_seqlens_q: int32 [requests + 1] where requests have different numbers of query tokens.
    """

    lengths: torch.Tensor | None
    extra_lengths: torch.Tensor | None
    limit: int
    extra_limit: int
    cu_seqlens_q: torch.Tensor | None = None


class CallSpec(NamedTuple):
    """Everything that decides on a plan, but for the lengths of the requests.

    batch: requests, or the room for units. rows: query rows that share keys. columns: groups of such rows in a request. limit,
    extra_limit: as in KeyCounts. ragged: given where requests have different numbers of query tokens. window: the keys that count.
    operands, d_v: as in dense decode's num_parts. sparse: of sparse decode, whose rows are heads and whose columns are query tokens.
    """

    batch: int
    rows: int
    columns: int
    limit: int
    extra_limit: int
    ragged: RaggedQueries | None = None
    window: KeyWindow = NO_WINDOW
    operands: str = LATENT
    d_v: int = D_V
    sparse: bool = False

    def num_parts(self, arch: Arch, sm_count: int) -> int:
        """Return the number of parts on a device with sm_count SMs."""
        if self.sparse:
            return sparse_decode.num_parts(arch, self.rows, self.columns, sm_count)
        return dense_decode.num_parts(arch, self.rows, self.columns, sm_count, self.operands, self.d_v)


class Options(NamedTuple):
    """The arguments of get_mla_metadata that are not tensors."""

    num_q_tokens_per_head_k: int
    num_heads_k: int
    num_heads_q: int | None = None
    is_fp8_kvcache: bool = False
    topk: int | None = None
    total_q: int | None = None
    window: int | None = None
    window_sink: int = 0
    is_fp8_q: bool = False
    head_dim_v: int = D_V

    def key_window(self, s_q: int) -> KeyWindow:
        """Return the keys that any of s_q query tokens sees. ValueError unless the options are supported."""
        window, window_sink = check_window(self.window, self.window_sink)
        if window is not None and (self.num_heads_q is None or self.topk is not None):
            raise ValueError(
                f"window is {window} with num_heads_q {self.num_heads_q} and topk {self.topk}; supported: with num_heads_q, without topk"
            )
        return key_window(window, window_sink, s_q)

    def call(self, batch: int) -> CallSpec:
        """Return the CallSpec of so many requests. ValueError unless the options are supported."""
        is_fp8_q = check_flag("is_fp8_q", self.is_fp8_q)
        if is_fp8_q and self.topk is not None:
            raise ValueError(f"is_fp8_q is True with topk {self.topk}; supported: without topk, for dense decode")
        d_v = check_columns("head_dim_v", self.head_dim_v, *((D_V,) if self.topk is not None else DENSE_VALUE_COLUMNS))
        return self._call(batch)._replace(operands=FP8 if is_fp8_q else LATENT, d_v=d_v)

    def _call(self, batch: int) -> CallSpec:
        tokens, h_kv, h_q = _check_heads(self.num_q_tokens_per_head_k, self.num_heads_k, self.num_heads_q)
        heads, limit = (0, NO_LIMIT) if self.topk is None else _check_sparse(h_kv, h_q, self.topk)
        if self.total_q is None:
            window = self.key_window(tokens * h_kv // (h_q or h_kv))
            rows = (heads, tokens // heads) if heads else (tokens, h_kv)
            return CallSpec(batch, *rows, limit, 0, window=window, sparse=heads > 0)
        total_q = check_integer("total_q", self.total_q, 0, MAX_QUERY_TOKENS)
        if h_q is None:
            raise ValueError(f"num_heads_q is None with cu_seqlens_q; supported: 1 to {MAX_HEADS}")
        if heads:
            self.key_window(1)
            return ragged_call(RaggedQueries(batch, total_q, tokens // heads), heads, 1, limit, sparse=True)
        ragged = ragged_queries(batch, total_q, tokens * h_kv // h_q, h_q // h_kv)
        return ragged_call(ragged, h_q // h_kv, h_kv, limit)._replace(window=self.key_window(ragged.unit_tokens))


def run(
    cache_seqlens: torch.Tensor,
    num_q_tokens_per_head_k: int,
    num_heads_k: int,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    total_q: int | None = None,
    window: int | None = None,
    window_sink: int = 0,
    is_fp8_q: bool = False,
    head_dim_v: int = D_V,
) -> SplitPlan:
    """Plan a batch, with the arguments of api.flashmla.get_mla_metadata."""
    queries = (num_q_tokens_per_head_k, num_heads_k, num_heads_q)
    options = Options(*queries, is_fp8_kvcache, topk, total_q, window, window_sink, is_fp8_q, head_dim_v)
    call = check(cache_seqlens, options, cu_seqlens_q)
    device = device_for(cache_seqlens.device, "dense_decode" if topk is None else "sparse_decode")
    lengths = cache_seqlens if topk is None else None
    counts = KeyCounts(lengths, None, call.limit, call.extra_limit, cu_seqlens_q)
    return launch(device, plan(call, device.arch, device.sm_count), counts, cache_seqlens.device)


def run_sparse(
    indices: torch.Tensor,
    num_heads_q: int,
    topk_length: torch.Tensor | None = None,
    extra_indices: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
) -> SplitPlan:
    """Plan a batch of sparse decode by its indices and their lengths, as a schedule object does at its first use."""
    call = check_sparse(indices, num_heads_q, topk_length, extra_indices, extra_topk_length, cu_seqlens_q)
    device = device_for(indices.device, "sparse_decode")
    counts = KeyCounts(topk_length, extra_topk_length, call.limit, call.extra_limit, cu_seqlens_q)
    return launch(device, plan(call, device.arch, device.sm_count), counts, indices.device)


def check(cache_seqlens: Any, options: Options, cu_seqlens_q: Any = None) -> CallSpec:
    """Check the arguments of get_mla_metadata. ValueError unless they are supported."""
    check_flag("is_fp8_kvcache", options.is_fp8_kvcache)
    if (cu_seqlens_q is None) != (options.total_q is None):
        given, missing = ("total_q", "cu_seqlens_q") if cu_seqlens_q is None else ("cu_seqlens_q", "total_q")
        raise ValueError(f"{missing} is None beside {given}; supported: both, or neither")
    spec = operand_spec("cache_seqlens", cache_seqlens)
    check_shape("cache_seqlens", spec, ("batch",))
    check_dtype("cache_seqlens", spec, torch.int32)
    check_contiguous("cache_seqlens", spec)
    if cu_seqlens_q is not None:
        check_counts("cu_seqlens_q", operand_spec("cu_seqlens_q", cu_seqlens_q), (spec.shape[0] + 1,), spec.device, "cache_seqlens")
    return options.call(spec.shape[0])


def check_sparse(
    indices: Any,
    num_heads_q: int,
    topk_length: Any = None,
    extra_indices: Any = None,
    extra_topk_length: Any = None,
    cu_seqlens_q: Any = None,
) -> CallSpec:
    """Check the arguments of run_sparse. ValueError unless they are supported."""
    spec = operand_spec("indices", indices)
    check_indices("indices", spec, ("batch", "s_q", "topk") if cu_seqlens_q is None else ("total_q", "topk"), spec)
    *tokens, topk = spec.shape
    extra_topk = 0
    if extra_indices is not None:
        extra = operand_spec("extra_indices_in_kvcache", extra_indices)
        check_indices("extra_indices_in_kvcache", extra, (*tokens, "topk"), spec)
        extra_topk = extra.shape[-1]
    for name, lengths in (("topk_length", topk_length), ("extra_topk_length", extra_topk_length)):
        if lengths is not None:
            check_counts(name, operand_spec(name, lengths), (tokens[0],), spec.device)
    if cu_seqlens_q is None:
        return CallSpec(tokens[0], num_heads_q, max(tokens[1], 1), topk, extra_topk, sparse=True)
    requests = check_offsets(operand_spec("cu_seqlens_q", cu_seqlens_q), spec.device)
    return ragged_call(RaggedQueries(requests, tokens[0], max(tokens[0], 1)), num_heads_q, 1, topk, extra_topk, sparse=True)


def check_offsets(cu_seqlens_q: TensorSpec, device: torch.device) -> int:
    """Return the number of requests. ValueError unless cu_seqlens_q is contiguous int32 [batch + 1] on `device`."""
    check_counts("cu_seqlens_q", cu_seqlens_q, ("batch + 1",), device)
    if not cu_seqlens_q.shape[0]:
        raise ValueError(f"cu_seqlens_q has shape {list(cu_seqlens_q.shape)}; supported: [batch + 1]")
    return cu_seqlens_q.shape[0] - 1


def ragged_queries(requests: int, total_q: int, max_seqlen_q: int, heads_per_kv: int) -> RaggedQueries:
    """Return the query tokens of dense decode."""
    return RaggedQueries(requests, total_q, max_seqlen_q, unit_tokens(max_seqlen_q, heads_per_kv))


def ragged_call(ragged: RaggedQueries, heads_per_kv: int, h_kv: int, limit: int, extra_limit: int = 0, sparse: bool = False) -> CallSpec:
    """Return the CallSpec of requests with different numbers of query tokens."""
    return CallSpec(ragged.units, max(ragged.unit_tokens, 1) * heads_per_kv, h_kv, limit, extra_limit, ragged, sparse=sparse)


@lru_cache(maxsize=4096)
def plan(call: CallSpec, arch: Arch, sm_count: int) -> PlanLaunch:
    """Return the launch of split_plan on a device with sm_count SMs."""
    return launch_plan(call, call.num_parts(arch, sm_count), whole_eighths(arch, rows_ahead(arch, call.operands, call.rows)))


@dataclass(frozen=True)
class PlanLaunch(LaunchPlan):
    """The launch of split_plan. table_rows: of the table of units."""

    table_rows: int


def check_window(window: Any, window_sink: Any) -> tuple[int | None, int]:
    """Return the window and its sink. ValueError unless both are supported, and the sink is 0 without a window."""
    sink = check_integer("window_sink", window_sink, 0, MAX_WINDOW)
    if window is None and sink:
        raise ValueError(f"window_sink is {sink} without a window; supported: 0")
    return None if window is None else check_integer("window", window, 1, MAX_WINDOW), sink


def key_window(window: int | None, window_sink: int, s_q: int) -> KeyWindow:
    """Return the keys that any of s_q query tokens sees."""
    return NO_WINDOW if window is None else KeyWindow(window + s_q - 1, window_sink)


def window_scalars(window: KeyWindow) -> dict[str, int]:
    """Return the arguments of split_plan and combine that describe a window."""
    return {"reach": window.reach, "sink_tiles": window.sink_tiles}


def launch_plan(call: CallSpec, parts: int, eighths: int = 0) -> PlanLaunch:
    """Return the launch of split_plan for so many parts. eighths: its argument whole_eighths."""
    ragged = call.ragged or RaggedQueries(0, 0, 0)
    scalars = {
        "batch": call.batch,
        "num_parts": parts,
        "max_keys": call.limit,
        "extra_max_keys": call.extra_limit,
        "requests": ragged.requests,
        "total_q": ragged.total_q,
        "max_seqlen_q": ragged.max_seqlen_q,
        "unit_tokens": max(ragged.unit_tokens, 1),
        **window_scalars(call.window),
        "whole_eighths": eighths,
    }
    return PlanLaunch(SplitPlanConfig().name, (1, 1, 1), scalars, ragged.table_rows)


def launch(device: Device, launch_plan: PlanLaunch, counts: KeyCounts, where: torch.device) -> SplitPlan:
    """Allocate a plan's two tensors on the torch device `where`, and launch split_plan. An empty batch has a plan of zeros."""
    batch, parts, table_rows = launch_plan.scalars["batch"], launch_plan.scalars["num_parts"], launch_plan.table_rows
    allocate = torch.empty if batch else torch.zeros
    metadata = allocate((parts + table_rows, PLAN_COLUMNS), dtype=torch.int32, device=where)
    num_splits = allocate((batch + 1,), dtype=torch.int32, device=where)
    if batch:
        device.mark_uninitialized(metadata, num_splits)
        args = SplitPlanArguments(
            counts.lengths,
            counts.extra_lengths,
            metadata,
            num_splits,
            cu_seqlens_q=counts.cu_seqlens_q,
            units=metadata[parts:] if table_rows else None,
            **launch_plan.scalars,
        )
        device.launch(device.kernel("split_plan", launch_plan.kernel), launch_plan.grid, args)
    return metadata, num_splits


class ScheduleKey(NamedTuple):
    """The shapes and windows that a schedule object was planned for.

    s_q: max_seqlen_q with cu_seqlens_q. topk, extra_topk: None in dense decode. total_q: None without cu_seqlens_q.
    """

    batch: int
    s_q: int
    h_q: int
    h_kv: int
    page_size: int
    num_parts: int
    device: torch.device
    topk: int | None = None
    extra_topk: int | None = None
    total_q: int | None = None
    window: int | None = None
    window_sink: int = 0


class MlaSchedule:
    """The schedule object that get_mla_metadata() returns. The first flash_mla_with_kvcache that gets it makes its plan on the device.

    plan: tile_scheduler_metadata, int32 [num_sm_parts, 8], and num_splits, int32 [batch + 1]; None before the first use.
    key: the shapes that the plan was made for.
    """

    def __init__(self) -> None:
        self.plan: SplitPlan | None = None
        self.key: ScheduleKey | None = None

    def __repr__(self) -> str:
        if self.key is None:
            return f"{type(self).__name__}(not planned)"
        given = {name: value for name, value in self.key._asdict().items() if value is not None and (name != "window_sink" or value)}
        shapes = ", ".join(f"{name}={value}" for name, value in given.items())
        return f"{type(self).__name__}({shapes})"

    @property
    def tile_scheduler_metadata(self) -> torch.Tensor | None:
        """Return the first tensor of the plan, or None before the first use."""
        return None if self.plan is None else self.plan[0]

    @property
    def num_splits(self) -> torch.Tensor | None:
        """Return the second tensor of the plan, or None before the first use."""
        return None if self.plan is None else self.plan[1]

    def check(self, key: ScheduleKey) -> None:
        """Raise ValueError if the schedule was planned for other shapes."""
        if self.key is not None and self.key != key:
            changed = ", ".join(
                f"{name} {new} after {old}" for name, old, new in zip(key._fields, self.key, key, strict=True) if old != new
            )
            raise ValueError(
                f"tile_scheduler_metadata was planned for other shapes: {changed}; supported: one schedule per set of shapes, "
                "get another from get_mla_metadata()"
            )

    def prepare(self, device: Device, key: ScheduleKey, counts: KeyCounts, launch_plan: PlanLaunch) -> SplitPlan:
        """Make, store and return the plan for these shapes."""
        self.plan, self.key = launch(device, launch_plan, counts, key.device), key
        return self.plan


class PlanSpecs(NamedTuple):
    """Specs of a plan's two tensors."""

    metadata: TensorSpec
    num_splits: TensorSpec

    @property
    def rows(self) -> int:
        """Return the rows of the plan: parts, and units."""
        return self.metadata.shape[0] if self.metadata.shape else 0


def plan_specs(metadata: Any, num_splits: Any) -> PlanSpecs | None:
    """Return the specs of the caller's plan, or None for a schedule object. ValueError unless get_mla_metadata returns such a pair."""
    if isinstance(metadata, MlaSchedule):
        if num_splits is not None:
            raise ValueError("num_splits is given beside a schedule object; supported: None, as get_mla_metadata() returns")
        return None
    if not isinstance(metadata, torch.Tensor) or not isinstance(num_splits, torch.Tensor):
        raise ValueError(
            f"tile_scheduler_metadata is {type(metadata).__name__}, num_splits {type(num_splits).__name__}; "
            "supported: what get_mla_metadata returns, either a schedule object and None or two tensors"
        )
    return PlanSpecs(operand_spec("tile_scheduler_metadata", metadata), operand_spec("num_splits", num_splits))


def check_plan(specs: PlanSpecs, batch: int, rows: int, device: torch.device) -> None:
    """Raise ValueError unless the tensors have the shapes of a plan for this batch, and are on `device`. rows: of parts and of units."""
    check_shape("tile_scheduler_metadata", specs.metadata, ("num_sm_parts", PLAN_COLUMNS))
    if specs.metadata.shape[0] != rows:
        raise ValueError(
            f"tile_scheduler_metadata has {specs.metadata.shape[0]} rows; supported: {rows}, as get_mla_metadata returns for this call's "
            "s_q * h_q / h_kv, h_kv, device and, with cu_seqlens_q, batch and total_q"
        )
    check_shape("num_splits", specs.num_splits, (batch + 1,))
    for name, spec in (("tile_scheduler_metadata", specs.metadata), ("num_splits", specs.num_splits)):
        check_dtype(name, spec, torch.int32)
        check_device(name, spec, device)
        check_contiguous(name, spec)


def _check_heads(num_q_tokens_per_head_k: Any, num_heads_k: Any, num_heads_q: Any) -> tuple[int, int, int | None]:
    """Return the three as ints, num_heads_q None if it is not given. ValueError unless they fit together."""
    tokens = check_integer("num_q_tokens_per_head_k", num_q_tokens_per_head_k, 1)
    error = heads_error(num_heads_k if num_heads_q is None else num_heads_q, num_heads_k)
    if error is not None:
        raise ValueError(f"num_heads_k is {short_repr(num_heads_k)}, num_heads_q {short_repr(num_heads_q)}: {error}")
    if num_heads_q is not None and num_q_tokens_per_head_k % (num_heads_q // num_heads_k):
        raise ValueError(
            f"num_q_tokens_per_head_k is {num_q_tokens_per_head_k} with {num_heads_q} query heads and {num_heads_k} KV heads; "
            "supported: s_q * num_heads_q / num_heads_k"
        )
    heads_q = None if num_heads_q is None else check_integer("num_heads_q", num_heads_q, 1)
    return tokens, check_integer("num_heads_k", num_heads_k, 1), heads_q


def _check_sparse(num_heads_k: int, num_heads_q: int | None, topk: Any) -> tuple[int, int]:
    """Return the query heads of sparse decode and topk. ValueError unless sparse decode supports both."""
    if num_heads_q is None:
        raise ValueError(f"num_heads_q is None with topk {short_repr(topk)}; supported with topk: 1 to {MAX_HEADS}")
    error = heads_error(num_heads_q, num_heads_k, "sparse_decode")
    if error is not None:
        raise ValueError(f"num_heads_k is {num_heads_k}, num_heads_q {num_heads_q}: {error}")
    return num_heads_q, check_integer("topk", topk, 0, MAX_KEYS)
