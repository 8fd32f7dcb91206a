"""Machine code for tests: listings of built kernels, and edits of their control codes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from cute_mla.runtime.artifacts import artifacts_folder
from cute_mla.simulator.sass.listing import Control, Listing, SassInstruction, read_listing
from cute_mla.simulator.sass.text_cache import disassembly


@cache
def listing_of(kernel: str) -> Listing:
    """Return the machine code of a built kernel."""
    return read_listing(disassembly((artifacts_folder() / f"{kernel}.cubin").read_bytes()))


def edited(listing: Listing, index: int, **control: Any) -> Listing:
    """Return the listing with other fields in one instruction's control code."""
    code: list[SassInstruction] = list(listing.instructions)
    code[index] = replace(code[index], control=replace(code[index].control, **control))
    return replace(listing, instructions=tuple(code))


def program(*lines: tuple[str, Control]) -> Listing:
    """Return a listing of instructions with these control codes; instruction n has the label .L_n."""
    text = ["k:"]
    for index, (code, control) in enumerate(lines):
        text.append(f".L_{index}:")
        boards = control.write_board << 5 | control.read_board << 8
        high = (control.stall | (not control.yields) << 4 | boards | control.waits << 11) << 41
        text += [f"  /*{index * 16:04x}*/  {code} ; /* 0x{0:016x} */", f"  /* 0x{high:016x} */"]
    return read_listing("\n".join(text))
