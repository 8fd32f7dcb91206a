"""Machine code that PTX of the simulator has no counterpart of: indirect branches, static shared memory, maps inside structs."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest

from cute_mla.aot_build.tools import assemble
from cute_mla.simulator import GlobalMemory, Launch, Module, Names, Policy, Report, TensorMap, UnsupportedInstruction, run
from cute_mla.simulator.numerics.tma import encode_native_tensor_map
from cute_mla.simulator.sass.disassembler import disassemble
from cute_mla.simulator.sass.module import load_machine_code
from cute_mla.spec.arch import ARCHS, Arch
from tests.simulator.assembled import as_machine_code
from tests.simulator.barrier_kernels import PLACES, converging, each_policy
from tests.simulator.small_kernels import REGISTERS, Kernel, aligned, kinds

THREADS = 64
Dim3 = tuple[int, int, int]
DYNAMIC = ".extern .shared .align 1024 .b8 smem[];"
ADVERSARIAL = Policy.named("adversarial")
ONE = (1, 1, 1)


def load(arch: Arch, body: str, parameters: str = ".param .u64 p0", declarations: str = "") -> Module:
    """Assemble a kernel with ptxas and load its machine code."""
    cubin = assembled_for(arch, body, parameters, declarations)
    return load_machine_code(cubin, disassemble(cubin))


def assembled_for(arch: Arch, body: str, parameters: str, declarations: str = "") -> bytes:
    """Assemble a kernel with ptxas."""
    head = f".version 9.0\n.target {arch.gpu_arch}\n.address_size 64\n{declarations}\n.visible .entry k({parameters})\n.reqntid {THREADS}\n"
    cubin = assemble(f"{head}{{\n{REGISTERS}{body}\nret;\n}}\n", arch.gpu_arch)
    if cubin is None:
        pytest.skip("ptxas is not installed")
    return cubin


def execute(
    module: Module,
    array: np.ndarray,
    args: list[bytes],
    smem: int = 0,
    grid: Dim3 = (1, 1, 1),
    cluster: Dim3 = (1, 1, 1),
    policy: Policy = ADVERSARIAL,
) -> Report:
    memory = GlobalMemory()
    memory.add("array", array.ctypes.data, array.nbytes)
    launch = Launch(module, "k", grid, (THREADS, 1, 1), cluster, smem, [*args], Names())
    return run(launch, memory, policy)


def pointer(array: np.ndarray) -> bytes:
    return struct.pack("<Q", array.ctypes.data)


TABLE = """
ld.global.u32 %r1, [%rd2]; min.u32 %r2, %r1, 3;
places: .branchtargets A, B, C, D;
brx.idx %r2, places;
A: mul.lo.u32 %r3, %r1, 77; bra E;
B: add.u32 %r3, %r1, 1000; bra E;
C: xor.b32 %r3, %r1, 12345; bra E;
D: mad.lo.u32 %r3, %r1, %r1, 5;
E: st.global.u32 [%rd2], %r3;
"""


def test_an_indirect_branch_goes_to_the_place_of_its_table(arch: Arch) -> None:
    given = np.arange(THREADS, dtype=np.uint32) * 7 % 11
    array = given.copy()
    report = execute(load(arch, TABLE), array, [pointer(array)])
    assert not report.findings
    ways = [given * 77, given + 1000, given ^ 12345, given * given + 5]
    np.testing.assert_array_equal(array, np.choose(np.minimum(given, 3), ways))


UNIFORM_TABLE = """
ld.param.u32 %r1, [p1]; min.u32 %r2, %r1, 4;
places: .branchtargets A, B, C, D, F;
brx.idx %r2, places;
A: mul.lo.u32 %r3, %r1, 77; bra E;
B: add.u32 %r3, %r1, 1000; bar.sync 0; bra E;
C: xor.b32 %r3, %r0, 12345; bra E;
D: mad.lo.u32 %r3, %r1, %r1, 5; bra E;
F: ld.global.u32 %r3, [%rd2];
E: st.global.u32 [%rd2], %r3;
"""


def test_a_uniform_indirect_branch_goes_to_the_place_of_its_table() -> None:
    cubin = assembled_for(ARCHS["sm100"], UNIFORM_TABLE, ".param .u64 p0, .param .u64 p1")
    text = disassemble(cubin)
    assert "BRXU UR" in text
    module = load_machine_code(cubin, text)
    lane = np.arange(THREADS, dtype=np.uint32)
    for index in range(6):
        array = lane + 7
        report = execute(module, array, [pointer(array), struct.pack("<Q", index)])
        assert not report.findings
        ways = [0 * lane, 0 * lane + 1001, lane ^ 12345, 0 * lane + 14, lane + 7]
        np.testing.assert_array_equal(array, ways[min(index, 4)])
    with pytest.raises(UnsupportedInstruction, match=r"BRXU .* without a list of its targets"):
        load_machine_code(cubin, re.sub(r'\(\*"BRANCH_TARGETS.*"\*\)', "", text))


WAITING_LANE = """
mov.u32 %r1, smem; setp.ne.u32 %p1, %r0, 0; @%p1 bra READY; mov.u32 %r2, 1; mbarrier.init.shared.b64 [%r1], %r2;
READY: bar.sync 0; ld.global.u32 %r3, [%rd2]; setp.ne.u32 %p2, %r3, 32; @%p2 bra JOIN; mul.lo.u32 %r3, %r3, 77;
WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [%r1], 0; @!%p3 bra WAIT;
JOIN: add.u32 %r3, %r3, 1; GATHER st.global.u32 [%rd2], %r3; @%p1 bra DONE;
ARRIVE
DONE:
"""
GATHER = "shfl.sync.bfly.b32 %r3, %r3, 1, 0x1f, -1;"
ARRIVE = "mbarrier.arrive.shared.b64 _, [%r1];"


@each_policy
@pytest.mark.parametrize(("gather", "arrive"), [(GATHER, ARRIVE), ("", ARRIVE), ("", "")], ids=["WARPSYNC", "BSYNC", "nobody arrives"])
def test_a_complete_warp_does_not_wait_for_the_lanes_of_another(policy: Policy, gather: str, arrive: str) -> None:
    """A lane of the second warp waits for the first warp, which its other lanes stand beside in one convoy."""
    given = np.arange(THREADS, dtype=np.uint32)
    expected = np.where(given == 32, 32 * 77, given) + 1
    body = WAITING_LANE.replace("GATHER", gather).replace("ARRIVE", arrive)
    for arch in (*ARCHS.values(), None):
        array = given.copy()
        if arch is None:
            report = Kernel(body, THREADS, 64).run(array, policy=policy)
        else:
            report = execute(load(arch, body, declarations=DYNAMIC), array, [pointer(array)], 64, policy=policy)
        assert kinds(report) == (set() if arrive else {"deadlock"}), report.findings
        if arrive:
            np.testing.assert_array_equal(array, expected[given ^ 1] if gather else expected)


@each_policy
@pytest.mark.parametrize(("name", "edit"), [("PTX", None), ("BRA.DIV", lambda text: text), ("BRA.CONV", converging)])
def test_lanes_of_a_warp_reach_a_barrier_in_different_places(policy: Policy, name: str, edit: Callable[[str], str] | None) -> None:
    given = np.random.default_rng(5).integers(0, 99, THREADS, np.uint32)
    other = given[np.arange(THREADS) ^ 33]
    expected = np.where(given & 1, given * 77 + other, given + 5 ^ other)
    for count, found in ((THREADS, set()), (THREADS - 32, {"barrier_arrivals", "race"}), (THREADS + 32, {"deadlock"})):
        array = given.copy()
        code: AbstractContextManager[list[str]] = nullcontext([]) if edit is None else as_machine_code(edit)
        with code as texts:
            report = Kernel(PLACES.replace("COUNT", str(count)), THREADS, 4 * THREADS).run(array, policy=policy)
        assert kinds(report) & found if found else not report.findings
        if not found:
            np.testing.assert_array_equal(array, expected)
        assert all(text.count(name) == 2 for text in texts)


HANDED = """
ld.global.u32 %r1, [%rd2]; mov.u32 %r3, smem; mad.lo.u32 %r4, %r0, 4, %r3; xor.b32 %r5, %r4, 128; setp.ge.u32 %p3, %r0, 32;
@%p3 bra OTHER; and.b32 %r2, %r1, 1; setp.eq.u32 %p1, %r2, 0; @%p1 bra EVEN;
mul.lo.u32 %r1, %r1, 77; st.shared.u32 [%r4], %r1; barrier.arrive 3, COUNT; LEAVE
EVEN: add.u32 %r1, %r1, 5; st.shared.u32 [%r4], %r1; barrier.arrive 3, COUNT; JOIN: st.global.u32 [%rd2], %r1; bra END;
OTHER: barrier.sync 3, COUNT; ld.shared.u32 %r1, [%r5]; st.global.u32 [%rd2], %r1; END:
"""


@each_policy
@pytest.mark.parametrize(("name", "edit"), [("PTX", None), ("BRA.DIV", lambda text: text), ("BRA.CONV", converging)])
def test_lanes_of_a_warp_arrive_in_different_places(policy: Policy, name: str, edit: Callable[[str], str] | None) -> None:
    given = np.random.default_rng(5).integers(0, 99, THREADS, np.uint32)
    changed = np.where(given & 1, given * 77, given + 5)[:32]
    for count, leave, found in ((64, "bra JOIN;", set()), (64, "ret;", set()), (96, "ret;", {"deadlock"})):
        array = given.copy()
        code: AbstractContextManager[list[str]] = nullcontext([]) if edit is None else as_machine_code(edit)
        with code as texts:
            report = Kernel(HANDED.replace("LEAVE", leave).replace("COUNT", str(count)), THREADS, 256).run(array, policy=policy)
        assert kinds(report) == found, report.findings
        if not found:
            kept = np.where((given[:32] & 1 == 1) & (leave == "ret;"), given[:32], changed)
            np.testing.assert_array_equal(array, np.concatenate([kept, changed]))
        assert all(name in text for text in texts)


@each_policy
@pytest.mark.parametrize("code", [nullcontext, as_machine_code], ids=["PTX", "machine code"])
@pytest.mark.parametrize("behind", [True, False])
def test_a_warp_arrives_with_the_lanes_that_have_not_exited(
    policy: Policy, code: Callable[[], AbstractContextManager[object]], behind: bool
) -> None:
    """Odd lanes read a word that is 1 and leave, before or after the even ones come to the barrier."""
    leave = "ld.global.u32 %r3, [%rd2]; setp.ne.u32 %p2, %r3, 1; @%p2 st.global.u32 [%rd2], %r0; ret;"
    meet = "barrier.sync 3, 64; st.global.u32 [%rd2], %r0; ret;"
    first, others = (meet, leave) if behind else (leave, meet)
    body = f"and.b32 %r2, %r0, 1; setp.eq.u32 %p1, %r2, {int(behind)}; @%p1 bra OTHERS; {first} OTHERS: {others}"
    array = np.ones(THREADS, np.uint32)
    with code():
        assert not Kernel(body, THREADS).run(array, policy=policy).findings
    assert array[::2].tolist() == list(range(0, THREADS, 2))


STATIC = """
mov.u32 %r1, fixed; mad.lo.u32 %r2, %r0, 4, %r1; ld.global.u32 %r3, [%rd2]; st.shared.u32 [%r2], %r3;
mov.u32 %r4, smem; mad.lo.u32 %r5, %r0, 4, %r4; not.b32 %r6, %r3; st.shared.u32 [%r5], %r6; bar.sync 0;
xor.b32 %r7, %r2, 128; ld.shared.u32 %r8, [%r7]; xor.b32 %r9, %r5, 128; ld.shared.u32 %r10, [%r9]; sub.u32 %r11, %r8, %r10;
st.global.u32 [%rd2], %r11;
"""


def test_dynamic_shared_memory_begins_behind_static_shared_memory(arch: Arch) -> None:
    given = np.arange(THREADS, dtype=np.uint32) * 97
    array = given.copy()
    both = ".shared .align 1024 .b8 fixed[4096]; .extern .shared .align 1024 .b8 smem[];"
    report = execute(load(arch, STATIC, declarations=both), array, [pointer(array)], 4 * THREADS)
    assert not report.findings
    other = np.roll(given, 32)
    np.testing.assert_array_equal(array, other - ~other)


COPY = """
mov.u32 %r1, smem; mov.u64 %rd5, p1; cvta.param.u64 %rd5, %rd5; add.s64 %rd5, %rd5, 64; setp.ne.u32 %p1, %r0, 0; @%p1 bra LATER;
mov.u32 %r2, 1; mbarrier.init.shared.b64 [%r1+4096], %r2; fence.mbarrier_init.release.cluster; fence.proxy.async;
LATER: bar.sync 0; @%p1 bra WAIT; mov.u32 %r3, 0; mov.u64 %rd6, 0x14F0000000000000;
mbarrier.arrive.expect_tx.shared.b64 _, [%r1+4096], 256;
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%r1], [%rd5, {%r3, %r3}], [%r1+4096], %rd6;
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r1+4096], 0; @!%p2 bra WAIT;
mad.lo.u32 %r4, %r0, 4, %r1; ld.shared.u32 %r5, [%r4]; add.u32 %r5, %r5, 1; st.shared.u32 [%r4], %r5; fence.proxy.async; bar.sync 0;
@%p1 bra DONE; mov.u32 %r6, 4;
cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd5, {%r3, %r6}], [%r1]; cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
DONE:
"""


def test_tensor_maps_inside_a_struct_are_found(arch: Arch) -> None:
    array = aligned(128, np.uint32)
    array[:] = np.arange(128)
    plan = TensorMap("u32", array.ctypes.data, (16, 8), (64,), (16, 4))
    struct_bytes = bytes(64) + encode_native_tensor_map(plan) + bytes(64)
    module = load(arch, COPY, ".param .u64 p0, .param .align 64 .b8 p1[256]", ".extern .shared .align 1024 .b8 smem[];")
    report = execute(module, array, [pointer(array), struct_bytes], 8192)
    assert not report.findings
    np.testing.assert_array_equal(array, np.concatenate([np.arange(64), np.arange(64) + 1]))


GATHER = """
mov.u32 %r1, smem; mov.u64 %rd5, p1; cvta.param.u64 %rd5, %rd5; setp.ne.u32 %p1, %r0, 0; @%p1 bra LATER;
mov.u32 %r2, 1; mbarrier.init.shared.b64 [%r1+4096], %r2; fence.mbarrier_init.release.cluster; fence.proxy.async;
LATER: bar.sync 0; @%p1 bra WAIT; mov.u32 %r3, 0; mov.u32 %r4, 6; mov.u32 %r5, 1; mov.u32 %r6, 99; mov.u32 %r7, 3;
mbarrier.arrive.expect_tx.shared.b64 _, [%r1+4096], 256;
cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes [%r1], [%rd5, {%r3, %r4, %r5, %r6, %r7}], [%r1+4096];
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r1+4096], 0; @!%p2 bra WAIT;
mad.lo.u32 %r8, %r0, 4, %r1; ld.shared.u32 %r9, [%r8]; st.global.u32 [%rd2+512], %r9;
"""


def test_a_gathering_copy_brings_four_rows() -> None:
    arch = ARCHS["sm100"]
    array = aligned(192, np.uint32)
    array[:128] = np.arange(1, 129)
    plan = TensorMap("u32", array.ctypes.data, (16, 8), (64,), (16, 1))
    module = load(arch, GATHER, ".param .u64 p0, .param .align 64 .b8 p1[128]", ".extern .shared .align 1024 .b8 smem[];")
    report = execute(module, array, [pointer(array), encode_native_tensor_map(plan)], 8192)
    assert not report.findings
    rows = np.concatenate([array[:128].reshape(8, 16), np.zeros((1, 16), np.uint32)])
    np.testing.assert_array_equal(array[128:], rows[[6, 1, 8, 3]].ravel())


def test_a_place_without_a_tensor_map_is_a_finding(arch: Arch) -> None:
    array = aligned(128, np.uint32)
    module = load(arch, COPY, ".param .u64 p0, .param .align 64 .b8 p1[256]", ".extern .shared .align 1024 .b8 smem[];")
    assert "tensor_map" in kinds(execute(module, array, [pointer(array), bytes(256)], 8192))


CLUSTERS = """
mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mov.u32 %r3, %nctaid.x; mad.lo.u32 %r4, %r2, %r3, %r1;
mul.wide.u32 %rd5, %r4, 32; add.s64 %rd5, %rd0, %rd5; setp.ne.u32 %p1, %r0, 0; @%p1 bra DONE;
mov.u32 %r5, %cluster_nctaid.x; st.global.u32 [%rd5], %r5; mov.u32 %r5, %cluster_nctaid.y; st.global.u32 [%rd5+4], %r5;
mov.u32 %r5, %nclusterid.x; st.global.u32 [%rd5+8], %r5; mov.u32 %r5, %nclusterid.y; st.global.u32 [%rd5+12], %r5;
mov.u32 %r5, %clusterid.x; st.global.u32 [%rd5+16], %r5; mov.u32 %r5, %clusterid.y; st.global.u32 [%rd5+20], %r5;
mov.u32 %r5, %cluster_nctarank; st.global.u32 [%rd5+24], %r5; mov.u32 %r5, %cluster_ctaid.y; st.global.u32 [%rd5+28], %r5;
DONE:
"""


def test_a_kernel_knows_its_cluster(arch: Arch) -> None:
    array = np.zeros((9, 15, 8), np.uint32)
    report = execute(load(arch, CLUSTERS), array, [pointer(array)], grid=(15, 9, 1), cluster=(5, 3, 1))
    assert not report.findings
    y, x = np.indices((9, 15))
    expected = np.stack([0 * x + 5, 0 * x + 3, 0 * x + 3, 0 * x + 3, x // 5, y // 3, 0 * x + 15, y % 3], axis=-1)
    np.testing.assert_array_equal(array, expected)


LOCAL = """
.local .align 8 .b8 own[64]; ld.global.u32 %r1, [%rd2]; and.b32 %r2, %r1, 30; mov.u32 %r3, own; add.u32 %r4, %r3, %r2;
cvt.u16.u32 %h1, %r1; st.local.s16 [%r4], %h1; ld.local.s16 %h2, [%r4]; cvt.s32.s16 %r5, %h2; st.global.u32 [%rd2], %r5;
"""


def test_halves_of_words_in_local_memory(arch: Arch) -> None:
    given = np.random.default_rng(3).integers(0, 2**32, THREADS, np.uint32)
    array = given.copy()
    assert not execute(load(arch, LOCAL), array, [pointer(array)]).findings
    np.testing.assert_array_equal(array.view(np.int32), given.astype(np.uint16).view(np.int16))


CALL = """
ld.global.u32 %r1, [%rd2]; setp.ne.u32 %p1, %r1, 7; @%p1 bra DONE;
mov.u64 %rd5, words; cvta.global.u64 %rd5, %rd5; mov.u64 %rd6, 0;
{ .param .b64 a; .param .b64 b; .param .b32 c; st.param.b64 [a], %rd5; st.param.b64 [b], %rd6; call (c), vprintf, (a, b); }
DONE: add.u32 %r1, %r1, 1; st.global.u32 [%rd2], %r1;
"""


@pytest.mark.parametrize("value", [6, 7])
def test_a_call_outside_the_cubin_is_a_finding_when_it_is_reached(arch: Arch, value: int) -> None:
    array = np.full(THREADS, value, np.uint32)
    outside = ".extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b); .global .align 1 .b8 words[4] = {104, 105, 10, 0};"
    report = execute(load(arch, CALL, declarations=outside), array, [pointer(array)])
    assert kinds(report) == ({"unsupported"} if value == 7 else set())
    if value == 6:
        assert (array == 7).all()


def test_a_refusal_names_everything_at_once() -> None:
    def edit(text: str) -> str:
        return text.replace("S2R R5, SR_TID.X", "FROB.X R5, R6").replace("IMAD.WIDE.U32", "MOV {R9}, IMAD").replace("STG.E ", "STG.FAR ")

    with as_machine_code(edit), pytest.raises(UnsupportedInstruction) as found:
        Kernel("ld.global.u32 %r1, [%rd2]; ldu: st.global.u32 [%rd2], %r1;", THREADS).run(aligned(THREADS, np.uint32))
    for text in ("FROB.X (at 0x10)", "cannot read operand '{R9}'", "STG.FAR (at 0x"):
        assert text in str(found.value)
    with as_machine_code(lambda text: text.replace("EXIT ", "JMP `(.L_x_0) ")), pytest.raises(UnsupportedInstruction) as found:
        Kernel("st.global.u32 [%rd2], %r0;", THREADS).run(aligned(THREADS, np.uint32))
    assert "indirect control flow is not supported" in str(found.value)


CHOSEN = """
ld.global.u32 %r1, [%rd2]; mov.u64 %rd3, p1; mov.u64 %rd4, p2; setp.gt.u32 %p1, %r1, 5; selp.b64 %rd3, %rd3, %rd4, %p1;
ld.param.u64 %rd5, [%rd3+8]; cvt.u32.u64 %r2, %rd5; shr.u64 %rd5, %rd5, 32; cvt.u32.u64 %r3, %rd5; xor.b32 %r2, %r2, %r3;
st.global.u32 [%rd2], %r2;
"""


def test_each_lane_loads_the_parameter_that_it_has_chosen(arch: Arch) -> None:
    given = np.arange(THREADS, dtype=np.uint32) * 7 % 11
    array = given.copy()
    module = load(arch, CHOSEN, ".param .u64 p0, .param .align 8 .b8 p1[16], .param .align 8 .b8 p2[16]")
    report = execute(module, array, [pointer(array), struct.pack("<QII", 1, 77, 3 << 8), struct.pack("<QII", 2, 1000, 5 << 16)])
    assert not report.findings
    assert array.tolist() == np.where(given > 5, 77 ^ 3 << 8, 1000 ^ 5 << 16).tolist()
