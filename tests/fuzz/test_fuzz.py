"""A fixed sample of calls at random, and that the judge notices what is wrong.

`make test` draws for a third of the functions, `make test-full` for all of them; `make fuzz` draws many more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import cute_mla
from cute_mla.spec.arch import ARCHS
from cute_mla.testing.operations.dense_decode.case import DenseDecodeCase
from cute_mla.testing.operations.dense_prefill.case import DensePrefillCase
from cute_mla.testing.operations.dense_prefill_backward.case import DensePrefillBackwardCase
from cute_mla.testing.operations.index_write.case import IndexWriteCase
from cute_mla.testing.operations.merge_states.case import MergeStatesCase
from tests.fuzz import judging
from tests.fuzz.calls import Break, CacheCase, FuzzCall, Setting
from tests.fuzz.campaign import Share, Tally, run, shares
from tests.fuzz.contract import bytes_of, share_memory
from tests.fuzz.judging import SUBJECTS, Failure, judge, pattern

SETTING = Setting("sm90")
RIGHT = FuzzCall("merge_states", MergeStatesCase(tokens=3, form="stacked"), SETTING)
BROKEN = replace(RIGHT, breaks=(Break("outs", "dtype", 0),))
KERNELS = ("dense_decode", "sparse_decode", "sparse_prefill", "dense_prefill")


@pytest.mark.parametrize("subject", [pytest.param(each, marks=[pytest.mark.slow] if i % 3 else []) for i, each in enumerate(SUBJECTS)])
def test_a_sample_does_what_is_documented(subject: str) -> None:
    arch = list(ARCHS)[list(SUBJECTS).index(subject) % 2]  # sm120 does not serve all of them
    tally = Tally()
    run(Share(subject, arch, broken=True, count=15, seed=1), tally)
    run(Share(subject, arch, broken=False, count=1 if subject in KERNELS else 4, seed=2), tally)
    assert not tally.failures
    assert tally.right
    assert tally.refused


@pytest.mark.parametrize(
    "call",
    [
        FuzzCall("dense_prefill_kvpacked", DensePrefillCase(lengths=((0, 0),), d_qk=256), SETTING),
        FuzzCall("dense_prefill_backward", DensePrefillBackwardCase(lengths=((0, 0), (1, 0)), neighbours="nan"), SETTING),
        FuzzCall("write_index_cache", IndexWriteCase(), SETTING, (Break("scale_format", "array", 1),)),
    ],
    ids=lambda call: call.subject,
)
def test_the_judge_knows_what_a_call_does(call: FuzzCall) -> None:
    assert judge(call).kind == ("refused" if call.breaks else "returned")


def test_a_call_is_written_down_and_made_again() -> None:
    for call in (RIGHT, BROKEN, FuzzCall("quantise_cache", CacheCase(given=True), Setting("sm100", 3, "lazy", 4), again=True)):
        assert FuzzCall.from_json(call.to_json()) == call
        assert judge(call).kind == ("refused" if call.breaks else "returned")


def planted(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> None:
    """Put a function in merge_states' place."""
    monkeypatch.setitem(judging.SUBJECTS, "merge_states", replace(SUBJECTS["merge_states"], function=function))


def refusing(error: Exception) -> Callable[..., Any]:
    """Return a function that raises."""

    def function(**arguments: Any) -> Any:
        raise error

    return function


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TypeError("outs has dtype torch.float32; supported: torch.bfloat16"), "TypeError instead of ValueError"),
        (UnicodeError("outs has dtype torch.float32; supported: torch.bfloat16"), "UnicodeError instead of ValueError"),
        (ValueError("outs has dtype torch.float32"), "does not say what is supported"),
        (ValueError("something has dtype torch.float32; supported: torch.bfloat16"), "names none of"),
    ],
)
def test_errors_that_are_not_the_documented_ones(monkeypatch: pytest.MonkeyPatch, error: Exception, said: str) -> None:
    planted(monkeypatch, refusing(error))
    with pytest.raises(Failure, match=said):
        judge(BROKEN)


def test_a_wrong_call_that_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, lambda **arguments: (arguments["outs"][0], arguments["lses"][0]))
    with pytest.raises(Failure, match="accepted, though at fault"):
        judge(BROKEN)


def test_a_right_call_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, refusing(ValueError("outs is wrong; supported: others")))
    with pytest.raises(Failure, match="ValueError, though nothing is at fault"):
        judge(RIGHT)


def merged(change: Callable[[dict[str, Any], torch.Tensor], None]) -> Callable[..., Any]:
    """merge_states, but for a change: of its arguments or its result."""

    def function(**arguments: Any) -> Any:
        out, lse = cute_mla.merge_states(**arguments)
        change(arguments, out)
        return out, lse

    return function


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda arguments, out: out[0, 0, 0].add_(0.1), "out: 1 of 4608 elements out of bounds"),
        (lambda arguments, out: out[1, 2, 3].fill_(float("nan")), "out: 1 misplaced NaN"),
        (lambda arguments, out: arguments["lses"].add_(1), "memory that is not a result's was written"),
    ],
)
def test_wrong_results(monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any], torch.Tensor], None], said: str) -> None:
    planted(monkeypatch, merged(change))
    with pytest.raises(Failure, match=said):
        judge(RIGHT)


def test_other_bits_the_second_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def change(arguments: dict[str, Any], out: torch.Tensor) -> None:
        made.append(1)
        out[0, 0, 0].mul_(1 + 2.0**-8 * (len(made) - 1))

    planted(monkeypatch, merged(change))
    with pytest.raises(Failure, match="other bits when made again"):
        judge(replace(RIGHT, again=True))


def test_a_broken_call_that_passes_for_the_right_one_made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []

    def forgetful(**arguments: Any) -> Any:
        if not kept:
            kept.append(cute_mla.merge_states(**arguments))
        return kept[0]

    planted(monkeypatch, forgetful)
    with pytest.raises(Failure, match="accepted, though at fault"):
        judge(replace(BROKEN, again=True))


@pytest.mark.parametrize("argument", ["q", "lse"])
def test_a_nested_tensor_where_a_call_was_kept(argument: str) -> None:
    """Torch's own comparison of tensors would end the process."""
    call = FuzzCall(
        "dense_decode", DenseDecodeCase(h_q=3, lengths=(5,), outputs="given"), SETTING, (Break(argument, "layout", 6),), again=True
    )
    assert judge(call).kind == "refused"


def test_a_failure_is_made_small_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, refusing(KeyError("x")))
    tally = Tally()
    run(Share("merge_states", "sm90", broken=False, count=20, seed=0), tally)
    (failure,) = tally.failures
    assert "KeyError" in failure["failure"]
    assert FuzzCall.from_json(failure["call"]).subject == "merge_states"


def test_shares_are_of_every_subject_on_every_architecture() -> None:
    split = list(shares(2000, 7, 0.1, tuple(SUBJECTS)))
    assert {(share.subject, share.arch, share.broken) for share in split} == {
        (s, a, b) for s in SUBJECTS for a in ARCHS for b in (True, False)
    }
    assert sum(share.count for share in split) >= 2000
    assert len({share.seed for share in split}) == len(split)


def test_memory_in_common_is_found_byte_by_byte() -> None:
    both = torch.zeros(3, 8)
    assert not share_memory(both[:, :4], both[:, 4:])
    assert share_memory(both[:, :5], both[:, 4:])
    assert len(bytes_of(both[:, :3])) == 36


def test_patterns_of_messages() -> None:
    one, other = (pattern(f"q has shape [{n}, 1]; supported: 1 to {n}") for n in (3, 40))
    assert one == other == "q has shape [_]; supported: # to #"
