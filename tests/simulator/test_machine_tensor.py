"""Machine code with tensor memory: ptxas assembles the kernels of the tcgen05 tests, and what these ask of the PTX must hold.

The tests compute what they expect from the layouts of the PTX ISA and of CuTe, without the simulator.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from cute_mla.simulator import Policy, Report, UnsupportedInstruction
from cute_mla.simulator.sass.listing import Control
from tests.simulator import test_tcgen05_misuse as misuse
from tests.simulator import test_tcgen05_mma as products
from tests.simulator import test_tcgen05_moves as moves
from tests.simulator.assembled import as_machine_code
from tests.simulator.small_kernels import LAZY, Kernel, aligned, kinds
from tests.simulator.tensor_kernels import DATA, fill

RANDOM, ADVERSARIAL = Policy.named("random", 3), Policy.named("adversarial")

# Each test with the opcodes that its machine code must have.
EVIDENCE: dict[str, tuple[Callable[[], None], str]] = {
    "128 x 64": (partial(products.test_where_d_lies, 1, False, 128, 64), "UTCHMMA UTCBAR UTCATOMSWS.AND UTCATOMSWS.FIND_AND_SET.ALIGN"),
    "64 x 72": (partial(products.test_where_d_lies, 1, False, 64, 72), "UTCHMMA LDTM.x32 STTM.x32"),
    "pair, 256 x 64": (
        partial(products.test_where_d_lies, 2, False, 256, 64),
        "UTCHMMA.2CTA UTCBAR.2CTA.MULTICAST UTCATOMSWS.2CTA.FIND_AND_SET.ALIGN STAS ATOMS.XOR",
    ),
    "pair, 128 x 128": (partial(products.test_where_d_lies, 2, False, 128, 128), "UTCHMMA.2CTA"),
    "weight stationary": (partial(products.test_where_d_lies, 1, True, 64, 128), "UTCHMMA.WS"),
    "tf32": (partial(products.test_types_and_operand_layouts, "tf32", (False, False), 2), "UTCHMMA"),
    "tf32, transposed": (partial(products.test_types_and_operand_layouts, "tf32", (True, False), 1), "UTCHMMA"),
    "f16, transposed": (partial(products.test_types_and_operand_layouts, "f16", (False, True), 4), "UTCHMMA"),
    "e4m3": (partial(products.test_types_and_operand_layouts, "e4m3", (False, False), 0), "UTCQMMA UBLKCP.S.G"),
    "f16 sums": (products.test_f16_accumulator_lies_in_the_lower_half, "UTCHMMA"),
    "steps": (partial(products.test_accumulation_over_steps, RANDOM, 2, 128), "UTCHMMA.2CTA"),
    "A in tensor memory": (partial(products.test_a_in_tensor_memory, 1, False, 128, "bf16"), "UTCHMMA"),
    "A in tensor memory, pair": (partial(products.test_a_in_tensor_memory, 2, False, 128, "e4m3"), "UTCQMMA.2CTA"),
    "A in tensor memory, weight stationary": (partial(products.test_a_in_tensor_memory, 1, True, 32, "e4m3"), "UTCQMMA.WS"),
    "disabled lanes": (partial(products.test_disabled_lanes_keep_what_they_had, 1), "UTCHMMA"),
    "disabled lanes, pair": (partial(products.test_disabled_lanes_keep_what_they_had, 2), "UTCHMMA.2CTA"),
    "scaled sums": (products.test_scale_input_d, "UTCHMMA"),
    "collector": (partial(misuse.test_an_operand_that_was_filled_may_be_used, ("fill", "use", "lastuse"), LAZY), "UTCHMMA"),
    "collector, not filled": (partial(misuse.test_an_operand_that_was_not_filled, ("use",), "holds nothing"), "UTCHMMA"),
    "commit to one CTA": (partial(misuse.test_commit_of_one_cta_of_a_pair, ADVERSARIAL), "UTCBAR.2CTA"),
    "waiting for room": (partial(misuse.test_allocation_waits_for_room, ADVERSARIAL), "UTCATOMSWS.AND NANOSLEEP"),
    "never any room": (misuse.test_allocation_that_never_gets_room_is_a_deadlock, "UTCATOMSWS.FIND_AND_SET.ALIGN"),
    "not freed": (misuse.test_not_freed_at_exit, "UTCATOMSWS.FIND_AND_SET.ALIGN"),
    "four allocations": (misuse.test_several_warps_allocate_one_after_the_other, "UVIRTCOUNT.DEALLOC.SMPOOL ATOMS.OR ATOMS.AND"),
    "pairs allocate": (partial(misuse.test_pair_allocates_together, ADVERSARIAL), "STAS"),
    "all columns": (partial(moves.test_load, "32x32b", 128, False), "LDTM.x128"),
    "packed columns": (partial(moves.test_load, "32x32b", 8, True), "LDTM.x8.PACK16BIT"),
    **{f"load {shape}": (partial(moves.test_load, shape, 8, False), f"LDTM.{name}.x8") for shape, name in (
        ("16x64b", "16dp64bit"), ("16x128b", "16dp128bit"), ("16x256b", "16dp256bit"))},
    **{f"store {shape}": (partial(moves.test_store, shape, 8, packed), f"STTM.{name}") for shape, packed, name in (
        ("32x32b", True, "x8.EXPAND16BIT"), ("16x64b", False, "16dp64bit.x8"), ("16x128b", False, "16dp128bit.x8"),
        ("16x256b", True, "16dp256bit.x8.EXPAND16BIT"))},
    **{f"copy {shape}": (partial(moves.test_copy, shape, group, LAZY), f"UTCCP.T.S{name}") for shape, group, name in (
        ("128x256b", 1, ""), ("4x256b", 1, ".4dp256bit"), ("128x128b", 2, ".2CTA.128dp128bit"),
        ("64x128b.warpx2::02_13", 1, ".2x64dp128bit_lw02_lw13"), ("64x128b.warpx2::01_23", 1, ".2x64dp128bit_lw01_lw23"),
        ("32x128b.warpx4", 1, ".4x32dp128bit"))},
}  # fmt: skip


@pytest.mark.parametrize("name", EVIDENCE)
def test_machine_code_does_what_the_ptx_does(name: str) -> None:
    test, opcodes = EVIDENCE[name]
    with as_machine_code() as texts:
        test()
    missing = [opcode for opcode in opcodes.split() if not any(re.search(rf"\b{re.escape(opcode)} ", text) for text in texts)]
    assert not missing


def test_a_load_of_two_halves_is_refused() -> None:
    with as_machine_code(), pytest.raises(UnsupportedInstruction, match=r"LDTM\.16dp32bit_t0_t15\.x8 \(at 0x"):
        moves.test_load("16x32bx2", 8, False)


# ---------------------------------------------------------------- what is found

LOAD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r30}, [%r5];\ntcgen05.wait::ld.sync.aligned;\nbar.sync 0;\n"
KEEP = f"shl.b32 %r31, %r0, 2;\nadd.u32 %r31, %r31, %r1;\nst.shared.u32 [%r31+{DATA + 2 * misuse.SIZE}], %r30;\n"  # else ptxas drops it
LOADED = fill(32) + LOAD + misuse.WAITED + KEEP
STORED = fill(32) + misuse.STORE + "tcgen05.wait::st.sync.aligned;\nbar.sync 0;\n" + misuse.WAITED


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


def report_of(program: str, edit: Callable[[str], str] | None = None, group: int = 1) -> Report:
    """Run a program as machine code, and check that the edit changed it."""
    changed = []

    def applied(text: str) -> str:
        changed.append(edit is None or edit(text) != text)
        return text if edit is None else edit(text)

    with as_machine_code(applied):
        report = misuse.report_of(program, group=group)
    assert changed == [True]
    return report


def test_the_kernels_are_right() -> None:
    for program in (LOADED, STORED):
        assert not report_of(program).findings


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
            report_of(program, edit)
        return
    report = report_of(program, edit)
    assert any(finding.kind == kind and text in finding.message for finding in report.findings), report.findings


def test_the_word_in_front_of_an_instruction_descriptor_must_be_0() -> None:
    def edit(text: str) -> str:
        found = re.search(r"tmem\[UR\d+\], tmem\[(UR\d+)\], idesc", text)
        assert found is not None
        return re.sub(rf"UMOV {found[1]}, 0x0(?= )", f"UMOV {found[1]}, 0x7", text)

    report = report_of(STORED, edit)
    assert kinds(report) == {"unsupported"}
    assert "the word 0x7 in front of its instruction descriptor" in report.findings[0].message


def test_an_allocation_after_relinquishing_is_found() -> None:
    program = (
        "add.u32 %r9, %r1, 24;\n@!%p3 bra $o;\ntcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;\n"
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r9], 32;\n$o:\n"
    )
    with as_machine_code():
        report = misuse.report_of(program, columns=64, output=False)
    assert "after tcgen05.relinquish" in misuse.message(report)


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
        report = misuse.report_of(fill(32), output=False)
    assert any(finding.kind == "tensor_memory" and text in finding.message for finding in report.findings), report.findings


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
