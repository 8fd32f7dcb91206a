"""Barriers and asynchronous units of the clock on kernels whose time is derived by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from cute_mla.profiles.clock.engine import Engine, StandstillError
from cute_mla.profiles.clock.instructions import time_listing
from cute_mla.profiles.clock.program import Product, TensorProduct
from cute_mla.profiles.clock.spans import ISSUE, TENSOR_CORE, TMA, mbarrier_track
from cute_mla.profiles.clock.units import Port, QueuedProduct, TensorCore, TensorQueue
from cute_mla.simulator import TensorMap
from cute_mla.simulator.frontend.layout import SHARED_BASE
from tests.profiles.clock.timed import B200, BARRIERS, H100, WARM, Timed, arrive, timed, wait, words
from tests.simulator.small_kernels import Kernel, aligned


def test_two_warps_hand_over_through_mbarriers() -> None:
    rounds = range(4)
    first = "".join(arrive(0) + wait(f"A{index}", 8, index & 1) for index in rounds)
    second = "".join(wait(f"B{index}", 0, index & 1) + arrive(8) for index in rounds)
    body = f"{BARRIERS.format(count=32)} @%p21 bra SECOND;\n{first} bra END;\nSECOND: {second} END: st.global.u32 [%rd2], %r0;\n"
    run = timed(Kernel(body, threads=64, smem=64), words())
    arrivals, answers = run.issues("SYNCS.ARRIVE"), run.issues("SYNCS.ARRIVE", 1)
    assert len(arrivals) == len(answers) == 4
    flips = [span.end for span in run.spans(mbarrier_track(SHARED_BASE))]
    back = [span.end for span in run.spans(mbarrier_track(SHARED_BASE + 8))]
    assert flips == [clock + H100.arrive_latency for clock in arrivals]
    assert back == [clock + H100.arrive_latency for clock in answers]
    for flip in flips:  # the waiter's branch is the first instruction that needs the answer
        assert run.next_issue(flip, 1) == flip + H100.phase_latency
    for flip in back:
        assert run.next_issue(flip, 0) == flip + H100.phase_latency


def test_a_named_barrier_lets_all_go_at_its_last_arrival() -> None:
    body = f"""
    setp.lt.u32 %p1, %r0, 32; @%p1 bra MEET; ld.global.f32 %f1, [%rd2];
    {"ex2.approx.ftz.f32 %f1, %f1;" * 20} st.global.f32 [%rd2], %f1;
    MEET: bar.sync 1, 64; st.global.u32 [%rd2], %r0;
    """
    run = timed(Kernel(body, threads=64), words())
    early, late = run.issues("BAR")[-1], run.issues("BAR", 1)[-1]
    assert late > early + 20 * H100.mufu_latency
    assert [run.next_issue(clock, warp) for warp, clock in enumerate((early, late))] == [late + H100.barrier_latency] * 2
    (waited,) = [span for span in run.spans("0") if span.name == "barrier"]
    assert waited.end == late + H100.barrier_latency


def products(n: int, number: int) -> str:
    """Return products of 64 x n x 16 in a chain, in one group, of zeros in shared memory."""
    registers = ", ".join(f"%r{110 + index}" for index in range(n // 2))
    line = f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16 {{{registers}}}, %rd11"
    chain = "\n".join(f"{line}, %rd{20 + index}, {int(index > 0)}, 1, 1, 0, 0;" for index in range(number))
    operands = "\n".join(f"add.s64 %rd{20 + index}, %rd11, {128 + 8 * index};" for index in range(number))  # ptxas drops equal products
    clear = "\n".join(f"st.shared.v4.u32 [%r101+{2048 * index}], {{%r102, %r102, %r102, %r102}};" for index in range(8))
    store = "\n".join(f"st.global.u32 [%rd2], %r{110 + index};" for index in range(n // 2))
    return f"""
    mov.u32 %r100, smem; mov.u32 %r102, 0; mad.lo.u32 %r101, %r0, 16, %r100; {clear}
    fence.proxy.async; bar.sync 0; shr.u32 %r103, %r100, 4; cvt.u64.u32 %rd11, %r103; or.b64 %rd11, %rd11, 0x0000001000080000;
    {operands} wgmma.fence.sync.aligned;
    {chain} wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; {store}
    """


def product_kernel(n: int, number: int) -> Timed:
    """Run a chain of products."""
    return timed(Kernel(products(n, number), threads=128, smem=16384), words())


@pytest.mark.parametrize(("n", "clocks"), [(128, 64), (16, 20)])
def test_products_take_their_flops_or_their_operands_and_a_tail(n: int, clocks: int) -> None:
    """m64n128k16 takes N/2 clocks; m64n16k16 the 80 rows of 32 bytes that the port reads."""
    run = product_kernel(n, 8)
    spans = run.spans(TENSOR_CORE)
    assert [span.end - span.start for span in spans] == [clocks] * 8
    assert np.diff([span.start for span in spans]).tolist() == [clocks] * 7
    assert {span.name for span in spans} == {f"m64n{n}k16 SS of warps 0 to 3"}
    waits = [span for span in run.spans("0") if span.name == "products"]
    assert waits[-1].end == spans[-1].end + H100.product_tail
    assert run.result.product_clocks == 8 * clocks


def test_a_product_of_a_pair_pays_off_the_arrears_of_both_ports() -> None:
    ports = [Port(B200), Port(B200)]
    engine = Engine(2, 1, B200, WARM)
    queue = TensorQueue(B200, engine.at, keeps_spans=True)
    product = TensorProduct(rows=64, n=128, k=16, element_bytes=2, ctas=2, operands=6144)
    turns = product.operands // B200.shared_bytes
    assert turns >= 2 * product.rows * product.n * product.k / B200.product_flops  # the port binds
    for port, ahead in zip(ports, (100, 60), strict=True):
        port.write((B200.port_slack_clocks + ahead) * B200.shared_bytes)
    queue.issue(0, (product, ports, 0))
    ports[1].write(40 * B200.shared_bytes)  # has had 100 turns meanwhile
    queue.issue(0, (product, ports, 0))
    engine.run()
    assert [end - start for _, start, end, _ in queue.spans] == [turns + 100, turns]
    assert [port.owed for port in ports] == [B200.port_slack_clocks] * 2


@pytest.mark.parametrize(("size", "turns"), [(4, 1), (8, 2), (16, 4)])
def test_an_asynchronous_copy_takes_turns_by_its_bytes(size: int, turns: int) -> None:
    def port_clocks(number: int) -> float:
        body = f"mov.u32 %r100, smem; mad.lo.u32 %r101, %r0, {size}, %r100; mul.wide.u32 %rd12, %r0, {size}; add.s64 %rd12, %rd12, %rd0;"
        body += f"cp.async.ca.shared.global [%r101], [%rd12], {size};" * number
        return timed(Kernel(f"{body} cp.async.wait_all; st.global.u32 [%rd2], %r0;", smem=1024), words()).result.port_clocks

    assert port_clocks(3) - port_clocks(2) == 2 * turns  # on the way through L1, and into shared memory


def test_a_warp_stops_when_the_queue_of_products_is_full() -> None:
    run = product_kernel(128, 12)
    spans, issued = run.spans(TENSOR_CORE), run.issues("HGMMA")
    assert len(issued) == 12
    depth = H100.product_depth
    for index in range(depth, 12):  # one leaves, the next comes
        assert issued[index] >= spans[index - depth].end
    assert issued[depth - 1] < spans[0].end


def test_a_product_that_is_issued_as_another_ends_runs_alone() -> None:
    ends: list[tuple[int, Callable[[int], None]]] = []
    tensor = TensorCore(H100, Port(H100), lambda clock, call: ends.append((clock, call)), "fifo", keeps_spans=True)
    product = Product(128, 16, 2, from_registers=False, ends=True)
    for warpgroup in (0, 1):
        tensor.issue(0, QueuedProduct(warpgroup, product, 0, 0))
    clock, finish = ends.pop()
    tensor.issue(clock, QueuedProduct(0, product, clock, 0))
    finish(clock)
    clock, finish = ends.pop()
    finish(clock)
    assert [(start, end) for _, start, end, _ in tensor.spans] == [(64 * index, 64 * (index + 1)) for index in range(3)]
    assert len(ends) == 1


def tma_loads(number: int) -> str:
    """Return TMA loads of 16 rows of 64 bytes by one thread, and the wait for all of them."""
    load = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    lines = "\n".join(f"{load} [%r100+{1024 * (1 + index)}], [%rd10, {{%r102, %r103}}], [%r100];" for index in range(number))
    return f"""{BARRIERS.format(count=1)} mov.b64 %rd10, p1; cvta.param.u64 %rd10, %rd10; mov.u32 %r102, 0; mov.u32 %r103, 0;
    @%p20 bra LOADED; mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r100], {1024 * number}; {lines}
    LOADED: {wait("W", 0, 0)} st.global.u32 [%rd2], %r0;
    """


@pytest.mark.parametrize("cold", [False, True])
def test_tma_takes_an_instruction_at_a_time_and_bytes_at_a_rate(cold: bool) -> None:
    source = aligned(16 * 32, np.uint16)
    box = TensorMap("bf16", source.ctypes.data, (32, 16), (64,), (32, 16))
    body = "add.s64 %rd0, %rd0, 0;" + tma_loads(4)
    run = timed(Kernel(body, smem=8192), words(), box, source, setting=replace(WARM, cold=cold))
    spans = run.spans(TMA)
    sent = [span.start for span in spans]
    issued = run.issues("UTMALDG")
    gap = H100.copy_issue_clocks
    assert sent == [max(clock, before) + gap for clock, before in zip(issued, [0, *sent], strict=False)]
    assert issued[1] < issued[0] + 2 * gap
    clocks = 1024 // H100.l2_bytes
    from_l2 = [clock + clocks + H100.copy_l2_latency for clock in sent]
    if cold:  # the box comes from memory, 64 clocks at 16 bytes a clock; loads behind the first one find it on its way
        from_l2 = [max(end, sent[0] + 64 + H100.copy_hbm_latency) for end in from_l2]
    assert [span.end for span in spans] == from_l2
    flip = run.spans(mbarrier_track(SHARED_BASE))[0].end
    assert flip == max(from_l2)
    assert run.next_issue(flip) == flip + H100.phase_latency


def test_gathers_of_four_rows_follow_each_other_sooner() -> None:
    source = aligned(16 * 32, np.uint16)
    rows = TensorMap("bf16", source.ctypes.data, (32, 16), (64,), (32, 1))
    gather = (
        "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes "
        "[%r100+{}], [%rd10, {{%r102, %r102, %r102, %r102, %r102}}], [%r100];"
    )
    body = f"""
    mov.b64 %rd10, p1; cvta.param.u64 %rd10, %rd10; mov.u32 %r102, 0; mov.u32 %r100, smem; setp.ne.u32 %p20, %r0, 0;
    @%p20 bra LOADED; mbarrier.init.shared.b64 [%r100], 1; fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r100], 1024; {"".join(gather.format(1024 * number) for number in range(1, 5))}
    W: mbarrier.try_wait.parity.shared.b64 %p22, [%r100], 0; @!%p22 bra W;
    LOADED: st.global.u32 [%rd2], %r0;
    """
    run = timed(Kernel(body, smem=8192), words(), rows, source, of=B200)
    sent = [span.start for span in run.spans(TMA)]
    issued = run.issues("UTMALDG")
    assert sent == [max(clock, before) + B200.gather_issue_clocks for clock, before in zip(issued, [0, *sent], strict=False)]


def questions(work: int) -> str:
    """Return a test of a phase by warp 0 behind a chain of exponentials; warp 1 completes the phase behind ten of them."""
    slow = "ex2.approx.ftz.f32 %f1, %f1;\n"
    return f"""{BARRIERS.format(count=32)} ld.global.f32 %f1, [%rd2]; @%p21 bra SECOND;
    {slow * work} st.global.f32 [%rd2], %f1; bar.warp.sync -1;
    mbarrier.test_wait.parity.shared.b64 %p22, [%r100], 0; selp.u32 %r105, 1, 2, %p22; st.global.u32 [%rd2], %r105; bra END;
    SECOND: {slow * 10} setp.gt.f32 %p23, %f1, 0f40000000;
    @%p23 mbarrier.arrive.shared.b64 %rd9, [%r100]; END:
    """


@pytest.mark.parametrize(("work", "answer"), [(1, 2), (30, 1)])
def test_a_question_is_answered_by_the_time_at_which_it_is_asked(work: int, answer: int) -> None:
    out = words(64)
    run = timed(Kernel(questions(work), threads=64, smem=64), out)
    assert out[:32].tolist() == [answer] * 32
    (asked,) = run.issues("SYNCS.PHASECHK")
    flip = run.spans(mbarrier_track(SHARED_BASE))[0].end
    assert (asked >= flip) == (answer == 1)


def test_lanes_that_reach_a_barrier_in_different_places_count_as_one_warp() -> None:
    body = "ld.global.u32 %r1, [%rd2]; and.b32 %r2, %r0, 1; setp.eq.u32 %p1, %r2, 0; @%p1 bra EVEN; mul.lo.u32 %r1, %r1, 7;"
    body += "barrier.sync 3, 64; add.u32 %r1, %r1, %r0; bra END; EVEN: add.u32 %r1, %r1, 5; barrier.sync 3, 64; xor.b32 %r1, %r1, %r0;"
    run = timed(Kernel(body + "END: st.global.u32 [%rd2], %r1;", threads=64), words())
    places = [run.issues("BAR.SYNC", warp) for warp in (0, 1)]
    assert [len(issues) for issues in places] == [2, 2]
    last = max(max(issues) for issues in places)
    assert all(run.next_issue(last, warp) >= last + H100.barrier_latency for warp in (0, 1))


def test_work_of_another_cluster_comes_as_bytes_do() -> None:
    """A second mbarrier expects bytes that no copy brings."""
    ask = "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r100+16], [%r100];\n"
    expect = "mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r100+{}], {};\n"
    bring = "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r100+8], 64;\n"
    body = BARRIERS.format(count=1) + "@%p20 bra WAIT;\n" + expect.format(0, 16) + ask + expect.format(8, 64) + bring + "WAIT:\n"
    run = timed(Kernel(body + wait("A", 0, 0) + wait("B", 8, 0) + "st.global.u32 [%rd2], %r0;", smem=64), words(), of=B200)
    (asked,), (brought,) = run.issues("UGETNEXTWORKID"), run.issues("SYNCS.ARRIVE.TRANS64.RED.A0TX")
    (answered,) = (span.end for span in run.spans(mbarrier_track(SHARED_BASE)))
    (complete,) = (span.end for span in run.spans(mbarrier_track(SHARED_BASE + 8)))
    assert asked + 200 < answered < asked + 2000
    assert complete == brought + B200.arrive_latency


def test_warps_that_wait_forever_are_named() -> None:
    run = product_kernel(16, 8)
    code = time_listing(run.listing, H100)
    sync = next(op for op in code.values() if op.kind == "barrier sync")
    engine = Engine(1, 2, H100, WARM)
    engine.extend(0, 0, [(sync, (1, 64))])
    assert engine.run() is None
    with pytest.raises(StandstillError, match=r"CTA 0 warp 0 is at 0x\w+ BAR.*; CTA 0 warp 1 has no program"):
        engine.result()


def test_spans_of_a_track_do_not_overlap() -> None:
    run = product_kernel(128, 12)
    tracks = {(span.rank, span.track) for span in run.result.spans if span.track != TMA}
    assert len(tracks) >= 6
    for rank, track in tracks:
        spans = sorted(span for span in run.result.spans if (span.rank, span.track) == (rank, track))
        ordered = sorted((span.start, span.end) for span in spans)
        assert all(one[1] <= two[0] for one, two in pairwise(ordered)), track
        assert all(span.end > span.start for span in spans if span.name != ISSUE)
