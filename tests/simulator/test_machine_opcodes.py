"""Evidence for the table of machine opcodes: PTX assembled by ptxas runs as PTX and as machine code, and must give the same bits."""

from __future__ import annotations

import struct
from collections import Counter
from functools import cache

import numpy as np
import pytest

from cute_mla.aot_build.tools import assemble
from cute_mla.runtime.artifacts import artifacts_folder
from cute_mla.simulator import GlobalMemory, Launch, Module, Names, Policy, Report, TensorMap, load_module, run
from cute_mla.simulator.engine.counts import NO_ROLE, class_of
from cute_mla.simulator.sass.disassembler import disassemble
from cute_mla.simulator.sass.listing import INSTRUCTION_BYTES, Listing, read_listing
from cute_mla.simulator.sass.module import load_machine_code
from cute_mla.simulator.sass.text_cache import disassembly
from cute_mla.spec.arch import ARCHS, Arch
from tests.simulator.machine_opcodes import PLAIN, THREADS, Evidence, words
from tests.simulator.machine_units import UNITS
from tests.simulator.small_kernels import Kernel, aligned

EVIDENCE = (*PLAIN, *UNITS)
SMEM = 9216
EXTRA = 0x0000_0123_4567_89AB  # the third parameter, for uniform arithmetic


def source(evidence: Evidence, arch: Arch) -> str:
    text = Kernel(evidence.text(), THREADS, SMEM).text([np.zeros(1), np.zeros(1), 0, *boxes(0)])
    text = text.replace(".version 9.0", ".version 9.2").replace("sm_90a", arch.gpu_arch)
    if evidence.registers:
        text = text.replace(".reqntid", f".maxnreg {evidence.registers}\n.reqntid")
    if "setmaxnreg" in text:  # which ptxas drops unless it knows how many registers a thread may have
        text = text.replace(f".reqntid {THREADS}, 1, 1", f".reqntid {THREADS}, 1, 1\n.minnctapersm 1")
    return text


def boxes(address: int) -> tuple[TensorMap, TensorMap, TensorMap]:
    """Return tensor maps of four, three and two dimensions over the sources."""
    return (
        TensorMap("i32", address, (8, 4, 4, 4), (32, 128, 512), (8, 2, 2, 2)),
        TensorMap("i32", address, (16, 8, 4), (64, 512), (4, 4, 2)),
        TensorMap("i32", address, (32, 16), (128,), (8, 4)),
    )


def assembled(evidence: Evidence, arch: Arch) -> tuple[Module, Listing]:
    """Return the loaded machine code of a kernel, and its listing."""
    cubin = assemble(source(evidence, arch), arch.gpu_arch)
    if cubin is None:
        pytest.skip("ptxas is not installed")
    text = disassemble(cubin)
    return load_machine_code(cubin, text), read_listing(text)


def results(module: Module, evidence: Evidence, schedule: str) -> tuple[np.ndarray, Report]:
    """Run a kernel on the sources of all threads."""
    sources = aligned(words(evidence.floats).size, np.uint32)
    sources[:] = words(evidence.floats).reshape(-1)
    stored = aligned(evidence.cluster * (evidence.results + evidence.extra) * THREADS, np.uint32).reshape(-1, THREADS)
    memory = GlobalMemory()
    memory.add("sources", sources.ctypes.data, sources.nbytes)
    memory.add("results", stored.ctypes.data, stored.nbytes, initialised=False)
    args: list[bytes | TensorMap] = [struct.pack("<Q", value) for value in (sources.ctypes.data, stored.ctypes.data, EXTRA)]
    args += boxes(sources.ctypes.data)
    shape = (evidence.cluster, 1, 1)
    launch = Launch(module, "k", shape, (THREADS, 1, 1), shape, SMEM, args, Names())
    report = run(launch, memory, Policy.named(schedule))
    return stored, report


def executed(report: Report, listing: Listing) -> set[str]:
    """Return the opcodes that a run of machine code has executed."""
    instructions = [item.instruction for block, _ in report.executed.times for item in report.executed.blocks[block].instructions]
    addresses = {int(ins.source.split()[0], 16) for ins in instructions if ins.source is not None}
    return {listing.instructions[address // INSTRUCTION_BYTES].opcode for address in addresses}


@cache
def shown_by(evidence: Evidence) -> frozenset[str]:
    """Run a kernel as PTX and as machine code on each architecture, compare, and return the opcodes that ran."""
    opcodes: set[str] = set()
    for arch in (ARCHS[name] for name in evidence.archs):
        module, listing = assembled(evidence, arch)
        expected, first = results(load_module(source(evidence, arch)), evidence, "round_robin")
        assert not first.findings
        for schedule in ("round_robin", "adversarial"):
            actual, second = results(module, evidence, schedule)
            assert not second.findings, second.findings
            wrong = sorted({int(row) for row in np.argwhere(actual != expected)[:, 0]})
            assert not wrong, [(arch.name, row, hex(actual[row, lane]), hex(expected[row, lane]), lane) for row in wrong
                               for lane in np.flatnonzero(actual[row] != expected[row])[:2]]  # fmt: skip
            opcodes |= executed(second, listing)
    return frozenset(opcodes)


@pytest.mark.parametrize("evidence", EVIDENCE, ids=lambda evidence: evidence.name)
def test_machine_code_gives_the_bits_of_the_ptx(evidence: Evidence) -> None:
    found = shown_by(evidence)
    missing = [opcode for opcode in evidence.opcodes.split() if not any(f"{name}.".startswith(f"{opcode}.") for name in found)]
    assert not missing, sorted(found)


@pytest.mark.parametrize("name", ["bits", "synchronisation"])
def test_every_machine_instruction_of_a_warp_counts_once(arch: Arch, name: str) -> None:
    """Also one with a guard, of which the simulator makes several."""
    evidence = next(evidence for evidence in EVIDENCE if evidence.name == name)
    module, listing = assembled(evidence, arch)
    _, report = results(module, evidence, "round_robin")
    straight = next(index for index, ins in enumerate(listing.instructions) if ins.opcode == "EXIT") + 1
    expected: Counter[str] = Counter()
    for ins in listing.instructions[:straight]:
        expected[class_of(ins.opcode)] += THREADS // 32
    assert report.executed.by_role() == {NO_ROLE: expected}
    assert "other" not in expected


# Spellings that no kernel above executes. Why -> which. For the last three reasons the built kernels are the only evidence: their machine
# code leaves memory as their PTX does.
NOT_SHOWN_HERE = {
    "test_tcgen05_*.py ask for them": "FENCE.VIEW.ASYNC.T LDTM LDTM.16dp256bit.x2 LDTM.16dp256bit.x4 "
    "LDTM.16dp256bit.x8 LDTM.x16 LDTM.x32 LDTM.x64 "
    "STTM STTM.16dp128bit.x2 STTM.16dp128bit.x4 STTM.x8 STTM.x16 STTM.x32 STTM.x64 SYNCS.ARRIVE.TRANS64.RED UTCATOMSWS.AND "
    "UTCATOMSWS.2CTA.FIND_AND_SET.ALIGN UTCATOMSWS.FIND_AND_SET.ALIGN UTCBAR UTCBAR.2CTA.MULTICAST "
    "UTCHMMA UTCHMMA.2CTA UTCHMMA.WS UTCQMMA UTCQMMA.2CTA UVIRTCOUNT.DEALLOC.SMPOOL",
    "a trap that no kernel reaches": "BPT.TRAP",
    "for a warp whose lanes come to a collective one by one, as none of the kernels' does": "ENDCOLLECTIVE WARPSYNC.COLLECTIVE",
    "a hint to the scheduler": "YIELD",
    "ptxas writes others in small kernels": "BRA.DIV BRX LDCU.128 P2R UF2I.FTZ.U32.TRUNC.NTZ UIMAD.HI.U32 UIMAD.X UPLOP3.LUT",
}


@pytest.mark.slow
def test_every_spelling_of_the_built_kernels_has_evidence() -> None:
    """Reads all cubins: half a minute of nvdisasm where their texts are not kept."""
    shown = {opcode for evidence in EVIDENCE for opcode in shown_by(evidence)}
    shipped = {
        ins.opcode for path in artifacts_folder().glob("*.cubin") for ins in read_listing(disassembly(path.read_bytes())).instructions
    }
    assert shipped - shown == {opcode for spellings in NOT_SHOWN_HERE.values() for opcode in spellings.split()}
