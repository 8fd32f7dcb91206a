"""Parser of PTX text: instructions with typed operands, labels, registers, parameters and shared variables.

The parser knows the grammar, not the instructions. Registers and labels of nested scopes get unique names.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

from ..findings import PtxError

# ---------------------------------------------------------------- operands


@dataclass(frozen=True)
class Reg:
    """A register. bank: "p" (predicate), "h" (16 bit), "r" (32 bit) or "d" (64 bit)."""

    name: str
    bank: str


@dataclass(frozen=True)
class Imm:
    """A literal: an int (integers, and floats given as bits 0f.. / 0d..) or a float."""

    value: int | float
    float_bits: int = 0  # 32 or 64 when the literal is the bit pattern of a float


@dataclass(frozen=True)
class Special:
    """A read-only special register such as %tid.x."""

    name: str


@dataclass(frozen=True)
class Symbol:
    """The address of a parameter or shared variable, plus an offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Vec:
    """Vector operand {a, b, ...}; an element may be None for "_"."""

    items: tuple[Operand | None, ...]


@dataclass(frozen=True)
class Mem:
    """Memory operand [base + offset] or, for tensor copies, [base, {coordinates}]."""

    base: Operand
    offset: int = 0
    coords: Vec | None = None
    extra: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Pair:
    """Pair of destinations a|b; either may be None for "_"."""

    first: Reg | None
    second: Reg | None


@dataclass(frozen=True)
class Negated:
    """Negated predicate !p."""

    reg: Reg


@dataclass(frozen=True)
class LabelRef:
    """A branch target."""

    name: str


Operand = Reg | Imm | Special | Symbol | Vec | Mem | Pair | Negated | LabelRef

# ---------------------------------------------------------------- statements


@dataclass
class Instruction:
    """One instruction. guard: (predicate register, negated). line: 1-based PTX line, 0 for machine code.

    source: "file:line", the address and text of a machine instruction, or None.
    """

    opcode: str
    operands: list[Operand | None]
    guard: tuple[Reg, bool] | None
    line: int
    source: str | None = None


@dataclass(frozen=True)
class ParamDecl:
    """One kernel parameter: name, bytes and alignment."""

    name: str
    size: int
    align: int


@dataclass(frozen=True)
class SharedVar:
    """A shared variable. size 0: the dynamic shared memory array."""

    name: str
    size: int
    align: int


@dataclass
class EntryText:
    """The parsed body of one .entry. labels: name -> index of the instruction that follows it."""

    name: str
    params: tuple[ParamDecl, ...]
    reqntid: tuple[int, int, int] | None = None
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, Reg] = field(default_factory=dict)
    shared: list[SharedVar] = field(default_factory=list)


_BANKS = {
    "pred": "p", "b16": "h", "u16": "h", "s16": "h", "f16": "h", "bf16": "h",
    "b32": "r", "u32": "r", "s32": "r", "f32": "r", "f16x2": "r", "bf16x2": "r",
    "b64": "d", "u64": "d", "s64": "d", "f64": "d",
}  # fmt: skip
_PAIRED = "b128"  # a register of this type is a pair of 64-bit ones, lower half first
_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
_SPACE = re.compile(r"[\s;]+")
_LABEL = re.compile(r"([$%A-Za-z_][\w$]*)\s*:(?!:)")
_NEWLINE_DIRECTIVES = (".version", ".target", ".address_size", ".file", ".loc")
_PARAM = re.compile(r"\.param\s+(?P<attrs>[^,()]*?)(?P<name>[\w$]+)\s*(?:\[(?P<count>\d+)\])?\s*$")
_SHARED = re.compile(r"(?:\.extern\s+)?\.shared\s+(?:\.align\s+(\d+)\s+)?\.[bsuf](\d+)\s+([\w$]+)\s*(?:\[(\d*)\])?")
_INSTRUCTION = re.compile(r"(?:@(!?)([%\w$]+)\s+)?([a-z_][\w.:]*)\s*([^;]*);")
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_FILE = re.compile(r"\.file\s+(\d+)\s+\"([^\"]*)\"")
_INT = re.compile(r"-?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_PUNCTUATION = re.compile(r"[][{}(),]")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


class _Scope:
    """Names declared between one pair of braces."""

    def __init__(self, serial: int) -> None:
        self.serial = serial
        self.registers: dict[str, Reg] = {}
        self.families: dict[str, tuple[str, int]] = {}  # prefix -> (bank, count) of .reg .b32 %r<100>; bank "q": pairs
        self.pairs: dict[str, Vec] = {}
        self.labels: dict[str, str] = {}
        self.pending: list[tuple[Instruction, int]] = []  # (instruction, operand index) of label references
        self.operands: dict[str, Operand | None] = {}  # parsed texts; a declaration may change what they mean


def parse_integer(text: str) -> int:
    """Return the value of a PTX integer literal."""
    text = text.rstrip("U")
    return int(text, 0) if not re.fullmatch(r"-?0\d+", text) else int(text, 8)


class Parser:
    """One pass over a PTX module."""

    def __init__(self, text: str) -> None:
        self.text = _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)
        self.position = 0
        self.line = 1
        self.counted = 0
        self.files = dict(_FILE.findall(text))
        self.entries: dict[str, EntryText] = {}
        self.module_shared: list[SharedVar] = []
        self.serial = 0

    def fail(self, message: str) -> PtxError:
        """Return the error for a problem at the current line."""
        return PtxError(f"PTX line {self.current_line()}: {message}")

    def current_line(self) -> int:
        """Return the 1-based line of the current position."""
        self.line += self.text.count("\n", self.counted, self.position)
        self.counted = self.position
        return self.line

    def parse(self) -> dict[str, EntryText]:
        """Return all entries of the module by name. Raises PtxError."""
        while self.skip_space():
            if self.text.startswith((".visible .entry", ".entry", ".weak .entry"), self.position):
                self.parse_entry()
            elif self.text.startswith(_NEWLINE_DIRECTIVES, self.position):
                self.take_until("\n")
            elif self.text.startswith((".extern .shared", ".shared"), self.position):
                self.module_shared.append(self.shared_variable(self.take_until(";")))
            elif self.text.startswith(".section", self.position):
                self.skip_braces()
            else:
                raise self.fail(f"unsupported module-level statement {self.text[self.position : self.position + 60]!r}")
        for entry in self.entries.values():
            entry.shared[:0] = self.module_shared
        return self.entries

    def skip_space(self) -> bool:
        """Go to the next statement; False at the end."""
        match = _SPACE.match(self.text, self.position)
        if match:
            self.position = match.end()
        return self.position < len(self.text)

    def take_until(self, stop: str) -> str:
        """Consume the text up to a stop character, and that; return the text."""
        end = self.text.find(stop, self.position)
        if end < 0:
            end = len(self.text)
        taken = self.text[self.position : end]
        self.position = end + 1
        return taken

    def skip_braces(self) -> None:
        """Skip a directive with a braced body."""
        self.position = self.text.index("{", self.position) + 1
        depth = 1
        while depth:
            match = re.compile(r"[{}]").search(self.text, self.position)
            if match is None:
                raise self.fail("unbalanced braces")
            depth += 1 if match.group() == "{" else -1
            self.position = match.end()

    def shared_variable(self, text: str) -> SharedVar:
        """Parse a .shared declaration."""
        match = _SHARED.match(text)
        if match is None:
            raise self.fail(f"cannot read shared variable {text!r}")
        align, bits, name, count = match.groups()
        size = int(bits) // 8
        total = 0 if count == "" else size * int(count or 1)
        return SharedVar(name, total, int(align or size))

    def parse_entry(self) -> None:
        """Parse one .entry with its body."""
        header = self.take_until("(")
        name = header.split()[-1]
        params = tuple(self.parameter(part) for part in self.take_until(")").split(",") if part.strip())
        entry = EntryText(name, params)
        directives = self.take_until("{")
        self.read_directives(entry, directives)
        _Body(self, entry).parse()
        self.entries[name] = entry

    def parameter(self, text: str) -> ParamDecl:
        """Parse one .param declaration."""
        match = _PARAM.search(text.strip())
        if match is None:
            raise self.fail(f"cannot read parameter {text.strip()!r}")
        kind = re.search(r"\.[busf](8|16|32|64)\b", match["attrs"])
        if kind is None:
            raise self.fail(f"unsupported parameter type {text.strip()!r}")
        size = _SIZES[kind.group(1)]
        align = re.search(r"\.align\s+(\d+)", match["attrs"]) if match["count"] else None
        return ParamDecl(match["name"], size * int(match["count"] or 1), int(align.group(1)) if align else size)

    def read_directives(self, entry: EntryText, text: str) -> None:
        """Parse the performance directives between parameters and body."""
        for name, values in re.findall(r"\.(\w+)([^.]*)", text):
            if name == "reqntid":
                dims = [int(part) for part in values.split(",")]
                x, y, z = [*dims, 1, 1][:3]
                entry.reqntid = (x, y, z)
            elif name not in ("maxntid", "minnctapersm", "maxnreg", "reqnctapercluster", "explicitcluster", "maxclusterrank",
                              "blocksareclusters"):  # fmt: skip
                raise self.fail(f"unsupported entry directive .{name}")


class _Body:
    """The statements of one entry."""

    def __init__(self, parser: Parser, entry: EntryText) -> None:
        self.parser = parser
        self.entry = entry
        self.scopes: list[_Scope] = [_Scope(0)]
        self.source: str | None = None
        self.param_names = {param.name for param in entry.params}

    def parse(self) -> None:
        """Read up to the entry's closing brace."""
        parser = self.parser
        while True:
            if not parser.skip_space():
                raise parser.fail("entry is not closed")
            character = parser.text[parser.position]
            if character == "{":
                parser.position += 1
                parser.serial += 1
                self.scopes.append(_Scope(parser.serial))
            elif character == "}":
                parser.position += 1
                self.close_scope()
                if not self.scopes:
                    return
            elif character == ".":
                self.directive()
            else:
                self.label_or_instruction()

    def close_scope(self) -> None:
        """Resolve the label references of a finished scope, or hand them to the enclosing one."""
        scope = self.scopes.pop()
        for instruction, index in scope.pending:
            reference = instruction.operands[index]
            assert isinstance(reference, LabelRef)
            if reference.name in scope.labels:
                instruction.operands[index] = LabelRef(scope.labels[reference.name])
            elif self.scopes:
                self.scopes[-1].pending.append((instruction, index))
            else:
                raise PtxError(f"PTX line {instruction.line}: unknown label {reference.name}")

    def directive(self) -> None:
        """Parse a directive inside a body."""
        parser = self.parser
        if parser.text.startswith(".loc", parser.position):
            match = _LOC.match(parser.take_until("\n"))
            if match:
                self.source = f"{parser.files.get(match.group(1), '?')}:{match.group(2)}"
        elif parser.text.startswith(".reg", parser.position):
            self.declare(parser.take_until(";"))
        elif parser.text.startswith(".shared", parser.position):
            self.entry.shared.append(parser.shared_variable(parser.take_until(";")))
        elif parser.text.startswith(".pragma", parser.position):
            parser.take_until(";")
        else:
            raise parser.fail(f"unsupported directive {parser.take_until(chr(10))!r}")

    def declare(self, text: str) -> None:
        """Parse a declaration such as `.reg .b32 %r<100>, x;`."""
        match = re.match(r"\.reg\s+\.(\w+)\s+(.*)", text, re.DOTALL)
        bank = {**_BANKS, _PAIRED: "q"}.get(match.group(1)) if match else None
        if match is None or bank is None:
            raise self.parser.fail(f"unsupported register declaration {text.strip()!r}")
        scope = self.scopes[-1]
        scope.operands.clear()
        for part in match.group(2).split(","):
            ranged = re.fullmatch(r"\s*([%\w$]+)<(\d+)>\s*", part)
            if ranged:
                scope.families[ranged.group(1)] = (bank, int(ranged.group(2)))
            elif bank == "q":
                self.new_pair(scope, part.strip())
            else:
                self.new_register(scope, part.strip(), bank)

    def new_pair(self, scope: _Scope, name: str) -> Vec:
        """Declare a 128-bit register: two of 64 bits."""
        halves = tuple(self.new_register(scope, f"{name}$half{half}", "d") for half in (0, 1))
        scope.pairs[name] = Vec(halves)
        return scope.pairs[name]

    def find_pair(self, name: str) -> Vec | None:
        """Return the halves of a 128-bit register, or None when the name is not one."""
        for scope in reversed(self.scopes):
            if name in scope.pairs:
                return scope.pairs[name]
            if name in scope.registers:
                return None
            family = scope.families.get(name.rstrip("0123456789"))
            if family and family[0] == "q" and name[-1].isdigit() and int(re.findall(r"\d+$", name)[0]) < family[1]:
                return self.new_pair(scope, name)
        return None

    def new_register(self, scope: _Scope, name: str, bank: str) -> Reg:
        """Declare one register in a scope under a unique name."""
        register = Reg(name if scope.serial == 0 else f"{name}.{scope.serial}", bank)
        scope.registers[name] = register
        self.entry.registers[register.name] = register
        return register

    def find_register(self, name: str) -> Reg | None:
        """Return the register that a name means in the current scope, None for none."""
        for scope in reversed(self.scopes):
            if name in scope.registers:
                return scope.registers[name]
            prefix = name.rstrip("0123456789")
            family = scope.families.get(prefix)
            if family and family[0] != "q" and len(prefix) < len(name) and int(name[len(prefix) :]) < family[1]:
                return self.new_register(scope, name, family[0])
        return None

    def label_or_instruction(self) -> None:
        """Parse a label, or an instruction up to its semicolon."""
        parser = self.parser
        match = _LABEL.match(parser.text, parser.position)
        if match:
            scope = self.scopes[-1]
            name = match.group(1)
            unique = name if scope.serial == 0 else f"{name}.{scope.serial}"
            scope.labels[name] = unique
            self.entry.labels[unique] = len(self.entry.instructions)
            parser.position = match.end()
            return
        line = parser.current_line()
        match = _INSTRUCTION.match(parser.text, parser.position)
        if match is None:
            raise parser.fail(f"cannot read statement {parser.take_until(';').strip()!r}")
        parser.position = match.end()
        negated, guard_name, opcode, rest = match.groups()
        guard = None
        if guard_name:
            register = self.find_register(guard_name)
            if register is None:
                raise parser.fail(f"unknown predicate {guard_name}")
            guard = (register, negated == "!")
        instruction = Instruction(opcode, [], guard, line, self.source)
        if opcode.startswith("bra"):
            instruction.operands = [LabelRef(rest.strip())]
            self.scopes[-1].pending.append((instruction, 0))
        else:
            known = self.scopes[-1].operands
            instruction.operands = [known[part] if part in known else self.operand(part) for part in split_top(rest)]
        self.entry.instructions.append(instruction)

    def operand(self, text: str) -> Operand | None:
        """Return one operand, the same object for the same text in a scope."""
        known = self.scopes[-1].operands
        if text not in known:
            known[text] = self.parse_operand(text.strip())
        return known[text]

    def parse_operand(self, text: str) -> Operand | None:
        """Parse one operand."""
        if text == "_":
            return None
        head = text[0]
        if head == "{":
            return Vec(tuple(self.operand(part) for part in split_top(text[1:-1])))
        if head == "[":
            return self.memory(text[1:-1])
        if "|" in text:
            first, second = (self.operand(part) for part in text.split("|"))
            return Pair(first, second)  # type: ignore[arg-type]
        if head == "!":
            register = self.find_register(text[1:].strip())
            if register is None:
                raise self.parser.fail(f"unknown register {text!r}")
            return Negated(register)
        return self.simple(text)

    def simple(self, text: str) -> Operand:
        """Parse a register, literal, special register, or symbol with offset."""
        register = self.find_register(text)
        if register is not None:
            return register
        pair = self.find_pair(text)
        if pair is not None:
            return pair
        if _INT.match(text):
            return Imm(parse_integer(text))
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
            return Imm(int(text[2:], 16), 32)
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
            return Imm(int(text[2:], 16), 64)
        if re.fullmatch(r"-?\d+\.\d*(?:[eE][-+]?\d+)?", text):
            return Imm(struct.unpack("<Q", struct.pack("<d", float(text)))[0], 64)
        if text == "WARP_SZ":
            return Imm(32)
        if text.startswith("%"):
            return Special(text[1:])
        symbol = re.fullmatch(r"([\w$]+)\s*(?:\+\s*(-?\w+))?", text)
        if symbol and (symbol.group(1) in self.param_names or self.is_shared(symbol.group(1))):
            return Symbol(symbol.group(1), parse_integer(symbol.group(2)) if symbol.group(2) else 0)
        raise self.parser.fail(f"unknown operand {text!r}")

    def is_shared(self, name: str) -> bool:
        """Return True for a declared shared variable."""
        return any(variable.name == name for variable in (*self.parser.module_shared, *self.entry.shared))

    def memory(self, text: str) -> Mem:
        """Parse the inside of [...]."""
        parts = split_top(text)
        match = re.fullmatch(r"\s*([%$\w.]+?)\s*(?:([+-])\s*(-?\w+)\s*)?", parts[0])
        if match is None:
            raise self.parser.fail(f"cannot read address [{text}]")
        offset = parse_integer(match.group(3)) if match.group(3) else 0
        if match.group(2) == "-":
            offset = -offset
        coords = self.operand(parts[1]) if len(parts) > 1 else None
        if coords is not None and not isinstance(coords, Vec):
            coords = Vec((coords,))
        extra = tuple(self.operand(part) for part in parts[2:])
        return Mem(self.simple(match.group(1)), offset, coords, extra)  # type: ignore[arg-type]


def split_top(text: str) -> list[str]:
    """Split at commas that are not inside brackets; empty text gives no parts."""
    if not text.strip():
        return []
    if "{" not in text and "[" not in text:
        return text.split(",")
    parts, depth, start = [], 0, 0
    for match in _PUNCTUATION.finditer(text):
        character = match.group()
        if character in "{[(":
            depth += 1
        elif character in "}])":
            depth -= 1
        elif depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    parts.append(text[start:])
    return parts


def parse_ptx(text: str) -> dict[str, EntryText]:
    """Return all entries of a PTX module. Raises PtxError with the line of what it cannot read."""
    parser = Parser(text)
    try:
        return parser.parse()
    except (AssertionError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:  # of text that is no PTX
        raise parser.fail(f"cannot be read: {type(error).__name__} {error}") from error
