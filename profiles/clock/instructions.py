"""Static timing of machine instructions: pipe, rate, and the class that says which unit executes them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from cute_mla.simulator.sass.flow import is_never
from cute_mla.simulator.sass.listing import BOARDS, NO_BOARD, Immediate, Listing, Register, SassInstruction

from .constants import Constants

# Pipes of a scheduler. Every opcode stands in one; an unknown one is refused.
_PIPES = {
    "fma": "FADD FFMA FHADD FHFMA FMUL HADD2 HFMA2 HSET2 HSETP2 FADD2 FFMA2 FMUL2 HMUL2",
    "multiply": "IDP IMAD",
    "alu": "CS2R FMNMX FMNMX3 FSEL FSETP IABS IADD IADD3 IMNMX ISETP LEA LOP3 MOV P2R PLOP3 PRMT R2P SEL SGXT SHF VIADD VIADDMNMX VIMNMX "
    "VIMNMX3 VOTE",
    "convert": "F2FP I2FP",
    "transcendental": "BREV F2F F2I FCHK FLO I2F MUFU POPC",
    "uniform": "ELECT R2UR UF2I UFLO UFMUL UI2F UIADD3 UIMAD UISETP ULDC ULEA ULOP3 UMOV UP2UR UPLOP3 UPOPC UPRMT USEL USHF UVIMNMX "
    "VOTEU",
    "memory": "ATOMS ATOMG LD LDG LDGSTS LDL LDS LDSM RED REDG SHFL ST STAS STG STL STS STSM",
    "asynchronous": "SYNCS UBLKCP UTMALDG UTMASTG UTMAREDG UTMACCTL UTMACMDFLUSH UTMAPF UBLKPF UTCBAR UTCHMMA UTCQMMA UTCATOMSWS UTCCP "
    "UGETNEXTWORKID ARRIVES LDGDEPBAR UVIRTCOUNT",
    "tensor": "HMMA QMMA HGMMA QGMMA LDTM STTM",
    "control": "ACQBULK BAR BPT BRA BREAK BRX BRXU BSSY BSYNC CALL CCTL CGAERRBAR DEPBAR ENDCOLLECTIVE ERRBAR EXIT FENCE LDC LDCU LEPC "
    "MATCH MEMBAR MOVM NANOSLEEP NOP PREEXIT REDUX CREDUX RET RPCMOV S2R S2UR UCGABAR_ARV UCGABAR_WAIT USETMAXREG WARPGROUP WARPSYNC YIELD",
}  # fmt: skip
PIPE_OF = {opcode: pipe for pipe, opcodes in _PIPES.items() for opcode in opcodes.split()}
PIPE_NUMBERS = {pipe: number for number, pipe in enumerate(_PIPES)}

# Classes of instructions that a unit executes; the others are plain.
_KINDS = {
    "shared": "LDS LDSM STS STSM ATOMS",
    "local": "LDL STL",
    "global load": "LDG",
    "generic load": "LD",
    "global store": "ST STG RED REDG ATOMG",
    "copy": "LDGSTS",
    "copies arrive": "ARRIVES",
    "copies commit": "LDGDEPBAR UTMACMDFLUSH",
    "copies wait": "DEPBAR",
    "tensor copy": "UTMALDG",
    "tensor store": "UTMASTG UTMAREDG",
    "tensor prefetch": "UTMAPF",
    "bulk prefetch": "UBLKPF",
    "product": "HGMMA QGMMA",
    "tensor product": "UTCHMMA UTCQMMA",
    "commit": "UTCBAR",
    "tensor move": "LDTM STTM",
    "remote store": "STAS",
    "cluster arrive": "UCGABAR_ARV",
    "cluster wait": "UCGABAR_WAIT",
    "branch": "BRA BRX BRXU CALL RET BREAK BSYNC",
    "exit": "EXIT",
}
_KIND_OF = {opcode: kind for kind, opcodes in _KINDS.items() for opcode in opcodes.split()}

# Constants that give the latency of instructions without a unit of their own; operand_read_clocks for the others.
_LATENCIES = {
    "mufu_latency": "BREV F2F F2I FCHK FLO I2F MUFU POPC UF2I UI2F",
    "shuffle_latency": "CREDUX MATCH MOVM REDUX SHFL",
    "special_latency": "S2R S2UR",
    "constant_latency": "LDC LDCU",
    "fence_clocks": "FENCE MEMBAR",
}
_LATENCY_OF = {opcode: constant for constant, opcodes in _LATENCIES.items() for opcode in opcodes.split()}

PRODUCT_SHAPE = re.compile(r"(\d+)x(\d+)x(\d+)")
SCHEDULERS = 4  # of an SM
# Bytes of an operand of a warp's matrix product, in the tensor core of its scheduler; ptxas leaves clocks to its results, not a scoreboard.
WARP_PRODUCTS = {"HMMA": 2, "QMMA": 1}
WARP_PRODUCT_ROWS = 16
BLOCK_SCALED_FLOPS = 2048  # a clock and SM, of e4m3 with block scales: GeForce boards halve only the products without
FILLER = "UIADD3"  # that never executes: ptxas puts it behind a product, whose latency is more than a stall count can say
WARP_PRODUCT_SHAPE = re.compile(r"16(8)(8|16|32)")  # n and k behind the rows


class UnknownTimeError(ValueError):
    """Machine code that the clock cannot time; the message says which instructions."""


@dataclass(frozen=True, slots=True)
class TimedInstruction:
    """One instruction as the clock issues it.

    stall: clocks until the warp may issue again. waits: scoreboards to wait for. write_board, read_board: -1 for none. pipe: number of the
    scheduler's pipe. occupancy: clocks that it holds the pipe. latency: clocks from issue to its results, for one whose time is constant.
    read: clocks from issue until its operands have been read. kind: class of the unit that executes it, "" for none.
    """

    address: int
    text: str
    base: str
    stall: int
    waits: tuple[int, ...]
    write_board: int
    read_board: int
    pipe: int
    occupancy: int
    latency: int
    read: int
    kind: str


def time_listing(listing: Listing, constants: Constants) -> dict[int, TimedInstruction]:
    """Return the instructions of a kernel by address. UnknownTimeError with all spellings that have no time."""
    executed = [ins for ins in listing.instructions if not is_never(ins)]
    unknown = sorted({ins.opcode for ins in executed if ins.base not in PIPE_OF or kind_of(ins) is None})
    if unknown:
        raise UnknownTimeError(f"{listing.name}: the clock does not know {', '.join(unknown)}")
    if not any(ins.control.stall for ins in listing.instructions):
        raise UnknownTimeError(f"{listing.name}: the machine code has no control codes")
    timed: dict[int, TimedInstruction] = {}
    last = -1
    for ins in listing.instructions:
        if not is_never(ins):
            last = ins.address
            timed[last] = time_instruction(ins, constants)
        elif ins.base == FILLER:
            timed[last] = replace(timed[last], stall=timed[last].stall + ins.control.stall)
    return timed


def time_instruction(ins: SassInstruction, constants: Constants) -> TimedInstruction:
    """Return the static timing of one instruction."""
    control = ins.control
    kind = kind_of(ins)
    assert kind is not None
    pipe = PIPE_OF[ins.base]
    return TimedInstruction(
        ins.address,
        ins.text,
        ins.base,
        max(1, control.stall),
        tuple(board for board in range(BOARDS) if control.waits >> board & 1),
        -1 if control.write_board == NO_BOARD else control.write_board,
        -1 if control.read_board == NO_BOARD else control.read_board,
        PIPE_NUMBERS[pipe],
        occupancy_of(ins, pipe, constants),
        latency_of(ins, constants),
        constants.operand_read_clocks,
        kind,
    )


def kind_of(ins: SassInstruction) -> str | None:
    """Return the class of an instruction, "" for a plain one; None for an unknown form of one that a unit executes."""
    if ins.base == "SYNCS":
        if ins.modifiers[0] == "PHASECHK":
            return "phase wait" if "TRYWAIT" in ins.modifiers else "phase test"
        return {"ARRIVE": "arrive", "EXCH": "initialise"}.get(ins.modifiers[0])
    if ins.base == "UBLKCP":
        return {"S.S": "bulk copy", "S.G": "bulk load", "G.S": "tensor store"}.get(".".join(ins.modifiers[:2]))
    if ins.base == "UGETNEXTWORKID":  # assumed: a response comes as bytes from L2 do
        return "bulk load"
    if ins.base == "CCTL":
        return "prefetch" if ins.modifiers[-1] in ("PF1", "PF2", "PML2") else ""
    if ins.base == "BAR":
        return "barrier arrive" if "ARV" in ins.modifiers else "barrier sync"
    if ins.base == "FENCE" and ins.modifiers[-1] == "T":
        return "tensor stores wait"
    if ins.base == "WARPGROUP":
        return "products wait" if "DEPBAR" in ins.modifiers else ""
    return _KIND_OF.get(ins.base, "")


def occupancy_of(ins: SassInstruction, pipe: str, constants: Constants) -> int:
    """Return the clocks that an instruction holds its pipe."""
    if ins.base in WARP_PRODUCTS:
        return warp_product_clocks(ins, constants)
    if pipe == "fma":
        return constants.fma_clocks * (2 if ins.base.endswith("2") and ins.base[0] == "F" else 1)
    return {
        "multiply": constants.multiply_clocks,
        "alu": constants.alu_clocks,
        "convert": constants.convert_clocks,
        "transcendental": constants.mufu_clocks,
        "uniform": constants.uniform_clocks,
        "memory": constants.memory_issue_clocks,
    }.get(pipe, 1)


def warp_product_clocks(ins: SassInstruction, constants: Constants) -> int:
    """Return the clocks of a matrix product of a warp in one of the four tensor cores of an SM."""
    rate = BLOCK_SCALED_FLOPS if "SF" in ins.modifiers else constants.product_flops * 2 // WARP_PRODUCTS[ins.base]
    shape = next(match for word in ins.modifiers if (match := WARP_PRODUCT_SHAPE.fullmatch(word)))
    return 2 * WARP_PRODUCT_ROWS * int(shape[1]) * int(shape[2]) * SCHEDULERS // rate


def latency_of(ins: SassInstruction, constants: Constants) -> int:
    """Return the clocks from issue to the results of an instruction without a unit of its own."""
    latency: int = getattr(constants, _LATENCY_OF.get(ins.base, "operand_read_clocks"))
    return latency


def shape_of(ins: SassInstruction) -> tuple[int, int, int]:
    """Return m, n, k of a matrix product of a warpgroup."""
    found = next(match for word in ins.modifiers if (match := PRODUCT_SHAPE.fullmatch(word)))
    m, n, k = (int(number) for number in found.groups())
    return m, n, k


def count_of(ins: SassInstruction) -> int:
    """Return the literal of a wait for groups: how many may stay in flight."""
    found = next(operand for operand in ins.operands if isinstance(operand, Immediate))
    return found.bits


def reads_registers(ins: SassInstruction) -> bool:
    """Return True for a matrix product whose A is in registers."""
    return isinstance(ins.operands[1], Register)
