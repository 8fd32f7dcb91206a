"""Instructions whose lanes look at each other, control flow, special registers. Arithmetic is in test_vectors.py."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cute_mla.simulator import Policy, UnsupportedInstruction, load_module
from tests.simulator.small_kernels import HEADER, Kernel, kinds

# ---------------------------------------------------------------- lanes


def lanes(code: str, threads: int = 32, policy: Policy | None = None) -> list[int]:
    """Run code that leaves a result in %r4."""
    out = np.zeros(threads, np.uint32)
    report = Kernel(f"{code}\nst.global.u32 [%rd2], %r4;", threads=threads).run(out, policy=policy)
    assert report.ok, report.findings
    return [int(value) for value in out]


def test_shuffles_stay_in_their_warp() -> None:
    every = range(64)
    assert lanes("shfl.sync.bfly.b32 %r4, %r0, 2, 31, -1;", 64) == [lane ^ 2 for lane in every]
    assert lanes("shfl.sync.idx.b32 %r4, %r0, 5, 31, -1;", 64) == [lane // 32 * 32 + 5 for lane in every]
    assert lanes("and.b32 %r1, %r0, 7;\nshfl.sync.idx.b32 %r4, %r0, %r1, 31, -1;") == [lane & 7 for lane in range(32)]


def test_votes_and_election() -> None:
    assert lanes("setp.eq.u32 %p1, %r0, 33;\nvote.sync.any.pred %p2, %p1, -1;\nselp.b32 %r4, 1, 0, %p2;", 64) == [0] * 32 + [1] * 32
    assert lanes("setp.lt.u32 %p1, %r0, 4;\nvote.sync.ballot.b32 %r4, %p1, -1;") == [15] * 32
    assert lanes("elect.sync %r1|%p1, -1;\nselp.b32 %r4, 1, 0, %p1;", 64) == ([1] + [0] * 31) * 2
    assert lanes("elect.sync %r4|%p1, -1;", 64) == [0] * 64
    all_but_one = "setp.ne.u32 %p1, %r0, 40;\nvote.sync.all.pred %p2, %p1, -1;\nselp.b32 %r4, 1, 0, %p2;"
    assert lanes(all_but_one, 64) == [1] * 32 + [0] * 32
    below = "setp.lt.u32 %p1, %r0, %n;\nvote.sync.uni.pred %p2, !%p1, -1;\nselp.b32 %r4, 1, 0, %p2;"
    assert [lanes(below.replace("%n", str(n)))[7] for n in (0, 7, 32)] == [1, 0, 1]


def test_reductions_over_a_warp() -> None:
    """f32 extremes of two warps, with a NaN in the second; zeros are ordered by sign."""
    negative = "cvt.rn.f32.u32 %f1, %r0;\nsub.f32 %f1, 0f41200000, %f1;\n"  # 10 - lane
    with_nan = negative + "setp.eq.u32 %p1, %r0, 40;\nselp.f32 %f1, 0f7FC00000, %f1, %p1;\n"
    result = "\nmov.b32 %r4, %f2;"
    for name, values in (("min", (-21.0, -53.0)), ("max", (10.0, -22.0))):
        bits = [int(np.float32(value).view(np.uint32)) for value in values]
        assert lanes(f"{with_nan}redux.sync.{name}.f32 %f2, %f1, -1;{result}", 64) == [bits[0]] * 32 + [bits[1]] * 32
        assert lanes(f"{with_nan}redux.sync.{name}.NaN.f32 %f2, %f1, -1;{result}", 64) == [bits[0]] * 32 + [0x7FFFFFFF] * 32
    zeros = "setp.eq.u32 %p1, %r0, 7;\nselp.f32 %f1, 0f80000000, 0f00000000, %p1;\n"
    assert lanes(f"{zeros}redux.sync.min.f32 %f2, %f1, -1;{result}") == [0x80000000] * 32
    assert lanes(f"{zeros}redux.sync.max.f32 %f2, %f1, -1;{result}") == [0] * 32
    poisoned = "mov.b32 %r1, smem;\nld.shared.f32 %f1, [%r1];\nsetp.ne.u32 %p1, %r0, 3;\n@%p1 mov.f32 %f1, 0f3F800000;\n"
    poisoned += "redux.sync.max.f32 %f2, %f1, -1;\nst.global.f32 [%rd2], %f2;"
    assert kinds(Kernel(poisoned, smem=16).run(np.zeros(32, np.float32))) == {"poison"}


AWAY = "setp.eq.u32 %p3, %r0, 0;\nsetp.eq.or.u32 %p3, %r0, 9, %p3;\n@%p3 bra OUT;\nCODE\nst.global.u32 [%rd2], %r4;\nOUT:\nmov.u32 %r4, 0;"


@pytest.mark.parametrize("schedule", ["round_robin", "random", "adversarial"])
def test_votes_of_the_lanes_that_are_left(schedule: str) -> None:
    """Lanes 0 and 9 have exited: they do not vote, and lane 1 is the leader."""
    left = [lane for lane in range(32) if lane not in (0, 9)]
    cases = {
        "setp.ge.u32 %p1, %r0, 0;\nvote.sync.ballot.b32 %r4, %p1, -1;": (1 << 32) - 1 - 1 - (1 << 9),
        "setp.ne.u32 %p1, %r0, 0;\nvote.sync.all.pred %p2, %p1, -1;\nselp.b32 %r4, 5, 6, %p2;": 5,
        "setp.eq.u32 %p1, %r0, 9;\nvote.sync.any.pred %p2, %p1, -1;\nselp.b32 %r4, 5, 6, %p2;": 6,
        "setp.eq.u32 %p1, %r0, 20;\nvote.sync.any.pred %p2, %p1, -1;\nselp.b32 %r4, 5, 6, %p2;": 5,
        "elect.sync %r4|%p1, -1;": 1,
        "cvt.rn.f32.u32 %f1, %r0;\nredux.sync.min.f32 %f2, %f1, -1;\ncvt.rzi.u32.f32 %r4, %f2;": 1,
    }
    for code, value in cases.items():
        out = np.full(32, 99, np.uint32)
        text = AWAY.replace("CODE", code).replace("bra OUT", "exit").replace("OUT:", "")
        assert Kernel(text).run(out, policy=Policy.named(schedule, 1)).ok
        assert out.tolist() == [value if lane in left else 99 for lane in range(32)]


def reference_shuffle(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """Source lane and predicate, as the PTX manual's pseudocode has it."""
    bval, cval, segmask = b & 31, c & 31, c >> 8 & 31
    max_lane, min_lane = lane & segmask | cval & ~segmask & 31, lane & segmask
    j = {"up": lane - bval, "down": lane + bval, "bfly": lane ^ bval, "idx": min_lane | bval & ~segmask & 31}[mode]
    valid = j >= max_lane if mode == "up" else j <= max_lane
    return (j if valid else lane), valid


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffle_segments(mode: str) -> None:
    """All segment widths, literal and in registers, with the predicate."""
    for width in (32, 16, 8, 4, 2):
        whole = (32 - width) << 8 | (0 if mode == "up" else width - 1)
        for b, clamp in itertools.product((0, 1, 3, 15, 31, 34), (whole, whole | 31, whole ^ 1)):
            wanted = [
                1000 * (lane + 100) + lane_valid for lane in range(32) for lane, lane_valid in [reference_shuffle(mode, lane, b, clamp)]
            ]
            for operands in (f"{b}, {clamp}", f"%r2, {clamp}", "%r2, %r3"):
                code = (
                    f"mov.u32 %r2, {b};\nmov.u32 %r3, {clamp};\nadd.u32 %r1, %r0, 100;\nshfl.sync.{mode}.b32 %r5|%p1, %r1, {operands}, -1;"
                )
                assert lanes(code + "selp.b32 %r6, 1, 0, %p1;\nmad.lo.u32 %r4, %r5, 1000, %r6;") == wanted, (width, b, operands)


def test_an_undefined_vote_poisons_all_lanes() -> None:
    body = """
        mov.b32 %r1, smem;
        setp.ne.u32 %p1, %r0, 3;
        @%p1 st.shared.u32 [%r1], %r0;
        ld.shared.u32 %r2, [%r1+4];
        selp.b32 %r2, %r0, %r2, %p1;
        setp.lt.u32 %p2, %r2, 99;
        vote.sync.any.pred %p3, %p2, -1;
        selp.b32 %r4, 1, 2, %p3;
        setp.ne.u32 %p4, %r0, LANE;
        @%p4 bra OUT;
        st.global.u32 [%rd2], %r4;
    OUT:
    """
    for lane in (3, 17):
        assert kinds(Kernel(body.replace("LANE", str(lane)), smem=16).run(np.zeros(32, np.uint32))) == {"poison"}
    assert Kernel(body.replace("LANE", "17").replace("+4", ""), smem=16).run(np.zeros(32, np.uint32)).ok


def test_partial_member_masks_are_refused() -> None:
    for code in (
        "bar.warp.sync 15;",
        "shfl.sync.idx.b32 a, a, 0, 31, 15;",
        "vote.sync.any.pred p, p, 15;",
        "elect.sync a|p, 15;",
        "bar.warp.sync a;",
    ):
        with pytest.raises(UnsupportedInstruction, match="member mask"):
            load_module(f"{HEADER}.visible .entry k() {{ .reg .b32 a; .reg .pred p; mov.b32 a, 1; setp.eq.u32 p, a, 1; {code} ret; }}")


# ---------------------------------------------------------------- control flow


@pytest.mark.parametrize("schedule", ["round_robin", "random", "adversarial"])
def test_divergent_loop_reconverges(schedule: str) -> None:
    code = """
        mov.u32 %r4, 0;
        mov.u32 %r1, 0;
    LOOP:
        add.s32 %r1, %r1, 1;
        and.b32 %r2, %r1, 1;
        setp.eq.u32 %p1, %r2, 0;
        @%p1 bra EVEN;
        add.s32 %r4, %r4, %r1;
        bra NEXT;
    EVEN:
        add.s32 %r4, %r4, 1000;
    NEXT:
        setp.le.u32 %p2, %r1, %r0;
        @%p2 bra LOOP;
        shfl.sync.idx.b32 %r5, %r4, 31, 31, -1;
        add.s32 %r4, %r4, %r5;
    """

    def one(lane: int) -> int:
        return sum(1000 if turn % 2 == 0 else turn for turn in range(1, lane + 2))

    assert lanes(code, 64, Policy.named(schedule, 3)) == [one(lane) + one(lane // 32 * 32 + 31) for lane in range(64)]


def test_scoped_labels_and_registers() -> None:
    loop = "{ .reg .pred q; AGAIN: add.u32 %r4, %r4, 1; setp.lt.u32 q, %r4, %d; @q bra AGAIN; }"
    assert lanes(f"mov.u32 %r4, 0;\n{loop.replace('%d', '5')}\n{loop.replace('%d', '9')}") == [9] * 32


def test_special_registers() -> None:
    out = np.zeros(128, np.uint32)
    body = """
        mov.u32 %r1, %ctaid.x;
        mov.u32 %r2, %cluster_ctarank;
        mov.u32 %r3, %clusterid.x;
        mov.u32 %r5, %laneid;
        mad.lo.u32 %r6, %r1, 32, %r0;
        mul.wide.u32 %rd3, %r6, 4;
        add.s64 %rd3, %rd0, %rd3;
        mad.lo.u32 %r4, %r1, 1000, %r5;
        mad.lo.u32 %r4, %r2, 100000, %r4;
        mad.lo.u32 %r4, %r3, 1000000, %r4;
        st.global.u32 [%rd3], %r4;
    """
    assert Kernel(body, grid=4, cluster=2).run(out).ok
    assert out.tolist() == [c * 1000 + lane + c % 2 * 100000 + c // 2 * 1000000 for c in range(4) for lane in range(32)]


def test_what_is_ignored_on_purpose() -> None:
    body = """
        setmaxnreg.inc.sync.aligned.u32 232;
        setmaxnreg.dec.sync.aligned.u32 40;
        nanosleep.u32 100;
        griddepcontrol.wait;
        griddepcontrol.launch_dependents;
        prefetch.global.L1 [%rd2];
        prefetch.global.L2 [%rd2];
        prefetch.global.L2::evict_last [%rd2];
        cp.async.bulk.prefetch.L2.global [%rd0], 16;
        mov.b64 %rd5, p1;
        cvta.param.u64 %rd6, %rd5;
        prefetch.tensormap [%rd6];
        cp.async.bulk.prefetch.tensor.2d.L2.global.tile.L2::cache_hint [%rd6, {%r0, %r0}], %rd5;
        cp.async.bulk.prefetch.tensor.2d.L2.global.tile::gather4 [%rd6, {%r0, %r0, %r0, %r0, %r0}];
        createpolicy.fractional.L2::evict_last.b64 %rd7, 1.0;
        createpolicy.fractional.L2::evict_first.L2::evict_unchanged.b64 %rd7, 0.5;
        fence.proxy.async;
        fence.proxy.async.global;
        fence.acq_rel.gpu;
        fence.sc.cta;
        fence.cluster;
        membar.gl;
        st.global.L2::cache_hint.u32 [%rd2], %r0, %rd7;
        bra.uni LAST;
    LAST:
        ret.uni;
    """
    out = np.zeros(32, np.uint32)
    assert Kernel(body).run(out, 0).ok
    assert out.tolist() == list(range(32))


def test_trap() -> None:
    assert kinds(Kernel("setp.eq.u32 %p1, %r0, 9;\n@%p1 trap;").run(np.zeros(1, np.uint32))) == {"trap"}
    assert Kernel("setp.eq.u32 %p1, %r0, 90;\n@%p1 trap;").run(np.zeros(1, np.uint32)).ok
