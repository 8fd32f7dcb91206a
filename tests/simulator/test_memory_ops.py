"""Loads, stores and atomics: every width and space, against bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest

from cute_mla.simulator import Policy, UnsupportedInstruction
from tests.simulator.assembled import as_machine_code
from tests.simulator.exact import M32, M64, signed
from tests.simulator.small_kernels import Kernel, aligned, kinds

BANKS = {8: "hrd", 16: "hrd", 32: "rd", 64: "d"}
KINDS = [f"{sign}{bits}" for sign in "bus" for bits in (8, 16, 32, 64)] + ["f32"]
SOURCE = """
    .reg .b16 %xh<4>;
    .reg .b32 %xr<4>;
    .reg .b64 %xd<4>;
    mul.wide.u32 %rd3, %r0, 16;
    ld.param.u64 %rd4, [p1];
    add.s64 %rd4, %rd4, %rd3;
    mul.wide.u32 %rd5, %r0, 32;
    add.s64 %rd5, %rd0, %rd5;
    cvt.u32.u64 %r1, %rd3;
    mov.b32 %r2, smem;
    add.u32 %r1, %r1, %r2;
    ld.global.v2.u64 {%rd6, %rd7}, [%rd4];
    st.shared.v2.u64 [%r1], {%rd6, %rd7};
    cvt.u64.u32 %rd8, %r1;
    cvta.shared.u64 %rd8, %rd8;
"""
WHERE = {"global": "%rd4", "shared": "%r1", "shared::cta": "%r1", "shared::cluster": "%r1", "": "%rd8"}
WIDTH = {"h": 16, "r": 32, "d": 64}


@pytest.mark.parametrize("space", WHERE)
def test_loads_of_all_widths(space: str) -> None:
    """Each element type into each register that is wide enough, extended by its sign where it has one."""
    data = aligned(512, np.uint8)
    data[:] = np.random.default_rng(3).integers(0, 256, 512)
    for kind, count in itertools.product(KINDS, (1, 2, 4)):
        bits = int(kind[1:])
        if bits * count > 128:
            continue
        for bank in BANKS[bits] if kind[0] != "f" else "r":
            registers = [f"%x{bank}{index}" for index in range(count)]
            target = registers[0] if count == 1 else f"{{{', '.join(registers)}}}"
            vector = "" if count == 1 else f".v{count}"
            dot = f".{space}" if space else ""
            body = SOURCE + f"ld{dot}{vector}.{kind} {target}, [{WHERE[space]}];\n"
            body += "\n".join(f"st.global.b{WIDTH[bank]} [%rd5+{8 * index}], {name};" for index, name in enumerate(registers))
            out = np.zeros((32, 4), np.uint64)
            assert Kernel(body, smem=512).run(out, data, readonly=(1,)).ok
            for lane, index in itertools.product(range(32), range(count)):
                value = int.from_bytes(data[16 * lane + index * bits // 8 :][: bits // 8].tobytes(), "little")
                wanted = (signed(value, bits) if kind[0] == "s" else value) & ((1 << WIDTH[bank]) - 1)
                assert out[lane, index] == wanted, (kind, count, bank, lane)


@pytest.mark.parametrize("space", WHERE)
def test_stores_of_all_widths(space: str) -> None:
    """The low bytes of each register, and nothing around them."""
    rng = np.random.default_rng(4)
    data = aligned(512, np.uint8)
    for kind, count in itertools.product(KINDS, (1, 2, 4)):
        bits = int(kind[1:])
        if bits * count > 128:
            continue
        bank = BANKS[bits][0]
        dot = f".{space}" if space else ""
        registers = [f"%x{bank}{index}" for index in range(count)]
        source = registers[0] if count == 1 else f"{{{', '.join(registers)}}}"
        vector = "" if count == 1 else f".v{count}"
        body = SOURCE + "ld.param.u64 %rd10, [p2];\nadd.s64 %rd10, %rd10, %rd3;\nadd.s64 %rd10, %rd10, %rd3;\n"
        body += "\n".join(f"ld.global.b{WIDTH[bank]} {name}, [%rd10+{8 * index}];" for index, name in enumerate(registers))
        body += f"\nst{dot}{vector}.{kind} [{WHERE[space]}], {source};\nld.shared.v2.u64 {{%rd6, %rd7}}, [%r1];"
        body += (
            "\nld.global.v2.u64 {%rd8, %rd9}, [%rd4];\nst.global.v2.u64 [%rd5], {%rd6, %rd7};\nst.global.v2.u64 [%rd5+16], {%rd8, %rd9};"
        )
        data[:] = rng.integers(0, 256, 512)
        before = data.copy()
        values = aligned(32 * 4, np.uint64)
        values[:] = rng.integers(0, 2**64, 128, dtype=np.uint64)
        out = aligned(32 * 4, np.uint64)
        assert Kernel(body, smem=512).run(out, data, values).ok
        result = out.view(np.uint8).reshape(32, 2, 16)[:, 1 if space == "global" else 0]
        wanted = before.reshape(32, 16).copy()
        for index in range(count):
            size = bits // 8
            wanted[:, index * size : index * size + size] = values.reshape(32, 4)[:, index : index + 1].copy().view(np.uint8)[:, :size]
        assert np.array_equal(result, wanted), (kind, count)


@pytest.mark.parametrize(
    "opcode",
    [
        "ld.weak.global.u32", "ld.volatile.global.u32", "ld.relaxed.gpu.global.u32", "ld.acquire.sys.global.u32", "ld.global.nc.u32",
        "ld.global.ca.u32", "ld.global.cg.u32", "ld.global.cs.u32", "ld.global.lu.u32", "ld.global.cv.u32", "ld.global.cg.nc.u32",
        "ld.global.nc.L1::no_allocate.L2::128B.u32", "ld.global.L1::evict_last.u32", "ld.global.L2::256B.u32",
    ],
)  # fmt: skip
def test_orders_and_hints_of_loads(opcode: str) -> None:
    data, out = np.arange(32, dtype=np.uint32) + 7, np.zeros(32, np.uint32)
    assert (
        Kernel(f"ld.param.u64 %rd3, [p1];\nadd.s64 %rd3, %rd3, %rd1;\n{opcode} %r4, [%rd3];\nst.global.u32 [%rd2], %r4;").run(out, data).ok
    )
    assert np.array_equal(out, data)


@pytest.mark.parametrize(
    "opcode",
    [
        "st.weak.global.u32", "st.volatile.global.u32", "st.relaxed.cluster.global.u32", "st.release.gpu.global.u32", "st.global.wb.u32",
        "st.global.cg.u32", "st.global.cs.u32", "st.global.wt.u32", "st.global.L1::no_allocate.u32",
    ],
)  # fmt: skip
def test_orders_and_hints_of_stores(opcode: str) -> None:
    out = np.zeros(32, np.uint32)
    assert Kernel(f"{opcode} [%rd2], %r0;").run(out).ok
    assert out.tolist() == list(range(32))


def test_parameters() -> None:
    """Scalars and vectors at offsets of a parameter."""
    packed = 0x1122334455667788
    body = """
        ld.param.v2.b32 {%r1, %r2}, [p1];
        ld.param.v2.b8 {%h1, %h2}, [p1+2];
        ld.param.b32 %r3, [p1+4];
        ld.param.u16 %h3, [p1+6];
        ld.param.s8 %r5, [p1];
        mov.b32 %r6, {%h1, %h2};
        cvt.u32.u16 %r7, %h3;
        st.global.v4.b32 [%rd0], {%r1, %r2, %r3, %r5};
        st.global.v2.b32 [%rd0+16], {%r6, %r7};
    """
    out = aligned(8, np.uint32)
    assert Kernel(body, threads=32).run(out, packed).ok
    assert out.tolist()[:6] == [0x55667788, 0x11223344, 0x11223344, 0xFFFFFF88, 0x00550066, 0x1122]


@pytest.mark.parametrize(
    "code",
    [
        "ld.shared.v4.u64 {%rd3, %rd4, %rd5, %rd6}, [%r0];",
        "st.shared.v8.b32 [%r0], {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8};",
        "ld.global.v8.u16 {%h1, %h2, %h3, %h4, %h5, %h6, %h7, %h8}, [%rd0];",
        "ld.global.v8.b64 {%rd1, %rd2, %rd3, %rd4, %rd5, %rd6, %rd7, %rd8}, [%rd0];",
        "ld.v8.b32 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}, [%rd0];",
    ],
)
def test_vectors_that_are_too_long_are_refused(code: str) -> None:
    with pytest.raises(UnsupportedInstruction, match="16 bytes"):
        Kernel(code).run(aligned(8, np.uint64))


def test_32_bytes_at_once() -> None:
    """256-bit accesses of global memory, which must be aligned; an undefined element poisons its register only."""
    body = """
        mul.wide.u32 %rd3, %r0, 32;
        add.s64 %rd4, %rd0, %rd3;
        ld.param.u64 %rd5, [p1];
        add.s64 %rd5, %rd5, %rd3;
        ld.global.nc.L1::no_allocate.L2::evict_first.L2::256B.v8.b32 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}, [%rd5];
        st.global.v8.b32 [%rd4], {%r8, %r7, %r6, %r5, %r4, %r3, %r2, %r1};
        ld.global.v4.b64 {%rd10, %rd11, %rd12, %rd13}, [%rd5+MORE];
        st.global.v4.b64 [%rd4+1024], {%rd13, %rd12, %rd11, %rd10};
    """
    source, out = aligned(256, np.uint32), aligned(512, np.uint32)
    source[:] = np.arange(256)
    assert Kernel(body.replace("MORE", "0")).run(out, source).ok
    assert np.array_equal(out[:256].reshape(32, 8), source.reshape(32, 8)[:, ::-1])
    assert np.array_equal(out[256:].view(np.uint64).reshape(32, 4), source.view(np.uint64).reshape(32, 4)[:, ::-1])
    assert kinds(Kernel(body.replace("MORE", "16")).run(out, source)) == {"misaligned"}
    assert kinds(Kernel(body.replace("MORE", "32")).run(out, source)) == {"out_of_bounds"}
    assert kinds(Kernel(body.replace("MORE", "0")).run(out, source, undefined=(1,))) == {"poison"}


def test_an_address_of_another_cta_needs_shared_cluster() -> None:
    """.shared and .shared::cta are the own memory; .shared::cluster and generic addresses reach the whole cluster."""
    body = """
        mov.b32 %r1, smem;
        mov.u32 %r2, %cluster_ctarank;
        setp.ne.u32 %p2, %r0, 0;
        @%p2 bra READY;
        st.shared.u32 [%r1], %r2;
        mbarrier.init.shared.b64 [%r1+16], 99;
    READY:
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
        xor.b32 %r3, %r2, 1;
        mapa.shared::cluster.u32 %r4, %r1, %r3;
        cvt.u64.u32 %rd3, %r1;
        mapa.shared::cluster.u64 %rd4, %rd3, %r3;
        cvta.shared.u64 %rd5, %rd3;
        mapa.u64 %rd6, %rd5, %r3;
        cvta.to.shared::cluster.u64 %rd7, %rd6;
        setp.ne.u64 %p3, %rd7, %rd4;
        @%p3 trap;
        ACCESS
        barrier.cluster.arrive.relaxed;
        barrier.cluster.wait;
        mad.lo.u32 %r6, %r2, 32, %r0;
        mul.wide.u32 %rd8, %r6, 4;
        add.s64 %rd8, %rd0, %rd8;
        st.global.u32 [%rd8], %r5;
    """
    allowed = ("ld.shared::cluster.u32 %r5, [%r4];", "ld.u32 %r5, [%rd6];", "atom.shared::cluster.add.u32 %r5, [%r4], 0;")
    refused = (
        "ld.shared.u32 %r5, [%r4];", "ld.shared::cta.u32 %r5, [%r4];", "st.shared.u32 [%r4], %r0;", "atom.shared.add.u32 %r5, [%r4], 1;",
        "mbarrier.arrive.shared.b64 %rd9, [%r4+16];", "mbarrier.test_wait.shared::cta.b64 %p4, [%r4+16], 0;",
        "mbarrier.try_wait.parity.shared.b64 %p4, [%r4+16], 0;", "mbarrier.init.shared.b64 [%r4+32], 1;",
    )  # fmt: skip
    for access in (*allowed, *refused):
        out = np.zeros(64, np.uint32)
        text = "mov.u32 %r5, 0;\n" + body.replace("ACCESS", access)
        report = Kernel(text, smem=64, grid=2, cluster=2).run(out)
        if access in allowed:
            assert report.ok, report.findings
            assert out.tolist() == [1] * 32 + [0] * 32
        else:
            assert kinds(report) == {"out_of_bounds"}, access


def test_a_128_bit_register_is_a_pair() -> None:
    """Loads, moves that swap the halves through one register, and stores, with an undefined half that stays one."""
    body = """
        .reg .b128 %quad<3>, %single;
        ld.param.u64 %rd3, [p1];
        ld.global.b128 %quad1, [%rd3];
        mov.b128 %quad2, %quad1;
        mov.b128 {%rd4, %rd5}, %quad2;
        mov.b128 %single, {%rd5, %rd4};
        mov.b128 {%rd4, %rd5}, {%rd5, %rd4};
        mov.b32 %r1, smem;
        st.shared.b128 [%r1], %single;
        ld.shared.v2.b64 {%rd6, %rd7}, [%r1];
        st.global.v2.b64 [%rd0], {%rd6, %rd7};
        st.global.v2.b64 [%rd0+16], {%rd4, %rd5};
        ld.shared.u64 %rd8, [%r1+16];
        mov.b128 %quad0, {%rd8, %rd4};
        mov.b128 {%rd9, %rd10}, %quad0;
        st.global.b64 [%rd0+32], %rd10;
    """
    source, out = aligned(2, np.uint64), aligned(6, np.uint64)
    source[:] = [0x1111222233334444, 0x5555666677778888]
    assert Kernel(body, smem=64, threads=1).run(out, source).ok
    assert out.tolist() == [int(source[1]), int(source[0])] * 2 + [int(source[1]), 0]
    poisoned = Kernel(body.replace("[%rd0+32], %rd10", "[%rd0+32], %rd9"), smem=64, threads=1).run(out, source)
    assert [finding.kind for finding in poisoned.findings] == ["poison"]


# ---------------------------------------------------------------- atomics


def on_counter(code: str, start: int, space: str) -> tuple[list[int], int]:
    """Old values (one per lane) and the final value of a 64-bit counter; the address is {at}."""
    counter, out = np.array([start], np.uint64), np.zeros(32, np.uint64)
    body = """
        ld.param.u64 %rd3, [p1];
        add.s64 %rd9, %rd2, %rd1;
        mov.b32 %r1, smem;
        cvt.u64.u32 %rd10, %r0;
        ld.global.u64 %rd4, [%rd3];
        setp.eq.u32 %p1, %r0, 0;
        @%p1 st.shared.u64 [%r1], %rd4;
        mov.b64 %rd5, 0;
        mov.b32 %r5, 0;
        bar.warp.sync -1;
    """
    body += code.format(at="%r1" if space.startswith("shared") else "%rd3", space=f".{space}" if space else "")
    body += "\nbar.warp.sync -1;\nst.global.u64 [%rd9], %rd5;\n"
    if space.startswith("shared"):
        body += "ld.shared.u64 %rd6, [%r1];\n@%p1 st.global.u64 [%rd3], %rd6;"
    report = Kernel(body, smem=16).run(out, counter, policy=Policy.named("adversarial", 2))
    assert report.ok, report.findings
    return [int(value) for value in out], int(counter[0])


@pytest.mark.parametrize("space", ["", "global", "shared", "shared::cta", "shared::cluster"])
@pytest.mark.parametrize("order", ["", ".relaxed.gpu", ".acq_rel.sys"])
def test_atomics(space: str, order: str) -> None:
    widen = "\ncvt.u64.u32 %rd5, %r5;"
    for kind in ("u32", "s32"):
        old, final = on_counter(f"atom{order}{{space}}.add.{kind} %r5, [{{at}}], 3;" + widen, M32 - 5, space)
        assert (sorted(old), final) == (sorted((M32 - 5 + 3 * lane) & M32 for lane in range(32)), (M32 - 5 + 96) & M32)
        assert on_counter(f"red{order}{{space}}.add.{kind} [{{at}}], %r0;", 10, space)[1] == 10 + sum(range(32))
    old, final = on_counter(f"atom{order}{{space}}.add.u64 %rd5, [{{at}}], %rd10;", M64 - 1, space)
    assert final == (M64 - 1 + sum(range(32))) & M64
    assert len(set(old)) >= 31
    assert on_counter(f"red{order}{{space}}.add.u64 [{{at}}], %rd10;", M32, space)[1] == M32 + sum(range(32))
    old, final = on_counter(f"atom{order}{{space}}.exch.b32 %r5, [{{at}}], %r0;" + widen, 77, space)
    assert sorted([*old, final]) == sorted([77, *range(32)])
    old, final = on_counter(f"atom{order}{{space}}.exch.b64 %rd5, [{{at}}], %rd10;", M64, space)
    assert sorted([*old, final]) == sorted([M64, *range(32)])
    old, final = on_counter(f"add.u32 %r6, %r0, 1;\natom{order}{{space}}.cas.b32 %r5, [{{at}}], %r0, %r6;" + widen, 0, space)
    assert final > 0
    assert sorted(set(old)) == list(range(len(set(old))))  # 0, 1, ..: each success is seen by the next
    assert on_counter(f"add.u64 %rd6, %rd10, 100;\natom{order}{{space}}.cas.b64 %rd5, [{{at}}], %rd10, %rd6;", 9, space)[1] == 109


@pytest.mark.parametrize(("space", "order"), [("", ".relaxed.gpu"), ("global", ""), ("shared", ""), ("shared.cta", ""), ("global.gpu", "")])
def test_atomic_minimum_and_maximum(space: str, order: str) -> None:
    """Signed and unsigned, on a counter in between the 32 values."""
    widen = "\ncvt.u64.u32 %rd5, %r5;"
    spread = "sub.u32 %r6, %r0, 16;\nshl.b32 %r6, %r6, 4;\n"
    signed_values = [(lane - 16) * 16 for lane in range(32)]
    for kind, start in (("s32", 5), ("s32", -5), ("u32", 5), ("u32", -5)):
        values = [value & M32 for value in signed_values] if kind == "u32" else signed_values
        first = start & M32 if kind == "u32" else start
        for name, function in (("min", min), ("max", max)):
            code = f"{spread}atom{order}{{space}}.{name}.{kind} %r5, [{{at}}], %r6;" + widen
            old, final = on_counter(code, start & M32, space)
            assert final == function(first, *values) & M32
            assert start & M32 in old


def test_atomics_on_bad_memory() -> None:
    add = "atom.global.add.u32 %r5, [%rd3], 1;"
    assert kinds(Kernel(f"ld.param.u64 %rd3, [p1];\n{add}").run(np.zeros(1, np.uint32), np.zeros(1, np.uint32), undefined=(1,))) == {
        "poison"
    }
    assert kinds(Kernel(f"add.s64 %rd3, %rd0, 4;\n{add}").run(np.zeros(1, np.uint32))) == {"out_of_bounds"}
    assert kinds(Kernel(f"mov.b64 %rd3, %rd0;\n{add}").run(np.zeros(1, np.uint32), readonly=(0,))) == {"read_only"}
    assert kinds(Kernel(f"add.s64 %rd3, %rd0, 2;\n{add}").run(np.zeros(2, np.uint32))) == {"misaligned"}


@pytest.mark.parametrize("as_code", [nullcontext, as_machine_code], ids=["PTX", "machine code"])
def test_sums_of_floats(as_code: Callable[[], AbstractContextManager[object]]) -> None:
    """Each lane adds four floats to one of eight places. Denormals count as zero in global memory."""
    array = aligned(32 + 32, np.float32)
    array[:32] = 1e-40
    body = "and.b32 %r1, %r0, 7; mul.wide.u32 %rd3, %r1, 16; add.s64 %rd3, %rd0, %rd3; cvt.rn.f32.u32 %f1, %r0; mov.f32 %f2, 0f00000001;"
    body += (
        "red.global.add.v4.f32 [%rd3], {%f1, %f1, %f2, %f1}; red.global.add.v2.f32 [%rd3+8], {%f2, %f1}; red.global.add.f32 [%rd3], %f1;"
    )
    with as_code():
        assert Kernel(body).run(array).ok
    total = np.arange(32, dtype=np.float32).reshape(4, 8).sum(0)
    np.testing.assert_array_equal(array[:32].reshape(8, 4), total[:, None] * np.array([2, 1, 0, 2], np.float32))
    with as_code():
        assert kinds(Kernel(body.replace("[%rd3]", "[%rd3+4]")).run(array)) == {"misaligned"}


def test_sums_of_floats_in_shared_memory_keep_denormals() -> None:
    array = aligned(32, np.float32)
    body = "mov.u32 %r1, smem; mov.f32 %f1, 0f00000001; st.shared.f32 [%r1], %f1; red.shared.add.f32 [%r1], %f1; ld.shared.f32 %f2, [%r1];"
    assert Kernel(body + "st.global.f32 [%rd2], %f2;", smem=64).run(array).ok
    assert np.unique(array.view(np.uint32)).tolist() == [33]


@pytest.mark.parametrize(("half", "found"), [(0, set()), (16, {"poison"})])
def test_either_half_of_a_load_of_32_bytes_may_be_undefined(half: int, found: set[str]) -> None:
    array = aligned(8 * 32, np.uint32)
    body = "mul.wide.u32 %rd3, %r0, 32; add.s64 %rd3, %rd0, %rd3; st.global.v4.u32 [%rd3], {%r0, %r0, %r0, %r0}; bar.sync 0;"
    body += "ld.volatile.global.u32 %r1, [%rd3]; ld.global.v8.b32 {%r10, %r11, %r12, %r13, %r14, %r15, %r16, %r17}, [%rd3];"
    body += f"st.global.v4.b32 [%rd3], {{{'%r10, %r11, %r12, %r13' if half == 0 else '%r14, %r15, %r16, %r17'}}};"
    for as_code in (nullcontext, as_machine_code):
        with as_code():
            assert kinds(Kernel(body).run(array, undefined=(0,))) == found
