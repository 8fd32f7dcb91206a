"""Every rule, with a kernel that keeps it and one that breaks it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest

from cute_mla.simulator import Names, Policy, Report, TensorMap, UnsupportedInstruction, load_module
from tests.simulator.assembled import as_machine_code
from tests.simulator.barrier_kernels import ALL, WAIT, barrier, each_policy
from tests.simulator.small_kernels import HEADER, LAZY, Kernel, aligned, kinds, lines_of

NAMES = Names(
    barriers=(("ready", 0, 2), ("done", 16, 1)), named_barriers=(("exchange", 3),), roles=(("producer", 0, 1), ("consumer", 1, 3))
)


def only(report: Report, kind: str) -> None:
    """Check that the report names exactly this kind."""
    assert kinds(report) == {kind}, [str(finding) for finding in report.findings]


# ---------------------------------------------------------------- loading


def test_unknown_instructions_are_all_listed() -> None:
    body = "{ .reg .b32 a, b; add.foo.s32 a, a, b; min.relu.u32 a, a, b; frobnicate.sync b; ret; }"
    with pytest.raises(UnsupportedInstruction) as caught:
        load_module(f"{HEADER}.visible .entry k() {body}")
    for name in ("add.foo.s32", "min.relu.u32", "frobnicate.sync"):
        assert name in str(caught.value)


def test_operand_forms_are_checked_at_load() -> None:
    with pytest.raises(UnsupportedInstruction, match="member mask"):
        load_module(f"{HEADER}.visible .entry k() {{ .reg .b32 a; shfl.sync.idx.b32 a, a, 0, 31, 15; ret; }}")


# ---------------------------------------------------------------- memory


def test_global_out_of_bounds() -> None:
    out = np.zeros(32, np.uint32)
    report = Kernel("st.global.u32 [%rd2+4], %r0;").run(out)
    only(report, "out_of_bounds")
    assert report.findings[0].ptx_line == lines_of("st.global.u32 [%rd2+4], %r0;", "st.global")[0]
    assert "array0" in str(report.findings[0])


def test_shared_out_of_bounds() -> None:
    body = "mov.b32 %r1, smem;\nshl.b32 %r2, %r0, 2;\nadd.u32 %r1, %r1, %r2;\nst.shared.u32 [%r1], %r0;"
    assert Kernel(body, smem=128).run(np.zeros(1, np.uint32)).ok
    only(Kernel(body, smem=124).run(np.zeros(1, np.uint32)), "out_of_bounds")


def test_misaligned() -> None:
    only(Kernel("st.global.u32 [%rd0+2], %r0;").run(np.zeros(32, np.uint32)), "misaligned")
    only(Kernel("mov.b32 %r1, smem;\nst.shared.v4.u32 [%r1+8], {%r0, %r0, %r0, %r0};", smem=64).run(np.zeros(1, np.uint32)), "misaligned")


def test_read_only_buffer() -> None:
    only(Kernel("st.global.u32 [%rd2], %r0;").run(np.zeros(32, np.uint32), readonly=(0,)), "read_only")


# ---------------------------------------------------------------- poison

LOAD_UNWRITTEN = "mov.b32 %r1, smem;\nshl.b32 %r2, %r0, 2;\nadd.u32 %r2, %r1, %r2;\nld.shared.u32 %r3, [%r2];\n"


def test_poison_may_be_loaded_and_moved() -> None:
    assert Kernel(f"{LOAD_UNWRITTEN}add.u32 %r4, %r3, 1;\nst.shared.u32 [%r2], %r4;", smem=128).run(np.zeros(32, np.uint32)).ok


@pytest.mark.parametrize(
    "use",
    [
        "st.global.u32 [%rd2], %r3;",
        "add.u32 %r4, %r3, 1;\nshfl.sync.bfly.b32 %r5, %r4, 1, 31, -1;\nst.global.u32 [%rd2], %r5;",
        "setp.eq.u32 %p1, %r3, 5;\n@%p1 bra OUT;\nmov.u32 %r4, 1;\nOUT:",
        "and.b32 %r4, %r3, 4;\nadd.u32 %r4, %r4, %r1;\nld.shared.u32 %r5, [%r4];",
        "setp.eq.u32 %p1, %r3, 5;\n@%p1 st.global.u32 [%rd2], %r0;",
        "st.shared.u32 [%r2], %r3;\nld.shared.u32 %r5, [%r2];\nst.global.u32 [%rd2], %r5;",
        "mov.b64 %rd5, {%r0, %r3};\nst.global.u64 [%rd0], %rd5;",
    ],
)
@pytest.mark.parametrize("threads", [32, 96])
def test_poison_that_decides(use: str, threads: int) -> None:
    out = np.zeros(threads, np.uint32)
    only(Kernel(LOAD_UNWRITTEN + use, smem=4 * threads, threads=threads).run(out), "poison")
    written = LOAD_UNWRITTEN.replace("ld.shared", "st.shared.u32 [%r2], %r0;\nbar.sync 0;\nld.shared", 1)
    assert Kernel(written + use, smem=4 * threads, threads=threads).run(out).ok


def test_poison_of_one_lane_stays_in_that_lane() -> None:
    body = LOAD_UNWRITTEN.replace("ld.shared", "setp.ne.u32 %p2, %r0, 3;\n@%p2 st.shared.u32 [%r2], %r0;\nld.shared", 1)
    clean = f"{body}setp.eq.u32 %p1, %r0, 3;\nselp.b32 %r4, 7, %r3, %p1;\nst.global.u32 [%rd2], %r4;"
    out = np.zeros(32, np.uint32)
    assert Kernel(clean, smem=128).run(out).ok
    assert out.tolist() == [7 if lane == 3 else lane for lane in range(32)]
    only(Kernel(f"{body}st.global.u32 [%rd2], %r3;", smem=128).run(out), "poison")


PACKED = LOAD_UNWRITTEN + "mov.b64 %rd5, {%r0, %r3};\n"


@pytest.mark.parametrize("code", [nullcontext, as_machine_code], ids=["PTX", "machine code"])
@pytest.mark.parametrize("between", [
    "mov.b64 %rd6, %rd5;", "bar.sync 0; mov.b64 %rd6, %rd5; bar.sync 0;", "add.rn.f32x2 %rd6, %rd5, %rd5;",
    "mov.b64 %rd7, {%r0, %r0}; fma.rn.f32x2 %rd6, %rd5, %rd7, %rd5; bar.sync 0; mul.rn.f32x2 %rd6, %rd6, %rd7;",
    "setp.lt.u32 %p1, %r0, 9; @%p1 bra SOME; add.rn.f32x2 %rd6, %rd5, %rd5; bra JOIN; SOME: sub.rn.f32x2 %rd6, %rd5, %rd5; JOIN:",
])  # fmt: skip
@pytest.mark.parametrize("bad", [False, True])
def test_poison_of_one_half_stays_in_that_half(code: Callable[[], AbstractContextManager[object]], between: str, bad: bool) -> None:
    body = f"{PACKED}bar.sync 0; {between} mov.b64 {{%r5, %r6}}, %rd6; st.shared.u32 [%r2], %r6; st.global.u32 [%rd2], %r{6 if bad else 5};"
    with code():
        found = kinds(Kernel(body, smem=128).run(np.zeros(32, np.uint32)))
    assert found == ({"poison"} if bad else set())


@pytest.mark.parametrize("between", [
    "mul.lo.u64 %rd5, %rd5, 3;", "setp.eq.u32 %p1, %r0, 3; @%p1 mov.b64 %rd5, {%r3, %r0};", "mov.b64 %rd6, {%r3, %r0}; mov.b64 %rd5, %rd6;",
    "mov.b64 %rd6, {%r3, %r0}; add.rn.f32x2 %rd5, %rd5, %rd6;", "ld.shared.b64 %rd5, [%r1];",
])  # fmt: skip
def test_poison_of_a_register_that_is_no_longer_as_it_was_packed(between: str) -> None:
    body = f"{PACKED}bar.sync 0; {between} bar.sync 0; mov.b64 {{%r5, %r6}}, %rd5;\nst.global.u32 [%rd2], %r5;"
    assert "poison" in kinds(Kernel(body, smem=128).run(np.zeros(32, np.uint32)))


def test_uninitialised_global_buffer() -> None:
    body = "ld.param.u64 %rd3, [p1];\nadd.s64 %rd3, %rd3, %rd1;\nld.global.u32 %r1, [%rd3];\nst.global.u32 [%rd2], %r1;"
    out, scratch = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    assert Kernel(body).run(out, scratch).ok
    only(Kernel(body).run(out, scratch, undefined=(1,)), "poison")
    first = body.replace("ld.global", "st.global.u32 [%rd3], %r0;\nld.global")
    assert Kernel(first).run(out, scratch, undefined=(1,)).ok


def test_register_read_before_it_is_written() -> None:
    body = "setp.lt.u32 %p1, %r0, 40;\n@%p1 bra SET;\nbra USE;\nSET: mov.u32 %r4, 1;\nUSE: st.global.u32 [%rd2], %r4;"
    assert Kernel(body).run(np.zeros(32, np.uint32)).ok  # every thread takes the path that writes
    only(Kernel(body, threads=64).run(np.zeros(64, np.uint32)), "poison")


def test_tma_store_of_unwritten_shared_memory() -> None:
    out = aligned(1024, np.float32)
    tensor_map = TensorMap("fp32", out.ctypes.data, (32, 32), (128,), (32, 8))
    body = """
        mov.b32 %r1, smem;
        shl.b32 %r2, %r0, 5;
        add.u32 %r2, %r1, %r2;
        %fill
        fence.proxy.async.shared::cta;
        bar.sync 0;
        setp.ne.u32 %p1, %r0, 0;
        @%p1 bra OUT;
        mov.b64 %rd3, p1;
        cvta.param.u64 %rd4, %rd3;
        mov.u32 %r5, 0;
        cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd4, {%r5, %r5}], [%r1];
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group.read 0;
    OUT:
    """
    store = "st.shared.v4.u32 [%r2], {%r0, %r0, %r0, %r0};\n"
    full = body.replace("%fill", store + "st.shared.v4.u32 [%r2+16], {%r0, %r0, %r0, %r0};")
    assert Kernel(full, smem=1024).run(np.zeros(32, np.uint32), tensor_map, out).ok
    assert out.view(np.uint32)[:256].tolist() == [index // 8 for index in range(256)]
    only(Kernel(body.replace("%fill", store), smem=1024).run(np.zeros(32, np.uint32), tensor_map, out), "poison")
    unwaited = full.replace("cp.async.bulk.wait_group.read 0;", "")
    only(Kernel(unwaited, smem=1024).run(np.zeros(32, np.uint32), tensor_map, out, policy=LAZY), "unfinished")


# ---------------------------------------------------------------- mbarriers


@each_policy
def test_arrivals(policy: Policy) -> None:
    body = "mbarrier.arrive.shared.b64 %rd9, [%r100];\n" + WAIT
    assert Kernel(barrier(64) + body, threads=64, smem=64).run(np.zeros(1, np.uint32), policy=policy).ok
    only(Kernel(barrier(65) + body, threads=64, smem=64).run(np.zeros(1, np.uint32), policy=policy), "deadlock")
    too_many = Kernel(barrier(63) + "mbarrier.arrive.shared.b64 %rd9, [%r100], 2;\n" + WAIT, threads=64, smem=64)
    assert "barrier_arrivals" in kinds(too_many.run(np.zeros(1, np.uint32), policy=policy))


def test_deadlock_names_roles_and_barriers() -> None:
    body = barrier(1) + "setp.lt.u32 %p1, %r0, 32;\n@%p1 bra OUT;\n" + WAIT + "OUT:\n"
    report = Kernel(body, threads=128, smem=64, names=NAMES).run(np.zeros(1, np.uint32))
    only(report, "deadlock")
    text = str(report.findings[0])
    assert "consumer" in text
    assert "ready[0]" in text
    assert "1 of 1 arrivals missing" in text


def tma_kernel(nbytes: int, more: str = "") -> str:
    """Thread 0 loads 1024 bytes by TMA with an expectation of nbytes; everybody waits, and reads."""
    return (
        barrier(1)
        + f"""
        @%p20 bra LOADED;
        mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r100], {nbytes};
        mov.b64 %rd3, p1;
        cvta.param.u64 %rd4, %rd3;
        mov.u32 %r5, 0;
        cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r100+1024], [%rd4, {{%r5, %r5}}], [%r100];
    LOADED:
        {more}
    """
        + WAIT
        + """
        shl.b32 %r6, %r0, 2;
        add.u32 %r6, %r6, %r100;
        ld.shared.u32 %r7, [%r6+1024];
        st.global.u32 [%rd2], %r7;
    """
    )


def run_tma(body: str, policy: Policy | None = None, registered: bool = True) -> tuple[Report, np.ndarray]:
    """Run with a tensor of 1024 numbers that count up. Return the report and the output. registered: the memory is known."""
    source, out = aligned(1024, np.float32), np.zeros(64, np.uint32)
    source[:] = np.arange(1024)
    tensor_map = TensorMap("fp32", source.ctypes.data, (32, 32), (128,), (32, 8))
    return Kernel(body, threads=64, smem=2048).run(out, tensor_map, *[source] * registered, policy=policy), out


@each_policy
def test_tma_transaction_bytes(policy: Policy) -> None:
    report, out = run_tma(tma_kernel(1024), policy)
    assert report.ok
    assert out.view(np.float32).tolist() == list(range(64))
    only(run_tma(tma_kernel(1028), policy)[0], "deadlock")
    assert not run_tma(tma_kernel(1020), policy)[0].ok
    if policy.async_mode == "lazy":  # without the wait the bytes have not come
        assert "poison" in kinds(run_tma(tma_kernel(1024).replace(WAIT, "bar.sync 0;\n"), policy)[0])


@pytest.mark.parametrize("offset", [1152, 65536])
def test_tma_destination_outside_shared_memory(offset: int) -> None:
    only(run_tma(tma_kernel(1024).replace("[%r100+1024]", f"[%r100+{offset}]"))[0], "out_of_bounds")


def test_unregistered_tensor() -> None:
    only(run_tma(tma_kernel(1024), registered=False)[0], "out_of_bounds")


def test_use_before_init_and_double_barrier() -> None:
    arrive = "mov.b32 %r100, smem;\nmbarrier.arrive.shared.b64 %rd9, [%r100];"
    only(Kernel(arrive, smem=64).run(np.zeros(1, np.uint32)), "barrier_uninitialised")
    twice = barrier(1) + "@!%p20 mbarrier.init.shared.b64 [%r100], 1;"
    only(Kernel(twice, smem=64).run(np.zeros(1, np.uint32)), "barrier_reinit")


def test_exit_with_bytes_missing() -> None:
    body = barrier(1) + "@!%p20 mbarrier.expect_tx.relaxed.cta.shared.b64 [%r100], 64;"
    only(Kernel(body, smem=64).run(np.zeros(1, np.uint32)), "unfinished")


# ---------------------------------------------------------------- named and cluster barriers


@each_policy
def test_named_barriers(policy: Policy) -> None:
    body = """
        setp.ge.u32 %p1, %r0, 32;
        @%p1 bra SECOND;
        bar.sync 3, 64;
        bra OUT;
    SECOND:
        bar.arrive 3, %n;
    OUT:
    """
    assert Kernel(body.replace("%n", "64"), threads=64).run(np.zeros(1, np.uint32), policy=policy).ok
    only(Kernel(body.replace("%n", "96"), threads=64).run(np.zeros(1, np.uint32), policy=policy), "barrier_count")
    alone = body.replace("bar.arrive 3, %n;", "")
    report = Kernel(alone, threads=64, names=NAMES).run(np.zeros(1, np.uint32), policy=policy)
    only(report, "deadlock")
    assert "exchange" in str(report.findings[0])
    nobody_waits = body.replace("bar.sync 3, 64;", "").replace("%n", "64")
    only(Kernel(nobody_waits, threads=64).run(np.zeros(1, np.uint32), policy=policy), "unfinished")


@each_policy
def test_barrier_number_per_warpgroup(policy: Policy) -> None:
    body = "shr.u32 %r1, %r0, 6;\nadd.u32 %r1, %r1, 1;\nbar.sync %r1, 64;\nst.global.u32 [%rd2], %r1;"
    out = np.zeros(128, np.uint32)
    assert Kernel(body, threads=128).run(out, policy=policy).ok
    assert out.tolist() == [1] * 64 + [2] * 64


def test_bar_red() -> None:
    body = "setp.lt.u32 %p1, %r0, 37;\nbar.red.popc.u32 %r1, 0, %p1;\nst.global.u32 [%rd2], %r1;"
    for policy in ALL:
        out = np.zeros(64, np.uint32)
        assert Kernel(body, threads=64).run(out, policy=policy).ok
        assert out.tolist() == [37] * 64


# ---------------------------------------------------------------- spellings of barriers


@each_policy
def test_all_spellings_of_named_barriers(policy: Policy) -> None:
    body = """
        setp.ge.u32 %p1, %r0, 32;
        mov.b32 %r1, smem;
        @%p1 bra SECOND;
        SYNC 3, 64;
        ld.shared.u32 %r2, [%r1];
        st.global.u32 [%rd2], %r2;
        bra OUT;
    SECOND:
        st.shared.u32 [%r1], 7;
        ARRIVE 3, 64;
    OUT:
    """
    pairs = (
        ("bar.cta.sync", "bar.cta.arrive"),
        ("barrier.sync.aligned", "barrier.arrive.aligned"),
        ("barrier.cta.sync.aligned", "bar.arrive"),
        ("barrier.sync", "bar.arrive"),
    )
    for sync, arrive in pairs:
        out = np.zeros(64, np.uint32)
        assert Kernel(body.replace("SYNC", sync).replace("ARRIVE", arrive), threads=64, smem=16).run(out, policy=policy).ok
        assert out.tolist() == [7] * 32 + [0] * 32
    for count in ("48", "0"):
        only(Kernel(f"bar.sync 1, {count};", threads=64).run(np.zeros(1, np.uint32), policy=policy), "barrier_count")


@each_policy
def test_bar_red_of_predicates(policy: Policy) -> None:
    for red, limit, value in (("and", 64, 1), ("and", 63, 0), ("or", 1, 1), ("or", 0, 0)):
        body = f"setp.lt.u32 %p1, %r0, {limit};\nbar.red.{red}.pred %p2, 1, 64, %p1;\nselp.b32 %r1, 1, 0, %p2;\nst.global.u32 [%rd2], %r1;"
        out = np.full(64, 9, np.uint32)
        assert Kernel(body, threads=64).run(out, policy=policy).ok
        assert out.tolist() == [value] * 64
        out[:] = 9
        assert Kernel(body.replace("64, %p1", "64, !%p1"), threads=64).run(out, policy=policy).ok
        assert out.tolist() == [{"and": int(limit == 0), "or": int(limit < 64)}[red]] * 64


STATES = """
    mov.b32 %r100, smem;
    setp.ne.u32 %p20, %r0, 0;
    @%p20 bra INITIALISED;
    mbarrier.init.shared::cta.b64 [%r100], 16;
    mbarrier.init.shared.b64 [%r100+8], 48;
    mbarrier.arrive.shared.b64 _, [%r100], 16;
INITIALISED:
    bar.sync 0;
    and.b32 %r1, %r0, 1;
    shl.b32 %r1, %r1, 3;
    add.u32 %r1, %r1, %r100;
    mbarrier.arrive.release.cta.shared::cta.b64 %rd9, [%r1];
    AGAIN
WAITING:
    mbarrier.WAIT %p21, [%r1], %rd9;
    @!%p21 bra WAITING;
"""


@each_policy
@pytest.mark.parametrize("wait", ["try_wait.shared.b64", "test_wait.shared::cta.b64", "try_wait.acquire.cluster.shared::cta.b64"])
def test_waiting_by_state(policy: Policy, wait: str) -> None:
    """Even lanes arrive in phase 1 of one barrier, odd ones in phase 0 of another, which 32 more arrivals complete."""
    body = STATES.replace("WAIT ", f"{wait} ")
    full = body.replace("AGAIN", "@!%p20 mbarrier.arrive.shared.b64 %rd10, [%r100+8], 32;") + "st.global.u32 [%rd2], %r0;"
    out = np.zeros(32, np.uint32)
    assert Kernel(full, smem=64).run(out, policy=policy).ok
    assert out.tolist() == list(range(32))
    only(Kernel(body.replace("AGAIN", ""), smem=64).run(out, policy=policy), "deadlock")


@each_policy
@pytest.mark.parametrize("hint", ["", ", 100"])
def test_try_wait_and_test_wait_may_fail(policy: Policy, hint: str) -> None:
    """Both answer false before the phase is complete, a hint or not, and true afterwards; a test_wait has no hint."""
    body = barrier(33) + f"mbarrier.WAIT.parity.acquire.cta.shared::cta.b64 %p1, [%r100], 0{hint};\n@%p1 trap;\n"
    body += "mbarrier.arrive.shared.b64 _, [%r100];\nbar.sync 0;\n@!%p20 mbarrier.arrive.shared.b64 _, [%r100];\n" + WAIT
    body += "mbarrier.test_wait.parity.shared.b64 %p2, [%r100], 0;\n@!%p2 trap;\n"
    body += "mbarrier.test_wait.parity.shared.b64 %p2, [%r100], 1;\n@%p2 trap;"
    assert Kernel(body.replace("WAIT.parity.acq", "try_wait.parity.acq"), smem=64).run(np.zeros(1, np.uint32), policy=policy).ok
    if hint:
        with pytest.raises(UnsupportedInstruction, match="hint"):
            Kernel(body.replace("WAIT.parity.acq", "test_wait.parity.acq"), smem=64).run(np.zeros(1, np.uint32), policy=policy)


def test_inval_gives_the_memory_back() -> None:
    body = barrier(1) + "@%p20 bra OUT;\nmbarrier.inval.shared.b64 [%r100];\n%more\nOUT:\n"
    assert Kernel(body.replace("%more", "mbarrier.init.shared.b64 [%r100], 2;"), smem=64).run(np.zeros(1, np.uint32)).ok
    only(
        Kernel(body.replace("%more", "mbarrier.arrive.shared.b64 _, [%r100];"), smem=64).run(np.zeros(1, np.uint32)),
        "barrier_uninitialised",
    )
