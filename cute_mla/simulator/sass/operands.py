"""Operands of machine instructions as expressions of generated code."""

from __future__ import annotations

import numpy as np

from ..frontend.layout import LOCAL_WINDOW, PARAM_WINDOW
from ..isa.emitter import KINDS, Emitter, Unsupported
from ..isa.table import runtime
from .listing import Address, Constant, Immediate, Operand, Register, SassInstruction

WORD = np.dtype("u4")
WIDE = np.dtype("u8")

# Constant bank 0 below the parameters, by the offset of the parameters, which tells the architecture. Read off programs that ptxas made.
_DIMENSIONS = ("ntid.x", "ntid.y", "ntid.z", "nctaid.x", "nctaid.y", "nctaid.z")
_BANKS: dict[int, dict[int, str]] = {
    0x210: {
        **{4 * index: name for index, name in enumerate(_DIMENSIONS)},
        **{0x144 + 4 * index: f"cluster_nctaid.{axis}" for index, axis in enumerate("xyz")},
        **{0x150 + 4 * index: f"1 / cluster_nctaid.{axis}" for index, axis in enumerate("xyz")},
        **{0x15C + 4 * index: f"nclusterid.{axis}" for index, axis in enumerate("xyz")},
        0x20: "local", 0x24: "local high", 0x28: "stack", 0x140: "is_explicit_cluster", 0x188: "cluster_nctarank",
        0x198: "parameters", 0x19C: "parameters high", 0x208: "memory", 0x20C: "memory",
    },
    0x380: {
        **{0x360 + 4 * index + index // 3 * 4: name for index, name in enumerate(_DIMENSIONS)},
        **{0x2A0 + 4 * index: f"cluster_nctaid.{axis}" for index, axis in enumerate("xyz")},
        **{0x2B0 + 4 * index: f"1 / cluster_nctaid.{axis}" for index, axis in enumerate("xyz")},
        **{0x2C0 + 4 * index: f"nclusterid.{axis}" for index, axis in enumerate("xyz")},
        0x2CC: "cluster_nctarank", 0x37C: "stack", 0x36C: "is_explicit_cluster",
        0x348: "parameters", 0x34C: "parameters high", 0x358: "memory", 0x35C: "memory",
    },
}  # fmt: skip


def constant(e: Emitter, kind: str, bits: int) -> str:
    """Return the expression of a bit pattern as a kind."""
    return e.constants.array(KINDS[kind][2], bits)


def source(e: Emitter, operand: Operand, kind: str) -> str:
    """Return the expression of a 32-bit operand or predicate, with its signs. kind: u32, s32, f32 or pred."""
    if isinstance(operand, Immediate):
        return constant(e, kind, operand.bits)
    if isinstance(operand, Constant):
        return bank_word(e, operand.offset, kind)
    if not isinstance(operand, Register) or operand.is_predicate != (kind == "pred"):
        raise Unsupported(f"operand {operand} read as {kind}")
    if operand.is_predicate:
        if operand.number is None:
            return constant(e, "pred", int(not operand.negative))
        row = e.row(operand.registers()[0], "pred")
        return f"logical_not({row})" if operand.negative else row
    value = constant(e, kind, 0) if operand.number is None else e.row(operand.registers()[0], kind)
    return signed(operand, value, kind)


def signed(operand: Register, value: str, kind: str) -> str:
    """Return a value behind the signs of its operand."""
    if operand.absolute:
        if kind != "f32":
            raise Unsupported(f"|x| of {kind}")
        value = f"absolute({value})"
    if operand.inverted:
        value = f"invert({value})"
    return f"negative({value})" if operand.negative else value


def poison_of(e: Emitter, operand: Operand) -> str:
    """Return the expression of an operand's poison."""
    return (e.taint_of(operand.registers()) if isinstance(operand, Register) else None) or "False"


def is_dropped(operands: tuple[Operand, ...]) -> bool:
    """Return True when all of these predicate results are PT or UPT."""
    return all(isinstance(operand, Register) and operand.number is None for operand in operands)


def plain(e: Emitter, operand: Operand, kind: str) -> str:
    """Return the expression of an operand without its signs, which the caller applies."""
    if isinstance(operand, Register) and not operand.is_predicate:
        return constant(e, kind, 0) if operand.number is None else e.row(operand.registers()[0], kind)
    return source(e, operand, kind)


def pair(e: Emitter, operand: Operand) -> str:
    """Return the expression of a 64-bit operand, unsigned: two registers, or an immediate, of 32 bits with its sign extended."""
    if isinstance(operand, Immediate):
        return e.constants.array(WIDE, operand.bits | (0xFFFFFFFF << 32 if operand.bits >> 31 == 1 else 0))
    if not isinstance(operand, Register) or operand.is_predicate:
        raise Unsupported(f"operand {operand} read as 64 bits")
    if operand.number is None:
        return e.constants.array(WIDE, 0)
    low, high = operand.registers(2)
    return signed(operand, f"join_words({e.row(low, 'u32')}, {e.row(high, 'u32')})", "u64")


def assign(e: Emitter, operand: Operand, kind: str, value: str) -> None:
    """Store a value in a register or predicate; drop it for RZ and PT."""
    if not isinstance(operand, Register):
        raise Unsupported(f"destination {operand}")
    for register in operand.registers():
        e.line(f"{e.dst(register, kind)}[...] = {value}")


def assign_run(e: Emitter, operand: Operand, values: list[str], kind: str = "u32") -> None:
    """Store values in consecutive registers; all are computed before any is stored."""
    if not isinstance(operand, Register):
        raise Unsupported(f"destination {operand}")
    names = [e.temp() for _ in values]
    for name, value in zip(names, values, strict=True):
        e.line(f"{name} = {value}")
    for name, register in zip(names, operand.registers(len(values)), strict=False):
        e.line(f"{e.dst(register, kind)}[...] = {name}")


def assign_pair(e: Emitter, operand: Operand, value: str) -> None:
    """Store a 64-bit value in two registers."""
    name = e.temp()
    e.line(f"{name} = {value}")
    word, shift = e.constants.thing(WORD), e.constants.array(WIDE, 32)
    assign_run(e, operand, [f"{name}.astype({word})", f"({name} >> {shift}).astype({word})"])


def bank_word(e: Emitter, offset: int, kind: str) -> str:
    """Return the expression of a word of constant bank 0."""
    dtype = e.constants.thing(KINDS[kind][2])
    base = e.layout.params_begin
    if offset >= base:
        if offset + 4 > e.layout.param_bytes:
            raise Unsupported(f"constant bank 0 at {offset:#x}: behind the parameters")
        return f"w.cta.param({offset}, {dtype})"
    name = _BANKS.get(base, {}).get(offset)
    if name is None:
        raise Unsupported(f"constant bank 0 at {offset:#x}: meaning unknown where parameters begin at {base:#x}")
    if name.startswith("1 / "):
        return f"reciprocal_up(read_special(w, {name[4:]!r})).view({dtype})"
    fixed = {
        "stack": e.layout.local_bytes, "local": 0, "local high": LOCAL_WINDOW >> 32, "memory": 0,
        "parameters": base, "parameters high": PARAM_WINDOW >> 32,
    }  # fmt: skip
    if name in fixed:
        return constant(e, kind, fixed[name])
    return f"read_special(w, {name!r}).view({dtype})"


@runtime
def reciprocal_up(x: np.ndarray) -> np.ndarray:
    """Return 1 / x, rounded so that the product with a multiple of x never truncates to less than the quotient."""
    near = np.float32(1) / x.astype(np.float32)
    short = near.astype(np.float64) * x < 1
    result: np.ndarray = np.where(short, np.nextafter(near, np.float32(2)), near).astype(np.float32)
    return result


def memory_operand(ins: SassInstruction, index: int) -> Address:
    """Return an operand in brackets on memory."""
    operand = ins.operands[index]
    if not isinstance(operand, Address) or operand.space or operand.suffixes:
        raise Unsupported(f"operand {operand} instead of an address")
    return operand


def address(e: Emitter, operand: Address) -> str:
    """Return the expression of an address: 64 bits of a pair, else 32 bits of the sum of a register and a uniform register."""
    terms = []
    if operand.wide:
        assert operand.base is not None
        terms.append(pair(e, operand.base))
    elif operand.base is not None:
        terms.append(source(e, operand.base, "u32"))
    if operand.uniform is not None:
        if operand.wide:
            raise Unsupported("a pair plus a uniform register as an address")
        terms.append(source(e, operand.uniform, "u32"))
    dtype = WIDE if operand.wide else WORD
    if operand.offset or not terms:
        terms.append(e.constants.array(dtype, operand.offset & (1 << dtype.itemsize * 8) - 1))
    registers = [
        *(operand.base.registers(1 + operand.wide) if operand.base else ()),
        *(operand.uniform.registers() if operand.uniform else ()),
    ]
    e.check_taint(registers, "an address")
    return f"({' + '.join(terms)})"


@runtime
def join_words(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return the 64-bit values of two words."""
    wide: np.ndarray = high.astype(np.uint64) << np.uint64(32) | low
    return wide
