"""Instruction counts: warp instructions by role and class, once per warp, on every path that some lane takes."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from cute_mla.simulator import GlobalMemory, Launch, Names, Policy, load_module, run
from cute_mla.simulator.engine.counts import NO_ROLE, class_of

# Warps 0 and 1 add as often as they are told; of warp 2 half the lanes multiply; warp 3 does nothing.
PTX = """
.version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u32 rounds)
.reqntid 128, 1, 1
{
    .reg .b32 %r<9>;
    .reg .f32 %f<4>;
    .reg .pred %p<5>;
    ld.param.u32 %r1, [rounds];
    mov.u32 %r2, %tid.x;
    mov.f32 %f1, 0f3F800000;
    setp.ge.u32 %p1, %r2, 64;
    @%p1 bra OTHERS;
LOOP:
    add.rn.f32 %f1, %f1, %f1;
    sub.u32 %r1, %r1, 1;
    setp.ne.u32 %p2, %r1, 0;
    @%p2 bra LOOP;
    bra END;
OTHERS:
    and.b32 %r3, %r2, 33;
    setp.ne.u32 %p3, %r3, 0;
    @%p3 bra END;
    mul.f32 %f2, %f1, %f1;
END:
    ret;
}
"""


def counted(rounds: int, schedule: str = "round_robin") -> dict[str, dict[str, int]]:
    names = Names(roles=(("adders", 0, 2), ("others", 2, 1)))
    launch = Launch(load_module(PTX), "k", (1, 1, 1), (128, 1, 1), (1, 1, 1), 0, [struct.pack("<I", rounds)], names)
    report = run(launch, GlobalMemory(), Policy.named(schedule))
    counts = report.executed.by_role()
    assert report.instructions == sum(sum(classes.values()) for classes in counts.values())
    return {role: dict(classes) for role, classes in counts.items()}


@pytest.mark.parametrize("schedule", ["round_robin", "random", "adversarial"])
def test_roles_and_classes(schedule: str) -> None:
    counts = counted(5, schedule)
    assert counts["adders"]["f32 add"] == 2 * 5
    assert counts["adders"]["integer"] == 2 * 5
    assert counts["adders"]["setp"] == 2 * (1 + 5)
    assert counts["others"]["f32 mul"] == 1
    assert counts[NO_ROLE].get("f32 mul", 0) == 0
    assert counts[NO_ROLE]["integer"] == 1


def test_a_slope_is_that_of_the_loop() -> None:
    few, many = counted(4)["adders"], counted(12)["adders"]
    assert {name: (many[name] - few[name]) / 8 for name in many} == {
        "f32 add": 2, "integer": 2, "setp": 2, "branch": 2, "mov": 0, "global memory": 0,
    }  # fmt: skip


@pytest.mark.parametrize("schedule", ["round_robin", "random", "adversarial"])
def test_every_warp_that_meets_at_a_barrier_counts(schedule: str) -> None:
    text = PTX.replace("END:\n    ret;", "END:\n    bar.sync 0;\n    ret;")
    launch = Launch(load_module(text), "k", (1, 1, 1), (128, 1, 1), (1, 1, 1), 0, [struct.pack("<I", 3)])
    counts = run(launch, GlobalMemory(), Policy.named(schedule)).executed.by_role()[NO_ROLE]
    assert counts["barrier"] == 4


@pytest.mark.parametrize(
    ("opcode", "name"),
    [
        ("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16", "matrix product"),
        ("wgmma.wait_group.sync.aligned", "matrix fence"),
        ("tcgen05.mma.cta_group::2.kind::f16", "matrix product"),
        ("tcgen05.ld.sync.aligned.32x32b.x32.b32", "tensor memory"),
        ("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes", "bulk copy"),
        ("cp.async.cg.shared.global", "copy"),
        ("mbarrier.try_wait.parity.shared.b64", "barrier"),
        ("st.shared.v4.b32", "shared memory"),
        ("ld.global.nc.v4.b32", "global memory"),
        ("ex2.approx.ftz.f32", "ex2"),
        ("fma.rn.f32x2", "packed f32"),
        ("fma.rn.ftz.f32", "f32 fma"),
        ("mul.ftz.f32", "f32 mul"),
        ("mul.lo.s32", "integer"),
        ("mul.wide.u32", "integer"),
        ("add.s64", "integer"),
        ("add.rn.ftz.f32x2", "packed f32"),
        ("add.ftz.f32", "f32 add"),
        ("max.f32", "max"),
        ("max.s32", "integer"),
        ("cvt.rn.bf16x2.f32", "cvt"),
        ("cvt.rn.f16x2.e4m3x2", "cvt"),
        ("cvt.f32.f16", "cvt to f32"),
        ("cvt.u64.u32", "integer"),
        ("prmt.b32", "permute"),
        ("shfl.sync.bfly.b32", "between lanes"),
        ("nanosleep.u32", "other"),
        ("HGMMA.64x64x16.F32.BF16", "matrix product"),
        ("UTCHMMA.2CTA", "matrix product"),
        ("UTCBAR.2CTA.MULTICAST", "matrix fence"),
        ("FENCE.VIEW.ASYNC.T", "matrix fence"),
        ("FENCE.VIEW.ASYNC.S", "barrier"),
        ("LDTM.x32", "tensor memory"),
        ("UTMALDG.4D", "bulk copy"),
        ("LDGSTS.E.BYPASS.128", "copy"),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT", "barrier"),
        ("BAR.SYNC.DEFER_BLOCKING", "barrier"),
        ("LDSM.16.MT88.4", "shared memory"),
        ("STS.128", "shared memory"),
        ("LDG.E.128", "global memory"),
        ("LDC.64", "constant memory"),
        ("ULDC", "constant memory"),
        ("LDCU.128", "constant memory"),
        ("MUFU.EX2", "ex2"),
        ("FFMA2", "packed f32"),
        ("FFMA", "f32 fma"),
        ("FMUL", "f32 mul"),
        ("FADD.FTZ", "f32 add"),
        ("FMNMX3", "max"),
        ("F2FP.BF16.F32.PACK_AB", "cvt"),
        ("HADD2.F32", "cvt to f32"),
        ("HFMA2.MMA", "mov"),
        ("IMAD.MOV.U32", "mov"),
        ("IMAD.WIDE.U32", "integer"),
        ("IMAD.U32", "mov"),
        ("S2UR", "mov"),
        ("R2UR", "between lanes"),
        ("UPRMT", "permute"),
        ("UISETP.GE.AND", "setp"),
        ("VIADDMNMX", "integer"),
        ("USETMAXREG.DEALLOC.CTAPOOL", "branch"),
        ("NOP", "no operation"),
        ("QUICK", "other"),
    ],
)
def test_classes(opcode: str, name: str) -> None:
    assert class_of(opcode) == name


def test_every_count_is_a_whole_number() -> None:
    assert all(isinstance(number, (int, np.integer)) for classes in counted(3).values() for number in classes.values())
