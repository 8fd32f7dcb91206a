"""Loader of edited PTX: parses, checks and translates only what an edit of a kernel changes.

A mutant differs from its kernel in a few lines. A Reloader keeps the instructions of the kernel and the source written for its blocks, and
reads only the chunks of a mutant that differ. Control flow is analysed anew. Registers keep their rows, new ones get rows behind them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from cute_mla.simulator import Module, PtxError, load_module
from cute_mla.simulator.codegen.control_flow import Block, Flow, accumulator_groups, build_flow, desugar
from cute_mla.simulator.codegen.module import Entry, check_operands, collection_paused, make_entry
from cute_mla.simulator.codegen.translator import Translator, Written
from cute_mla.simulator.frontend.layout import Layout, make_layout
from cute_mla.simulator.frontend.ptx import EntryText, Instruction, parse_ptx
from cute_mla.simulator.isa.table import Decoded, decode

_COMMENT = re.compile(r"//.*")
_LABEL = re.compile(r"[$%A-Za-z_][\w$]*\s*:(?!:)")
_SCOPE = re.compile(r"(?<![^;{}:])\{")  # in text without spaces; the brace of a vector follows a comma or an opcode


@dataclass(frozen=True)
class Chunk:
    """Lines [first, stop) of a text, from 0, that begin and end between statements, outside of nested scopes.

    instructions: as parsed. labels: with the number of the instruction that follows each, from 0 in the chunk.
    blank: text to parse where other chunks are read. It has the declarations and labels that they see, and opens as many scopes, since
    their number names their registers.
    """

    first: int
    stop: int
    instructions: list[Instruction]
    labels: dict[str, int]
    blank: str


def _bare(line: str) -> str:
    """Return a line without its comment and spaces."""
    return re.sub(r"\s+", "", _COMMENT.sub("", line))


def _depth(bare: str) -> int:
    return bare.count("{") - bare.count("}")


def _ends(bare: str) -> bool:
    return bare.endswith((";", "}", ":"))


def _scopes(lines: Sequence[str]) -> int:
    return len(_SCOPE.findall("".join(map(_bare, lines))))


def _labels(lines: Sequence[str]) -> int:
    return sum(len(_LABEL.findall(_COMMENT.sub("", line))) for line in lines)


def _ranges(lines: Sequence[str], begin: int) -> list[tuple[int, int]]:
    """Return the lines of each chunk of a body that begins at a line. Behind the last chunk is the closing brace."""
    found = []
    depth, start = 0, begin
    for number in range(begin, len(lines)):
        bare = _bare(lines[number])
        depth += _depth(bare)
        if depth < 0:
            break
        if depth == 0 and _ends(bare):
            found.append((start, number + 1))
            start = number + 1
    return found


class Reloader:
    """Loader of texts that are edits of one PTX text, which has one entry and nothing unsupported."""

    def __init__(self, ptx: str) -> None:
        self.lines = ptx.split("\n")
        self.begin = self.lines.index("{") + 1
        with collection_paused():
            (self.text,) = parse_ptx(ptx).values()
            instructions, _ = desugar(self.text)
            self.layout = make_layout(self.text, accumulator_groups(instructions))
            self.decoded = {id(item.instruction.operands): item for item in map(decode, instructions) if item is not None}
        self.chunks = self._chunks()
        self.chunk_of = {number: index for index, chunk in enumerate(self.chunks) for number in range(chunk.first, chunk.stop)}
        self.scopes = _scopes(self.lines[self.begin :])
        self.written: dict[tuple[object, ...], Written] = {}

    def _chunks(self) -> list[Chunk]:
        """Return the chunks of the body. The parser keeps instructions and labels in the order of the text."""
        ranges = _ranges(self.lines, self.begin)
        by_line = {number: index for index, (first, stop) in enumerate(ranges) for number in range(first, stop)}
        instructions: list[list[Instruction]] = [[] for _ in ranges]
        for instruction in self.text.instructions:
            instructions[by_line[instruction.line - 1]].append(instruction)
        labels = iter(self.text.labels.items())
        chunks, start = [], 0
        for (first, stop), own in zip(ranges, instructions, strict=True):
            lines = self.lines[first:stop]
            places = {name: index - start for name, index in (next(labels) for _ in range(_labels(lines)))}
            chunks.append(Chunk(first, stop, own, places, _blank(lines, places)))
            start += len(own)
        return chunks

    def load(self, edited: str) -> Module:
        """Return the module of an edited text. Raises what load_module raises.

        Loaded whole are texts with other declarations or another number of lines, and those that cannot be read.
        """
        with collection_paused():
            entry = self._entry(edited.split("\n"))
        return load_module(edited) if entry is None else Module({entry.name: entry})

    def _entry(self, lines: list[str]) -> Entry | None:
        text = self._merged(lines)
        if text is None:
            return None
        instructions, labels = desugar(text)
        decoded = [self.decoded.get(id(instruction.operands)) or decode(instruction) for instruction in instructions]
        known = [item for item in decoded if item is not None]
        layout = _extended(self.layout, text)
        problems: dict[str, list[int]] = {}
        check_operands([item for item in known if not self.has(item)], layout, problems)
        if problems or len(known) < len(decoded):
            return None
        flow = build_flow(known, labels, layout)
        return make_entry(text, flow, layout, _Translator(self, text.name, flow, layout))

    def has(self, item: Decoded) -> bool:
        """Return True for an instruction of the unedited text."""
        return self.decoded.get(id(item.instruction.operands)) is item

    def _merged(self, lines: list[str]) -> EntryText | None:
        """Return a text of which only the chunks that differ are parsed."""
        if len(lines) != len(self.lines):
            return None
        differing = [number for number, (line, own) in enumerate(zip(lines, self.lines, strict=True)) if line != own]
        if any(number not in self.chunk_of and _bare(lines[number]) != _bare(self.lines[number]) for number in differing):
            return None
        edited = {self.chunk_of[number] for number in differing if number in self.chunk_of}
        pieces = [chunk.blank for chunk in self.chunks]
        for index in sorted(edited):
            piece = self._piece(self.chunks[index], lines)
            if piece is None:
                return None
            pieces[index] = piece
        try:
            (read,) = parse_ptx("\n".join([*self.lines[: self.begin], "".join(pieces) + "}"])).values()
        except PtxError:
            return None
        return self._spliced(read, lines, edited)

    def _piece(self, chunk: Chunk, lines: list[str]) -> str | None:
        """Return the text of an edited chunk; None if it declares something or no longer ends between statements."""
        own, before = lines[chunk.first : chunk.stop], self.lines[chunk.first : chunk.stop]
        bare = "".join(map(_bare, own))
        if _declares(own) or _declares(before) or _depth(bare) or (bare and not _ends(bare)):
            return None
        shift = "{}" * self.scopes if _scopes(own) != _scopes(before) else ""  # names of registers that no other scope has
        return shift + "\n".join(own) + "\n"

    def _spliced(self, read: EntryText, lines: list[str], edited: set[int]) -> EntryText:
        """Return the unedited text with the edited chunks of a text that was read with blanks for the others."""
        new: dict[int, list[Instruction]] = {index: [] for index in edited}
        for instruction in read.instructions:
            new[self.chunk_of[instruction.line - 1]].append(instruction)
        spliced = replace(read, instructions=[], labels={}, registers={**self.text.registers, **read.registers})
        labels, read_before = iter(read.labels.items()), 0
        for index, chunk in enumerate(self.chunks):
            start = len(spliced.instructions)
            if index in edited:
                for name, place in (next(labels) for _ in range(_labels(lines[chunk.first : chunk.stop]))):
                    spliced.labels[name] = start + place - read_before
                read_before += len(new[index])
                spliced.instructions += new[index]
            else:
                for name, place in chunk.labels.items():
                    if "." not in name:
                        next(labels)
                    spliced.labels[name] = start + place
                spliced.instructions += chunk.instructions
        return spliced


@lru_cache(4)
def _reloader(ptx: str) -> Reloader:
    return Reloader(ptx)


@lru_cache(1)
def load_edited(ptx: str, edited: str) -> Module:
    """Return the module of an edit of a PTX text, of which only what the edit changes is parsed and translated."""
    return _reloader(ptx).load(edited)


def _declares(lines: Sequence[str]) -> bool:
    """Return True for a chunk with a declaration that others see."""
    return any(line.lstrip().startswith(".") for line in lines) and "{" not in "".join(map(_bare, lines))


def _blank(lines: Sequence[str], labels: dict[str, int]) -> str:
    if _declares(lines):
        return "\n".join(lines) + "\n"
    return "{}" * _scopes(lines) + "".join(f"{name}:" for name in labels if "." not in name) + "\n" * len(lines)


def _extended(layout: Layout, text: EntryText) -> Layout:
    """Return a layout with rows for the registers of a text that have none."""
    new = [register for register in text.registers.values() if register.name not in layout.rows]
    if not new:
        return layout
    extended = replace(layout, rows=dict(layout.rows), sizes=dict(layout.sizes), starts={})
    for register in new:
        extended.place(register)
    extended.number(text.registers.values())
    return extended


class _Translator(Translator):
    """Translator of an edited text that writes a block of the unedited one only once."""

    def __init__(self, reloader: Reloader, name: str, flow: Flow, layout: Layout) -> None:
        super().__init__(name, flow, layout)
        self.reloader = reloader

    def written(self, block: Block, tainted: bool) -> Written:
        """Return the source of a block."""
        *items, last = block.instructions
        end: object = id(last)
        if last.spec.control == "bra":  # its label may have another name
            end = (last.instruction.guard, last.instruction.line, self.target(block) == block.index + 1)
        elif not self.reloader.has(last):
            return super().written(block, tainted)
        if not all(map(self.reloader.has, items)):
            return super().written(block, tainted)
        key = (tainted, end, *map(id, items))
        found = self.reloader.written.get(key)
        if found is None:
            found = self.reloader.written[key] = super().written(block, tainted)
        return found
