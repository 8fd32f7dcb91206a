"""Instruction counts: warp instructions by role and class, once per warp, on every path that some lane takes."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from cute_mla.simulator import GlobalMemory, Launch, Names, Policy, load_module, run
from cute_mla.simulator.engine.counts import NO_ROLE, class_of
from tests.simulator.small_kernels import Kernel

# Warps 0 and 1 add as often as they are told; of warp 2 half the lanes multiply; warp 3 does nothing.
PTX = Kernel(
    """
    ld.param.u32 %r1, [p1];
    mov.f32 %f1, 0f3F800000;
    setp.ge.u32 %p1, %r0, 64;
    @%p1 bra OTHERS;
LOOP:
    add.rn.f32 %f1, %f1, %f1;
    sub.u32 %r1, %r1, 1;
    setp.ne.u32 %p2, %r1, 0;
    @%p2 bra LOOP;
    bra END;
OTHERS:
    and.b32 %r3, %r0, 33;
    setp.ne.u32 %p3, %r3, 0;
    @%p3 bra END;
    mul.f32 %f2, %f1, %f1;
END:""",
    threads=128,
).text([0, 0])


def counted(rounds: int, schedule: str = "round_robin", text: str = PTX) -> dict[str, dict[str, int]]:
    names = Names(roles=(("adders", 0, 2), ("others", 2, 1)))
    launch = Launch(load_module(text), "k", (1, 1, 1), (128, 1, 1), (1, 1, 1), 0, [bytes(8), struct.pack("<Q", rounds)], names)
    report = run(launch, GlobalMemory(), Policy.named(schedule))
    counts = report.executed.by_role()
    assert report.instructions == sum(sum(classes.values()) for classes in counts.values())
    return {role: dict(classes) for role, classes in counts.items()}


@pytest.mark.parametrize("schedule", ["round_robin", "random", "adversarial"])
def test_roles_and_classes(schedule: str) -> None:
    counts = counted(5, schedule)
    assert counts["adders"]["f32 add"] == 2 * 5
    assert counts["adders"]["integer"] == 2 * (2 + 5)  # two of the kernel's prologue
    assert counts["adders"]["setp"] == 2 * (1 + 5)
    assert counts["others"]["f32 mul"] == 1
    assert counts[NO_ROLE].get("f32 mul", 0) == 0
    assert counts[NO_ROLE]["integer"] == 2 + 1


def test_a_slope_is_that_of_the_loop() -> None:
    few, many = counted(4)["adders"], counted(12)["adders"]
    assert {name: (many[name] - few[name]) / 8 for name in many} == {
        "f32 add": 2, "integer": 2, "setp": 2, "branch": 2, "mov": 0, "global memory": 0,
    }  # fmt: skip


@pytest.mark.parametrize("schedule", ["round_robin", "random", "adversarial"])
def test_every_warp_that_meets_at_a_barrier_counts(schedule: str) -> None:
    counts = counted(3, schedule, PTX.replace("ret;", "bar.sync 0;\nret;"))
    assert sum(classes.get("barrier", 0) for classes in counts.values()) == 4


CLASSES = {
    "matrix product": "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 tcgen05.mma.cta_group::2.kind::f16 HGMMA.64x64x16.F32.BF16 "
    "UTCHMMA.2CTA",
    "matrix fence": "wgmma.wait_group.sync.aligned UTCBAR.2CTA.MULTICAST FENCE.VIEW.ASYNC.T",
    "tensor memory": "tcgen05.ld.sync.aligned.32x32b.x32.b32 LDTM.x32",
    "bulk copy": "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes UTMALDG.4D",
    "copy": "cp.async.cg.shared.global LDGSTS.E.BYPASS.128",
    "barrier": "mbarrier.try_wait.parity.shared.b64 FENCE.VIEW.ASYNC.S SYNCS.PHASECHK.TRANS64.TRYWAIT BAR.SYNC.DEFER_BLOCKING",
    "shared memory": "st.shared.v4.b32 LDSM.16.MT88.4 STS.128",
    "global memory": "ld.global.nc.v4.b32 LDG.E.128",
    "ex2": "ex2.approx.ftz.f32 MUFU.EX2",
    "packed f32": "fma.rn.f32x2 add.rn.ftz.f32x2 FFMA2",
    "f32 fma": "fma.rn.ftz.f32 FFMA",
    "f32 mul": "mul.ftz.f32 FMUL",
    "integer": "mul.lo.s32 mul.wide.u32 add.s64 max.s32 cvt.u64.u32 IMAD.WIDE.U32 VIADDMNMX",
    "f32 add": "add.ftz.f32 FADD.FTZ",
    "max": "max.f32 FMNMX3",
    "cvt": "cvt.rn.bf16x2.f32 cvt.rn.f16x2.e4m3x2 F2FP.BF16.F32.PACK_AB",
    "cvt to f32": "cvt.f32.f16 HADD2.F32",
    "permute": "prmt.b32 UPRMT",
    "between lanes": "shfl.sync.bfly.b32 R2UR",
    "other": "nanosleep.u32 QUICK",
    "constant memory": "LDC.64 ULDC LDCU.128",
    "mov": "HFMA2.MMA IMAD.MOV.U32 IMAD.U32 S2UR",
    "setp": "UISETP.GE.AND",
    "branch": "USETMAXREG.DEALLOC.CTAPOOL",
    "no operation": "NOP",
}


@pytest.mark.parametrize(("opcode", "name"), [(opcode, name) for name, opcodes in CLASSES.items() for opcode in opcodes.split()])
def test_classes(opcode: str, name: str) -> None:
    assert class_of(opcode) == name


def test_every_count_is_a_whole_number() -> None:
    assert all(isinstance(number, (int, np.integer)) for classes in counted(3).values() for number in classes.values())
