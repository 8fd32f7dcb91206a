"""Ranges of integers, and what PTX instructions make of them. A range holds the signed values of a register's bits, ends included."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cute_mla.simulator.frontend.ptx import Instruction

Range = tuple[int, int]

BITS = {"p": 1, "h": 16, "r": 32, "d": 64}
TRUE, FALSE, EITHER = (1, 1), (0, 0), (0, 1)
INVERSE = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt", "lo": "hs", "hs": "lo", "hi": "ls", "ls": "hi"}
SWAPPED = {"eq": "eq", "ne": "ne", "lt": "gt", "gt": "lt", "le": "ge", "ge": "le"}
SIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def every(bits: int) -> Range:
    """Return the range of all values of so many bits."""
    return EITHER if bits == 1 else (-(1 << bits - 1), (1 << bits - 1) - 1)


def meet(a: Range, b: Range) -> Range | None:
    """Return what two ranges have in common, None for nothing."""
    low, high = max(a[0], b[0]), min(a[1], b[1])
    return (low, high) if low <= high else None


def hull(a: Range, b: Range) -> Range:
    """Return the smallest range with two others in it."""
    return min(a[0], b[0]), max(a[1], b[1])


def fits(value: Range, bits: int) -> bool:
    """Return whether a signed number of so many bits holds every value."""
    return meet(value, every(bits)) == value


def wrapped(value: Range, bits: int) -> Range:
    """Return the range of a result that is cut to so many bits."""
    return value if fits(value, bits) else every(bits)


def unsigned(value: Range, bits: int) -> Range:
    """Return the range of the same bits without a sign."""
    return value if value[0] >= 0 else (0, (1 << bits) - 1)


def product(a: Range, b: Range) -> Range:
    """Return the range of a product."""
    corners = [x * y for x in a for y in b]
    return min(corners), max(corners)


def comparable(name: str, kind: str, a: Range, b: Range) -> str | None:
    """Return the name of a comparison of signed numbers that decides as this one does, None for floats and unknown signs."""
    if name in ("eq", "ne"):
        return name if kind[0] in "sub" else None
    if kind[0] == "u":
        return SIGNED.get(name, name) if a[0] >= 0 and b[0] >= 0 else None
    return name if kind[0] == "s" else None


def decided(name: str, a: Range, b: Range) -> Range:
    """Return the range of a comparison of signed numbers."""
    holds = narrowed(name, a, b) is not None and narrowed(SWAPPED[name], b, a) is not None
    fails = narrowed(INVERSE[name], a, b) is not None and narrowed(SWAPPED[INVERSE[name]], b, a) is not None
    return EITHER if holds == fails else TRUE if holds else FALSE


def narrowed(name: str, value: Range, other: Range) -> Range | None:
    """Return the part of a range that may compare so with another, None for nothing."""
    low, high = value
    if name == "eq":
        return meet(value, other)
    if name == "ne" and other[0] == other[1]:
        low, high = low + (low == other[0]), high - (high == other[0])
    elif name in ("lt", "le"):
        high = min(high, other[1] - (name == "lt"))
    elif name in ("gt", "ge"):
        low = max(low, other[0] + (name == "gt"))
    return (low, high) if low <= high else None


def arithmetic(item: Instruction, values: Sequence[Range]) -> Range | None:
    """Return the range of the result of integers before it is cut to the register, None for any value."""
    root, *rest = item.opcode.split(".")
    kind = rest[-1] if rest else ""
    if root in ("mov", "selp", "ld"):
        return _chosen(root, rest, values)
    if root == "setp":
        name = comparable(rest[0], rest[1], values[0], values[1]) if len(rest) == 2 and len(values) == 2 else None
        return decided(name, values[0], values[1]) if name in INVERSE and name in SWAPPED else EITHER
    if kind == "pred":
        return _logic(root, values)
    if root == "cvt":
        return _converted(rest, values[0])
    if kind[:1] not in "sub" or not kind[1:].isdigit():
        return None
    operation = _OPERATIONS.get(root)
    return operation(rest, int(kind[1:]), values) if operation is not None else None


def _chosen(root: str, rest: Sequence[str], values: Sequence[Range]) -> Range | None:
    if root == "selp":
        return values[0] if values[2] == TRUE else values[1] if values[2] == FALSE else hull(values[0], values[1])
    if root == "mov":
        return values[0]
    narrow = {"u8": (0, 255), "b8": (0, 255), "u16": (0, 65535), "b16": (0, 65535), "s8": every(8), "s16": every(16), "s32": every(32)}
    return narrow.get(rest[-1])


def _logic(root: str, values: Sequence[Range]) -> Range | None:
    if root == "not":
        return 1 - values[0][1], 1 - values[0][0]
    if root in ("and", "or"):
        choose: Callable[[int, int], int] = min if root == "and" else max
        return choose(values[0][0], values[1][0]), choose(values[0][1], values[1][1])
    return values[0] if root == "mov" else EITHER


def _converted(rest: Sequence[str], value: Range) -> Range | None:
    kinds = [part for part in rest if part[0] in "suf" and part[1:].isdigit()]
    if len(kinds) != 2 or len(rest) != 2 or "f" in kinds[0] + kinds[1]:
        return None
    bits, source = int(kinds[0][1:]), int(kinds[1][1:])
    if source < 64:
        value = unsigned(wrapped(value, source), source) if kinds[1][0] == "u" else wrapped(value, source)
    return value if fits(value, bits) else unsigned(every(bits), bits) if kinds[0][0] == "u" else every(bits)


def _multiplied(rest: Sequence[str], bits: int, values: Sequence[Range]) -> Range | None:
    if rest[0] not in ("lo", "wide"):
        return None
    a, b = (unsigned(value, bits) if rest[-1][0] == "u" and rest[0] == "wide" else value for value in values[:2])
    total = product(a, b)
    return total if len(values) == 2 else (total[0] + values[2][0], total[1] + values[2][1])


def _divided(rest: Sequence[str], bits: int, values: Sequence[Range]) -> Range | None:
    (low, high), (least, most) = values
    if least < 1 or (rest[-1][0] == "u" and low < 0):
        return None
    corners = [abs(a) // b * (1 if a >= 0 else -1) for a in (low, high) for b in (least, most)]
    return min(corners), max(corners)


def _remainder(rest: Sequence[str], bits: int, values: Sequence[Range]) -> Range | None:
    (low, high), (least, most) = values
    if least < 1 or (rest[-1][0] == "u" and low < 0):
        return None
    return max(low, 1 - most) if low < 0 else 0, min(high, most - 1) if high > 0 else 0


def _and(rest: Sequence[str], bits: int, values: Sequence[Range]) -> Range | None:
    bounds = [high for low, high in values if low >= 0]
    return (0, min(bounds)) if bounds else None


def _or(rest: Sequence[str], bits: int, values: Sequence[Range]) -> Range | None:
    """Return what a union of bits may be: no less than a number, and at most the sum, if bits are added that are no sign."""
    (a, b), (c, d) = values
    if a >= 0 and c >= 0:
        return max(a, c), min(b + d, (1 << max(b, d).bit_length()) - 1)
    return (a, b + d) if c >= 0 else (c, b + d) if a >= 0 else None


def _xor(rest: Sequence[str], bits: int, values: Sequence[Range]) -> Range | None:
    found = _or(rest, bits, values)
    return (0, found[1]) if found is not None and min(values)[0] >= 0 else None


def _shifted(step: Callable[[int, int], int]) -> Callable[[Sequence[str], int, Sequence[Range]], Range | None]:
    def shift(rest: Sequence[str], bits: int, values: Sequence[Range]) -> Range | None:
        value, (least, most) = values
        if least < 0 or most >= bits:
            return None
        if step(2, 1) == 1 and rest[-1][0] != "s":
            value = unsigned(value, bits)
        corners = [step(number, count) for number in value for count in (least, most)]
        return min(corners), max(corners)

    return shift


def _extreme(choose: Callable[[int, int], int]) -> Callable[[Sequence[str], int, Sequence[Range]], Range | None]:
    def extreme(rest: Sequence[str], bits: int, values: Sequence[Range]) -> Range | None:
        (a, b), (c, d) = (unsigned(value, bits) if rest[-1][0] == "u" else value for value in values[:2])
        return choose(a, c), choose(b, d)

    return extreme


_OPERATIONS: dict[str, Callable[[Sequence[str], int, Sequence[Range]], Range | None]] = {
    "add": lambda rest, bits, values: (values[0][0] + values[1][0], values[0][1] + values[1][1]),
    "sub": lambda rest, bits, values: (values[0][0] - values[1][1], values[0][1] - values[1][0]),
    "neg": lambda rest, bits, values: (-values[0][1], -values[0][0]),
    "not": lambda rest, bits, values: (-1 - values[0][1], -1 - values[0][0]),
    "popc": lambda rest, bits, values: (0, bits),
    "mul": _multiplied,
    "mad": _multiplied,
    "div": _divided,
    "rem": _remainder,
    "and": _and,
    "or": _or,
    "xor": _xor,
    "shl": _shifted(lambda number, count: number << count),
    "shr": _shifted(lambda number, count: number >> count),
    "min": _extreme(min),
    "max": _extreme(max),
}
