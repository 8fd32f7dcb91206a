"""Loads of a pair of CTAs (cta_group::2), and loads of four rows at a time, under all schedules."""

from __future__ import annotations

import numpy as np
import pytest

from cute_mla.simulator import Policy, Swizzle, TensorMap, UnsupportedInstruction
from tests.simulator.barrier_kernels import ALL, WAIT, barrier, each_policy
from tests.simulator.small_kernels import Kernel, aligned, kinds

LOAD = """
    and.b32 %r103, %r101, 1;
    setp.ne.u32 %p22, %r103, 0;
    and.b32 %r102, %r100, 0xFEFFFFFF;
    @%p20 bra LOADED;
    @%p22 bra LOAD;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r100], BYTES;
LOAD:
    shl.b32 %r2, %r101, 2;
    mov.u32 %r3, 0;
    mov.b64 %rd3, p1;
    cvta.param.u64 %rd4, %rd3;
    mov.b16 %h1, 3;
    mov.b64 %rd5, 0;
    COPY
LOADED:
    @!%p22 bra MINE;
    bra.uni READY;
MINE:
"""
READ_BOTH = """
READY:
    barrier.cluster.arrive;
    barrier.cluster.wait;
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
TENSOR = "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
OWN = f"{TENSOR}.cta_group::2 [%r100+1024], [%rd4, {{%r3, %r2}}], [%r102];"


def pair_kernel(copy: str, nbytes: int, cluster: int = 2) -> Kernel:
    """Both CTAs of a pair load, the even one waits on its mbarrier, then both read 1 KB."""
    load = LOAD.replace("BYTES", str(nbytes)).replace("COPY", copy)
    return Kernel(barrier(1) + load + WAIT + READ_BOTH, smem=4096, grid=cluster, cluster=cluster, threads=256)


def rows_of(count: int, box_rows: int) -> tuple[np.ndarray, TensorMap]:
    """Return rows of 32 floats that count up, and a map of them."""
    source = aligned(32 * count, np.float32)
    source[:] = np.arange(source.size)
    return source, TensorMap("fp32", source.ctypes.data, (32, count), (128,), (32, box_rows), Swizzle.NONE)


@each_policy
def test_both_ctas_of_a_pair_signal_the_even_one(policy: Policy) -> None:
    source, tensor_map = rows_of(16, 8)
    out = np.zeros(512, np.float32)
    copy = OWN.replace("%r2}", "%r5}")
    kernel = pair_kernel("shl.b32 %r5, %r101, 3;\n" + copy, 2048)
    assert kernel.run(out, tensor_map, source, policy=policy).ok
    assert out.tolist() == [float(index) for index in range(512)]
    short = Kernel(kernel.body.replace("2048;", "2047;"), kernel.threads, kernel.smem, 2, 2)
    assert "deadlock" in kinds(short.run(out, tensor_map, source, policy=policy))
    hinted = Kernel(kernel.body.replace(".cta_group::2 ", ".L2::cache_hint.cta_group::2 ").replace("[%r102];", "[%r102], %rd5;"),
                    kernel.threads, kernel.smem, 2, 2)  # fmt: skip
    assert hinted.run(out, tensor_map, source, policy=policy).ok


@each_policy
def test_a_load_of_one_cta_must_not_signal_its_peer(policy: Policy) -> None:
    source, tensor_map = rows_of(16, 8)
    for group in ("", ".cta_group::1"):
        kernel = pair_kernel(OWN.replace(".cta_group::2", group), 2048)
        assert kinds(kernel.run(np.zeros(512, np.float32), tensor_map, source, policy=policy)) == {"out_of_bounds"}


def test_a_pair_is_not_any_two_ctas() -> None:
    """From CTA 2 the mbarrier of CTA 0 is out of reach, that of CTA 3 is not."""
    source, tensor_map = rows_of(32, 8)
    to_first = OWN.replace("[%r102]", "[%r103]")
    for policy in ALL:
        kernel = pair_kernel("and.b32 %r103, %r100, 0xFCFFFFFF;\n" + to_first, 2048, cluster=4)
        assert kinds(kernel.run(np.zeros(1024, np.float32), tensor_map, source, policy=policy)) == {"out_of_bounds"}
        out = np.zeros(1024, np.float32)
        fine = pair_kernel("shl.b32 %r5, %r101, 3;\n" + OWN.replace("%r2}", "%r5}"), 2048, cluster=4)
        assert fine.run(out, tensor_map, source, policy=policy).ok
        assert out.tolist() == [float(index) for index in range(1024)]


@each_policy
def test_multicast_of_a_pair_signals_the_even_cta_once_for_each_copy(policy: Policy) -> None:
    """Each CTA loads 4 rows into both: 4 copies of 512 bytes, all of them counted by the even CTA."""
    source, tensor_map = rows_of(8, 4)
    out = np.zeros(512, np.float32)
    copy = f"shl.b32 %r1, %r101, 9;\nadd.u32 %r1, %r1, %r100;\n{TENSOR}.multicast::cluster.cta_group::2"
    copy += " [%r1+1024], [%rd4, {%r3, %r2}], [%r102], %h1;"
    kernel = pair_kernel(copy, 2048)
    assert kernel.run(out, tensor_map, source, policy=policy).ok
    assert out.tolist() == [float(index % 256) for index in range(512)]
    for wrong in (copy.replace(".multicast::cluster", "").replace(", %h1", ""), "mov.b16 %h1, 2;\n" + copy):
        assert "deadlock" in kinds(pair_kernel(wrong, 2048).run(out, tensor_map, source, policy=policy))


@each_policy
def test_multicast_to_several_pairs_signals_each_even_cta(policy: Policy) -> None:
    """CTA 3 loads 8 rows into all four CTAs: 2 KB for the even CTA of each pair, whoever asked."""
    source, tensor_map = rows_of(8, 8)
    out = np.zeros(1024, np.float32)
    copy = f"setp.ne.u32 %p23, %r101, 3;\n@%p23 bra LOADED;\nmov.b16 %h1, 15;\nmov.u32 %r2, 0;\n{TENSOR}.multicast::cluster.cta_group::2"
    copy += " [%r100+1024], [%rd4, {%r3, %r2}], [%r102], %h1;"
    assert pair_kernel(copy, 2048, cluster=4).run(out, tensor_map, source, policy=policy).ok
    assert out.tolist() == [float(index % 256) for index in range(1024)]


# ---------------------------------------------------------------- four rows

GATHER = """
    @%p20 bra LOADED;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r100], 512;
    mov.b64 %rd3, p1;
    cvta.param.u64 %rd4, %rd3;
    ld.param.u64 %rd6, [p2];
    ld.global.v4.b32 {%r11, %r12, %r13, %r14}, [%rd6];
    mov.u32 %r10, COLUMN;
    cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes
        [%r100+OFFSET], [%rd4, {%r10, %r11, %r12, %r13, %r14}], [%r100];
LOADED:
"""
READ_ROWS = """
    shl.b32 %r4, %r0, 2;
    add.u32 %r4, %r4, %r100;
    ld.shared.u32 %r5, [%r4+OFFSET];
    st.global.u32 [%rd2], %r5;
"""


def gather(column: int = 0, offset: int = 1024, body: str = GATHER + WAIT + READ_ROWS) -> Kernel:
    """Four rows of 128 bytes, written out as they lie in shared memory."""
    return Kernel(barrier(1) + body.replace("COLUMN", str(column)).replace("OFFSET", str(offset)), smem=4096, threads=128)


def swizzled_rows(rows: np.ndarray, phase: int) -> np.ndarray:
    """Return rows of 32 words whose 16-byte chunks are permuted by the number of their 128-byte line."""
    out = np.zeros_like(rows)
    for row in range(len(rows)):
        for word in range(32):
            out[row, (word // 4 ^ (row + phase) % 8) * 4 + word % 4] = rows[row, word]
    return out


@each_policy
@pytest.mark.parametrize(("swizzle", "offset"), [(Swizzle.NONE, 1024), (Swizzle.B128, 1024), (Swizzle.B128, 1536), (Swizzle.B128, 1152)])
def test_gathered_rows(policy: Policy, swizzle: Swizzle, offset: int) -> None:
    """Rows in any order and twice; rows before and behind the tensor are zeros, and the transaction counts them."""
    source, _ = rows_of(10, 1)
    tensor_map = TensorMap("fp32", source.ctypes.data, (32, 10), (128,), (32, 1), swizzle)
    for chosen in ([7, 0, 7, 3], [-1, 9, 10, 2], [2**31 - 1, -(2**31), 4, 0]):
        index = aligned(4, np.int32)
        index[:] = chosen
        out = np.full(128, 7, np.float32)
        assert gather(offset=offset).run(out, tensor_map, index, source, policy=policy).ok
        rows = np.array([source.reshape(10, 32)[row] if 0 <= row < 10 else np.zeros(32, np.float32) for row in chosen])
        wanted = rows if swizzle is Swizzle.NONE else swizzled_rows(rows, offset // 128)
        assert out.tolist() == wanted.ravel().tolist()


@each_policy
def test_gathered_columns_beyond_the_tensor_are_zeros(policy: Policy) -> None:
    source, tensor_map = rows_of(10, 1)
    index, out = aligned(4, np.int32), np.full(128, 7, np.float32)
    index[:] = [1, 2, 3, 4]
    assert gather(column=20).run(out, tensor_map, index, source, policy=policy).ok
    wanted = np.zeros((4, 32), np.float32)
    wanted[:, :12] = source.reshape(10, 32)[1:5, 20:]
    assert out.tolist() == wanted.ravel().tolist()


def test_what_gathering_requires() -> None:
    source, tensor_map = rows_of(10, 1)
    index, out = aligned(4, np.int32), np.zeros(128, np.float32)
    assert kinds(gather(offset=1024 + 64).run(out, tensor_map, index, source)) == {"misaligned"}
    four = TensorMap("fp32", source.ctypes.data, (32, 10), (128,), (32, 4), Swizzle.NONE)
    assert kinds(gather().run(out, four, index, source)) == {"tensor_map"}
    cube = TensorMap("fp32", source.ctypes.data, (32, 5, 2), (128, 640), (32, 1, 1), Swizzle.NONE)
    assert kinds(gather().run(out, cube, index, source)) == {"tensor_map"}
    with pytest.raises(UnsupportedInstruction, match="a column and 4 rows"):
        gather(body=GATHER.replace(", %r14}], [%r100]", "}], [%r100]")).run(out, tensor_map, index, source)
    missing = gather(body=GATHER + READ_ROWS)
    for policy in ALL:
        if policy.async_mode == "lazy":
            assert not missing.run(out, tensor_map, index, source, policy=policy).ok


@each_policy
def test_a_pair_gathers(policy: Policy) -> None:
    """Each CTA brings four rows, and the even CTA counts the bytes of both."""
    source, tensor_map = rows_of(16, 1)
    out = np.zeros(512, np.float32)
    rows = "shl.b32 %r10, %r101, 2;\n" + "\n".join(f"add.u32 %r1{index}, %r10, {index};" for index in range(1, 5))
    copy = "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes.cta_group::2"
    copy += " [%r100+1024], [%rd4, {%r3, %r14, %r13, %r12, %r11}], [%r102];"
    kernel = pair_kernel(f"{rows}\n{copy}", 1024)
    half = "mov.u32 %r5, 0;\nsetp.lt.u32 %p3, %r0, 128;\n@%p3 ld.shared.u32 %r5, [%r4+1024];"
    body = kernel.body.replace("ld.shared.u32 %r5, [%r4+1024];", half)
    assert Kernel(body, 256, 4096, 2, 2).run(out, tensor_map, source, policy=policy).ok
    table = source.reshape(16, 32)
    for rank in range(2):
        wanted = table[[4 * rank + 4, 4 * rank + 3, 4 * rank + 2, 4 * rank + 1]]
        assert np.array_equal(out[256 * rank : 256 * rank + 128].reshape(4, 32), wanted)


SCATTER = """
    mov.b32 %r100, smem;
    shl.b32 %r1, %r0, 2;
    add.u32 %r1, %r1, %r100;
    st.shared.u32 [%r1], %r0;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    setp.ne.u32 %p1, %r0, 0;
    @%p1 bra OUT;
    mov.b64 %rd3, p1;
    cvta.param.u64 %rd4, %rd3;
    mov.u32 %r3, 0;
    mov.u32 %r4, 5;
    mov.u32 %r5, -1;
    mov.u32 %r6, 2;
    mov.u32 %r7, 8;
    cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group [%rd4, {%r3, %r4, %r5, %r6, %r7}], [%r100];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
OUT:
"""


@each_policy
def test_scattered_rows(policy: Policy) -> None:
    """Rows outside the tensor are left out."""
    target = aligned(8 * 32, np.uint32)
    tensor_map = TensorMap("u32", target.ctypes.data, (32, 8), (128,), (32, 1), Swizzle.NONE)
    assert Kernel(SCATTER, threads=128, smem=1024).run(np.zeros(1, np.uint32), tensor_map, target, policy=policy).ok
    wanted = np.zeros((8, 32), np.uint32)
    wanted[5], wanted[2] = np.arange(32), np.arange(64, 96)
    assert np.array_equal(target.reshape(8, 32), wanted)
    early = Kernel(SCATTER.replace("wait_group 0", "wait_group 1"), threads=128, smem=1024)
    assert kinds(early.run(np.zeros(1, np.uint32), tensor_map, target, policy=policy)) == {"unfinished"}
