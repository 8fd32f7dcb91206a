"""Cases spread over processes: the real runner, device and kernels, and what happens without kernels."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from cute_mla.manifest import MANIFEST_NAME, Manifest
from cute_mla.runtime.artifacts import FOLDER_VARIABLE, load_artifacts
from cute_mla.testing.cases.base import BaseCase
from cute_mla.testing.operations.dense_decode.case import DenseDecodeCase
from cute_mla.testing.processes import Work, prepared
from cute_mla.testing.runner import Job, Record, Target, run_all, schedules, skipped, start_worker
from tests.support.tree import ROOT

SMALL = DenseDecodeCase(s_k=20, h_q=4, sm_count=1)
LARGE = DenseDecodeCase("fp16", batch=2, s_k=100, h_q=4, outputs="strided", sm_count=2)


def test_every_job_comes_back_under_its_index() -> None:
    target = Target("sm90", "sim", schedules(2, 0))
    results = dict(run_all([(SMALL, target, ""), (LARGE, target, "cut")], workers=2))
    assert sorted(results) == [0, 1]
    assert [(record.case, record.schedule, record.status) for record in results[0]] == [
        (SMALL.id, "round_robin", "passed"),
        (SMALL.id, "lazy", "passed"),
    ]
    assert [(record.case, record.status, record.passed) for record in results[1]] == [(LARGE.id, "reduced", True)] * 2


def test_each_case_is_named_as_it_starts() -> None:
    started: list[BaseCase] = []
    list(run_all([(SMALL, Target("sm90", "sim"), ""), (LARGE, Target("sm90", "sim"), "")], workers=1, on_start=started.append))
    assert started == [LARGE, SMALL]


def hang_with_four_heads(job: Job) -> tuple[list[Record], bool]:
    """Take the place of a kernel that never returns, beside one that answers."""
    case, target, _ = job
    if isinstance(case, DenseDecodeCase) and case.h_q == 4 and case.dtype == "fp16":
        time.sleep(600)
    return [skipped(case, replace(target, kind="sim"), "a stand-in")], True


def test_a_kernel_that_hangs_on_a_gpu_is_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: SimpleNamespace(multi_processor_count=114))
    work = Work(partial(prepared, start_worker, hang_with_four_heads), step_seconds=0.5, start_seconds=60)
    jobs: list[Job] = [(LARGE, Target("sm90", "cuda"), ""), (SMALL, Target("sm90", "cuda"), "")]
    results = dict(run_all(jobs, gpu=work))
    assert results[1][0].reason == "a stand-in"
    (record,) = results[0]
    assert (record.status, record.passed, record.reason) == ("hung", False, "no answer within 0.5 s")
    assert (record.kernel, record.case, record.device, record.sm_count) == ("dense_decode_sm90_fp16_cluster1", LARGE.id, "cuda", 114)


# To the whole process group, as a terminal does: in the middle of the case, or between the start of the worker and the next case.
AFTER_SECONDS = "    threading.Timer(5, os.killpg, (0, signal.SIGINT)).start()\n"
IN_THE_START = (
    "    launch = Popen._launch\n"
    "    def launched(self, process):\n"
    "        os.killpg(0, signal.SIGINT)\n"
    "        launch(self, process)\n"
    "        os.killpg(0, signal.SIGINT)\n"
    "    Popen._launch = launched\n"
)


@pytest.mark.parametrize("interrupt", [AFTER_SECONDS, IN_THE_START], ids=["in the case", "in the start of the worker"])
def test_an_interruption_ends_the_workers_at_once(interrupt: str) -> None:
    """A case that would take minutes is cut off; what had ended before is there."""
    program = (
        "import os, signal, threading\n"
        "from multiprocessing.popen_spawn_posix import Popen\n"
        "from cute_mla.testing.operations.dense_decode.case import DenseDecodeCase\n"
        "from cute_mla.testing.runner import Target, run_all\n"
        "def interrupt(case):\n"
        "    print('started', flush=True)\n"
        f"{interrupt}"
        "if __name__ == '__main__':\n"
        "    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts jobs in the background with the signal ignored\n"
        "    long = DenseDecodeCase(batch=4, s_k=100_000, h_q=128, sm_count=1)\n"
        "    try:\n"
        "        list(run_all([(long, Target('sm90', 'sim'), '')], workers=1, on_start=interrupt))\n"
        "    except KeyboardInterrupt:\n"
        "        print('interrupted')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120, start_new_session=True
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "started\ninterrupted\n", "")


def test_a_kernel_that_is_missing_or_damaged_fails_its_case_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built, missing, damaged = load_artifacts(), "dense_decode_sm90_bf16_cluster1", "dense_decode_sm100_fp16_cluster2"
    for path in built.folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    for name in (MANIFEST_NAME, f"{damaged}.ptx"):
        (tmp_path / name).unlink()
    (tmp_path / f"{damaged}.ptx").write_text("// another\n")
    Manifest({name: entry for name, entry in built.manifest.kernels.items() if name != missing}).save(tmp_path)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    jobs = [(SMALL, Target("sm90", "sim"), ""), (LARGE, Target("sm90", "sim"), ""), (LARGE, Target("sm100", "sim", schedules(2, 0)), "")]
    results = dict(run_all(jobs, workers=1))
    ((first,), (second,), third) = (results[index] for index in range(3))
    assert (first.passed, first.kernel_sha256, second.passed) == (False, "", True)
    assert f"found no kernel {missing} among the " in first.reason
    assert "; nearest: dense_decode_sm90_" in first.reason
    assert f"`cute-mla build --kernel {missing}`" in first.reason
    assert [record.passed for record in third] == [False, False]
    assert f"{damaged}.ptx is damaged" in third[0].reason
    assert f"`cute-mla build --kernel {damaged}`" in third[0].reason
