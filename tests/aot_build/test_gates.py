"""Every gate finds the fault that it is there for. The evidence is a real kernel's; each test plants one fault in it."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cute_mla.aot_build.gates import FLOATS, RELATIONS, ROUTINES, Evidence, GateError, check
from cute_mla.aot_build.known_exposed_loads import KNOWN_EXPOSED_LOADS
from cute_mla.aot_build.ptx import read_ptx
from cute_mla.aot_build.sass import count_opcodes
from cute_mla.aot_build.tools import assemble
from cute_mla.runtime.artifacts import artifacts_folder
from cute_mla.simulator.sass.control_codes import hazards
from cute_mla.simulator.sass.cubin import TOOL_NOTE, read_cubin
from cute_mla.simulator.sass.disassembler import disassemble, find_program
from cute_mla.simulator.sass.listing import read_listing
from cute_mla.spec.arch import SM90
from tests.aot_build.tma_copy import GOOD, PARAMS
from tests.support.params import int64s

Plant = Callable[[Evidence], Evidence]


@pytest.fixture(scope="module")
def evidence(ptx: str, cubin: bytes) -> Evidence:
    """Return the gates' evidence for the good kernel. Without ptxas, its cubin also stands in for the reassembled one."""
    info = read_cubin(cubin)
    return Evidence(
        kernel=GOOD.name,
        arch=SM90,
        params=PARAMS,
        block=(128, 1, 1),
        smem_bytes=9216,
        expected={"UTMALDG": 1, "mbarrier.init": 1},
        ptx=read_ptx(ptx),
        cubin=info,
        sass=count_opcodes(read_listing(disassemble(cubin))),
        reassembled=info,
    )


def fails(evidence: Evidence, message: str) -> None:
    """Expect the check to fail, with the kernel's name and this message."""
    with pytest.raises(GateError, match=message) as failure:
        check(evidence)
    assert all(line.startswith(f"{GOOD.name}: gate ") for line in str(failure.value).splitlines())


def test_the_kernel_passes(evidence: Evidence) -> None:
    check(evidence)


def cubin_with(**changes: Any) -> Plant:
    """Return a change of what is read from the cubin."""
    return lambda evidence: replace(evidence, cubin=replace(evidence.cubin, **changes))


def ptx_with(**changes: Any) -> Plant:
    """Return a change of what is read from the PTX."""
    return lambda evidence: replace(evidence, ptx=replace(evidence.ptx, **changes))


def declared(**changes: Any) -> Plant:
    """Return a change of what the source declares."""
    return lambda evidence: replace(evidence, **changes)


def more(opcode: str, count: int) -> Plant:
    """Return more instructions in the SASS."""
    return lambda evidence: replace(evidence, sass=evidence.sass + Counter({opcode: count}))


def renamed(evidence: Evidence) -> Evidence:
    """Give the kernel the DSL's own name."""
    name = ("kernel_cutlass_tma_copy",)
    return ptx_with(entries=name)(cubin_with(entries=name)(evidence))


SWAPPED = (PARAMS[1], PARAMS[0], PARAMS[2])
FAULTS: list[tuple[Plant, str]] = [
    (cubin_with(stack_bytes=8), "gate stack: stack 8 bytes, limit: 0 bytes"),
    (more("LDL.64", 3), "gate stack: 3 LDL/STL instructions, limit: 0"),
    (more("STL", 3), "gate stack: 3 LDL/STL instructions, limit: 0"),
    (renamed, 'gate entry_name: entry name kernel_cutlass_tma_copy, limit: a name without "cutlass"'),
    (ptx_with(entries=("other",)), r"gate entry_name: entries \['other'\] in the PTX"),
    *((ptx_with(block=block), r"gate block_size: .* limit: the declared block \(128, 1, 1\)") for block in ((256, 1, 1), (64, 2, 1), None)),
    (declared(params=PARAMS[:2]), "gate parameters: 3 parameters in the PTX, limit: the 2 declared"),
    (declared(params=PARAMS[:2]), "gate parameters: 3 KPARAM records in the cubin, limit: the 2 declared"),
    (declared(params=SWAPPED), r"parameter 0 is \.b8 \(128 bytes, align 64\) in the PTX, limit: dst: pointer"),
    (declared(params=SWAPPED), "parameter 1 takes 8 bytes in the cubin, limit: src: tensor_map"),
    (declared(params=(*PARAMS[:2], *int64s("row"))), "parameter 2 takes 4 bytes in the cubin, limit: row: int64"),
    (declared(params=(PARAMS[0], *int64s("dst"), PARAMS[2])), r"parameter 1 is \.u64 \.ptr .* limit: dst: int64"),
    (cubin_with(params=((0, 128), (128, 8))), "2 KPARAM records in the cubin"),
    (declared(expected={"UTMALDG": 2}), "gate expected_counts: 1 UTMALDG, limit: the expected 2"),
    (declared(expected={"HGMMA": 44}), "gate expected_counts: 0 HGMMA, limit: the expected 44"),
    (declared(expected={"mbarrier.init": 0}), "gate expected_counts: 1 mbarrier.init, limit: the expected 0"),
    (declared(expected={"mbarrier.ini": 1}), "gate expected_counts: 0 mbarrier.ini, limit: the expected 1"),
    (cubin_with(options="-O 3 -arch sm_90a -lineinfo"), "gate tool_note: ptxas options '-O 3 -arch sm_90a -lineinfo'"),
    (
        lambda evidence: replace(evidence, reassembled=replace(evidence.cubin, tool="13.0.88")),
        r"gate reassembly: ptxas 13\.0\.88 .* limit: the DSL's own release, 13\.4\.59",
    ),
]


@pytest.mark.parametrize(("plant", "message"), FAULTS, ids=[message[:40] for _, message in FAULTS])
def test_a_fault_is_found(evidence: Evidence, plant: Plant, message: str) -> None:
    fails(plant(evidence), message)


def test_overlap(evidence: Evidence) -> None:
    wanted = replace(evidence, overlapped={"MUFU.EX2": 64})
    check(replace(wanted, overlap=Counter({"MUFU.EX2": 66})))
    fails(replace(wanted, overlap=Counter({"MUFU.EX2": 63, "MUFU.EX2F": 9})), "gate overlap: 63 MUFU.EX2 between products.*at least 64")


def test_an_opcode_that_only_begins_like_a_spill_is_none(evidence: Evidence) -> None:
    check(replace(evidence, sass=evidence.sass + Counter({"LDLX": 1})))


@pytest.mark.parametrize(("registers", "passes"), [(168, True), (169, False)])
def test_registers_of_a_block(evidence: Evidence, registers: int, passes: bool) -> None:
    wide = replace(
        evidence,
        block=(384, 1, 1),
        ptx=replace(evidence.ptx, block=(384, 1, 1)),
        cubin=replace(evidence.cubin, registers=registers),
    )
    if passes:
        check(wide)
    else:
        fails(wide, "gate registers: 67584 registers for 12 warps of 169 a thread, limit: 65536")


@pytest.mark.parametrize(("smem", "passes"), [(232_448, True), (232_449, False)])
def test_shared_memory(evidence: Evidence, smem: int, passes: bool) -> None:
    if passes:
        check(replace(evidence, smem_bytes=smem))
    else:
        fails(replace(evidence, smem_bytes=smem), "gate shared_memory: 232449 bytes .* limit: 232448 bytes on sm90")


WRITTEN = {
    "tensor-core operations": "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16",
    "tensor-core operations of pairs": "tcgen05.mma.cta_group::2.kind::f16",
    "tensor-core commits": "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64",
    "tensor-core commits of pairs": "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.b64",
    "tensor-core commits to several CTAs": "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64",
    "tensor-memory loads": "tcgen05.ld.sync.aligned.32x32b.x32.b32",
    "tensor-memory stores": "tcgen05.st.sync.aligned.32x32b.x32.b32",
    "tensor-memory copies": "tcgen05.cp.cta_group::1.128x256b",
    "waits for tensor-memory stores": "tcgen05.wait::st.sync.aligned",
    "tensor-memory allocations": "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32",
    "tensor-memory deallocations": "tcgen05.dealloc.cta_group::1.sync.aligned.b32",
    "TMA loads of pairs": "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2",
    "TMA loads to several CTAs": "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster",
    "TMA loads": "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes",
    "TMA stores": "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group",
    "bulk copies": "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes",
    "mbarrier initialisations": "mbarrier.init.shared.b64",
    "mbarrier arrivals": "mbarrier.arrive.expect_tx.shared.b64",
    "mbarrier waits": "mbarrier.try_wait.parity.shared.b64",
    "block barriers": "bar.sync",
    "cluster arrivals": "barrier.cluster.arrive.release.aligned",
    "cluster waits": "barrier.cluster.wait.acquire.aligned",
    "proxy fences": "fence.proxy.async.shared::cta",
    "waits for the grid before": "griddepcontrol.wait",
    "register reallocations": "setmaxnreg.inc.sync.aligned.u32",
}


@pytest.mark.parametrize("meaning", [relation.meaning for relation in RELATIONS])
def test_translation_finds_an_instruction_lost_in_the_sass(evidence: Evidence, meaning: str) -> None:
    more = replace(evidence.ptx, opcodes=evidence.ptx.opcodes + Counter({WRITTEN[meaning]: 100}))
    fails(replace(evidence, ptx=more), f"gate translation: \\d+ {meaning} in the SASS, limit: (at least )?the 10\\d of the PTX")


@pytest.mark.parametrize(
    "opcode",
    [
        "HGMMA.64x64x16.F32.BF16", "UTCHMMA", "UTCHMMA.2CTA", "UTCQMMA", "UTCBAR", "UTCBAR.2CTA.MULTICAST", "UTMALDG.2D", "UTMALDG.4D.2CTA",
        "UBLKCP.S.G", "SYNCS.EXCH.64", "USETMAXREG.DEALLOC",
    ],
)  # fmt: skip
def test_translation_finds_an_instruction_that_the_ptx_does_not_have(evidence: Evidence, opcode: str) -> None:
    fails(replace(evidence, sass=evidence.sass + Counter({opcode: 1})), "gate translation: ")


@pytest.mark.parametrize("opcode", ["BAR.SYNC", "SYNCS.PHASECHK.TRANS64.TRYWAIT", "SYNCS.ARRIVE.TRANS64", "FENCE.VIEW.ASYNC", "LDTM.x32"])
def test_translation_allows_what_ptxas_duplicates(evidence: Evidence, opcode: str) -> None:
    check(replace(evidence, sass=evidence.sass + Counter({opcode: 1})))


def test_a_fence_of_tensor_memory_is_no_proxy_fence(evidence: Evidence) -> None:
    more = replace(evidence, ptx=replace(evidence.ptx, opcodes=evidence.ptx.opcodes + Counter({"fence.proxy.async.shared::cta": 50})))
    check(replace(more, sass=evidence.sass + Counter({"FENCE.VIEW.ASYNC.S": 50})))
    fails(replace(more, sass=evidence.sass + Counter({"FENCE.VIEW.ASYNC.T": 50})), "gate translation: \\d+ proxy fences in the SASS")


ROUNDED = """
.version 8.8
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 .ptr .global out)
.reqntid 32, 1, 1
{ .reg .f32 %f<9>; .reg .b32 %r<9>; .reg .b64 %rd<4>;
ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 12; add.u64 %rd1, %rd1, %rd2;
ld.global.f32 %f1, [%rd1]; ld.global.f32 %f2, [%rd1+4]; ld.global.f32 %f3, [%rd1+8];
BODY
st.global.f32 [%rd1], %f8; ret; }
"""


def of_body(evidence: Evidence, body: str) -> Evidence:
    """Return evidence with the counts of a small kernel's PTX and of what ptxas makes of it."""
    text = ROUNDED.replace("BODY", body)
    cubin = assemble(text, SM90.gpu_arch)
    if cubin is None:
        pytest.skip("ptxas is not installed")
    small = replace(read_ptx(text), entries=evidence.ptx.entries, params=evidence.ptx.params, block=evidence.ptx.block)
    return replace(evidence, ptx=small, sass=count_opcodes(read_listing(disassemble(cubin))), expected={})


def test_contraction_by_ptxas(evidence: Evidence) -> None:
    apart = of_body(evidence, "mul.f32 %f4, %f1, %f2; sub.f32 %f8, %f4, %f3;")
    fails(apart, "gate float_counts: 0 FMUL in the SASS, limit: the 1 of the PTX")
    fails(apart, "gate float_counts: 1 FFMA in the SASS, limit: the 0 of the PTX")
    fails(apart, "gate contraction: sub.f32 %f8, %f4, %f3; takes a product that is not rounded .*, limit: an fma, or .rn on both")
    check(of_body(evidence, "mul.rn.f32 %f4, %f1, %f2; sub.f32 %f8, %f4, %f3;"))
    check(of_body(evidence, "neg.f32 %f4, %f3; fma.rn.f32 %f8, %f1, %f2, %f4;"))
    check(of_body(evidence, "neg.f32 %f8, %f3;"))


@pytest.mark.parametrize("opcode", ROUTINES)
def test_float_counts_of_routines(evidence: Evidence, opcode: str) -> None:
    check(of_body(evidence, f"{opcode} %f8, %f1{', %f2' if opcode.startswith('div') else ''};"))


@pytest.mark.parametrize("opcode", [opcode for opcode, _, _ in FLOATS])
def test_float_counts_find_one_more(evidence: Evidence, opcode: str) -> None:
    more = replace(evidence, sass=evidence.sass + Counter({opcode: 1}))
    fails(more, f"gate float_counts: 1 {opcode} in the SASS, limit: the 0 of the PTX")


def test_serialised_mmas(evidence: Evidence) -> None:
    mmas = replace(
        evidence.ptx,
        opcodes=evidence.ptx.opcodes + Counter({"wgmma.mma_async.sync": 44, "wgmma.wait_group.sync": 2, "wgmma.commit_group.sync": 2}),
    )
    sass = evidence.sass + Counter({"HGMMA.64x64x16.F32": 44})
    check(replace(evidence, ptx=mmas, sass=sass + Counter({"WARPGROUP.DEPBAR.LE": 4})))
    fails(
        replace(evidence, ptx=mmas, sass=sass + Counter({"WARPGROUP.DEPBAR.LE": 44})),
        "gate serialisation: 44 WARPGROUP.DEPBAR: .* limit: 4",
    )


def test_control_codes(evidence: Evidence) -> None:
    listing = read_listing(disassemble((artifacts_folder() / "split_plan_sm90_i32.cubin").read_bytes()))
    index = next(index for index, ins in enumerate(listing.instructions) if ins.control.waits)
    code = list(listing.instructions)
    code[index] = replace(code[index], control=replace(code[index].control, waits=0))
    assert hazards(listing) == ()
    planted = tuple(map(str, hazards(replace(listing, instructions=tuple(code)))))
    fails(replace(evidence, hazards=planted), "gate control_codes: 0x.*: it waits for no scoreboard that guards .*, limit: none")


def test_exposed_loads(evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    found = replace(evidence, exposed=Counter({"LDG.E.128": 8}))
    fails(found, "gate exposed_loads: 8 LDG.E.128 in main loops with a wait less than 150 stall clocks behind, limit: none")
    monkeypatch.setitem(KNOWN_EXPOSED_LOADS, GOOD.name, {"LDG.E.128": 8})
    check(found)
    fails(evidence, "gate exposed_loads: 0 LDG.E.128 .* limit: the 8 of .* a table that only shrinks: enter 0")
    monkeypatch.setitem(KNOWN_EXPOSED_LOADS, GOOD.name, {"LDG.E.128": 7})
    fails(found, "gate exposed_loads: 8 LDG.E.128 .* limit: 7")


def test_reassembly_ignores_only_the_note_in_which_an_assembler_signs(evidence: Evidence) -> None:
    signed = replace(evidence.cubin, sections={**evidence.cubin.sections, TOOL_NOTE: b"another"})
    check(replace(evidence, reassembled=signed))
    longer = replace(evidence.cubin, sections={**evidence.cubin.sections, ".extra": b"x"})
    fails(replace(evidence, reassembled=longer), r"gate reassembly: sections \['.extra'\] differ")


@pytest.mark.skipif(find_program("ptxas") is None, reason="needs the ptxas program of the build extra")
def test_reassembly_finds_a_ptx_that_is_not_the_cubins_source(evidence: Evidence, ptx: str) -> None:
    """One immediate operand changed: no count, no parameter and no register differs, so that no other gate can tell."""
    assert ptx.count(", 8192;") == 1
    other = assemble(ptx.replace(", 8192;", ", 4096;"), SM90.gpu_arch)
    assert other is not None
    fails(
        replace(evidence, reassembled=read_cubin(other)),
        r"^[^\n]*gate reassembly: sections \['\.text\.tma_copy_sm90_bf16_0'\] differ[^\n]*$",
    )
    same = assemble(ptx, SM90.gpu_arch)
    assert same is not None
    check(replace(evidence, reassembled=read_cubin(same)))


def test_every_violation_is_named_and_the_error_survives_a_process_boundary(evidence: Evidence) -> None:
    with pytest.raises(GateError) as failure:
        check(replace(evidence, smem_bytes=1 << 20, cubin=replace(evidence.cubin, stack_bytes=16)))
    assert [violation.gate for violation in failure.value.violations] == ["stack", "shared_memory"]
    assert str(pickle.loads(pickle.dumps(failure.value))) == str(failure.value)
