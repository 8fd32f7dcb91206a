"""Source lines of machine code: exact on a built kernel, and left out with a reason where the code is another."""

from __future__ import annotations

import pytest

from cute_mla.aot_build import source_lines as module
from cute_mla.aot_build.source_lines import SourceLines, read_lines, source_lines
from cute_mla.aot_build.tools import ToolError
from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.simulator.sass.listing import SassInstruction
from tests.simulator.machine_code import listing_of
from tests.support.tree import ROOT

KERNEL = "dense_decode_sm90_bf16_cluster2"
OPCODES = {"UTMALDG": "cp.async.bulk.tensor", "USETMAXREG": "setmaxnreg", "BAR": "bar", "LDG": "ld.global"}


def lines_of(kernel: str, cubin_of: str = "") -> tuple[SourceLines, list[str]]:
    """Return the source lines of a built kernel, and its PTX by lines. cubin_of: another kernel, whose code stands in."""
    artifacts = load_artifacts()
    entry = artifacts.manifest.kernels[kernel]
    ptx = artifacts.ptx(entry)
    return source_lines(entry, artifacts.cubin(artifacts.manifest.kernels[cubin_of or kernel]), ptx), ptx.splitlines()


def no_compiler(*_: object) -> bytes:
    raise ToolError("the CuTe DSL is not installed")


def test_ptx_lines_are_those_of_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_compiled", no_compiler)
    found, ptx = lines_of(KERNEL)
    assert found.missing == (f"no Python lines of {KERNEL}: the CuTe DSL is not installed",)
    code = listing_of(KERNEL).instructions
    for base, expected in OPCODES.items():
        counted: list[SassInstruction] = [ins for ins in code if ins.base == base]
        assert counted
        wrong = [ins.text for ins in counted if not any(word in ptx[found.ptx[ins.address] - 1] for word in expected.split())]
        assert not wrong
    assert not any(ins.address in found.ptx for ins in code if ins.base == "HGMMA")  # ptxas enters no lines for products


def test_python_lines_are_those_of_the_sources() -> None:
    found, _ = lines_of("split_plan_sm90_i32")
    assert found.missing == ()
    files = {path for path, _ in found.python.values()}
    assert any(path.startswith("kernels/split_plan/") for path in files)
    for path, line in set(found.python.values()):
        assert 1 <= line <= len((ROOT / "cute_mla" / path).read_text(encoding="utf-8").splitlines())
    address, (path, line) = next(iter(found.python.items()))
    assert found.where(address) == f"{path}:{line}"
    assert found.where(-1) == ""


def test_lines_of_other_code_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_compiled", no_compiler)
    found, _ = lines_of("split_plan_sm90_i32", cubin_of="split_plan_sm100_i32")
    assert not found.ptx
    assert "no PTX lines of split_plan_sm90_i32: the machine code made with a line table is not the built kernel's" in found.missing


def test_a_line_holds_until_the_next() -> None:
    text = """
    //## File "/a/b.py", line 7
        /*0000*/                   MOV R1, R2 ;
        /*0010*/                   MOV R3, R4 ;
    //## File "/a/c.py", line 9
        /*0020*/              @!P0 EXIT ;
        /*0030*/               @P1 HGMMA.64x64x16.F32 R24, gdesc[UR4], R24 ;
    """
    assert read_lines(text) == {0: ("/a/b.py", 7), 16: ("/a/b.py", 7), 32: ("/a/c.py", 9)}
