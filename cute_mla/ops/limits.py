"""Limits of the ops: heads, query tokens and page sizes, and predicates that say why a value is not supported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from ..spec import dense_prefill
from ..spec.dense_decode import MAX_KEYS, SMALL_PAGES
from ..spec.mla import D_V, DENSE_DIMS, MAX_HEADS
from ..spec.split_plan import TILE_KEYS
from .arguments import is_flag, is_integer, short_repr

OPS = ("dense_decode", "sparse_decode", "dense_prefill", "sparse_prefill")
CACHE_OPS = ("cache_write", "cache_gather", "cache_insert")
INDEXER_OPS = ("mqa_logits", "topk_indices", "indexer_topk", "index_write", "head_sums", "indexer_backward")
BACKWARD_OPS = ("dense_prefill_backward",)
SPARSE_BACKWARD = "sparse_prefill_backward"

MAX_QUERY_TOKENS = 1 << 24  # per request; query rows are numbered in 32 bits
MAX_GRID_TOKENS = 65_535  # query tokens of sparse decode, which are the second dimension of its grid
_MAX_HEADS = dict.fromkeys(
    ("dense_prefill", *BACKWARD_OPS), dense_prefill.MAX_ITEMS
)  # by op, where MAX_HEADS does not hold: there a head is a work item

# Why a value is not supported, or None if it is.
Limit: TypeAlias = Callable[[Any], str | None]


def heads_error(h_q: int, h_kv: int, op: str = "dense_decode") -> str | None:
    """Return why these numbers of query and KV heads are not supported, or None if they are."""
    error = between("h_q", 1, _MAX_HEADS.get(op, MAX_HEADS))(h_q)
    if error is not None:
        return error
    if op in ("sparse_decode", "sparse_prefill") and not (is_integer(h_kv) and h_kv == 1):
        return f"h_kv is {short_repr(h_kv)}; supported with indices: 1"
    if not is_integer(h_kv) or h_kv < 1 or h_q % h_kv:
        return f"h_kv is {short_repr(h_kv)} with h_q {h_q}; supported: divisors of h_q"
    return None


def page_size_error(page_size: Any) -> str | None:
    """Return why dense decode does not support a page size, or None if it does."""
    if is_integer(page_size) and (page_size in SMALL_PAGES or (0 < page_size <= MAX_KEYS and page_size % TILE_KEYS == 0)):
        return None
    return f"page size is {short_repr(page_size)}; supported: {', '.join(map(str, SMALL_PAGES))} and multiples of {TILE_KEYS}"


def check_op(op: Any, ops: tuple[str, ...] = OPS) -> None:
    """Raise ValueError unless `op` is the name of one of these ops."""
    if not isinstance(op, str) or op not in ops:
        raise ValueError(f"op is {short_repr(op)}; supported: {', '.join(ops)}")


def value_columns(d_qk: int) -> int:
    """Return the columns of a value of dense decode, and of out, by those of a key; 512 for keys that are not supported."""
    # no look-up in a dict: a symbol of torch has no hash
    return next((dims.latent for dims in DENSE_DIMS.values() if dims.d_qk == d_qk), D_V)


def one_of(name: str, *supported: Any) -> Limit:
    """Return a limit to a few values of the argument `name`."""

    def error(value: Any) -> str | None:
        if any(_is_same(value, known) for known in supported):
            return None
        return f"{name} is {short_repr(value)}; supported: {', '.join(map(repr, supported))}"

    return error


def between(name: str, least: int, most: int) -> Limit:
    """Return a limit to the integers from least to most of the argument `name`."""

    def error(value: Any) -> str | None:
        return None if is_integer(value) and least <= value <= most else f"{name} is {short_repr(value)}; supported: {least} to {most}"

    return error


def _is_same(value: Any, known: bool | int | str | None) -> bool:
    """Return whether an argument equals a supported value in type and value, so that 0 is not False."""
    if isinstance(known, bool):
        return is_flag(value) and bool(value) == known
    if isinstance(known, int):
        return is_integer(value) and bool(value == known)
    return value is None if known is None else isinstance(value, str) and value == known
