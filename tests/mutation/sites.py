"""What is broken in a PTX text, and how."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A way to break an instruction. replacement: as in re.sub; empty deletes it."""

    name: str
    pattern: re.Pattern[str]
    replacement: str = ""


@dataclass(frozen=True)
class Mutation:
    """One instruction broken in one way. line: 1-based line of the PTX text. number: among those of its kind, from 0."""

    kind: str
    number: int
    line: int
    start: int
    stop: int
    replacement: str

    def apply(self, ptx: str) -> str:
        """The broken text. Lines keep their numbers."""
        return ptx[: self.start] + self.replacement + ptx[self.stop :]


def _kind(name: str, pattern: str, replacement: str = "") -> Kind:
    return Kind(name, re.compile(pattern), replacement)


GUARD = r"(?:@!?%\w+\s+)?(?<![\w.])"  # and the beginning of an opcode
PHASE = r"mbarrier\.(?:try|test)_wait\S*\s+(%?\w+)\s*,[^;]*;"
EXPECT = r"mbarrier\.arrive\.expect_tx((?:\.\w+|::\w+)*)(\s+[^;]*\])\s*,\s*[^;]+;"
# bar.warp.sync is left out: the lanes of a warp share what they know (simulator/README.md).
KINDS = (
    _kind("arrive deleted", GUARD + r"mbarrier\.arrive(?!\.expect_tx)[^;]*;"),
    _kind("copies' arrive deleted", GUARD + r"cp\.async\.mbarrier\.arrive[^;]*;"),
    _kind("expect_tx deleted", GUARD + EXPECT),
    _kind("expect_tx without bytes", EXPECT, r"mbarrier.arrive\1\2;"),
    _kind("expect_tx of 16 bytes", EXPECT, r"mbarrier.arrive.expect_tx\1\2, 16;"),
    _kind("init of one more", r"(mbarrier\.init[^;]*\])\s*,\s*([^;]+);", r"{ .reg .b32 %mutant; add.u32 %mutant, \2, 1; \1, %mutant; }"),
    _kind("phase not waited for", PHASE, r"setp.eq.u32 \1, 0, 0;"),
    _kind("bar.sync deleted", GUARD + r"bar(?:rier)?\.(?:cta\.)?(?:sync|red)[^;]*;"),
    _kind("bar.sync only arrives", r"bar\.sync(\s+[^,;]+,[^;]*;)", r"bar.arrive\1"),
    _kind("bar.arrive deleted", GUARD + r"bar(?:rier)?\.(?:cta\.)?arrive[^;]*;"),
    _kind("cluster arrive deleted", GUARD + r"barrier\.cluster\.arrive[^;]*;"),
    _kind("cluster wait deleted", GUARD + r"barrier\.cluster\.wait[^;]*;"),
    _kind("proxy fence deleted", GUARD + r"fence\.proxy[^;]*;"),
    _kind("other fence deleted", GUARD + r"(?:fence\.(?!proxy)|membar)[^;]*;"),
    _kind("wgmma.fence deleted", r"wgmma\.fence[^;]*;"),
    _kind("tcgen05.fence deleted", r"tcgen05\.fence[^;]*;"),
    _kind("wgmma commit deleted", r"wgmma\.commit_group[^;]*;"),
    _kind("wgmma wait deleted", r"wgmma\.wait_group[^;]*;"),
    _kind("wgmma wait 1 looser", r"(wgmma\.wait_group\S*\s+)0;", r"\g<1>1;"),
    _kind("tcgen05 commit deleted", GUARD + r"tcgen05\.commit[^;]*;"),
    _kind("tcgen05 commit to one CTA", r"(tcgen05\.commit[^;]*\]\s*,\s*)%rs\d+;", r"\g<1>1;"),
    _kind("tcgen05.wait::ld deleted", r"tcgen05\.wait::ld[^;]*;"),
    _kind("tcgen05.wait::st deleted", r"tcgen05\.wait::st[^;]*;"),
    _kind("copy commit deleted", GUARD + r"cp\.async\.(?:bulk\.)?commit_group;"),
    _kind("copy wait deleted", GUARD + r"cp\.async\.(?:bulk\.)?wait_(?:group|all)[^;]*;"),
    _kind("grid wait deleted", r"griddepcontrol\.wait;"),
)


def find(ptx: str) -> list[Mutation]:
    """Every mutation of a text, by kind, in the order of the text."""
    code = re.sub(r"//[^\n]*", lambda comment: " " * len(comment[0]), ptx)
    starts = [0] + [match.end() for match in re.finditer("\n", code)]
    found = []
    for kind in KINDS:
        for number, match in enumerate(kind.pattern.finditer(code)):
            line = code.count("\n", 0, match.start()) + 1
            assert starts[line - 1] <= match.start()
            lines = match[0].count("\n")  # PTX lines that an instruction goes over
            found.append(Mutation(kind.name, number, line, match.start(), match.end(), match.expand(kind.replacement) + "\n" * lines))
    return found
