"""Children that hang, die, fault, answer late: each costs its own request, within its time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cute_mla.profiles.measure.children import CUT, DIED, FAULTED, HUNG, START, Child, Lost, Make
from tests.profiles.child_scripts import dying, scripted, unable
from tests.support.tree import ROOT

STEP_S = 1.0


@pytest.fixture
def child() -> Iterator[Child]:
    """Return a child that does as it is told."""
    with Child(scripted) as made:
        yield made


def asked(child: Child, request: str, seconds: float = 30.0) -> Any:
    answer = child.ask(request, STEP_S, seconds)
    return answer if isinstance(answer, Lost) else answer["answer"]


LOSSES = {
    "hang": Lost(HUNG, "second", "no end within 1 s"),
    "late 2": Lost(HUNG, "second", "no end within 1 s"),
    "exit": Lost(DIED, "second", "ended with status 7"),
    "kill": Lost(DIED, "second", "ended by signal 9"),
    "sticky": Lost(FAULTED, "second", "RuntimeError: CUDA error: an illegal memory access"),
}


@pytest.mark.parametrize("request_", LOSSES)
def test_what_is_lost_costs_itself(child: Child, request_: str) -> None:
    """Lost at the beginning, twice in a row, and at the end; the requests between are answered by a fresh process."""
    assert [asked(child, request) for request in (request_, "say a", request_, request_, "say b", request_)] == [
        LOSSES[request_], "a", LOSSES[request_], LOSSES[request_], "b", LOSSES[request_],
    ]  # fmt: skip


def test_a_process_answers_many_requests(child: Child) -> None:
    first, second = (child.ask("say a", STEP_S, 30.0)["pid"] for _ in range(2))
    assert first == second != os.getpid()


def test_limits_hold(child: Child) -> None:
    assert asked(child, "steps x") == "x"  # 1.8 s: the limit is that of a step
    begin = time.monotonic()
    assert asked(child, "hang").status == HUNG
    assert time.monotonic() - begin < STEP_S + 2
    assert asked(child, "say a") == "a"
    begin = time.monotonic()
    assert asked(child, "steps x", 0.5) == Lost(CUT, "another", "its time was over")
    assert time.monotonic() - begin < 2.5
    assert asked(child, "say a", 0.0) == Lost(CUT, START, "its time was over")


@pytest.mark.parametrize(
    ("make", "lost"),
    [(unable, Lost(FAULTED, START, "RuntimeError: no GPU")), (dying, Lost(DIED, START, "ended with status 3"))],
)
def test_a_start_may_fail(make: Make, lost: Lost) -> None:
    with Child(make) as child:
        assert [child.ask("say a", STEP_S, 30.0) for _ in range(2)] == [lost, lost]


def test_a_process_that_dies_between_requests_costs_none(child: Child) -> None:
    pid = child.ask("say a", STEP_S, 30.0)["pid"]
    os.kill(pid, 9)
    time.sleep(0.3)
    assert asked(child, "say b") == "b"


def test_nothing_is_left_running(child: Child) -> None:
    pid = child.ask("say a", STEP_S, 30.0)["pid"]
    child.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


PARENT = """
import signal

from cute_mla.profiles.measure.children import Child
from tests.profiles.child_scripts import scripted

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has jobs in the background ignore it
    with Child(scripted) as child:
        print(child.ask("say a", 5.0, 30.0)["pid"], flush=True)
        child.ask("hang", 30.0, 30.0)
"""


@pytest.mark.parametrize("whole_group", [True, False], ids=["Ctrl-C", "only the parent is killed"])
def test_a_child_that_hangs_ends_with_its_parent(tmp_path: Path, whole_group: bool) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    command = [sys.executable, str(tmp_path / "parent.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment, process_group=0
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        time.sleep(0.2)
        begin = time.monotonic()
        if whole_group:
            os.killpg(parent.pid, signal.SIGINT)
        else:
            parent.kill()
        parent.wait(5)
        while Path(f"/proc/{pid}").exists() and time.monotonic() - begin < 5:
            time.sleep(0.02)
        assert time.monotonic() - begin < 2
