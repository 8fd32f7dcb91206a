"""Definite assignment and liveness: what is written under a predicate is defined where the predicate holds."""

from __future__ import annotations

import pytest

from cute_mla.simulator.codegen.assignment import Code, analyse, mask_of
from cute_mla.simulator.frontend.ptx import Instruction, Reg
from cute_mla.simulator.isa.table import Decoded, lookup

NAMES = ("P0", "P1", "R0", "R1", "R2")
NUMBERS = {name: number for number, name in enumerate(NAMES)}
REGISTERS = {name: Reg(name, "p" if name[0] == "P" else "r") for name in NAMES}


def instruction(text: str) -> Decoded:
    """Return an instruction of the form "R1 P0 = R0 R2 @!P1"."""
    found = lookup("mov.u32")
    assert found is not None
    body, _, guard = text.partition("@")
    writes, reads = ([REGISTERS[name] for name in part.split()] for part in body.split("="))
    held = (REGISTERS[guard.lstrip("!")], guard.startswith("!")) if guard else None
    if held is not None:
        reads.append(held[0])
    return Decoded(Instruction("mov.u32", [], held, 0), *found, tuple(reads), tuple(writes))


def undefined(*blocks: str, edges: tuple[tuple[int, ...], ...] | None = None) -> str:
    """Return the registers that may be read before they are written, in blocks of instructions that semicolons part."""
    code: Code = [[instruction(text) for text in block.split(";")] for block in blocks]
    following = edges or tuple((index + 1,) for index in range(len(blocks)))
    found = analyse(code, following, NUMBERS).undefined
    return " ".join(name for name in NAMES if found >> NUMBERS[name] & 1)


@pytest.mark.parametrize("parted", [False, True])
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("P0 =; R1 = @P0; R2 = R1 @P0", ""),
        ("P0 =; R1 = @P0; R2 = R1 @!P0", "R1"),
        ("P0 =; R1 = @P0; R2 = R1", "R1"),
        ("P0 =; R1 = @P0; P0 =; R2 = R1 @P0", "R1"),
        ("P0 =; R1 = @P0; R1 = @!P0; R2 = R1", ""),
        ("P0 =; R1 = @P0; P0 =; R1 = @!P0; R2 = R1", "R1"),
        ("P0 =; R1 = @P0; R1 = @P0; R2 = R1", "R1"),
        ("P0 P1 =; R1 = @P0; R1 = @!P1; R2 = R1", "R1"),
        ("P0 =; P0 R1 = @P0; R2 = R1 @P0", "R1"),
        ("P0 R1 =; P0 = @P0; R2 = R1 @P0", ""),
        ("R1 = R0", "R0"),
    ],
)
def test_straight_code(code: str, expected: str, parted: bool) -> None:
    assert undefined(*(code.split(";") if parted else (code,))) == expected


def test_paths_join() -> None:
    edges = ((1, 2), (3,), (3,), (4,))
    assert undefined("P0 P1 =", "R1 = @P0", "R1 = @P0", "R2 = R1 @P0", edges=edges) == ""
    assert undefined("P0 P1 =", "R1 = @P0", "R1 = @P1", "R2 = R1 @P0", edges=edges) == "R1"
    assert undefined("P0 P1 =", "R1 = @P0", "P1 = R0", "R2 = R1 @P0", edges=edges) == "R0 R1"


def test_a_register_written_under_a_guard_lives_only_if_it_is_read() -> None:
    code = [[instruction(text) for text in block.split(";")] for block in ("P0 =; R1 = @P0", "R0 = R2", "R2 = R1")]
    live = analyse(code, ((1, 2), (3,), (3,)), NUMBERS).live
    assert [mask & mask_of([REGISTERS["R1"]], NUMBERS) > 0 for mask in live] == [True, False, True]
