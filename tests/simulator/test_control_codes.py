"""Static checks of control codes: what ptxas makes passes, and edits that let a register be touched too early are found."""

from __future__ import annotations

import random

import pytest

from cute_mla.simulator.findings import SassError
from cute_mla.simulator.sass.accesses import accesses
from cute_mla.simulator.sass.control_codes import hazards
from cute_mla.simulator.sass.latencies import check_latencies
from cute_mla.simulator.sass.listing import BOARDS, NO_BOARD, Control, Immediate, read_listing
from cute_mla.simulator.sass.scoreboards import check_scoreboards
from tests.simulator.assembled import assembled
from tests.simulator.machine_code import edited, listing_of, program
from tests.simulator.small_kernels import Kernel

KERNELS = ("split_plan_sm90_i32", "cache_gather_sm100_bf16_fp8_656")
SAMPLE = 40


def control(stall: int = 1, write: int = NO_BOARD, read: int = NO_BOARD, waits: int = 0) -> Control:
    return Control(stall, False, write, read, waits)


LOAD = ("LDG.E R4, desc[UR4][R2.64]", control(write=0, read=1))
EXIT = ("EXIT", control(5))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_built_kernel_has_no_hazard(kernel: str) -> None:
    assert hazards(listing_of(kernel)) == ()


@pytest.mark.parametrize("kernel", KERNELS)
def test_dropped_waits_are_found(kernel: str) -> None:
    listing = listing_of(kernel)
    sites = [(index, board) for index, ins in enumerate(listing.instructions) for board in range(BOARDS) if ins.control.waits >> board & 1]
    sample = random.Random(0).sample(sites, min(SAMPLE, len(sites)))
    found = 0
    for index, board in sample:
        waits = listing.instructions[index].control.waits & ~(1 << board)
        found += bool(check_scoreboards(edited(listing, index, waits=waits)))
    assert found >= 0.9 * len(sample)  # the others guard nothing that an instruction names, such as memory behind a fence


@pytest.mark.parametrize("kernel", KERNELS)
def test_shrunk_stalls_are_found(kernel: str) -> None:
    listing = listing_of(kernel)
    jumps = ("BAR", "BRA", "BSYNC", "CALL", "EXIT", "RET", "WARPSYNC")
    sites = [index for index, ins in enumerate(listing.instructions) if ins.control.stall >= 4 and ins.base not in jumps]
    sample = random.Random(0).sample(sites, SAMPLE)
    found = sum(bool(check_latencies(edited(listing, index, stall=1))) for index in sample)
    assert found >= 0.8 * SAMPLE  # the others wait for more than a register


def test_a_result_is_waited_for_before_it_is_read_or_overwritten() -> None:
    for use in ("FADD R5, R4, R4", "MOV R4, R9"):
        assert not check_scoreboards(program(LOAD, (use, control(waits=1)), EXIT))
        (hazard,) = check_scoreboards(program(LOAD, (use, control(waits=2)), EXIT))
        assert str(hazard).startswith(f"0x10 {use}: it waits for no scoreboard that guards R4, result of 0x0 LDG.E R4")


def test_an_operand_is_waited_for_before_it_is_overwritten() -> None:
    assert not check_scoreboards(program(LOAD, ("MOV R3, R9", control(waits=2)), EXIT))
    assert not check_scoreboards(program(LOAD, ("MOV R3, R9", control(waits=1)), EXIT))  # its result is there
    (hazard,) = check_scoreboards(program(LOAD, ("MOV R3, R9", control(waits=4)), EXIT))
    assert hazard.what == "operand"
    assert hazard.registers == ("R3",)


def test_a_wait_on_one_path_does_not_serve_the_other() -> None:
    code = (LOAD, ("@P0 BRA `(k)", control(5)), ("MOV R4, R9", control(waits=1)), EXIT)
    assert not check_scoreboards(program(*code[:1], *code[2:]))
    assert check_scoreboards(program(LOAD, ("@P0 BRA `(k)", control(5)), EXIT))  # the loop loads over its own address and result


def test_opposite_guards_exclude_each_other_until_the_predicate_changes() -> None:
    load = ("@P0 LDG.E R4, desc[UR4][R2.64]", control(write=0))
    move = ("@!P0 MOV R4, R9", control(13))
    assert not check_scoreboards(program(load, move, EXIT))
    assert check_scoreboards(program(load, ("ISETP.GE.AND P0, PT, R8, RZ, PT", control(13)), move, EXIT))


def test_a_later_load_of_the_pipe_answers_for_an_earlier_one() -> None:
    first = ("MUFU.EX2 R4, R5", control(stall=2))
    second = ("MUFU.EX2 R6, R7", control(write=2))
    assert not check_scoreboards(program(first, second, ("FADD R8, R4, R6", control(waits=4)), EXIT))
    assert check_scoreboards(program(second, first, ("FADD R8, R4, R6", control(waits=4)), EXIT))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("UTCHMMA gdesc[UR8], gdesc[UR10], tmem[UR4], tmem[UR6], idesc[UR7], UPT", "UTCBAR [UR12], URZ"),
        ("UTCQMMA gdesc[UR8], gdesc[UR10], tmem[UR4], tmem[UR6], idesc[UR7], UPT", "UTCBAR [UR12], URZ"),
        ("UTMACCTL.PF [UR8]", "UTMALDG.2D [UR16], [UR14]"),
    ],
)
def test_the_operands_of_an_asynchronous_unit_are_read_in_the_order_of_issue(first: str, second: str) -> None:
    write = "UMOV UR8, URZ"
    assert not check_scoreboards(program((first, control()), (second, control(read=1)), (write, control(waits=2)), EXIT))
    assert check_scoreboards(program((first, control()), (second, control(read=1)), (write, control()), EXIT))
    assert check_scoreboards(program((second, control(read=1)), (first, control()), (write, control(waits=2)), EXIT))
    assert check_scoreboards(program((first, control()), ("UBLKPF.L2 [UR4], UR7", control(read=1)), (write, control(waits=2)), EXIT))


@pytest.mark.parametrize("read", ["S2R R{}, SR_CTAID.X", "S2UR UR{}, SR_CTAID.X"])
def test_special_registers_come_in_the_order_of_issue(read: str) -> None:
    first, second, use = (read.format(4), control()), (read.format(5), control(write=2)), ("IMAD R8, R4, UR4, R5", control(waits=4))
    assert not check_scoreboards(program(first, second, use, EXIT))
    assert check_scoreboards(program(second, first, use, EXIT))
    other = ("S2UR UR9, SR_CTAID.X" if "S2R" in read else "S2R R9, SR_CTAID.X", control(write=2))
    assert check_scoreboards(program(first, other, use, EXIT))


_REGISTERS = """
mov.u32 %r10, %ctaid.x; mov.u32 %r11, %ctaid.y; mov.u32 %r12, %ctaid.z; mov.u32 %r13, %laneid; mov.u32 %r14, %cluster_ctarank;
mov.u32 %r16, %lanemask_lt; mov.u32 %r20, smem; mapa.shared::cluster.u32 %r21, %r20, 0; add.u32 %r10, %r10, %r11; add.u32 %r10, %r10, %r12;
add.u32 %r10, %r10, %r13; add.u32 %r10, %r10, %r14; xor.b32 %r10, %r10, %r16; ld.global.u32 %r22, [%rd2]; ld.global.u32 %r23, [%rd2+512];
st.global.u32 [%rd2], %r10; ld.shared::cluster.u32 %r25, [%r21]; st.global.u32 [%rd2+12], %r25; st.global.u32 [%rd2+16], %r22;
st.global.u32 [%rd2+36], %r23;
"""
_MAPS = """
ld.param.u64 %rd10, [p1]; ld.param.u32 %r3, [p2]; mov.u32 %r20, smem; mov.u32 %r21, 0; setp.ne.u32 %p1, %r0, 0; @%p1 bra DONE;
LOOP: prefetch.tensormap [%rd10]; cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%rd10, {%r21, %r20}]; add.u64 %rd10, %rd10, 128;
prefetch.tensormap [%rd10]; add.u64 %rd10, %rd10, 128; add.u32 %r20, %r20, 8; add.u32 %r3, %r3, -1; setp.ne.u32 %p2, %r3, 0;
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r20], [%rd10, {%r21, %r20}], [%r20]; @%p2 bra LOOP;
DONE:
"""


@pytest.mark.parametrize(("body", "opcode"), [(_REGISTERS, "S2UR"), (_MAPS, "UTMACCTL")], ids=["registers", "maps"])
def test_ptxas_relies_on_these_orders(body: str, opcode: str) -> None:
    """Some instruction has no scoreboard, which is found once the later ones are not waited for."""
    listing = read_listing(assembled(Kernel(body, 128).text([0, 0, 0]))[1])
    assert not check_scoreboards(listing)
    for index in range(len(listing.instructions)):
        listing = edited(listing, index, waits=0)
    controls = [hazard.earlier.control for hazard in check_scoreboards(listing) if hazard.earlier.base == opcode]
    assert any(control.write_board == control.read_board == NO_BOARD for control in controls)


def test_a_fence_takes_effect_before_others_may_see_it() -> None:
    barrier, fence = ("MEMBAR.ALL.CTA", control(6, read=3)), ("FENCE.VIEW.ASYNC.S", control(write=3, waits=8))
    for release in ("BAR.SYNC.DEFER_BLOCKING 0x1", "SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4], RZ", "UTMALDG.2D [UR8], [UR14]"):
        assert not check_scoreboards(program(barrier, fence, (release, control(waits=8)), EXIT))
        (hazard,) = check_scoreboards(program(barrier, fence, (release, control()), EXIT))
        assert "no scoreboard that guards the proxy fence, result of 0x10 FENCE.VIEW.ASYNC.S" in str(hazard)
    unwaited = (fence[0], control(write=3))
    found = [str(item) for item in check_scoreboards(program(barrier, unwaited, ("BAR.SYNC.DEFER_BLOCKING 0x1", control(waits=8)), EXIT))]
    assert found == ["0x10 FENCE.VIEW.ASYNC.S: it waits for no scoreboard that guards the memory barrier, result of 0x0 MEMBAR.ALL.CTA"]


def test_an_mbarrier_is_initialised_before_others_may_use_it() -> None:
    init = ("SYNCS.EXCH.64 URZ, [UR4], UR6", control(write=1))
    assert not check_scoreboards(program(init, init, ("BAR.SYNC.DEFER_BLOCKING 0x0", control(waits=2)), EXIT))
    assert check_scoreboards(program(init, init, ("BAR.SYNC.DEFER_BLOCKING 0x0", control()), EXIT))


@pytest.mark.parametrize(
    ("producer", "consumer", "least"),
    [
        ("IMAD R4, R5, R6, R7", "IMAD R8, R5, R6, R4", 2),
        ("IADD3 R4, R5, R6, RZ", "LDG.E R9, desc[UR4][R4.64]", 4),
        ("FADD R4, R5, R6", "FMUL R8, R4, R4", 4),
        ("ISETP.GE.AND P0, PT, R4, R5, PT", "@P0 MOV R8, R9", 13),
        ("ISETP.GE.AND P0, PT, R4, R5, PT", "SEL R8, R9, RZ, P0", 4),
        ("R2UR UR4, R5", "UIADD3 UR6, UR4, 0x1, URZ", 13),
        ("UISETP.GE.AND UP0, UPT, UR4, UR5, UPT", "@UP0 UMOV UR7, URZ", 11),
        ("ULEA UR4, UR5, UR6, 0x3", "IMAD R8, R9, UR4, RZ", 6),
        ("HFMA2 R7, -RZ, RZ, 0, 0", "IMAD.WIDE.U32 R8, R4, R5, R6", 3),
        ("HFMA2 R6, -RZ, RZ, 0, 0", "IMAD.WIDE.U32 R8, R4, R5, R6", 4),
        ("HFMA2 R7, -RZ, RZ, 0, 0", "IMAD.WIDE.U32 R8, R4, R7, R6", 4),
    ],
)
def test_a_result_of_fixed_latency_is_used_no_earlier_than_seen(producer: str, consumer: str, least: int) -> None:
    assert not check_latencies(program((producer, control(least)), (consumer, control(write=0)), EXIT))
    (early,) = check_latencies(program((producer, control(least - 1)), (consumer, control(write=0)), EXIT))
    assert str(early).endswith(f"; the smallest distance seen is {least}")
    assert early.distance == least - 1


def test_a_wait_that_comes_before_its_scoreboard_is_held_is_found() -> None:
    use = ("FADD R5, R4, R4", control(waits=1))
    assert not check_latencies(program(("LDG.E R4, desc[UR4][R2.64]", control(2, write=0)), use, EXIT))
    (early,) = check_latencies(program(("LDG.E R4, desc[UR4][R2.64]", control(1, write=0)), use, EXIT))
    assert str(early).startswith("0x10 FADD R5, R4, R4: uses scoreboard 0 1 cycles after 0x0 LDG.E R4")


def test_stalls_add_up_along_the_shorter_path() -> None:
    compare = ("ISETP.GE.AND P0, PT, R4, R5, PT", control(8))
    assert not check_latencies(program(compare, ("MOV R6, R7", control(5)), ("@P0 MOV R8, R9", control(1)), EXIT))
    assert check_latencies(program(compare, ("@P1 BRA `(k)", control(4)), ("@P0 MOV R8, R9", control(1)), EXIT))


def test_widths_that_the_text_does_not_show() -> None:
    names = {
        "IMAD.WIDE.U32 R14, P0, R18, R25, R16": ("R18 R25 R16 R17", "R14 R15 P0"),
        "LDG.E.128 R8, desc[UR4][R2.64+0x10]": ("UR4 UR5 R2 R3", "R8 R9 R10 R11"),
        "STSM.16.M88.4 [R9], R32": ("R9 R32 R33 R34 R35", ""),
        "CS2R R4, SRZ": ("", "R4 R5"),
        "@!P2 R2P PR, R4.B1, 0x5": ("R4 P2", "P0 P2"),
        "UTMALDG.4D [UR8], [UR14]": ("UR8 UR9 UR10 UR11 UR12 UR13 UR14 UR15", ""),
        "SYNCS.EXCH.64 URZ, [UR4+0x8], UR6": ("UR4 UR6 UR7", ""),
        "FFMA2 R28, R36.F32x2.HI_LO, UR13.F32, R30.reuse.F32": ("R36 R37 UR13 R30", "R28 R29"),
    }
    for code, (reads, writes) in names.items():
        found = accesses(program((code, control())).instructions[0])
        assert ({item.name for item in found.reads}, {item.name for item in found.writes}) == (set(reads.split()), set(writes.split())), (
            code
        )


def test_a_product_reads_b_behind_the_place_of_a() -> None:
    found = accesses(program(("HGMMA.64x64x16.F32.BF16 R24, R128, gdesc[UR8], R24, gsb0", control())).instructions[0])
    assert {item.name for item in found.reads} == {"R128", "R129", "R130", "R131", "UR10", "UR11"}
    assert [item.name for item in found.accumulators] == [f"R{number}" for number in range(24, 56)]


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("FROB R4, R5", "no entry for the opcode of 'FROB R4, R5'"),
        ("MOV R4, {R5}", r"cannot read operand '\{R5\}' of 'MOV R4, \{R5\}'"),
        ("BRX R4", "indirect control flow is not supported"),
        ("F2F.F64.F32 R4, R6", "double precision is not supported"),
    ],
)
def test_unknown_code_is_refused(code: str, message: str) -> None:
    with pytest.raises(SassError, match=message):
        hazards(program((code, control()), EXIT))


def test_text_without_encodings_is_refused() -> None:
    with pytest.raises(SassError, match="the output of `nvdisasm -c -hex` is needed"):
        read_listing("k:\n  /*0000*/  EXIT ;\n")


def test_a_literal_float_is_taken_from_the_encoding() -> None:
    lines = ("k:", "/*0000*/  FMUL R4, R5, 1.4426950216293334961 ; /* 0x3fb8aa3b00000000 */", "/* 0x0 */".replace("0x0", f"0x{0:016x}"))
    operand = read_listing("\n".join(lines)).instructions[0].operands[2]
    assert operand == Immediate(0x3FB8AA3B)
