"""Strategies of calls: right ones of every subject, small enough for the simulated device, and what breaks them."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, get_args

from hypothesis import strategies as st

from cute_mla.spec.arch import ARCHS
from cute_mla.spec.cache_rows import KNOWN
from cute_mla.spec.dense_decode import UNIT_ROWS, takes_key_masks
from cute_mla.spec.masked_prefill import HEAD_DIMS as MASKED_HEAD_DIMS
from cute_mla.spec.mla import ceil_div
from cute_mla.spec.sparse_decode import DECODED, DECODED_BESIDE, serving_kernels
from cute_mla.testing.cases.cache_gather import CacheGatherCase
from cute_mla.testing.cases.cache_insert import CacheInsertCase
from cute_mla.testing.cases.cache_write import CacheWriteCase
from cute_mla.testing.cases.dense_decode import DenseDecodeCase
from cute_mla.testing.cases.dense_prefill import DensePrefillCase
from cute_mla.testing.cases.dense_prefill_backward import DensePrefillBackwardCase
from cute_mla.testing.cases.index_write import IndexWriteCase
from cute_mla.testing.cases.indexer_topk import IndexerTopkCase
from cute_mla.testing.cases.merge_states import MergeStatesCase
from cute_mla.testing.cases.mqa_logits import KeyWindows, MqaLogitsCase, RequestLengths
from cute_mla.testing.cases.sparse_decode import Pool, SparseDecodeCase
from cute_mla.testing.cases.sparse_indices import Lengths
from cute_mla.testing.cases.sparse_prefill import SparsePrefillCase
from cute_mla.testing.cases.topk_indices import LogitValues, RowLengths, TopkIndicesCase
from cute_mla.testing.runner import SCHEDULES
from tests.fuzz.breaking import BREAKS
from tests.fuzz.calls import BatchCase, Break, CacheCase, FuzzCall, PlainCase, PlanCase, Setting
from tests.fuzz.judging import SUBJECTS

TILES = 4  # of 64 rows x 64 keys, most of a call: about a second on the simulated device
ROW_TILES = 2

_SIZES = st.sampled_from((0, 1, 2, 15, 16, 63, 64, 65, 100, 128, 129))  # around tiles, and none
_HEADS = st.sampled_from((1, 2, 3, 7, 16, 33, 63, 64, 65, 127, 128)) | st.integers(1, 128)
_SEEDS = st.integers(0, 99)
_DTYPES = st.sampled_from(("bf16", "fp16"))
_OUTPUTS: st.SearchStrategy[Any] = st.sampled_from(("allocated", "given", "strided"))


def calls(subject: str, arch: str, broken: bool) -> st.SearchStrategy[FuzzCall]:
    """Draw calls of a subject on an architecture."""
    breaks = _breaks(subject) if broken else st.just(())
    return st.builds(FuzzCall, st.just(subject), _cases(subject), settings_of(arch), breaks, st.booleans())


def settings_of(arch: str) -> st.SearchStrategy[Setting]:
    """Draw simulated devices of an architecture."""
    counts = st.sampled_from((1, 2, 3, 16, ARCHS[arch].sm_count)) | st.integers(1, ARCHS[arch].sm_count)
    return st.builds(Setting, st.just(arch), counts, st.sampled_from(SCHEDULES), _SEEDS)


def _breaks(subject: str) -> st.SearchStrategy[tuple[Break, ...]]:
    names = st.sampled_from(SUBJECTS[subject].breakable)
    one = st.builds(Break, names, st.sampled_from(tuple(BREAKS)), st.integers(0, 7))
    return st.lists(one, min_size=1, max_size=2).map(tuple)


def _cases(subject: str) -> st.SearchStrategy[Any]:
    known = {
        "dense_decode": dense_cases(),
        "sparse_decode": sparse_cases(),
        "sparse_prefill": sparse_prefill_cases(),
        "dense_prefill": dense_prefill_cases(masked=True),
        "dense_prefill_kvpacked": dense_prefill_cases(),
        "dense_prefill_qkvpacked": dense_prefill_cases(packed=True),
        "dense_prefill_backward": backward_cases(),
        "merge_states": merge_cases(),
        "topk_indices": topk_cases(),
        "fp8_mqa_logits": row_logits_cases(),
        "fp8_paged_mqa_logits": paged_logits_cases(),
        "indexer_topk": indexer_topk_cases(),
        "get_mla_metadata": plan_cases(),
        "write_kv_cache": write_cases(),
        "insert_kv_cache": insert_cases(),
        "write_index_cache": index_cases("keys"),
        "prepare_index_queries": index_cases("queries"),
        "gather_kv_cache": gather_cases(),
        "quantise_cache": cache_cases(),
        "dequantise_cache": cache_cases(),
        "plan_batch": batch_cases(),
    }
    return known[subject] if subject in known else plain_cases(subject)


def _common(draw: st.DrawFn, normal: bool) -> dict[str, Any]:
    """Draw the fields that all attention cases share. normal: scores are small, and stay so under other scales."""
    return {
        "dtype": draw(_DTYPES),
        "q_layout": draw(st.sampled_from(("packed", "sliced", "heads_first"))),
        "outputs": draw(_OUTPUTS),
        "softmax_scale": draw(st.sampled_from((None, 0.05, 0.3))) if normal else None,
        "empty_lse": draw(st.sampled_from((None, float("inf"), float("-inf")))),
        "seed": draw(_SEEDS),
    }


def _rows(draw: st.DrawFn, least: int = 0) -> tuple[int, int]:
    """s_q and h_q of few row tiles."""
    s_q, h_q = draw(st.integers(least, 3)), draw(_HEADS)
    return (s_q, h_q) if ceil_div(s_q * h_q, 64) <= ROW_TILES else (1, h_q)


def _batch(draw: st.DrawFn, row_tiles: int, most_keys: int, tiles: int = TILES) -> int:
    """Draw a number of requests whose tiles stay within bounds."""
    return draw(st.integers(0, max(min(tiles // (max(row_tiles, 1) * max(ceil_div(most_keys, 64), 1)), 3), 1)))


@st.composite
def dense_cases(draw: st.DrawFn) -> DenseDecodeCase:
    """Dense decode."""
    operands = draw(st.sampled_from(("latent", "fp8_cache", "fp8")))
    values: Any = draw(st.sampled_from(("normal", "rising", "falling", "peaks")))
    common = _common(draw, values == "normal")
    s_q, h_q = _rows(draw)
    h_kv = draw(st.sampled_from([n for n in (1, 2, 3, 4) if h_q % n == 0])) if operands == "latent" else 1
    longest = draw(_SIZES)
    batch = _batch(draw, ceil_div(s_q * h_q // h_kv, 64) * h_kv, longest)
    lengths = tuple(draw(st.lists(_SIZES.map(lambda size: min(size, longest)), min_size=batch, max_size=batch)))
    d_qk = draw(st.sampled_from((576, 576, 512, 320))) if operands == "latent" else 576
    common["dtype"] = common["dtype"] if d_qk == 576 and operands == "latent" else "bf16"
    tokens, s_q = _tokens(draw, batch, s_q, h_q // h_kv)
    return DenseDecodeCase(
        **common,
        batch=batch,
        tokens=tokens,
        s_q=s_q,
        h_q=h_q,
        h_kv=h_kv,
        lengths=lengths,
        operands=operands,
        d_qk=d_qk,
        values=values,
        page_size=draw(st.sampled_from((16, 32, 64, 128, 192))),
        causal=draw(st.booleans()),
        cache_layout=draw(st.sampled_from(("packed", "layers", "padded_rows", "heads_first"))),
        metadata=draw(st.sampled_from(("object", "tensors"))) if s_q else "object",
        batch_invariant=draw(st.booleans()),
        sinks=draw(st.sampled_from(("none", "none", "drawn", "infinite"))),
        **(_seen(draw, operands, tokens is not None) if s_q else {}),
    )


def _tokens(draw: st.DrawFn, batch: int, s_q: int, heads_per_kv: int) -> tuple[tuple[int, ...] | None, int]:
    """Draw query tokens of each request, or None, and s_q, which may be more than any request has.

    With s_q 0 or no request all have s_q tokens.
    """
    if not batch or not s_q or not draw(st.booleans()):
        return None, s_q
    few = st.integers(0, min(s_q + 2, 4 if heads_per_kv <= UNIT_ROWS // 2 else 2))
    return tuple(draw(st.lists(few, min_size=batch, max_size=batch))), draw(st.sampled_from((1, s_q, s_q + 1, 33)))


def _seen(draw: st.DrawFn, operands: str, ragged: bool) -> dict[str, Any]:
    """Draw a tree mask or a window, or neither. ragged: no window."""
    kinds = ("all", "all", "tree", *(() if ragged else ("window",)))
    kind = draw(st.sampled_from(kinds if takes_key_masks(operands) else ("all",)))
    if kind == "tree":
        return {"tree": draw(st.sampled_from(("drawn", "strided")))}
    if kind == "window":
        return {"window": draw(st.sampled_from((1, 5, 63, 64, 65, 130))), "window_sink": draw(st.sampled_from((0, 0, 3, 64, 70)))}
    return {}


def _told(draw: st.DrawFn, topk: int) -> Lengths | None:
    return draw(st.sampled_from((None, "drawn", "edges", *(("zeros",) if topk else ()))))


def _pool(draw: st.DrawFn, batch_of_even: bool) -> Pool:
    pages = (2, 16, 64, 66) if batch_of_even else (1, 2, 3, 16, 64, 69)
    topk = draw(st.sampled_from((0, 1, 2, 63, 64, 65)))
    return Pool(draw(st.sampled_from((1, 63, 64, 65, 130))), topk, draw(st.sampled_from(pages)), _told(draw, topk))


@st.composite
def sparse_cases(draw: st.DrawFn) -> SparseDecodeCase:
    """Sparse decode."""
    cache = draw(st.sampled_from(tuple(DECODED)))
    values: Any = draw(st.sampled_from(("normal", "rising", "falling", "peaks", "spread", "coherent")))
    common = {**_common(draw, values == "normal"), "dtype": "bf16"}
    rows_apart = ("padded_rows",) if DECODED[cache].scales_inside else ()
    layout: Any = draw(st.sampled_from(("packed", "layers", *(("tight",) if cache == "fp8_584" else rows_apart))))
    main = _pool(draw, layout == "tight")
    extra = _pool(draw, layout == "tight") if draw(st.booleans()) else None
    beside = [name for name, other in DECODED_BESIDE.items() if serving_kernels(DECODED[cache], other) is not None and name != cache]
    s_q, h_q = _rows(draw, least=1)
    s_q = min(s_q, 2 if h_q <= 64 else 1)
    row_tiles = s_q * ceil_div(h_q, 64)
    batch = _batch(draw, row_tiles, main.topk + (0 if extra is None else extra.topk), TILES // 2)
    tokens = None
    if s_q == 1 and batch and draw(st.booleans()):  # the tokens of up to three requests, of which each has any number
        cuts = draw(st.lists(st.integers(0, batch), max_size=2).map(sorted))
        tokens = tuple(end - first for first, end in pairwise((0, *cuts, batch)))
    return SparseDecodeCase(
        **common,
        cache=cache,
        extra_cache=draw(st.sampled_from(("", *beside))) if extra is not None else "",
        values=values,
        cache_layout=layout,
        main=main,
        extra=extra,
        s_q=s_q,
        h_q=h_q,
        batch=batch,
        tokens=tokens,
        power_of_two=draw(st.booleans()),
        indices=draw(st.sampled_from(("valid", "mixed", "none"))),
        index_layout=draw(st.sampled_from(("packed", "odd"))),
        sinks=draw(st.sampled_from(("none", "drawn", "infinite"))),
        metadata=draw(st.sampled_from(("object", "tensors"))),
        batch_invariant=draw(st.booleans()),
    )


@st.composite
def sparse_prefill_cases(draw: st.DrawFn) -> SparsePrefillCase:
    """Sparse prefill, in all its forms."""
    form: Any = draw(st.sampled_from(("single", "batched", "ragged", "clipped")))
    s_q, h_q = _rows(draw)
    topk = draw(_SIZES)
    batch = 1 if form == "single" else _batch(draw, s_q * ceil_div(h_q, 64), topk)
    values: Any = draw(st.sampled_from(("normal", "rising", "falling", "peaks")))
    return SparsePrefillCase(
        **{**_common(draw, values == "normal"), "dtype": "bf16"},
        form=form,
        batch=batch,
        s_q=s_q,
        h_q=h_q,
        topk=topk,
        values=values,
        d_qk=draw(st.sampled_from((576, 512))),
        s_kv=draw(_SIZES),
        lengths=_told(draw, topk),
        indexer_topk=draw(st.sampled_from((0, 1, 64, topk - 1, topk)).map(lambda count: min(max(count, 0), topk))),
        kv_layout=draw(st.sampled_from(("packed", "padded_rows", "layers"))),
        indices=draw(st.sampled_from(("valid", "mixed", "none"))),
        index_layout=draw(st.sampled_from(("packed", "odd"))),
        sinks=draw(st.sampled_from(("none", "drawn", "infinite"))),
    )


@st.composite
def dense_prefill_cases(draw: st.DrawFn, packed: bool = False, masked: bool = False) -> DensePrefillCase:
    """Dense prefill. packed: queries and keys are of the same tokens and heads. masked: whether the call may have a mask."""
    values: Any = draw(st.sampled_from(("normal", "rising", "falling", "peaks")))
    common = _common(draw, values == "normal")
    h_kv, group = draw(st.integers(1, 3)), 1 if packed else draw(st.integers(1, 2))
    size = st.sampled_from((0, 1, 5, 63, 64, 65, 100))
    pairs = size.map(lambda tokens: (tokens, tokens)) if packed else st.tuples(size, size)
    lengths = tuple(draw(st.lists(pairs, max_size=3)))
    causal = draw(st.booleans())
    nan_allowed = not (causal and any(s_q > s_k > 0 for s_q, s_k in lengths[1::2]))
    d_qk = draw(st.sampled_from((192, 128, 256)))
    common["dtype"] = common["dtype"] if d_qk != 256 else "bf16"
    case = DensePrefillCase(
        **common,
        lengths=lengths,
        h_kv=h_kv,
        group=group,
        causal=causal,
        values=values,
        d_qk=d_qk,
        ends="clipped" if packed else draw(st.sampled_from(("margins", "clipped"))),
        neighbours=draw(st.sampled_from(("finite", "nan"))) if nan_allowed else "finite",
        kv_layout=draw(st.sampled_from(("packed", "padded", "kvpacked", "heads_first"))),
    )
    if masked and (case.dtype, case.d_qk in MASKED_HEAD_DIMS, case.neighbours) == ("bf16", True, "finite"):
        masks: st.SearchStrategy[Any] = st.sampled_from((None, "random", "blocks", "single", "edges"))
        case = replace(case, mask=draw(masks), mask_layout=draw(st.sampled_from(("packed", "padded"))))
    return case if case.tiles <= 2 * TILES else replace(case, h_kv=1, group=1, lengths=case.lengths[:1])


@st.composite
def backward_cases(draw: st.DrawFn) -> DensePrefillBackwardCase:
    """Draw the gradients of a call of dense prefill."""
    forward = draw(dense_prefill_cases())
    layouts: st.SearchStrategy[Any] = st.sampled_from(("packed", "sliced", "heads_first"))
    forward = replace(forward, dtype="bf16", outputs=draw(st.sampled_from((forward.outputs, "odd"))))
    return DensePrefillBackwardCase(
        **{field.name: getattr(forward, field.name) for field in fields(forward)},
        dout_layout=draw(layouts),
        saved=draw(_OUTPUTS.filter(lambda saved: saved != "allocated")),
        holes=draw(st.booleans()),
    )


@st.composite
def merge_cases(draw: st.DrawFn) -> MergeStatesCase:
    """merge_states."""
    form: Any = draw(st.sampled_from(("listed", "stacked")))
    states = draw(st.integers(1, 12 if form == "stacked" else 8))
    return MergeStatesCase(
        dtype=draw(_DTYPES),
        states=states,
        batch=draw(st.sampled_from((None, 0, 1, 2))),
        tokens=draw(st.integers(0, 5)),
        h_q=draw(st.integers(0, 9)),
        head_dim=draw(st.sampled_from((512, 128))),
        form=form,
        layout=draw(st.sampled_from(("packed", "sliced", "odd", "heads_first"))),
        empty=draw(st.sampled_from(("none", "some", "all"))),
        in_place=states > 1 and draw(st.booleans()),
        outputs=draw(_OUTPUTS),
        empty_lse=draw(st.sampled_from((None, float("inf"), float("-inf")))),
        seed=draw(_SEEDS),
    )


@st.composite
def topk_cases(draw: st.DrawFn) -> TopkIndicesCase:
    """Draw selections in a few rows."""
    return TopkIndicesCase(
        rows=draw(st.integers(0, 4)),
        columns=draw(st.sampled_from((0, 1, 31, 257, 1000, 2049, 2500)) | st.integers(0, 600)),
        topk=draw(st.sampled_from((0, 1, 64, 300)) | st.integers(0, 100)),
        values=draw(st.sampled_from(get_args(LogitValues))),
        lengths=draw(st.sampled_from(get_args(RowLengths))),
        layout=draw(st.sampled_from(("packed", "odd", "expanded"))),
        outputs=draw(st.sampled_from(("allocated", "given", "strided", "odd"))),
        seed=draw(_SEEDS),
    )


def _scored(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the fields that all calls with logits share."""
    return {
        "heads": draw(st.sampled_from((1, 8, 32, 33, 64)) | st.integers(1, 64)),
        "tokens": draw(st.integers(0, 5)),
        "keys": draw(st.sampled_from((0, 1, 63, 64, 65, 127, 128, 129, 257)) | st.integers(0, 300)),
        "layout": draw(st.sampled_from(("packed", "strided"))),
        "outputs": draw(_OUTPUTS),
        "seed": draw(_SEEDS),
    }


def _paged_keys(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "requests": draw(st.integers(0, 3)),
        "page_size": draw(st.sampled_from((16, 32, 64, 128))),
        "lengths": draw(st.sampled_from(get_args(RequestLengths))),
        "per_token": draw(st.booleans()),
    }


@st.composite
def row_logits_cases(draw: st.DrawFn) -> MqaLogitsCase:
    """Draw logits of keys in a row."""
    relative = draw(st.booleans())
    return MqaLogitsCase(
        **_scored(draw),
        windows=draw(st.sampled_from(get_args(KeyWindows))),
        columns=draw(st.integers(1, 200)) if relative else None,
        clean=False if relative else draw(st.booleans()),
        values=draw(st.sampled_from(("exact", "plateau", "normal"))),
    )


@st.composite
def paged_logits_cases(draw: st.DrawFn) -> MqaLogitsCase:
    """Draw logits of keys in an index cache."""
    return MqaLogitsCase(
        **_scored(draw),
        **_paged_keys(draw),
        columns=draw(st.none() | st.integers(1, 400)),
        clean=draw(st.booleans()),
        values=draw(st.sampled_from(("exact", "plateau", "normal"))),
    )


@st.composite
def indexer_topk_cases(draw: st.DrawFn) -> IndexerTopkCase:
    """Draw choices of keys of an index cache."""
    return IndexerTopkCase(
        **_scored(draw),
        **_paged_keys(draw),
        topk=draw(st.sampled_from((0, 1, 64, 300)) | st.integers(0, 100)),
        slots=draw(st.booleans()),
        values=draw(st.sampled_from(("exact", "plateau"))),
    )


@st.composite
def plan_cases(draw: st.DrawFn) -> PlanCase:
    """Draw plans that are made at once."""
    h_kv = draw(st.integers(1, 4))
    topk = draw(st.none() | _SIZES)
    size = st.sampled_from((-(1 << 31), -1, 0, 1, 64, 65, 1000, 70_000)) | st.integers(0, 5000)
    return PlanCase(
        lengths=tuple(draw(st.lists(size, max_size=9))),
        s_q=draw(st.integers(1, 5)),
        h_kv=h_kv if topk is None else 1,
        group=draw(st.integers(1, 128 // h_kv)),
        topk=topk,
    )


@st.composite
def cache_cases(draw: st.DrawFn) -> CacheCase:
    """Draw caches of every format."""
    return CacheCase(
        cache_format=draw(st.sampled_from(tuple(KNOWN))),
        pages=draw(st.integers(0, 3)),
        page_size=draw(st.integers(0, 5)),
        padding=draw(st.sampled_from((0, 1, 16, 100))),
        power_of_two=draw(st.booleans()),
        given=draw(st.booleans()),
        seed=draw(_SEEDS),
    )


def _paged(draw: st.DrawFn) -> dict[str, Any]:
    cache = draw(st.sampled_from(("latent", "latent_320", "fp8_576", "fp8_656", "fp8_584")))
    return {
        "dtype": draw(_DTYPES) if cache == "latent" else "bf16",
        "cache": cache,
        "page_size": draw(st.sampled_from((1, 2, 7, 16, 64))),
        "pages": draw(st.integers(1, 6)),
        "scale_of_cache": draw(st.sampled_from((None, 0.37, 2.0))) if cache == "fp8_576" else None,
        "cache_layout": draw(st.sampled_from(("packed", "layers"))),
        "seed": draw(_SEEDS),
    }


@st.composite
def write_cases(draw: st.DrawFn) -> CacheWriteCase:
    """Draw calls that write keys to a cache."""
    paged = _paged(draw)
    return CacheWriteCase(
        **paged,
        tokens=draw(st.integers(0, min(paged["pages"] * paged["page_size"], 40))),
        values=draw(st.sampled_from(("normal", "nasty"))),
        key_layout=draw(st.sampled_from(("packed", "projection", "odd"))),
        slot_type=draw(st.sampled_from(("int64", "int32", "strided"))),
        power_of_two=draw(st.booleans()) if paged["cache"] in ("fp8_656", "fp8_584") else False,
    )


@st.composite
def insert_cases(draw: st.DrawFn) -> CacheInsertCase:
    """Draw calls that insert keys into a cache."""
    written = {field.name: getattr(case, field.name) for case in (draw(write_cases()),) for field in fields(case)}
    return CacheInsertCase(
        **written,
        heads=draw(st.sampled_from((0, 1, 3, 17))),
        queries=draw(st.sampled_from(("packed", "sliced", "odd", "heads_first"))),
        position_type=draw(st.sampled_from(("int64", "int32", "strided"))),
        kept=draw(st.sampled_from(("none", "packed", "odd"))),
        eps=draw(st.sampled_from((1e-6, 0.0, 0.5))),
    )


@st.composite
def index_cases(draw: st.DrawFn, rows: Any) -> IndexWriteCase:
    """Draw calls that write the indexer's keys or prepare its queries."""
    return IndexWriteCase(
        rows=rows,
        tokens=draw(st.integers(0, 20)),
        heads=1 if rows == "keys" else draw(st.sampled_from((1, 2, 7, 33, 64))),
        page_size=draw(st.sampled_from((16, 32, 64, 128))),
        pages=draw(st.integers(1, 4)),
        rope=draw(st.sampled_from(("half_split", "interleaved"))),
        hadamard=draw(st.booleans()),
        scale_format=draw(st.sampled_from(("fp32", "ue8m0"))) if rows == "keys" else "fp32",
        values=draw(st.sampled_from(("normal", "nasty"))),
        positions=draw(st.booleans()),
        layout=draw(st.sampled_from(("packed", "projection", "odd"))),
        integers=draw(st.sampled_from(("int64", "int32", "strided"))),
        table=draw(st.sampled_from(("packed", "strided"))),
        cache_layout=draw(st.sampled_from(("packed", "layers"))),
        outputs="allocated" if rows == "keys" else draw(_OUTPUTS),
        wide_weights=draw(st.booleans()),
        seed=draw(_SEEDS),
    )


@st.composite
def gather_cases(draw: st.DrawFn) -> CacheGatherCase:
    """Draw calls that gather keys from a cache."""
    paged = _paged(draw)
    batch = draw(st.integers(0, 4))
    lengths = tuple(draw(st.lists(st.integers(0, 20), min_size=batch, max_size=batch)))
    starts = tuple(draw(st.lists(st.integers(0, 30), min_size=batch, max_size=batch)))
    return CacheGatherCase(
        **paged,
        lengths=lengths,
        starts=starts if batch and draw(st.booleans()) else None,
        outputs=draw(_OUTPUTS),
        rest=draw(st.integers(0, 3)),
        empty_lse=None,
    )


@st.composite
def batch_cases(draw: st.DrawFn) -> BatchCase:
    """Draw steps of a layer."""
    count, decodes = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    decodes, new = min(decodes, count), draw(st.integers(1, 3))
    lengths = [(new if i < decodes else draw(st.integers(0, 70)), draw(st.integers(0, 200))) for i in range(count)]
    return BatchCase(
        tuple(lengths), decodes, draw(st.sampled_from((16, 32, 64, 128))), draw(st.sampled_from((1, 7, 64, 8192))), draw(st.booleans())
    )


_ODD_VALUES = st.sampled_from((None, -1, 0, 1, 2, 64, 128, 129, 512, 576, 1 << 40, 2.5, 64.0, float("nan"), "64", "bf16", True, False))


def _chosen(**values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=values)


def plain_cases(subject: str) -> st.SearchStrategy[PlainCase]:
    """Draw calls of a subject that takes plain values."""
    count = st.integers(0, 300)
    ops = st.sampled_from(("dense_decode", "sparse_decode", "dense_prefill", "sparse_prefill"))
    strategies: dict[str, st.SearchStrategy[dict[str, Any]]] = {
        "workspace_size": st.fixed_dictionaries(
            {"op": ops, "batch": st.integers(0, 50), "s_q": st.integers(0, 5), "h_q": _HEADS},
            optional={
                "h_kv": st.integers(1, 4),
                "batch_invariant": st.booleans(),
                "max_cache_seqlen": st.integers(0, 100_000),
                "topk": st.integers(0, 70_000),
            },
        ).map(lambda given: {**given, "device": "cpu"}),
        "is_supported": st.builds(
            lambda op, arch, features: {"op": op, "arch": arch, **features},
            ops,
            st.sampled_from((*ARCHS, "sm103")),
            _chosen(
                dtype=st.sampled_from(("bf16", "fp16", "e4m3")) | _ODD_VALUES,
                h_q=_HEADS | _ODD_VALUES,
                h_kv=st.integers(1, 4) | _ODD_VALUES,
                s_q=st.integers(1, 70_000) | _ODD_VALUES,
                head_dim=st.sampled_from((576, 512, 256, 192, 128)) | _ODD_VALUES,
                head_dim_v=st.sampled_from((512, 256, 128)) | _ODD_VALUES,
                page_size=st.sampled_from((16, 32, 64, 128, 1, None)) | _ODD_VALUES,
                causal=st.booleans() | _ODD_VALUES,
                batch_invariant=st.booleans() | _ODD_VALUES,
                fp8_kvcache=st.booleans() | _ODD_VALUES,
                attn_sink=st.booleans() | _ODD_VALUES,
                extra_cache=st.booleans() | _ODD_VALUES,
                topk_length=st.booleans() | _ODD_VALUES,
                topk=st.none() | count | _ODD_VALUES,
                kv_offsets=st.booleans() | _ODD_VALUES,
            ),
        ),
        "simulate": _chosen(
            arch=st.sampled_from(tuple(ARCHS)),
            sm_count=st.none() | st.integers(1, 200),
            schedule=st.sampled_from(SCHEDULES),
            seed=st.integers(0, 1 << 40),
            on_finding=st.sampled_from(("raise", "collect")),
        ),
        "empty_cache": st.fixed_dictionaries(
            {"cache_format": st.sampled_from(tuple(KNOWN)), "pages": st.integers(0, 4), "page_size": st.integers(0, 9)},
            optional={"page_stride": st.none() | st.integers(0, 8000), "fill": st.integers(0, 255)},
        ),
        "MlaConfig": st.fixed_dictionaries(
            {
                "hidden_size": st.integers(1, 8000),
                "num_attention_heads": st.integers(1, 128),
                "q_lora_rank": st.none() | st.integers(1, 1600),
            },
            optional={"rms_norm_eps": st.floats(1e-9, 1.0), "rope_theta": st.floats(1.0, 1e9), "rope_interleave": st.booleans()},
        ),
        "YarnScaling": st.fixed_dictionaries(
            {"factor": st.floats(0.5, 100), "original_max_position_embeddings": st.integers(1, 1 << 20)},
            optional={"mscale": st.floats(0, 10), "mscale_all_dim": st.floats(0, 10), "beta_fast": st.floats(2, 64)},
        ),
    }
    return strategies[subject].map(lambda given: PlainCase(tuple(given.items())))
