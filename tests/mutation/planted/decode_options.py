"""Bugs in what dense decode does with cu_seqlens_q, tree_mask, window and attn_sink: numbers and indices.

Each site is broken by itself: a number that several roles read is wrong in one of them.
"""

from __future__ import annotations

import re

from cute_mla.spec.dense_decode import DenseDecodeArguments
from cute_mla.spec.split_plan import UNIT_ALL_TOKENS, UNIT_BASE, UNIT_FIRST_TOKEN, UNIT_LATER, UNIT_REQUEST, UNIT_TOKENS
from tests.mutation.planted import patterns as ptx
from tests.mutation.planting import Bug, Group, Pick

_REGISTER = re.compile(r"%[a-z]+\d+")
_NEXT, _PREVIOUS = r"add.s32 \1, \1, 1;", r"add.s32 \1, \1, -1;"
_HIGHEST = 0x7FFFFFFF
_DIFFERENCE = r"sub\.s32 (\s*%r\d+), %r\d+, %r\d+;"


def fed_by(argument: str, steps: int) -> Pick:
    """Break each site that reads what at most so many instructions make of an argument, and of nothing that lies in memory."""
    parameter = DenseDecodeArguments._fields.index(argument)

    def pick(text: str, sites: Group) -> list[Group]:
        sources = _sources(text, parameter)
        return [[site] for site in sites if _is_fed(_REGISTER.findall(text[site.start : site.stop])[1:], sources, steps)]

    return pick


def _sources(text: str, parameter: int) -> dict[str, set[str]]:
    """Return for each register what the instructions that write it read; "" stands for the argument."""
    sources: dict[str, set[str]] = {}
    for instruction in re.sub(r"//[^\n]*", "", text).split(";"):
        registers = _REGISTER.findall(re.sub(r"@!?%p\d+", "", instruction))
        if registers and "ld.global" not in instruction and "ld.shared" not in instruction:
            argument = {""} if re.search(rf"ld\.param[^\[]*\[\w+_param_{parameter}\]", instruction) else set()
            sources.setdefault(registers[0], set()).update(registers[1:], argument)
    return sources


def _is_fed(registers: list[str], sources: dict[str, set[str]], steps: int) -> bool:
    reached = set(registers)
    for _ in range(steps):
        reached = reached.union(*(sources.get(register, set()) for register in reached))
    return "" in reached


def argument(name: str, argument_name: str, change: str) -> Bug:
    """Change an argument of 32 bits each time that it is read. change: PTX, in which group 1 is the register."""
    parameter = DenseDecodeArguments._fields.index(argument_name)
    return Bug(name, rf"(?<=ld\.param\.b32)(\s*%r\d+), (\[\w+_param_{parameter}\]);", rf"\g<1>, \2; {change}")


def unit(name: str, column: int, change: str) -> Bug:
    """Change an entry of the table of units each time that it is read. change: as in `argument`."""
    offset = rf"\+{4 * column}" if column else ""
    return Bug(name, rf"ld\.global\.b32 (\s*%r\d+), (\[%rd\d+{offset}\]);", rf"ld.global.b32 \1, \2; {change}", fed_by("units", 2))


UNITS = (
    unit("unit of another request", UNIT_REQUEST, _NEXT),
    unit("unit of the first request", UNIT_REQUEST, r"mov.b32 \1, 0;"),
    unit("unit that begins a token late", UNIT_FIRST_TOKEN, _NEXT),
    unit("unit that begins a token early", UNIT_FIRST_TOKEN, _PREVIOUS),
    unit("unit without missing tokens", UNIT_TOKENS, rf"mov.b32 \1, {_HIGHEST};"),
    unit("unit that lacks a token more", UNIT_TOKENS, _PREVIOUS),
    unit("last key of a unit hidden", UNIT_LATER, _NEXT),
    argument("last token out of reach", "total_q", _PREVIOUS),
)
# Where one CTA holds the rows of a unit, each request is one unit, of which no token is later.
SEVERAL_UNITS = (unit("keys of later tokens seen", UNIT_LATER, r"mov.b32 \1, 0;"),)
TREES_OF_UNITS = (
    unit("tree of the next token", UNIT_BASE, _NEXT),
    unit("tree of another request", UNIT_BASE, r"mov.b32 \1, 0;"),
    unit("tree of a token more", UNIT_ALL_TOKENS, _NEXT),
    unit("tree of a token less", UNIT_ALL_TOKENS, _PREVIOUS),
)
TREES = (
    Bug("next word of a tree", r"ld\.global\.b32 (\s*%rd\d+), (\[%rd\d+)\];", r"ld.global.b32 \1, \2+4];", fed_by("tree_mask", 4)),
    Bug(
        "next bit of a tree",
        r"(or\.b64 \s*(%rd\d+), [^;]*;(?:[^;]*;)?\s*shr\.u64 \s*(%rd\d+), \2, %r\d+;)",
        r"\1 shr.u64 \3, \3, 1;",
    ),
    Bug("tree that hides earlier keys", r"mov\.b64 (\s*%rd\d+), (?:4294967295|-4294967296);", r"mov.b64 \1, 0;"),
)
WINDOWS = (
    Bug("window of a key more", _DIFFERENCE, rf"\g<0> {_PREVIOUS}", fed_by("reach", 1)),
    Bug("window of a key less", _DIFFERENCE, rf"\g<0> {_NEXT}", fed_by("reach", 1)),
    argument("first key more seen", "sink_keys", _NEXT),
    argument("first key less seen", "sink_keys", _PREVIOUS),
    argument("no mask in a tile with one hidden key", "steady_keys", _NEXT),
    argument("values kept in a tile with one hidden key", "steady_values", _NEXT),
    Bug("skipped tile more", r"shr\.u32 (\s*%r\d+), (%r\d+), 6;", r"shr.u32 \1, \2, 6; add.s32 \1, \1, 1;", fed_by("reach", 3)),
)
SINKS = (
    Bug("sink in base 2", ptx.LOG2_E, ptx.ONE),
    Bug("sink of the next head", r"ld\.global\.b32 (\s*%r\d+), (\[%rd\d+)\];", r"ld.global.b32 \1, \2+4];", fed_by("attn_sink", 2)),
)

# Bugs of which some sites show nothing, and how many a kernel may have. Rows of missing tokens in the accumulators are never read. Of the
# others, some decide what follows the 128th tile of a unit or of a window in a batch-invariant call, of which smoke has one case each. Some
# say in each role whether a part begins behind the last visible tile: with a window, or units of one request, it does so under a plan of
# other lengths alone.
SILENT = {
    "unit without missing tokens": 1,
    "last token out of reach": 2,  # of trees, keys in the second half of a tile for half of a fragment's rows
    **dict.fromkeys(("unit of another request", "unit of the first request", "last key of a unit hidden"), 1),
    **dict.fromkeys(("window of a key more", "window of a key less", "skipped tile more"), 5),
    **dict.fromkeys(("first key more seen", "first key less seen", "keys of later tokens seen"), 4),
}
# Of kernels in which a role asks L2 for Q of the next unit, or for pages: others show nothing there.
_ASKS = dict.fromkeys(("unit that begins a token late", "unit that begins a token early", "unit that lacks a token more"), 1)
_AND_FOR_PAGES = {**_ASKS, **dict.fromkeys(("unit of another request", "unit of the first request"), 2)}
SILENT_OF = {
    **dict.fromkeys((f"dense_decode_sm120_{types}_rows64" for types in ("bf16", "bf16_fp8_cache")), _ASKS),
    "dense_decode_sm100_bf16_cluster2": _ASKS,
    "dense_decode_sm100_bf16_fp8_cluster2": _AND_FOR_PAGES,
    # Roles read a unit again. One that sees keys of later tokens shows nothing, all of them together do; of the others that is not known.
    "dense_decode_sm100_bf16_fp8_cache_cluster2": {
        "keys of later tokens seen": 10,
        **dict.fromkeys(("unit of another request", "unit of the first request", "last key of a unit hidden"), 3),
    },
}
OF_EVERY_CACHE = UNITS + SINKS
OF_16_BITS = (*OF_EVERY_CACHE, *TREES_OF_UNITS, *TREES, *WINDOWS)
WITHOUT_STEADY_VALUES = tuple(bug for bug in OF_16_BITS if not bug.name.startswith("values kept"))  # absent keys are zeros there
KERNELS: dict[str, tuple[Bug, ...]] = {
    "dense_decode_sm90_bf16_cluster1": OF_16_BITS,
    "dense_decode_sm90_bf16_cluster2": (*OF_16_BITS, *SEVERAL_UNITS),
    "dense_decode_sm100_bf16_cluster2": (*OF_16_BITS, *SEVERAL_UNITS),
    "dense_decode_sm120_bf16_cluster1": WITHOUT_STEADY_VALUES,
    "dense_decode_sm120_bf16_rows64": (*WITHOUT_STEADY_VALUES, *SEVERAL_UNITS),
    "dense_decode_sm120_bf16_fp8_cache_cluster1": OF_EVERY_CACHE,
    "dense_decode_sm120_bf16_fp8_cache_rows64": (*OF_EVERY_CACHE, *SEVERAL_UNITS),
    "dense_decode_sm90_bf16_fp8_cluster1": OF_EVERY_CACHE,
    "dense_decode_sm90_bf16_fp8_cluster2": (*OF_EVERY_CACHE, *SEVERAL_UNITS),
    "dense_decode_sm90_bf16_fp8_cache_cluster1": OF_EVERY_CACHE,
    "dense_decode_sm100_bf16_fp8_cluster2": (*OF_EVERY_CACHE, *SEVERAL_UNITS),
    "dense_decode_sm100_bf16_fp8_cache_cluster2": (*OF_EVERY_CACHE, *SEVERAL_UNITS),
}
