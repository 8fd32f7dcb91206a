"""Instructions in which the lanes of a warp look at each other."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from ..frontend.ptx import Imm, Instruction
from ..numerics import elementwise
from ..state.registers import WARP
from ..state.window import Window
from .emitter import Emitter, Unsupported, pair_items
from .table import op, registers_of, runtime

Match = re.Match[str]
MAX_SHUFFLES = 64  # patterns that a window caches


def member_mask(ins: Instruction, index: int) -> None:
    """Refuse member masks other than the full one (or all live lanes)."""
    mask = ins.operands[index]
    if not (isinstance(mask, Imm) and int(mask.value) & 0xFFFFFFFF == 0xFFFFFFFF):
        raise Unsupported("a member mask other than -1")


@op(r"shfl.sync.(?P<m>idx|bfly|up|down).b32", needs="warp", taint="own", pure=False)
def shuffle(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit an exchange of registers between lanes; p tells whether the source lane is in range."""
    member_mask(ins, 4)
    d, p = pair_items(ins.operands[0])
    a = e.src(ins.operands[1], "b32")
    lane, clamp = ins.operands[2], ins.operands[3]
    source, valid = e.temp(), e.temp()
    if isinstance(lane, Imm) and isinstance(clamp, Imm):
        e.line(f"{source}, {valid} = shuffle_constant(w, {int(lane.value) & 31}, {int(clamp.value)}, {m['m']!r})")
    else:
        e.line(f"{source}, {valid} = shuffle_lanes(w, {e.src(lane, 'u32')}, {e.src(clamp, 'u32')}, {m['m']!r})")
    if e.tainted:
        taint = e.taint_of([register for register in (ins.operands[1],) if hasattr(register, "bank")])  # type: ignore[misc]
        for register in (d, p):
            if register is not None:
                e.line(f"{e.taint(register)}[...] = {f'shuffle_take({taint}, {source}, w)' if taint and register is d else 'False'}")
    e.line(f"{e.dst(d, 'b32')}[...] = shuffle_take({a}, {source}, w)")
    if p is not None:
        e.line(f"{e.dst(p, 'pred')}[...] = {valid}")


def shuffle_source(mode: str, me: np.ndarray, lane: np.ndarray, clamp: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return source lanes and their validity as PTX defines shfl: c holds the segment mask in bits 8-12 and the clamp in bits 0-4."""
    segment = clamp >> 8 & 31
    limit = clamp & 31
    low = me & segment
    top = low | (limit & ~segment & 31)
    b = lane & 31
    source = {"idx": low | (b & ~segment & 31), "bfly": me ^ b, "up": me - b, "down": me + b}[mode]
    valid = source >= top if mode == "up" else source <= top
    return np.where(valid, source, me).astype(np.int64), valid


@runtime
def shuffle_constant(w: Window, lane: int, clamp: int, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of the source lanes in the window, and their validity, for constant operands."""
    key = (mode, lane, clamp)
    found = w.shuffles.get(key)
    if found is None:
        found = cache_shuffle(w, key, np.full(w.n, lane), np.full(w.n, clamp))
    return found


def cache_shuffle(w: Window, key: tuple[object, ...], lane: np.ndarray, clamp: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Compute what shuffle_lanes() returns and cache it in the window. key: begins with the mode."""
    source, valid = shuffle_source(str(key[0]), w.lane_in_warp, lane, clamp)
    if len(w.shuffles) >= MAX_SHUFFLES:
        w.shuffles.clear()
    found = w.shuffles[key] = positions(w, source), valid
    return found


@runtime
def shuffle_lanes(w: Window, lane: np.ndarray, clamp: np.ndarray, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of the source lanes in the window, and their validity, for operands in registers (nearly always the same)."""
    key = (mode, lane.tobytes(), clamp.tobytes())
    found = w.shuffles.get(key)
    if found is None:
        lanes = np.broadcast_to(lane, (w.n,)).astype(np.int64)
        found = cache_shuffle(w, key, lanes, np.broadcast_to(clamp, (w.n,)).astype(np.int64))
    return found


def positions(w: Window, source: np.ndarray) -> np.ndarray:
    """Return the position in the window of lane source[i] of lane i's warp; lane i itself where that lane is not there."""
    wanted = w.lanes - w.lane_in_warp + source
    found = np.searchsorted(w.lanes, wanted)
    found = np.minimum(found, w.n - 1)
    return np.where(w.lanes[found] == wanted, found, np.arange(w.n))


@runtime
def shuffle_take(value: np.ndarray, source: np.ndarray, w: Window) -> np.ndarray:
    """Return the values of the source lanes."""
    return value.take(source) if value.ndim else np.broadcast_to(value, (w.n,))


@op(r"vote.sync.(?P<m>any|all|uni).pred", r"vote.sync.(?P<m>ballot).b32", needs="warp", taint="own", pure=False)
def vote(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit a vote over the live lanes of a warp. An undefined predicate poisons the result of all lanes."""
    member_mask(ins, 2)
    source = e.src(ins.operands[1], "pred")
    if e.tainted and ins.operands[0] is not None:
        e.line(f"{e.taint(ins.operands[0])}[...] = vote_any(w, {e.taint(ins.operands[1]) or 'zeros(w.n, bool)'})")
    e.line(f"{e.dst(ins.operands[0], 'b32' if m['m'] == 'ballot' else 'pred')}[...] = vote_{m['m']}(w, {source})")


@op(r"match.any.sync.b(32|64)", r"match.(?P<all>all).sync.b(32|64)", needs="warp", taint="own", pure=False)
def match_lanes(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit the mask of the lanes with the same value; all: of all lanes, with a predicate, where all have it."""
    member_mask(ins, 2)
    value = ins.operands[1]
    d, p = pair_items(ins.operands[0])
    e.check_taint(registers_of(value), "a match")
    mask = e.temp()
    e.line(f"{mask} = matching_lanes(w, {e.src(value, 'b64' if ins.opcode.endswith('b64') else 'b32')}, {'all' in m.groupdict()})")
    for register, kind, result in ((d, "b32", mask), (p, "pred", f"{mask} != 0")):
        if register is not None:
            e.line(f"{e.dst(register, kind)}[...] = {result}")
            if e.tainted:
                e.line(f"{e.taint(register)}.fill(False)")


@runtime
def matching_lanes(w: Window, value: np.ndarray, of_all: bool) -> np.ndarray:
    """Return for each lane the mask of the lanes of its warp with its value; of_all: 0 unless all have it."""
    result = np.zeros(w.n, np.uint32)
    for index, values in per_warp(w, value):
        bits = (np.uint32(1) << w.lane_in_warp[index].astype(np.uint32)).astype(np.uint32)
        same = values[:, None] == values[None, :]
        masks = np.bitwise_or.reduce(np.where(same, bits[None, :], np.uint32(0)), axis=1)
        result[index] = masks if not of_all or bool(same.all()) else 0
    return result


def per_warp(w: Window, value: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return (positions, values) of each warp of the window."""
    value = np.broadcast_to(value, (w.n,))
    if len(w.warps) == 1:
        return [(np.arange(w.n), value)]
    warp = w.lanes // WARP
    return [(index, value[index]) for index in (np.flatnonzero(warp == number) for number in w.warps)]


@runtime
def vote_any(w: Window, value: np.ndarray) -> np.ndarray:
    """Return True where any lane of the warp votes true."""
    if w.whole:
        return np.repeat(np.broadcast_to(value, (w.n,)).reshape(-1, WARP).any(axis=1), WARP)
    result = np.zeros(w.n, bool)
    for index, votes in per_warp(w, value):
        result[index] = votes.any()
    return result


@runtime
def vote_all(w: Window, value: np.ndarray) -> np.ndarray:
    """Return True where all lanes of the warp vote true."""
    return ~vote_any(w, ~value)


@runtime
def vote_uni(w: Window, value: np.ndarray) -> np.ndarray:
    """Return True where all lanes of the warp vote alike."""
    return vote_all(w, value) | ~vote_any(w, value)


@runtime
def vote_ballot(w: Window, value: np.ndarray) -> np.ndarray:
    """Return the votes of the warp as bits."""
    if w.whole:
        bits = np.packbits(np.broadcast_to(value, (w.n,)), bitorder="little").view("<u4")
        return bits if len(bits) == 1 else np.repeat(bits, WARP)
    result = np.zeros(w.n, np.uint32)
    lane = w.lane_in_warp
    for index, votes in per_warp(w, value):
        result[index] = int(np.bitwise_or.reduce(np.where(votes, 1 << lane[index], 0)))
    return result


@op(r"redux.sync.(?P<f>min|max)(?P<n>.NaN)?.f32", needs="warp", taint="own", pure=False)
def reduce(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit the minimum or maximum over the live lanes of a warp. Without .NaN a NaN loses. An undefined value poisons all results."""
    member_mask(ins, 2)
    source = e.src(ins.operands[1], "f32")
    if e.tainted and ins.operands[0] is not None:
        e.line(f"{e.taint(ins.operands[0])}[...] = vote_any(w, {e.taint(ins.operands[1]) or 'zeros(w.n, bool)'})")
    function = e.constants.thing(elementwise.min_f32 if m["f"] == "min" else elementwise.max_f32)
    e.line(f"{e.dst(ins.operands[0], 'f32')}[...] = reduce_f32(w, {source}, {function}, {bool(m['n'])})")


@runtime
def reduce_f32(w: Window, value: np.ndarray, function: Callable[..., np.ndarray], nan: bool) -> np.ndarray:
    """Reduce all lanes of each warp with a function; return the result in every lane."""
    result = np.zeros(w.n, np.float32)
    for index, values in per_warp(w, value):
        result[index] = reduce_pairs(values, function, nan)
    return result


def reduce_pairs(values: np.ndarray, function: Callable[..., np.ndarray], nan: bool) -> np.ndarray:
    """Reduce all values with a function, halves against halves."""
    while len(values) > 1:
        half = len(values) // 2
        values = np.concatenate([function(values[:half], values[half : 2 * half], nan), values[2 * half :]])
    return elementwise.canonical_nan(values)[0]


@op(r"elect.sync", needs="warp", pure=False)
def elect(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit an election: p is true in the lowest live lane of each warp; d is its number."""
    member_mask(ins, 1)
    d, p = pair_items(ins.operands[0])
    if d is not None:
        e.line(f"{e.dst(d, 'b32')}[...] = elected(w)[1]")
    if p is not None:
        e.line(f"{e.dst(p, 'pred')}[...] = elected(w)[0]")


@runtime
def elected(w: Window) -> tuple[np.ndarray, np.ndarray]:
    """Return whether a lane is the lowest of its warp, and the number of the lowest."""
    cached = w.special.get("elected")
    if cached is None:
        chosen = np.zeros(w.n, bool)
        number = np.zeros(w.n, np.uint32)
        lane = w.lane_in_warp
        for index, lanes in per_warp(w, lane):
            chosen[index[0]] = True
            number[index] = lanes[0]
        cached = w.special["elected"] = (chosen, number)  # type: ignore[assignment]
    return cached  # type: ignore[return-value]


@op(r"bar.warp.sync", writes=(), pure=False, needs="warp")
def warp_sync(e: Emitter, ins: Instruction, m: Match) -> None:
    """Emit nothing: the lanes of a warp gather here before they go on."""
    member_mask(ins, 0)
