"""Origins of operations: the CTA, the warp and the PTX instruction that issued one.

Generated code runs from files named PREFIX + ...; their globals hold the PTX instruction of each line under LINES.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType, TracebackType

from ..frontend.ptx import Instruction

PREFIX = "<ptx "
LINES = "$lines"  # global of generated code: file name -> PTX instruction of every line


@dataclass(frozen=True)
class Origin:
    """The CTA (block index), warp and instruction of an operation. instruction is None outside generated code."""

    cta: tuple[int, int, int]
    warp: int
    instruction: Instruction | None

    @property
    def line(self) -> int:
        """Return the PTX line, 0 for none."""
        return 0 if self.instruction is None else self.instruction.line

    @property
    def place(self) -> str:
        """Return " (PTX line n)" for messages, for machine code its address and text; empty where no instruction is known."""
        if self.instruction is None:
            return ""
        return f" (PTX line {self.instruction.line})" if self.instruction.line else f" ({self.instruction.source})"


def instruction_of_caller() -> Instruction | None:
    """Return the PTX instruction whose generated code is on the Python stack, None for none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code.co_filename
        if code.startswith(PREFIX):
            return frame.f_globals[LINES][code][frame.f_lineno - 1]  # type: ignore[no-any-return]
        frame = frame.f_back
    return None


def instruction_of(trace: TracebackType | None) -> Instruction | None:
    """Return the innermost PTX instruction of a traceback, None for none."""
    instruction = None
    while trace is not None:
        code = trace.tb_frame.f_code.co_filename
        if code.startswith(PREFIX):
            instruction = trace.tb_frame.f_globals[LINES][code][trace.tb_lineno - 1]
        trace = trace.tb_next
    return instruction
