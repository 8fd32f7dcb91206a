"""Evidence for the table of machine opcodes: PTX assembled by ptxas runs as PTX and as machine code, and must give the same bits."""

from __future__ import annotations

import struct
from functools import cache

import numpy as np
import pytest

from cute_mla.aot_build.tools import assemble
from cute_mla.simulator import GlobalMemory, Launch, Module, Names, Policy, Report, load_module, run
from cute_mla.simulator.sass.disassembler import disassemble
from cute_mla.simulator.sass.listing import Listing, read_listing
from cute_mla.simulator.sass.module import load_machine_code
from cute_mla.spec.arch import ARCHS, Arch
from cute_mla.spec.tensor_map import TensorMap
from tests.simulator.machine_opcodes import EVIDENCE, THREADS, Evidence, words
from tests.simulator.small_kernels import Kernel

SMEM = 16 * THREADS
EXTRA = 0x0000_0123_4567_89AB  # the third parameter, for uniform arithmetic


def source(evidence: Evidence, arch: Arch) -> str:
    text = Kernel(evidence.text(), THREADS, SMEM).text([np.zeros(1), np.zeros(1), 0])
    if evidence.registers:
        text = text.replace(".reqntid", f".maxnreg {evidence.registers}\n.reqntid")
    return text.replace("sm_90a", arch.gpu_arch)


@cache
def assembled(evidence: Evidence, arch: Arch) -> tuple[Module, Listing]:
    """Return the loaded machine code of a kernel, and its listing."""
    cubin = assemble(source(evidence, arch), arch.gpu_arch)
    if cubin is None:
        pytest.skip("ptxas is not installed")
    text = disassemble(cubin)
    return load_machine_code(cubin, text), read_listing(text)


def results(module: Module, evidence: Evidence, schedule: str) -> tuple[np.ndarray, Report]:
    """Run a kernel on the sources of all threads."""
    sources, stored = words(evidence.floats), np.zeros((evidence.results, THREADS), np.uint32)
    memory = GlobalMemory()
    memory.add("sources", sources.ctypes.data, sources.nbytes)
    memory.add("results", stored.ctypes.data, stored.nbytes, initialised=False)
    args: list[bytes | TensorMap] = [struct.pack("<Q", value) for value in (sources.ctypes.data, stored.ctypes.data, EXTRA)]
    launch = Launch(module, "k", (1, 1, 1), (THREADS, 1, 1), (1, 1, 1), SMEM, args, Names())
    report = run(launch, memory, Policy.named(schedule))
    return stored, report


@pytest.mark.parametrize("evidence", EVIDENCE, ids=lambda evidence: evidence.name)
def test_machine_code_gives_the_bits_of_the_ptx(arch: Arch, evidence: Evidence) -> None:
    if arch.name not in evidence.archs:
        pytest.skip(f"{arch.name} does not have these instructions")
    module, _ = assembled(evidence, arch)
    expected, first = results(load_module(source(evidence, arch)), evidence, "round_robin")
    assert not first.findings
    for schedule in ("round_robin", "adversarial"):
        actual, second = results(module, evidence, schedule)
        assert not second.findings, second.findings
        wrong = sorted({int(row) for row in np.argwhere(actual != expected)[:, 0]})
        assert not wrong, [(row, hex(actual[row, lane]), hex(expected[row, lane]), lane) for row in wrong
                           for lane in np.flatnonzero(actual[row] != expected[row])[:2]]  # fmt: skip


@pytest.mark.parametrize("evidence", EVIDENCE, ids=lambda evidence: evidence.name)
def test_the_machine_code_has_the_opcodes(evidence: Evidence) -> None:
    found = {ins.opcode for name in evidence.archs for ins in assembled(evidence, ARCHS[name])[1].instructions}
    missing = [opcode for opcode in evidence.opcodes if not any(f"{name}.".startswith(f"{opcode}.") for name in found)]
    assert not missing, sorted(found)
