"""The static checks of control codes find whatever any path through the code does too early: random programs, walked with real predicates.

So a check while the code executes has nothing to add to them.
"""

from __future__ import annotations

import random
import re

import pytest

from cute_mla.simulator.sass.accesses import accesses
from cute_mla.simulator.sass.flow import is_never
from cute_mla.simulator.sass.latencies import check_latencies, least_distance
from cute_mla.simulator.sass.listing import BOARDS, NO_BOARD, Control, Listing, Target
from cute_mla.simulator.sass.scoreboards import PIPES, UNORDERED, ScoreboardCheck, comes_before
from tests.simulator.machine_code import program

PROGRAMS, WALKS, STEPS, LENGTH = 150, 8, 60, 14
REGISTERS, PREDICATES = 6, 2
VARIABLE = (
    "LDG.E {d}, desc[UR4][{a}.64]", "LDS {d}, [{a}]", "MUFU.EX2 {d}, {a}", "STS [{a}], {b}", "S2R {d}, SR_TID.X", "FENCE.VIEW.ASYNC.S",
)  # fmt: skip
FIXED = (
    "FADD {d}, {a}, {b}",
    "MOV {d}, {a}",
    "IMAD {d}, {a}, {b}, {d}",
    "ISETP.GE.AND {p}, PT, {a}, {b}, PT",
    "BAR.SYNC.DEFER_BLOCKING 0x0",
)


def drawn(draw: random.Random) -> Listing:
    """Draw a program: loads, arithmetic and branches under predicates, with any control codes."""
    lines = []
    for index in range(LENGTH):
        form = draw.choice((*VARIABLE, *FIXED, *FIXED, *["BRA `(.L_{t})"] * 3))
        names = {key: f"R{draw.randrange(2, 2 + REGISTERS) // 2 * 2}" for key in "dab"}
        code = form.format(
            p=f"P{draw.randrange(PREDICATES)}", t=draw.choice((draw.randrange(LENGTH), min(index + draw.randrange(2, 5), LENGTH))), **names
        )
        guard = draw.choice(("", "", "@P0 ", "@!P0 ", "@P1 "))
        write, read = (draw.choice((0, 1, NO_BOARD)) if form in VARIABLE else NO_BOARD for _ in range(2))
        waits = sum(1 << board for board in range(BOARDS) if draw.random() < 0.25)
        lines.append((guard + code, Control(draw.choice((1, 2, 3, 8)), False, write, read, waits)))
    return program(*lines, ("EXIT", Control(5, False, NO_BOARD, NO_BOARD, 0)))


def walk(check: ScoreboardCheck, listing: Listing, draw: random.Random) -> tuple[set[tuple[int, int, str]], set[tuple[int, int, str]]]:
    """Follow one path of one lane. Return what it does too early: by scoreboards, and by stall counts."""
    early: set[tuple[int, int, str]] = set()
    hasty: set[tuple[int, int, str]] = set()
    values = {f"P{number}": draw.random() < 0.5 for number in range(PREDICATES)}
    flying: dict[tuple[int, bool], int] = {}
    written: dict[str, tuple[int, int]] = {}  # by register: producer of fixed latency, and when it was issued
    place = clock = 0
    for _ in range(STEPS):
        ins, facts = listing.instructions[place], check.facts[place]
        flying = {key: boards for key, boards in flying.items() if not boards & facts.waits}
        executes = ins.guard is None or values[f"P{ins.guard.number}"] != ins.guard.negative
        for item in accesses(ins).reads:
            producer, when = written.get(item.name, (0, -100))
            if (executes or item.bank == "p") and clock - when < least_distance(listing.instructions[producer], ins, item):
                hasty.add((place, producer, item.name))
        for earlier, is_result in flying if executes else ():
            other = check.facts[earlier]
            hit = other.results & (facts.reads | facts.writes) if is_result else other.operands & facts.writes
            if hit and (is_result or other.pipe != facts.pipe or ins.base not in PIPES):
                early.add((place, earlier, "result" if is_result else "operand"))
        for earlier, is_result in flying if ins.base in PIPES else ():
            other = check.facts[earlier]
            in_order = comes_before(listing.instructions[earlier], ins) if is_result else other.pipe == facts.pipe
            if in_order and not (other.result_boards if is_result else other.read_boards):
                flying[earlier, is_result] |= facts.result_boards | (0 if is_result else facts.read_boards)
        if executes:
            values.update({name: draw.random() < 0.5 for name in facts.written_predicates})
            if facts.pipe is not None and facts.results:
                flying[place, True] = facts.result_boards
            if facts.pipe is not None and facts.operands:
                flying[place, False] = facts.result_boards | facts.read_boards
            for item in accesses(ins).writes:
                written.pop(item.name, None)
                if ins.base not in PIPES and ins.base not in UNORDERED and not is_never(ins):
                    written[item.name] = place, clock
        if ins.base == "EXIT":
            break
        targets = [operand.label for operand in ins.operands if isinstance(operand, Target)]
        clock += max(ins.control.stall, 1)
        place = listing.index(targets[0]) if executes and targets else place + 1
    return early, hasty


@pytest.mark.parametrize("seed", range(4))
def test_whatever_a_path_does_too_early_is_found_without_executing(seed: int) -> None:
    draw = random.Random(seed)
    walked = 0
    for _ in range(PROGRAMS):
        listing = drawn(draw)
        check = ScoreboardCheck(listing)
        index = {ins.address: number for number, ins in enumerate(listing.instructions)}
        early = {(index[item.ins.address], index[item.earlier.address], item.what) for item in check.hazards()}
        hasty = {(index[item.ins.address], index[item.producer.address], item.register) for item in check_latencies(listing)}
        for _ in range(WALKS):
            found = walk(check, listing, draw)
            walked += len(found[0]) + len(found[1])
            assert found[0] <= early, "\n".join(ins.place for ins in listing.instructions)
            assert found[1] <= hasty, "\n".join(ins.place for ins in listing.instructions)
    assert walked > 10 * PROGRAMS


def test_an_earlier_turn_of_a_loop_had_another_predicate() -> None:
    """The load of the first turn is in flight when the predicate has changed and the second turn takes the other half."""
    board = Control(2, False, 0, NO_BOARD, 0)
    plain = Control(13, False, NO_BOARD, NO_BOARD, 0)
    listing = program(
        ("@P0 LDG.E R4, desc[UR4][R2.64]", board),
        ("@!P0 MOV R4, R6", plain),
        ("ISETP.GE.AND P0, PT, R8, R9, PT", plain),
        ("BRA `(.L_0)", plain),
        ("EXIT", plain),
    )
    texts = [str(hazard) for hazard in ScoreboardCheck(listing).hazards()]
    assert any(re.match(r"0x10 @!P0 MOV R4, R6: it waits for no scoreboard that guards R4", text) for text in texts)
