"""mqa_logits: the indexer's logits, of keys in a row or in the pages of an index cache, in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..runtime.arguments import Span
from ..runtime.current import device_for
from ..runtime.tensor_memory import span_bytes
from ..spec.mla import ceil_div
from ..spec.mqa_logits import (
    BLOCK_COLUMNS,
    COLUMNS,
    MAX_HEADS,
    MAX_KEYS,
    PAGE_SIZES,
    ROW_BYTES,
    TILE_KEYS,
    MqaLogitsArguments,
    MqaLogitsProblem,
)
from ..spec.tensor_map import Swizzle, TensorMap
from .arguments import check_flag, check_integer, check_no_grad, short_repr
from .launch_plan import LaunchPlan
from .limits import MAX_QUERY_TOKENS, between, one_of
from .overlap import check_no_overlap
from .strides import TMA_ALIGNMENT, is_map_stride, map_strides, output_strides
from .tensor_spec import (
    TensorSpec,
    check_address,
    check_contiguous,
    check_counts,
    check_device,
    check_dtype,
    check_last_contiguous,
    check_shape,
    operand_spec,
    optional_spec,
    spec_of,
)

ROW_ALIGNMENT = 256  # elements: rows of new logits begin at multiples of 1,024 bytes, as DeepGEMM's do
_BLOCKS = MAX_KEYS  # most blocks of rows and chunks, which are numbered in 32 bits

heads_error = between("heads", 1, MAX_HEADS)
page_size_error = one_of("page size", *PAGE_SIZES)


class Rows(NamedTuple):
    """The tensors that a call over keys in a row reads."""

    q: torch.Tensor
    kv: torch.Tensor
    kv_scale: torch.Tensor
    weights: torch.Tensor
    ks: torch.Tensor
    ke: torch.Tensor


class Pages(NamedTuple):
    """The tensors that a call over an index cache reads."""

    q: torch.Tensor
    cache: torch.Tensor
    weights: torch.Tensor
    context_lens: torch.Tensor
    block_table: torch.Tensor


class CallSpec(NamedTuple):
    """Everything that decides on a launch, but for values and addresses.

    operands: the specs of Rows or Pages, in their order. columns: max_seqlen_k of Rows, max_context_len of Pages. clean: clean_logits.
    cache_name: the argument that is the cache, for messages.
    """

    paged: bool
    operands: tuple[TensorSpec, ...]
    columns: int
    clean: bool
    out: TensorSpec | None
    cache_name: str = "cache"


class MapLayout(NamedTuple):
    """A tensor map of e4m3 rows but for its address: extents, bytes between neighbours along all but the first dimension, and the box."""

    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


@dataclass(frozen=True)
class LogitsPlan(LaunchPlan):
    """The launch of a call. shape: of the logits. keys_layout: None without keys, where no logit is written."""

    shape: tuple[int, int]
    q_layout: MapLayout
    keys_layout: MapLayout | None

    @property
    def is_empty(self) -> bool:
        """Return whether no logit is to be written."""
        return 0 in self.shape or self.keys_layout is None


def run_rows(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    ks: torch.Tensor,
    ke: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute logits of keys in a row, with the arguments of api.mqa_logits.fp8_mqa_logits."""
    operands = rows_of(q, kv, weights, ks, ke)
    call = check(operands, check_integer("max_seqlen_k", max_seqlen_k, 0, MAX_KEYS), clean_logits, out)
    return launch(call, operands, out)


def rows_of(q: Any, kv: Any, weights: Any, ks: Any, ke: Any) -> Rows:
    """Return the operands of a call over keys in a row. ValueError unless kv has two parts."""
    if not isinstance(kv, tuple | list) or len(kv) != 2:
        raise ValueError(f"kv is {short_repr(kv)}; supported: two tensors, keys and their scales")
    keys, scales = kv
    return Rows(q, keys, scales, weights, ks, ke)


def run_pages(
    q: torch.Tensor,
    cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    metadata: torch.Tensor | None,
    max_context_len: int,
    clean_logits: bool = True,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute logits of the keys of an index cache, with the arguments of api.mqa_logits.fp8_paged_mqa_logits."""
    if metadata is not None:
        operand_spec("metadata", metadata)
    operands = Pages(q, cache, weights, context_lens, block_table)
    call = check(operands, check_integer("max_context_len", max_context_len, 0, MAX_KEYS), clean_logits, out)
    return launch(call, operands, out)


def metadata(context_lens: torch.Tensor, block_kv: int, num_sms: int) -> torch.Tensor:
    """Return zeros in the shape of DeepGEMM's metadata, with the arguments of api.mqa_logits.get_paged_mqa_logits_metadata."""
    spec = spec_of("context_lens", context_lens)
    if len(spec.shape) not in (1, 2):
        raise ValueError(f"context_lens has shape {list(spec.shape)}; supported: [batch] and [batch, tokens]")
    check_contiguous("context_lens", spec)
    check_dtype("context_lens", spec, torch.int32)
    _check_limit(page_size_error(block_kv), "block_kv")
    slots = check_integer("num_sms", num_sms, 1, MAX_KEYS) + 1
    return context_lens.new_zeros((slots, 2))


def check(operands: Rows | Pages, columns: int, clean_logits: Any, out: Any, cache_name: str = "cache") -> CallSpec:
    """Check each argument by itself. ValueError unless they are supported. cache_name: as in CallSpec."""
    clean = check_flag("clean_logits", clean_logits)
    named = {cache_name if name == "cache" else name: tensor for name, tensor in operands._asdict().items()}
    check_no_grad(**named, out=out)
    specs = tuple(operand_spec(name, tensor) for name, tensor in named.items())
    paged = isinstance(operands, Pages)
    if not paged and columns and clean:
        raise ValueError(f"clean_logits is True with max_seqlen_k {columns}; supported: False, or max_seqlen_k 0")
    return CallSpec(paged, specs, columns, clean, optional_spec("out", out), cache_name)


def launch(call: CallSpec, operands: Rows | Pages, out: torch.Tensor | None) -> torch.Tensor:
    """Launch the kernel, unless there is nothing to write; return out, or new logits."""
    device = device_for(operands.q.device, "mqa_logits")
    planned = plan(call, device.sm_count)
    check_addresses(call, operands)
    keys = operands[1]
    check_no_overlap({"out": out}, operands._asdict())
    if out is None:
        tokens, columns = planned.shape
        storage = operands.weights.new_empty((tokens, ceil_div(columns, ROW_ALIGNMENT) * ROW_ALIGNMENT))
        device.mark_uninitialized(storage)
        out = storage[:, :columns]
    if not planned.is_empty:
        args = MqaLogitsArguments(
            q_map=tensor_map(planned.q_layout, operands.q.data_ptr()),
            k_map=tensor_map(planned.keys_layout, keys.data_ptr()),
            weights=operands.weights,
            **_pointers(operands),
            logits=out,
            **planned.scalars,
            logits_stride_token=out.stride(0),
        )
        device.launch(device.kernel("mqa_logits", planned.kernel), planned.grid, args, pdl=True)
    return out


def check_addresses(call: CallSpec, operands: Rows | Pages) -> None:
    """Raise ValueError unless tensor maps can begin where q and the keys do."""
    check_address("q", operands.q.data_ptr(), TMA_ALIGNMENT)
    check_address(call.cache_name if call.paged else "kv", operands[1].data_ptr(), TMA_ALIGNMENT)


def _pointers(operands: Rows | Pages) -> dict[str, Any]:
    """Return the pointers that depend on where the keys lie."""
    if isinstance(operands, Rows):
        return {"scales": operands.kv_scale, "first_keys": operands.ks, "end_keys": operands.ke, "block_table": None}
    cache, first = operands.cache, operands.cache.shape[1] * COLUMNS
    scales = Span(cache, first, span_bytes(cache) - first)
    return {"scales": scales, "first_keys": None, "end_keys": operands.context_lens, "block_table": operands.block_table}


@lru_cache(maxsize=4096)
def plan(call: CallSpec, sm_count: int) -> LogitsPlan:
    """Return the launch of a call on a device with sm_count SMs. ValueError unless its tensors fit together."""
    return _plan_pages(call, sm_count) if call.paged else _plan_rows(call, sm_count)


def _check_queries(q: TensorSpec, *tokens: str) -> None:
    """Check q by itself, before other arguments are blamed for not fitting it. ValueError unless it is supported."""
    check_shape("q", q, (*tokens, "heads", COLUMNS))
    _check_limit(heads_error(q.shape[-2]), f"q has shape {list(q.shape)}")
    check_dtype("q", q, torch.float8_e4m3fn)
    check_last_contiguous("q", q)


def _plan_rows(call: CallSpec, sm_count: int) -> LogitsPlan:
    """Return the launch of a call over keys in a row."""
    q, kv, scale, _, ks, ke = call.operands
    _check_queries(q, "tokens")
    tokens = q.shape[0]
    check_shape("kv", kv, ("keys", COLUMNS))
    check_dtype("kv", kv, torch.float8_e4m3fn)
    check_last_contiguous("kv", kv)
    check_device("kv", kv, q.device)
    keys = kv.shape[0]
    if keys > MAX_KEYS:
        raise ValueError(f"kv has shape {list(kv.shape)}; supported: to {MAX_KEYS} keys")
    check_shape("the scale of kv", scale, (keys,))
    check_contiguous("the scale of kv", scale)
    check_dtype("the scale of kv", scale, torch.float32)
    check_device("the scale of kv", scale, q.device)
    for name, bound in (("ks", ks), ("ke", ke)):
        check_counts(name, bound, (tokens,), q.device)
    scalars = {
        "scales_stride_page": 0,
        "table_stride": 0,
        "tokens_per_request": 1,
        "keys": keys,
        "columns": call.columns or keys,
        "page_size": 0,
        "pages": 0,
        "length_per_token": 0,
        "relative": int(call.columns > 0),
    }
    layout = MapLayout((COLUMNS, keys), map_strides("kv", kv, 0), (COLUMNS, TILE_KEYS)) if keys else None
    return _plan(call, MqaLogitsProblem(False, q.shape[1], 1, tokens, keys), (1, 0), layout, scalars, sm_count)


def _plan_pages(call: CallSpec, sm_count: int) -> LogitsPlan:
    """Return the launch of a call over an index cache."""
    q, cache, _, lengths, table = call.operands
    _check_queries(q, "batch", "tokens")
    batch, tokens, heads, _ = q.shape
    if batch > 1 and tokens > 1 and q.stride[0] != tokens * q.stride[1]:
        raise ValueError(
            f"q has shape {list(q.shape)} and strides {list(q.stride)}; supported: requests {tokens} tokens apart, as in [batch * tokens]"
        )
    page_size, page_stride = check_cache(call.cache_name, cache, q.device)
    check_shape("block_table", table, (batch, "pages per request"))
    check_last_contiguous("block_table", table)
    check_dtype("block_table", table, torch.int32)
    check_device("block_table", table, q.device)
    check_counts("context_lens", lengths, (batch, tokens) if len(lengths.shape) == 2 else (batch,), q.device)
    keys = min(call.columns, table.shape[1] * page_size)
    pages = cache.shape[0]
    scalars = {
        "scales_stride_page": page_stride,
        "table_stride": table.stride[0],
        "tokens_per_request": tokens,
        "keys": keys,
        "columns": call.columns,
        "page_size": page_size,
        "pages": pages,
        "length_per_token": int(len(lengths.shape) == 2),
        "relative": 0,
    }
    layout = MapLayout((COLUMNS, page_size, pages), (COLUMNS, page_stride), (COLUMNS, page_size, 1))
    # Of one token a request, or of one request, the other dimension may have any stride.
    token_dim = 0 if tokens == 1 else 1
    return _plan(call, MqaLogitsProblem(True, heads, batch, tokens, keys), (2, token_dim), layout, scalars, sm_count)


def _plan(
    call: CallSpec,
    problem: MqaLogitsProblem,
    q_dims: tuple[int, int],
    keys_layout: MapLayout | None,
    scalars: dict[str, int],
    sm_count: int,
) -> LogitsPlan:
    """Return the launch of a problem, with what both kinds of calls have. q_dims: the dimensions of q that count heads and tokens."""
    q, weights = call.operands[0], call.operands[-3]
    tokens = problem.requests * problem.tokens
    if tokens > MAX_QUERY_TOKENS or problem.items(sm_count) > _BLOCKS:
        raise ValueError(f"q has shape {list(q.shape)} with {problem.keys} keys; supported: to {MAX_QUERY_TOKENS} tokens, {_BLOCKS} blocks")
    check_shape("weights", weights, (tokens, problem.heads))
    check_dtype("weights", weights, torch.float32)
    check_last_contiguous("weights", weights)
    check_device("weights", weights, q.device)
    shape = (tokens, scalars["columns"])
    if call.out is not None:
        output_strides("out", call.out, shape, torch.float32, q)
        check_last_contiguous("out", call.out)
    config = problem.config
    q_box = (COLUMNS, config.head_tile, BLOCK_COLUMNS // config.head_tile)
    return LogitsPlan(
        kernel=config.name,
        grid=problem.grid(sm_count),
        scalars={
            "weights_stride_token": weights.stride[0],
            **scalars,
            "tokens": tokens,
            "heads": problem.heads,
            "chunk": problem.chunk(sm_count),
            "clean": int(call.clean),
        },
        shape=shape,
        q_layout=MapLayout((COLUMNS, problem.heads, tokens), map_strides("q", q, *q_dims) if tokens else (), q_box),
        keys_layout=keys_layout,
    )


def check_cache(name: str, cache: TensorSpec, device: torch.device, beside: str = "q") -> tuple[int, int]:
    """Return the page size and the bytes between pages of an index cache. ValueError if kernels cannot read it.

    beside: the argument whose device `device` is.
    """
    check_shape(name, cache, ("pages", "page size", 1, ROW_BYTES))
    check_dtype(name, cache, torch.uint8)
    check_device(name, cache, device, beside)
    pages, page_size = cache.shape[:2]
    _check_limit(page_size_error(page_size), f"{name} has shape {list(cache.shape)}")
    if not 0 < pages < MAX_KEYS:
        raise ValueError(f"{name} has shape {list(cache.shape)}; supported: 1 to {MAX_KEYS - 1} pages")
    if cache.stride[1] != ROW_BYTES or cache.stride[3] != 1:
        raise ValueError(
            f"{name} has shape {list(cache.shape)} and strides {list(cache.stride)}; supported: contiguous pages, the values of all keys "
            f"of a page and then their scales"
        )
    page_stride = cache.stride[0] if pages > 1 else page_size * ROW_BYTES
    if page_stride < page_size * ROW_BYTES or not is_map_stride(page_stride):
        raise ValueError(
            f"{name} has shape {list(cache.shape)} and strides {list(cache.stride)}; supported: pages a multiple of {TMA_ALIGNMENT} bytes "
            f"apart, at least {page_size * ROW_BYTES}"
        )
    return page_size, page_stride


def _check_limit(error: str | None, where: str) -> None:
    """Raise ValueError if there is an error."""
    if error is not None:
        raise ValueError(f"{where}: {error}")


@lru_cache(maxsize=4096)
def tensor_map(layout: MapLayout, address: int) -> TensorMap:
    """Return the tensor map of a layout at an address. Cached, because allocators give addresses again."""
    return TensorMap("u8", address, layout.dims, layout.strides, layout.box, Swizzle.B128)
