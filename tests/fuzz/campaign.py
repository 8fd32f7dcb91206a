"""Many calls: drawn by hypothesis from a seed, judged, counted; of what fails, the least example that it finds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase

from cute_mla.spec.arch import ARCHS
from tests.fuzz.calls import FuzzCall
from tests.fuzz.drawing import calls
from tests.fuzz.judging import Failure, Outcome, judge

CHUNK = 60  # calls between two looks at the clock; after a failure, the next chunk goes on
# Of the calls of each subject: three have one function behind them, some cost next to nothing. Of all others 2.
_WEIGHTS = {
    **dict.fromkeys(("dense_prefill", "dense_prefill_kvpacked", "dense_prefill_qkvpacked"), 1),
    **dict.fromkeys(("merge_states", "topk_indices", "write_kv_cache", "gather_kv_cache"), 3),
}
_MOST_SHRINKS = 400  # calls to make a failing one smaller


@dataclass
class Tally:
    """Outcomes of a subject's calls. messages: of refusals, without numbers."""

    right: int = 0
    broken: int = 0
    returned: int = 0
    refused: int = 0
    not_broken: int = 0
    failures: list[dict[str, str]] = field(default_factory=list)
    messages: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def calls(self) -> int:
        """Calls that were made."""
        return self.returned + self.refused + len(self.failures)

    def add(self, call: FuzzCall, outcome: Outcome) -> None:
        """Count a call that did what is documented."""
        if outcome.kind == "cannot be broken so":
            self.not_broken += 1
            return
        if call.breaks:
            self.broken += 1
        else:
            self.right += 1
        if outcome.kind == "returned":
            self.returned += 1
        else:
            self.refused += 1
            self.messages[outcome.message] = self.messages.get(outcome.message, 0) + 1


@dataclass(frozen=True)
class Share:
    """So many calls of a subject on an architecture, right ones or broken ones, from a seed."""

    subject: str
    arch: str
    broken: bool
    count: int
    seed: int


def shares(total: int, seed: int, right: float, names: Sequence[str], archs: Sequence[str] = tuple(ARCHS)) -> Iterator[Share]:
    """Split calls among subjects on each architecture. right: the part of them that is not broken."""
    weights = {name: _WEIGHTS.get(name, 2) for name in names}
    whole = sum(weights.values()) * len(archs)
    for number, (arch, name) in enumerate((arch, name) for arch in archs for name in names):
        count = -(-total * weights[name] // whole)
        good = round(count * right)
        for broken, part in ((True, count - good), (False, good)):
            for chunk, start in enumerate(range(0, part, CHUNK)):
                chunk_seed = seed * 1_000_003 + number * 1009 + chunk * 2 + broken
                yield Share(name, arch, broken, min(CHUNK, part - start), chunk_seed)


def run(share: Share, tally: Tally) -> None:
    """Make the calls of a share, until one fails."""
    strategy = calls(share.subject, share.arch, share.broken)
    failed: list[Any] = []
    start = time.perf_counter()

    @hypothesis.seed(share.seed)
    @hypothesis.settings(
        max_examples=share.count,
        database=None,
        deadline=None,
        derandomize=False,
        print_blob=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @hypothesis.given(strategy)
    def attempt(call: FuzzCall) -> None:
        if len(failed) > _MOST_SHRINKS:
            return
        try:
            outcome = judge(call)
        except Failure as failure:
            failed.append((call, failure))
            raise
        if not failed:
            tally.add(call, outcome)

    try:
        attempt()
    except (Failure, hypothesis.errors.Flaky, hypothesis.errors.HypothesisException, BaseExceptionGroup) as error:
        if not failed:
            raise
        call, failure = min(failed, key=lambda item: (len(item[0].breaks), len(str(item[0]))))
        tally.failures.append({"call": call.to_json(), "shown": str(call), "failure": str(failure), "ended_by": type(error).__name__})
    finally:
        tally.seconds += time.perf_counter() - start
