"""Compiled code is shared by blocks of equal structure, whatever their registers, literals and places, and never confused."""

from __future__ import annotations

import numpy as np

from cute_mla.simulator.codegen.translator import codes_of
from tests.simulator.small_kernels import Kernel, aligned

# out[tid] = tid * FACTOR + ADDEND where tid < LIMIT, else SKIP
BODY = """
    mov.u32 {A}, {SKIP};
    setp.ge.u32 {P}, %r0, {LIMIT};
    @{P} bra END;
    mul.lo.u32 {A}, %r0, {FACTOR};
    add.u32 {A}, {A}, {ADDEND};
END:
    st.global.u32 [%rd2], {A};
    @{P} mov.u32 {A}, 1;
    @!{P} st.global.u32 [%rd2+{OFFSET}], {A};
"""
FIRST = {"A": "%r3", "P": "%p1", "SKIP": "7", "LIMIT": "20", "FACTOR": "3", "ADDEND": "1000", "OFFSET": "128"}
SECOND = {"A": "%r9", "P": "%p4", "SKIP": "70001", "LIMIT": "11", "FACTOR": "5", "ADDEND": "2", "OFFSET": "128"}


def body(words: dict[str, str], before: str = "") -> str:
    """Return the body with registers and literals filled in."""
    return before + BODY.format(**words)


def expected(words: dict[str, str]) -> list[int]:
    """Return the two halves that the kernel writes."""
    limit, factor, addend = (int(words[name]) for name in ("LIMIT", "FACTOR", "ADDEND"))
    computed = [lane * factor + addend for lane in range(limit)]
    return computed + [int(words["SKIP"])] * (32 - limit) + computed + [0] * (32 - limit)


def run(words: dict[str, str], before: str = "") -> list[int]:
    """Run the kernel on 64 words."""
    out = aligned(64, np.uint32)
    assert Kernel(body(words, before)).run(out).ok
    return out.tolist()


def test_other_registers_literals_and_places_need_no_compilation() -> None:
    assert run(FIRST) == expected(FIRST)
    misses = codes_of.cache_info().misses
    assert run(SECOND) == expected(SECOND)
    assert run(FIRST) == expected(FIRST)
    assert codes_of.cache_info().misses == misses
    moved = "mov.u32 %r20, 1;\nNEXT:\n"  # parts the first block in two, so that all others have another place
    assert run(SECOND, moved) == expected(SECOND)
    assert codes_of.cache_info().misses <= misses + 2


def test_another_instruction_is_compiled() -> None:
    assert run(FIRST) == expected(FIRST)
    misses = codes_of.cache_info().misses
    out = aligned(64, np.uint32)
    assert Kernel(body(FIRST).replace("add.u32", "sub.u32")).run(out).ok
    assert codes_of.cache_info().misses > misses
    assert out[1] == 3 - 1000 + (1 << 32)


def test_findings_of_shared_code_name_their_own_lines() -> None:
    far = {**SECOND, "OFFSET": "4096"}
    first = Kernel(body({**FIRST, "OFFSET": "4096"})).run(aligned(64, np.uint32))
    second = Kernel(body(far, "mov.u32 %r20, 1;\n\n\nNEXT:\n")).run(aligned(64, np.uint32))
    (one,), (other,) = first.findings, second.findings
    assert (one.kind, other.kind) == ("out_of_bounds", "out_of_bounds")
    assert one.ptx_line is not None
    assert other.ptx_line == one.ptx_line + 4
