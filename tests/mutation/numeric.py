"""Edits of numbers and indices: constants, comparisons, selections, bounds, parameters, 64-bit products, lanes and addresses."""

from __future__ import annotations

import random
import re
import struct
from collections import defaultdict
from collections.abc import Callable
from functools import cache

from tests.mutation.sites import Edit, Mutation

Replacement = str | Callable[[re.Match[str]], str | None]

BITS = {"s32": "b32", "u32": "b32", "b32": "b32", "f32": "b32", "s64": "b64", "u64": "b64", "b64": "b64", "f64": "b64", "b16": "b16"}
LOOSER = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "lo": "ls", "ls": "lo", "hi": "hs", "hs": "hi"}
INVERSE = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}
CODE = r"(?<=[\t ;:{}])"  # an opcode begins here, behind a guard or none
ALONE = r"(?m)(?<=^\t)"  # an opcode without a guard begins here: a block in braces may replace it


def _replaced(match: re.Match[str], group: int, text: str) -> str:
    """Return the match with other text for one group."""
    start = match.start()
    return match[0][: match.start(group) - start] + text + match[0][match.end(group) - start :]


def _one_more(match: re.Match[str]) -> str:
    return _replaced(match, 1, str(int(match[1]) + 1))


def _halved(match: re.Match[str]) -> str | None:
    number = int(match[1])
    return _replaced(match, 1, str(number >> 1)) if number > 0 else None


def _doubled(match: re.Match[str]) -> str | None:
    """Return the match with a float constant doubled. None for 0, infinities and NaN, whose double they are themselves."""
    (number,) = struct.unpack(">f", bytes.fromhex(match[1]))
    if number == 0 or abs(number) > 1e38 or number != number:
        return None
    return _replaced(match, 1, struct.pack(">f", 2 * number).hex().upper())


def _compared(names: dict[str, str]) -> Callable[[re.Match[str]], str | None]:
    """Return a replacement that exchanges the comparison of a setp."""
    return lambda match: _replaced(match, 1, names[match[1]]) if match[1] in names else None


def _moved(match: re.Match[str]) -> str | None:
    """Return a move of the first source, in place of the instruction. Groups: type, destination, source."""
    return f"mov.{BITS[match[1]]} \t{match[2]}, {match[3]};" if match[1] in BITS else None


def _bound(step: str) -> Callable[[re.Match[str]], str | None]:
    """Return a replacement that moves the bound of a loop. Groups: comparison with its type, type, predicate, counter, bound, label."""

    def replace(match: re.Match[str]) -> str | None:
        label = re.compile(rf"^\s*{re.escape(match[6])}:", re.MULTILINE)
        if not label.search(match.string, 0, match.start()):
            return None  # a branch forwards ends no loop
        setp, kind, predicate, counter, bound = match.groups()[:5]
        block = f"{{ .reg .{BITS[kind]} %mutant; {step}.{kind} %mutant, {bound}, 1; {setp} {predicate}, {counter}, %mutant; }}"
        return block + match[0][match[0].index(";") + 1 :]

    return replace


@cache
def _parameters(ptx: str) -> tuple[tuple[str, str], ...]:
    """Return (width in bits, name) of every scalar parameter, in order."""
    return tuple((kind[1:], name) for kind, name in re.findall(r"\.param \.([suf]\d\d)(?: \.ptr[^,\n]*?)? (\w+)[,\n]", ptx))


def _neighbour(match: re.Match[str]) -> str | None:
    """Return the load with the next parameter of the same width, in a circle. None if there is no other."""
    known = _parameters(match.string)
    width = next((width for width, name in known if name == match[1]), None)
    alike = [name for other, name in known if other == width]
    return _replaced(match, 1, alike[(alike.index(match[1]) + 1) % len(alike)]) if width is not None and len(alike) > 1 else None


def _block(kind: str, *instructions: str) -> str:
    """Return instructions in a scope with a register %mutant of their own."""
    return f"{{ .reg .{kind} %mutant; {'; '.join(instructions)}; }}"


def _edit(name: str, pattern: str, replacement: Replacement) -> Edit:
    return Edit(name, re.compile(pattern), replacement)


SETP = r"setp\.(\w+)\.\w+(?=\s)"
FOUR = r"\s+([^,;]+),\s*([^,;]+),\s*([^,;]+),\s*([^,;]+);"
THREE = r"\s+([^,;]+),\s*([^,;]+),\s*([^,;]+);"
LITERAL = r"\s+[^,;]+,\s*[^,;]+,\s*(-?\d+);"
CUT = "shl.b64 %mutant, %mutant, 32; shr.s64 %mutant, %mutant, 32"  # the low 32 bits, sign-extended
WIDEN = r"cvt.\g<1>64.\g<1>32 \2, %mutant"
KINDS = (
    _edit("float constant doubled", CODE + r"(?:mul|add|sub|fma|max|min|mov|selp|setp)[^;\n]*?0[fF]([0-9A-Fa-f]{8})[^;\n]*;", _doubled),
    _edit("integer constant 1 more", CODE + r"(?:add|sub|mul\S*|min|max|div|rem)\.[su](?:32|64)" + LITERAL, _one_more),
    _edit("shift 1 more", CODE + r"sh[lr]\.[bsu](?:32|64)" + LITERAL, _one_more),
    _edit("mask halved", CODE + r"and\.b(?:32|64)" + LITERAL, _halved),
    _edit("comparison 1 off", CODE + SETP, _compared(LOOSER)),
    _edit("comparison inverted", CODE + SETP, _compared(INVERSE)),
    _edit("selp swapped", CODE + r"(selp\.\w+)" + FOUR, r"\1 \t\2, \4, \3, \5;"),
    _edit("bound left out", CODE + r"(?:min|max)\.(\w+)" + THREE, _moved),
    _edit("scale left out", CODE + r"mul\.(f32)" + THREE, _moved),
    _edit("addend left out", CODE + r"fma\.rn\.f32\s+([^;]+),\s*[^,;]+;", r"mul.f32 \t\1;"),
    _edit("index left out", CODE + r"mad\.lo\.([su](?:32|64))\s+([^,;]+),\s*[^,;]+,\s*[^,;]+,\s*([^,;]+);", _moved),
    _edit("sum turned", CODE + r"sub\.(f32|s32|s64)\b", r"add.\1"),
    _edit("predicates joined the other way", CODE + r"and\.pred\b", "or.pred"),
    _edit("predicates met the other way", CODE + r"or\.pred\b", "and.pred"),
    *(
        _edit(
            f"loop bound 1 {name}",
            ALONE + r"(setp\.(?:lt|le|gt|ge|eq|ne)\.([su](?:32|64)))\s+([^,;]+),\s*([^,;]+),\s*([^,;]+);\s*@!?%p\d+ bra[.\w]*\s+([^;]+);",
            _bound(step),
        )
        for name, step in (("less", "sub"), ("more", "add"))
    ),
    _edit("parameter 0", CODE + r"ld\.param\.(\w\d\d)\s+([^,;]+),\s*\[\w+\];", lambda match: f"mov.{match[1]} \t{match[2]}, 0;"),
    _edit("another parameter", CODE + r"ld\.param\.\w+\s+[^,;]+,\s*\[(\w+)\];", _neighbour),
    _edit("wide product cut", ALONE + r"mul\.wide\.([su])32" + THREE, _block("b32", r"mul.lo.\g<1>32 %mutant, \3, \4", WIDEN)),
    _edit("64-bit product cut", ALONE + r"mul\.lo\.s64" + THREE, _block("b64", r"mul.lo.s64 %mutant, \2, \3", CUT, r"mov.b64 \1, %mutant")),
    _edit("64-bit shift cut", ALONE + r"shl\.b64" + THREE, _block("b64", r"shl.b64 %mutant, \2, \3", CUT, r"mov.b64 \1, %mutant")),
    _edit(
        "64-bit index cut", ALONE + r"mad\.lo\.s64" + FOUR, _block("b64", r"mul.lo.s64 %mutant, \2, \3", CUT, r"add.s64 \1, %mutant, \4")
    ),
    _edit("sign lost", CODE + r"cvt\.s64\.s32\b", "cvt.u64.u32"),
    _edit("lanes not exchanged", CODE + r"shfl\.sync\.\w+\.(b32)\s+(%\w+)(?:\|%\w+)?,\s*([^,;]+),[^;]+;", _moved),
    _edit("other lanes", CODE + r"shfl\.sync\.(?:bfly|up|down)\.b32\s+[^,;]+,\s*[^,;]+,\s*(\d+),[^;]+;", _halved),
    _edit("address without offset", CODE + r"((?:ld|st)\.(?:global|shared)[^;\[]*\[%\w+)\+-?\d+(\][^;]*;)", r"\1\2"),
)


def find(ptx: str) -> list[Mutation]:
    """Find every mutation of a text, by kind, in the order of the text."""
    return [mutation for kind in KINDS for mutation in kind.sites(ptx)]


def drawn(kernel: str, mutations: list[Mutation], number: int, seed: int) -> list[Mutation]:
    """Draw mutations of all kinds in turn, so that a kind with thousands of sites leaves room for the others; equal for an equal seed."""
    by_kind: dict[str, list[Mutation]] = defaultdict(list)
    for mutation in mutations:
        by_kind[mutation.kind].append(mutation)
    for kind, sites in by_kind.items():
        random.Random(f"{seed} {kernel} {kind}").shuffle(sites)
    turns = [(turn, kind) for kind, sites in by_kind.items() for turn in range(len(sites))]
    return [by_kind[kind][turn] for turn, kind in sorted(turns, key=lambda item: item[0])[:number]]
