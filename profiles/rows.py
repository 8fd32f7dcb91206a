"""Benchmark rows, read from definitions/<op>.toml: shapes, seeds, priorities, rooflines and goals."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

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
    SparsePrefillBackwardShape,
    SparsePrefillShape,
    TopkShape,
)

RESULTS = Path(__file__).resolve().parent / "results"  # of rows that were measured, a folder for each GPU
DEFINITIONS = Path(__file__).resolve().parent / "definitions"

Table = dict[str, Any]  # a TOML table of a definition


@dataclass(frozen=True)
class Published:
    """Times of a problem that others have measured and published: libraries with their microseconds, the GPU, and the source."""

    us: tuple[tuple[str, float], ...]
    gpu: str
    source: str


@dataclass(frozen=True)
class Case:
    """One problem to measure.

    row, case: names such as "D1" and "varlen". title: purpose of the row. priority: 1 runs first.
    seed: for lengths, page order, indices and values.
    roof_us: bound on `roof_gpu` as written in the definition. goal_us: target time on that GPU, or None. published: others' times, or None.
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
    published: Published | None = None

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


_SHAPES: dict[str, type[Any]] = {
    "dense_decode": DecodeShape,
    "sparse_decode": SparseDecodeShape,
    "sparse_prefill": SparsePrefillShape,
    "sparse_prefill_backward": SparsePrefillBackwardShape,
    "dense_prefill": DensePrefillShape,
    "dense_prefill_backward": DensePrefillBackwardShape,
    "combine": CombineShape,
    "merge_states": MergeShape,
    "cache_write": CacheWriteShape,
    "cache_insert": CacheInsertShape,
    "index_write": IndexWriteShape,
    "topk_indices": TopkShape,
    "indexer_topk": IndexerShape,
}
_CASE_KEYS = {"name", "priority", "roof_us", "goal_us", "published", "published_on", "source"}  # of a case's table, besides its shape's


def _shape(kind: type[Any], document: Table, entry: Table) -> Shape:
    """Return the shape of a case's table: lengths also by other keys, KV heads as many as query heads by default."""
    given = {name: value for name, value in entry.items() if name not in _CASE_KEYS}
    names = {field.name for field in fields(kind)}
    if "page_size" in names:
        given["page_size"] = document["page_size"]
    if "lengths" in names:
        lengths = _lengths(document, entry, entry.get("s_q", 1))
        given = {name: value for name, value in given.items() if name not in ("batch", "length", "varlen")} | {"lengths": lengths}
    if {"s_q", "tokens"} <= names:
        given["s_q"], given["tokens"] = _tokens(entry, len(given["lengths"]) if "lengths" in names else entry["batch"])
    if any(field.name == "h_kv" and field.default is MISSING for field in fields(kind)):
        given.setdefault("h_kv", entry["h_q"])
    shape: Shape = kind(**given)
    return shape


OPS = tuple(_SHAPES)


def parse(text: str) -> tuple[Case, ...]:
    """Return the cases of one definition file, in its order. KeyError for a key that is missing, TypeError for one that is unknown."""
    document = tomllib.loads(text)
    return tuple(_case(document, {**row, **entry}, row["name"], entry) for row in document["row"] for entry in row["cases"])


def _case(document: Table, either: Table, row: str, entry: Table) -> Case:
    """Return a case. either: the keys of its row, and its own in their place."""
    theirs = entry.get("published")
    return Case(
        op=document["op"],
        row=row,
        case=entry["name"],
        title=either["title"],
        priority=either["priority"],
        dtype=document["dtype"],
        shape=_shape(_SHAPES[document["op"]], document, entry),
        seed=document["seed"],
        roof_gpu=document["roof_gpu"],
        roof_us=entry["roof_us"],
        goal_us=entry.get("goal_us"),
        published=None if theirs is None else Published(tuple(theirs.items()), either["published_on"], either["source"]),
    )


@cache
def load(op: str) -> tuple[Case, ...]:
    """Return the cases of an op, in the order of its definition. ValueError for an op without benchmark rows."""
    if op not in OPS:
        raise ValueError(f"op is {op!r}; benchmark rows exist for {', '.join(OPS)}")
    return parse((DEFINITIONS / f"{op}.toml").read_text(encoding="utf-8"))


def every_case() -> list[Case]:
    """Return the cases of all ops."""
    return [case for op in OPS for case in load(op)]


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
