"""Calls as plain values, from which all operands are made. A call can be written down and repeated."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from cute_mla.testing.operations import OPERATIONS
from cute_mla.testing.operations.sparse_decode.case import Pool


@dataclass(frozen=True)
class Setting:
    """The simulated device of a call."""

    arch: str
    sm_count: int = 16
    schedule: str = "round_robin"
    seed: int = 0


@dataclass(frozen=True)
class Break:
    """Something done to an argument. how: a name in breaking.BREAKS. amount: which of several such things."""

    argument: str
    how: str
    amount: int = 0


@dataclass(frozen=True)
class PlanCase:
    """A call of get_mla_metadata with all that it plans by. topk: None for dense decode."""

    lengths: tuple[int, ...] = (64,)
    s_q: int = 1
    h_kv: int = 1
    group: int = 16
    topk: int | None = None


@dataclass(frozen=True)
class CacheCase:
    """A call on a cache of a format. padding: bytes between pages; 16-bit caches have twice as many."""

    cache_format: str = "fp8_656"
    pages: int = 2
    page_size: int = 3
    padding: int = 0
    power_of_two: bool = False
    given: bool = False
    seed: int = 0


@dataclass(frozen=True)
class RowsCase:
    """A call of the loss of an indexer, or of its targets. shape: of both tensors. absent: share of slots that name no key.

    spread: of the scores. trained: whether these need a gradient.
    """

    shape: tuple[int, ...] = (3, 5)
    absent: float = 0.3
    spread: float = 3.0
    trained: bool = False
    seed: int = 0


_OWN = (PlanCase, CacheCase, RowsCase)

AnyCase = Any  # one of these

CASES: dict[str, type] = {kind.__name__: kind for kind in (*(record.case for record in OPERATIONS.values()), *_OWN)}


@dataclass(frozen=True)
class FuzzCall:
    """One call of a subject.

    breaks: what is done to the arguments of the case, in turn. again: the case's own call is made before, on the same device: a broken
    one must not pass for it, and of a right one the second must give the same bits.
    """

    subject: str
    case: AnyCase
    setting: Setting
    breaks: tuple[Break, ...] = ()
    again: bool = False

    def to_json(self) -> str:
        """Return one line."""
        case = {"type": type(self.case).__name__, **asdict(self.case)}
        return json.dumps({**asdict(self), "case": case})

    @staticmethod
    def from_json(text: str) -> FuzzCall:
        """Return the call that to_json wrote down."""
        given = json.loads(text)
        case = {name: _frozen(value) for name, value in given["case"].items()}
        kind = CASES[case.pop("type")]
        for name in ("main", "extra"):
            if case.get(name) is not None:
                case[name] = Pool(*case[name])
        breaks = tuple(Break(**item) for item in given["breaks"])
        return FuzzCall(given["subject"], kind(**case), Setting(**given["setting"]), breaks, given["again"])

    def __str__(self) -> str:
        """For a reader: what is not at its default."""
        unusual = [f"{field.name}={getattr(self.case, field.name)!r}" for field in fields(self.case) if _is_unusual(self.case, field)]
        broken = "; ".join(f"{item.argument} {item.how} {item.amount}" for item in self.breaks) or "nothing"
        return f"{self.subject}({', '.join(unusual)}) on {self.setting}, broken: {broken}{', made again' if self.again else ''}"


def _is_unusual(case: AnyCase, field: Any) -> bool:
    return bool(getattr(case, field.name) != field.default)


def _frozen(value: Any) -> Any:
    """Return lists of JSON as tuples."""
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
