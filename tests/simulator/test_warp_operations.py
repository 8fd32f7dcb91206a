"""Products, matrices of bytes, matches and floats of four bits of a warp, against their definition written out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest

from cute_mla.simulator import UnsupportedInstruction
from cute_mla.simulator.numerics import elementwise
from tests.simulator.assembled import as_machine_code
from tests.simulator.exact import M32
from tests.simulator.small_kernels import Kernel, aligned, kinds

Code = Callable[[], AbstractContextManager[object]]
both_codes = pytest.mark.parametrize("code", [nullcontext, as_machine_code], ids=["PTX", "machine code"])

PRODUCT = """
mul.wide.u32 %rd3, %r0, 40; add.s64 %rd3, %rd0, %rd3;
ld.global.v2.u32 {%r10, %r11}, [%rd3]; ld.global.v2.u32 {%r12, %r13}, [%rd3+8]; ld.global.v2.u32 {%r14, %r15}, [%rd3+16];
ld.global.v2.f32 {%f1, %f2}, [%rd3+24]; ld.global.v2.f32 {%f3, %f4}, [%rd3+32];
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f5, %f6, %f7, %f8}, {%r10, %r11, %r12, %r13}, {%r14, %r15}, {%f1, %f2, %f3, %f4};
st.global.v2.f32 [%rd3+24], {%f5, %f6}; st.global.v2.f32 [%rd3+32], {%f7, %f8};
"""
BYTE_PRODUCT = PRODUCT.replace("m16n8k16", "m16n8k32").replace("bf16", "e4m3")
A_PLACES = [((lane // 4 + 8 * (i % 2), 2 * (lane % 4) + 8 * (i // 2) + half), (lane, i, half))
            for lane in range(32) for i in range(4) for half in range(2)]  # fmt: skip
B_PLACES = [((2 * (lane % 4) + 8 * i + half, lane // 4), (lane, i, half)) for lane in range(32) for i in range(2) for half in range(2)]
A_BYTES = [((lane // 4 + 8 * (i % 2), 4 * (lane % 4) + 16 * (i // 2) + byte), (lane, i, byte))
           for lane in range(32) for i in range(4) for byte in range(4)]  # fmt: skip
B_BYTES = [((4 * (lane % 4) + 16 * i + byte, lane // 4), (lane, i, byte)) for lane in range(32) for i in range(2) for byte in range(4)]
D_PLACES = [((lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2), (lane, i)) for lane in range(32) for i in range(4)]


def bf16(values: np.ndarray) -> np.ndarray:
    return elementwise.f32_to_bf16(values.astype(np.float32))


def e4m3(value: int) -> int:
    return int(elementwise.f32_to_fp8(np.array([value], np.float32), "e4m3")[0])


@both_codes
def test_a_product_of_a_warp(code: Code) -> None:
    rng = np.random.default_rng(2)
    a, b, c = rng.integers(-8, 8, (16, 16)), rng.integers(-8, 8, (16, 8)), rng.integers(-99, 99, (16, 8))
    array = aligned(32 * 10, np.uint32)
    words = array.reshape(32, 10)
    halves = words.view(np.uint16).reshape(32, 10, 2)
    for (row, column), (lane, i, half) in A_PLACES:
        halves[lane, i, half] = bf16(a[row, column])
    for (row, column), (lane, i, half) in B_PLACES:
        halves[lane, 4 + i, half] = bf16(b[row, column])
    for (row, column), (lane, i) in D_PLACES:
        words.view(np.float32)[lane, 6 + i] = c[row, column]
    with code():
        assert Kernel(PRODUCT).run(array).ok
    expected = a @ b + c
    for (row, column), (lane, i) in D_PLACES:
        assert words.view(np.float32)[lane, 6 + i] == expected[row, column]


@both_codes
def test_a_product_of_bytes(code: Code) -> None:
    rng = np.random.default_rng(3)
    a, b, c = rng.integers(-8, 9, (16, 32)), rng.integers(-16, 17, (32, 8)), rng.integers(-99, 99, (16, 8))
    array = aligned(32 * 10, np.uint32)
    words = array.reshape(32, 10)
    codes = words.view(np.uint8).reshape(32, 10, 4)
    for (row, column), (lane, i, byte) in A_BYTES:
        codes[lane, i, byte] = e4m3(a[row, column])
    for (row, column), (lane, i, byte) in B_BYTES:
        codes[lane, 4 + i, byte] = e4m3(b[row, column])
    for (row, column), (lane, i) in D_PLACES:
        words.view(np.float32)[lane, 6 + i] = c[row, column]
    codes[4 * 3 + 1, 0, 2] = 0x7F  # row 3
    with code():
        assert Kernel(BYTE_PRODUCT).run(array).ok
    expected = a @ b + c
    for (row, column), (lane, i) in D_PLACES:
        found = words.view(np.float32)[lane, 6 + i]
        assert np.isnan(found) if row == 3 else found == expected[row, column]


SCALED = "kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32.row.col.f32.e4m3.e4m3.f32.ue8m0"
SCALED_PRODUCT = "add.u32 %r20, %r0, 0x12345678; sub.u32 %r21, 200, %r0;" + BYTE_PRODUCT.replace(
    "m16n8k32.row.col.f32.e4m3.e4m3.f32", SCALED
).replace("%f3, %f4};", "%f3, %f4}, %r20, {0, 0}, %r21, {0, 0};", 1)


def test_scales_of_rows_and_columns() -> None:
    """Byte 0: of A those of rows g and g + 8 in lanes 4g and 4g + 1, of B that of column g in lane 4g."""
    assert SCALED_PRODUCT.count("%r21, {0, 0}") == 1
    rng = np.random.default_rng(4)
    a, b = rng.integers(-8, 9, (16, 32)), rng.integers(-16, 17, (32, 8))
    array = aligned(32 * 10, np.uint32)
    words = array.reshape(32, 10)
    codes = words.view(np.uint8).reshape(32, 10, 4)
    for places, matrix, first in ((A_BYTES, a, 0), (B_BYTES, b, 4)):
        for (row, column), (lane, i, byte) in places:
            codes[lane, first + i, byte] = e4m3(matrix[row, column])
    words[:, 6:] = 0
    assert Kernel(SCALED_PRODUCT).run(array).ok
    rows = [2.0 ** (0x78 + 4 * (row % 8) + row // 8 - 127) for row in range(16)]
    columns = [2.0 ** (200 - 4 * column - 127) for column in range(8)]
    for (row, column), (lane, i) in D_PLACES:
        assert words.view(np.float32)[lane, 6 + i] == (a @ b)[row, column] * rows[row] * columns[column]


@pytest.mark.parametrize("places", ["{1, 0}, %r21, {0, 0}", "{0, 0}, %r21, {0, 2}"])
def test_scales_elsewhere_are_refused(places: str) -> None:
    with pytest.raises(UnsupportedInstruction, match=r"supported: \{0, 0\}"):
        Kernel(SCALED_PRODUCT.replace("{0, 0}, %r21, {0, 0}", places)).run(aligned(320, np.uint32))


UNDEFINED = """
mov.u32 %r1, smem; setp.eq.u32 %p1, %r0, 5; mov.u32 %r10, 0; @%p1 ld.shared.u32 %r10, [%r1]; mov.f32 %f1, 0f00000000;
mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f5, %f6, %f7, %f8}, {A}, {B}, {%f1, %f1, %f1, %f1};
shr.u32 %r2, %r0, 2; and.b32 %r3, %r0, 3; mov.b32 %r4, WHICH; setp.eq.u32 %p2, LANES; @%p2 st.global.u32 [%rd2], %r4;
"""


@both_codes
@pytest.mark.parametrize(
    ("a", "b", "which", "lanes", "found"),
    [
        ("%r10, %r0, %r0, %r0", "%r0, %r0", "%f5", "%r2, 1", {"poison"}),  # row 1
        ("%r10, %r0, %r0, %r0", "%r0, %r0", "%f5", "%r2, 2", set()),
        ("%r10, %r0, %r0, %r0", "%r0, %r0", "%f7", "%r2, 1", set()),  # row 9
        ("%r0, %r0, %r0, %r10", "%r0, %r0", "%f7", "%r2, 1", {"poison"}),
        ("%r0, %r0, %r0, %r0", "%r0, %r10", "%f6", "%r3, 0", {"poison"}),  # column 1
        ("%r0, %r0, %r0, %r0", "%r0, %r10", "%f5", "%r3, 0", set()),  # column 0
        ("%r0, %r0, %r0, %r0", "%r0, %r10", "%f8", "%r3, 1", set()),  # column 3
    ],
)
def test_undefined_rows_and_columns_of_a_product(code: Code, a: str, b: str, which: str, lanes: str, found: set[str]) -> None:
    body = UNDEFINED.replace("{A}", f"{{{a}}}").replace("{B}", f"{{{b}}}").replace("WHICH", which).replace("LANES", lanes)
    with code():
        assert kinds(Kernel(body, smem=64).run(aligned(32, np.uint32))) == found


@pytest.mark.parametrize(
    ("row_scale", "column_scale", "which", "lanes", "found"),
    [
        ("%r10", "%r0", "%f7", "%r2, 1", {"poison"}),  # of row 9, in lane 5
        ("%r10", "%r0", "%f5", "%r2, 1", set()),  # row 1
        ("%r0", "%r10", "%f6", "%r3, 0", set()),  # columns have theirs in lanes 0, 4, ..
    ],
)
def test_undefined_scales_of_a_product(row_scale: str, column_scale: str, which: str, lanes: str, found: set[str]) -> None:
    body = UNDEFINED.replace("m16n8k16.row.col.f32.bf16.bf16.f32", SCALED).replace(
        "%f1};", f"%f1}}, {row_scale}, {{0, 0}}, {column_scale}, {{0, 0}};"
    )
    body = body.replace("{A}", "{%r0, %r0, %r0, %r0}").replace("{B}", "{%r0, %r0}").replace("WHICH", which).replace("LANES", lanes)
    assert kinds(Kernel(body, smem=64).run(aligned(32, np.uint32))) == found


MATRIX = """
mov.u32 %r1, smem; mad.lo.u32 %r2, %r0, 16, %r1; mad.lo.u32 %r3, %r0, 3, 7; mul.lo.u32 %r3, %r3, 0x01234567;
stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r2], {%r3}; bar.warp.sync -1; mad.lo.u32 %r4, %r0, 4, %r1; ld.shared.u32 %r5, [%r4];
st.global.u32 [%rd2], %r5; st.global.u32 [%rd2+128], %r3;
"""


@both_codes
def test_a_matrix_of_bytes(code: Code) -> None:
    array = aligned(64, np.uint32)
    with code():
        assert Kernel(MATRIX, smem=1024).run(array).ok
    stored, sources = array[:32].view(np.uint8).reshape(8, 16), array[32:].view(np.uint8).reshape(32, 4)
    for lane in range(32):
        for byte in range(4):
            assert stored[2 * (lane % 4) + byte % 2, lane // 4 + 8 * (byte // 2)] == sources[lane, byte]
    with code():
        assert kinds(Kernel(MATRIX.replace("%r0, 16, %r1", "%r0, 8, %r1"), smem=1024).run(array)) == {"misaligned"}


TRANSPOSED = """
ld.global.u32 %r1, [%rd2]; mov.u32 %r4, smem; setp.eq.u32 %p2, LANES; @%p2 ld.shared.u32 %r1, [%r4];
movmatrix.sync.aligned.m8n8.trans.b16 %r2, %r1; ONLY st.global.u32 [%rd2+128], %r2;
"""


@both_codes
def test_a_matrix_transposed_in_registers(code: Code) -> None:
    array = aligned(64, np.uint32)
    given = array[:32].view(np.uint16)[:] = np.random.default_rng(2).integers(0, 1 << 16, 64)
    with code():
        assert Kernel(TRANSPOSED.replace("LANES", "%r0, 32").replace("ONLY", ""), smem=64).run(array).ok
    np.testing.assert_array_equal(array[32:].view(np.uint16).reshape(8, 8), given.reshape(8, 8).T)


@both_codes
@pytest.mark.parametrize(("lane", "found"), [(8, {"poison"}), (12, {"poison"}), (1, set()), (4, set())])
def test_undefined_elements_of_a_transposed_matrix(code: Code, lane: int, found: set[str]) -> None:
    """Elements (0, 2) and (0, 3), which lane 1 holds, become those of lanes 8 and 12."""
    body = TRANSPOSED.replace("LANES", "%r0, 1").replace("ONLY", f"setp.eq.u32 %p3, %r0, {lane}; @%p3 ")
    with code():
        assert kinds(Kernel(body, smem=64).run(aligned(64, np.uint32))) == found


@both_codes
def test_matches(code: Code) -> None:
    array = aligned(64, np.uint32)
    given = array[:32] = np.random.default_rng(1).integers(0, 5, 32)
    body = "ld.global.u32 %r1, [%rd2]; match.any.sync.b32 %r2, %r1, -1; st.global.u32 [%rd2], %r2; setp.gt.u32 %p1, %r0, 40;"
    body += "selp.u32 %r3, 1, 2, %p1; match.all.sync.b32 %r4|%p2, %r3, -1; selp.u32 %r5, %r4, 7, %p2; st.global.u32 [%rd2+128], %r5;"
    with code():
        assert Kernel(body).run(array).ok
    assert array[:32].tolist() == [sum(1 << lane for lane in range(32) if given[lane] == value) for value in given]
    assert array[32:].tolist() == [M32] * 32


def test_a_match_of_undefined_values_is_found() -> None:
    body = "mov.u32 %r1, smem; ld.shared.u32 %r2, [%r1]; match.any.sync.b32 %r3, %r2, -1; st.global.u32 [%rd2], %r3;"
    for code in (nullcontext, as_machine_code):
        with code():
            assert kinds(Kernel(body, smem=64).run(aligned(32, np.uint32))) == {"poison"}


NIBBLES = """
ld.global.u32 %r1, [%rd2]; { .reg .b8 %b<4>; mov.b32 {%b0, %b1, %b2, %b3}, %r1; CONVERT }
st.global.u32 [%rd2], %r10; st.global.u32 [%rd2+128], %r11; st.global.u32 [%rd2+256], %r12; st.global.u32 [%rd2+384], %r13;
"""


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_floats_of_four_bits(kind: str) -> None:
    """Machine code alone: PTX of the simulator has no registers of 8 bits."""
    array = aligned(128, np.uint32)
    given = array[:32] = np.arange(32) * 0x01234567
    convert = "".join(f"cvt.rn.{kind}x2.e2m1x2 %r{10 + byte}, %b{byte};" for byte in range(4))
    with as_machine_code():
        assert Kernel(NIBBLES.replace("CONVERT", convert)).run(array).ok
    values = [sign * value for sign in (1, -1) for value in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
    found = elementwise.half_to_f32(array.view(np.uint16), kind).reshape(4, 32, 2)
    for byte, lane, half in np.ndindex(4, 32, 2):
        assert found[byte, lane, half] == values[int(given[lane]) >> (8 * byte + 4 * half) & 15]
    if kind == "bf16":
        with (
            as_machine_code(lambda text: text.replace("/* 0x00007f7f", "/* 0x00007f80")),
            pytest.raises(UnsupportedInstruction, match="UNPACK_B"),
        ):
            Kernel(NIBBLES.replace("CONVERT", convert)).run(array)


@pytest.mark.parametrize(
    ("edits", "added"),
    [
        ({}, 0x12),
        ({"LDCU.U8 UR4, c[0x0][0x389]": "S2UR UR4, SR_CgaSize"}, 0),
        (
            {
                "LDCU.U8 UR4, c[0x0][0x389]": "UP2UR UR4, UPR, URZ, 0x1",
                "LDC R1, c[0x0][0x37c]": "UISETP.EQ.U32.AND UP0, UPT, URZ, URZ, UPT",
            },
            1,
        ),
        (
            {
                "LDCU.U8 UR4, c[0x0][0x389]": "UP2UR UR4, UPR, URZ, 0x2",
                "LDC R1, c[0x0][0x37c]": "UPLOP3.LUT UP1, UPT, UPT, UPT, UPT, 0x80, 0x8",
            },
            2,
        ),
        ({"S2R R7, SR_CTAID.X": "LDC.U8 R7, c[0x0][0x389]"}, 0x24),
    ],
)
def test_spellings_that_ptxas_writes_in_large_kernels_only(edits: dict[str, str], added: int) -> None:
    """Put spellings in the place of others in the text: a byte of the parameters, the kind of cluster, uniform predicates as bits."""
    body = "ld.param.u32 %r1, [p1]; ld.param.u8 %r2, [p1+1]; add.u32 %r3, %r0, %r1; mul.lo.u32 %r3, %r3, 3; mov.u32 %r4, %ctaid.x;"
    body += "add.u32 %r3, %r3, %r4; add.u32 %r3, %r3, %r2; st.global.u32 [%rd2], %r3;"

    def edit(text: str) -> str:
        for before, after in edits.items():
            assert text.count(before) == 1
            text = text.replace(before, after)
        return text

    array = aligned(32, np.uint32)
    with as_machine_code(edit):
        report = Kernel(body).run(array, 0x1234)
    assert kinds(report) <= {"control_code"}
    assert array.tolist() == [3 * (lane + 0x1234) + added for lane in range(32)]
