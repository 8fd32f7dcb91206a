"""Damaged PTX is a PtxError or an UnsupportedInstruction, never another error, and never takes long."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress

import pytest

from cute_mla.runtime.artifacts import load_artifacts
from cute_mla.simulator import PtxError, UnsupportedInstruction, load_module
from tests.support.shifted_copy import PTX

MOST_SECONDS = 20.0  # of one text, on a busy machine; they take a tenth of a second
CHARACTERS = "%{}[]()<>;:,.|!@_$+-*/\\\"'09azAZ \n\t\0\x7fé"


def shortened(text: str, draw: random.Random) -> str:
    """Cut off the end."""
    return text[: draw.randrange(len(text))]


def without_lines(text: str, draw: random.Random) -> str:
    """Delete some lines."""
    lines = text.splitlines(keepends=True)
    for _ in range(draw.randrange(1, 4)):
        del lines[draw.randrange(len(lines))]
    return "".join(lines)


def with_characters(text: str, draw: random.Random) -> str:
    """Insert or replace some characters."""
    characters = list(text)
    for _ in range(draw.randrange(1, 6)):
        place = draw.randrange(len(characters))
        characters[place : place + draw.randrange(3)] = draw.choice(CHARACTERS)
    return "".join(characters)


def without_words(text: str, draw: random.Random) -> str:
    """Exchange or drop words, which leaves more of the grammar whole."""
    words = text.split(" ")
    for _ in range(draw.randrange(1, 4)):
        words[draw.randrange(len(words))] = draw.choice(["", draw.choice(words)])
    return " ".join(words)


def refused_or_read(text: str) -> None:
    """Load a text. Fail on any error but those of PTX, and where it takes long."""
    started = time.process_time()
    with suppress(PtxError, UnsupportedInstruction):
        load_module(text)
    assert time.process_time() - started < MOST_SECONDS


@pytest.mark.parametrize("damage", [shortened, without_lines, with_characters, without_words])
def test_damaged_text(damage: Callable[[str, random.Random], str]) -> None:
    loaded = load_artifacts()
    whole = loaded.ptx(loaded.entry("cache_write", "sm90", "b16_latent"))
    for seed in range(150):
        draw = random.Random(seed)
        text = damage(whole if seed % 3 == 0 else PTX, draw)
        try:
            refused_or_read(text)
        except Exception as error:
            raise AssertionError(f"{damage.__name__} with seed {seed}") from error


ENTRY = ".visible .entry k(\n.param .u64 p\n)\n{{\n.reg .b32 %r<9>;\n{0}\nret;\n}}\n"


@pytest.mark.parametrize(
    "text",
    [
        ".section",
        ".visible .entry",
        ".visible .entry k(",
        ".visible .entry ()\n{}",
        ENTRY.format("mov.b32 %r1, " + "{" * 5_000 + "}" * 5_000 + ";"),
        ENTRY.format("mov.b32 %r1, " + "9" * 5_000 + ";"),
        ENTRY.format(".reg .b32 %x<" + "9" * 5_000 + ">;"),
        ENTRY.format(".shared .align 0 .b8 s[4];"),
        ENTRY.format("mov.b32 %r1, ;"),
        ENTRY.format("mov.b32 %r1,, %r2;"),
        ENTRY.format("mov.b32 %r1, %r2|%r3|%r4;"),
        ENTRY.format("ld.global.b32 %r1, [];"),
        ENTRY.format("ld.global.b32 %r1, [%r2+zz];"),
        ENTRY.format("bra NOWHERE;"),
        ENTRY.format("bra;"),
        ENTRY.format("@%r1 bra L; L:"),
        ENTRY.format("L: L: bra L;"),
        ENTRY.format("mov.b32 %r1, 08;"),
        ".visible .entry k(.param .u64 p) .reqntid 1, x, 1 { ret; }",
        ".visible .entry k(.param .u64 p) .reqntid { ret; }",
        ".visible .entry k(.param .align 0 .b8 p[9]) { ret; }",
        "\0",
        "}" * 100,
    ],
)  # fmt: skip
def test_no_ptx(text: str) -> None:
    refused_or_read(text)
