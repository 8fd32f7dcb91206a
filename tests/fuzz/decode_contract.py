"""Arguments of flash_mla_with_kvcache that are at fault by its documentation, as in contract.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_mla.ops.split_plan import MlaSchedule
from cute_mla.spec.dense_decode import unit_tokens
from cute_mla.spec.split_plan import RaggedQueries
from tests.fuzz.contract import BYTES, E4M3, WIDE, Contract, arch_name, is_empty_lse, is_optional, row_bytes
from tests.fuzz.scalars import is_flag, is_integer, is_scale

MOST_TOKENS = 1 << 24
DECODE_COLUMNS = {576: 512, 512: 512, 320: 256, 1088: 1024}  # of q and of out, in dense decode


def _decode_options(c: Contract) -> None:
    c.numbers(
        head_dim_v=lambda value: is_integer(value) and value in DECODE_COLUMNS.values(),
        softmax_scale=is_optional(is_scale),
        empty_lse=is_empty_lse,
        causal=is_flag,
        is_fp8_kvcache=is_flag,
        batch_invariant=is_flag,
        few_heads=is_flag,
        max_seqlen_q=is_optional(lambda value: is_integer(value) and 1 <= value <= MOST_TOKENS),
    )
    c.require((c.get("cu_seqlens_q") is None) == (c.get("max_seqlen_q") is None), "cu_seqlens_q", "max_seqlen_q")


@dataclass(frozen=True)
class Tokens:
    """The query tokens of a call. leading: dimensions of q before the heads. most: of a request. ragged: given with cu_seqlens_q."""

    leading: tuple[int, ...]
    most: int
    ragged: RaggedQueries | None = None

    @property
    def requests(self) -> int:
        """Return the number of requests."""
        return self.leading[0] if self.ragged is None else self.ragged.requests

    @property
    def units(self) -> int:
        """Return how many a plan cuts: requests, or the room for work units."""
        return self.leading[0] if self.ragged is None else self.ragged.units

    @property
    def plan_tokens(self) -> int:
        """Return the query tokens whose rows share the keys of a unit."""
        return self.most if self.ragged is None else max(self.ragged.unit_tokens, 1)

    @property
    def table_rows(self) -> int:
        """Return the rows of a plan behind its parts."""
        return 0 if self.ragged is None else self.ragged.table_rows

    @property
    def shape(self) -> dict[str, int]:
        """Return the arguments of workspace_size."""
        return {"batch": self.requests, "s_q": self.most, **({} if self.ragged is None else {"total_q": self.ragged.total_q})}


def _decode_results(c: Contract, q: Tensor, tokens: Tokens, dtypes: Sequence[torch.dtype], workspace_bytes: int | None) -> None:
    h_q = q.shape[-2]
    c.output("out", (*tokens.leading, h_q, c.get("head_dim_v")), dtypes, last=True)
    c.output("lse", (tokens.leading[0], h_q, *tokens.leading[1:]), (torch.float32,))
    workspace = c.tensor("workspace", optional=True)
    if workspace is not None:
        c.require(workspace.is_contiguous() and (workspace_bytes is None or workspace.nbytes >= workspace_bytes), "workspace")
        c.require(workspace.device.type == "meta" or workspace.data_ptr() % 16 == 0, "workspace")
    c.same_device(q, "out", "lse", "workspace")
    c.apart(("out", "lse", "workspace"))


def _plan(c: Contract, q: Tensor, tokens: Tokens, parts: set[int]) -> None:
    """parts: of plans for these shapes, for few heads or not: calls take either."""
    metadata, num_splits = c.get("tile_scheduler_metadata"), c.get("num_splits")
    names = ("tile_scheduler_metadata", "num_splits")
    if isinstance(metadata, MlaSchedule):
        c.require(num_splits is None, *names)
        return
    table = c.tensor(names[0], torch.int32)
    if c.shaped(names[0], table, None, 8) and table is not None:
        c.require(len(table) - tokens.table_rows in parts, names[0], "q")
    splits = c.counts(names[1], (tokens.units + 1,))
    if table is not None:
        c.require(table.is_contiguous(), names[0])
    if splits is not None or table is not None:
        c.same_device(q, *names)


def decode_faults(arguments: Mapping[str, Any], parts: Callable[..., set[int]], workspace: Callable[..., int]) -> set[str]:
    """Return the faulty arguments of flash_mla_with_kvcache. parts(rows, h_kv): of plans. workspace(..): bytes, as workspace_size."""
    c = Contract(arguments)
    _decode_options(c)
    if c.faults:
        return c.faults
    sparse = c.get("indices") is not None
    absent = ("descale_q", "descale_k", "tree_mask", "window") if sparse else ("extra_k_cache", "extra_indices_in_kvcache")
    for name in (*absent, *(() if sparse else ("topk_length", "extra_topk_length"))):
        c.require(c.get(name) is None, name)
    q = c.tensor("q", *((torch.bfloat16,) if sparse else (*WIDE, E4M3)))
    columns = {d_qk: DECODE_COLUMNS[d_qk] for d_qk in ((576, 512) if sparse else DECODE_COLUMNS)}
    dims = 4 if c.get("cu_seqlens_q") is None else 3
    fits = q is not None and q.dim() == dims and q.shape[-1] in columns and 1 <= q.shape[-2] <= 128
    if q is None or not c.require(fits, "q", "indices", "cu_seqlens_q"):
        return c.faults
    c.require(c.get("head_dim_v") == columns[q.shape[-1]], "head_dim_v", "q")
    c.require(q.dtype != torch.float16 or q.shape[-1] == 576, "q")
    c.rows("q", "out", nbytes=row_bytes())
    c.last_contiguous("q", q)
    most = 65_535 if sparse and dims == 4 else MOST_TOKENS
    c.require(q.shape[dims - 3] <= most, "q")
    sizes = _sparse_cache(c, q) if sparse else _dense_cache(c, q)
    c.same_device(q, "k_cache", "block_table", "cache_seqlens", "descale_q", "descale_k", "tree_mask", "cu_seqlens_q", *_SPARSE_TENSORS)
    if sizes is None or c.faults:
        return c.faults
    tokens, h_kv, keys = sizes
    heads = {"h_q": q.shape[-2], **({} if sparse else {"h_kv": h_kv, "head_dim_v": c.get("head_dim_v")})}
    invariant = bool(c.get("batch_invariant"))
    bound = ({"topk": keys} if sparse else {"max_cache_seqlen": keys}) if invariant else {}
    op = "sparse_decode" if sparse else "dense_decode"
    needed = workspace(op, **tokens.shape, **heads, **bound, batch_invariant=invariant, device="cpu")
    rows = (q.shape[-2], tokens.plan_tokens) if sparse else (tokens.plan_tokens * (q.shape[-2] // h_kv), h_kv)
    _plan(c, q, tokens, parts(*rows) if tokens.plan_tokens else {1})
    _decode_results(c, q, tokens, (torch.bfloat16 if q.dtype == E4M3 else q.dtype,), needed)
    return c.faults


_SPARSE_TENSORS = ("indices", "attn_sink", "topk_length", "extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length")


def _dense_cache(c: Contract, q: Tensor) -> tuple[Tokens, int, int] | None:
    """Return query tokens, KV heads, and the most keys of a request."""
    cache = c.tensor("k_cache", *dict.fromkeys((q.dtype, E4M3)))
    if cache is None:
        c.faults.add("q")
        return None
    c.require(cache.dtype != E4M3 or q.dtype != torch.float16, "q", "k_cache")
    fits = cache.dim() == 4 and cache.shape[3] == q.shape[-1] and (cache.dtype != E4M3 or q.shape[-1] == 576)
    if not c.require(fits, "k_cache", "q"):
        return None
    if arch_name() == "sm120":  # which has kernels of 576 columns and one KV head
        c.require(q.shape[-1] == 576, "q")
        c.require(cache.shape[2] == 1, "k_cache")
    page, h_kv = cache.shape[1:3]
    c.require(page in (16, 32) or (page > 0 and page % 64 == 0), "k_cache")
    c.require(h_kv >= 1 and q.shape[-2] % max(h_kv, 1) == 0 and (h_kv == 1 or cache.dtype != E4M3), "k_cache", "q")
    c.last_contiguous("k_cache", cache)
    c.aligned("k_cache", cache, 0, 1, 2)
    c.require(not c.get("is_fp8_kvcache") or cache.dtype == E4M3, "is_fp8_kvcache", "k_cache")
    for name, scaled in (("descale_q", q), ("descale_k", cache)):
        scale = c.tensor(name, torch.float32, optional=True)
        if scale is not None:
            c.require(scale.numel() == 1, name)
        c.require(c.get(name) is None or scaled.dtype == E4M3, name)
    _sink(c, q)
    table = c.tensor("block_table", torch.int32)
    requests = q.shape[0] if c.get("cu_seqlens_q") is None else None
    if not c.shaped("block_table", table, requests, None) or table is None or h_kv < 1:
        return None
    c.counts("cache_seqlens", (len(table),))
    if "cache_seqlens" in c.faults:
        c.faults.add("block_table")
    c.last_contiguous("block_table", table)
    tokens = Tokens(tuple(q.shape[:2]), q.shape[1])
    if requests is None:
        c.counts("cu_seqlens_q", (len(table) + 1,))
        most = int(c.get("max_seqlen_q"))
        tokens = Tokens(tuple(q.shape[:1]), most, RaggedQueries(len(table), len(q), most, unit_tokens(most, q.shape[-2] // h_kv)))
        if "cu_seqlens_q" in c.faults:
            c.faults.update(("block_table", "cache_seqlens"))
    _seen(c, tokens, cache)
    return tokens, h_kv, table.shape[1] * page


def _sink(c: Contract, q: Tensor) -> None:
    sink = c.tensor("attn_sink", torch.float32, optional=True)
    if sink is not None and c.shaped("attn_sink", sink, q.shape[-2]):
        c.require(sink.is_contiguous(), "attn_sink")


def _seen(c: Contract, tokens: Tokens, cache: Tensor) -> None:
    """Check the tree mask and the window of a dense call."""
    tree = c.tensor("tree_mask", torch.int32, optional=True)
    if tree is not None:
        if not c.shaped("tree_mask", tree, *tokens.leading, -(-tokens.most // 32)) and tokens.ragged is not None:
            c.faults.add("max_seqlen_q")
        c.last_contiguous("tree_mask", tree)
        c.require(cache.dtype != E4M3, "tree_mask", "k_cache")
    window, first = c.get("window"), c.arguments.get("window_sink", 0)
    c.require(window is None or (is_integer(window) and 1 <= window <= 1 << 30), "window")
    c.require(window is None or c.get("tree_mask") is None, "window", "tree_mask")
    c.require(window is None or tokens.ragged is None or bool(c.arguments["causal"]), "window", "cu_seqlens_q")
    c.require(window is None or cache.dtype != E4M3, "window", "k_cache")
    c.require(is_integer(first) and 0 <= first <= (0 if window is None else 1 << 30), "window_sink")


def _sparse_cache(c: Contract, q: Tensor) -> tuple[Tokens, int, int] | None:
    """Return query tokens, KV heads, and the indices of a token."""
    c.require(not c.get("causal"), "causal")
    first = c.arguments.get("window_sink", 0)
    c.require(is_integer(first) and first == 0, "window_sink")
    indices = [c.tensor("indices", torch.int32)]
    fp8 = c.get("is_fp8_kvcache")
    kind = _gathered(c, "k_cache", "kv_format", q, bool(fp8))
    second_names = ("extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length", "extra_kv_format")
    extra = [name for name in second_names if c.get(name) is not None]
    if extra:
        c.require(c.get("extra_k_cache") is not None, "extra_k_cache")
        c.require(c.get("extra_indices_in_kvcache") is not None, "extra_indices_in_kvcache")
        indices.append(c.tensor("extra_indices_in_kvcache", torch.int32))
        second = _gathered(c, "extra_k_cache", "extra_kv_format", q, bool(fp8))
        together = kind == second or None in (kind, second) or (kind in V41_ORDERS and second in (*V41_ORDERS, "v41_fp4"))
        c.require(together, "k_cache", "extra_k_cache", "kv_format", "extra_kv_format")
    for name, tensor in zip(("indices", "extra_indices_in_kvcache"), indices, strict=False):
        c.shaped(name, tensor, *q.shape[:-2], None)
        c.last_contiguous(name, tensor)
    for name in ("topk_length", "extra_topk_length"):
        c.counts(name, (len(q),), optional=True)
    _sink(c, q)
    dims = q.dim() - 1
    found = [tensor for tensor in indices if tensor is not None and tensor.dim() == dims]
    topk = sum(tensor.shape[-1] for tensor in found)
    c.require(topk <= (1 << 31) - 64, "indices", "extra_indices_in_kvcache")
    tokens = Tokens(tuple(q.shape[:-2]), q.shape[1])
    if c.get("cu_seqlens_q") is not None:
        offsets = c.counts("cu_seqlens_q", (None,))
        if offsets is None or not c.require(len(offsets) >= 1, "cu_seqlens_q"):
            return None
        most = int(c.get("max_seqlen_q"))
        tokens = Tokens(tuple(q.shape[:1]), most, RaggedQueries(len(offsets) - 1, len(q), most))
    return (tokens, 1, topk) if len(found) == len(indices) else None


V41_ORDERS = ("v41", "v41_paged")
_FORMATS_OF_BYTES = {656: ("fp8_656",), 584: ("fp8_584",), 528: (*V41_ORDERS, "nope_528"), 288: ("v41_fp4",)}
_PAGED = {"fp8_584": 584, "v41_paged": 528}  # formats whose scales lie behind all rows of a page: bytes of a token


def _gathered(c: Contract, name: str, format_name: str, q: Tensor, fp8: bool) -> str | None:
    """Return the format of a cache; None if it is of no format."""
    cache = c.tensor(name)
    if cache is None:
        return None
    known = cache.dim() == 4 and cache.shape[2] == 1
    quantised = known and cache.shape[3] in _FORMATS_OF_BYTES and cache.dtype in BYTES
    latent = known and cache.shape[3] == 576 and cache.dtype in WIDE
    if not c.require(quantised or latent, name, "k_cache"):
        return None
    fitting = _FORMATS_OF_BYTES[cache.shape[3]] if quantised else ("latent",)
    named = c.get(format_name)
    kind = fitting[0] if named is None and len(fitting) == 1 else named
    if not c.require(kind in fitting and (kind != "v41_fp4" or name != "k_cache"), format_name, name):
        return None
    c.require(quantised == fp8, "is_fp8_kvcache", name)
    c.require(q.shape[-1] == (576 if kind in ("fp8_656", "latent") else 512), "q", name)
    c.require(quantised or cache.dtype == torch.bfloat16, "q", name)
    c.require(cache.shape[1] > 0, name)
    c.last_contiguous(name, cache)
    c.aligned(name, cache, 0, *(() if kind in _PAGED else (1,)))
    if kind in _PAGED:
        c.require(cache.shape[1] <= 1 or cache.stride(1) == _PAGED[kind], name)
    if kind == "v41":
        c.require(cache.shape[1] <= 1 or cache.stride(1) >= 528, name)
    return str(kind)
