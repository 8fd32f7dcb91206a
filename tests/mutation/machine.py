"""Edits of machine code, as nvdisasm prints it: of control codes, of synchronisation, and of operands.

A mutation's line is the address of its instruction. Control codes are bits 41 to 61 of the upper word of an encoding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from cute_mla.simulator.sass.listing import BOARDS, NO_BOARD
from tests.mutation.sites import Edit, Mutation

STALL, WRITE, READ, WAITS = 41, 46, 49, 52  # first bits of the fields of a control code
LEAST_STALL = 4  # shorter ones are not shrunk
Replacement = str | Callable[[re.Match[str]], str | None]

ALONE = r"(?<=[0-9a-f]\*/)(?P<gap>\s+)"  # in front of an opcode without a guard: a trial may leave guarded lanes out
CODE = r"(?<=[0-9a-f]\*/)(?P<gap>\s+)(?P<guard>@!?U?P\w\s+)?"  # what is in front of an opcode
REST = r"(?=\s*;)"
INSTRUCTION = r"(?<=[0-9a-f]\*/)\s+(?P<code>[^;\n]+?)\s*;\s*/\* 0x[0-9a-f]{16} \*/\s*/\* 0x(?P<high>[0-9a-f]{16}) \*/"
NO_STALL = ("BAR", "BRA", "BSYNC", "CALL", "EXIT", "NOP", "RET", "WARPSYNC", "YIELD")  # their stalls guard no result of theirs


def _with_high(match: re.Match[str], high: int) -> str:
    begin, end = (place - match.start() for place in match.span("high"))
    return f"{match[0][:begin]}{high:016x}{match[0][end:]}"


def _opcode(match: re.Match[str]) -> str:
    return re.sub(r"^@!?U?P\w\s+", "", match["code"]).partition(" ")[0].partition(".")[0]


def _unwaited(board: int) -> Replacement:
    """Return a replacement that drops one scoreboard from a wait mask."""
    bit = 1 << WAITS + board
    return lambda match: _with_high(match, int(match["high"], 16) & ~bit) if int(match["high"], 16) & bit else None


def _unset(first: int) -> Replacement:
    """Return a replacement that lets an instruction hold no scoreboard."""

    def change(match: re.Match[str]) -> str | None:
        high = int(match["high"], 16)
        return _with_high(match, high | NO_BOARD << first) if high >> first & NO_BOARD < BOARDS else None

    return change


def _stalled(shorter: Callable[[int], int]) -> Replacement:
    """Return a replacement that shortens a stall count."""

    def change(match: re.Match[str]) -> str | None:
        high = int(match["high"], 16)
        stall = high >> STALL & 15
        if stall < LEAST_STALL or _opcode(match) in NO_STALL:
            return None
        return _with_high(match, high & ~(15 << STALL) | shorter(stall) << STALL)

    return change


def _moved(match: re.Match[str]) -> str:
    """Return the operand with the next register. Groups: what is in front, the number, what is behind."""
    return f"{match['front']}{int(match['number']) + 1}{match['behind']}"


def _more(step: int) -> Replacement:
    return lambda match: f"{match['front']}{int(match['number'], 16) + step:#x}{match['behind']}"


def _edit(name: str, pattern: str, replacement: Replacement = r"\g<gap>NOP") -> Edit:
    return Edit(name, re.compile(pattern), replacement)


def _dropped(name: str, opcode: str) -> Edit:
    """Return the edit that leaves instructions out; their control codes stay."""
    return _edit(name, f"{CODE}(?:{opcode})(?![\\w.])[^;\\n]*?{REST}")


CONTROL = (
    *(_edit(f"wait for scoreboard {board} dropped", INSTRUCTION, _unwaited(board)) for board in range(BOARDS)),
    _edit("write scoreboard not held", INSTRUCTION, _unset(WRITE)),
    _edit("read scoreboard not held", INSTRUCTION, _unset(READ)),
    _edit("stall of 1", INSTRUCTION, _stalled(lambda stall: 1)),
    _edit("stall halved", INSTRUCTION, _stalled(lambda stall: stall // 2)),
)
SYNCHRONISATION = (
    _dropped("arrival dropped", r"SYNCS\.ARRIVE\.\S*A1T0"),
    _dropped("arrival with bytes dropped", r"SYNCS\.ARRIVE\.TRANS64"),
    _dropped("copies' arrival dropped", r"ARRIVES\.\S+"),
    _dropped("copies' group not closed", r"LDGDEPBAR"),
    _dropped("wait for copies dropped", r"DEPBAR\.LE"),
    _dropped("wait for products dropped", r"WARPGROUP\.DEPBAR\.LE"),
    _dropped("proxy fence dropped", r"FENCE\.VIEW\.ASYNC\.S"),
    _dropped("grid wait dropped", r"ACQBULK"),
    _dropped("named barrier dropped", r"BAR\.SYNC\.DEFER_BLOCKING"),
    _dropped("arrival at a named barrier dropped", r"BAR\.ARV"),
    _dropped("cluster arrival dropped", r"UCGABAR_ARV"),
    _dropped("cluster wait dropped", r"UCGABAR_WAIT"),
    _dropped("tensor copy dropped", r"UTMALDG\.\S+"),
    _dropped("commit dropped", r"UTCBAR\S*"),
    _dropped("wait for tensor stores dropped", r"FENCE\.VIEW\.ASYNC\.T"),
    _edit("wait for products 1 looser", r"(WARPGROUP\.DEPBAR\.LE gsb0, )0x0" + REST, r"\g<1>0x1"),
    _edit(
        "named barrier only arrived at", CODE + r"BAR\.SYNC\.DEFER_BLOCKING(?P<operands> \w+, \w+)" + REST, r"\g<gap>BAR.ARV\g<operands>"
    ),
    _edit("bytes not expected", r"SYNCS\.ARRIVE\.TRANS64 RZ, (\[[^\]]*\]), R\d+" + REST, r"SYNCS.ARRIVE.TRANS64.A1T0 RZ, \1, RZ"),
    _edit("phase not waited for", r"SYNCS\.PHASECHK\.TRANS64\.TRYWAIT (P\d), [^;\n]*?" + REST, r"PLOP3.LUT \1, PT, PT, PT, PT, 0x80, 0x0"),
    _edit("another mbarrier", r"(?P<front>SYNCS\.[^;\n]*\[[^\]]*\+)(?P<number>0x[0-9a-f]+)(?P<behind>\])", _more(8)),
    _edit("products not closed", r"(?<=HGMMA)([^;\n]*), gsb0" + REST, r"\1"),
)
ALU = r"(?:F(?:ADD|MUL|FMA|MNMX|SEL)|I(?:ADD3|MAD)|LEA|LOP3|PRMT|SEL|SHF|VIADD|VIMNMX|F2FP|ISETP|FSETP|HADD2|SHFL|LDG|LDS)(?:\.\w+)*"
OPERANDS = (
    _edit("guard turned", r"(?<=[0-9a-f]\*/)(\s+@)(!?)(U?P\d)", lambda match: f"{match[1]}{'' if match[2] else '!'}{match[3]}"),
    _edit("guard dropped", r"(?<=[0-9a-f]\*/)(\s+)@!?U?P\d\s+(?!BRA|EXIT|BREAK|ELECT|R2UR)", r"\1"),
    _edit("result in the next register", f"(?P<front>{ALONE}{ALU} R)(?P<number>\\d+)(?P<behind>)(?!\\d)", _moved),
    _edit("another source", f"(?P<front>{ALONE}{ALU} [^;\\n]*, [-|~]?R)(?P<number>\\d+)(?P<behind>)(?![\\d|])", _moved),
    _edit("sources exchanged", r"((?:I|F)SETP\.(?:LT|LE|GT|GE)\S* P\w, P\w), ([^,;\n]+), ([^,;\n]+),", r"\1, \3, \2,"),
    _edit("selection turned", r"((?:U?|F)SEL [^;\n]*, )(!?)(U?P\d)" + REST, lambda match: f"{match[1]}{'' if match[2] else '!'}{match[3]}"),
    _edit("maximum for minimum", r"((?:FMNMX|VIMNMX)\S* [^;\n]*, )(!?)PT" + REST, lambda match: f"{match[1]}{'' if match[2] else '!'}PT"),
    _edit("immediate 1 more", f"(?P<front>{ALONE}(?:IADD3|VIADD|UIADD3) [^;\\n]*, )(?P<number>0x[0-9a-f]+)(?P<behind>,)", _more(1)),
    _edit("address without offset", ALONE + r"(?P<access>(?:LD|ST)[GS]\S*[^;\n]*\[[^\]]*)\+0x[0-9a-f]+\]", r"\g<gap>\g<access>]"),
    _edit("another parameter", r"(?P<front>c\[0x0\]\[)(?P<number>0x[2-9a-f][0-9a-f]{2})(?P<behind>\])", _more(4)),
    _edit("or for and", r"(LOP3\.LUT R[^;\n]*, )0xc0(, !PT)" + REST, r"\g<1>0xfc\2"),
    _edit("other lanes", r"(SHFL\.BFLY PT, R\d+, R\d+), 0x(?!1,)\w+,", r"\1, 0x1,"),
    _edit("sum turned", r"(FADD(?:\.FTZ)? R\d+, R\d+(?:\.reuse)?, )(-?)(?=R)", lambda match: match[1] + ("" if match[2] else "-")),
    _edit("addend dropped", r"(FFMA(?:\.FTZ)? R\d+, [^,;\n]+, [^,;\n]+, )-?R\d+(?:\.reuse)?" + REST, r"\1RZ"),
)
KINDS = (*CONTROL, *SYNCHRONISATION, *OPERANDS)
STATIC = frozenset(kind.name for kind in CONTROL)  # noticed when the code is loaded, whether it runs or not

OF_OPERANDS = frozenset(kind.name for kind in OPERANDS)  # their trials need values that tell
_ADDRESS = re.compile(r"/\*([0-9a-f]{4,})\*/")


def find(text: str, kinds: Sequence[Edit] = KINDS) -> list[Mutation]:
    """Find every mutation of a disassembly, by kind, in the order of the text."""
    places = [(match.end(), int(match[1], 16)) for match in _ADDRESS.finditer(text)]
    found = []
    for kind in kinds:
        index = 0
        for mutation in kind.sites(text):
            while index + 1 < len(places) and places[index + 1][0] <= mutation.start:
                index += 1
            found.append(replace(mutation, line=places[index][1]))
    return found


def describe(text: str, mutation: Mutation) -> str:
    """Return the broken instruction before and after; of an edit of a control code the upper word of the encoding too."""
    broken = mutation.apply(text)
    head = f"/*{mutation.line:04x}*/"
    before, after = (" ".join(found[found.index(head) + len(head) :].split("\n", 2)[:2]) for found in (text, broken))
    (old, first), (new, second) = ((part.split(";", 1)[0].strip(), part.rsplit("/*", 1)[1].strip(" */")) for part in (before, after))
    return f"{old} => {new}" if old != new else f"{old}, {first} => {second}"
