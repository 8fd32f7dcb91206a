"""Schedules: replayable, different from each other, and without effect on correct kernels."""

from __future__ import annotations

import numpy as np
import pytest

from cute_mla.simulator import GlobalMemory, Launch, Observer, Policy, TensorMap, load_module, run
from tests.simulator.small_kernels import Kernel, aligned

RACE = """
    ld.param.u64 %rd3, [p1];
    and.b32 %r1, %r0, 31;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra OUT;
    atom.global.add.u32 %r2, [%rd3], 1;
    mul.wide.u32 %rd4, %r2, 4;
    add.s64 %rd4, %rd0, %rd4;
    shr.u32 %r3, %r0, 5;
    st.global.u32 [%rd4], %r3;
OUT:
"""


def order(policy: Policy) -> list[int]:
    """Return the order in which eight warps take a ticket."""
    out, counter = np.zeros(8, np.uint32), np.zeros(1, np.uint32)
    assert Kernel(RACE, threads=256).run(out, counter, policy=policy).ok
    return [int(warp) for warp in out]


def test_random_schedules_replay_and_differ() -> None:
    orders = [order(Policy.named("random", seed)) for seed in range(6)]
    assert orders == [order(Policy.named("random", seed)) for seed in range(6)]
    assert len({tuple(item) for item in orders}) > 1
    assert all(sorted(item) == list(range(8)) for item in orders)


def test_adversarial_order_depends_on_the_seed() -> None:
    assert order(Policy.named("adversarial", 0)) == list(range(8))
    assert order(Policy.named("adversarial", 1)) != list(range(8))


OVERRUN = """
    mov.b32 %r1, smem;
    ld.param.u64 %rd3, [p1];
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra READY;
    mbarrier.init.shared.b64 [%r1+32], 1;
    mbarrier.init.shared.b64 [%r1+40], 1;
    fence.mbarrier_init.release.cluster;
READY:
    bar.sync 0;
    and.b32 %r2, %r0, 31;
    setp.ne.u32 %p1, %r2, 0;
    @%p1 bra OUT;
    mov.u32 %r3, 0;
    shr.u32 %r4, %r0, 5;
    setp.ne.u32 %p2, %r4, %producer;
    @%p2 bra CONSUME;
PRODUCE:
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1+32], 16;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd3], 16, [%r1+32];
    and.b32 %r5, %r3, 1;
LOADED:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r1+32], %r5, 10000000;
    @!%p3 bra LOADED;
    ld.shared.u32 %r6, [%r1];
    st.shared.u32 [%r1+16], %r6;
    mbarrier.arrive.shared.b64 _, [%r1+40];
    add.s64 %rd3, %rd3, 16;
    add.u32 %r3, %r3, 1;
    setp.lt.u32 %p4, %r3, 4;
    @%p4 bra PRODUCE;
    bra OUT;
CONSUME:
    and.b32 %r5, %r3, 1;
PRODUCED:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r1+40], %r5, 10000000;
    @!%p3 bra PRODUCED;
    ld.shared.u32 %r6, [%r1+16];
    st.global.u32 [%rd0], %r6;
    add.s64 %rd0, %rd0, 4;
    add.u32 %r3, %r3, 1;
    setp.lt.u32 %p4, %r3, 4;
    @%p4 bra CONSUME;
OUT:
"""


def overrun(seed: int) -> bool:
    """Return whether a producer that does not wait for its consumer gives wrong values, whichever of two warps it is."""
    caught = False
    for producer in "01":
        out, values = np.zeros(4, np.uint32), aligned(16, np.uint32)
        values[:] = np.arange(1, 17)
        kernel = Kernel(OVERRUN.replace("%producer", producer), threads=64, smem=48)
        report = kernel.run(out, values, policy=Policy.named("adversarial", seed))
        assert not report.ok  # in every order: a race where the consumer has read, else a deadlock
        caught |= out.tolist() != [1, 5, 9, 13]
    return caught


def test_odd_adversarial_seeds_let_a_producer_overrun_its_consumer() -> None:
    assert [overrun(seed) for seed in range(4)] == [False, True, False, True]


def test_names() -> None:
    with pytest.raises(ValueError, match="round_robin, lazy, random, adversarial"):
        Policy.named("fastest")
    with pytest.raises(ValueError, match="supported"):
        Policy(async_mode="never")


SPIN = """
    ld.param.u64 %rd3, [p1];
    setp.ge.u32 %p1, %r0, 32;
    @%p1 bra SETTER;
POLL:
    ld.acquire.gpu.global.u32 %r1, [%rd3];
    setp.eq.u32 %p2, %r1, 0;
    @%p2 bra POLL;
    st.global.u32 [%rd2], %r1;
    bra OUT;
SETTER:
    st.release.gpu.global.u32 [%rd3], 7;
OUT:
"""


@pytest.mark.parametrize("name", ["round_robin", "lazy", "random", "adversarial"])
def test_spinning_on_global_memory_makes_progress(name: str) -> None:
    out, flag = np.zeros(64, np.uint32), np.zeros(1, np.uint32)
    assert Kernel(SPIN, threads=64).run(out, flag, policy=Policy.named(name)).ok
    assert out[:32].tolist() == [7] * 32


class Recorder(Observer):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.events: list[tuple[str, object]] = []

    def shared_access(self, w, target, index, offsets, nbytes, write):  # type: ignore[no-untyped-def]
        self.events.append(("store" if write else "load", len(offsets) * nbytes))

    def global_access(self, w, addresses, nbytes, write):  # type: ignore[no-untyped-def]
        self.events.append(("global store" if write else "global load", nbytes))

    def barrier(self, w, barrier, action, number):  # type: ignore[no-untyped-def]
        self.events.append((action, number))

    def fence(self, w, opcode):  # type: ignore[no-untyped-def]
        self.events.append(("fence", opcode))


def test_observers_hear_everything() -> None:
    body = """
        mov.b32 %r1, smem;
        st.shared.u32 [%r1], %r0;
        fence.proxy.async.shared::cta;
        bar.sync 0;
        ld.shared.u32 %r2, [%r1];
        st.global.u32 [%rd2], %r2;
    """
    out = np.zeros(32, np.uint32)
    kernel = Kernel(body, smem=16)
    memory = GlobalMemory()
    memory.add("out", out.ctypes.data, out.nbytes)
    args: list[bytes | TensorMap] = [out.ctypes.data.to_bytes(8, "little")]
    recorder = Recorder()
    launch = Launch(load_module(kernel.text([out])), "k", (1, 1, 1), (32, 1, 1), (1, 1, 1), 16, args)
    assert run(launch, memory, observer=recorder).ok
    assert recorder.events == [("store", 128), ("fence", "fence.proxy.async.shared::cta"), ("sync", 32), ("load", 128), ("global store", 4)]


def test_launch_arguments_are_checked() -> None:
    module = load_module(Kernel("").text([0]))
    shape = (1, 1, 1)
    for change, message in (
        ({"args": []}, "0 arguments"),
        ({"args": [b"1234"]}, "4 bytes given, 8 expected"),
        ({"block": (64, 1, 1)}, "requires"),
        ({"grid": (3, 1, 1), "cluster": (2, 1, 1)}, "multiple"),
        ({"entry": "q"}, "the module has k"),
    ):
        values = {"entry": "k", "grid": shape, "block": (32, 1, 1), "cluster": shape, "smem_bytes": 0, "args": [bytes(8)], **change}
        with pytest.raises(ValueError, match=message):
            Launch(module, **values)  # type: ignore[arg-type]


PAIRED_BARRIERS = """
    shr.u32 %r1, %r0, 5;
    and.b32 %r2, %r1, 1;
    add.s32 %r2, %r2, 1;
    and.b32 %r3, %r0, 31;
    mov.u32 %r4, 0;
AGAIN:
    bar.sync %r2, 64;
    setp.ne.u32 %p1, %r3, 0;
    @%p1 bra JOIN;
    add.s32 %r5, %r4, 7;
JOIN:
    bar.sync %r2, 64;
    add.s32 %r4, %r4, 1;
    setp.lt.u32 %p2, %r4, 3;
    @%p2 bra AGAIN;
    st.global.u32 [%rd2], %r4;
"""


@pytest.mark.parametrize("schedule", ["round_robin", "lazy", "random", "adversarial"])
def test_parts_of_a_warp_meet_where_convoys_parted(schedule: str) -> None:
    out = np.zeros(128, np.uint32)
    report = Kernel(PAIRED_BARRIERS, threads=128).run(out, policy=Policy.named(schedule))
    assert report.ok, report.findings
    assert (out == 3).all()
