"""The benchmark rows of `definitions/<op>.toml`: shapes, seeds, priorities, rooflines and goals."""

from __future__ import annotations

import random
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..spec.dense_decode import LATENT, OPERANDS
from ..spec.mla import DTYPES
from .roofline import CombineShape, DecodeShape, Work, combine_work, dense_decode_work

DEFINITIONS = Path(__file__).resolve().parent / "definitions"
OPS = ("dense_decode", "combine")


@dataclass(frozen=True)
class Case:
    """One problem to measure.

    row, case: its names ("D1", "varlen"). title: what the row stands for. priority: 1 runs first.
    shape: the problem. seed: of lengths, page order and values.
    roof_us: bound on `roof_gpu` as recorded in the definition. goal_us: wanted there, or None.
    """

    op: str
    row: str
    case: str
    title: str
    priority: int
    dtype: str
    shape: DecodeShape | CombineShape
    seed: int
    roof_gpu: str
    roof_us: float
    goal_us: float | None

    @property
    def name(self) -> str:
        """ "<row>.<case>", unique."""
        return f"{self.row}.{self.case}"

    @property
    def work(self) -> Work:
        """Useful arithmetic and compulsory bytes."""
        return combine_work(self.shape) if isinstance(self.shape, CombineShape) else dense_decode_work(self.shape)

    @property
    def text(self) -> str:
        """The shape in one short line."""
        shape = self.shape
        if isinstance(shape, CombineShape):
            return f"b{shape.batch} splits{shape.splits} h{shape.h_q} s{shape.s_q}"
        operands = "" if shape.operands == LATENT else f" {shape.operands}"
        return f"b{shape.batch} {_lengths_text(shape.lengths)} h{shape.h_q} s{shape.s_q}{operands}"


def _lengths_text(lengths: tuple[int, ...]) -> str:
    if len(set(lengths)) == 1:
        return f"L{lengths[0]}"
    return f"L{min(lengths)}-{max(lengths)} (mean {sum(lengths) // len(lengths)})"


def varlen_lengths(batch: int, mean: int, s_q: int, seed: int) -> tuple[int, ...]:
    """Lengths drawn from N(mean, mean / 2), clipped below at s_q; equal seeds give equal lengths."""
    generator = random.Random(seed)
    return tuple(max(int(generator.normalvariate(mean, mean / 2)), s_q) for _ in range(batch))


def _lengths(entry: dict[str, Any], seed: int) -> tuple[int, ...]:
    if "lengths" in entry:
        return tuple(entry["lengths"])
    if entry.get("varlen", False):
        return varlen_lengths(entry["batch"], entry["length"], entry["s_q"], seed)
    return (entry["length"],) * entry["batch"]


def _shape(document: dict[str, Any], entry: dict[str, Any]) -> DecodeShape | CombineShape:
    if document["op"] == "combine":
        return CombineShape(entry["batch"], entry["s_q"], entry["h_q"], entry["splits"])
    return DecodeShape(
        lengths=_lengths(entry, document["seed"]),
        s_q=entry["s_q"],
        h_q=entry["h_q"],
        h_kv=entry.get("h_kv", 1),
        page_size=document["page_size"],
        operands=entry.get("operands", LATENT),
    )


def parse(text: str) -> tuple[Case, ...]:
    """The cases of one definition file, in its order. Raises ValueError where a key is missing, unknown or used twice."""
    document = tomllib.loads(text)
    if document.get("op") not in OPS:
        raise ValueError(f"op is {document.get('op')!r}; benchmark rows exist for {', '.join(OPS)}")
    if document.get("dtype") not in DTYPES:
        raise ValueError(f"dtype is {document.get('dtype')!r}; supported: {', '.join(DTYPES)}")
    cases = tuple(_case(document, row, entry) for row in document["row"] for entry in row["cases"])
    names = [case.name for case in cases]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"case {name} is defined {names.count(name)} times")
    return cases


_CASE_KEYS = {"name", "batch", "length", "lengths", "varlen", "splits", "s_q", "h_q", "h_kv", "operands", "roof_us", "goal_us"}


def _case(document: dict[str, Any], row: dict[str, Any], entry: dict[str, Any]) -> Case:
    unknown = entry.keys() - _CASE_KEYS
    if unknown:
        raise ValueError(f"row {row.get('name')}: unknown key {', '.join(sorted(unknown))}; known: {', '.join(sorted(_CASE_KEYS))}")
    if entry.get("operands", LATENT) not in OPERANDS:
        raise ValueError(f"row {row.get('name')}: operands is {entry['operands']!r}; supported: {', '.join(OPERANDS)}")
    try:
        return Case(
            op=document["op"],
            row=row["name"],
            case=entry["name"],
            title=row["title"],
            priority=row["priority"],
            dtype=document["dtype"],
            shape=_shape(document, entry),
            seed=document.get("seed", 0),
            roof_gpu=document["roof_gpu"],
            roof_us=entry["roof_us"],
            goal_us=entry.get("goal_us"),
        )
    except KeyError as error:
        raise ValueError(f"row {row.get('name')}, case {entry.get('name')}: {error.args[0]} is missing") from error


@cache
def load(op: str) -> tuple[Case, ...]:
    """The cases of an op, in the order of its definition."""
    if op not in OPS:
        raise ValueError(f"op is {op!r}; benchmark rows exist for {', '.join(OPS)}")
    return parse((DEFINITIONS / f"{op}.toml").read_text(encoding="utf-8"))


def by_priority(cases: Sequence[Case]) -> list[Case]:
    """The order in which to run: most wanted first, else as defined."""
    return sorted(cases, key=lambda case: case.priority)


def select(cases: Sequence[Case], names: Sequence[str]) -> list[Case]:
    """The cases of the named rows ("D1") or cases ("D1.varlen"); ValueError for a name that none has."""
    known = {case.row for case in cases} | {case.name for case in cases}
    unknown = [name for name in names if name not in known]
    if unknown:
        rows = ", ".join(dict.fromkeys(case.row for case in cases))
        raise ValueError(f"no row or case named {', '.join(unknown)}; rows: {rows}; a case is named as in {cases[0].name}")
    return [case for case in cases if case.row in names or case.name in names]
