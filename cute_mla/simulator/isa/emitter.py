"""Emitter: operands to Python expressions while a block is being generated."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from functools import lru_cache
from operator import itemgetter
from typing import Any

import numpy as np

from ..frontend.layout import Layout
from ..frontend.ptx import Imm, Instruction, Mem, Negated, Operand, Pair, Reg, Special, Symbol
from ..state.window import THREAD_SPECIALS

# operand kind -> (row list of a window, bank, dtype)
KINDS: dict[str, tuple[str, str, np.dtype[Any]]] = {
    "pred": ("P", "p", np.dtype(bool)),
    "b16": ("H", "h", np.dtype(np.uint16)),
    "u16": ("H", "h", np.dtype(np.uint16)),
    "s16": ("I", "h", np.dtype(np.int16)),
    "f16": ("E", "h", np.dtype(np.float16)),
    "b32": ("U", "r", np.dtype(np.uint32)),
    "u32": ("U", "r", np.dtype(np.uint32)),
    "s32": ("S", "r", np.dtype(np.int32)),
    "f32": ("F", "r", np.dtype(np.float32)),
    "b64": ("D", "d", np.dtype(np.uint64)),
    "u64": ("D", "d", np.dtype(np.uint64)),
    "s64": ("L", "d", np.dtype(np.int64)),
    "f64": ("G", "d", np.dtype(np.float64)),
}
DTYPES = {np.dtype(code).name: np.dtype(code) for code in ("?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8")}
UNSIGNED = {"p": "pred", "h": "u16", "r": "u32", "d": "u64"}
WIDTHS = {"p": 1, "h": 16, "r": 32, "d": 64}
CTA_SPECIALS_32 = (
    *(f"{name}.{axis}" for name in ("ctaid", "nctaid", "ntid", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
      for axis in "xyz"),
    "cluster_ctarank", "cluster_nctarank", "nwarpid", "smid", "nsmid", "is_explicit_cluster", "dynamic_smem_size", "total_smem_size",
    "clock", "clock_hi", "globaltimer_lo", "globaltimer_hi",
)  # fmt: skip
CTA_SPECIALS_64 = ("clock64", "globaltimer", "gridid")


class Unsupported(Exception):
    """An operand form that the emitter does not know; reported like an unknown opcode."""


class Constants:
    """Values that a generated function takes as parameters, in the order of first use.

    The text of a function says nothing of registers, literals and places. So blocks of equal structure, of one kernel or of several, have
    equal texts and are compiled once.
    """

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._names: dict[int, str] = {}  # by id of the value

    def array(self, dtype: np.dtype[Any], bits: int) -> str:
        """Return the name of a read-only 0-d array with the given bit pattern."""
        return self.thing(scalar(dtype, bits & (1 << (dtype.itemsize * 8)) - 1))

    def thing(self, value: Any) -> str:
        """Return the name of an object; the same object has one name."""
        if isinstance(value, np.dtype) and value.name in DTYPES:
            return f"dtype_{value.name}"
        name = self._names.get(id(value))
        if name is None:
            name = self._names[id(value)] = self.number(value)
        return name

    def number(self, value: Any) -> str:
        """Return a new name of a value; equal values have several, so that the text does not depend on what happens to be equal."""
        self.values.append(value)
        return f"k{len(self.values) - 1}"


@lru_cache(4096)
def scalar(dtype: np.dtype[Any], bits: int) -> np.ndarray:
    """Return the read-only 0-d array of a bit pattern."""
    value = np.frombuffer(bits.to_bytes(dtype.itemsize, "little"), dtype).reshape(()).copy()
    value.flags.writeable = False
    return value


class Emitter:
    """The body of one generated function.

    tainted: this version also tracks poison. known: registers whose value is a constant at this point of the block.
    """

    def __init__(self, layout: Layout, constants: Constants, tainted: bool, known: dict[str, int] | None = None) -> None:
        self.layout = layout
        self.constants = constants
        self.tainted = tainted
        self.known: dict[str, int] = {} if known is None else known
        self.lines: list[tuple[str, int]] = []
        self.rows: dict[str, dict[int, str]] = {}  # list of a window -> slot -> local
        self.position = 0
        self.redirect: dict[str, str] = {}  # register name -> temporary, for guarded results
        self.parts: dict[str, list[str]] = {}  # register packed in this block -> poison of its parts as locals, lowest first
        self.halved: frozenset[str] = frozenset()  # 64-bit registers whose halves have a poison of their own
        self.serial = 0

    def line(self, code: str) -> None:
        """Append a line (or several) of Python, charged to the current instruction."""
        for part in code.split("\n"):
            self.lines.append((part, self.position))

    def temp(self) -> str:
        """Return a new local name."""
        self.serial += 1
        return f"t{self.serial}"

    # ------------------------------------------------------------ registers

    def row(self, register: Reg, kind: str) -> str:
        """Return the local that holds a register's row viewed as a kind of the same width."""
        name, bank, _ = KINDS[kind]
        if bank != register.bank:
            raise Unsupported(f"register of {WIDTHS[register.bank]} bits used as {kind}")
        return self._bind(name, self.layout.row(register))

    def _bind(self, list_name: str, slot: int) -> str:
        rows = self.rows.setdefault(list_name, {})
        if slot not in rows:
            rows[slot] = f"{list_name}{len(rows)}"
        return rows[slot]

    def header(self) -> list[str]:
        """Return the lines that bind the locals of all rows that the body uses."""
        lines = []
        for list_name, rows in self.rows.items():
            slots, names = tuple(rows), ", ".join(rows.values())
            if len(slots) == 1:
                lines.append(f"{names} = w.{list_name}[{self.constants.number(slots[0])}]")
            else:
                lines.append(f"{names} = {self.constants.number(itemgetter(*slots))}(w.{list_name})")
        return lines

    def src(self, operand: Operand | None, kind: str) -> str:
        """Return the expression that reads an operand as a kind: an array over the lanes, or a 0-d array."""
        if isinstance(operand, Reg):
            if operand.name in self.known and kind != "pred":
                return self.constants.array(KINDS[kind][2], self.known[operand.name])
            if KINDS[kind][1] != operand.bank:
                return self._narrowed(operand, kind)
            return self.row(operand, kind)
        if isinstance(operand, Imm):
            return self.constants.array(KINDS[kind][2], immediate_bits(operand, kind))
        if isinstance(operand, Special):
            return self._special(operand.name, kind)
        if isinstance(operand, Symbol):
            return self.address(operand, 64 if KINDS[kind][1] == "d" else 32)
        if isinstance(operand, Negated):
            return f"logical_not({self.row(operand.reg, 'pred')})"
        raise Unsupported(f"operand {operand} read as {kind}")

    def _narrowed(self, register: Reg, kind: str) -> str:
        """Return the low bits of a wider register."""
        wanted = KINDS[kind][2]
        if WIDTHS[register.bank] <= wanted.itemsize * 8 or register.bank == "p":
            raise Unsupported(f"register of {WIDTHS[register.bank]} bits read as {kind}")
        unsigned = np.dtype(f"u{wanted.itemsize}")
        raw = f"{self.row(register, UNSIGNED[register.bank])}.astype({self.constants.thing(unsigned)})"
        return raw if unsigned == wanted else f"{raw}.view({self.constants.thing(wanted)})"

    def _special(self, name: str, kind: str) -> str:
        if name in THREAD_SPECIALS:
            value = f"w.special[{name!r}]"
        elif name in CTA_SPECIALS_32 or name in CTA_SPECIALS_64:
            value = f"read_special(w, {name!r})"
        else:
            raise Unsupported(f"special register %{name}")
        wide = name in CTA_SPECIALS_64
        dtype = KINDS[kind][2]
        if dtype.itemsize != (8 if wide else 4):
            return f"{value}.astype({self.constants.thing(dtype)})"
        return value if dtype.kind == "u" else f"{value}.view({self.constants.thing(dtype)})"

    def address(self, symbol: Symbol, bits: int) -> str:
        """Return the address of a parameter (its offset) or shared variable (with the CTA's rank)."""
        dtype = np.dtype(f"u{bits // 8}")
        if symbol.name in self.layout.params:
            return self.constants.array(dtype, self.layout.params[symbol.name] + symbol.offset)
        offset = self.layout.shared[symbol.name] + symbol.offset
        return f"w.cta.shared_address({self.constants.number(offset)}, {self.constants.thing(dtype)})"

    def dst(self, operand: Operand | None, kind: str) -> str:
        """Return the row that a result is written to (a scratch row for "_"); forget the register's known constant."""
        if operand is None:
            return f"empty(w.n, {self.constants.thing(KINDS[kind][2])})"
        if not isinstance(operand, Reg):
            raise Unsupported(f"destination {operand}")
        self.known.pop(operand.name, None)
        if operand.name in self.redirect:
            dtype = KINDS[kind][2]
            temp = self.redirect[operand.name]
            return f"{temp}.view({self.constants.thing(dtype)})"
        return self.row(operand, kind)

    def write(self, operand: Operand | None, kind: str, expression: str) -> None:
        """Store an expression of the given kind into a destination, widening where the register is wider."""
        if operand is None:
            return
        if isinstance(operand, Reg) and WIDTHS[operand.bank] > KINDS[kind][2].itemsize * 8 and kind != "pred":
            signed = kind.startswith("s")
            wide = {"h": "16", "r": "32", "d": "64"}[operand.bank]
            self.line(f"{self.dst(operand, ('s' if signed else 'u') + wide)}[...] = {expression}")
            return
        self.line(f"{self.dst(operand, kind)}[...] = {expression}")

    # ------------------------------------------------------------ memory

    def memory_address(self, mem: Operand | None, bits: int) -> str:
        """Return the expression of the addresses [base + offset], unsigned integers of 32 or 64 bits."""
        if not isinstance(mem, Mem):
            raise Unsupported(f"address {mem}")
        dtype = np.dtype(f"u{bits // 8}")
        base = mem.base
        if isinstance(base, Symbol):
            return self.address(Symbol(base.name, base.offset + mem.offset), bits)
        if isinstance(base, Imm):
            return self.constants.array(dtype, int(base.value) + mem.offset)
        if isinstance(base, Reg) and WIDTHS[base.bank] < bits:
            text = f"{self.src(base, UNSIGNED[base.bank])}.astype({self.constants.thing(dtype)})"
        else:
            text = self.src(base, f"u{bits}")
        return f"({text} + {self.constants.array(dtype, mem.offset)})" if mem.offset else text

    # ------------------------------------------------------------ poison

    def taint(self, operand: Operand | None) -> str | None:
        """Return the poison row of a register operand, None for anything that cannot be poisoned."""
        if isinstance(operand, Negated):
            operand = operand.reg
        if isinstance(operand, Reg):
            return self._bind(f"T{operand.bank}", self.layout.row(operand))
        return None

    def taint_of(self, registers: tuple[Reg, ...] | list[Reg]) -> str | None:
        """Return the expression for "any of these is poisoned", None for no registers."""
        names = list(dict.fromkeys(name for register in registers if (name := self.taint(register)) is not None))
        if not names:
            return None
        expression = names[0]
        for name in names[1:]:
            expression = f"logical_or({expression}, {name})"
        return expression

    def half_taints(self, register: Reg) -> tuple[str, str]:
        """Return the poison of the lower and of the upper half of a register of 64 bits."""
        mark = str(self.taint(register))
        if register.name not in self.halved:
            return mark, mark
        low, high = (f"logical_and({mark}, logical_not({row}))" for row in self._half_rows(register))
        return low, high

    def taint_halves(self, register: Reg, low: str, high: str) -> None:
        """Emit the poison of the lower and of the upper half of a register of 64 bits."""
        names = self.temp(), self.temp()
        for name, value in zip(names, (low, high), strict=True):
            self.line(f"{name} = array({value})")
        self.line(f"{self.taint(register)}[...] = logical_or({names[0]}, {names[1]})")
        if register.name in self.halved:
            for name, row in zip(names, self._half_rows(register), strict=True):
                self.line(f"{row}[...] = logical_not({name})")

    def join_halves(self, registers: tuple[Reg, ...]) -> None:
        """Emit, in the tainted version, that registers are poisoned as a whole, where they are."""
        for register in registers:
            if self.tainted and register.name in self.halved:
                for row in self._half_rows(register):
                    self.line(f"{row}.fill(False)")

    def _half_rows(self, register: Reg) -> tuple[str, str]:
        slot = self.layout.row(register)
        return self._bind("Tlow", slot), self._bind("Thigh", slot)

    def check_taint(self, registers: tuple[Reg, ...] | list[Reg], what: str) -> None:
        """Emit, in the tainted version, a report when any of these registers is poisoned in any lane."""
        if self.tainted and registers:
            names = ", ".join(str(self.taint(register)) for register in registers)
            self.line(f"check_poison(w, {what!r}, {names})")

    def taint_from(self, writes: tuple[Reg, ...] | list[Reg], reads: tuple[Reg, ...] | list[Reg]) -> None:
        """Emit, in the tainted version, the poison of each destination where any source is poisoned."""
        if not self.tainted or not writes:
            return
        expression = self.taint_of(reads)
        for register in writes:
            row = self.taint(register)
            self.line(f"{row}.fill(False)" if expression is None else f"{row}[...] = {expression}")


def statement(template: str, result: str, *kinds: str) -> Callable[[Emitter, Instruction, re.Match[str]], None]:
    """Return an emitter of one line.

    template: the line, with {out} for the destination and {a}, {b}, {c} for the sources. result, kinds: their types. All of them may name
    groups of the opcode's pattern.
    """

    def emit(e: Emitter, ins: Instruction, m: re.Match[str]) -> None:
        groups = m.groupdict()
        destination, *operands = ins.operands
        if len(operands) != len(kinds):
            raise Unsupported(f"{len(kinds)} sources expected")
        sources = {name: e.src(operand, kind.format(**groups)) for name, operand, kind in zip("abc", operands, kinds, strict=False)}
        e.line(template.format(out=e.dst(destination, result.format(**groups)), **sources, **groups))

    return emit


def pair_items(operand: Operand | None) -> tuple[Reg | None, Reg | None]:
    """Return the two destinations of a|b, or (a, None)."""
    if isinstance(operand, Pair):
        return operand.first, operand.second
    if operand is None or isinstance(operand, Reg):
        return operand, None
    raise Unsupported(f"destination {operand}")


def immediate_bits(operand: Imm, kind: str) -> int:
    """Return the bit pattern of a literal as an operand of the given kind."""
    dtype = KINDS[kind][2]
    if kind == "pred":
        return int(bool(operand.value))
    if operand.float_bits == 64 and dtype.itemsize == 4:  # a decimal or 0d literal used as f32
        value = struct.unpack("<d", struct.pack("<Q", int(operand.value)))[0]
        return int(struct.unpack("<I", struct.pack("<f", value))[0])
    if operand.float_bits == 32 and dtype.itemsize == 8 and kind == "f64":
        value = struct.unpack("<f", struct.pack("<I", int(operand.value)))[0]
        return int(struct.unpack("<Q", struct.pack("<d", value))[0])
    return int(operand.value) & ((1 << (dtype.itemsize * 8)) - 1)
