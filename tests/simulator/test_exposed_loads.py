"""Exposed loads: small programs whose main loop waits for a load too soon, late enough, or elsewhere, and an edited kernel."""

from __future__ import annotations

import pytest

from cute_mla.simulator.sass.exposed_loads import MIN_CLOCKS, exposed_loads, main_loops
from cute_mla.simulator.sass.flow import spans
from cute_mla.simulator.sass.listing import NO_BOARD, Control, Listing
from cute_mla.simulator.sass.loops import natural_loops
from tests.simulator.machine_code import edited, listing_of, program

Line = tuple[str, Control] | str  # an instruction, or a label


def control(stall: int, write: int = NO_BOARD, waits: int = 0) -> Control:
    return Control(stall, False, write, NO_BOARD, waits)


def labelled(*lines: Line) -> Listing:
    """Return a listing of instructions and labels."""
    labels: dict[str, int] = {}
    code: list[tuple[str, Control]] = []
    for line in lines:
        if isinstance(line, str):
            labels[line] = len(code)
        else:
            code.append(line)
    places = {f"`({name})": f"`(.L_{index})" for name, index in labels.items()}
    return program(*((next((text.replace(*place) for place in places.items() if place[0] in text), text), fields) for text, fields in code))


TRY = ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R9", control(2, write=1))
POLL: tuple[Line, ...] = (("FADD R8, R8, R9", control(1)), "SPIN", TRY, ("@!P0 BRA `(SPIN)", control(5, waits=2)))
LOAD = ("LDG.E R4, desc[UR4][R2.64]", control(4, write=0))
USE = ("FADD R5, R4, R4", control(2, waits=1))
AGAIN = ("@P1 BRA `(TILE)", control(5))
EXIT = ("EXIT", control(5))


def pause(clocks: int) -> list[Line]:
    """Return instructions that take so many stall clocks."""
    return [("NOP", control(min(10, clocks - done))) for done in range(0, clocks, 10)]


def clocks_of(listing: Listing) -> list[int]:
    return [found.clocks for found in exposed_loads(listing)]


def test_a_wait_soon_after_the_load_is_found() -> None:
    (found,) = exposed_loads(labelled("TILE", *POLL, LOAD, *pause(20), USE, AGAIN, EXIT))
    assert found.clocks == 24
    assert str(found) == "0x60 FADD R5, R4, R4 waits for 0x30 LDG.E R4, desc[UR4][R2.64] 24 stall clocks after its issue"


@pytest.mark.parametrize(("clocks", "expected"), [(MIN_CLOCKS - 5, [MIN_CLOCKS - 1]), (MIN_CLOCKS - 4, [])])
def test_a_wait_late_enough_is_not(clocks: int, expected: list[int]) -> None:
    assert clocks_of(labelled("TILE", *POLL, LOAD, *pause(clocks), USE, AGAIN, EXIT)) == expected


def test_the_wait_may_stand_in_the_next_iteration() -> None:
    # 4 of the load and 5 of the branch, then 1 of the sum, and 2 and 5 of the phase's test.
    assert clocks_of(labelled("TILE", *POLL, USE, *pause(60), LOAD, AGAIN, EXIT)) == [17]
    assert clocks_of(labelled("TILE", *POLL, USE, *pause(20), LOAD, *pause(140), AGAIN, EXIT)) == []


def test_the_shortest_path_counts() -> None:
    skip = ("@P2 BRA `(SOON)", control(5))
    assert clocks_of(labelled("TILE", *POLL, LOAD, skip, *pause(200), "SOON", USE, AGAIN, EXIT)) == [9]
    away = ("BRA `(SOON)", control(5))
    to_short = ("@P2 BRA `(SHORT)", control(5))
    assert clocks_of(labelled("TILE", *POLL, LOAD, to_short, *pause(60), away, "SHORT", *pause(10), "SOON", USE, AGAIN, EXIT)) == [19]


def test_a_wait_for_another_scoreboard_or_behind_the_loop_is_not_one() -> None:
    assert not clocks_of(labelled("TILE", *POLL, LOAD, ("FADD R5, R6, R6", control(2, waits=4)), *pause(150), AGAIN, USE, EXIT))


def test_only_a_main_loop_counts() -> None:
    assert not clocks_of(labelled("TILE", LOAD, USE, AGAIN, EXIT))  # nothing is waited for
    assert not clocks_of(labelled(*POLL, LOAD, USE, EXIT))  # no loop, apart from the one that polls
    # Around a tile's loop there is one over requests; its loads run once a request.
    outer = labelled("REQUEST", LOAD, USE, "TILE", *POLL, *pause(20), AGAIN, ("@P2 BRA `(REQUEST)", control(5)), EXIT)
    assert not clocks_of(outer)
    assert len(natural_loops(spans(outer))) == 3
    assert len(main_loops(outer.instructions, spans(outer))) == 1


def test_a_loop_inside_a_main_loop_belongs_to_it() -> None:
    inner = ("@P2 BRA `(ROWS)", control(5))
    assert clocks_of(labelled("TILE", *POLL, "ROWS", LOAD, USE, inner, AGAIN, EXIT)) == [4]


def test_a_wait_that_moves_up_in_a_built_kernel_is_found() -> None:
    listing = listing_of("sparse_decode_sm90_bf16_fp8_656_cluster2")
    assert not exposed_loads(listing)
    code, blocks = listing.instructions, spans(listing)
    inside = [
        index for loop in main_loops(code, blocks) for number in loop.blocks for index in range(blocks[number].start, blocks[number].stop)
    ]
    load = next(index for index in sorted(inside) if code[index].base == "LDG" and code[index].control.write_board != NO_BOARD)
    planted = edited(listing, load + 1, waits=code[load + 1].control.waits | 1 << code[load].control.write_board)
    (found,) = exposed_loads(planted)
    assert (found.load.address, found.waiter.address) == (code[load].address, code[load + 1].address)
