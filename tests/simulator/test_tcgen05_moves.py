"""tcgen05.ld, st and cp: which cell goes where, against CuTe's layouts written out."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

from cute_mla.simulator import Policy, UnsupportedInstruction
from tests.simulator.assembled import Evidence, as_machine_code, check_machine_code
from tests.simulator.tensor_kernels import SCHEDULES, TensorKernel, commit, fill, leader, place, smem_descriptor, store_words, wait

# CuTe's layouts (threads, registers) -> bit of the 16 or 32 lanes x columns that one instruction covers, as (shape, stride in bits)
# per mode; "row" stands for the bits of a lane, which grow with the repetition.
THREADS = {
    "32x32b": [(32, "row", 1)],
    "16x64b": [(2, "row", 8), (2, "column", 1), (8, "row", 1)],
    "16x128b": [(4, "column", 1), (8, "row", 1)],
    "16x256b": [(4, "column", 2), (8, "row", 1)],
    "16x32bx2": [(16, "row", 1), (2, "half", 1)],
}
REGISTERS = {
    "32x32b": [(1, "column", 1)],
    "16x64b": [(1, "column", 2)],
    "16x128b": [(2, "row", 8)],
    "16x256b": [(2, "column", 1), (2, "row", 8)],
    "16x32bx2": [(1, "column", 1)],
}
WIDTH = {"32x32b": 1, "16x64b": 2, "16x128b": 4, "16x256b": 8, "16x32bx2": 1}
CASES = [
    (shape, count)
    for shape, largest in (("32x32b", 128), ("16x64b", 128), ("16x128b", 64), ("16x256b", 32), ("16x32bx2", 128))
    for count in (1, 8, largest)
]


def places(shape: str, count: int, packed: bool, split: int) -> np.ndarray:
    """(register, lane, 2): row and column, one register at a time from the mode lists."""
    per = int(np.prod([extent for extent, _, _ in REGISTERS[shape]]))
    out = np.zeros((count * per, 32, 2), np.int64)
    for register in range(count * per):
        for lane in range(32):
            at = {"row": 0, "column": register // per * WIDTH[shape], "half": 0}
            for modes, number in ((THREADS[shape], lane), (REGISTERS[shape], register % per)):
                rest = number
                for extent, what, stride in modes:
                    at[what] += rest % extent * stride
                    rest //= extent
            out[register, lane] = at["row"], at["column"] * (2 if packed else 1) + at["half"] * split
    return out


def registers_of(count: int) -> list[str]:
    return [f"%r{100 + i}" for i in range(count)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("shape", "count"), CASES)
def test_load(shape: str, count: int, packed: bool) -> None:
    """Each register to its own output word, from a column and, for 16 lanes, from the lower and the upper ones."""
    split = 160 if shape == "16x32bx2" else 0
    where = places(shape, count, packed, split)
    registers = registers_of(len(where))
    width = -(-int(where[..., 1].max() + 2) // 8) * 8
    start = 8 if width + 8 <= 512 else 0
    words = np.random.default_rng(3).integers(0, 2**32, (1, 128, width), np.uint32)
    for low in (0,) if shape == "32x32b" else (0, 16):
        more = f", {split}" if split else ""
        suffix = ".pack::16b" if packed else ""
        text = store_words(width, width, start) + f"add.u32 %r8, %r5, {(low << 16) + start};\n"
        text += f"tcgen05.ld.sync.aligned.{shape}.x{count}{suffix}.b32 {{{', '.join(registers)}}}, [%r8]{more};\n"
        text += f"tcgen05.wait::ld.sync.aligned;\nmul.wide.u32 %rd9, %r0, {4 * len(where)};\nadd.s64 %rd9, %rd0, %rd9;\n"
        text += "".join(f"st.global.b32 [%rd9+{4 * i}], {register};\n" for i, register in enumerate(registers))
        out, report = TensorKernel(text, 1, len(where), words=width, output=False).run(words=words)
        assert not report.findings
        warp = np.arange(128) // 32
        row = where[..., 0].T[np.arange(128) % 32] + 32 * warp[:, None] + low
        column = where[..., 1].T[np.arange(128) % 32]
        expected = words[0, row, column]
        if packed:
            expected = expected & 0xFFFF | words[0, row, column + 1] << 16
        assert np.array_equal(out[0], expected)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("shape", "count"), [(shape, count) for shape, count in CASES if count == 8])
def test_store(shape: str, count: int, packed: bool) -> None:
    split = 40 if shape == "16x32bx2" else 0
    where = places(shape, count, packed, split)
    width = -(-int(where[..., 1].max() + 2) // 32) * 32
    registers = registers_of(len(where))
    text = fill(width)
    for i, register in enumerate(registers):
        text += f"mad.lo.u32 {register}, %r0, 1000003, {i * 70001 + 5};\n"
    suffix = ".unpack::16b" if packed else ""
    more = f", {split}" if split else ""
    text += (
        f"tcgen05.st.sync.aligned.{shape}.x{count}{suffix}.b32 [%r5]{more}, {{{', '.join(registers)}}};\ntcgen05.wait::st.sync.aligned;\n"
    )
    out, report = TensorKernel(text, 1, width).run()
    assert not report.findings
    expected = np.full((128, width), 0x12345678, np.uint32)
    for register, lane in np.ndindex(*where.shape[:2]):
        row, column = where[register, lane]
        for warp in range(4):
            value = ((32 * warp + lane) * 1000003 + register * 70001 + 5) % 2**32
            expected[32 * warp + row, column] = value & 0xFFFF if packed else value
            if packed:
                expected[32 * warp + row, column + 1] = value >> 16
    assert np.array_equal(out[0], expected)


def test_lane_0_means_the_lanes_of_the_warp() -> None:
    """An address without the warp's lanes reaches them all the same; other lanes cannot be reached (test_tcgen05_misuse.py)."""
    text = fill(8) + "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r3], {%r0};\ntcgen05.wait::st.sync.aligned;\n"
    text += "add.u32 %r8, %r3, 0x100000;\ntcgen05.ld.sync.aligned.16x64b.x1.b32 {%r30}, [%r8];\ntcgen05.wait::ld.sync.aligned;\n"
    text += "add.u32 %r8, %r3, 1;\ntcgen05.st.sync.aligned.32x32b.x1.b32 [%r8], {%r30};\ntcgen05.wait::st.sync.aligned;\n"
    out, report = TensorKernel(text, 1, 8).run()
    assert not report.findings
    thread = np.arange(128)
    assert np.array_equal(out[0, :, 0], thread)
    lane = thread % 32
    row = thread - lane + 16 + (lane >> 2) + 8 * (lane & 1)
    assert np.array_equal(out[0, :, 1], np.where(lane >> 1 & 1, 0x12345678, row))


def test_poison_goes_through() -> None:
    """A cell that nobody wrote may be loaded and stored again, not used for an address."""
    text = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r30, %r31}, [%r5];\ntcgen05.wait::ld.sync.aligned;\n"
    text += "add.u32 %r8, %r5, 8;\ntcgen05.st.sync.aligned.32x32b.x1.b32 [%r8], {%r31};\ntcgen05.wait::st.sync.aligned;\n"
    text += "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r33}, [%r8];\ntcgen05.wait::ld.sync.aligned;\n"
    assert not TensorKernel(text, output=False).run()[1].findings
    used = text + "add.u32 %r34, %r1, %r33;\nld.shared.u32 %r35, [%r34];\n"
    assert {finding.kind for finding in TensorKernel(used, output=False).run()[1].findings} >= {"poison"}


COPIES = {
    "128x256b": (128, 2, [list(range(128))]),
    "128x128b": (128, 1, [list(range(128))]),
    "4x256b": (4, 2, [[0, 32, 64, 96]]),
    "64x128b.warpx2::02_13": (64, 1, [list(range(64)), list(range(64, 128))]),
    "64x128b.warpx2::01_23": (64, 1, [[*range(32), *range(64, 96)], [*range(32, 64), *range(96, 128)]]),
    "32x128b.warpx4": (32, 1, [list(range(32 * i, 32 * i + 32)) for i in range(4)]),
}


@pytest.mark.parametrize("policy", SCHEDULES)
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("shape", list(COPIES))
def test_copy(shape: str, group: int, policy: Policy) -> None:
    rows, chunks, lanes = COPIES[shape]
    first = 28 if shape == "4x256b" else 0
    raw = np.random.default_rng(5).integers(0, 2**32, (group, rows, 4 * chunks), np.uint32)
    image = np.full((group, 32 * 1024), 0xFF, np.uint8)
    for layout in (0, 2) if chunks == 2 else (0,):
        for rank in range(group):
            fields = place(image[rank], raw[rank], 1024, layout, False)
        descriptor = smem_descriptor(1024, *fields, layout)
        text = fill(32, group) + f"mov.u64 %rd10, {descriptor};\nadd.u32 %r6, %r3, {(first << 16) + 8};\n"
        text += f"@{leader(group)} tcgen05.cp.cta_group::{group}.{shape} [%r6], %rd10;\n" + commit(group) + wait("$done")
        out, report = TensorKernel(text, group, 32, image.shape[1]).run(image, policy=policy)
        assert not report.findings
        expected = np.full((group, 128, 32), 0x12345678, np.uint32)
        for copy in lanes:
            expected[:, np.array(copy) + first, 8 : 8 + 4 * chunks] = raw
        assert np.array_equal(out, expected)


@pytest.mark.parametrize(
    "text",
    [
        "tcgen05.cp.cta_group::1.128x256b.b8x16.b6x16_p32 [%r3], %rd10;",
        "tcgen05.shift.cta_group::1.down [%r3];",
        "tcgen05.ld.sync.aligned.16x256b.x64.b32 {%r30}, [%r3];",
        "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r30}, [%r3];",
        "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%r3], %rd10, %rd11, %r6, [%r7], [%r8], %p5;",
        "tcgen05.mma.sp.cta_group::1.kind::f16 [%r3], %rd10, %rd11, [%r6], %r6, %p5;",
        "tcgen05.mma.cta_group::1.kind::f16 [%r3], %rd10, %rd11, %r6, {%r7, %r7}, %p5;",
        "tcgen05.mma.cta_group::1.kind::i8 [%r3], %rd10, %rd11, %r6, %p5, 3;",
    ],
)
def test_refused_at_load(text: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        TensorKernel(text + "\n", output=False).run()


# ---------------------------------------------------------------- machine code

MACHINE_CODE: dict[str, Evidence] = {
    "all columns": (partial(test_load, "32x32b", 128, False), "LDTM.x128"),
    **{f"load {count} columns": (partial(test_load, "32x32b", count, False), f"LDTM{f'.x{count}' * (count > 1)}")
       for count in (1, 16, 64)},
    **{f"store {count} columns": (partial(test_store, "32x32b", count, False), f"STTM{f'.x{count}' * (count > 1)} FENCE.VIEW.ASYNC.T")
       for count in (1, 8, 16, 64)},
    "packed columns": (partial(test_load, "32x32b", 8, True), "LDTM.x8.PACK16BIT"),
    **{f"load {name}": (partial(test_load, shape, 8, False), f"LDTM.{name}.x8") for shape, name in (
        ("16x64b", "16dp64bit"), ("16x128b", "16dp128bit"), ("16x256b", "16dp256bit"), ("16x32bx2", "16dp32bit_t0_t15"),
        ("16x32bx2", "16dp32bit_t16_t31"))},
    "load packed halves": (partial(test_load, "16x32bx2", 8, True), "LDTM.16dp32bit_t0_t15.x8.PACK16BIT"),
    **{f"store {name}": (partial(test_store, shape, 8, packed), f"STTM.{name}") for shape, packed, name in (
        ("32x32b", True, "x8.EXPAND16BIT"), ("16x64b", False, "16dp64bit.x8"), ("16x128b", False, "16dp128bit.x8"),
        ("16x256b", True, "16dp256bit.x8.EXPAND16BIT"),
        ("16x32bx2", False, "16dp32bit_t0_t15.x8"), ("16x32bx2", True, "16dp32bit_t16_t31.x8.EXPAND16BIT"))},
    **{f"copy {shape}": (partial(test_copy, shape, group, SCHEDULES[1]), f"UTCCP.T.S{name}") for shape, group, name in (
        ("128x256b", 1, ""), ("4x256b", 1, ".4dp256bit"), ("128x128b", 2, ".2CTA.128dp128bit"),
        ("64x128b.warpx2::02_13", 1, ".2x64dp128bit_lw02_lw13"), ("64x128b.warpx2::01_23", 1, ".2x64dp128bit_lw01_lw23"),
        ("32x128b.warpx4", 1, ".4x32dp128bit"))},
}  # fmt: skip


@pytest.mark.parametrize("name", MACHINE_CODE)
def test_as_machine_code(name: str) -> None:
    check_machine_code(*MACHINE_CODE[name])


def test_machine_code_takes_the_lanes_of_the_warp() -> None:
    """Whichever quarter an address names. PTX may name the warp's own alone; half a quarter stays what it is (test_tcgen05_misuse.py)."""
    other = "xor.b32 %r8, %r5, 0x600000;\n"
    text = fill(8) + other + "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r8], {%r0};\ntcgen05.wait::st.sync.aligned;\n" + other
    text += "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r30}, [%r8];\ntcgen05.wait::ld.sync.aligned;\nadd.u32 %r8, %r5, 1;\n"
    text += "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r8], {%r30};\ntcgen05.wait::st.sync.aligned;\n"
    with as_machine_code():
        out, report = TensorKernel(text, 1, 8).run()
    assert not report.findings
    assert np.array_equal(out[0, :, 0], np.arange(128))
    assert np.array_equal(out[0, :, 1], np.arange(128))
    assert {finding.kind for finding in TensorKernel(text, 1, 8).run()[1].findings} == {"tensor_memory"}
    with as_machine_code():
        halves = TensorKernel(text.replace("0x600000", "0x700000"), 1, 8).run()[1]
    assert {finding.kind for finding in halves.findings} == {"tensor_memory"}


def test_poison_of_half_the_lanes() -> None:
    """The first columns are undefined: so are the registers of the first half of the lanes, and no others."""
    text = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r5+8], {%r0};\ntcgen05.wait::st.sync.aligned;\n".replace("%r5+8", "%r8")
    text = "add.u32 %r8, %r5, 8;\n" + text + "tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {%r30}, [%r5], 8;\ntcgen05.wait::ld.sync.aligned;\n"
    text += "and.b32 %r31, %r0, 16;\nsetp.eq.u32 %p7, %r31, WHO;\n@%p7 st.global.u32 [%rd2], %r30;\n"
    for who, found in (("16", set()), ("0", {"poison"})):
        for load in (nullcontext, as_machine_code):
            with load():
                report = TensorKernel(text.replace("WHO", who), output=False).run()[1]
            assert {finding.kind for finding in report.findings} == found
