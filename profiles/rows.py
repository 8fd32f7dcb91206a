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

from cute_mla.spec.cache_rows import CACHED
from cute_mla.spec.dense_decode import OPERANDS
from cute_mla.spec.mla import DENSE_DIMS, DTYPES
from cute_mla.spec.mqa_logits import DTYPE as KEYS
from cute_mla.spec.sparse_decode import DECODED, DECODED_BESIDE
from cute_mla.spec.sparse_prefill import HEAD_DIMS
from cute_mla.spec.topk_indices import DTYPE as LOGITS

from .roofline import GPUS, Work
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
_SUPPORTED: dict[tuple[type[Any], str], Sequence[Any]] = {
    (DecodeShape, "operands"): OPERANDS,
    (DecodeShape, "d_qk"): tuple(DENSE_DIMS),
    (SparseDecodeShape, "cache"): tuple(DECODED),
    (SparseDecodeShape, "extra"): tuple(DECODED_BESIDE),
    (SparsePrefillShape, "d_qk"): HEAD_DIMS,
    (SparsePrefillBackwardShape, "d_qk"): HEAD_DIMS,
    (CacheWriteShape, "cache"): tuple(CACHED),
    (CacheInsertShape, "cache"): tuple(CACHED),
}
_LENGTHS = {"batch", "length", "lengths", "varlen"}


def _keys(kind: type[Any]) -> set[str]:
    """Return the keys that a case's table may have besides _CASE_KEYS: the fields of its shape, lengths also by other keys."""
    names = {field.name for field in fields(kind)} - {"page_size"}
    if kind is DensePrefillBackwardShape:
        names -= {"cached", "shown"}
    return names | _LENGTHS if "lengths" in names else names


def _shape(kind: type[Any], document: Table, entry: Table) -> Shape:
    """Return the shape of a case's table. KeyError for a key without a default, ValueError for a value that is not supported."""
    names = {field.name for field in fields(kind)}
    given = {name: entry[name] for name in names & entry.keys()}
    for name, value in given.items():
        if (kind, name) in _SUPPORTED:
            _known(name, value, _SUPPORTED[kind, name])
    if "page_size" in names:
        given["page_size"] = document["page_size"]
    if "lengths" in names:
        given["lengths"] = _lengths(document, entry, entry.get("s_q", 1))
    if {"s_q", "tokens"} <= names:
        given["s_q"], given["tokens"] = _tokens(entry, len(given["lengths"]) if "lengths" in names else entry["batch"])
    if "extra" in given:
        given["extra_topk"] = entry["extra_topk"]
    for field in fields(kind):
        if field.name not in given and field.default is MISSING:
            given[field.name] = entry["h_q" if field.name == "h_kv" else field.name]  # KeyError, but KV heads are query heads by default
    shape: Shape = kind(**given)
    return shape


OPS = tuple(_SHAPES)
_DTYPES = {"topk_indices": (LOGITS,), "indexer_topk": (KEYS,)}  # of ops whose operands are not 16-bit numbers
_CASE_KEYS = {"name", "priority", "roof_us", "goal_us", "published", "published_on", "source"}


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


def _published(entry: Table) -> Published | None:
    """Return others' times of a case. ValueError for a GPU without a roofline, KeyError without GPU or source."""
    if "published" not in entry:
        return None
    return Published(tuple(entry["published"].items()), _known("published_on", entry["published_on"], tuple(GPUS)), entry["source"])


def _case(document: Table, row: Table, entry: Table) -> Case:
    kind = _SHAPES[document["op"]]
    known = _CASE_KEYS | _keys(kind)
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
            shape=_shape(kind, document, entry),
            seed=document["seed"],
            roof_gpu=document["roof_gpu"],
            roof_us=entry["roof_us"],
            goal_us=entry.get("goal_us"),
            published=_published({**row, **entry}),
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
