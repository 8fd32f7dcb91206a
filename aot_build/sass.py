"""Figures of machine code: instruction counts, and the instructions that overlap products."""

from __future__ import annotations

from collections import Counter

from cute_mla.simulator.sass.listing import INSTRUCTION_BYTES, Immediate, Listing, SassInstruction

_HELPER = "$__internal_"  # prefix of functions that ptxas adds, such as traps for misuse of tensor memory
_LOCAL = ".L_"  # prefix of labels inside a function


def count_opcodes(listing: Listing) -> Counter[str]:
    """Count the instructions by opcode with its modifiers. Helper functions that ptxas adds are left out."""
    helper_at = {address: name.startswith(_HELPER) for name, address in listing.labels.items() if not name.startswith(_LOCAL)}
    counts: Counter[str] = Counter()
    in_helper = False
    for index, ins in enumerate(listing.instructions):
        in_helper = helper_at.get(index * INSTRUCTION_BYTES, in_helper)
        if not in_helper:
            counts[ins.opcode] += 1
    return counts


def count_overlap(listing: Listing) -> Counter[str]:
    """Count the instructions between a WGMMA and the next wait for all WGMMAs.

    A warp executes them while its products are in flight, as far as it does not branch.
    """
    counts: Counter[str] = Counter()
    in_flight = False
    for ins in listing.instructions:
        if ins.base.endswith("GMMA"):
            in_flight = True
        elif _waits_for_all(ins):
            in_flight = False
        elif in_flight:
            counts[ins.opcode] += 1
    return counts


def _waits_for_all(ins: SassInstruction) -> bool:
    return ins.opcode.startswith("WARPGROUP.DEPBAR") and ins.operands[-1] == Immediate(0)
