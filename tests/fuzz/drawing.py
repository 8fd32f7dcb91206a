"""Strategies of calls: right ones of every subject, small enough for the simulated device, and what breaks them.

A right call of an op is drawn from a variant of its record: a value of each factor, except those that lie far in memory. What this file
adds for an op are sizes, and values that its suites have no factor for.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, get_args, get_type_hints

import hypothesis
from hypothesis import strategies as st

from cute_mla.spec.arch import ARCHS, Arch
from cute_mla.spec.cache_insert import rotates
from cute_mla.spec.cache_rows import CACHED
from cute_mla.spec.dense_decode import LATENT, UNIT_ROWS, key_columns, reads_by_address, takes_key_masks
from cute_mla.spec.head_sums import INDEX_COLUMNS, INDEX_HEADS
from cute_mla.spec.mla import D_QK, MAX_HEADS, ceil_div
from cute_mla.testing.cases.sparse_indices import Lengths
from cute_mla.testing.operations import OPERATIONS
from cute_mla.testing.operations.sparse_decode.case import Pool
from cute_mla.testing.runner import SCHEDULES
from cute_mla.testing.suites.cover import Variant
from tests.fuzz.breaking import BREAKS
from tests.fuzz.calls import Break, FuzzCall, Setting
from tests.fuzz.host_drawing import HEADS, SEEDS, SIZES, cache_cases, plan_cases, rows_cases
from tests.fuzz.judging import SUBJECTS

TILES = 4  # of 64 rows x 64 keys, most of a call: about a second on the simulated device
ROW_TILES = 2

Fields = dict[str, Any]


def calls(subject: str, arch: str, broken: bool) -> st.SearchStrategy[FuzzCall]:
    """Draw calls of a subject on an architecture."""
    breaks = _breaks(subject) if broken else st.just(())
    return st.builds(FuzzCall, st.just(subject), _cases(subject, arch), settings_of(arch), breaks, st.booleans())


def settings_of(arch: str) -> st.SearchStrategy[Setting]:
    """Draw simulated devices of an architecture."""
    counts = st.sampled_from((1, 2, 3, 16, ARCHS[arch].sm_count)) | st.integers(1, ARCHS[arch].sm_count)
    return st.builds(Setting, st.just(arch), counts, st.sampled_from(SCHEDULES), SEEDS)


def _breaks(subject: str) -> st.SearchStrategy[tuple[Break, ...]]:
    names = st.sampled_from(SUBJECTS[subject].breakable)
    one = st.builds(Break, names, st.sampled_from(tuple(BREAKS)), st.integers(0, 7))
    return st.lists(one, min_size=1, max_size=2).map(tuple)


def _cases(subject: str, arch: str) -> st.SearchStrategy[Any]:
    if subject in _DRAWN:
        return op_cases(_DRAWN[subject], ARCHS[arch])
    own: dict[str, Callable[[], st.SearchStrategy[Any]]] = {
        **dict.fromkeys(("quantise_cache", "dequantise_cache"), cache_cases),
        "get_mla_metadata": plan_cases,
        **dict.fromkeys(("indexer_loss", "indexer_targets"), rows_cases),
    }
    return own[subject]()


class Drawn(NamedTuple):
    """Description of how calls of an op are drawn: `more` and then own(draw, values drawn so far) replace values of factors.

    wide: fields that have every value of their type. having, lacking: names of factors that variants have, and do not have.
    """

    op: str
    own: Callable[[st.DrawFn, Fields], Fields] = lambda draw, given: {}
    more: Mapping[str, st.SearchStrategy[Any]] = {}
    wide: tuple[str, ...] = ()
    having: str = ""
    lacking: str = ""

    @property
    def variants(self) -> list[Variant]:
        """Return the variants that are drawn.

        Not those with few layouts, of heads in two CTAs, since heads are drawn here. Nor caches that only kv_format tells apart, of which
        the contracts say nothing.
        """
        return [
            variant
            for variant in OPERATIONS[self.op].suites.variants
            if self.having in ("", *variant.factors) and self.lacking not in variant.factors
            if "allocated" in variant.factors.get("outputs", ("allocated",)) and variant.fields.get("cache") not in _NAMED_FORMATS
        ]


@st.composite
def op_cases(draw: st.DrawFn, drawn: Drawn, arch: Arch) -> Any:
    """Draw cases of an op, and reject those that are impossible. arch: decides what is drawn rarely, since it is refused there."""
    kind, variant = OPERATIONS[drawn.op].case, draw(st.sampled_from(drawn.variants))
    factors = {**variant.factors, **{name: get_args(get_type_hints(kind)[name]) for name in drawn.wide}}
    near = {name: [value for value in values if not _is_far(value)] for name, values in factors.items() if not _is_far(name)}
    strategies = {**{name: st.sampled_from(values) for name, values in near.items()}, **drawn.more, "seed": SEEDS}
    if "empty_lse" in near:
        strategies["empty_lse"] = st.sampled_from((None, float("inf"), float("-inf")))
    given = {**variant.fields, **{name: draw(strategy) for name, strategy in strategies.items()}, "sm_count": None, "arch": arch}
    given |= drawn.own(draw, given)
    try:
        return kind(**{field.name: given[field.name] for field in fields(kind) if field.name in given})
    except ValueError:
        hypothesis.reject()


def _is_far(value: Hashable) -> bool:
    """Return whether a factor or a value is one of memory that lies far, or that requests share."""
    return isinstance(value, str) and ("far" in value.split("_") or value == "aliased")


def _scores(draw: st.DrawFn, *more: str) -> Fields:
    """Draw values of keys, and a scale where scores are small and stay so under it."""
    values = draw(st.sampled_from(("normal", "rising", "falling", "peaks", *more)))
    return {"values": values, "softmax_scale": draw(st.sampled_from((None, 0.05, 0.3))) if values == "normal" else None}


def _rows(draw: st.DrawFn, least: int = 0) -> tuple[int, int]:
    """s_q and h_q of few row tiles."""
    s_q, h_q = draw(st.integers(least, 3)), draw(HEADS)
    return (s_q, h_q) if ceil_div(s_q * h_q, 64) <= ROW_TILES else (1, h_q)


def _batch(draw: st.DrawFn, row_tiles: int, most_keys: int, tiles: int = TILES) -> int:
    """Draw a number of requests whose tiles stay within bounds."""
    return draw(st.integers(0, max(min(tiles // (max(row_tiles, 1) * max(ceil_div(most_keys, 64), 1)), 3), 1)))


def _dense_decode(draw: st.DrawFn, given: Fields) -> Fields:
    operands, d_qk, arch = given["operands"], given.get("d_qk", D_QK), given["arch"]
    refused = draw(st.integers(0, 3)) == 0
    if not refused and d_qk not in key_columns(arch):
        d_qk = D_QK
    s_q, h_q = _rows(draw)
    kv_heads = (1,) if operands != LATENT or (reads_by_address(arch, operands) and not refused) else (1, 2, 3, 4)
    h_kv = draw(st.sampled_from([n for n in kv_heads if h_q % n == 0]))
    longest = draw(SIZES)
    batch = _batch(draw, ceil_div(s_q * h_q // h_kv, 64) * h_kv, longest)
    lengths = tuple(draw(st.lists(SIZES.map(lambda size: min(size, longest)), min_size=batch, max_size=batch)))
    tokens, s_q = _tokens(draw, batch, s_q, h_q // h_kv)
    shape = {"batch": batch, "tokens": tokens, "s_q": s_q, "h_q": h_q, "h_kv": h_kv, "lengths": lengths, "operands": operands, "d_qk": d_qk}
    metadata = given["metadata"] if s_q else "object"
    page_size = draw(st.sampled_from((16, 32, 64, 128, 192)))
    seen = _seen(draw, operands, tokens is not None) if s_q else {}
    return {**shape, **_scores(draw), "metadata": metadata, "page_size": page_size, **seen}


def _tokens(draw: st.DrawFn, batch: int, s_q: int, heads_per_kv: int) -> tuple[tuple[int, ...] | None, int]:
    """Draw query tokens of each request, or None, and s_q, which may be more than any request has.

    With s_q 0 or no request all have s_q tokens.
    """
    if not batch or not s_q or not draw(st.booleans()):
        return None, s_q
    few = st.integers(0, min(s_q + 2, 4 if heads_per_kv <= UNIT_ROWS // 2 else 2))
    return tuple(draw(st.lists(few, min_size=batch, max_size=batch))), draw(st.sampled_from((1, s_q, s_q + 1, 33)))


def _seen(draw: st.DrawFn, operands: str, ragged: bool) -> Fields:
    """Draw a tree mask or a window, or neither. ragged: no window."""
    kinds = ("all", "all", "tree", *(() if ragged else ("window",)))
    kind = draw(st.sampled_from(kinds if takes_key_masks(operands) else ("all",)))
    if kind == "tree":
        return {"tree": draw(st.sampled_from(("drawn", "strided")))}
    if kind == "window":  # hides broken pages
        sink = draw(st.sampled_from((0, 0, 3, 64, 70)))
        return {"window": draw(st.sampled_from((1, 5, 63, 64, 65, 130))), "window_sink": sink, "broken": False}
    return {}


def _told(draw: st.DrawFn, topk: int) -> Lengths | None:
    return draw(st.sampled_from((None, "drawn", "edges", *(("zeros",) if topk else ()))))


def _pool(draw: st.DrawFn, batch_of_even: bool) -> Pool:
    pages = (2, 16, 64, 66) if batch_of_even else (1, 2, 3, 16, 64, 69)
    topk = draw(st.sampled_from((0, 1, 2, 63, 64, 65)))
    return Pool(draw(st.sampled_from((1, 63, 64, 65, 130))), topk, draw(st.sampled_from(pages)), _told(draw, topk))


def _sparse_decode(draw: st.DrawFn, given: Fields) -> Fields:
    cache, extra_cache = given.get("caches", (given["kernels"], ""))
    main, extra = (_pool(draw, given["cache_layout"] == "tight") for _ in range(2))
    has_extra = bool(extra_cache) or draw(st.booleans())
    s_q, h_q = _rows(draw, least=1)
    s_q = min(s_q, 2 if h_q <= 64 else 1)
    batch = _batch(draw, s_q * ceil_div(h_q, 64), main.topk + (extra.topk if has_extra else 0), TILES // 2)
    tokens = None
    if s_q == 1 and batch and draw(st.booleans()):  # the tokens of up to three requests, of which each has any number
        cuts = draw(st.lists(st.integers(0, batch), max_size=2).map(sorted))
        tokens = tuple(end - first for first, end in pairwise((0, *cuts, batch)))
    caches = {"cache": cache, "extra_cache": extra_cache, "main": main, "extra": extra if has_extra else None}
    return {**caches, "s_q": s_q, "h_q": h_q, "batch": batch, "tokens": tokens, **_scores(draw, "spread", "coherent")}


def _sparse_prefill(draw: st.DrawFn, given: Fields) -> Fields:
    form = draw(st.sampled_from(("single", "batched", "ragged", "clipped")))
    s_q, h_q = _rows(draw)
    topk = draw(SIZES)
    batch = 1 if form == "single" else _batch(draw, s_q * ceil_div(h_q, 64), topk)
    bound = draw(st.sampled_from((0, 1, 64, topk - 1, topk)).map(lambda count: min(max(count, 0), topk)))
    shape = {"form": form, "batch": batch, "s_q": s_q, "h_q": h_q, "topk": topk, "s_kv": draw(SIZES), "lengths": _told(draw, topk)}
    return {**shape, **_scores(draw), "indexer_topk": bound}


def _chosen_keys(draw: st.DrawFn, given: Fields) -> Fields:
    drawn = _sparse_prefill(draw, given)
    most = INDEX_HEADS if given.get("d_qk", INDEX_COLUMNS) == INDEX_COLUMNS else MAX_HEADS
    return {**drawn, "h_q": min(drawn["h_q"], most), "indexer_topk": 0}


def _dense_prefill(draw: st.DrawFn, given: Fields, packed: bool = False) -> Fields:
    """packed: queries and keys are of the same tokens and heads."""
    h_kv, group = draw(st.integers(1, 3)), 1 if packed else draw(st.integers(1, 2))
    size = st.sampled_from((0, 1, 5, 63, 64, 65, 100))
    pairs = size.map(lambda tokens: (tokens, tokens)) if packed else st.tuples(size, size)
    lengths = tuple(draw(st.lists(pairs, max_size=3)))
    if sum(ceil_div(s_q, 64) * max(ceil_div(s_k, 64), 1) for s_q, s_k in lengths) * h_kv * group > 2 * TILES:
        h_kv, group, lengths = 1, 1, lengths[:1]
    nan_allowed = not (given["causal"] and any(s_q > s_k > 0 for s_q, s_k in lengths[1::2])) and "mask" not in given
    neighbours = given["neighbours"] if nan_allowed else "finite"
    ends = "clipped" if packed else given["ends"]
    return {"lengths": lengths, "h_kv": h_kv, "group": group, "neighbours": neighbours, "ends": ends, **_scores(draw)}


def _merge_states(draw: st.DrawFn, given: Fields) -> Fields:
    states = draw(st.integers(1, 12 if given["form"] == "stacked" else 8))
    return {"states": states, "in_place": states > 1 and draw(st.booleans())}


def _columns(draw: st.DrawFn, given: Fields) -> Fields:
    """Draw the columns of logits. Of keys in a row these are max_seqlen_k, with which logits are not cleaned."""
    paged = "page_size" in given
    columns = draw(st.none() | st.integers(1, 400 if paged else 200))
    return {"columns": columns, "clean": given["clean"] and (paged or columns is None)}


def _paged(draw: st.DrawFn, given: Fields) -> Fields:
    """Draw keys to write, and what depends on the format of a cache."""
    cache = given["cache"]
    return {
        "tokens": draw(st.integers(0, min(given["pages"] * given["page_size"], 40))),
        "scale_of_cache": draw(st.sampled_from((None, 0.37, 2.0))) if cache == "fp8_576" else None,
        "power_of_two": draw(st.booleans()) if cache in ("fp8_656", "fp8_584") else False,
        "heads": draw(st.sampled_from((0, 1, 3, 17))) if rotates(CACHED[cache]) else 0,
    }


def _gathered(draw: st.DrawFn, given: Fields) -> Fields:
    batch = draw(st.integers(0, 4))
    lengths, starts = (tuple(draw(st.lists(st.integers(0, most), min_size=batch, max_size=batch))) for most in (20, 30))
    rest = max(given["rest"], -sum(lengths))
    return {**_paged(draw, given), "lengths": lengths, "starts": starts if batch and draw(st.booleans()) else None, "rest": rest}


_SPARSE = {"power_of_two": st.booleans(), "metadata": st.sampled_from(("object", "tensors"))}
_LOGITS = {
    "heads": st.sampled_from((1, 8, 32, 33, 64)) | st.integers(1, 64),
    "tokens": st.integers(0, 5),
    "keys": st.sampled_from((0, 1, 63, 64, 65, 127, 128, 129, 257)) | st.integers(0, 300),
}
_SCORES = {**_LOGITS, "values": st.sampled_from(("exact", "plateau", "normal")), "clean": st.booleans()}
_REQUESTS = {"requests": st.integers(0, 3)}
_TOPK = {"topk": st.sampled_from((0, 1, 64, 300)) | st.integers(0, 100)}
_SELECTED = {
    **_TOPK,
    "rows": st.integers(0, 4),
    "columns": st.sampled_from((0, 1, 31, 257, 1000, 2049, 2500)) | st.integers(0, 600),
}
_MERGED = {"batch": st.sampled_from((None, 0, 1, 2)), "tokens": st.integers(0, 5), "h_q": st.integers(0, 9)}
_PAGES = {"page_size": st.sampled_from((1, 2, 7, 16, 64)), "pages": st.integers(1, 6)}
_TOKENS = {"tokens": st.integers(0, 20)}
_NAMED_FORMATS = ("v41", "v41_paged", "nope_528")

_DRAWN = {
    "dense_decode": Drawn("dense_decode", _dense_decode),
    "sparse_decode": Drawn("sparse_decode", _sparse_decode, _SPARSE, ("indices",)),
    "sparse_prefill": Drawn("sparse_prefill", _sparse_prefill, wide=("indices",)),
    "sparse_prefill_backward": Drawn("sparse_prefill_backward", _sparse_prefill, {"dkv": st.sampled_from(("bf16", "fp32"))}, ("indices",)),
    "attention_head_sums": Drawn("head_sums", _chosen_keys, wide=("indices",), having="holes"),
    "indexer_scores": Drawn("head_sums", _chosen_keys, wide=("indices",), lacking="holes"),
    "indexer_backward": Drawn("indexer_backward", _chosen_keys, {"dk": st.sampled_from(("bf16", "fp32"))}, ("indices",)),
    "dense_prefill": Drawn("dense_prefill", _dense_prefill),
    "dense_prefill_kvpacked": Drawn("dense_prefill", _dense_prefill, lacking="mask"),
    "dense_prefill_qkvpacked": Drawn("dense_prefill", partial(_dense_prefill, packed=True), lacking="mask"),
    "dense_prefill_backward": Drawn("dense_prefill_backward", _dense_prefill, {"holes": st.booleans()}),
    "merge_states": Drawn("merge_states", _merge_states, _MERGED, ("form", "layout", "empty")),
    "topk_indices": Drawn("topk_indices", more=_SELECTED, wide=("values", "lengths")),
    "fp8_mqa_logits": Drawn("mqa_logits", _columns, _SCORES, ("windows",), having="windows"),
    "fp8_paged_mqa_logits": Drawn("mqa_logits", _columns, {**_SCORES, **_REQUESTS}, ("lengths",), having="page_size"),
    "indexer_topk": Drawn("indexer_topk", more={**_LOGITS, **_REQUESTS, **_TOPK}, wide=("lengths",), having="page_size"),
    "write_kv_cache": Drawn("cache_write", _paged, _PAGES),
    "insert_kv_cache": Drawn(
        "cache_insert", _paged, {**_PAGES, "eps": st.sampled_from((1e-6, 0.0, 0.5))}, ("cache_layout", "queries", "position_type", "kept")
    ),
    "gather_kv_cache": Drawn("cache_gather", _gathered, {**_PAGES, "rest": st.integers(-2, 3)}),
    "write_index_cache": Drawn("index_write", more={**_TOKENS, "pages": st.integers(1, 4)}, having="scale_format"),
    "prepare_index_queries": Drawn("index_write", more={**_TOKENS, "heads": st.sampled_from((1, 2, 7, 33, 64))}, having="wide_weights"),
}
