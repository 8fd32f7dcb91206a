"""Edits that break a PTX text, and the sites where they apply."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Mutation:
    """One site of an edit. line: 1-based line of the PTX text. number: among the sites of the edit, from 0."""

    kind: str
    number: int
    line: int
    start: int
    stop: int
    replacement: str

    def apply(self, ptx: str) -> str:
        """Return the broken text. Lines keep their numbers."""
        return ptx[: self.start] + self.replacement + ptx[self.stop :]


@dataclass(frozen=True)
class Edit:
    """A way to break PTX. replacement: as in re.sub; empty deletes the match. A function of the match may return None for no site."""

    name: str
    pattern: re.Pattern[str]
    replacement: str | Callable[[re.Match[str]], str | None] = ""

    def sites(self, ptx: str) -> list[Mutation]:
        """Find every site of a text, in its order. Comments do not count."""
        code = _without_comments(ptx)
        found: list[Mutation] = []
        line, counted = 1, 0  # counting from the start for each of thousands of matches would take seconds
        for match in self.pattern.finditer(code):
            text = match.expand(self.replacement) if isinstance(self.replacement, str) else self.replacement(match)
            if text is None:
                continue
            line, counted = line + code.count("\n", counted, match.start()), match.start()
            text += "\n" * (match[0].count("\n") - text.count("\n"))  # lines behind it keep their numbers
            found.append(Mutation(self.name, len(found), line, match.start(), match.end(), text))
        return found


@lru_cache(maxsize=1)
def _without_comments(ptx: str) -> str:
    """Return a text with blanks in place of its comments. All kinds of mutations of a text ask for it."""
    return "\n".join(_without_comment(line) if "//" in line else line for line in ptx.split("\n"))


def _without_comment(line: str) -> str:
    code = line[: line.index("//")]
    return code + " " * (len(line) - len(code))


def apply_all(ptx: str, mutations: Iterable[Mutation]) -> str:
    """Return the text broken at all of these sites at once."""
    for mutation in sorted(mutations, key=lambda mutation: -mutation.start):
        ptx = mutation.apply(ptx)
    return ptx


def _edit(name: str, pattern: str, replacement: str = "") -> Edit:
    return Edit(name, re.compile(pattern), replacement)


GUARD = r"(?:@!?%\w+\s+)?(?<![\w.])"  # and the beginning of an opcode
PHASE = r"mbarrier\.(?:try|test)_wait\S*\s+(%?\w+)\s*,[^;]*;"
EXPECT = r"mbarrier\.arrive\.expect_tx((?:\.\w+|::\w+)*)(\s+[^;]*\])\s*,\s*[^;]+;"
# bar.warp.sync is left out: the lanes of a warp share what they know (simulator/README.md).
KINDS = (
    _edit("arrive deleted", GUARD + r"mbarrier\.arrive(?!\.expect_tx)[^;]*;"),
    _edit("copies' arrive deleted", GUARD + r"cp\.async\.mbarrier\.arrive[^;]*;"),
    _edit("expect_tx deleted", GUARD + EXPECT),
    _edit("expect_tx without bytes", EXPECT, r"mbarrier.arrive\1\2;"),
    _edit("expect_tx of 16 bytes", EXPECT, r"mbarrier.arrive.expect_tx\1\2, 16;"),
    _edit("init of one more", r"(mbarrier\.init[^;]*\])\s*,\s*([^;]+);", r"{ .reg .b32 %mutant; add.u32 %mutant, \2, 1; \1, %mutant; }"),
    _edit("phase not waited for", PHASE, r"setp.eq.u32 \1, 0, 0;"),
    _edit("bar.sync deleted", GUARD + r"bar(?:rier)?\.(?:cta\.)?(?:sync|red)[^;]*;"),
    _edit("bar.sync only arrives", r"bar\.sync(\s+[^,;]+,[^;]*;)", r"bar.arrive\1"),
    _edit("bar.arrive deleted", GUARD + r"bar(?:rier)?\.(?:cta\.)?arrive[^;]*;"),
    _edit("cluster arrive deleted", GUARD + r"barrier\.cluster\.arrive[^;]*;"),
    _edit("cluster wait deleted", GUARD + r"barrier\.cluster\.wait[^;]*;"),
    _edit("proxy fence deleted", GUARD + r"fence\.proxy[^;]*;"),
    _edit("other fence deleted", GUARD + r"(?:fence\.(?!proxy)|membar)[^;]*;"),
    _edit("wgmma.fence deleted", r"wgmma\.fence[^;]*;"),
    _edit("tcgen05.fence deleted", r"tcgen05\.fence[^;]*;"),
    _edit("wgmma commit deleted", r"wgmma\.commit_group[^;]*;"),
    _edit("wgmma wait deleted", r"wgmma\.wait_group[^;]*;"),
    _edit("wgmma wait 1 looser", r"(wgmma\.wait_group\S*\s+)0;", r"\g<1>1;"),
    _edit("tcgen05 commit deleted", GUARD + r"tcgen05\.commit[^;]*;"),
    _edit("tcgen05 commit to one CTA", r"(tcgen05\.commit[^;]*\]\s*,\s*)%rs\d+;", r"\g<1>1;"),
    _edit("tcgen05.wait::ld deleted", r"tcgen05\.wait::ld[^;]*;"),
    _edit("tcgen05.wait::st deleted", r"tcgen05\.wait::st[^;]*;"),
    _edit("copy commit deleted", GUARD + r"cp\.async\.(?:bulk\.)?commit_group;"),
    _edit("copy wait deleted", GUARD + r"cp\.async\.(?:bulk\.)?wait_(?:group|all)[^;]*;"),
    _edit("grid wait deleted", r"griddepcontrol\.wait;"),
)


def find(ptx: str) -> list[Mutation]:
    """Find every mutation of a text, by kind, in the order of the text."""
    return [mutation for kind in KINDS for mutation in kind.sites(ptx)]
