"""Natural loops of machine code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .flow import Span


@dataclass(frozen=True)
class Loop:
    """A natural loop. header: the block that every iteration enters. blocks: all its blocks, with those of inner loops."""

    header: int
    blocks: frozenset[int]


def natural_loops(blocks: Sequence[Span]) -> tuple[Loop, ...]:
    """Return the loops of the code that is reached, by their headers. Loops of one header are one loop."""
    dominators = _dominators(blocks)
    bodies: dict[int, set[int]] = {}
    before = _predecessors(blocks)
    for number, block in enumerate(blocks):
        for header in block.successors:
            if dominators[number] >> header & 1:
                body = bodies.setdefault(header, {header})
                work = [number]
                while work:
                    item = work.pop()
                    if item not in body:
                        body.add(item)
                        work += [other for other in before[item] if dominators[other]]
    return tuple(Loop(header, frozenset(body)) for header, body in sorted(bodies.items()))


def _predecessors(blocks: Sequence[Span]) -> list[list[int]]:
    before: list[list[int]] = [[] for _ in blocks]
    for number, block in enumerate(blocks):
        for successor in block.successors:
            before[successor].append(number)
    return before


def _dominators(blocks: Sequence[Span]) -> list[int]:
    """Return the dominators of each block as a bit mask; 0 for a block that is not reached from the first."""
    order = _reached(blocks)
    before = _predecessors(blocks)
    every = (1 << len(blocks)) - 1
    masks = [0] * len(blocks)
    for number in order:
        masks[number] = every
    masks[0] = 1
    changed = True
    while changed:
        changed = False
        for number in order[1:]:
            mask = every
            for other in before[number]:
                if masks[other]:
                    mask &= masks[other]
            mask |= 1 << number
            if mask != masks[number]:
                masks[number] = mask
                changed = True
    return masks


def _reached(blocks: Sequence[Span]) -> list[int]:
    """Return the blocks that the first one leads to, in reverse postorder."""
    found: list[int] = []
    seen = {0}
    stack = [(0, iter(blocks[0].successors))]
    while stack:
        number, successors = stack[-1]
        following = next((item for item in successors if item not in seen), None)
        if following is None:
            found.append(number)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(blocks[following].successors)))
    return found[::-1]
