"""Decoders of JSON values, which say where a value stands, what was found and what is expected."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

_MAX_INT32 = (1 << 31) - 1


class _Mismatch(Exception):
    """Error of a value in a file: where it stands, the value found, and the value expected."""

    def __init__(self, where: str, found: object, expected: str) -> None:
        shown = repr(found)
        super().__init__(f"{where}: found {shown if len(shown) <= 120 else shown[:117] + '...'}, expected {expected}")


_Decoder = Callable[[Any, str], Any]


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value or not value.isprintable():
        raise _Mismatch(where, value, "a non-empty string of printable characters")
    return value


def _setting(value: Any, where: str) -> str | int:
    if not isinstance(value, str | int) or (isinstance(value, str) and not value.isprintable()):
        raise _Mismatch(where, value, "a string of printable characters, an integer, true or false")
    return value


def _matching(pattern: str, expected: str) -> _Decoder:
    def decode(value: Any, where: str) -> str:
        if not isinstance(value, str) or re.fullmatch(pattern, value) is None:
            raise _Mismatch(where, value, expected)
        return value

    return decode


def _one_of(allowed: tuple[str, ...]) -> _Decoder:
    def decode(value: Any, where: str) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise _Mismatch(where, value, f"one of {', '.join(allowed)}")
        return value

    return decode


def _boolean(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise _Mismatch(where, value, "true or false")
    return value


def _integer(least: int) -> _Decoder:
    def decode(value: Any, where: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MAX_INT32:
            raise _Mismatch(where, value, f"an integer >= {least} of 32 bits")
        return value

    return decode


def _dim3(value: Any, where: str) -> tuple[int, int, int]:
    if not isinstance(value, list) or len(value) != 3:
        raise _Mismatch(where, value, "a list of three integers")
    x, y, z = (_integer(1)(extent, f"{where}[{axis}]") for axis, extent in enumerate(value))
    return x, y, z


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _Mismatch(where, value, "an object")
    return value


def _mapping(item: _Decoder) -> _Decoder:
    def decode(value: Any, where: str) -> dict[str, Any]:
        return {_string(key, where): item(member, f"{where}.{key}") for key, member in _object(value, where).items()}

    return decode


def _sequence(item: _Decoder) -> _Decoder:
    def decode(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _Mismatch(where, value, "a list")
        return tuple(item(member, f"{where}[{index}]") for index, member in enumerate(value))

    return decode


def _record(make: Callable[..., Any], **fields: _Decoder) -> _Decoder:
    def decode(value: Any, where: str) -> Any:
        found = _object(value, where)
        if found.keys() != fields.keys():
            raise _Mismatch(where, sorted(found), f"exactly the fields {sorted(fields)}")
        return make(**{name: decode_field(found[name], f"{where}.{name}") for name, decode_field in fields.items()})

    return decode


_SHA256 = _matching(r"[0-9a-f]{64}", "64 hexadecimal digits")


def _without_format(raw: Any, version: int) -> dict[str, Any]:
    """Return the fields of a file of this format version."""
    fields = dict(_object(raw, "the file"))
    found = fields.pop("format", None)
    if found != version:
        raise _Mismatch("format", found, f"{version}, the one that this version reads")
    return fields
