"""Registers that each machine instruction reads and writes, with the widths that the text does not show.

Every opcode needs an entry: an unknown one is refused, because a register run of the wrong width would make the checks of control codes
and the execution silently wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from ..findings import SassError
from ..frontend.ptx import Reg
from ..numerics import tensor_fragments
from ..numerics.tensor_fragments import Fragment
from .listing import Address, Constant, Immediate, Operand, Register, SassInstruction, register

PREDICATES = 7


@dataclass(frozen=True)
class Access:
    """Registers of one instruction.

    reads: sources, with addresses and the guard. writes: destinations. accumulators: registers of an asynchronous matrix product, which
    reads and writes them until it is waited for.
    """

    reads: tuple[Reg, ...]
    writes: tuple[Reg, ...]
    accumulators: tuple[Reg, ...] = ()


def _none(ins: SassInstruction) -> int:
    return 0


def _one(ins: SassInstruction) -> int:
    return 1


def _two(ins: SassInstruction) -> int:
    return 2


def _with_carries(ins: SassInstruction) -> int:
    """Count one destination and the predicates that follow it."""
    count = 1
    while count < len(ins.operands) and _is_predicate(ins.operands[count]):
        count += 1
    return count


def _predicate_first(ins: SassInstruction) -> int:
    """Count a predicate and the register behind it, or the register alone."""
    return 2 if _is_predicate(ins.operands[0]) else 1


def _load(ins: SassInstruction) -> int:
    """Count one run of registers, or the two of a load of 256 bits."""
    return 2 if "256" in ins.modifiers else 1


def _three(ins: SassInstruction) -> int:
    return 3


def _vote(ins: SassInstruction) -> int:
    return len(ins.operands) - 1


def _is_predicate(operand: Operand) -> bool:
    return isinstance(operand, Register) and operand.is_predicate


_DESTINATIONS: dict[Callable[[SassInstruction], int], str] = {
    _none: (
        "ACQBULK ARRIVES BAR BPT BRA BREAK BSYNC CALL CCTL CGAERRBAR DEPBAR ERRBAR EXIT FENCE LDGDEPBAR LDGSTS MEMBAR NANOSLEEP NOP "
        "PREEXIT RET STAS STG STS STSM STTM UBLKCP UBLKPF UCGABAR_ARV UCGABAR_WAIT UTCBAR UTCCP UTCHMMA UTCQMMA UTMACCTL UTMALDG "
        "UGETNEXTWORKID UVIRTCOUNT WARPGROUP WARPSYNC YIELD BRX BRXU ENDCOLLECTIVE REDG ST STL UTMACMDFLUSH UTMAPF UTMASTG "
        "AWAIT CONVERGED FOREIGN LEAVE NOWHERE"  # parts of a lifted wait, branch, call, exit and return
    ),
    _one: (
        "ATOMS BREV BSSY CS2R F2F F2FP F2I FADD FADD2 FCHK FFMA FFMA2 FHADD FHFMA FMNMX FMNMX3 FMUL FMUL2 FSEL HADD2 HFMA2 HGMMA "
        "HSET2 IDP UF2I UFADD UFFMA UFMUL UFSEL UI2F "
        "HMMA I2F I2FP IABS FLO HMUL2 LD LDC LDCU LDL LDS LDSM LDTM LEPC MOV MOVM MUFU P2R POPC PRMT QGMMA QMMA QUICK R2P REDUX RETURN "
        "RPCMOV S2R S2UR SEL SGXT SHF SYNCS UFLO ULDC UMOV UP2UR UPOPC UPRMT USEL USHF VIADD VIADDMNMX"
    ),
    _two: "ATOMG ELECT FSETP HSETP2 ISETP PLOP3 SHFL UFSETP UISETP UPLOP3",
    _with_carries: "IADD IADD3 IMAD LEA UIADD3 UIMAD ULEA UVIMNMX VIMNMX VIMNMX3",
    _predicate_first: "LOP3 MATCH R2UR ULOP3 USETMAXREG UTCATOMSWS",
    _load: "LDG",
    _three: "IMNMX",
    _vote: "VOTE VOTEU",
}
_COUNT = {opcode: rule for rule, opcodes in _DESTINATIONS.items() for opcode in opcodes.split()}
_LENGTHS = {"64": 2, "128": 4, "256": 4, "F32x2": 2, "F32x4": 4}
_MEMORY = (
    "ATOMG", "ATOMS", "LD", "LDC", "LDCU", "LDG", "LDL", "LDS", "REDG", "ST", "STAS", "STG", "STL", "STS", "ULDC",
)  # fmt: skip
_MATRIX_MOVE = ("LDSM", "STSM")
_TENSOR_MOVE = ("LDTM", "STTM")
_TENSOR_PRODUCT = ("UTCHMMA", "UTCQMMA")
_WARP_PRODUCT = ("HMMA", "QMMA")
_FRAGMENTS = {
    "": "32x32b", "16dp64bit": "16x64b", "16dp128bit": "16x128b", "16dp256bit": "16x256b",
    "16dp32bit_t0_t15": "16x32b_t0_t15", "16dp32bit_t16_t31": "16x32b_t16_t31",
}  # fmt: skip
_FRAGMENT = re.compile(r"(?:LDTM|STTM)(?:\.(16dp\d+bit(?:_t\d+_t\d+)?))?(?:\.x(\d+))?(\.PACK16BIT|\.EXPAND16BIT)?")
_PAIRS = ("FADD2", "FFMA2", "FMUL2")
_INTEGER_PAIRS = ("IADD", "IMNMX", "ISETP", "MOV", "SEL", "UIADD3", "UISETP")
_WIDE = frozenset({"64", "S64", "U64"})
_PRODUCT_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)")


@cache
def accesses(ins: SassInstruction) -> Access:
    """Return the registers of an instruction. SassError for an opcode without an entry."""
    rule = _COUNT.get(ins.base)
    if rule is None:
        raise SassError(f"{ins.address:#x}: no entry for the opcode of {ins.text!r}")
    if ins.base in ("HGMMA", "QGMMA"):
        return _product(ins)
    reads: list[Reg] = []
    writes: list[Reg] = []
    count = destinations(ins)
    for index, operand in enumerate(ins.operands):
        if isinstance(operand, Register) and operand.kind != "SB":  # a scoreboard is no register
            (writes if index < count else reads).extend(operand.registers(width(ins, index)))
        elif isinstance(operand, Address):
            reads.extend(_address(ins, index, operand))
        elif isinstance(operand, Constant) and operand.index is not None:
            reads.extend(operand.index.registers())
    if ins.base == "R2UR" and "OR" in ins.modifiers:
        reads.extend(writes[:1])
    if ins.opcode.startswith("LDTM.16dp32bit_t16_t31"):  # the other lanes keep what the first half has loaded
        reads.extend(writes)
    if ins.base in ("R2P", "P2R", "UP2UR"):
        mask = ins.operands[-1]
        assert isinstance(mask, Immediate)
        named = [register("UP" if ins.base == "UP2UR" else "P", number) for number in range(PREDICATES) if mask.bits >> number & 1]
        (writes if ins.base == "R2P" else reads).extend(named)
    if ins.guard is not None:
        reads.extend(ins.guard.registers())
    return Access(tuple(dict.fromkeys(reads)), tuple(dict.fromkeys(writes)))


def destinations(ins: SassInstruction) -> int:
    """Return how many operands, from the first, are destinations."""
    if ins.base == "USETMAXREG":
        return int(_is_predicate(ins.operands[0]))
    return _COUNT[ins.base](ins)


def width(ins: SassInstruction, index: int) -> int:
    """Return the number of registers in the run of a register operand."""
    operand = ins.operands[index]
    assert isinstance(operand, Register)
    if operand.is_predicate or operand.kind in ("B", "SB"):
        return 1
    base, words = ins.base, ins.modifiers
    if base in _MEMORY:
        return next((_LENGTHS[word] for word in words if word in _LENGTHS), 1)
    if base in _MATRIX_MOVE:
        return int(words[-1]) if words[-1].isdigit() else 1
    if base in _TENSOR_MOVE:
        return fragment(ins).registers
    if base in _TENSOR_PRODUCT and operand.kind == "UR":
        return 2 if "WS" in words else 8 if "2CTA" in words else 4
    if base in _WARP_PRODUCT:
        return (4, 4, 2, 4, 1, 1, 1)[index]
    if base in _PAIRS:
        return 2 if index == 0 or "HI_LO" in operand.suffixes else 1
    return _arithmetic_width(ins, index)


def fragment(ins: SassInstruction) -> Fragment:
    """Return the shape of a move between registers and tensor memory. SassError for one that is not supported."""
    found = _FRAGMENT.fullmatch(ins.opcode)
    if found is None:
        raise SassError(f"{ins.address:#x}: a move of an unknown shape: {ins.text!r}")
    return tensor_fragments.fragment(_FRAGMENTS[found[1] or ""], int(found[2] or 1), bool(found[3]))


def _arithmetic_width(ins: SassInstruction, index: int) -> int:
    base, words = ins.base, ins.modifiers
    if base in ("IMAD", "UIMAD"):
        addend = index == destinations(ins) + 2
        if "WIDE" in words:
            return 2 if index == 0 or addend else 1
        return 2 if "HI" in words and addend else 1
    if base in _INTEGER_PAIRS and not _WIDE.isdisjoint(words):
        return 2
    if base == "MATCH" and index == len(ins.operands) - 1:
        return 2 if "U64" in words else 1
    if base == "CS2R":
        return 1 if "32" in words else 2
    if base in ("F2I", "I2F", "F2F"):
        return _conversion_width(base, words, index)
    if base == "SYNCS":
        return 2 if words[0] == "EXCH" else 1
    if base in ("BRX", "BRXU", "CALL", "LEPC", "RET"):
        return 2
    return 1


def _conversion_width(base: str, words: tuple[str, ...], index: int) -> int:
    """Return the width of an operand of a conversion: the modifiers name the types of 64 bits."""
    wide = any(word in ("U64", "S64") for word in words)
    if any(word == "F64" for word in words):
        raise SassError(f"{base}.{'.'.join(words)}: double precision is not supported")
    return 2 if wide and (index == 0) == (base == "F2I") else 1


def _address(ins: SassInstruction, index: int, operand: Address) -> list[Reg]:
    """Return the registers of an operand in brackets, with the uniform runs that asynchronous units read."""
    found: list[Reg] = []
    if operand.base is not None:
        # Prefetches take a generic address without saying that it is a pair.
        found += operand.base.registers(2 if operand.wide or ins.base == "CCTL" else 1)
    if operand.descriptor is not None:
        found += operand.descriptor.registers(2)
    if operand.uniform is not None:
        found += operand.uniform.registers(_uniform_run(ins, index, operand))
    return found


def _uniform_run(ins: SassInstruction, index: int, operand: Address) -> int:
    if operand.space == "desc":
        return 2
    if ins.base in ("UTMALDG", "UTMAPF", "UTMASTG"):
        dimensions = next(int(word[0]) for word in ins.modifiers if re.fullmatch(r"\dD", word))
        if "GATHER4" in ins.modifiers:
            dimensions = 5  # a column and four rows
        others = {"UTMALDG": 2, "UTMASTG": 1, "UTMAPF": 0}[ins.base]  # places in shared memory ahead of the coordinates
        return others + dimensions if index == 0 else 2
    if ins.base == "UBLKCP":
        source_is_global = ins.modifiers[-1] == "G"
        return 2 if index == 0 or source_is_global else 1
    if ins.base in ("UBLKPF", "UTMACCTL") or operand.space == "gdesc":
        return 2
    return 1


def _product(ins: SassInstruction) -> Access:
    """Return the registers of a matrix product of a warpgroup: accumulators of 32 bits, and A in registers or by descriptor."""
    shape = next((found for word in ins.modifiers if (found := _PRODUCT_SHAPE.fullmatch(word))), None)
    if shape is None or "F32" not in ins.modifiers:
        raise SassError(f"{ins.address:#x}: a matrix product without a shape, or with accumulators other than f32: {ins.text!r}")
    result = ins.operands[0]
    assert isinstance(result, Register)
    accumulators = result.registers(int(shape[2]) // 2)
    reads: list[Reg] = []
    left = ins.operands[1]
    if isinstance(left, Register):
        reads += left.registers(4)
        descriptor = ins.operands[2]
        assert isinstance(descriptor, Address)
        reads += descriptors(descriptor)[1]
    else:
        assert isinstance(left, Address)
        first, second = descriptors(left)
        reads += [*first, *second]
    for operand in (*ins.operands[1:], *((ins.guard,) if ins.guard is not None else ())):
        if isinstance(operand, Register) and operand.is_predicate:
            reads += operand.registers()
    return Access(tuple(reads), (), accumulators)


def descriptors(operand: Address) -> tuple[tuple[Reg, ...], tuple[Reg, ...]]:
    """Return the uniform pairs of the descriptors of A and B of a matrix product; A's means nothing when A is in registers."""
    if operand.uniform is None or operand.uniform.number is None:
        raise SassError("a matrix product without a descriptor")
    first = operand.uniform.number
    return (register("UR", first), register("UR", first + 1)), (register("UR", first + 2), register("UR", first + 3))
