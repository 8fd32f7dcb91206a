"""Hand-written PTX kernels that run as machine code: ptxas assembles them, the simulator loads the cubin."""

from __future__ import annotations

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
