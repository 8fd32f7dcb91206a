"""Benchmark rows, read from definitions/<op>.toml: shapes, seeds, priorities, rooflines and goals."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from ..spec.cache_format import FP8_656
from ..spec.cache_rows import CACHED
from ..spec.dense_decode import LATENT, OPERANDS
from ..spec.mla import D_QK, DTYPES, LATENT_DIMS
from ..spec.mqa_logits import DTYPE as KEYS
from ..spec.sparse_decode import DECODED, DECODED_BESIDE
from ..spec.sparse_prefill import HEAD_DIMS
from ..spec.topk_indices import DTYPE as LOGITS
from .roofline import Work
from .shapes import (
    CacheInsertShape,
    CacheWriteShape,
    CombineShape,
    DecodeShape,
    DensePrefillBackwardShape,
    DensePrefillShape,
    IndexerShape,
    IndexWriteShape,
    MergeShape,
    Shape,
    SparseDecodeShape,
    SparsePrefillShape,
    TopkShape,
)

RESULTS = Path(__file__).resolve().parent / "results"  # of rows that were measured, a folder for each GPU
DEFINITIONS = Path(__file__).resolve().parent / "definitions"

Table = dict[str, Any]  # a TOML table of a definition


@dataclass(frozen=True)
class Case:
    """One problem to measure.

    row, case: names such as "D1" and "varlen". title: purpose of the row. priority: 1 runs first.
    seed: for lengths, page order, indices and values.
    roof_us: bound on `roof_gpu` as written in the definition. goal_us: target time on that GPU, or None.
    """

    op: str
    row: str
    case: str
    title: str
    priority: int
    dtype: str
    shape: Shape
    seed: int
    roof_gpu: str
    roof_us: float
    goal_us: float | None

    @property
    def name(self) -> str:
        """Unique name, "<row>.<case>"."""
        return f"{self.row}.{self.case}"

    @property
    def work(self) -> Work:
        """Useful arithmetic and compulsory bytes of the shape."""
        return self.shape.work

    @property
    def text(self) -> str:
        """The shape in one short line."""
        return self.shape.text


def varlen_lengths(batch: int, mean: int, s_q: int, seed: int) -> tuple[int, ...]:
    """Draw lengths from N(mean, mean / 2), clipped below at s_q. Equal seeds give equal lengths."""
    generator = random.Random(seed)
    return tuple(max(int(generator.normalvariate(mean, mean / 2)), s_q) for _ in range(batch))


def _lengths(document: Table, entry: Table, least: int) -> tuple[int, ...]:
    """Return `lengths`, or `batch` times `length`, or with `varlen` lengths drawn around `length` and at least `least`."""
    if "lengths" in entry:
        return tuple(entry["lengths"])
    if entry.get("varlen", False):
        return varlen_lengths(entry["batch"], entry["length"], least, document["seed"])
    return (entry["length"],) * entry["batch"]


def _tokens(entry: Table, batch: int) -> tuple[int, tuple[int, ...]]:
    """Return the most query tokens of a request, and those of each: `s_q` and none, or `tokens`, over and over."""
    if "tokens" not in entry:
        return entry["s_q"], ()
    if "s_q" in entry:
        raise ValueError("s_q and tokens are given; supported: one of them")
    return max(entry["tokens"]), tuple(islice(cycle(entry["tokens"]), batch))


def _dense_decode(document: Table, entry: Table) -> Shape:
    lengths = _lengths(document, entry, entry.get("s_q", 1))
    s_q, tokens = _tokens(entry, len(lengths))
    return DecodeShape(
        lengths=lengths,
        s_q=s_q,
        tokens=tokens,
        h_q=entry["h_q"],
        h_kv=entry.get("h_kv", 1),
        page_size=document["page_size"],
        operands=_known("operands", entry.get("operands", LATENT), OPERANDS),
        d_qk=_known("d_qk", entry.get("d_qk", D_QK), tuple(LATENT_DIMS)),
    )


def _sparse_decode(document: Table, entry: Table) -> Shape:
    s_q, tokens = _tokens(entry, entry["batch"])
    return SparseDecodeShape(
        batch=entry["batch"],
        s_q=s_q,
        tokens=tokens,
        h_q=entry["h_q"],
        topk=entry["topk"],
        context=entry["context"],
        cache=_known("cache", entry.get("cache", FP8_656.name), tuple(DECODED)),
        page_size=document["page_size"],
        extra=_known("extra", entry["extra"], tuple(DECODED_BESIDE)) if "extra" in entry else None,
        extra_topk=entry["extra_topk"] if "extra" in entry else 0,
    )


def _sparse_prefill(document: Table, entry: Table) -> Shape:
    return SparsePrefillShape(
        s_q=entry["s_q"], h_q=entry["h_q"], s_kv=entry["s_kv"], topk=entry["topk"], d_qk=_known("d_qk", entry.get("d_qk", D_QK), HEAD_DIMS)
    )


def _dense_prefill(document: Table, entry: Table) -> Shape:
    return DensePrefillShape(
        lengths=_lengths(document, entry, 1),
        h_q=entry["h_q"],
        h_kv={"h_kv": entry["h_q"], **entry}["h_kv"],
        causal=entry["causal"],
        d_qk=entry.get("d_qk", 192),
        cached=entry.get("cached", 0),
        shown=entry.get("shown", 0),
    )


def _dense_prefill_backward(document: Table, entry: Table) -> Shape:
    forward = _dense_prefill(document, entry)
    assert isinstance(forward, DensePrefillShape)
    return DensePrefillBackwardShape(forward.lengths, forward.h_q, forward.h_kv, forward.causal, forward.d_qk)


def _combine(document: Table, entry: Table) -> Shape:
    return CombineShape(entry["batch"], entry["s_q"], entry["h_q"], entry["splits"])


def _merge_states(document: Table, entry: Table) -> Shape:
    return MergeShape(tokens=entry["tokens"], h_q=entry["h_q"], states=entry["states"])


def _cache_write(document: Table, entry: Table) -> Shape:
    return CacheWriteShape(tokens=entry["tokens"], cache=_known("cache", entry["cache"], tuple(CACHED)), page_size=document["page_size"])


def _cache_insert(document: Table, entry: Table) -> Shape:
    cache = _known("cache", entry["cache"], tuple(CACHED))
    return CacheInsertShape(tokens=entry["tokens"], h_q=entry["h_q"], cache=cache, page_size=document["page_size"])


def _index_write(document: Table, entry: Table) -> Shape:
    return IndexWriteShape(tokens=entry["tokens"], h_q=entry["h_q"], page_size=document["page_size"])


def _topk_indices(document: Table, entry: Table) -> Shape:
    return TopkShape(rows=entry["rows"], columns=entry["columns"], topk=entry["topk"])


def _indexer_topk(document: Table, entry: Table) -> Shape:
    return IndexerShape(
        tokens=entry["tokens"],
        h_q=entry["h_q"],
        context=entry["context"],
        topk=entry["topk"],
        paged=entry["paged"],
        page_size=document["page_size"],
    )


_LENGTHS = {"batch", "length", "lengths", "varlen"}
# for each op: the function that makes a shape from a case's table, and the keys that the table may have
_SHAPES: dict[str, tuple[Callable[[Table, Table], Shape], set[str]]] = {
    "dense_decode": (_dense_decode, {*_LENGTHS, "s_q", "tokens", "h_q", "h_kv", "operands", "d_qk"}),
    "sparse_decode": (_sparse_decode, {"batch", "s_q", "tokens", "h_q", "topk", "context", "cache", "extra", "extra_topk"}),
    "sparse_prefill": (_sparse_prefill, {"s_q", "h_q", "s_kv", "topk", "d_qk"}),
    "dense_prefill": (_dense_prefill, {*_LENGTHS, "h_q", "h_kv", "causal", "d_qk", "cached", "shown"}),
    "dense_prefill_backward": (_dense_prefill_backward, {*_LENGTHS, "h_q", "h_kv", "causal", "d_qk"}),
    "combine": (_combine, {"batch", "s_q", "h_q", "splits"}),
    "merge_states": (_merge_states, {"tokens", "h_q", "states"}),
    "cache_write": (_cache_write, {"tokens", "cache"}),
    "cache_insert": (_cache_insert, {"tokens", "h_q", "cache"}),
    "index_write": (_index_write, {"tokens", "h_q"}),
    "topk_indices": (_topk_indices, {"rows", "columns", "topk"}),
    "indexer_topk": (_indexer_topk, {"tokens", "h_q", "context", "topk", "paged"}),
}
OPS = tuple(_SHAPES)
_DTYPES = {"topk_indices": (LOGITS,), "indexer_topk": (KEYS,)}  # of ops whose operands are not 16-bit numbers
_CASE_KEYS = {"name", "priority", "roof_us", "goal_us"}


def _known(name: str, value: Any, supported: Sequence[Any]) -> Any:
    if value not in supported:
        raise ValueError(f"{name} is {value!r}; supported: {', '.join(map(str, supported))}")
    return value


def parse(text: str) -> tuple[Case, ...]:
    """Return the cases of one definition file, in its order. ValueError for a missing or unknown key, or a duplicate case."""
    document = tomllib.loads(text)
    if document.get("op") not in OPS:
        raise ValueError(f"op is {document.get('op')!r}; benchmark rows exist for {', '.join(OPS)}")
    _known("dtype", document.get("dtype"), _DTYPES.get(document["op"], DTYPES))
    cases = tuple(_case(document, row, entry) for row in document["row"] for entry in row["cases"])
    names = [case.name for case in cases]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"case {name} is defined {names.count(name)} times")
    return cases


def _case(document: Table, row: Table, entry: Table) -> Case:
    make, shape_keys = _SHAPES[document["op"]]
    known = _CASE_KEYS | shape_keys
    unknown = entry.keys() - known
    if unknown:
        raise ValueError(f"row {row.get('name')}: unknown key {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}")
    try:
        return Case(
            op=document["op"],
            row=row["name"],
            case=entry["name"],
            title=row["title"],
            priority={**row, **entry}["priority"],
            dtype=document["dtype"],
            shape=make(document, entry),
            seed=document["seed"],
            roof_gpu=document["roof_gpu"],
            roof_us=entry["roof_us"],
            goal_us=entry.get("goal_us"),
        )
    except KeyError as error:
        raise ValueError(f"row {row.get('name')}, case {entry.get('name')}: {error.args[0]} is missing") from error
    except ValueError as error:
        raise ValueError(f"row {row.get('name')}: {error}") from error


@cache
def load(op: str) -> tuple[Case, ...]:
    """Return the cases of an op, in the order of its definition. ValueError for an op without benchmark rows."""
    if op not in OPS:
        raise ValueError(f"op is {op!r}; benchmark rows exist for {', '.join(OPS)}")
    return parse((DEFINITIONS / f"{op}.toml").read_text(encoding="utf-8"))


def by_priority(cases: Sequence[Case]) -> list[Case]:
    """Return the cases in the order to run them: by priority, then as defined."""
    return sorted(cases, key=lambda case: case.priority)


def select(cases: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """Return the cases of the named rows ("D1") or cases ("D1.varlen"). ValueError for an unknown name."""
    known = {case.row for case in cases} | {case.name for case in cases}
    unknown = [name for name in names if name not in known]
    if unknown:
        rows = ", ".join(dict.fromkeys(case.row for case in cases))
        raise ValueError(f"no row or case named {', '.join(unknown)}; rows: {rows}; a case is named as in {cases[0].name}")
    return [case for case in cases if case.row in names or case.name in names]
