"""Who runs beside ours in a row: which peers are installed, cover the case and compute the right answer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .peers.peer import Peer, Run
from .subjects.subject import Subject

READY, ABSENT, NOT_COVERED, WRONG, FAILED = "ready", "absent", "not_covered", "wrong", "failed"


@dataclass(frozen=True)
class Entrant:
    """A peer that gave the right answer. runs: one an operand set of the subject."""

    name: str
    runs: Sequence[Run]


def installed(peer: Peer) -> tuple[str, str]:
    """(version, "") of a peer, or ("", why it cannot be imported)."""
    try:
        return peer.version(), ""
    except ImportError as error:
        return "", f"not installed: {error}"
    except Exception as error:  # whatever another library's initialisation comes to, ours go on
        return "", f"cannot be imported: {type(error).__name__}: {error}"


def admit(peers: Iterable[Peer], subject: Subject[Any]) -> tuple[list[Entrant], dict[str, dict[str, Any]]]:
    """The peers that may be timed, and of each peer of the op a record: status and reason, and what its check found."""
    entrants: list[Entrant] = []
    records: dict[str, dict[str, Any]] = {}
    for peer in peers:
        if subject.case.op not in peer.ops:
            continue
        entrant, records[peer.name] = _examined(peer, subject)
        if entrant is not None:
            entrants.append(entrant)
    return entrants, records


def _examined(peer: Peer, subject: Subject[Any]) -> tuple[Entrant | None, dict[str, Any]]:
    version, absence = installed(peer)
    if absence:
        return None, _record(ABSENT, absence)
    refusal = peer.refusal(subject.case)
    if refusal:
        return None, _record(NOT_COVERED, refusal)
    try:
        entrant = Entrant(peer.name, peer.runs(subject))
        _poison_free_memory(subject)
        ends = sorted({0, len(entrant.runs) - 1})
        found = [(subject.sets[index], entrant.runs[index]()) for index in ends]
        check = subject.check([results for _, results in found], found)
    except Exception as error:  # a peer's failure is the peer's outcome
        return None, {**_record(FAILED, failure(error)), "version": version}
    record = {**_record(READY if check.passed else WRONG, check.reason), "version": version, "check": asdict(check)}
    return (entrant if check.passed else None), record


def _poison_free_memory(subject: Subject[Any]) -> None:
    """NaN in memory as large as the results, given back at once: a peer that allocates its outputs is likely to get it."""
    for tensor in subject.results(subject.sets[0]).values():
        torch.full_like(tensor, math.nan)


def _record(status: str, reason: str) -> dict[str, Any]:
    return {"status": status, "reason": reason}


def failure(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]
