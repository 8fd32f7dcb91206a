"""Machine code with tensor memory: what breaks it is found. That it computes what it must is a matter of the tests of tcgen05."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from cute_mla.simulator import Policy, Report, UnsupportedInstruction
from cute_mla.simulator.sass.listing import Control
from tests.simulator.assembled import as_machine_code
from tests.simulator.small_kernels import Kernel, aligned, kinds
from tests.simulator.tensor_kernels import DATA, SCHEDULES, fill
from tests.simulator.tensor_programs import SIZE, STORE, WAITED, message, report_of

# ---------------------------------------------------------------- what is found

LOAD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r30}, [%r5];\ntcgen05.wait::ld.sync.aligned;\nbar.sync 0;\n"
KEEP = f"shl.b32 %r31, %r0, 2;\nadd.u32 %r31, %r31, %r1;\nst.shared.u32 [%r31+{DATA + 2 * SIZE}], %r30;\n"  # else ptxas drops it
LOADED = fill(32) + LOAD + WAITED + KEEP
STORED = fill(32) + STORE + "tcgen05.wait::st.sync.aligned;\nbar.sync 0;\n" + WAITED


def without(pattern: str) -> Callable[[str], str]:
    """Return an edit that replaces every instruction of a pattern by NOP."""
    return lambda text: re.sub(rf"{pattern}(?= ;)", "NOP", text)


def without_tests(text: str) -> str:
    """Let every test of a phase succeed."""
    return re.sub(r"SYNCS\.PHASECHK\S* (P\d), [^;]*?(?= ;)", r"PLOP3.LUT \1, PT, PT, PT, PT, 0x80, 0x0", text)


def without_waits(text: str) -> str:
    """Clear the wait masks between the last LDTM of a listing and the barrier behind it."""
    lines = text.splitlines()
    start = max(number for number, line in enumerate(lines) if re.search(r"\bLDTM ", line))
    stop = next(number for number, line in enumerate(lines) if number > start and "BAR.SYNC" in line)
    assert Control.of(int(lines[start + 1].split("0x")[1][:16], 16)).write_board < 6
    for number in range(start + 3, stop + 2, 2):  # every instruction has two lines, the second with the control code
        high = int(lines[number].split("0x")[1][:16], 16)
        lines[number] = f"/* {high & ~(63 << 52):#018x} */"
    return "\n".join(lines)


def with_a_board_of_its_own(load: int) -> Callable[[str], str]:
    """Return an edit that gives one LDTM scoreboard 5, which nobody waits for."""

    def edit(text: str) -> str:
        lines = text.splitlines()
        place = [number for number, line in enumerate(lines) if re.search(r"\bLDTM ", line)][load] + 1
        high = int(lines[place].split("0x")[1][:16], 16)
        assert Control.of(high).write_board != 5
        lines[place] = f"/* {high & ~(7 << 46) | 5 << 46:#018x} */"
        return "\n".join(lines)

    return edit


def broken(program: str, edit: Callable[[str], str] | None = None, group: int = 1) -> Report:
    """Run a program as machine code, and check that the edit changed it."""
    changed = []

    def applied(text: str) -> str:
        changed.append(edit is None or edit(text) != text)
        return text if edit is None else edit(text)

    with as_machine_code(applied):
        report = report_of(program, group=group)
    assert changed == [True]
    return report


def test_the_kernels_are_right() -> None:
    for program in (LOADED, STORED):
        assert not broken(program).findings


@pytest.mark.parametrize(
    ("program", "edit", "kind", "text"),
    [
        (LOADED, without_waits, "missing_wait", "a tcgen05.mma writes tensor memory that a tcgen05.ld"),
        (STORED, without(r"FENCE\.VIEW\.ASYNC\.T"), "missing_wait", "a tcgen05.mma writes tensor memory that a tcgen05.st"),
        (STORED, without_tests, "missing_wait", "a tcgen05.ld reads tensor memory that a tcgen05.mma"),
        (STORED, without(r"UTCBAR [^;]*?"), "deadlock", ""),
        (STORED, without(r"UTCATOMSWS\.AND [^;]*?"), "unfinished", "without tcgen05.dealloc of 512 columns"),
        (STORED, without(r"ATOMS\.OR [^;]*?"), "trap", ""),
        (STORED, lambda text: text.replace(", idesc[", ", UPT, idesc["), "", "operands"),
    ],
)  # fmt: skip
def test_broken_machine_code_is_noticed(program: str, edit: Callable[[str], str], kind: str, text: str) -> None:
    if not kind:
        with pytest.raises(UnsupportedInstruction, match=text):
            broken(program, edit)
        return
    report = broken(program, edit)
    assert any(finding.kind == kind and text in finding.message for finding in report.findings), report.findings


SECOND = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r32}, [%r5+4];\n"
SUM = KEEP.replace("st.shared", "add.u32 %r30, %r30, %r32;\nst.shared")
TWICE = fill(32) + LOAD.replace("tcgen05.wait", SECOND + "tcgen05.wait") + WAITED + SUM


@pytest.mark.parametrize(("load", "found"), [(0, set()), (1, {"missing_wait"})])
def test_a_load_of_tensor_memory_is_done_when_a_later_one_is(load: int, found: set[str]) -> None:
    """The registers of the first load are another matter, which the static check finds."""
    report = broken(TWICE, with_a_board_of_its_own(load))
    assert {finding.kind for finding in report.findings} - {"control_code"} == found


def test_the_word_in_front_of_an_instruction_descriptor_must_be_0() -> None:
    def edit(text: str) -> str:
        found = re.search(r"tmem\[UR\d+\], tmem\[(UR\d+)\], idesc", text)
        assert found is not None
        return re.sub(rf"UMOV {found[1]}, 0x0(?= )", f"UMOV {found[1]}, 0x7", text)

    report = broken(STORED, edit)
    assert kinds(report) == {"unsupported"}
    assert "the word 0x7 in front of its instruction descriptor" in report.findings[0].message


def test_an_allocation_after_relinquishing_is_found() -> None:
    program = (
        "add.u32 %r9, %r1, 24;\n@!%p3 bra $o;\ntcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n"
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r9], 32;\n$o:\n"
    )
    with as_machine_code():
        report = report_of(program, columns=64, output=False)
    assert "after tcgen05.relinquish" in message(report)


@pytest.mark.parametrize(
    ("mask", "text"), [(0xFFFF0000 | 0x55, "are not one run"), (0xFFFFFFFF, "are not one run"), (0xFFFFFF00, "dealloc of 256")]
)
def test_a_deallocation_of_other_columns_is_found(mask: int, text: str) -> None:
    def edit(code: str) -> str:
        found = re.search(r"UTCATOMSWS\.AND URZ, (UR\d+)", code)
        assert found is not None
        inverted = f"ULOP3.LUT {found[1]}, URZ, {found[1]}, URZ, 0x33, !UPT"
        assert inverted in code
        return code.replace(inverted, f"UMOV {found[1]}, {mask:#x}")

    with as_machine_code(edit):
        report = report_of(fill(32), output=False)
    assert any(finding.kind == "tensor_memory" and text in finding.message for finding in report.findings), report.findings


ALLOCATION = """
barrier.cluster.arrive; barrier.cluster.wait; mov.u32 %r1, smem;
tcgen05.alloc.cta_group::GROUP.sync.aligned.shared::cta.b32 [%r1], 64;
tcgen05.relinquish_alloc_permit.cta_group::GROUP.sync.aligned; ld.shared.u32 %r2, [%r1];
tcgen05.dealloc.cta_group::GROUP.sync.aligned.b32 %r2, 64; barrier.cluster.arrive; barrier.cluster.wait;
"""
OTHER_PLACES = {"0x8": 0x18, "0x10": 0x20, "0x14": 0x10, "0x18": 0x14, "0x1c": 0x0}


def elsewhere(text: str) -> str:
    """Move the record of tcgen05.alloc to where another version of ptxas has it."""
    (base,) = set(re.findall(r"ATOMS\.OR RZ, \[(U?R\d+)\+0x14\]", text))
    found = re.compile(rf"\[{base}(\+URZ)?\+(0x\w+)\]")
    text = found.sub(lambda place: f"[{base}{place[1] or ''}+{OTHER_PLACES[place[2]]:#x}]", text)
    return re.sub(rf"VIADD (R\d+), {base}, 0x8(?= )", rf"VIADD \1, {base}, 0x18", text)


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("policy", SCHEDULES)
def test_the_record_of_an_allocation_lies_in_one_of_two_places(group: int, policy: Policy) -> None:
    """Without a column noted there the deallocation traps."""
    kernel = Kernel(ALLOCATION.replace("GROUP", str(group)), smem=64, grid=group, cluster=group)
    for edit, found in (
        (elsewhere, set()),
        (lambda text: re.sub(r"ATOMS\.OR RZ, (\S+\+0x14\S*) R\d+(?= ;)", r"ATOMS.OR RZ, \1 RZ", elsewhere(text)), {"trap"}),
    ):
        with as_machine_code(edit):
            assert kinds(kernel.run(aligned(32, np.uint32), policy=policy)) == found


# ---------------------------------------------------------------- conversions

WIDEN = "ld.global.u32 %r5, [%rd2]; mov.b32 {%h1, %h2}, %r5; cvt.rn.bf16x2.e4m3x2 %r6, %h1; cvt.rn.bf16x2.e4m3x2 %r7, %h2;"
WIDEN += "st.global.u32 [%rd2+256], %r6; st.global.u32 [%rd2+512], %r7;"


def test_scales_of_8_bit_floats_are_refused() -> None:
    with (
        as_machine_code(lambda text: text.replace("/* 0x00007f7f", "/* 0x00007f80")),
        pytest.raises(UnsupportedInstruction, match="scales"),
    ):
        Kernel(WIDEN, 64).run(aligned(192, np.uint32))


# ---------------------------------------------------------------- undefined values

DIVISION = """
ld.shared.f32 %f1, [smem]; ld.global.f32 %f2, [%rd2]; setp.ge.f32 %p1, %f2, 0f00000000;
div.rn.f32 %f3, %f1, %f2; rcp.rn.f32 %f4, %f1; add.f32 %f3, %f3, %f4; selp.f32 %f5, 0f3F800000, %f3, %p1;
st.global.f32 [%rd2], %f5;
"""
COMPARISON = """
mov.u32 %r5, smem; ld.shared.u32 %r1, [%r5]; ld.global.u32 %r2, [%rd2]; setp.lt.u32 %p1, %r2, 7;
setp.lt.and.u32 %p2, %r1, %r2, %p1; selp.u32 %r3, 1, 2, %p2; st.global.u32 [%rd2], %r3;
"""


@pytest.mark.parametrize(("body", "value", "found"), [
    (DIVISION, 1.0, set()), (DIVISION, -1.0, {"poison"}), (COMPARISON, 9, set()), (COMPARISON, 5, {"poison"}),
])  # fmt: skip
def test_undefined_values_that_decide_nothing_are_no_findings(body: str, value: float, found: set[str]) -> None:
    array = aligned(32, np.float32 if isinstance(value, float) else np.uint32)
    array[:] = value
    with as_machine_code():
        report = Kernel(body, smem=64).run(array)
    assert kinds(report) == found
