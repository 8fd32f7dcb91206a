"""The command verify: what it runs, prints and writes, and its exit status. Cases are run by a stand-in here."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cute_mla.aot_build import staleness
from cute_mla.cli import commands, verify
from cute_mla.manifest import Manifest, Provenance
from cute_mla.runtime.artifacts import Artifacts
from cute_mla.runtime.errors import ArtifactError
from cute_mla.spec import combine
from cute_mla.spec.arch import ARCHS, Arch
from cute_mla.spec.kernel_ops import ARCHS_OF
from cute_mla.testing import runner
from cute_mla.testing import suite as suites
from cute_mla.testing.operations.dense_decode.case import DenseDecodeCase
from cute_mla.testing.processes import Work
from cute_mla.testing.runner import Record, Schedule, Target
from cute_mla.testing.suites.entries import SuiteEntry
from tests.support.kernel_entries import kernel_entry

WHOLE, REDUCED, SKIPPED = DenseDecodeCase(), DenseDecodeCase(batch=2), DenseDecodeCase(batch=3)
SUITE = [
    SuiteEntry(SKIPPED, "skipped", "large: not today"),
    SuiteEntry(WHOLE),
    SuiteEntry(REDUCED, "reduced", "batch 64 cut to 2: budget of 400 tiles"),
]

CASES = {op: suites.suite("quick", op, simulated=True)[0].case for op in suites.OPS}
SIMULATED = "sm90 and sm100 on the simulated device"
Job = tuple[DenseDecodeCase, Target, str]


def record_of(case: DenseDecodeCase, target: Target, passed: bool | None, **fields: Any) -> Record:
    status = fields.pop("status", "passed" if passed else "failed")
    figures: dict[str, Any] = {"out_max_abs": 1e-4, "out_cos_diff": 2e-7, "out_cos_limit": 5e-6, "lse_max_abs": 3e-6, "seconds": 0.5}
    if passed is None:
        figures = {}
    identity: dict[str, Any] = {"op": case.op, "arch": target.arch, "case": case.id, "config": "bf16_cluster1", "device": target.kind}
    schedule = fields.pop("schedule", "round_robin")
    return Record(
        **identity,
        schedule=schedule,
        seed=case.seed,
        sm_count=case.sm_count or 132,
        kernel_sha256="01",
        status=status,
        passed=passed,
        kernel=f"dense_decode_{target.arch}_bf16_cluster1",
        **{**figures, **fields},
    )


class StandIn:
    """Takes the place of the runner: every case passes, but for those whose id is in `failing`."""

    def __init__(self) -> None:
        self.failing: dict[str, dict[str, Any]] = {}
        self.jobs: list[Job] = []
        self.case_seconds = 0.0

    def run_all(self, jobs: Sequence[Job], on_start: Callable[[DenseDecodeCase], None], gpu: Work) -> Iterator[tuple[int, list[Record]]]:
        self.jobs, self.case_seconds = list(jobs), gpu.step_seconds
        for case, _, _ in jobs[:1]:
            on_start(case)
        for index in reversed(range(len(jobs))):
            case, target, reduced = jobs[index]
            fields = {"status": "reduced", "reason": reduced} if reduced else {}
            failure = self.failing.get(case.id)
            records = [record_of(case, target, failure is None, **{**fields, **(failure or {})}, schedule=str(s)) for s in target.schedules]
            yield index, records

    def skipped(self, case: DenseDecodeCase, target: Target, reason: str) -> Record:
        return record_of(case, target, None, status="skipped", reason=reason)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """No case is run, and the suite has three; no kernel is built."""
    monkeypatch.setattr(verify, "load_artifacts", lambda: Artifacts(Path("/built"), Manifest({})))
    stand_in = StandIn()
    monkeypatch.setattr(runner, "run_all", stand_in.run_all)
    monkeypatch.setattr(runner, "skipped", stand_in.skipped)
    served = ARCHS_OF["dense_prefill_backward"]
    monkeypatch.setattr(
        suites, "suite", lambda name, op, simulated, arch, seed: SUITE if op == "dense_decode" and arch in (None, *served) else []
    )
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return stand_in


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(commands, ["verify", *arguments])


def test_all_passed_is_success(stand_in: StandIn) -> None:
    result = invoke()
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert f"[0/4 done] running dense_decode {stand_in.jobs[0][0].id}" in result.stderr.splitlines()
    assert lines[-1] == f"PASSED: all 4 cases agree with the fp64 reference; {SIMULATED}; 0 s"
    header, row = lines[-3:-1]
    assert header.split() == ["op", "result", "cases", "reduced", "not", "run", "runs", "cos", "diff", "bound", "seconds"]
    assert row.split() == ["dense_decode", "passed", "4", "2", "2", "4", "2e-07", "5e-06", "2.0"]
    assert WHOLE.id not in result.stdout


def test_verbose_has_every_run_and_the_worst_errors(stand_in: StandIn) -> None:
    result = invoke("--verbose", "--schedules", "2")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert "2 not run: large: not today" in lines
    assert "2 reduced: budget of 400 tiles" in lines
    for arch in ("sm90", "sm100"):
        assert f"worst out max abs on {arch}, dense_decode: 1.00e-04 in {REDUCED.id}" in lines
        assert f"worst out cos diff on {arch}, dense_decode: 2.00e-07 of 5e-06 in {REDUCED.id}" in lines
    table = [line for line in lines if line.startswith(WHOLE.id)]
    assert [line.split()[:5] for line in table] == [
        [WHOLE.id, arch, "sim", schedule, "passed"] for arch in ("sm90", "sm100") for schedule in ("round_robin", "lazy")
    ]


def test_the_worst_max_logits_are_shown_where_there_are_any(stand_in: StandIn) -> None:
    assert "max_logits" not in invoke("--arch", "sm90", "-v").output
    stand_in.failing[WHOLE.id] = {"max_logits_max_abs": 0.25}
    assert f"worst max_logits max abs on sm90, dense_decode: 2.50e-01 in {WHOLE.id}" in invoke("--arch", "sm90", "-v").output.splitlines()


def test_one_failed_run_is_failure_and_is_explained(stand_in: StandIn) -> None:
    stand_in.failing[WHOLE.id] = {"reason": "out: wrong", "findings": ["deadlock", *"abcdef"]}
    result = invoke("--schedules", "1")
    assert result.exit_code == 1
    assert f"FAILED sm90 dense_decode {WHOLE.id}: out: wrong" in result.stderr.splitlines()  # at once
    lines = result.stdout.splitlines()
    assert lines[-1] == f"FAILED: 2 of 4 cases; {SIMULATED}; 0 s"
    assert lines[2].split()[:4] == ["dense_decode", "FAILED", "4", "2"]
    assert f"FAILED sm100 sim round_robin {WHOLE.id}: out: wrong" in lines
    where = lines.index(f"FAILED sm90 sim round_robin {WHOLE.id}: out: wrong")
    assert lines[where + 1 : where + 8] == [f"    {finding}" for finding in ("deadlock", *"abcdef")]  # all of them


@pytest.mark.parametrize("status", ["hung", "faulted", "died"])
def test_a_lost_case_is_failure_under_its_kernel(stand_in: StandIn, status: str) -> None:
    stand_in.failing[WHOLE.id] = {"status": status, "reason": "the text"}
    result = invoke("--arch", "sm90", "--schedules", "1")
    assert result.exit_code == 1
    assert f"{status.upper()} sm90 dense_decode {WHOLE.id}: the text" in result.stderr.splitlines()
    lines = result.stdout.splitlines()
    assert f"dense_decode_sm90_bf16_cluster1: 1 {status}, 1 not run, 1 passed" in lines
    assert f"{status.upper()} sm90 sim round_robin {WHOLE.id}: the text" in lines
    assert lines[-1].startswith("FAILED: 1 of 2 cases")


def test_records_are_written_as_they_come(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A killed run has lost those of the last seconds only."""
    file = tmp_path / "records.json"
    clock = itertools.count(0, 3)

    def run_all(*arguments: Any, **options: Any) -> Iterator[tuple[int, list[Record]]]:
        for number, result in enumerate(stand_in.run_all(*arguments, **options)):
            assert not number or len(json.loads(file.read_text())) == 2 * number + 2  # 2 are skipped from the beginning
            yield result

    monkeypatch.setattr(runner, "run_all", run_all)
    monkeypatch.setattr("cute_mla.cli.verify.time.monotonic", lambda: next(clock))
    assert invoke("--json", str(file), "--schedules", "2").exit_code == 0


def test_a_case_on_a_gpu_has_a_time_limit(stand_in: StandIn) -> None:
    invoke()
    assert stand_in.case_seconds == 20
    invoke("--case-seconds", "2.5")
    assert stand_in.case_seconds == 2.5


def test_a_failed_run_says_how_to_run_it_again(stand_in: StandIn) -> None:
    stand_in.failing[WHOLE.id] = {"reason": "out: wrong", "findings": ["a race"]}
    lines = invoke("--op", "dense_decode", "--schedules", "6", "--arch", "sm90").output.splitlines()
    (again,) = [line for line in lines if line.endswith("/lazy@1")]
    command = again.removeprefix("    again: cute-mla verify ")
    assert command == f"--op dense_decode --arch sm90 --device sim --suite smoke --seed 0 --replay {WHOLE.id}/lazy@1"
    invoke(*command.split())
    ((case, target, _),) = stand_in.jobs
    assert (case, target.arch, target.kind, [str(order) for order in target.schedules]) == (WHOLE, "sm90", "sim", ["lazy@1"])


def test_both_codes_run_under_every_schedule_and_a_replay_names_one(stand_in: StandIn) -> None:
    assert invoke("--schedules", "2", "--code", "both", "--arch", "sm90").exit_code == 0
    target = stand_in.jobs[0][1]
    assert [str(order) for order in target.schedules] == ["round_robin", "round_robin:sass", "lazy", "lazy:sass"]
    assert invoke("--replay", f"{WHOLE.id}/random@3:sass", "--arch", "sm90").exit_code == 0
    assert stand_in.jobs[0][1].schedules == (Schedule("random", 3, "sass"),)
    wrong = invoke("--replay", f"{WHOLE.id}/random@3:cuda")
    assert wrong.exit_code == 2
    assert "supported: round_robin, lazy, random, adversarial, each with or without @SEED, and :ptx or :sass" in " ".join(
        wrong.output.split()
    )


@pytest.mark.parametrize("suite", ["smoke", "full"])
def test_cases_of_a_kernel_run_under_two_schedules_in_turn(stand_in: StandIn, suite: str) -> None:
    invoke("--suite", suite)
    orders = {(case, target.arch): [str(order) for order in target.schedules] for case, target, _ in stand_in.jobs}
    assert [orders[case, "sm90"] for case in (WHOLE, REDUCED)] == [["round_robin"], ["lazy"]]  # a case that does not run takes no turn
    assert [orders[case, "sm100"] for case in (WHOLE, REDUCED)] == [["lazy"], ["round_robin"]]
    invoke("--suite", suite, "--code", "both", "--seed", "3", "--arch", "sm90")
    assert [[str(order) for order in target.schedules] for _, target, _ in stand_in.jobs] == [
        ["round_robin@3", "round_robin@3:sass"],
        ["lazy@3", "lazy@3:sass"],
    ]


def test_a_kernel_of_a_case_has_turns_of_its_own() -> None:
    cases = [DenseDecodeCase(h_q=h_q, batch=batch) for batch, h_q in ((1, 128), (1, 16), (2, 16), (2, 128), (3, 16))]
    orders = runner.schedules_in_turn(cases, ARCHS["sm90"], 0)
    assert [str(order) for (order,) in orders] == ["round_robin", "round_robin", "lazy", "lazy", "round_robin"]


def test_cases_of_the_quick_suite_run_under_both_schedules(stand_in: StandIn) -> None:
    invoke("--suite", "quick", "--arch", "sm90")
    assert [[str(order) for order in target.schedules] for _, target, _ in stand_in.jobs] == [["round_robin", "lazy"]] * 2


def test_a_case_alone_runs_under_both_schedules(stand_in: StandIn) -> None:
    invoke("--op", "dense_decode", "--arch", "sm100", "--replay", REDUCED.id)
    ((case, target, reduced),) = stand_in.jobs
    assert (case, reduced, len(target.schedules)) == (REDUCED, SUITE[2].reason, 2)


@pytest.mark.parametrize(
    ("replay", "said"),
    [
        ("b99", "has no case b99"),
        ("", "--replay: '' names no case; supported: the id of a case"),
        ("/", "--replay: '/' names no case"),
        (f"{WHOLE.id}/", "schedule is ''; supported: round_robin"),
        (f"{WHOLE.id}/fast", "schedule is 'fast'; supported: round_robin"),
        (f"{WHOLE.id}/lazy@x", "'lazy@x'"),
    ],
)
def test_what_cannot_be_replayed(stand_in: StandIn, replay: str, said: str) -> None:
    result = invoke("--op", "dense_decode", "--replay", replay)
    assert result.exit_code == 2
    assert said in result.stderr
    assert stand_in.jobs == []


def test_a_sample_is_drawn_by_its_text_alone(stand_in: StandIn) -> None:
    def jobs(*arguments: str) -> list[Job]:
        result = invoke("--code", "both", *arguments)
        assert result.exit_code == 0
        again = "2 of 4 cases; again: cute-mla verify --arch all --device auto --suite smoke --code both --sample "
        assert not arguments or again + arguments[1] in result.stdout
        return stand_in.jobs

    whole, drawn = jobs(), jobs("--sample", "2@abc")
    assert len(drawn) == 2
    assert [job for job in whole if job in drawn] == drawn  # under the schedules of the whole suite
    assert jobs("--sample", "2@abc") == drawn
    assert any(jobs("--sample", f"2@{text}") != drawn for text in range(20))


def test_a_reduced_case_can_fail(stand_in: StandIn) -> None:
    stand_in.failing[REDUCED.id] = {}
    result = invoke()
    assert result.exit_code == 1
    assert result.output.splitlines()[-1] == f"FAILED: 2 of 4 cases; {SIMULATED}; 0 s"


def test_nothing_run_is_failure(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "suite", lambda name, op, simulated, arch, seed: SUITE[:1])
    result = invoke()
    assert result.exit_code == 1
    assert result.output.splitlines()[-1] == "FAILED: no case ran; 0 s"


def test_a_gpu_that_is_not_there_is_failure(stand_in: StandIn) -> None:
    result = invoke("--device", "cuda")
    assert result.exit_code == 1
    assert "sm90: no GPU of compute capability 9.0 here, nothing is run" in result.stderr
    assert "sm100: no GPU of compute capability 10.0 or 10.3 here, nothing is run" in result.stderr
    assert result.stdout.splitlines()[-1] == "FAILED: no case ran; 0 s"


@pytest.mark.parametrize(
    ("capability", "kinds"),
    [
        ((9, 0), {"sm90": "cuda", "sm100": "sim"}),
        ((10, 0), {"sm90": "sim", "sm100": "cuda"}),
        ((10, 3), {"sm90": "sim", "sm100": "cuda"}),
        ((12, 0), {"sm90": "sim", "sm100": "sim"}),
    ],
)
def test_auto_takes_a_gpu_for_the_architecture_that_it_matches(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], kinds: dict[str, str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    result = invoke()
    assert result.exit_code == 0
    assert {(target.arch, target.kind) for _, target, _ in stand_in.jobs} == set(kinds.items())
    devices = {"sim": "the simulated device", "cuda": "a GPU"}
    where = ", ".join(f"{arch} on {devices[kind]}" for arch, kind in kinds.items())
    if len(set(kinds.values())) == 1:
        where = SIMULATED
    assert result.output.splitlines()[-1] == f"PASSED: all 4 cases agree with the fp64 reference; {where}; 0 s"


def test_a_gpu_that_is_asked_for_runs_its_architecture_alone(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (10, 3))
    result = invoke("--device", "cuda")
    assert result.exit_code == 0
    assert {(target.arch, target.kind) for _, target, _ in stand_in.jobs} == {("sm100", "cuda")}
    assert "sm90: no GPU of compute capability 9.0 here" in result.stderr


WRONG = [
    ("--suite", "huge"),
    ("--device", "tpu"),
    ("--arch", "sm80"),
    ("--op", "x"),
    ("--schedules", "0"),
    ("--seed", "-1"),
    *(("--case-seconds", value) for value in ("0", "-1", "nan", "inf", "x")),
    ("--sample", "0"),
    ("--sample", "x"),
    ("--sample", "1", "--replay", WHOLE.id),
    ("more",),
]
WRONG += [("--seed", str(1 << 32)), ("--schedules", "1000000000000"), ("--seed", "nan")]


@pytest.mark.parametrize("arguments", WRONG)
def test_wrong_usage(stand_in: StandIn, arguments: tuple[str, ...]) -> None:
    assert invoke(*arguments).exit_code == 2


def test_options_reach_suite_and_target(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def suite(name: str, op: str, simulated: bool, arch: Arch, seed: int) -> list[SuiteEntry]:
        asked.append((name, op, simulated, seed))
        return SUITE

    monkeypatch.setattr(suites, "suite", suite)
    invoke("--suite", "full", "--seed", "7", "--schedules", "5", "--arch", "sm90", "--op", "dense_decode", "--device", "sim")
    assert asked == [("full", "dense_decode", True, 7)]
    target = stand_in.jobs[0][1]
    assert [str(s) for s in target.schedules] == ["round_robin@7", "lazy@7", "random@7", "adversarial@7", "round_robin@8"]


def test_all_ops_run_unless_some_are_named(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    of_op: dict[str, list[SuiteEntry[Any]]] = {op: [SuiteEntry(CASES[op])] for op in verify.OPS}
    of_op["sparse_decode"].append(SuiteEntry(replace(CASES["sparse_decode"], batch=2)))
    monkeypatch.setattr(suites, "suite", lambda name, op, simulated, arch, seed: of_op[op])
    every = [op for op in verify.OPS for _ in of_op[op]]
    both = ("--op", "sparse_prefill", "--op", "sparse_decode")
    chosen = {(): every, ("--op", "all"): every, ("--op", "sparse_decode"): every[1:3], both[:2]: every[3:4], both: every[1:4]}
    for arguments, ops in chosen.items():
        result = invoke("--arch", "sm90", *arguments)
        assert result.exit_code == 0, result.output
        assert [case.op for case, _, _ in stand_in.jobs] == ops
        passed = "1 case agrees" if len(ops) == 1 else f"all {len(ops)} cases agree"
        assert result.output.splitlines()[-1] == f"PASSED: {passed} with the fp64 reference; sm90 on the simulated device; 0 s"
    invoke("--arch", "sm100")
    assert [case.op for case, _, _ in stand_in.jobs] == every


def test_json_holds_every_record_in_the_suites_order(stand_in: StandIn, tmp_path: Path) -> None:
    stand_in.failing[WHOLE.id] = {"out_max_abs": float("inf"), "out_cos_diff": float("nan"), "findings": ["a race"]}
    file = tmp_path / "records.json"
    result = invoke("--json", str(file), "--schedules", "1")
    assert result.exit_code == 1
    both = json.loads(file.read_text())
    assert [(entry["arch"], entry["case"]) for entry in both] == [
        (arch, case.id) for arch in ("sm90", "sm100") for case in (SKIPPED, WHOLE, REDUCED)
    ]
    entries = both[:3]
    assert list(entries[0]) == [
        *("op", "arch", "case", "config", "device", "schedule", "seed", "sm_count", "kernel_sha256", "status", "reason", "passed"),
        *("out_max_abs", "out_cos_diff", "out_cos_limit", "lse_max_abs", "max_logits_max_abs", "lse_indexer_max_abs"),
        *("findings", "seconds", "code", "kernel"),
    ]
    assert [entry["status"] for entry in entries] == ["skipped", "failed", "reduced"]
    assert [entry["passed"] for entry in entries] == [None, False, True]
    assert (entries[1]["out_max_abs"], entries[1]["out_cos_diff"], entries[1]["findings"]) == (None, None, ["a race"])
    assert list(tmp_path.iterdir()) == [file]


def test_json_replaces_no_device_and_no_pipe(stand_in: StandIn, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    result = invoke("--json", str(pipe))
    assert result.exit_code == 2
    assert f"{pipe} is no regular file" in result.stderr
    assert pipe.is_fifo()
    assert stand_in.jobs == []


@pytest.mark.parametrize("place", ["a folder", "inside a file", "no folder"])
def test_json_is_checked_before_anything_runs(stand_in: StandIn, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    file = {"a folder": tmp_path, "inside a file": tmp_path / "file" / "x.json", "no folder": tmp_path / "none" / "x.json"}[place]
    result = invoke("--json", str(file))
    assert result.exit_code == 2
    assert str(file) in result.stderr
    assert stand_in.jobs == []


def test_an_interruption_keeps_what_was_done(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    closed = []

    def interrupted(*arguments: Any, **options: Any) -> Iterator[tuple[int, list[Record]]]:
        try:
            yield next(stand_in.run_all(*arguments, **options))
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    monkeypatch.setattr(runner, "run_all", interrupted)
    file = tmp_path / "records.json"
    result = invoke("--json", str(file))
    assert result.exit_code == 130
    assert closed == [True]
    assert {entry["case"] for entry in json.loads(file.read_text())} == {SKIPPED.id, REDUCED.id}
    assert result.stdout.splitlines()[-1] == "INTERRUPTED: 1 of 6 cases ran, 0 failed; sm100 on the simulated device; 0 s"


def test_the_list_runs_nothing_and_needs_no_kernels(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Artifacts:
        raise ArtifactError("no manifest.json")

    monkeypatch.setattr(verify, "load_artifacts", missing)
    result = invoke("--list")
    assert result.exit_code == 0
    assert stand_in.jobs == []
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["op", "case", "tiles", "runs", "where"]
    assert lines[2].split() == ["dense_decode", WHOLE.id, str(WHOLE.tiles), "whole", "sm90", "on", "sim,", "sm100", "on", "sim"]
    assert "skipped: large: not today" in lines[1]
    assert lines[-1] == "3 cases"


def test_a_misspelt_case_gets_the_nearest_ones(stand_in: StandIn) -> None:
    result = invoke("--replay", f"{WHOLE.id}x")
    assert result.exit_code == 2
    assert f"did you mean {WHOLE.id}" in result.stderr


def test_kernels_of_other_sources_are_not_verified(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staleness, "changed_kernels", lambda manifest, archs: [f"kernel{number}_{archs[0]}" for number in range(7)])
    result = invoke("--arch", "sm90")
    assert result.exit_code == 1
    names = ", ".join(f"kernel{number}_sm90" for number in range(5))
    said = f"7 of the built kernels have other sources than this tree: {names} and 2 more"
    assert result.stderr == f"Error: {said}; build them again with `cute-mla build`, or go on with --stale-ok\n"
    assert stand_in.jobs == []
    result = invoke("--arch", "sm90", "--stale-ok")
    assert result.exit_code == 0
    assert f"warning: {said}" in result.stderr


def test_kernels_that_are_not_built_are_one_line(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Artifacts:
        raise ArtifactError("no manifest.json: build the kernels with `cute-mla build`")

    monkeypatch.setattr(verify, "load_artifacts", missing)
    result = invoke()
    assert result.exit_code == 1
    assert result.stderr == "Error: no manifest.json: build the kernels with `cute-mla build`\n"


def test_it_says_what_is_about_to_run(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke().stdout.startswith("0 kernels in /built, built in place: the sha256 of every file is the manifest's\n")
    provenance = Provenance("0.1.0", "a" * 40, False, {}, "b" * 64)
    monkeypatch.setattr(verify, "load_artifacts", lambda: Artifacts(Path("/wheel"), Manifest({}), provenance))
    monkeypatch.setattr(Artifacts, "damages", lambda self: [])
    assert invoke().stdout.startswith(f"0 kernels in /wheel, from commit {'a' * 40} with local changes: ")


@pytest.mark.parametrize("damaged", ["cubin", "ptx"])
def test_a_damaged_artefact_is_failure_and_cases_run(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, damaged: str
) -> None:
    ptx = b"// not PTX"
    cubin = b"\x7fELF" + bytes(4) + b"\x08" + bytes(9) + b"\xbe\x00" + bytes(29) + b"\x5a" + bytes(14)
    hashes: dict[str, Any] = {f"{kind}_sha256": hashlib.sha256(content).hexdigest() for kind, content in (("cubin", cubin), ("ptx", ptx))}
    entry = kernel_entry("combine", "sm90", "bf16", params=combine.PARAMS, **hashes)
    (tmp_path / entry.cubin).write_bytes(cubin)
    (tmp_path / entry.ptx).write_bytes(ptx)
    monkeypatch.setattr(verify, "load_artifacts", lambda: Artifacts(tmp_path, Manifest({entry.name: entry})))
    assert invoke("--stale-ok").exit_code == 0
    stand_in.jobs = []
    file = tmp_path / f"{entry.name}.{damaged}"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    result = invoke("--stale-ok")
    assert result.exit_code == 1
    assert f"DAMAGED {file} is damaged: sha256" in result.stderr
    assert len(stand_in.jobs) == 4
    assert result.stdout.startswith(f"1 kernels in {tmp_path}, built in place: 1 damaged\n")
    assert result.stdout.splitlines()[-1] == f"FAILED: 0 of 4 cases, 1 damaged artefacts; {SIMULATED}; 0 s"


def test_names_agree_with_the_suites() -> None:
    assert verify.SUITES == suites.SUITES
    assert verify.OPS == suites.OPS
