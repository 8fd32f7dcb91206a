"""Waits that never end, and warps whose lanes have parted: the clock times them one path after the other, or refuses them by name."""

from __future__ import annotations

import pytest

from cute_mla.profiles.clock import kernel
from cute_mla.profiles.clock.engine import StandstillError
from tests.profiles.clock.timed import BARRIERS, H100, WARM, Edit, Timed, arrive, executed, timed, wait, words
from tests.simulator.barrier_kernels import PLACES, converging
from tests.simulator.small_kernels import Kernel

INITIALISED = BARRIERS.format(count=16)
ONE_WARP = INITIALISED + "@%p21 bra END;\n"
STORE, END = "st.global.u32 [%rd2], %r0;\n", "END: bar.warp.sync -1;\n"
ONCE = "mbarrier.try_wait.parity.shared.b64 %p22, [{}], 0; selp.u32 %r105, 1, 2, %p22; st.global.u32 [%rd2], %r105;\n"
OF_LANES = "and.b32 %r3, %r0, 1; mad.lo.u32 %r3, %r3, 8, %r100; setp.lt.u32 %p1, %r0, 16;\n@%p1 mbarrier.arrive.shared.b64 %rd9, [%r100];\n"
CHAIN = "ex2.approx.ftz.f32 %f1, %f1;\n"


def polled(loop: str) -> str:
    """Return a loop that waits as one that tests."""
    return loop.replace("try_wait", "test_wait")


def refusal(body: str, threads: int = 64) -> str:
    """Run a kernel that cannot be timed. Return what execution found, and what the clock says."""
    clock, _, report = executed(Kernel(body, threads=threads, smem=64), words(threads), setting=WARM, of=H100, edit=str)
    with pytest.raises(StandstillError) as caught:
        clock.result()
    return "; ".join([*map(str, report.findings), str(caught.value)])


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (ONE_WARP + wait("A", 0, 0) + STORE, "deadlock: warp 0 waits for smem+0x0 "),
        (ONE_WARP + ONCE.format("%r100"), "after a time that is not known: warp 0 waits for smem+0x0 (phase 0, 16 "),
        (ONE_WARP + polled(wait("A", 0, 0)) + STORE, "waits for the answer whether a phase of smem+0x0 is complete"),
        (ONE_WARP + OF_LANES + ONCE.format("%r3"), "waits for mbarrier; CTA 0 mbarrier 0x408 lacks 16 of 16 arrivals and 0 bytes in"),
    ],
    ids=["loop", "once", "test", "of other lanes"],
)  # fmt: skip
def test_a_phase_that_never_comes_is_named(body: str, named: str) -> None:
    found = refusal(body + END)
    assert named in found
    assert "CTA 0 warp 1" not in found  # which has ended


def test_a_warp_that_polls_while_another_works_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "MOST_TESTS", 20)
    work = f"mov.u32 %r3, 0; ld.global.f32 %f1, [%rd2]; MORE: {CHAIN * 10} add.u32 %r3, %r3, 1; setp.lt.u32 %p1, %r3, 300; @%p1 bra MORE;"
    second = f"SECOND: {work} st.global.f32 [%rd2], %f1; setp.ge.u32 %p1, %r0, 48; @%p1 bra END; {arrive(0)}"
    run = timed(Kernel(f"{INITIALISED} @%p21 bra SECOND; {polled(wait('A', 0, 0))} {STORE} bra END; {second} {END}", 64, 64), words(64))
    assert len(run.issues("SYNCS.PHASECHK")) > 1_000  # a result takes 18 clocks
    assert 3_000 * H100.mufu_latency < run.result.end < 4_000 * H100.mufu_latency


def parted(even: int, odd: int) -> Timed:
    """Run a warp whose lanes with an even number there do 20 logarithms, the others 10 exponentials."""
    body = f"""ld.global.u32 %r1, [%rd2]; ld.global.f32 %f1, [%rd2]; setp.eq.u32 %p1, %r1, 0; @%p1 bra EVEN;
    {CHAIN * 10} st.global.f32 [%rd2], %f1; bra END;
    EVEN: {CHAIN.replace("ex2", "lg2") * 20} st.global.f32 [%rd2], %f1; {END} st.global.u32 [%rd2+128], %r0;"""
    given = words(64)
    given[:32:2], given[1:32:2] = even, odd
    return timed(Kernel(body), given)


def test_lanes_that_part_take_one_path_after_the_other() -> None:
    both, logarithms, exponentials = parted(0, 1), parted(0, 0), parted(1, 1)
    assert [len(run.issues("MUFU")) for run in (both, logarithms, exponentials)] == [30, 20, 10]
    paths = [[span.start for span in both.spans("0") if f"MUFU.{name}" in both.code[span.address].opcode] for name in ("LG2", "EX2")]
    first, second = sorted(paths)
    assert max(first) < min(second)
    more = both.result.end - max(logarithms.result.end, exponentials.result.end)
    assert more >= 10 * H100.mufu_latency


def halves(low: str, high: str, other: str = "") -> str:
    """Return a kernel whose first warp parts: its low and its high lanes do these, and half of another warp something else."""
    body = f"setp.ge.u32 %p1, %r0, 16; @%p1 bra HIGH; {low} {STORE} bra END; HIGH: {high} {STORE} bra END;"
    return f"{INITIALISED} @%p21 bra OTHER; {body} OTHER: setp.ge.u32 %p2, %r0, 48; @%p2 bra END; {other} {END}"


def test_lanes_wait_while_others_of_their_warp_go_on() -> None:
    """The low lanes wait for the high ones, and these for another warp: a clock that kept the order of issue would stand still."""
    run = timed(Kernel(halves(wait("A", 0, 0), wait("B", 8, 0) + arrive(0), arrive(8)), 64, 64), words(64))
    (handed,), (arrived,) = run.issues("SYNCS.ARRIVE"), run.issues("SYNCS.ARRIVE", 1)
    assert handed > arrived + H100.arrive_latency + H100.phase_latency
    assert run.result.end > handed + H100.arrive_latency + H100.phase_latency


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (halves(polled(wait("A", 0, 0)), polled(wait("B", 8, 0)) + arrive(0), arrive(8)), "parted test phases, both before one has"),
        (halves(wait("A", 0, 0), polled(wait("B", 8, 0)) + arrive(0), arrive(8)), "lanes of a warp wait apart at 0x"),
    ],
)
def test_parted_lanes_that_test_phases_are_refused(body: str, named: str) -> None:
    assert named in refusal(body)


@pytest.mark.parametrize(("name", "edit"), [("BRA.DIV", str), ("BRA.CONV", converging)])
def test_a_warp_comes_to_a_barrier_with_its_last_lanes(name: str, edit: Edit) -> None:
    given = words(64)
    given[:32] = range(32)  # the lanes of the second warp stay together
    run = timed(Kernel(PLACES.replace("COUNT", "64"), 64, 256), given, edit=edit)
    assert sum(ins.opcode == name for ins in run.listing.instructions) == 2
    arrivals = [run.issues("BAR.SYNC", warp) for warp in (0, 1)]
    assert [len(issues) for issues in arrivals] == [2, 1]
    last = max(max(issues) for issues in arrivals)
    assert all(run.next_issue(last, warp) >= last + H100.barrier_latency for warp in (0, 1))
