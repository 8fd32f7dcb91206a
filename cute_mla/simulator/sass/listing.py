"""Reader of machine code as `nvdisasm -c -hex` prints it: instructions with typed operands and control codes.

The text gives opcodes and operands; the encoding beside it gives control codes and immediates. Anything that the grammar does not
cover raises SassError.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache

from ..findings import SassError
from ..frontend.ptx import Reg

INSTRUCTION_BYTES = 16
NO_BOARD = 7  # in a field for a scoreboard
BOARDS = 6


@dataclass(frozen=True)
class Control:
    """Control code of an instruction, bits 105 to 125 of its encoding.

    stall: cycles until the warp may issue again. yields: the scheduler may switch to another warp. write_board, read_board: scoreboards
    (0 to 5, 7 for none) that hold until results are written and until operands are read. waits: mask of scoreboards to wait for.
    """

    stall: int
    yields: bool
    write_board: int
    read_board: int
    waits: int

    @classmethod
    def of(cls, high: int) -> Control:
        """Decode the upper 64 bits of an encoding."""
        code = high >> 41
        return cls(code & 15, not code >> 4 & 1, code >> 5 & 7, code >> 8 & 7, code >> 11 & 63)


@dataclass(frozen=True)
class Register:
    """A register operand. reg: None for RZ, URZ, PT and UPT. kind: R, UR, P, UP, B or SB.

    negative: -x, or !p of a predicate. inverted: ~x. absolute: |x|. suffixes: such as H0_H0, B1, 64, F32x2.HI_LO; reuse is left out.
    """

    kind: str
    number: int | None
    negative: bool = False
    inverted: bool = False
    absolute: bool = False
    suffixes: tuple[str, ...] = ()

    @property
    def is_predicate(self) -> bool:
        """Return True for P and UP registers."""
        return self.kind in ("P", "UP")

    def registers(self, width: int = 1) -> tuple[Reg, ...]:
        """Return the registers of a run of this width; none for RZ, URZ, PT and UPT."""
        if self.number is None:
            return ()
        return _run(self.kind, self.number, width)


@dataclass(frozen=True)
class Immediate:
    """A literal. bits: its 32-bit pattern. suffixes: such as H0."""

    bits: int
    suffixes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Constant:
    """A word of a constant bank, c[bank][offset], or c[bank][index + offset] with a register of bytes."""

    bank: int
    offset: int
    index: Register | None = None


@dataclass(frozen=True)
class Address:
    """An operand in brackets: [..], desc[UR][..], gdesc[UR], idesc[UR] or tmem[UR].

    space: "" for memory, else gdesc, idesc, tmem or desc (a cache policy).
    base, uniform: the vector and the uniform register that are added; None for none.
    wide: base is a pair (.64). offset: in bytes. descriptor: the uniform pair of desc[..]. suffixes: such as tnspB.
    """

    space: str
    base: Register | None
    uniform: Register | None
    wide: bool
    offset: int
    descriptor: Register | None = None
    suffixes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """A place in the code, by its label."""

    label: str


@dataclass(frozen=True)
class SystemRegister:
    """A special register such as SR_TID.X, PR (all predicates) or gsb0."""

    name: str


Operand = Register | Immediate | Constant | Address | Target | SystemRegister


@dataclass(frozen=True)
class SassInstruction:
    """One instruction. guard: the predicate that decides whether it executes, None for always. low, high: the encoding."""

    address: int
    opcode: str
    operands: tuple[Operand, ...]
    guard: Register | None
    control: Control
    low: int
    high: int
    text: str

    @property
    def place(self) -> str:
        """Return address and text, as findings name the instruction."""
        return f"{self.address:#x} {self.text}"

    @property
    def base(self) -> str:
        """Return the opcode without its modifiers."""
        return self.opcode.partition(".")[0]

    @property
    def modifiers(self) -> tuple[str, ...]:
        """Return the modifiers of the opcode."""
        return tuple(self.opcode.split(".")[1:])


@dataclass(frozen=True)
class Listing:
    """The code of one kernel. labels: name -> address; an address may be the end of the code. name: the kernel's entry."""

    name: str
    instructions: tuple[SassInstruction, ...]
    labels: dict[str, int]

    def index(self, label: str) -> int:
        """Return the index of the instruction at a label. SassError for a place that is no instruction."""
        index, rest = divmod(self.labels.get(label, -1), INSTRUCTION_BYTES)
        if rest or not 0 <= index < len(self.instructions):
            raise SassError(f"{self.name}: no instruction at label {label}")
        return index


_REGISTERS: dict[tuple[str, int], Reg] = {}


def register(kind: str, number: int) -> Reg:
    """Return a register by kind (R, UR, P, UP, B, SB) and number; the same object each time."""
    found = _REGISTERS.get((kind, number))
    if found is None:
        found = _REGISTERS[kind, number] = Reg(f"{kind}{number}", "p" if kind in ("P", "UP") else "r")
    return found


@cache
def _run(kind: str, number: int, width: int) -> tuple[Reg, ...]:
    return tuple(register(kind, number + index) for index in range(width))


_LINE = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*/\* 0x([0-9a-f]{16}) \*/")
_HIGH = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/")
_LABEL = re.compile(r"([.$\w]+):\s*$")
_GUARD = re.compile(r"@(!?)(U?P)(T|\d)\s+")
_REGISTER = re.compile(r"([-~!]*)(\|?)(UR|UP|R|P|B|SB)(Z|T|\d+)((?:\.\w+)*)(\|?)((?:\.\w+)*)")
_CONSTANT = re.compile(r"c\[0x([0-9a-f]+)\]\[(?:(U?R\d+)\+?)?(?:0x([0-9a-f]+))?\]")
_NOTE = re.compile(r"\s*\(\*\"(?:BRANCH_TARGETS (?P<targets>[^\"]*)|[^\"]*)\"\*\)")
_SUM = re.compile(r"(U?R\d+) (-?0x[0-9a-f]+)")
_ADDRESS = re.compile(r"(?:(gdesc|idesc|tmem|desc)(?=\[))?(?:\[(UR\d+|URZ)\](?=\[))?\[([^\]]*)\]((?:\.\w+)*)")
_TARGET = re.compile(r"`\(([^)]+)\)")
_NUMBER = re.compile(r"-?0x[0-9a-f]+|-?\d+|[-+]?(?:\d+(?:\.\d+)?(?:e[-+]?\d+)?|INF|QNAN)\s*")
_PLACE_REGISTERS = {"Rpc.LO": 256, "Rpc.HI": 257}  # of indirect control flow, which ptxas also keeps values in
_GENERIC = re.compile(r"(LD|ST)\.E\b")
_SYSTEM = ("PR", "UPR", "SRZ", "gsb0")


class UnreadableError(SassError):
    """Text with operands outside the grammar. listing: what was read, without the operands of these instructions."""

    def __init__(self, message: str, listing: Listing) -> None:
        super().__init__(message)
        self.listing = listing


def section_of(text: str, kernel: str) -> str:
    """Return the code of a kernel in the output of nvdisasm for a cubin of several; all of the text where it has no such section."""
    parts = re.split(r"^//-+ \.text\.(\S+) +-+$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True)).get(kernel, text)


def read_listing(text: str) -> Listing:
    """Read the output of `nvdisasm -c -hex` for a cubin with one code section. SassError for text that cannot be read, with all of it."""
    instructions: list[SassInstruction] = []
    unreadable: list[str] = []
    labels: dict[str, int] = {}
    pending: tuple[int, str, int] | None = None
    name = ""
    for line in text.splitlines():
        first = _LINE.match(line)
        if first is not None:
            pending = int(first[1], 16), first[2], int(first[3], 16)
            continue
        second = _HIGH.match(line) if pending is not None else None
        if second is not None and pending is not None:
            address, code, low = pending
            if address != len(instructions) * INSTRUCTION_BYTES:
                raise SassError(
                    f"{name}: instruction at {address:#x}, expected {len(instructions) * INSTRUCTION_BYTES:#x}: several sections?"
                )
            try:
                instructions.append(read_instruction(address, code, low, int(second[1], 16)))
            except SassError as error:
                unreadable.append(str(error))
                opcode = code[found.end() :] if (found := _GUARD.match(code)) is not None else code
                instructions.append(SassInstruction(address, opcode.split()[0], (), None, Control.of(int(second[1], 16)), low, 0, code))
            pending = None
            continue
        label = _LABEL.match(line)
        if label is not None and not label[1].startswith(".text."):
            name = name or label[1]
            labels[label[1]] = len(instructions) * INSTRUCTION_BYTES
    if not instructions or pending is not None:
        raise SassError("no machine code with encodings: the output of `nvdisasm -c -hex` is needed")
    if unreadable:
        raise UnreadableError("\n".join(unreadable), Listing(name, tuple(instructions), labels))
    return Listing(name, tuple(instructions), labels)


def read_instruction(address: int, code: str, low: int, high: int) -> SassInstruction:
    """Read one instruction from its text and its encoding. SassError for operands outside the grammar."""
    note = _NOTE.search(code)
    targets: tuple[Operand, ...] = ()
    if note is not None:
        code = code[: note.start()] + code[note.end() :]
        targets = tuple(Target(label) for label in (note["targets"] or "").split(",") if label)
    found = _GUARD.match(code)
    guard = None
    body = code
    if found is not None:
        guard = Register(found[2], None if found[3] == "T" else int(found[3]), negative=bool(found[1]))
        body = code[found.end() :]
    opcode, _, rest = body.partition(" ")
    try:
        operands = (*(operand for part in split(rest) for operand in read_operand(part, low)), *targets)
    except ValueError as error:
        raise SassError(f"{address:#x}: cannot read {error} of {code!r}") from error
    if _GENERIC.match(opcode) is not None:
        operands = tuple(_as_pair(operand) for operand in operands)
    return SassInstruction(address, opcode, operands, guard, Control.of(high), low, high, code)


def _as_pair(operand: Operand) -> Operand:
    """Return an operand; a generic address in a pair of registers, though the text does not say so where there is no descriptor."""
    return replace(operand, wide=True) if isinstance(operand, Address) and operand.base is not None else operand


def split(rest: str) -> list[str]:
    """Split operands at commas; a return address and its label count as two, as do the terms of an indirect branch."""
    if (terms := _SUM.fullmatch(rest.strip())) is not None:
        return list(terms.groups())
    parts = [part.strip() for part in rest.split(",")] if rest.strip() else []
    return [piece for part in parts for piece in (part.split(" `") if " `" in part else [part])]


def read_operand(part: str, low: int) -> tuple[Operand, ...]:
    """Read one operand. ValueError for text outside the grammar."""
    if part.startswith(("(", "`(")):
        found = _TARGET.fullmatch(part if part.startswith("`") else f"`{part}")
        if found is not None:
            return (Target(found[1]),)
    if part in _PLACE_REGISTERS:
        return (Register("R", _PLACE_REGISTERS[part]),)
    if part in _SYSTEM or part.startswith("SR_"):
        return (SystemRegister(part),)
    if "[" in part:
        constant = _CONSTANT.fullmatch(part)
        return (read_constant(constant) if constant is not None else read_address(part),)
    found = _REGISTER.fullmatch(part)
    if found is not None:
        return (read_register(found),)
    literal, *suffixes = part.split(".H") if part.endswith((".H0", ".H1")) else [part]
    if _NUMBER.fullmatch(literal) is None:
        raise ValueError(f"operand {part!r}")
    return (Immediate(bits_of(literal.strip(), low), tuple(f"H{suffix}" for suffix in suffixes)),)


def read_constant(found: re.Match[str]) -> Constant:
    """Return the word of a constant bank of a match."""
    index = _REGISTER.fullmatch(found[2]) if found[2] else None
    return Constant(int(found[1], 16), int(found[3] or "0", 16), None if index is None else read_register(index))


def bits_of(literal: str, low: int) -> int:
    """Return the 32-bit pattern of a literal, 64-bit of a longer one: of a float from the encoding, whose text rounds."""
    if "0x" in literal:
        value = int(literal, 16)
        return value if value >> 32 > 0 else value & 0xFFFFFFFF
    return low >> 32


def read_register(found: re.Match[str]) -> Register:
    """Return the register of a match, with its signs."""
    signs, bar, kind, number = found[1], found[2], found[3], found[4]
    suffixes = tuple(word for group in (found[5], found[7]) for word in group.split(".") if word and word != "reuse")
    if bool(bar) != bool(found[6]) or (number == "T") != (kind in ("P", "UP") and not number.isdigit()):
        raise ValueError(f"register {found[0]!r}")
    return Register(
        kind, int(number) if number.isdigit() else None, "-" in signs or "!" in signs, "~" in signs, bool(bar), suffixes
    )  # fmt: skip


def read_address(part: str) -> Address:
    """Return an operand in brackets. ValueError for one outside the grammar."""
    found = _ADDRESS.fullmatch(part)
    if found is None:
        raise ValueError(f"address {part!r}")
    prefix, descriptor, inside, suffixes = found[1] or "", found[2], found[3], found[4]
    if prefix == "desc" and descriptor is None and (policy := _REGISTER.fullmatch(inside)) is not None:
        return Address("desc", None, read_register(policy), False, 0)
    if (prefix == "desc") != (descriptor is not None):
        raise ValueError(f"address {part!r}")
    base = uniform = None
    wide, offset = False, 0
    for term in inside.split("+"):
        match = _REGISTER.fullmatch(term)
        if match is None:
            offset += int(term, 16)
            continue
        operand = read_register(match)
        if operand.kind == "UR" and uniform is None:
            uniform = operand
        elif operand.kind == "R" and base is None:
            base, wide = operand, operand.suffixes == ("64",)
        else:
            raise ValueError(f"address {part!r}")
        if operand.suffixes not in ((), ("64",)):
            raise ValueError(f"address {part!r}")
    words = tuple(word for word in suffixes.split(".") if word)
    pair = Register("UR", None if descriptor == "URZ" else int(descriptor[2:])) if descriptor is not None else None
    return Address("" if prefix == "desc" else prefix, base, uniform, wide, offset, pair, words)
