"""Reader of SASS as nvdisasm prints it: instruction counts, and the instructions that overlap products."""

from __future__ import annotations

import re
from collections import Counter

_SASS_LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Za-z0-9_.]*)")
_SASS_FUNCTION = re.compile(r"^([\w$.]+):$")
_HELPER = "$__internal_"  # prefix of functions that ptxas adds, such as traps for misuse of tensor memory


def read_sass(text: str) -> Counter[str]:
    """Count the instructions, with their modifiers, in nvdisasm's output. Helper functions that ptxas adds are left out."""
    counts: Counter[str] = Counter()
    in_helper = False
    for line in text.splitlines():
        label = _SASS_FUNCTION.match(line)
        if label is not None and not label[1].startswith(".L_"):
            in_helper = label[1].startswith(_HELPER)
        elif not in_helper:
            counts.update(_SASS_LINE.findall(line))
    return counts


_PRODUCT = re.compile(r"[A-Z]GMMA\b")
_WAIT_FOR_ALL = re.compile(r"WARPGROUP\.DEPBAR\S* gsb0, 0x0\b")


def read_overlap(text: str) -> Counter[str]:
    """Count the instructions between a WGMMA and the next wait for all WGMMAs in nvdisasm's output.

    A warp executes them while its products are in flight, as far as it does not branch.
    """
    counts: Counter[str] = Counter()
    in_flight = False
    for line in text.splitlines():
        opcodes = _SASS_LINE.findall(line)
        if any(_PRODUCT.match(opcode) for opcode in opcodes):
            in_flight = True
        elif _WAIT_FOR_ALL.search(line):
            in_flight = False
        elif in_flight:
            counts.update(opcodes)
    return counts
