"""Listings of machine code written by hand."""

from __future__ import annotations

from cute_mla.simulator.sass.listing import INSTRUCTION_BYTES, Listing, read_listing


def listing_of(*lines: str) -> Listing:
    """Return the listing of instructions, which end in " ;", and labels, which end in ":". Every encoding is 0."""
    text, count = [], 0
    for line in lines:
        if line.endswith(":"):
            text.append(line)
            continue
        text += [f"  /*{count * INSTRUCTION_BYTES:04x}*/  {line} /* 0x{0:016x} */", f"  /* 0x{0:016x} */"]
        count += 1
    return read_listing("\n".join(text))
