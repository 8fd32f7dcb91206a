"""Hand-written PTX kernels that run as machine code: ptxas assembles them, the simulator loads the cubin."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from unittest import mock

import pytest

from cute_mla.aot_build.tools import assemble
from cute_mla.simulator import Module
from cute_mla.simulator.sass.disassembler import disassemble
from cute_mla.simulator.sass.module import load_machine_code
from tests.simulator import small_kernels

GPU = "sm_100f"
VERSION = ".version 9.2"  # the first PTX with every instruction that the kernels use

Edit = Callable[[str], str]
Evidence = tuple[Callable[[], None], str]  # a test of small kernels, and opcodes that its machine code must have


@cache
def assembled(ptx: str) -> tuple[bytes, str]:
    """Return the cubin of a PTX text for Blackwell, and its disassembly."""
    cubin = assemble(ptx.replace(".version 9.0", VERSION).replace("sm_90a", GPU), GPU)
    if cubin is None:
        pytest.skip("ptxas is not installed")
    return cubin, disassemble(cubin)


@contextmanager
def as_machine_code(edit: Edit | None = None) -> Iterator[list[str]]:
    """Let small kernels run as machine code, whose text is edited first. Give the texts."""
    texts: list[str] = []

    def load(ptx: str) -> Module:
        cubin, text = assembled(ptx)
        texts.append(text if edit is None else edit(text))
        return load_machine_code(cubin, texts[-1])

    with mock.patch.object(small_kernels, "load_module", load):
        yield texts


def check_machine_code(test: Callable[[], None], opcodes: str) -> None:
    """Run a test of small kernels as machine code, and check that this has some opcodes."""
    with check_opcodes(opcodes):
        test()


@contextmanager
def check_opcodes(opcodes: str) -> Iterator[None]:
    """Let small kernels run as machine code, and check that this has some opcodes."""
    with as_machine_code() as texts:
        yield
    missing = [opcode for opcode in opcodes.split() if not any(re.search(rf"\b{re.escape(opcode)} ", text) for text in texts)]
    assert not missing
