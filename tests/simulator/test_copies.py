"""Matrix moves and asynchronous copies, under schedules that complete them early, late and at random."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest

from cute_mla.simulator import Policy, Swizzle, TensorMap, UnsupportedInstruction
from cute_mla.simulator.state.async_work import CopyGroups, GroupedCopy
from cute_mla.simulator.state.origin import Origin
from tests.simulator.barrier_kernels import ALL, WAIT, barrier, each_policy
from tests.simulator.small_kernels import Kernel, aligned, kinds


def test_ldmatrix_of_unwritten_rows_is_poison() -> None:
    body = """
        mov.b32 %r1, smem;
        shl.b32 %r2, %r0, 4;
        add.u32 %r2, %r2, %r1;
        setp.ne.u32 %p1, %r0, 5;
        @%p1 st.shared.v4.u32 [%r2], {%r0, %r0, %r0, %r0};
        bar.warp.sync -1;
        ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r3}, [%r2];
        shr.u32 %r4, %r0, 2;
        setp.eq.u32 %p2, %r4, ROW;
        selp.b32 %r5, 0, %r3, %p2;
        st.global.u32 [%rd2], %r5;
    """
    out = np.zeros(32, np.uint32)
    assert Kernel(body.replace("ROW", "5"), smem=512).run(out).ok
    assert kinds(Kernel(body.replace("ROW", "4"), smem=512).run(out)) == {"poison"}


@pytest.mark.parametrize(
    ("lane", "offset", "count", "kind"),
    [(9, 8, 1, ""), (9, 8, 2, "misaligned"), (9, 512, 1, ""), (9, 512, 2, "out_of_bounds"), (0, 1 << 24, 1, "out_of_bounds")],
)
@pytest.mark.parametrize("move", ["ld{} {}, [%r2];", "st{} [%r2], {};"])
def test_rows_that_no_matrix_may_have(move: str, lane: int, offset: int, count: int, kind: str) -> None:
    """Lanes beyond those that give rows may hold anything."""
    names = "{%r20}" if count == 1 else "{%r20, %r21}"
    body = f"""
        mov.b32 %r1, smem;
        shl.b32 %r2, %r0, 4;
        add.u32 %r2, %r2, %r1;
        setp.eq.u32 %p1, %r0, {lane};
        @%p1 add.u32 %r2, %r2, {offset};
        mov.b32 %r20, 0;
        mov.b32 %r21, 0;
        {move.format(f"matrix.sync.aligned.m8n8.x{count}.shared.b16", names)}
    """
    assert kinds(Kernel(body, smem=512, grid=2, cluster=2).run(np.zeros(1, np.uint32))) == ({kind} if kind else set())


CP_ASYNC = """
    mov.b32 %r1, smem;
    shl.b32 %r2, %r0, 4;
    add.u32 %r2, %r2, %r1;
    ld.param.u64 %rd3, [p1];
    mul.wide.u32 %rd4, %r0, 16;
    add.s64 %rd3, %rd3, %rd4;
    mov.u32 %r3, 16;
    setp.eq.u32 %p1, %r0, 3;
    @%p1 mov.u32 %r3, 4;
    cp.async.cg.shared.global [%r2], [%rd3], 16, %r3;
    cp.async.commit_group;
    %wait
    ld.shared.v4.u32 {%r4, %r5, %r6, %r7}, [%r2];
    add.s64 %rd5, %rd0, %rd4;
    st.global.v4.u32 [%rd5], {%r4, %r5, %r6, %r7};
"""


@each_policy
def test_cp_async(policy: Policy) -> None:
    source, out = aligned(128, np.uint32), aligned(128, np.uint32)
    source[:] = np.arange(128) + 1
    assert Kernel(CP_ASYNC.replace("%wait", "cp.async.wait_group 0;"), smem=512).run(out, source, policy=policy).ok
    expected = source.copy()
    expected[13:16] = 0
    assert out.tolist() == expected.tolist()
    for wait in ("", "cp.async.wait_group 1;"):
        found = kinds(Kernel(CP_ASYNC.replace("%wait", wait), smem=512).run(out, source, policy=policy))
        assert "missing_wait" in found
        assert "poison" in found or policy.async_mode != "lazy"


@each_policy
def test_cp_async_arrives_on_an_mbarrier(policy: Policy) -> None:
    arrive = "cp.async.mbarrier.arrive.noinc.shared.b64 [%r100];" + WAIT
    body = barrier(32) + CP_ASYNC.replace("mov.b32 %r1, smem;", "add.u32 %r1, %r100, 64;").replace("%wait", arrive)
    source, out = aligned(128, np.uint32), aligned(128, np.uint32)
    source[:] = np.arange(128) + 1
    assert Kernel(body, smem=1024).run(out, source, policy=policy).ok
    assert out[0] == 1
    assert kinds(Kernel(body.replace("b64 [%r100], 32", "b64 [%r100], 33"), smem=1024).run(out, source, policy=policy)) == {"deadlock"}


def test_an_arrival_waits_for_the_copies_that_are_not_stored_and_forgets_the_others() -> None:
    """The cost of an arrival must not grow with the copies of the whole run."""
    steps: list[int] = []
    copies = [GroupedCopy(partial(steps.append, i), partial(steps.append, -i), Origin((0, 0, 0), 0, None)) for i in range(1, 5)]
    groups = CopyGroups(open=copies[:], late=copies[:])
    copies[1].advance(2)
    assert groups.unstored() == groups.late == [copies[0], copies[2], copies[3]]
    groups.commit()
    assert groups.wait(0, 2) == copies
    assert groups.late == []
    assert steps == [2, -2, 1, -1, 3, -3, 4, -4]


PEER = """
    shl.b32 %r1, %r0, 2;
    add.u32 %r1, %r1, %r100;
    mad.lo.u32 %r2, %r101, 1000, %r0;
    st.shared.u32 [%r1+256], %r2;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    xor.b32 %r3, %r101, 1;
    mapa.shared::cluster.u32 %r4, %r100, %r3;
    @%p20 bra SENT;
    mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r100], 128;
    add.u32 %r5, %r4, 512;
    add.u32 %r6, %r100, 256;
    cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r5], [%r6], 128, [%r4];
SENT:
"""
READ = """
    ld.shared.u32 %r7, [%r1+512];
    mad.lo.u32 %r8, %r101, 32, %r0;
    mul.wide.u32 %rd3, %r8, 4;
    add.s64 %rd3, %rd0, %rd3;
    st.global.u32 [%rd3], %r7;
    barrier.cluster.arrive;
    barrier.cluster.wait;
"""


@each_policy
def test_bulk_copy_to_the_peer(policy: Policy) -> None:
    out = np.zeros(64, np.uint32)
    assert Kernel(barrier(1) + PEER + WAIT + READ, smem=1024, grid=2, cluster=2).run(out, policy=policy).ok
    assert out.tolist() == [1000 + lane for lane in range(32)] + list(range(32))


MULTICAST = """
    @%p20 bra LOADED;
    mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r100], 1024;
    shl.b32 %r1, %r101, 9;
    add.u32 %r1, %r1, %r100;
    shl.b32 %r2, %r101, 2;
    mov.u32 %r3, 0;
    mov.b64 %rd3, p1;
    cvta.param.u64 %rd4, %rd3;
    mov.b16 %h1, 3;
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
        [%r1+1024], [%rd4, {%r3, %r2}], [%r100], %h1;
LOADED:
"""


@each_policy
def test_multicast_load(policy: Policy) -> None:
    """Each CTA loads 4 rows of 32 floats into both; all threads read the 8 rows."""
    source, out = aligned(32 * 8, np.float32), np.zeros(512, np.float32)
    source[:] = np.arange(256)
    tensor_map = TensorMap("fp32", source.ctypes.data, (32, 8), (128,), (32, 4), Swizzle.NONE)
    read = """
        shl.b32 %r4, %r0, 2;
        add.u32 %r4, %r4, %r100;
        ld.shared.u32 %r5, [%r4+1024];
        mad.lo.u32 %r6, %r101, 256, %r0;
        mul.wide.u32 %rd5, %r6, 4;
        add.s64 %rd5, %rd0, %rd5;
        st.global.u32 [%rd5], %r5;
        barrier.cluster.arrive;
        barrier.cluster.wait;
    """
    kernel = Kernel(barrier(1) + MULTICAST + WAIT + read, smem=4096, grid=2, cluster=2, threads=256)
    assert kernel.run(out, tensor_map, source, policy=policy).ok
    assert out.tolist() == [float(index % 256) for index in range(512)]
    wrong = Kernel(kernel.body.replace("mov.b16 %h1, 3;", "mov.b16 %h1, 1;"), smem=4096, grid=2, cluster=2, threads=256)
    assert not wrong.run(out, tensor_map, source, policy=policy).ok


def test_store_adds_to_global_memory() -> None:
    out = aligned(32, np.float32)
    out[:] = 100
    tensor_map = TensorMap("fp32", out.ctypes.data, (32, 1), (128,), (32, 1))
    body = """
        mov.b32 %r100, smem;
        shl.b32 %r1, %r0, 2;
        add.u32 %r1, %r1, %r100;
        cvt.rn.f32.u32 %f1, %r0;
        st.shared.f32 [%r1], %f1;
        fence.proxy.async.shared::cta;
        bar.sync 0;
        setp.ne.u32 %p1, %r0, 0;
        @%p1 bra OUT;
        mov.b64 %rd3, p1;
        cvta.param.u64 %rd4, %rd3;
        mov.u32 %r3, 0;
        cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%rd4, {%r3, %r3}], [%r100];
        cp.async.bulk.commit_group;
        cp.async.bulk.wait_group 0;
    OUT:
    """
    for policy in ALL:
        out[:] = 100
        assert Kernel(body, smem=1024).run(np.zeros(1, np.uint32), tensor_map, out, policy=policy).ok
        assert out.tolist() == [100.0 + lane for lane in range(32)]


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("cta", ["", "::cta"])
def test_matrix_moves_against_elements(trans: str, count: int, cta: str) -> None:
    """Lane 8i+j has the address of row j of matrix i; lane t has elements (t/4, 2(t%4)) and the next, or of the transpose."""
    names = [f"%r{20 + index}" for index in range(count)]
    spread = "\n".join(f"mad.lo.u32 {name}, %r0, 0x20002, {0x10000 + 0x1000100 * index};" for index, name in enumerate(names))
    body = f"""
        mov.b32 %r1, smem;
        shl.b32 %r2, %r0, 4;
        add.u32 %r2, %r2, %r1;
        st.shared.v4.u32 [%r2], {{%r0, %r0, %r0, %r0}};
        bar.warp.sync -1;
        {spread}
        stmatrix.sync.aligned.m8n8.x{count}{trans}.shared{cta}.b16 [%r2], {{{", ".join(names)}}};
        bar.warp.sync -1;
        ld.shared.v4.u32 {{%r4, %r5, %r6, %r7}}, [%r2];
        ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared{cta}.b16 {{{", ".join(names)}}}, [%r2];
        mul.wide.u32 %rd3, %r0, 32;
        add.s64 %rd3, %rd0, %rd3;
        st.global.v4.b32 [%rd3], {{%r4, %r5, %r6, %r7}};
    """
    body += "\n".join(f"st.global.b32 [%rd3+{16 + 4 * index}], {name};" for index, name in enumerate(names))
    out = aligned(32 * 8, np.uint32)
    assert Kernel(body, smem=512).run(out).ok
    stored = out.reshape(32, 8)[:, :4].copy().view(np.uint16)
    for index in range(count):
        for lane in range(32):
            word = lane * 0x20002 + 0x10000 + 0x1000100 * index
            assert out.reshape(32, 8)[lane, 4 + index] == word
            for half in (0, 1):
                row, column = lane // 4, 2 * (lane % 4) + half
                row, column = (column, row) if trans else (row, column)
                assert stored[8 * index + row, column] == word >> 16 * half & 0xFFFF
    for lane in range(8 * count, 32):
        assert (out.reshape(32, 8)[lane, :4] == lane).all()


@pytest.mark.parametrize(("count", "space"), [(1, "shared"), (2, "shared::cta")])
def test_matrices_of_bytes(count: int, space: str) -> None:
    """Two warps; row r of a warp's memory holds the bytes 16 r, 16 r + 1, ... (mod 256), and the last row of all nothing."""
    names = [f"%r{20 + index}" for index in range(2 * count)]
    body = f"""
        mov.b32 %r1, smem;
        shl.b32 %r2, %r0, 4;
        add.u32 %r2, %r2, %r1;
        mul.lo.u32 %r4, %r0, 0x10101010;
        and.b32 %r4, %r4, 0xF0F0F0F0;
        add.u32 %r4, %r4, 0x03020100;
        add.u32 %r5, %r4, 0x04040404;
        add.u32 %r6, %r5, 0x04040404;
        add.u32 %r7, %r6, 0x04040404;
        setp.lt.u32 %p1, %r0, LIMIT;
        @%p1 st.shared.v4.u32 [%r2], {{%r4, %r5, %r6, %r7}};
        bar.warp.sync -1;
        ldmatrix.sync.aligned.m16n16.x{count}.trans.{space}.b8 {{{", ".join(names)}}}, [%r2];
        mul.wide.u32 %rd3, %r0, 16;
        add.s64 %rd3, %rd0, %rd3;
    """
    body += "\n".join(f"st.global.b32 [%rd3+{4 * index}], {name};" for index, name in enumerate(names))
    out = aligned(64 * 4, np.uint32)
    assert Kernel(body.replace("LIMIT", "64"), threads=64, smem=1024).run(out).ok
    for lane, register, byte in itertools.product(range(64), range(2 * count), range(4)):
        row = lane // 32 * 32 + 16 * (register // 2) + 4 * (lane % 4) + byte
        assert int(out[4 * lane + register]) >> 8 * byte & 255 == (16 * row + lane % 32 // 4 + 8 * (register % 2)) & 255
    missing = Kernel(body.replace("LIMIT", str(31 + 16 * count)), threads=64, smem=1024).run(out)
    assert kinds(missing) == {"poison"}


SIZES = """
    mov.b32 %r1, smem;
    mul.lo.u32 %r2, %r0, SIZE;
    add.u32 %r1, %r1, %r2;
    cvt.u64.u32 %rd4, %r2;
    ld.param.u64 %rd3, [p1];
    add.s64 %rd3, %rd3, %rd4;
    COPY
    cp.async.wait_all;
    add.s64 %rd5, %rd0, %rd4;
    ld.shared.u32 %r5, [%r1];
    st.global.u32 [%rd5], %r5;
    ld.shared.u32 %r5, [%r1+SIZE-4];
    st.global.u32 [%rd5+SIZE-4], %r5;
"""


@each_policy
def test_cp_async_sizes(policy: Policy) -> None:
    for size, level, hint in ((4, "ca", ""), (8, "ca", ".L2::128B"), (16, "ca", ".L2::64B"), (16, "cg", ".L2::256B")):
        source, out = aligned(32 * size // 4, np.uint32), aligned(32 * size // 4, np.uint32)
        source[:] = np.arange(source.size) + 1
        copy = f"cp.async.{level}.shared::cta.global{hint} [%r1], [%rd3], {size};"
        body = SIZES.replace("COPY", copy).replace("SIZE-4", str(size - 4)).replace("SIZE", str(size))
        assert Kernel(body, smem=512).run(out, source, policy=policy).ok
        ends = np.arange(source.size).reshape(32, -1)[:, [0, -1]]
        assert np.array_equal(out[ends], source[ends])


def test_bad_cp_async() -> None:
    source, out = aligned(128, np.uint32), aligned(128, np.uint32)
    assert kinds(Kernel(CP_ASYNC.replace("%r3, 4;", "%r3, 20;").replace("%wait", ""), smem=512).run(out, source)) == {"out_of_bounds"}
    with pytest.raises(UnsupportedInstruction, match="cg copies 16"):
        Kernel(CP_ASYNC.replace("16, %r3", "8, %r3").replace("%wait", ""), smem=512).run(out, source)


@each_policy
def test_cp_async_arrival_that_is_not_counted(policy: Policy) -> None:
    """Without .noinc the arrivals of cp.async are added to what the barrier waits for."""
    arrive = "cp.async.mbarrier.arrive.shared::cta.b64 [%r100];\nbar.warp.sync -1;\n@!%p20 mbarrier.arrive.shared.b64 _, [%r100];" + WAIT
    body = barrier(1) + CP_ASYNC.replace("mov.b32 %r1, smem;", "add.u32 %r1, %r100, 64;").replace("%wait", arrive)
    source, out = aligned(128, np.uint32), aligned(128, np.uint32)
    source[:] = np.arange(128) + 1
    assert Kernel(body, smem=1024).run(out, source, policy=policy).ok
    assert out[:13].tolist() == source[:13].tolist()


@each_policy
def test_bulk_store(policy: Policy) -> None:
    body = """
        mov.b32 %r100, smem;
        shl.b32 %r1, %r0, 2;
        add.u32 %r1, %r1, %r100;
        st.shared.u32 [%r1], %r0;
        fence.proxy.async.shared::cta;
        bar.sync 0;
        setp.ne.u32 %p1, %r0, 0;
        @%p1 bra OUT;
        mov.b64 %rd5, 0;
        cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r100], 64;
        cp.async.bulk.commit_group;
        add.s64 %rd3, %rd0, 64;
        cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%rd3], [%r100+64], 64, %rd5;
        cp.async.bulk.commit_group;
        WAIT
    OUT:
    """
    out = aligned(32, np.uint32)
    for wait in ("cp.async.bulk.wait_group 0;", "cp.async.bulk.wait_group.read 0;"):
        out[:] = 99
        assert Kernel(body.replace("WAIT", wait), smem=1024).run(out, policy=policy).ok
        assert out.tolist() == list(range(32))
    assert kinds(Kernel(body.replace("WAIT", "cp.async.bulk.wait_group 1;"), smem=1024).run(out, policy=policy)) == {"unfinished"}
    odd = body.replace("[%rd0], [%r100], 64", "[%rd0], [%r100], 60").replace("WAIT", "")
    assert kinds(Kernel(odd, smem=1024).run(out, policy=policy)) == {"misaligned"}


BULK_MULTICAST = """
    @%p20 bra LOADED;
    mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r100], 128;
    shl.b32 %r1, %r101, 6;
    add.u32 %r2, %r1, %r100;
    cvt.u64.u32 %rd4, %r1;
    ld.param.u64 %rd3, [p1];
    add.s64 %rd3, %rd3, %rd4;
    mov.b16 %h1, 3;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r2+512], [%rd3], 64, [%r100], %h1;
LOADED:
    shl.b32 %r1, %r0, 2;
    add.u32 %r1, %r1, %r100;
"""


@each_policy
def test_bulk_multicast(policy: Policy) -> None:
    """Each CTA brings half of 128 bytes to both."""
    source, out = aligned(32, np.uint32), np.zeros(64, np.uint32)
    source[:] = np.arange(32) + 5
    kernel = Kernel(barrier(1) + BULK_MULTICAST + WAIT + READ, smem=1024, grid=2, cluster=2)
    assert kernel.run(out, source, policy=policy).ok
    assert out.tolist() == source.tolist() * 2
    nobody = Kernel(kernel.body.replace("mov.b16 %h1, 3;", "mov.b16 %h1, 4;"), smem=1024, grid=2, cluster=2)
    assert kinds(nobody.run(out, source, policy=policy)) == {"multicast"}


@each_policy
@pytest.mark.parametrize(
    ("vector", "kind", "lanes"), [("", "u32", 32), (".v2", "b32", 16), (".v4", "f32", 8), ("", "u64", 16), (".v2", "s64", 8)]
)
def test_st_async_vectors(policy: Policy, vector: str, kind: str, lanes: int) -> None:
    """The first lanes send 128 bytes together."""
    names = [f"%rd{20 + index}" if kind.endswith("64") else f"%r{20 + index}" for index in range(int(vector[2:] or 1))]
    value = names[0] if len(names) == 1 else f"{{{', '.join(names)}}}"
    send = PEER[: PEER.index("    add.u32 %r5, %r4, 512;")]
    send += f"""
    SENT:
        setp.ge.u32 %p5, %r0, {lanes};
        @%p5 bra DONE;
        mul.lo.u32 %r6, %r0, {128 // lanes};
        add.u32 %r7, %r6, %r100;
        add.u32 %r5, %r6, %r4;
        ld.shared{vector}.{kind} {value}, [%r7+256];
        st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{vector}.{kind} [%r5+512], {value}, [%r4];
    DONE:
    """
    out = np.zeros(64, np.uint32)
    assert Kernel(barrier(1) + send + WAIT + READ, smem=1024, grid=2, cluster=2).run(out, policy=policy).ok
    assert out.tolist() == [1000 + lane for lane in range(32)] + list(range(32))


@each_policy
def test_a_copy_signals_the_cta_that_it_writes_to(policy: Policy) -> None:
    elsewhere = PEER.replace("128, [%r4];", "128, [%r100];")
    assert kinds(
        Kernel(barrier(1) + elsewhere + WAIT + READ, smem=1024, grid=2, cluster=2).run(np.zeros(64, np.uint32), policy=policy)
    ) == {"out_of_bounds"}


BOX = """
    shr.u32 %r102, %r0, 5;
    @%p20 bra LOADED;
    mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r100], BYTES;
    mov.b64 %rd3, p1;
    cvta.param.u64 %rd4, %rd3;
    mov.b64 %rd5, 0;
    mov.u32 %r10, 4;
    mov.u32 %r11, 1;
    mov.u32 %r12, 2;
    mov.u32 %r13, 1;
    mov.u32 %r14, 1;
    cp.async.bulk.tensor.RANKd.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint
        [%r100+1024], [%rd4, {COORDS}], [%r100], %rd5;
LOADED:
"""
STORE = """
    bar.sync 0;
    @%p20 bra STORED;
    mov.b64 %rd3, p2;
    cvta.param.u64 %rd4, %rd3;
    cp.async.bulk.tensor.RANKd.global.shared::cta.tile.bulk_group.L2::cache_hint [%rd4, {COORDS}], [%r100+1024], %rd5;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
STORED:
"""


@each_policy
@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_boxes_of_all_ranks(policy: Policy, rank: int) -> None:
    """A box at (4, 1, 2, 1, 1), innermost first, is copied to the same place of another tensor."""
    shape, box, corner = (8, 3, 4, 3, 2)[:rank], (4, 2, 2, 2, 1)[:rank], (4, 1, 2, 1, 1)[:rank]
    size = int(np.prod(shape))
    source, target = aligned(size, np.float32), aligned(size, np.float32)
    source[:] = np.arange(size) + 1
    strides = tuple(4 * int(np.prod(shape[:axis])) for axis in range(1, rank))
    maps = [TensorMap("fp32", array.ctypes.data, shape, strides, box, Swizzle.NONE) for array in (source, target)]
    coords = ", ".join(f"%r{10 + axis}" for axis in range(rank))
    text = (BOX + WAIT + STORE).replace("BYTES", str(4 * int(np.prod(box)))).replace("COORDS", coords).replace("RANK", str(rank))
    assert Kernel(barrier(1) + text, smem=4096).run(np.zeros(1, np.uint32), *maps, source, target, policy=policy).ok
    place = tuple(slice(start, start + length) for start, length in zip(reversed(corner), reversed(box), strict=True))
    wanted = np.zeros(tuple(reversed(shape)), np.float32)
    wanted[place] = source.reshape(wanted.shape)[place]
    assert np.array_equal(target.reshape(wanted.shape), wanted)


TWO_COPIES = """
    @%p20 bra LOADED;
    mbarrier.arrive.expect_tx.shared.b64 %rd9, [%r100], BYTES;
    ld.param.u64 %rd3, [p1];
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r100+64], [%rd3], 64, [%r100];
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r100+128], [%rd3], 64, [%r100];
LOADED:
"""


@each_policy
def test_bytes_that_nobody_expected(policy: Policy) -> None:
    """The second copy is not counted: the wait ends after the first, and the rest is left over even where all data came in time."""
    source, out = aligned(16, np.uint32), np.zeros(32, np.uint32)
    for nbytes, expected in ((128, set()), (64, {"unfinished"})):
        body = barrier(1) + TWO_COPIES.replace("BYTES", str(nbytes)) + WAIT
        assert kinds(Kernel(body, smem=1024).run(out, source, policy=policy)) == expected
