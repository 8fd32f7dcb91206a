"""Layout of an entry: rows of registers, offsets of parameters and shared variables; and the map of the address spaces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from .ptx import EntryText, Reg

PARAM_BASE = 0  # parameter addresses are offsets into the argument block
SHARED_BASE = 0x400  # offset of dynamic shared memory in a CTA's window, as on the device
RANK_SHIFT = 24  # shared::cluster addresses: CTA rank << 24 | offset

# Generic addresses: host addresses are global memory; windows above them hold the other spaces.
SHARED_WINDOW = 1 << 56
PARAM_WINDOW = 2 << 56
LOCAL_WINDOW = 3 << 56
FOREIGN_WINDOW = 4 << 56  # functions and variables outside a cubin: nothing of it can be accessed
WINDOW_MASK = (1 << 56) - 1


@dataclass
class Layout:
    """Rows of registers per bank; byte offsets of parameters and (in the CTA's window) of shared variables.

    params_begin: offset of the first parameter, in machine code its place in constant bank 0. numbers: places of registers in a bit mask of
    all of them. Bank "r" comes first, so that its rows are its numbers; starts: first number of each bank. local_bytes: local memory of a
    thread. tables: contents of constant banks beside the parameters'.
    """

    rows: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=lambda: {"p": 0, "h": 0, "r": 0, "d": 0})
    starts: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    params: dict[str, int] = field(default_factory=dict)
    params_begin: int = PARAM_BASE
    param_bytes: int = 0
    shared: dict[str, int] = field(default_factory=dict)
    dynamic_base: int = 0
    local_bytes: int = 0
    tables: dict[int, bytes] = field(default_factory=dict)
    row_groups: dict[tuple[int, ...], object] = field(default_factory=dict)

    def row(self, register: Reg) -> int:
        """Return the row of a register in its bank."""
        return self.rows[register.name]

    def place(self, register: Reg) -> None:
        """Give a register the next row of its bank, unless it has one."""
        if register.name not in self.rows:
            self.rows[register.name] = self.sizes[register.bank]
            self.sizes[register.bank] += 1

    def number(self, registers: Iterable[Reg]) -> None:
        """Give numbers to the registers, all of which have a row."""
        start = 0
        for bank in ("r", "d", "h", "p"):
            self.starts[bank] = start
            start += self.sizes[bank]
        self.numbers = {register.name: self.starts[register.bank] + self.rows[register.name] for register in registers}


def make_layout(entry: EntryText, groups: list[tuple[Reg, ...]]) -> Layout:
    """Lay out an entry. groups: registers that should have consecutive rows (matrix fragments), if still possible."""
    layout = Layout()
    for group in groups:
        for register in group:
            layout.place(register)
    for register in entry.registers.values():
        layout.place(register)
    layout.number(entry.registers.values())
    offset = PARAM_BASE
    for param in entry.params:
        offset = -(-offset // param.align) * param.align
        layout.params[param.name] = offset
        offset += param.size
    layout.param_bytes = offset
    window = SHARED_BASE
    for variable in entry.shared:
        if variable.size:
            window = -(-window // variable.align) * variable.align
            layout.shared[variable.name] = window
            window += variable.size
    dynamic = [variable for variable in entry.shared if not variable.size]
    for variable in dynamic:
        window = -(-window // variable.align) * variable.align
    layout.dynamic_base = window
    for variable in dynamic:
        layout.shared[variable.name] = window
    return layout
